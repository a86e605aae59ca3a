//! Notices that the key file has changed.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::KeyStore;
use crate::config::ConfigErrors;

/// What of a file differs after it was written or replaced: inode, length and time of the last change.
type Stamp = Option<(u64, u64, i64, i64)>;

#[derive(Debug)]
pub struct KeyWatch {
    key_file: PathBuf,
    secret_file: PathBuf,
    seen: (Stamp, Stamp),
}

impl KeyWatch {
    /// Starts with the files as they are: to be made before they are read for the first time.
    pub fn new(key_file: PathBuf, secret_file: PathBuf) -> Self {
        let seen = (stamp(&key_file), stamp(&secret_file));
        Self { key_file, secret_file, seen }
    }

    /// Whether there is a key file. Without one, API keys are not in use.
    pub fn is_in_use(&self) -> bool {
        self.seen.0.is_some()
    }

    /// The keys, when a file has changed since they were last read. An error is given once for each change.
    pub fn changed(&mut self) -> Result<Option<KeyStore>, ConfigErrors> {
        let now = (stamp(&self.key_file), stamp(&self.secret_file));
        if now == self.seen {
            return Ok(None);
        }
        self.seen = now;
        KeyStore::load(&self.key_file, &self.secret_file).map(Some)
    }
}

fn stamp(path: &Path) -> Stamp {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.ino(), metadata.len(), metadata.ctime(), metadata.ctime_nsec()))
}

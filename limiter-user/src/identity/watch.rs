//! Notices that the key file has changed.

use std::path::PathBuf;

use super::KeyStore;
use crate::{
    config::ConfigErrors,
    watch::{Stamp, stamp},
};

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

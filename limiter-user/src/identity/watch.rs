//! Notices that the key file has changed.

use std::path::PathBuf;

use super::KeyStore;
use crate::{
    config::ConfigErrors,
    watch::{AtStart, NotInForce, Stamp, stamp},
};

#[derive(Debug)]
pub struct KeyWatch {
    key_file: PathBuf,
    secret_file: PathBuf,
    /// The files as they were when they were last read.
    read: (Stamp, Stamp),
    /// The files as they were at the last call.
    seen: (Stamp, Stamp),
    /// What was last said, so that it is not said again every second.
    said: Option<NotInForce>,
}

impl KeyWatch {
    /// Starts with the files as they are: to be made before they are read for the first time.
    pub fn new(key_file: PathBuf, secret_file: PathBuf) -> Self {
        let seen = (stamp(&key_file), stamp(&secret_file));
        Self { key_file, secret_file, read: seen, seen, said: None }
    }

    /// Whether there is a key file. Without one, API keys are not in use.
    pub fn is_in_use(&self) -> bool {
        self.read.0.is_some()
    }

    /// What is wrong with the files as they are, if anything is.
    pub const fn error(&self) -> Option<&NotInForce> {
        self.said.as_ref()
    }

    /// The keys, when a file has changed since they were last read, and stood still for a call: somebody may be in the
    /// middle of writing. Tries again until the files can be read; each error is given once.
    ///
    /// A file that is gone or empty is a mishap (an editor that moves it away, a full disk), and no wish to lock every
    /// client out.
    pub fn changed(&mut self) -> Result<Option<KeyStore>, ConfigErrors> {
        let now = (stamp(&self.key_file), stamp(&self.secret_file));
        let moves = std::mem::replace(&mut self.seen, now) != now;
        if now == self.read {
            // Whatever was wrong is gone.
            self.said = None;
        }
        if moves || now == self.read {
            return Ok(None);
        }
        let is_lost = self.read.0.is_some() && now.0.is_none_or(|(_, _, len, ..)| len == 0);
        let (read, at_start) = if is_lost {
            let error = ConfigErrors::of_file(&self.key_file, "identity.key_file", "is gone or empty", false);
            (Err(error), AtStart::TakesNothing)
        } else {
            (KeyStore::load(&self.key_file, &self.secret_file), AtStart::Fails)
        };
        match read {
            Ok(keys) => {
                self.read = now;
                self.said = None;
                Ok(Some(keys))
            }
            Err(errors) => {
                let said = self.said.replace(NotInForce { error: errors.to_string(), at_start });
                if said == self.said { Ok(None) } else { Err(errors) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use limiter_common::time::UnixMicros;

    use super::*;
    use crate::identity::key_file;

    /// What two calls say, the first of which may find the files in motion.
    fn settled(watch: &mut KeyWatch) -> Result<Option<usize>, String> {
        let len = |keys: Option<KeyStore>| keys.map(|keys| keys.len());
        match watch.changed().map_err(|errors| errors.to_string())? {
            None => watch.changed().map(len).map_err(|errors| errors.to_string()),
            some => Ok(len(some)),
        }
    }

    #[test]
    fn only_what_stands_still_and_has_keys_replaces_the_keys() {
        let folder = tempfile::tempdir().unwrap();
        let (keys, secret) = (folder.path().join("keys.toml"), folder.path().join("keys.secret"));
        let add = || key_file::add(&keys, &secret, None, None, UnixMicros::new(0)).unwrap();
        add();
        let mut watch = KeyWatch::new(keys.clone(), secret.clone());
        assert_eq!(settled(&mut watch), Ok(None));
        add();
        assert!(watch.changed().unwrap().is_none(), "not before it stands still");
        assert_eq!(settled(&mut watch), Ok(Some(2)));

        let text = fs::read_to_string(&keys).unwrap();
        for mishap in [|keys: &Path| fs::remove_file(keys).unwrap(), |keys: &Path| fs::write(keys, "").unwrap()] {
            mishap(&keys);
            assert!(settled(&mut watch).unwrap_err().contains("is gone or empty"));
            assert_eq!(watch.error().map(|error| error.at_start), Some(AtStart::TakesNothing));
            assert_eq!(settled(&mut watch), Ok(None), "said once");
            fs::write(&keys, &text).unwrap();
            assert_eq!(settled(&mut watch), Ok(Some(2)));
        }

        // An error that passes, although no file changes any more.
        let hidden = folder.path().join("hidden");
        add();
        fs::rename(&secret, &hidden).unwrap();
        assert!(settled(&mut watch).is_err());
        assert_eq!(watch.error().map(|error| error.at_start), Some(AtStart::Fails));
        fs::rename(&hidden, &secret).unwrap();
        assert_eq!(settled(&mut watch), Ok(Some(3)));
    }
}

//! Notices that the keys of tokens have changed.

use std::sync::Arc;

use super::{Jwt, Refusals};
use crate::{
    config::{ConfigErrors, JwtConfig},
    watch::{AtStart, FileWatch, NotInForce},
};

#[derive(Debug)]
pub struct JwtWatch {
    config: JwtConfig,
    files: Vec<FileWatch>,
    /// What was last said of files that cannot be used, while they cannot.
    said: Option<NotInForce>,
    refusals: Arc<Refusals>,
}

impl JwtWatch {
    /// Starts with the files as they are: to be made before they are read for the first time.
    pub fn new(config: JwtConfig) -> Self {
        let files = config.files().map(|file| FileWatch::new(file.to_owned())).collect();
        Self { config, files, said: None, refusals: Arc::default() }
    }

    /// Reads the keys as they are.
    pub fn load(&self) -> Result<Jwt, ConfigErrors> {
        Jwt::counted_by(&self.config, Arc::clone(&self.refusals))
    }

    /// What was refused with any of the keys that this has read.
    pub fn refusals(&self) -> Arc<Refusals> {
        Arc::clone(&self.refusals)
    }

    /// What is wrong with the files as they are, if anything is.
    pub const fn error(&self) -> Option<&NotInForce> {
        self.said.as_ref()
    }

    /// The keys, when a file has changed and stood still for a call. Tries again until the files can be read; each error is
    /// given once.
    pub fn changed(&mut self) -> Result<Option<Jwt>, ConfigErrors> {
        let mut has_settled = false;
        for file in &mut self.files {
            has_settled |= file.has_settled();
        }
        if !has_settled && self.said.is_none() {
            return Ok(None);
        }
        self.files.iter_mut().for_each(FileWatch::mark_read);
        match self.load() {
            Ok(jwt) => {
                self.said = None;
                Ok(Some(jwt))
            }
            Err(errors) => {
                let said = self.said.replace(NotInForce { error: errors.to_string(), at_start: AtStart::Fails });
                if said == self.said { Ok(None) } else { Err(errors) }
            }
        }
    }
}

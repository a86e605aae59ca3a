//! The copy on disk: read at a start without Redis, written when keys have changed.

use std::{sync::Arc, time::Duration};

use super::KeyFollower;
use crate::{
    clock::Stopwatch,
    identity::{
        api_key::KeySecret,
        key_copy::{self, Copied},
    },
};

impl KeyFollower {
    pub(super) fn read_copy(&mut self) {
        let Some(secret) = &self.secret else { return };
        match key_copy::read(&self.copy_file, &secret.fingerprint(), &self.origin) {
            Ok(Some(Copied { place, entries })) => {
                self.entries = entries;
                self.place = place;
                self.status.state.lock().loaded = true;
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(target: "limiter::api", file = %self.copy_file.display(), error,
                    "the copy of the API keys cannot be used");
            }
        }
    }

    /// Writes the copy, if anything changed, in the background, unless one was written within `pause`.
    pub(super) async fn copy(&mut self, pause: Duration) {
        let is_running = self.copying.as_ref().is_some_and(|copying| !copying.is_finished());
        if !self.uncopied
            || (is_running && pause > Duration::ZERO)
            || self.copied.is_some_and(|copied| copied.elapsed() < pause)
        {
            return;
        }
        let Some(secret) = self.secret.as_ref().map(KeySecret::fingerprint) else { return };
        if let Some(copying) = self.copying.take() {
            // The last copy has to be the newest.
            drop(copying.await);
        }
        self.uncopied = false;
        self.copied = Some(Stopwatch::start());
        let (path, server) = (self.copy_file.clone(), Arc::clone(&self.status.server));
        let copied = Copied { place: self.place.clone(), entries: self.entries.clone() };
        let said = Arc::clone(&self.said.copy);
        self.copying = Some(tokio::task::spawn_blocking(move || {
            let error = key_copy::write(&path, &server, secret, &copied).err().map(|error| error.to_string());
            let mut said = said.lock();
            if let Some(error) = error.as_ref().filter(|error| said.as_ref() != Some(error)) {
                tracing::warn!(target: "limiter::api", file = %path.display(), error,
                    "the copy of the API keys cannot be written: a start without Redis would know none");
            }
            *said = error;
        }));
    }
}

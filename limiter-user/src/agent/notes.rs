//! Keeps the status up to date on what is right and yet may surprise: what keys and policy say of each other, above all.

use std::sync::Arc;

use crate::{
    active::SharedActive,
    cli::validate,
    config::Config,
    identity::{KeyStore, KnownKeys},
    status::StatusSource,
};

pub(super) struct Notes {
    pub(super) config: Config,
    pub(super) active: SharedActive,
    pub(super) keys: KnownKeys,
    pub(super) status: Arc<StatusSource>,
    /// The policy and the keys that were looked at last.
    looked_at: Option<(u64, u64)>,
    /// What is in the log already.
    said: Vec<String>,
}

impl std::fmt::Debug for Notes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Notes").field("said", &self.said).finish_non_exhaustive()
    }
}

impl Notes {
    /// `said` was told at the start.
    pub(super) fn new(
        config: Config,
        active: SharedActive,
        keys: KnownKeys,
        status: Arc<StatusSource>,
        said: Vec<String>,
    ) -> Self {
        Self { config, active, keys, status, looked_at: None, said }
    }

    /// To be called at intervals, since there may be a million keys: looks only when the policy or a key is another.
    pub(super) fn refresh(&mut self) {
        // Before that it is not known which keys there are.
        if !self.status.is_ready() {
            return;
        }
        let active = self.active.load();
        let look = |keys: &KeyStore| {
            let looked_at = Some((active.generation, keys.generation()));
            (looked_at != self.looked_at)
                .then(|| (looked_at, validate::notes(&self.config, &active.policy, Some(keys))))
        };
        let Some((looked_at, notes)) = self.keys.with_store(look) else { return };
        self.looked_at = looked_at;
        for note in notes.iter().filter(|note| !self.said.contains(note)) {
            tracing::warn!(target: "limiter", "{note}");
        }
        self.said.clone_from(&notes);
        self.status.set_notes(notes);
    }
}

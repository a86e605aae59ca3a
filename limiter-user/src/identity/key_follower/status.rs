//! What others are told of the keys that are followed.

use std::sync::Arc;

use parking_lot::Mutex;

/// How following goes.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct FollowedState {
    /// Whether Redis answered the last look.
    pub connected: bool,
    /// Whether keys are known: from Redis, or from the copy.
    pub loaded: bool,
    pub keys: usize,
    /// What hinders, other than that Redis does not answer.
    pub problem: Option<String>,
    /// Times that Redis was found to have lost keys.
    pub losses: u64,
    /// Records in Redis that cannot be read.
    pub unreadable: usize,
}

/// Where others read it.
#[derive(Clone, Debug)]
pub struct FollowedKeys {
    pub(super) server: Arc<str>,
    pub(super) state: Arc<Mutex<FollowedState>>,
}

impl FollowedKeys {
    /// Address without credentials.
    pub fn server(&self) -> &str {
        &self.server
    }

    pub fn get(&self) -> FollowedState {
        self.state.lock().clone()
    }

    /// What does not work.
    pub fn degraded_by(&self) -> Option<String> {
        let state = self.state.lock();
        match (&state.problem, state.connected, state.loaded) {
            (Some(problem), ..) => Some(format!("API keys in Redis: {problem}")),
            (None, true, true) => None,
            (None, _, true) => {
                Some(format!("API keys: Redis does not answer, the {} last known ones are in force", state.keys))
            }
            (None, _, false) => Some("API keys: Redis does not answer, and none are known yet".to_owned()),
        }
    }
}

//! What became of what one client sent, as the client itself sees it.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) sent: u64,
    /// Answered 200; or, of packets, arrived.
    pub(super) let_in: u64,
    /// Answered 429.
    pub(super) denied: u64,
    /// Answered with another status.
    pub(super) other: u64,
    /// The longest that an answer of 200 took.
    pub(super) slowest: Duration,
}

impl Counts {
    /// Never answered; or, of packets, not arrived.
    pub(super) fn kept_out(&self) -> u64 {
        self.sent.saturating_sub(self.let_in + self.denied + self.other)
    }
}

#[derive(Debug, Default)]
pub(super) struct Tally(Mutex<Counts>);

impl Tally {
    pub(super) fn add(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn read(&self) -> Counts {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

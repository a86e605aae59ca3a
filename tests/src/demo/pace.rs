//! When the threads of the demonstration act, and when they end.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use limiter_user::clock::Stopwatch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    Done,
    Interrupted,
}

/// Tells every thread to end. The first reason stays.
#[derive(Debug, Default)]
pub(super) struct Stop {
    reason: Mutex<Option<Reason>>,
    changed: Condvar,
}

impl Stop {
    pub(super) fn interrupt(&self) {
        self.set(Reason::Interrupted);
    }

    pub(super) fn is_interrupted(&self) -> bool {
        *self.lock() == Some(Reason::Interrupted)
    }

    /// Ends everything when dropped, so that no thread outlives a display that failed.
    pub(super) fn on_drop(&self) -> impl Drop {
        OnDrop(self)
    }

    /// False as soon as it is time to end, true when `time` has passed without that.
    pub(super) fn wait(&self, time: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), time, |reason| reason.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.is_none()
    }

    fn set(&self, reason: Reason) {
        self.lock().get_or_insert(reason);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Option<Reason>> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct OnDrop<'a>(&'a Stop);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.set(Reason::Done);
    }
}

/// A regular beat. One that comes too late is left out: nothing is made up for in a burst.
#[derive(Debug)]
pub(super) struct Pace {
    every: Duration,
    clock: Stopwatch,
    next: Duration,
}

impl Pace {
    /// The first beat comes after one period.
    pub(super) fn every(every: Duration) -> Self {
        Self { every, clock: Stopwatch::start(), next: every }
    }

    /// Waits for the next beat; false when it is time to end.
    pub(super) fn tick(&mut self, stop: &Stop) -> bool {
        let goes_on = stop.wait(self.next.saturating_sub(self.clock.elapsed()));
        self.next = (self.next + self.every).max(self.clock.elapsed());
        goes_on
    }
}

//! Room for what logs remember: one counter may have ten thousand admissions, where others are of one size.

use std::sync::atomic::{AtomicUsize, Ordering};

use limiter_common::sliding_log;

/// Admissions that take as much memory as a counter.
const OF_ONE_COUNTER: usize = 4;
/// Longest logs that fit in however few counters there may be.
const LONGEST_AT_LEAST: usize = 8;

/// Of all logs of a store together, in admissions. What is beyond it was added since it was looked at last.
#[derive(Debug)]
pub(in crate::store) struct LogRoom {
    used: AtomicUsize,
    most: usize,
}

impl LogRoom {
    /// As much again as so many counters take.
    pub(in crate::store) fn beside(max_counters: usize) -> Self {
        let longest = usize::try_from(sliding_log::MAX_CEILING).unwrap_or(usize::MAX);
        let most = max_counters.saturating_mul(OF_ONE_COUNTER).max(longest.saturating_mul(LONGEST_AT_LEAST));
        Self { used: AtomicUsize::new(0), most }
    }

    pub(in crate::store) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub(in crate::store) fn is_exceeded(&self) -> bool {
        self.used() > self.most
    }

    /// One log takes so much, instead of so much before.
    pub(super) fn change(&self, before: usize, now: usize) {
        if now >= before {
            self.used.fetch_add(now - before, Ordering::Relaxed);
        } else {
            self.used.fetch_sub(before - now, Ordering::Relaxed);
        }
    }
}

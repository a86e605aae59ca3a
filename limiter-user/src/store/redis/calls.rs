//! Counts and times of calls, for metrics.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::store::StoreError;

/// Upper bounds of the buckets of call durations, in microseconds; one more bucket holds what is above.
pub const DURATION_BOUNDS_US: [u64; 10] = [100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000];

#[derive(Debug, Default)]
pub(super) struct Calls {
    ok: AtomicU64,
    timeout: AtomicU64,
    unavailable: AtomicU64,
    bad_reply: AtomicU64,
    scripts_loaded: AtomicU64,
    replaced_values: AtomicU64,
    restored_counters: AtomicU64,
    duration_us: AtomicU64,
    buckets: [AtomicU64; DURATION_BOUNDS_US.len() + 1],
}

/// A snapshot of [`RedisStore::calls`](super::RedisStore::calls).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallStats {
    pub ok: u64,
    pub timeout: u64,
    pub unavailable: u64,
    pub bad_reply: u64,
    /// Times that Redis did not know a script.
    pub scripts_loaded: u64,
    /// Keys that held something that is no counter.
    pub replaced_values: u64,
    /// Counters that this node knew more of than Redis, which had lost them.
    pub restored_counters: u64,
    /// Of all calls together.
    pub duration_us: u64,
    /// Calls by duration, not cumulated; see [`DURATION_BOUNDS_US`].
    pub buckets: [u64; DURATION_BOUNDS_US.len() + 1],
}

impl Calls {
    /// One call, however many commands were in it.
    pub(super) fn record<T>(&self, result: &Result<T, StoreError>, duration: Duration) {
        let counter = match result {
            Ok(_) => &self.ok,
            Err(StoreError::Timeout { .. }) => &self.timeout,
            Err(StoreError::Unavailable { .. }) => &self.unavailable,
            Err(StoreError::BadReply { .. }) => &self.bad_reply,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.duration_us.fetch_add(us, Ordering::Relaxed);
        self.buckets[DURATION_BOUNDS_US.partition_point(|&bound| bound < us)].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn script_loaded(&self) {
        self.scripts_loaded.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn values_replaced(&self, count: u64) {
        self.replaced_values.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn counters_restored(&self, count: u64) {
        self.restored_counters.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> CallStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CallStats {
            ok: load(&self.ok),
            timeout: load(&self.timeout),
            unavailable: load(&self.unavailable),
            bad_reply: load(&self.bad_reply),
            scripts_loaded: load(&self.scripts_loaded),
            replaced_values: load(&self.replaced_values),
            restored_counters: load(&self.restored_counters),
            duration_us: load(&self.duration_us),
            buckets: std::array::from_fn(|bucket| load(&self.buckets[bucket])),
        }
    }
}

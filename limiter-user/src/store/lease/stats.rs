//! How well leases serve, for metrics.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(super) struct Counts {
    hits: AtomicU64,
    misses: AtomicU64,
    refusals: AtomicU64,
    lent: AtomicU64,
    returned: AtomicU64,
    expired: AtomicU64,
}

/// A snapshot of [`Leases::stats`](super::Leases::stats).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseStats {
    /// Times that a request found its cost among what was held, and that it had to wait for Redis.
    pub hits: u64,
    pub misses: u64,
    /// Times that one was refused by what Redis had said before.
    pub refusals: u64,
    /// Units that Redis lent, that were given back while they could be used, and that were left when their window was over.
    pub lent: u64,
    pub returned: u64,
    pub expired: u64,
}

impl Counts {
    pub(super) fn hit(&self) {
        self.hits.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn missed(&self) {
        self.misses.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn refused(&self) {
        self.refusals.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn lent(&self, units: u64) {
        self.lent.fetch_add(units, Ordering::Relaxed);
    }

    pub(super) fn returned(&self, units: u64) {
        self.returned.fetch_add(units, Ordering::Relaxed);
    }

    pub(super) fn expired(&self, units: u64) {
        self.expired.fetch_add(units, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> LeaseStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LeaseStats {
            hits: load(&self.hits),
            misses: load(&self.misses),
            refusals: load(&self.refusals),
            lent: load(&self.lent),
            returned: load(&self.returned),
            expired: load(&self.expired),
        }
    }
}

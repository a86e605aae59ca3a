//! Counters that come near their ceilings, which other nodes should hear of before the interval is over.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

use tokio::sync::Notify;

use crate::store::fleet::Fleet;

/// Told by requests, heard by whoever shares the counters.
#[derive(Debug, Default)]
pub(super) struct Near {
    is_told: AtomicBool,
    told: Notify,
    fleet: OnceLock<Fleet>,
}

impl Near {
    /// A request was charged: so much remains, and so much of what this node admitted nobody else has heard of. If the others
    /// have admitted as much meanwhile, it may be more than what remains. Where nothing remains, nobody admits more by it.
    #[inline]
    pub(super) fn consider(&self, remaining: u64, untold: u64) {
        if remaining != 0 && untold != 0 && remaining < untold.saturating_mul(self.nodes()) {
            self.tell();
        }
    }

    fn nodes(&self) -> u64 {
        self.fleet.get().map_or(Fleet::UNHEARD, Fleet::reckoned)
    }

    /// The first is meant.
    pub(super) fn is_of(&self, fleet: &Fleet) {
        self.fleet.get_or_init(|| fleet.clone());
    }

    fn tell(&self) {
        if !self.is_told.load(Ordering::Relaxed) && !self.is_told.swap(true, Ordering::Relaxed) {
            self.told.notify_one();
        }
    }

    pub(super) async fn heard(&self) {
        self.told.notified().await;
    }

    /// What is near by now is about to be shared.
    pub(super) fn begin(&self) {
        self.is_told.store(false, Ordering::Relaxed);
    }
}

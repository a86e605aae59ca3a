//! How many nodes there are.

use std::sync::atomic::{AtomicU32, Ordering};

/// Until one has heard.
const UNKNOWN: u32 = 4;

/// Of this process: whatever shares counters in it is one node among the same others.
static LIVE_NODES: AtomicU32 = AtomicU32::new(UNKNOWN);

/// How many nodes use a counter, as far as one is known to the others.
///
/// No limit depends on it ([`RedisStore::live_nodes`](super::redis::RedisStore::live_nodes) is for that). It decides how large a
/// lease may be while little is left, how soon counters near their ceilings are shared, and what is said of the most that
/// `async` may let through.
#[inline]
pub fn live_nodes() -> u64 {
    u64::from(LIVE_NODES.load(Ordering::Relaxed))
}

pub(super) fn heard(live_nodes: u32) {
    LIVE_NODES.store(live_nodes.max(1), Ordering::Relaxed);
}

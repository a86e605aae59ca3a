//! Counters in this process: what the request path decides with.
//!
//! Architecture invariant: deciding never waits for I/O, never allocates for a counter that exists, and the memory is
//! bounded by `max_counters` whatever clients send.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use limiter_common::time::UnixMicros;
use parking_lot::{Mutex, MutexGuard};

pub use self::{
    crowding::Crowding,
    own::OwnPart,
    watch::{Moment, Watched},
};
use self::{index::KeyHash, near::Near, shard::Shard, watch::Changes};
use super::{
    At, Cell, CellOutcome, CellRef, Charge, CounterKey, Store, StoreError,
    algorithm::View,
    counter::{Adopts, Heard, LogRoom, OwnTotals, SharedCounts},
    fleet::Fleet,
};
use crate::clock::Clock;

mod adopt;
mod crowding;
mod decide;
mod index;
mod near;
mod own;
mod shard;
#[cfg(test)]
mod tests;
mod watch;

/// Enough that two cores rarely want the same lock.
const MAX_SHARDS: usize = 64;
/// Below this many counters a shard, fewer shards: a small bound must not evict by bad luck, and one identity's counters
/// of all rules are in one shard.
const MIN_SHARD_CAPACITY: usize = 1024;
/// Slots that one lock is held for during a sweep: a few microseconds.
const SWEEP_STEPS: usize = 512;
/// Calls of [`MemoryStore::sweep`] that look at everything once.
const SWEEPS_PER_ROUND: usize = 32;
/// Of each shard, how often a sweep looks for a log to give up.
const LOOKS_FOR_LOGS: usize = 256;
/// Cells of a request up to which deciding it does not allocate.
pub const INLINE_CELLS: usize = 32;

/// Numbers about the whole store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    pub counters: usize,
    pub capacity: usize,
    /// Admissions of logs that there is memory for.
    pub logged: usize,
    /// Counters that wait to be sent to the shared store.
    pub queued: usize,
    /// Counters given up because the store was full.
    pub evicted: u64,
    /// Counters removed because they had nothing to say any more.
    pub expired: u64,
    /// Own units that were not confirmed by the shared store before their windows were over.
    pub late_units: u64,
    /// The same, lost with counters that were given up.
    pub evicted_unconfirmed_units: u64,
}

/// How far a walk through all counters has come.
#[derive(Clone, Copy, Debug, Default)]
pub struct WalkedTo {
    shard: usize,
    slot: usize,
}

pub struct MemoryStore {
    clock: Arc<dyn Clock>,
    shards: Box<[Locked]>,
    near: Near,
    changes: Arc<Changes>,
    logs: Arc<LogRoom>,
    capacity: usize,
}

/// Apart from its neighbours, so that two threads with different shards do not wait for each other's cache lines.
#[repr(align(128))]
struct Locked(Mutex<Shard>);

impl Locked {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, Shard> {
        self.0.lock()
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// A store of one node alone.
    pub fn new(clock: Arc<dyn Clock>, max_counters: usize) -> Self {
        Self::build(clock, max_counters, false)
    }

    /// A store that keeps account of what other nodes have not heard yet; see [`super::sync`].
    pub fn shared(clock: Arc<dyn Clock>, max_counters: usize) -> Self {
        Self::build(clock, max_counters, true)
    }

    fn build(clock: Arc<dyn Clock>, max_counters: usize, shared: bool) -> Self {
        let max_counters = max_counters.max(1);
        let wanted = (max_counters / MIN_SHARD_CAPACITY).clamp(1, MAX_SHARDS);
        // The power of two below, so that the shards' capacities add up to at most `max_counters`.
        let count = 1 << wanted.ilog2();
        // Another for each store, since the tags of counters come of it: the operating system's.
        let random = RandomState::new();
        let (changes, logs) = (Arc::new(Changes::new()), Arc::new(LogRoom::beside(max_counters)));
        let shard = |number: usize| {
            let seed = random.hash_one(number);
            Shard::new(max_counters / count, shared, seed, Arc::clone(&changes), Arc::clone(&logs))
        };
        let shard = |number| Locked(Mutex::new(shard(number)));
        let (shards, near) = ((0..count).map(shard).collect(), Near::default());
        Self { clock, shards, near, changes, logs, capacity: max_counters }
    }

    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// The most counters that it may hold.
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    fn shard_of(&self, hash: KeyHash) -> MutexGuard<'_, Shard> {
        self.shards[hash.shard(self.shards.len())].lock()
    }

    /// Removes some of the counters that have expired; all of them within 32 calls. Gives up the longest logs where they take
    /// more memory than all of them may. To be called once a second.
    pub fn sweep(&self, now: UnixMicros) -> usize {
        let mut removed = 0;
        for shard in &self.shards {
            let mut left = (shard.lock().slots() / SWEEPS_PER_ROUND).max(SWEEP_STEPS);
            while left > 0 {
                let steps = left.min(SWEEP_STEPS);
                removed += shard.lock().sweep(steps, now.get());
                left -= steps;
            }
        }
        self.shorten_logs();
        removed
    }

    fn shorten_logs(&self) {
        for _ in 0..LOOKS_FOR_LOGS {
            for shard in &self.shards {
                if !self.logs.is_exceeded() {
                    return;
                }
                shard.lock().give_up_log(SWEEP_STEPS);
            }
        }
    }

    /// Until a counter has come near its ceiling, so that other nodes should hear of it soon.
    pub async fn nears_a_ceiling(&self) {
        self.near.heard().await;
    }

    /// With whom the counters are shared.
    pub fn is_of(&self, fleet: &Fleet) {
        self.near.is_of(fleet);
    }

    /// Everything that is queued is about to be shared.
    pub fn begin_sharing(&self) {
        self.near.begin();
    }

    /// Takes counters that other nodes have not heard of out of the queue, at most `max`, into `out`.
    ///
    /// Each must come back through [`Self::apply`] or [`Self::requeue`].
    pub fn take_dirty(&self, now: UnixMicros, max: usize, out: &mut Vec<OwnTotals>) {
        for shard in &self.shards {
            let left = max.saturating_sub(out.len());
            if left == 0 {
                return;
            }
            shard.lock().take_queued(now.get(), left, out);
        }
    }

    /// Takes what the shared store answered to `sent` at `now`.
    pub fn apply(&self, sent: &OwnTotals, shared: &SharedCounts, now: UnixMicros, adopts: Adopts) {
        let hash = KeyHash::of_key(&sent.key);
        self.shard_of(hash).learn(hash, sent, shared, now.get(), adopts);
    }

    /// Takes what a decision that the shared store made at `now` left of a counter, for when it cannot be asked.
    pub fn inform(&self, cell: &CellRef<'_>, view: View, now: UnixMicros) {
        let hash = KeyHash::of(cell);
        self.shard_of(hash).inform(hash, cell, view, now.get());
    }

    /// Puts a counter back into the queue: what was sent may not have arrived.
    pub fn requeue(&self, key: &CounterKey) {
        let hash = KeyHash::of_key(key);
        self.shard_of(hash).requeue(hash, key);
    }

    /// Queues every counter that holds counts of a live window, for a shared store that has lost them. Returns the
    /// length of the queue.
    pub fn queue_live(&self, now: UnixMicros, is_wanted: &dyn Fn(&CounterKey) -> bool) -> usize {
        let mut queued = 0;
        for shard in &self.shards {
            let mut from = Some(0);
            while let Some(begin) = from {
                // The lock is given back in between, as in a sweep.
                let mut shard = shard.lock();
                from = shard.queue_live(begin, SWEEP_STEPS, now.get(), is_wanted);
                if from.is_none() {
                    queued += shard.queued();
                }
            }
        }
        queued
    }

    /// Puts what was heard of live counters that are wanted into `out`, until it has `most` or a few more; returns where to go
    /// on, if that is not all.
    pub fn heard_of(
        &self,
        now: UnixMicros,
        begin: WalkedTo,
        most: usize,
        is_wanted: &dyn Fn(&CounterKey) -> bool,
        out: &mut Vec<Heard>,
    ) -> Option<WalkedTo> {
        let mut slot = begin.slot;
        for (number, shard) in self.shards.iter().enumerate().skip(begin.shard) {
            let mut from = Some(slot);
            while let Some(begin) = from {
                if out.len() >= most {
                    return Some(WalkedTo { shard: number, slot: begin });
                }
                // The lock is given back in between, as in a sweep.
                from = shard.lock().heard_of(begin, SWEEP_STEPS, now.get(), is_wanted, out);
            }
            slot = 0;
        }
        None
    }

    /// How many counters each rule has that have something to say.
    pub fn count_by_rule(&self) -> BTreeMap<Arc<str>, u64> {
        let now_us = self.clock.now().get();
        let mut counts = BTreeMap::new();
        for shard in &self.shards {
            let mut from = Some(0);
            while let Some(begin) = from {
                // The lock is given back in between, as in a sweep.
                from = shard.lock().count_by_rule(begin, SWEEP_STEPS, now_us, &mut counts);
            }
        }
        counts
    }

    pub fn stats(&self) -> MemoryStats {
        let mut stats = MemoryStats { logged: self.logs.used(), ..MemoryStats::default() };
        for shard in &self.shards {
            shard.lock().add_stats(&mut stats);
        }
        stats
    }
}

impl Store for MemoryStore {
    async fn check(&self, at: At, charge: Charge, cells: &[Cell]) -> Result<Vec<CellOutcome>, StoreError> {
        let now = match at {
            At::StoreClock => self.clock.now(),
            At::Given(now) => now,
        };
        Ok(self.decide(now, charge, cells).to_vec())
    }
}

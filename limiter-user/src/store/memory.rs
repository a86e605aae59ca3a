//! Counters in this process: what the request path decides with.
//!
//! Architecture invariant: deciding never waits for I/O, never allocates for a counter that exists, and the memory is
//! bounded by `max_counters` whatever clients send.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use foldhash::{SharedSeed, quality::SeedableRandomState};
use limiter_common::{sliding_window::Outcome, time::UnixMicros};
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use self::shard::{Shard, SlotIndex};
use super::{
    At, Cell, CellOutcome, Charge, CounterKey, Outcomes, Store, StoreError,
    algorithm::View,
    counter::{OwnTotals, SharedCounts},
    passes, taken_before,
};
use crate::clock::Clock;

mod shard;
#[cfg(test)]
mod tests;

/// Enough that two cores rarely want the same lock.
const MAX_SHARDS: usize = 64;
/// Below this many counters a shard, fewer shards: a small bound must not evict by bad luck.
const MIN_SHARD_CAPACITY: usize = 64;
/// Slots that one lock is held for during a sweep: a few microseconds.
const SWEEP_STEPS: usize = 512;
/// Calls of [`MemoryStore::sweep`] that look at everything once.
const SWEEPS_PER_ROUND: usize = 32;
/// Cells of a request up to which deciding it does not allocate.
pub const INLINE_CELLS: usize = 8;

/// Numbers about the whole store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    pub counters: usize,
    pub capacity: usize,
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

pub struct MemoryStore {
    clock: Arc<dyn Clock>,
    hasher: SeedableRandomState,
    shards: Box<[Mutex<Shard>]>,
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// Where one cell of a request is, and what its counter said before the request.
struct Place {
    hash: u64,
    shard: usize,
    /// Index into the locks that the request holds.
    lock: usize,
    slot: Option<SlotIndex>,
    view: View,
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
        // `RandomState` holds keys from the operating system: nobody outside can choose keys that collide.
        let random = |purpose: &str| RandomState::new().hash_one(purpose);
        let shard = |_| Mutex::new(Shard::new(max_counters / count, shared, random("eviction")));
        Self {
            clock,
            hasher: SeedableRandomState::with_seed(random("per hasher"), shared_seed()),
            shards: (0..count).map(shard).collect(),
        }
    }

    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Decides all cells at once. All of them are charged, or none; the outcomes are in the order of `cells`.
    ///
    /// `now` should be of this store's clock, and may be a little older than that of a request decided before.
    pub fn decide(&self, now: UnixMicros, charge: Charge, cells: &[Cell]) -> Outcomes {
        let now_us = now.get();
        let mut places = self.places(cells);
        let mut locks = self.lock(&mut places);
        let mut outcomes = Outcomes::new();

        for (number, cell) in cells.iter().enumerate() {
            let place = &mut places[number];
            let shard = &mut locks[place.lock];
            let algorithm = &cell.algorithm;
            place.slot = shard.find(place.hash, &cell.key);
            // A counter that appears twice in a request has to hold the sum.
            let taken = if number == 0 { 0 } else { taken_before(cells, &outcomes, number) };
            let need = cell.cost.saturating_add(taken);
            let unused = || algorithm.unused(now_us);
            place.view = match (place.slot, charge) {
                (None, _) => unused(),
                (Some(slot), Charge::Commit | Charge::Refund) => {
                    shard.move_to(slot, algorithm, now_us);
                    shard.counter(slot).map_or_else(unused, |counter| counter.view(algorithm, now_us, need))
                }
                (Some(slot), Charge::Peek) => {
                    shard.counter(slot).map_or_else(unused, |counter| counter.peek(algorithm, now_us, need))
                }
            };
            if charge == Charge::Refund {
                if let Some(slot) = place.slot {
                    shard.give_back(slot, algorithm, now_us, cell.cost);
                    place.view = shard.counter(slot).map_or_else(unused, |counter| counter.view(algorithm, now_us, 0));
                }
                outcomes.push(CellOutcome::new(Outcome::Allowed, algorithm.reset_us(place.view, now_us)));
                continue;
            }
            let (outcome, delay_us) = algorithm.check(algorithm.taken(place.view, now_us, taken), now_us, cell.cost);
            outcomes.push(CellOutcome { delay_us, ..CellOutcome::new(outcome, 0) });
        }

        let charged = charge == Charge::Commit && passes(cells, &outcomes);
        if charged {
            charge_all(cells, &places, &outcomes, &mut locks, now_us);
        }
        drop(locks);

        for number in 0..cells.len() {
            let algorithm = &cells[number].algorithm;
            let mut view = places[number].view;
            if charged {
                let same = |other: &usize| {
                    outcomes[*other].outcome == Outcome::Allowed
                        && places[*other].hash == places[number].hash
                        && cells[*other].key == cells[number].key
                };
                let cost = (0..cells.len()).filter(same).fold(0u64, |sum, other| sum.saturating_add(cells[other].cost));
                view = algorithm.taken(view, now_us, cost);
            }
            outcomes[number].remaining = algorithm.remaining(view, now_us);
            outcomes[number].reset_us = algorithm.reset_us(view, now_us);
        }
        outcomes
    }

    fn places(&self, cells: &[Cell]) -> SmallVec<[Place; INLINE_CELLS]> {
        let place = |cell: &Cell| {
            let hash = self.hasher.hash_one(&cell.key);
            Place { hash, shard: self.shard_of(hash), lock: 0, slot: None, view: View::default() }
        };
        cells.iter().map(place).collect()
    }

    /// Locks the shards of all places, each once, in ascending order: two requests never wait for each other.
    fn lock(&self, places: &mut [Place]) -> SmallVec<[MutexGuard<'_, Shard>; INLINE_CELLS]> {
        let mut order: SmallVec<[usize; INLINE_CELLS]> = places.iter().map(|place| place.shard).collect();
        order.sort_unstable();
        order.dedup();
        for place in places {
            place.lock = order.binary_search(&place.shard).unwrap_or(0);
        }
        order.iter().map(|&shard| self.shards[shard].lock()).collect()
    }

    fn hash(&self, key: &CounterKey) -> u64 {
        self.hasher.hash_one(key)
    }

    /// By the middle bits: the table uses the low and the high ones.
    fn shard_of(&self, hash: u64) -> usize {
        usize::try_from((hash >> 32) & (self.shards.len() as u64 - 1)).unwrap_or(0)
    }

    /// Removes some of the counters that have expired; all of them within 32 calls. To be called once a second.
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
        removed
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
    pub fn apply(&self, sent: &OwnTotals, shared: &SharedCounts, now: UnixMicros) {
        let hash = self.hash(&sent.key);
        self.shards[self.shard_of(hash)].lock().learn(hash, sent, shared, now.get());
    }

    /// Puts a counter back into the queue: what was sent may not have arrived.
    pub fn requeue(&self, key: &CounterKey) {
        let hash = self.hash(key);
        self.shards[self.shard_of(hash)].lock().requeue(hash, key);
    }

    /// Queues every counter that holds counts of a live window, for a shared store that has lost them. Returns the
    /// length of the queue.
    pub fn queue_live(&self, now: UnixMicros) -> usize {
        self.shards.iter().map(|shard| shard.lock().queue_live(now.get())).sum()
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
        let mut stats = MemoryStats::default();
        for shard in &self.shards {
            shard.lock().add_stats(&mut stats);
        }
        stats
    }
}

/// foldhash's second seed is one for the process.
fn shared_seed() -> &'static SharedSeed {
    static SEED: std::sync::OnceLock<SharedSeed> = std::sync::OnceLock::new();
    SEED.get_or_init(|| SharedSeed::from_u64(RandomState::new().hash_one("shared")))
}

/// Charges the cells that allow. Existing counters first: an insertion invalidates the slots.
fn charge_all(
    cells: &[Cell],
    places: &[Place],
    outcomes: &[CellOutcome],
    locks: &mut [MutexGuard<'_, Shard>],
    now_us: u64,
) {
    let allowed = || {
        let all = cells.iter().zip(places).zip(outcomes);
        all.filter(|(_, outcome)| outcome.outcome == Outcome::Allowed).map(|((cell, place), _)| (cell, place))
    };
    for (cell, place) in allowed() {
        if let Some(slot) = place.slot {
            locks[place.lock].charge(slot, &cell.algorithm, now_us, cell.cost);
        }
    }
    for (cell, place) in allowed() {
        if place.slot.is_none() {
            locks[place.lock].charge_new(place.hash, &cell.key, &cell.algorithm, now_us, cell.cost);
        }
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

//! One part of the counters, behind one lock: a slab, a table of its slots by key, and the slots to be sent.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use hashbrown::HashTable;

use super::MemoryStats;
use crate::store::{
    CounterKey,
    algorithm::Algorithm,
    counter::{Counter, OwnTotals, SharedCounts},
};

/// Counters that a full shard looks at before it gives one up.
const SAMPLE: usize = 8;

#[derive(Debug)]
struct Entry {
    key: CounterKey,
    hash: u64,
    counter: Counter,
}

// What a counter costs, beside its place in the table: a million of them are to fit into 256 MB.
const _: () = assert!(size_of::<Option<Entry>>() <= 120);

/// A bit a slot.
#[derive(Debug, Default)]
struct Bits(Vec<u64>);

impl Bits {
    fn reserve(&mut self, slots: usize) {
        if self.0.len() * 64 < slots {
            self.0.resize(slots.div_ceil(64), 0);
        }
    }

    /// Sets a bit, and says whether it was set before.
    fn set(&mut self, slot: SlotIndex) -> bool {
        let (word, bit) = (slot.get() / 64, 1 << (slot.get() % 64));
        let before = self.0[word] & bit != 0;
        self.0[word] |= bit;
        before
    }

    fn clear(&mut self, slot: SlotIndex) {
        self.0[slot.get() / 64] &= !(1 << (slot.get() % 64));
    }
}

/// Place of a counter; valid until the next insertion or removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotIndex(u32);

impl SlotIndex {
    const fn get(self) -> usize {
        self.0 as usize
    }
}

#[derive(Debug)]
pub(super) struct Shard {
    capacity: usize,
    /// Whether counters are queued to be sent to other nodes.
    shared: bool,
    slots: Vec<Option<Entry>>,
    free: Vec<SlotIndex>,
    table: HashTable<SlotIndex>,
    queue: VecDeque<SlotIndex>,
    /// The slots in `queue`, which therefore holds each slot once at most, whoever lives in it.
    queued: Bits,
    sweep_at: usize,
    /// State of an xorshift generator; it only has to be hard to guess from outside.
    random: u64,
    evicted: u64,
    expired: u64,
    late_units: u64,
    evicted_unconfirmed_units: u64,
}

impl Shard {
    pub(super) fn new(capacity: usize, shared: bool, seed: u64) -> Self {
        Self {
            capacity: capacity.clamp(1, u32::MAX as usize),
            shared,
            slots: Vec::new(),
            free: Vec::new(),
            table: HashTable::new(),
            queue: VecDeque::new(),
            queued: Bits::default(),
            sweep_at: 0,
            random: seed | 1,
            evicted: 0,
            expired: 0,
            late_units: 0,
            evicted_unconfirmed_units: 0,
        }
    }

    pub(super) fn find(&self, hash: u64, key: &CounterKey) -> Option<SlotIndex> {
        self.table
            .find(hash, |slot| {
                self.slots[slot.get()].as_ref().is_some_and(|entry| entry.hash == hash && entry.key == *key)
            })
            .copied()
    }

    pub(super) fn counter(&self, slot: SlotIndex) -> Option<&Counter> {
        self.slots[slot.get()].as_ref().map(|entry| &entry.counter)
    }

    /// Moves the counter to `now_us`, and to what its rule is by now.
    #[inline]
    pub(super) fn move_to(&mut self, slot: SlotIndex, algorithm: &Algorithm, now_us: u64) {
        if let Some(entry) = &mut self.slots[slot.get()] {
            let late = entry.counter.move_to(algorithm, now_us);
            self.count_late(late);
        }
    }

    /// The counter must have been moved to the request.
    #[inline]
    pub(super) fn charge(&mut self, slot: SlotIndex, algorithm: &Algorithm, now_us: u64, cost: u64) {
        if let Some(entry) = &mut self.slots[slot.get()] {
            entry.counter.charge(algorithm, now_us, cost);
            self.enqueue(slot);
        }
    }

    /// Charges a counter that may not exist yet. Invalidates every `SlotIndex`.
    pub(super) fn charge_new(&mut self, hash: u64, key: &CounterKey, algorithm: &Algorithm, now_us: u64, cost: u64) {
        let slot = self.find(hash, key).unwrap_or_else(|| {
            let tag = u32::try_from(self.random() >> 32).unwrap_or(0);
            self.insert(Entry { key: key.clone(), hash, counter: Counter::new(algorithm, now_us, tag) }, now_us)
        });
        self.charge(slot, algorithm, now_us, cost);
    }

    /// The counter must have been moved to the request.
    pub(super) fn give_back(&mut self, slot: SlotIndex, algorithm: &Algorithm, now_us: u64, cost: u64) {
        if let Some(entry) = &mut self.slots[slot.get()] {
            entry.counter.give_back(algorithm, now_us, cost);
            self.enqueue(slot);
        }
    }

    fn insert(&mut self, entry: Entry, now_us: u64) -> SlotIndex {
        if self.table.len() >= self.capacity {
            self.make_room(now_us);
        }
        let hash = entry.hash;
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot.get()] = Some(entry);
                slot
            }
            None => {
                let slot = SlotIndex(u32::try_from(self.slots.len()).unwrap_or(u32::MAX));
                self.slots.push(Some(entry));
                // Here, and not when a request charges an existing counter.
                if self.shared {
                    self.queued.reserve(self.slots.capacity());
                    if self.queue.capacity() < self.slots.len() {
                        self.queue.reserve(self.slots.capacity() - self.queue.len());
                    }
                }
                slot
            }
        };
        let slots = &self.slots;
        self.table.insert_unique(hash, slot, |slot| slots[slot.get()].as_ref().map_or(0, |entry| entry.hash));
        slot
    }

    /// Gives up a counter of a full shard: one that has expired if a few steps of the sweep find one, else of a random
    /// sample the one that expires first, and among those the one with the least in it.
    fn make_room(&mut self, now_us: u64) {
        if self.sweep(SAMPLE, now_us) > 0 {
            return;
        }
        let victim = (0..SAMPLE)
            .filter_map(|_| {
                let slot = self.random_slot();
                let counter = self.counter(slot)?;
                Some((counter.expires_us(), counter.weight(now_us), slot))
            })
            .min_by_key(|(expires_us, count, _)| (*expires_us, *count));
        if let Some((_, _, slot)) = victim
            && let Some(entry) = self.remove(slot)
        {
            self.evicted += 1;
            if self.shared {
                self.evicted_unconfirmed_units =
                    self.evicted_unconfirmed_units.saturating_add(entry.counter.unconfirmed());
            }
        }
    }

    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn random_slot(&mut self) -> SlotIndex {
        let slot = (u128::from(self.random()) * self.slots.len() as u128) >> 64;
        SlotIndex(u32::try_from(slot).unwrap_or(0))
    }

    fn remove(&mut self, slot: SlotIndex) -> Option<Entry> {
        let entry = self.slots[slot.get()].take()?;
        if let Ok(occupied) = self.table.find_entry(entry.hash, |other| *other == slot) {
            occupied.remove();
        }
        self.free.push(slot);
        Some(entry)
    }

    /// Looks at the next `steps` slots and removes what has expired; returns how many those were.
    pub(super) fn sweep(&mut self, steps: usize, now_us: u64) -> usize {
        let mut removed = 0;
        for _ in 0..steps.min(self.slots.len()) {
            self.sweep_at = (self.sweep_at + 1) % self.slots.len();
            let slot = SlotIndex(u32::try_from(self.sweep_at).unwrap_or(0));
            if self.counter(slot).is_some_and(|counter| counter.is_expired(now_us))
                && let Some(entry) = self.remove(slot)
            {
                removed += 1;
                self.expired += 1;
                self.count_late(entry.counter.unconfirmed());
            }
        }
        removed
    }

    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    fn count_late(&mut self, units: u64) {
        if self.shared {
            self.late_units = self.late_units.saturating_add(units);
        }
    }

    fn enqueue(&mut self, slot: SlotIndex) {
        if self.shared && !self.queued.set(slot) {
            self.queue.push_back(slot);
        }
    }

    /// Takes up to `max` counters out of the queue, oldest first.
    pub(super) fn take_queued(&mut self, now_us: u64, max: usize, out: &mut Vec<OwnTotals>) {
        let mut taken = 0;
        while taken < max
            && let Some(slot) = self.queue.pop_front()
        {
            self.queued.clear(slot);
            let Some(entry) = &mut self.slots[slot.get()] else { continue };
            let late = entry.counter.advance_to(now_us);
            // What had to be sent belongs to windows that are over.
            if entry.counter.has_own_counts() {
                out.push(entry.counter.own_totals(entry.key.clone()));
                taken += 1;
            }
            self.count_late(late);
        }
    }

    pub(super) fn requeue(&mut self, hash: u64, key: &CounterKey) {
        if let Some(slot) = self.find(hash, key) {
            self.enqueue(slot);
        }
    }

    pub(super) fn queue_live(&mut self, now_us: u64) -> usize {
        for slot in 0..self.slots.len() {
            let slot = SlotIndex(u32::try_from(slot).unwrap_or(0));
            if self.counter(slot).is_some_and(|counter| !counter.is_expired(now_us) && counter.has_own_counts()) {
                self.enqueue(slot);
            }
        }
        self.queue.len()
    }

    /// Takes what the shared store said about totals that this node sent. A counter that has been given up is left alone.
    pub(super) fn learn(&mut self, hash: u64, sent: &OwnTotals, shared: &SharedCounts, now_us: u64) {
        let Some(slot) = self.find(hash, &sent.key) else { return };
        let Some(entry) = &mut self.slots[slot.get()] else { return };
        let (late, more) = entry.counter.learn(sent, shared, now_us);
        self.count_late(late);
        if more {
            self.enqueue(slot);
        }
    }

    /// Counts the counters in at most `steps` slots from `from` on; returns where to go on.
    pub(super) fn count_by_rule(
        &self,
        from: usize,
        steps: usize,
        now_us: u64,
        counts: &mut BTreeMap<Arc<str>, u64>,
    ) -> Option<usize> {
        let entries = self.slots.iter().skip(from).take(steps).flatten();
        for entry in entries.filter(|entry| !entry.counter.is_expired(now_us)) {
            match counts.get_mut(&entry.key.rule) {
                Some(count) => *count += 1,
                None => drop(counts.insert(Arc::clone(&entry.key.rule), 1)),
            }
        }
        let next = from + steps;
        (next < self.slots.len()).then_some(next)
    }

    pub(super) fn add_stats(&self, stats: &mut MemoryStats) {
        stats.counters += self.table.len();
        stats.capacity += self.capacity;
        stats.queued += self.queue.len();
        stats.evicted += self.evicted;
        stats.expired += self.expired;
        stats.late_units = stats.late_units.saturating_add(self.late_units);
        stats.evicted_unconfirmed_units =
            stats.evicted_unconfirmed_units.saturating_add(self.evicted_unconfirmed_units);
    }
}

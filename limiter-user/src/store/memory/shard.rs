//! One part of the counters, behind one lock: a slab, a table of its slots by key, and the slots to be sent.

use std::{
    collections::{BTreeMap, VecDeque},
    num::NonZeroU8,
    ops::Range,
    sync::Arc,
};

use super::{
    MemoryStats, OwnPart,
    index::{Index, KeyHash},
    watch::Changes,
};
use crate::store::{
    CellRef, Charge, CounterKey,
    algorithm::{Algorithm, View},
    counter::{Adopts, Counter, Heard, LogRoom, OwnTotals, SharedCounts},
};

/// Counters that a full shard looks at before it gives one up.
const SAMPLE: usize = 8;
/// One in so many counters of a full shard is of those that were charged once: long enough to come back.
const KEPT_FOR_NEWCOMERS: usize = 4;

/// Two cache lines side by side, which processors fetch together.
#[derive(Debug)]
#[repr(align(128))]
struct Entry {
    key: CounterKey,
    counter: Counter,
}

// What a counter costs, beside its places in the tables: a million of them are to fit into 256 MB.
const _: () = assert!(size_of::<Option<Entry>>() == 128);

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

    /// Clears a bit, and says whether it was set.
    fn take(&mut self, slot: SlotIndex) -> bool {
        let was_set = self.0[slot.get() / 64] & 1 << (slot.get() % 64) != 0;
        self.clear(slot);
        was_set
    }
}

/// Place of a counter; valid until the next insertion or removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotIndex(u32);

impl SlotIndex {
    #[inline]
    pub(super) const fn of_number(number: u32) -> Self {
        Self(number)
    }

    #[inline]
    pub(super) const fn number(self) -> u32 {
        self.0
    }

    #[inline]
    pub(super) const fn get(self) -> usize {
        self.0 as usize
    }
}

/// Slots in the order in which they came, each once at most, whoever lives in it.
#[derive(Debug, Default)]
struct Line {
    slots: VecDeque<SlotIndex>,
    /// The slots in it.
    waiting: Bits,
}

impl Line {
    fn len(&self) -> usize {
        self.slots.len()
    }

    /// Makes room for so many slots, so that joining allocates nothing.
    fn reserve(&mut self, slots: usize) {
        self.waiting.reserve(slots);
        self.slots.reserve(slots.saturating_sub(self.slots.len()));
    }

    /// Says whether it was not in it.
    #[inline]
    fn join(&mut self, slot: SlotIndex) -> bool {
        let is_new = !self.waiting.set(slot);
        if is_new {
            self.slots.push_back(slot);
        }
        is_new
    }

    fn next(&mut self) -> Option<SlotIndex> {
        let slot = self.slots.pop_front()?;
        self.waiting.clear(slot);
        Some(slot)
    }
}

/// Slots that come into being at a time: 32 kB. They stay where they are, so that nothing is copied while requests wait,
/// and no hole is left in the heap.
const BLOCK: usize = 256;

type Block = Box<[Option<Entry>; BLOCK]>;

#[derive(Debug, Default)]
struct Slots {
    blocks: Vec<Block>,
    /// Those that were ever used.
    len: usize,
}

impl Slots {
    #[inline]
    fn get(&self, slot: SlotIndex) -> Option<&Entry> {
        self.blocks.get(slot.get() / BLOCK)?[slot.get() % BLOCK].as_ref()
    }

    #[inline]
    fn get_mut(&mut self, slot: SlotIndex) -> Option<&mut Entry> {
        self.blocks.get_mut(slot.get() / BLOCK)?[slot.get() % BLOCK].as_mut()
    }

    fn take(&mut self, slot: SlotIndex) -> Option<Entry> {
        self.blocks.get_mut(slot.get() / BLOCK)?[slot.get() % BLOCK].take()
    }

    fn put(&mut self, slot: SlotIndex, entry: Entry) {
        self.blocks[slot.get() / BLOCK][slot.get() % BLOCK] = Some(entry);
    }

    fn is_full(&self) -> bool {
        self.len == self.blocks.len() * BLOCK
    }

    fn grow(&mut self) {
        let block: Box<[Option<Entry>]> = (0..BLOCK).map(|_| None).collect();
        if let Ok(block) = block.try_into() {
            self.blocks.push(block);
        }
    }

    /// The next slot that nobody has used. There must be one.
    fn next(&mut self) -> SlotIndex {
        self.len += 1;
        SlotIndex(u32::try_from(self.len - 1).unwrap_or(u32::MAX))
    }

    fn range(&self, slots: Range<usize>) -> impl Iterator<Item = &Entry> {
        (slots.start..slots.end.min(self.len))
            .filter_map(|slot| self.get(SlotIndex(u32::try_from(slot).unwrap_or(u32::MAX))))
    }

    /// Of a slot in the index, which is therefore not free.
    fn hash_of(&self, slot: SlotIndex) -> KeyHash {
        self.get(slot).map_or(KeyHash::NONE, |entry| KeyHash::of_key(&entry.key))
    }
}

#[derive(Debug)]
pub(super) struct Shard {
    capacity: usize,
    /// Whether counters are queued to be sent to other nodes.
    shared: bool,
    slots: Slots,
    free: Vec<SlotIndex>,
    index: Index,
    /// Counters to be sent to other nodes.
    queue: Line,
    /// Counters that were charged once, the oldest first, and some that have been charged again since.
    newcomers: Line,
    /// Slots in that line that another counter lives in by now, which is younger than its place says.
    resettled: Bits,
    sweep_at: usize,
    /// State of an xorshift generator; it only has to be hard to guess from outside.
    random: u64,
    evicted: u64,
    expired: u64,
    late_units: u64,
    evicted_unconfirmed_units: u64,
    /// Told when a counter that is watched changes.
    changes: Arc<Changes>,
    /// That of all shards together.
    logs: Arc<LogRoom>,
}

impl Shard {
    pub(super) fn new(capacity: usize, shared: bool, seed: u64, changes: Arc<Changes>, logs: Arc<LogRoom>) -> Self {
        Self {
            capacity: capacity.clamp(1, u32::MAX as usize),
            shared,
            slots: Slots::default(),
            free: Vec::new(),
            index: Index::default(),
            queue: Line::default(),
            newcomers: Line::default(),
            resettled: Bits::default(),
            sweep_at: 0,
            random: seed | 1,
            evicted: 0,
            expired: 0,
            late_units: 0,
            evicted_unconfirmed_units: 0,
            changes,
            logs,
        }
    }

    #[inline]
    pub(super) fn find(&self, hash: KeyHash, cell: &CellRef<'_>) -> Option<SlotIndex> {
        self.index.find(hash, |slot| self.slots.get(slot).is_some_and(|entry| cell.is_of(&entry.key)))
    }

    fn find_key(&self, hash: KeyHash, key: &CounterKey) -> Option<SlotIndex> {
        self.index.find(hash, |slot| self.slots.get(slot).is_some_and(|entry| entry.key == *key))
    }

    #[inline]
    fn counter(&self, slot: SlotIndex) -> Option<&Counter> {
        self.slots.get(slot).map(|entry| &entry.counter)
    }

    /// What the counter says to a cell that needs so much. A peek changes nothing; else the counter is moved to `now_us`,
    /// and to what its rule is by now.
    #[inline]
    pub(super) fn view(
        &mut self,
        slot: Option<SlotIndex>,
        algorithm: &Algorithm,
        charge: Charge,
        now_us: u64,
        need: u64,
    ) -> View {
        let entry = slot.and_then(|slot| self.slots.get_mut(slot));
        let Some(Entry { counter, .. }) = entry else { return algorithm.unused(now_us) };
        if charge == Charge::Peek {
            return counter.peek(algorithm, now_us, need);
        }
        let before = counter.is_watched().then(|| counter.print());
        let late = counter.move_to(algorithm, now_us);
        let view = counter.view(algorithm, now_us, need);
        if before.is_some_and(|before| before != counter.print()) {
            self.tell_watchers(slot);
        }
        self.count_late(late);
        view
    }

    /// See [`super::MemoryStore::heard`].
    pub(super) fn heard(&self, slot: Option<SlotIndex>, algorithm: &Algorithm, now_us: u64) -> Option<View> {
        self.counter(slot?)?.heard(algorithm, now_us)
    }

    /// See [`super::MemoryStore::own_part`].
    pub(super) fn own_part(
        &self,
        slot: Option<SlotIndex>,
        algorithm: &Algorithm,
        now_us: u64,
        need: u64,
        most: u64,
    ) -> OwnPart {
        let Some(counter) = slot.and_then(|slot| self.counter(slot)) else {
            let unused = algorithm.unused(now_us);
            return OwnPart { all: unused, own: unused };
        };
        let all = counter.peek(algorithm, now_us, need);
        OwnPart { all, own: counter.peek_own(algorithm, now_us, need, most).unwrap_or(all) }
    }

    /// Somebody draws a conclusion from what the counter says to a cell: that it denies, or with `room` that it allows.
    /// Returns when time alone makes something else of the counter.
    pub(super) fn watch(&mut self, hash: KeyHash, slot: Option<SlotIndex>, room: Option<u64>, now_us: u64) -> u64 {
        match slot.and_then(|slot| self.slots.get_mut(slot)) {
            Some(Entry { counter, .. }) => {
                counter.watch(room);
                counter.changes_us(now_us)
            }
            None => {
                self.changes.watch_for_new(hash);
                u64::MAX
            }
        }
    }

    /// Nobody relies any more on what was concluded from this counter.
    #[cold]
    fn tell_watchers(&mut self, slot: Option<SlotIndex>) {
        if let Some(entry) = slot.and_then(|slot| self.slots.get_mut(slot)) {
            entry.counter.forget_watch();
            self.changes.count(KeyHash::of_key(&entry.key));
        }
    }

    /// The counter must have been moved to the request.
    #[inline]
    pub(super) fn charge(&mut self, slot: SlotIndex, algorithm: &Algorithm, now_us: u64, cost: u64) {
        if let Some(entry) = self.slots.get_mut(slot) {
            entry.counter.charge(algorithm, now_us, cost);
            if entry.counter.is_watched() && entry.counter.outgrows_watch(algorithm, cost) {
                self.tell_watchers(Some(slot));
            }
            self.enqueue(slot);
        }
    }

    /// What this node has admitted and other nodes have not heard of; nothing where there are none.
    #[inline]
    pub(super) fn untold(&self, slot: Option<SlotIndex>) -> u64 {
        if !self.shared {
            return 0;
        }
        slot.and_then(|slot| self.counter(slot)).map_or(0, Counter::unconfirmed)
    }

    /// Charges a counter that may not exist yet. Invalidates every `SlotIndex`.
    pub(super) fn charge_new(&mut self, hash: KeyHash, cell: &CellRef<'_>, now_us: u64) {
        let slot = self.find(hash, cell).unwrap_or_else(|| self.insert_new(hash, cell, now_us));
        self.charge(slot, &cell.algorithm, now_us, cell.cost);
    }

    /// Invalidates every `SlotIndex`.
    fn insert_new(&mut self, hash: KeyHash, cell: &CellRef<'_>, now_us: u64) -> SlotIndex {
        let tag = u32::try_from(self.random() >> 32).unwrap_or(0);
        let counter = Counter::new(&cell.algorithm, now_us, tag);
        self.insert(hash, Entry { key: cell.key(), counter }, now_us)
    }

    /// The counter must have been moved to the request.
    pub(super) fn give_back(&mut self, slot: SlotIndex, algorithm: &Algorithm, now_us: u64, cost: u64) {
        if let Some(entry) = self.slots.get_mut(slot) {
            entry.counter.give_back(algorithm, now_us, cost);
            if entry.counter.is_watched() {
                self.tell_watchers(Some(slot));
            }
            self.enqueue(slot);
        }
    }

    fn insert(&mut self, hash: KeyHash, mut entry: Entry, now_us: u64) -> SlotIndex {
        entry.counter.be_in(&self.logs);
        if self.index.len() >= self.capacity {
            self.make_room(now_us);
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            if self.slots.is_full() {
                self.grow();
            }
            self.slots.next()
        });
        self.slots.put(slot, entry);
        let slots = &self.slots;
        self.index.insert(hash, slot, |slot| slots.hash_of(slot));
        if !self.newcomers.join(slot) {
            self.resettled.set(slot);
        }
        self.changes.came(hash);
        slot
    }

    pub(super) fn has_room(&self) -> bool {
        self.index.len() < self.capacity && !self.logs.is_exceeded()
    }

    /// See [`super::MemoryStore::adopt`].
    pub(super) fn adopt(
        &mut self,
        hash: KeyHash,
        key: CounterKey,
        algorithm: &Algorithm,
        shared: &SharedCounts,
        now_us: u64,
    ) -> bool {
        if !self.has_room() || self.find_key(hash, &key).is_some() {
            return false;
        }
        let tag = u32::try_from(self.random() >> 32).unwrap_or(0);
        let mut counter = Counter::new(algorithm, now_us, tag);
        let nothing = counter.own_totals(key.clone());
        counter.learn(&nothing, shared, now_us, Adopts::Always);
        counter.forget_debt(now_us);
        counter.move_to(algorithm, now_us);
        if counter.is_expired(now_us) {
            return false;
        }
        self.insert(hash, Entry { key, counter }, now_us);
        true
    }

    /// Everything at once, so that a request which charges existing counters allocates nothing.
    fn grow(&mut self) {
        self.slots.grow();
        let slots = self.slots.blocks.len() * BLOCK;
        self.newcomers.reserve(slots);
        self.resettled.reserve(slots);
        if self.shared {
            self.queue.reserve(slots);
        }
    }

    /// Gives up a counter of a full shard: one that has expired if a few steps of the sweep find one, else the oldest of
    /// those that were charged only once. So whoever comes under ever new names pushes out what came so before, and nobody
    /// who has come back.
    ///
    /// A part of the shard is kept for those charged once: where those who have come back leave no more than that, one of
    /// them goes. Else each newcomer would push out the one before, and none could ever come back and be limited.
    fn make_room(&mut self, now_us: u64) {
        if self.sweep(SAMPLE, now_us) > 0 {
            return;
        }
        let kept = self.capacity / KEPT_FOR_NEWCOMERS;
        let victim = self.oldest_newcomer(kept).or_else(|| self.least_charged()).or_else(|| self.oldest_newcomer(0));
        if let Some(slot) = victim {
            self.give_up(slot);
        }
    }

    fn give_up(&mut self, slot: SlotIndex) {
        let Some(entry) = self.remove(slot) else { return };
        self.evicted += 1;
        if self.shared {
            self.evicted_unconfirmed_units = self.evicted_unconfirmed_units.saturating_add(entry.counter.unconfirmed());
        }
    }

    /// Gives up the longest log of so many slots in a row, somewhere.
    pub(super) fn give_up_log(&mut self, steps: usize) {
        let (begin, len) = (self.random_slot().get(), self.slots.len);
        let slots = (begin..begin + steps.min(len)).map(|slot| SlotIndex(u32::try_from(slot % len).unwrap_or(0)));
        let longest = slots.max_by_key(|slot| self.counter(*slot).map_or(0, Counter::log_room));
        if let Some(slot) = longest.filter(|slot| self.counter(*slot).is_some_and(|counter| counter.log_room() > 0)) {
            self.give_up(slot);
        }
    }

    /// Of more than `kept`.
    fn oldest_newcomer(&mut self, kept: usize) -> Option<SlotIndex> {
        while self.newcomers.len() > kept
            && let Some(slot) = self.newcomers.next()
        {
            if self.resettled.take(slot) {
                self.newcomers.join(slot);
            } else if self.counter(slot).is_some_and(|counter| counter.charges() == NonZeroU8::MIN) {
                return Some(slot);
            }
        }
        None
    }

    /// Of a random sample of those charged more than once, and of them the one that expires first.
    fn least_charged(&mut self) -> Option<SlotIndex> {
        let sample = (0..SAMPLE).filter_map(|_| {
            let slot = self.random_slot();
            let counter = self.counter(slot).filter(|counter| counter.charges() > NonZeroU8::MIN)?;
            Some((counter.charges().ilog2(), counter.expires_us(), slot))
        });
        sample.min_by_key(|(charges, expires_us, _)| (*charges, *expires_us)).map(|(_, _, slot)| slot)
    }

    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn random_slot(&mut self) -> SlotIndex {
        let slot = (u128::from(self.random()) * self.slots.len as u128) >> 64;
        SlotIndex(u32::try_from(slot).unwrap_or(0))
    }

    fn remove(&mut self, slot: SlotIndex) -> Option<Entry> {
        let slots = &self.slots;
        self.index.remove(slots.hash_of(slot), slot, |slot| slots.hash_of(slot));
        let entry = self.slots.take(slot)?;
        if entry.counter.is_watched() {
            self.changes.count(KeyHash::of_key(&entry.key));
        }
        self.free.push(slot);
        Some(entry)
    }

    /// Looks at the next `steps` slots and removes what has expired; returns how many those were.
    pub(super) fn sweep(&mut self, steps: usize, now_us: u64) -> usize {
        let mut removed = 0;
        for _ in 0..steps.min(self.slots.len) {
            self.sweep_at = (self.sweep_at + 1) % self.slots.len;
            let slot = SlotIndex(u32::try_from(self.sweep_at).unwrap_or(0));
            // What has become a log since is in no room yet.
            if let Some(entry) = self.slots.get_mut(slot) {
                entry.counter.be_in(&self.logs);
            }
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
        self.slots.len
    }

    #[inline]
    fn count_late(&mut self, units: u64) {
        if self.shared {
            self.late_units = self.late_units.saturating_add(units);
        }
    }

    #[inline]
    fn enqueue(&mut self, slot: SlotIndex) {
        if self.shared {
            self.queue.join(slot);
        }
    }

    /// Takes up to `max` counters out of the queue, oldest first.
    pub(super) fn take_queued(&mut self, now_us: u64, max: usize, out: &mut Vec<OwnTotals>) {
        let mut taken = 0;
        while taken < max
            && let Some(slot) = self.queue.next()
        {
            let Some(entry) = self.slots.get_mut(slot) else { continue };
            let before = entry.counter.is_watched().then(|| entry.counter.print());
            let late = entry.counter.advance_to(now_us);
            if before.is_some_and(|before| before != entry.counter.print()) {
                entry.counter.forget_watch();
                self.changes.count(KeyHash::of_key(&entry.key));
            }
            // Else what had to be sent belongs to windows that are over.
            if let Some(totals) = entry.counter.tell(&entry.key) {
                out.push(totals);
                taken += 1;
            }
            self.count_late(late);
        }
    }

    pub(super) fn requeue(&mut self, hash: KeyHash, key: &CounterKey) {
        if let Some(slot) = self.find_key(hash, key) {
            self.enqueue(slot);
        }
    }

    /// Queues those in at most `steps` slots from `from` on that are wanted; returns where to go on.
    pub(super) fn queue_live(
        &mut self,
        from: usize,
        steps: usize,
        now_us: u64,
        is_wanted: &dyn Fn(&CounterKey) -> bool,
    ) -> Option<usize> {
        let next = from + steps;
        for slot in from..next.min(self.slots.len) {
            let slot = SlotIndex(u32::try_from(slot).unwrap_or(0));
            let is_live = |entry: &Entry| !entry.counter.is_expired(now_us) && entry.counter.has_own_counts();
            if self.slots.get(slot).is_some_and(|entry| is_live(entry) && is_wanted(&entry.key)) {
                self.enqueue(slot);
            }
        }
        (next < self.slots.len).then_some(next)
    }

    /// What was heard of those in at most `steps` slots from `from` on that are wanted; returns where to go on.
    pub(super) fn heard_of(
        &self,
        from: usize,
        steps: usize,
        now_us: u64,
        is_wanted: &dyn Fn(&CounterKey) -> bool,
        out: &mut Vec<Heard>,
    ) -> Option<usize> {
        let live = self.slots.range(from..from + steps).filter(|entry| !entry.counter.is_expired(now_us));
        let wanted = live.filter(|entry| is_wanted(&entry.key));
        out.extend(wanted.filter_map(|entry| entry.counter.heard_last(&entry.key, now_us)));
        let next = from + steps;
        (next < self.slots.len).then_some(next)
    }

    pub(super) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Takes what the shared store said about totals that this node sent. A counter that has been given up is left alone.
    pub(super) fn learn(
        &mut self,
        hash: KeyHash,
        sent: &OwnTotals,
        shared: &SharedCounts,
        now_us: u64,
        adopts: Adopts,
    ) {
        let Some(slot) = self.find_key(hash, &sent.key) else { return };
        let Some(entry) = self.slots.get_mut(slot) else { return };
        let before = entry.counter.is_watched().then(|| entry.counter.print());
        let (late, more) = entry.counter.learn(sent, shared, now_us, adopts);
        if before.is_some_and(|before| before != entry.counter.print()) {
            self.tell_watchers(Some(slot));
        }
        self.count_late(late);
        if more {
            self.enqueue(slot);
        }
    }

    /// Takes what a decision of the shared store left of a counter, which may not exist here yet.
    pub(super) fn inform(&mut self, hash: KeyHash, cell: &CellRef<'_>, view: View, now_us: u64) {
        let slot = self.find(hash, cell).unwrap_or_else(|| self.insert_new(hash, cell, now_us));
        let Some(entry) = self.slots.get_mut(slot) else { return };
        let before = entry.counter.is_watched().then(|| entry.counter.print());
        let late = entry.counter.move_to(&cell.algorithm, now_us) + entry.counter.inform(view, now_us);
        if before.is_some_and(|before| before != entry.counter.print()) {
            self.tell_watchers(Some(slot));
        }
        self.count_late(late);
    }

    /// Counts the counters in at most `steps` slots from `from` on; returns where to go on.
    pub(super) fn count_by_rule(
        &self,
        from: usize,
        steps: usize,
        now_us: u64,
        counts: &mut BTreeMap<Arc<str>, u64>,
    ) -> Option<usize> {
        let entries = self.slots.range(from..from + steps);
        for entry in entries.filter(|entry| !entry.counter.is_expired(now_us)) {
            match counts.get_mut(&**entry.key.rule.as_arc()) {
                Some(count) => *count += 1,
                None => drop(counts.insert(Arc::clone(entry.key.rule.as_arc()), 1)),
            }
        }
        let next = from + steps;
        (next < self.slots.len).then_some(next)
    }

    pub(super) fn add_stats(&self, stats: &mut MemoryStats) {
        stats.counters += self.index.len();
        stats.capacity += self.capacity;
        stats.queued += self.queue.len();
        stats.evicted += self.evicted;
        stats.expired += self.expired;
        stats.late_units = stats.late_units.saturating_add(self.late_units);
        stats.evicted_unconfirmed_units =
            stats.evicted_unconfirmed_units.saturating_add(self.evicted_unconfirmed_units);
    }
}

//! From a counter's hash to its slot: one table a shard, whose entries say enough to look at no slot but the right one.
//!
//! Linear probing over entries of eight bytes, so that a search stays within a cache line or two. All counters of one
//! identity have their places in one small range, which a request with many rules then has in the cache.

use super::shard::SlotIndex;
use crate::store::{CellRef, CounterKey, IdentityRef, Name};

/// The identity decides shard and range, the rule the place in the range, and both the tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyHash(u64);

/// Places of a range: two cache lines.
const RANGE: u64 = 16;
/// Bits of the rule's hash that do not change the shard or the range.
const OF_RULE: u64 = 0x03ff_ffff_0000_0000 | (RANGE - 1);
const SHARD_BITS: u32 = 6;
const _: () = assert!(super::MAX_SHARDS == 1 << SHARD_BITS && OF_RULE.leading_zeros() == SHARD_BITS);

impl KeyHash {
    /// Of a slot that nobody lives in.
    pub(super) const NONE: Self = Self(0);

    #[inline]
    pub(super) fn of(cell: &CellRef<'_>) -> Self {
        Self::new(&cell.identity, cell.rule)
    }

    pub(super) fn of_key(key: &CounterKey) -> Self {
        Self::new(&key.identity.borrowed(), &key.rule)
    }

    #[inline]
    fn new(identity: &IdentityRef<'_>, rule: &Name) -> Self {
        Self(identity.hash() ^ (rule.hash_of_text() & OF_RULE))
    }

    /// One of `shards`, a power of two.
    #[inline]
    pub(super) fn shard(self, shards: usize) -> usize {
        usize::try_from(self.0 >> (u64::BITS - SHARD_BITS)).unwrap_or(0) & (shards - 1)
    }

    /// One of `places`, a power of two: the same for all counters of an identity.
    #[inline]
    pub(super) fn of_identity(self, places: usize) -> usize {
        const IDENTITY_FROM: u32 = RANGE.trailing_zeros();
        usize::try_from(self.0 & u64::from(u32::MAX)).unwrap_or(0) >> IDENTITY_FROM & (places - 1)
    }

    #[inline]
    fn tag(self) -> u64 {
        self.0 >> 32
    }
}

/// The tag in the upper half, and in the lower the number of the slot from 1; 0 where nothing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place(u64);

const EMPTY: Place = Place(0);

impl Place {
    fn new(hash: KeyHash, slot: SlotIndex) -> Self {
        Self((hash.tag() << 32) | u64::from(slot.number() + 1))
    }

    #[inline]
    fn slot(self) -> SlotIndex {
        SlotIndex::of_number(u32::try_from(self.0 & u64::from(u32::MAX)).unwrap_or(0).wrapping_sub(1))
    }
}

#[derive(Debug, Default)]
pub(super) struct Index {
    /// A power of two of them, or none.
    places: Box<[Place]>,
    len: usize,
}

impl Index {
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn home(&self, hash: KeyHash) -> usize {
        usize::try_from(hash.0 & u64::from(u32::MAX)).unwrap_or(0) & self.mask()
    }

    #[inline]
    fn mask(&self) -> usize {
        self.places.len().wrapping_sub(1)
    }

    /// The slot with this hash that `is` says is the right one.
    #[inline]
    pub(super) fn find(&self, hash: KeyHash, mut is: impl FnMut(SlotIndex) -> bool) -> Option<SlotIndex> {
        let mut at = self.home(hash);
        loop {
            // There is an empty place at the end of every search, unless there are no places at all.
            let place = *self.places.get(at)?;
            if place == EMPTY {
                return None;
            }
            if place.0 >> 32 == hash.tag() && is(place.slot()) {
                return Some(place.slot());
            }
            at = (at + 1) & self.mask();
        }
    }

    /// `hash_of` says the hash of each slot that is in the table.
    pub(super) fn insert(&mut self, hash: KeyHash, slot: SlotIndex, hash_of: impl Fn(SlotIndex) -> KeyHash) {
        if (self.len + 1) * 4 > self.places.len() * 3 {
            let larger = vec![EMPTY; (self.places.len() * 2).max(usize::try_from(RANGE).unwrap_or(0))];
            for place in std::mem::replace(&mut self.places, larger.into()) {
                if place != EMPTY {
                    self.put(hash_of(place.slot()), place);
                }
            }
        }
        self.put(hash, Place::new(hash, slot));
        self.len += 1;
    }

    fn put(&mut self, hash: KeyHash, place: Place) {
        let mut at = self.home(hash);
        while self.places[at] != EMPTY {
            at = (at + 1) & self.mask();
        }
        self.places[at] = place;
    }

    /// What comes behind moves up, so that no search ends before what it looks for.
    pub(super) fn remove(&mut self, hash: KeyHash, slot: SlotIndex, hash_of: impl Fn(SlotIndex) -> KeyHash) {
        let mut free = self.home(hash);
        let removed = Place::new(hash, slot);
        loop {
            match self.places.get(free) {
                None | Some(&EMPTY) => return,
                Some(place) if *place == removed => break,
                Some(_) => free = (free + 1) & self.mask(),
            }
        }
        let mut at = free;
        loop {
            at = (at + 1) & self.mask();
            let place = self.places[at];
            if place == EMPTY {
                break;
            }
            let from_home = at.wrapping_sub(self.home(hash_of(place.slot()))) & self.mask();
            if from_home >= at.wrapping_sub(free) & self.mask() {
                self.places[free] = place;
                free = at;
            }
        }
        self.places[free] = EMPTY;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Hashes out of few, so that places are wanted by many, also around the end of the table.
        #[test]
        fn finds_what_was_put_in_and_not_what_was_taken_out(
            steps in prop::collection::vec((any::<bool>(), 0u64..40, 0u64..3), 1..400),
        ) {
            let (mut index, mut model) = (Index::default(), HashMap::new());
            let mut hashes: Vec<KeyHash> = Vec::new();
            for (insert, home, tag) in steps {
                let hash = KeyHash((tag << 32) | (home % 7 * 9));
                let hash_of = |slot: SlotIndex| hashes[slot.get()];
                match model.get(&(home, tag)) {
                    Some(slot) if !insert => {
                        index.remove(hash, *slot, hash_of);
                        model.remove(&(home, tag));
                    }
                    None if insert => {
                        let slot = SlotIndex::of_number(u32::try_from(hashes.len()).unwrap());
                        index.insert(hash, slot, hash_of);
                        hashes.push(hash);
                        model.insert((home, tag), slot);
                    }
                    Some(_) | None => {}
                }
                prop_assert_eq!(index.len(), model.len());
                for ((home, tag), slot) in &model {
                    let hash = KeyHash((tag << 32) | (home % 7 * 9));
                    prop_assert_eq!(index.find(hash, |found| found == *slot), Some(*slot));
                }
                prop_assert_eq!(index.find(hash, |_| false), None);
            }
        }
    }
}

//! Where denials are remembered: as many as there are places, and no more.
//!
//! Each question has a few places, one of which is given to it. Where all are taken, what does not hold any more goes first,
//! and then what was asked for least since others came: whoever is denied under many names pushes out what is of as little
//! use, and not whoever is denied again and again.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{
    Denial,
    key::{Caller, Key},
};

const WAYS: usize = 4;
/// 64 kB, which stay in the cache.
const CALLERS: usize = 4096;

#[derive(Debug)]
pub(super) struct Table {
    /// A power of two of them.
    sets: Box<[Mutex<Set>]>,
    /// Most requests look at nothing else.
    callers: Box<[Lately]>,
}

/// What some callers did lately.
#[derive(Debug, Default)]
struct Lately {
    /// Until when anything is remembered of them.
    known_until: AtomicU64,
    /// The last two that were denied, by half of their numbers each: to be remembered takes to come back.
    denied: AtomicU64,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Set {
    /// Of the keys; beside each other, to be compared in one cache line.
    tags: [u64; WAYS],
    /// How often each was asked for, less by half with each that came since.
    uses: [u8; WAYS],
    denials: [Option<(u64, Denial)>; WAYS],
}

impl Table {
    pub(super) fn new(denials: usize) -> Self {
        let sets = 1 << (denials / WAYS).max(1).ilog2();
        Self {
            sets: (0..sets).map(|_| Mutex::default()).collect(),
            callers: (0..CALLERS).map(|_| Lately::default()).collect(),
        }
    }

    #[inline]
    fn lately(&self, caller: Caller) -> &Lately {
        // Not by the bits that counters have their shards by, so that what is in a part of those is spread here.
        &self.callers[usize::try_from(caller.0 >> 32).unwrap_or(0) & (CALLERS - 1)]
    }

    /// Whether any denial of a caller may be remembered.
    #[inline]
    pub(super) fn may_have(&self, caller: Caller, now_us: u64) -> bool {
        self.lately(caller).known_until.load(Ordering::Relaxed) > now_us
    }

    /// Whether a caller was denied lately, as far as that is known.
    #[inline]
    pub(super) fn comes_back(&self, caller: Caller) -> bool {
        let denied = self.lately(caller).denied.load(Ordering::Relaxed);
        [denied >> 32, denied & HALF].contains(&half(caller))
    }

    pub(super) fn note(&self, caller: Caller) {
        let denied = &self.lately(caller).denied;
        // Two at a time may lose one of them, who is noted when it comes again.
        denied.store(denied.load(Ordering::Relaxed) << 32 | half(caller), Ordering::Relaxed);
    }

    fn set(&self, key: &Key) -> &Mutex<Set> {
        &self.sets[usize::try_from(key.place).unwrap_or(0) & (self.sets.len() - 1)]
    }

    pub(super) fn find(&self, key: &Key, holds: impl FnOnce(&Denial) -> bool) -> Option<Denial> {
        let mut set = self.set(key).lock();
        let way = set.way_of(key)?;
        let denial = set.denials[way].map(|(_, denial)| denial).filter(holds)?;
        set.uses[way] = set.uses[way].saturating_add(1);
        Some(denial)
    }

    pub(super) fn put(&self, caller: Caller, key: &Key, denial: Denial) {
        let mut set = self.set(key).lock();
        let way = set.way_of(key).unwrap_or_else(|| set.make_room(denial.since));
        set.tags[way] = key.tag;
        set.denials[way] = Some((key.place, denial));
        drop(set);
        self.lately(caller).known_until.fetch_max(denial.until, Ordering::Relaxed);
    }
}

const HALF: u64 = 0xffff_ffff;

/// Never 0, which is nobody's.
const fn half(caller: Caller) -> u64 {
    (caller.0 & HALF) | 1
}

impl Set {
    fn way_of(&self, key: &Key) -> Option<usize> {
        let is =
            |way: &usize| self.tags[*way] == key.tag && self.denials[*way].is_some_and(|(place, _)| place == key.place);
        (0..WAYS).find(is)
    }

    fn make_room(&mut self, now_us: u64) -> usize {
        let use_of = |way: &usize| match &self.denials[*way] {
            Some((_, denial)) if denial.until > now_us => (1 + u16::from(self.uses[*way]), denial.until),
            Some(_) | None => (0, 0),
        };
        let way = (0..WAYS).min_by_key(use_of).unwrap_or(0);
        for uses in &mut self.uses {
            *uses /= 2;
        }
        self.uses[way] = 0;
        way
    }
}

#[cfg(test)]
mod tests {
    use limiter_common::sliding_window::Counts;

    use super::*;
    use crate::{
        limiter::{Kind, denials::Wait},
        store::{Algorithm, algorithm::View, memory::Moment},
    };

    fn denial(until: u64) -> Denial {
        Denial {
            moment: Moment::default(),
            since: 0,
            until,
            kind: Kind::Denied,
            rule: 0,
            algorithm: Algorithm::sliding_window(1, 1),
            view: View::Windows(Counts::default()),
            wait: Wait::Until(until),
            is_tightened: false,
            address: None,
            others: [0; super::super::MAX_OTHERS],
            others_len: 0,
        }
    }

    /// All in the same set.
    fn key(tag: u64) -> Key {
        Key { place: 0, tag }
    }

    #[test]
    fn who_is_denied_again_and_again_is_remembered_among_ever_new_names() {
        let table = Table::new(64);
        let (caller, is_there) = (Caller(7 << 32), |tag: u64| table.find(&key(tag), |_| true).is_some());
        table.put(caller, &key(1), denial(100));
        for stranger in 2..10_000 {
            assert!(is_there(1) && is_there(1), "{stranger}");
            table.put(caller, &key(stranger), denial(1_000_000));
        }
        let kept = (1..10_000).filter(|tag| is_there(*tag)).count();
        assert_eq!(kept, WAYS, "memory is bounded");
    }

    #[test]
    fn what_is_over_goes_first_and_a_denial_takes_the_place_of_the_one_before() {
        let table = Table::new(64);
        let caller = Caller(7 << 32);
        assert!(!table.may_have(caller, 0));
        for (tag, until) in [(1, 10), (2, 1000), (3, 1000), (4, 1000), (2, 2000)] {
            table.put(caller, &key(tag), denial(until));
        }
        for _ in 0..9 {
            assert!(table.find(&key(1), |_| true).is_some());
        }
        table.put(caller, &key(5), Denial { since: 500, ..denial(1000) });
        let until = |tag: u64| table.find(&key(tag), |_| true).map(|denial| denial.until);
        let all = [1, 2, 3, 4, 5].map(until);
        assert_eq!(all, [None, Some(2000), Some(1000), Some(1000), Some(1000)]);
        assert!(table.may_have(caller, 1999) && !table.may_have(caller, 2000));
        assert!(table.find(&key(2), |_| false).is_none());
    }

    #[test]
    fn to_be_remembered_takes_to_come_back() {
        let table = Table::new(64);
        let callers = [2, 4, 6].map(|number| Caller(7 << 32 | number));
        assert!(!table.comes_back(callers[0]));
        table.note(callers[0]);
        table.note(callers[1]);
        assert_eq!(callers.map(|caller| table.comes_back(caller)), [true, true, false]);
        table.note(callers[2]);
        assert_eq!(callers.map(|caller| table.comes_back(caller)), [false, true, true]);
    }
}

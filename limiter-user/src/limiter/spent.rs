//! Denials by Redis that are remembered for a moment, so that whoever goes on asking does not reach it each time.
//!
//! A counter that denied can allow again before the wait that it told is over, if somebody gives back what was charged, or if
//! Redis loses what it knew. What this node gives back is known here at once; what others do is not. So a denial is remembered
//! for [`REMEMBERED`] at most, and never beyond its own wait: nobody is denied for longer than that after somebody else has
//! made room, and otherwise nobody who asks Redis would be allowed.

use std::{
    collections::{HashMap, hash_map::Entry as MapEntry},
    time::Duration,
};

use foldhash::fast::FixedState;
use limiter_common::sliding_window::Outcome;
use parking_lot::Mutex;

use crate::{
    clock::Stopwatch,
    store::{Algorithm, CellOutcome, CellRef, CounterKey, algorithm::View, redis::Judged},
};

/// As often, a counter of which nothing can be lent is asked about again.
pub(super) const REMEMBERED: Duration = Duration::from_millis(250);
/// Enough that two cores rarely want the same lock.
const SHARDS: usize = 64;
/// Of one shard. Beyond, Redis is asked.
const MAX_OF_SHARD: usize = 4096;

/// By counter.
#[derive(Debug)]
pub(super) struct Spent(Box<[Mutex<HashMap<u64, Entry, FixedState>>]>);

#[derive(Debug)]
struct Entry {
    key: CounterKey,
    /// When Redis was asked, or something was given back: whoever asked before that has nothing to say.
    since: Stopwatch,
    denial: Option<Denial>,
}

#[derive(Clone, Copy, Debug)]
struct Denial {
    algorithm: Algorithm,
    /// Greater ones are denied as well.
    cost: u64,
    view: View,
    /// By Redis' clock.
    at_us: u64,
    wait_us: u64,
}

impl Default for Spent {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| Mutex::default()).collect())
    }
}

impl Spent {
    fn shard(&self, hash: u64) -> &Mutex<HashMap<u64, Entry, FixedState>> {
        &self.0[usize::try_from(hash >> 58).unwrap_or(0) % SHARDS]
    }

    /// What Redis would say of a cell, as far as that is known.
    pub(super) fn find(&self, cell: &CellRef<'_>) -> Option<CellOutcome> {
        let hash = cell.hash();
        let shard = self.shard(hash).lock();
        let entry = shard.get(&hash).filter(|entry| cell.is_of(&entry.key))?;
        let denial = entry.denial.filter(|denial| denial.algorithm == cell.algorithm && denial.cost <= cell.cost)?;
        let elapsed = entry.since.elapsed();
        drop(shard);
        denial.after(elapsed)
    }

    /// Remembers a denial. `asked` was started before the question left.
    pub(super) fn see(&self, cell: &CellRef<'_>, judged: &Judged, asked: Stopwatch) {
        let Outcome::Denied { retry_after_us } = judged.outcome.outcome else { return };
        let denial = Denial {
            algorithm: cell.algorithm,
            cost: cell.cost,
            view: judged.view,
            at_us: judged.at.get(),
            wait_us: retry_after_us,
        };
        self.put(cell, asked, Some(denial));
    }

    /// Something was given back.
    pub(super) fn forget(&self, cell: &CellRef<'_>) {
        self.put(cell, Stopwatch::start(), None);
    }

    fn put(&self, cell: &CellRef<'_>, since: Stopwatch, denial: Option<Denial>) {
        let hash = cell.hash();
        let mut shard = self.shard(hash).lock();
        if shard.len() >= MAX_OF_SHARD && !shard.contains_key(&hash) {
            shard.retain(|_, entry| entry.since.elapsed() < REMEMBERED);
            if shard.len() >= MAX_OF_SHARD {
                return;
            }
        }
        match shard.entry(hash) {
            MapEntry::Vacant(vacant) => {
                vacant.insert(Entry { key: cell.key(), since, denial });
            }
            MapEntry::Occupied(mut occupied) => {
                let entry = occupied.get_mut();
                let is_same = cell.is_of(&entry.key);
                if is_same && entry.since.is_after(&since) {
                    return;
                }
                if !is_same {
                    entry.key = cell.key();
                }
                (entry.since, entry.denial) = (since, denial);
            }
        }
    }
}

impl Denial {
    /// The answer so long after Redis was asked. It looked at its clock later than that, so by its clock the wait ends later.
    fn after(&self, elapsed: Duration) -> Option<CellOutcome> {
        let elapsed_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        if elapsed >= REMEMBERED || elapsed_us >= self.wait_us {
            return None;
        }
        let now_us = self.at_us.saturating_add(elapsed_us);
        let outcome = CellOutcome::allowed(self.algorithm.reset_us(self.view, now_us));
        let remaining = self.algorithm.remaining(self.view, now_us);
        Some(CellOutcome {
            outcome: Outcome::Denied { retry_after_us: self.wait_us - elapsed_us },
            remaining,
            ..outcome
        })
    }
}

#[cfg(test)]
mod tests {
    use limiter_common::{sliding_window::Counts, time::UnixMicros};

    use super::*;
    use crate::store::{AsCell as _, Cell, Identity};

    const SECOND: u64 = 1_000_000;

    fn cell(user: &str, ceiling: u64, cost: u64) -> Cell {
        let key = CounterKey { identity: Identity::User(user.into()), rule: "r".into() };
        Cell { key, algorithm: Algorithm::sliding_window(60 * SECOND, ceiling), cost, enforced: true }
    }

    fn denied(cost: u64, wait_us: u64) -> Judged {
        let view = View::Windows(Counts { index: 10, previous: 0, current: 11 - cost });
        let outcome = Outcome::Denied { retry_after_us: wait_us };
        let outcome = CellOutcome { outcome, ..CellOutcome::allowed(660 * SECOND) };
        Judged { outcome, view, at: UnixMicros::new(610 * SECOND) }
    }

    #[test]
    fn a_denial_holds_for_the_same_counter_and_as_much_or_more() {
        let spent = Spent::default();
        spent.see(&cell("u", 10, 3).as_cell(), &denied(3, 50 * SECOND), Stopwatch::start());
        for (asked, expected) in [
            (cell("u", 10, 3), true),
            (cell("u", 10, 4), true),
            (cell("u", 10, 2), false),
            (cell("u", 11, 3), false),
            (cell("v", 10, 3), false),
        ] {
            assert_eq!(spent.find(&asked.as_cell()).is_some(), expected, "{asked:?}");
        }
        let outcome = spent.find(&cell("u", 10, 3).as_cell()).unwrap();
        assert!(matches!(outcome.outcome, Outcome::Denied { retry_after_us: 49_000_000..50_000_000 }), "{outcome:?}");
        assert_eq!((outcome.remaining, outcome.reset_us), (2, 660 * SECOND));
    }

    #[test]
    fn a_denial_ends_with_its_wait_and_is_not_remembered_for_long() {
        let denial = |wait_us| {
            let cell = cell("u", 10, 1);
            Denial { algorithm: cell.algorithm, cost: 1, view: denied(1, 0).view, at_us: 610 * SECOND, wait_us }
        };
        let wait = |wait_us: u64, elapsed_us: u64| match denial(wait_us).after(Duration::from_micros(elapsed_us)) {
            Some(CellOutcome { outcome: Outcome::Denied { retry_after_us }, .. }) => retry_after_us,
            _ => 0,
        };
        assert_eq!([wait(1000, 0), wait(1000, 999), wait(1000, 1000)], [1000, 1, 0]);
        assert_eq!([wait(SECOND, 249_999), wait(SECOND, 250_000)], [SECOND - 249_999, 0]);
    }

    #[test]
    fn who_asked_before_something_was_given_back_has_nothing_to_say() {
        let spent = Spent::default();
        let cell = cell("u", 10, 1);
        let (before, judged) = (Stopwatch::start(), denied(1, 50 * SECOND));
        spent.see(&cell.as_cell(), &judged, before);
        spent.forget(&cell.as_cell());
        assert!(spent.find(&cell.as_cell()).is_none());
        spent.see(&cell.as_cell(), &judged, before);
        assert!(spent.find(&cell.as_cell()).is_none());
        spent.see(&cell.as_cell(), &judged, Stopwatch::start());
        assert!(spent.find(&cell.as_cell()).is_some());
    }

    #[test]
    fn memory_is_bounded() {
        let spent = Spent::default();
        for user in 0..2 * MAX_OF_SHARD * SHARDS {
            spent.see(&cell(&user.to_string(), 10, 1).as_cell(), &denied(1, 50 * SECOND), Stopwatch::start());
        }
        let most = spent.0.iter().map(|shard| shard.lock().len()).max();
        assert!(most <= Some(MAX_OF_SHARD), "{most:?}");
    }
}

//! One counter as this node knows it: what it admitted itself, what the others are known to have admitted, and how
//! much of its own the shared store has confirmed. Pure: `lua/sync.lua` is the other half of the exchange.

use limiter_common::sliding_window::{Counts, Window};

use super::CounterKey;

/// What one node has admitted on one counter: totals of two windows, not differences. Sending them twice changes
/// nothing, and whatever a lost message said, the next one says again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnTotals {
    pub key: CounterKey,
    pub window_us: u64,
    /// `current` is of the window `index`, `previous` of the one before.
    pub counts: Counts,
    /// What the shared store had confirmed of `counts.current` before.
    pub acknowledged_current: u64,
}

/// What the shared store knows of a counter after it has taken this node's totals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedCounts {
    /// Sums over all nodes.
    pub counts: Counts,
    /// This node's part of them.
    pub own_previous: u64,
    pub own_current: u64,
}

/// Counts of the current window and of the one before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pair {
    previous: u64,
    current: u64,
}

impl Pair {
    fn roll(&mut self) {
        *self = Self { previous: self.current, current: 0 };
    }

    /// The same counts, read as those of a window of another length. A shorter window gets its share, rounded up; a
    /// longer one gets them as they are.
    fn rescale(self, from_us: u64, to_us: u64) -> Self {
        let scale = |count: u64| {
            let scaled = (u128::from(count) * u128::from(to_us)).div_ceil(u128::from(from_us));
            u64::try_from(scaled).unwrap_or(u64::MAX).min(count)
        };
        Self { previous: scale(self.previous), current: scale(self.current) }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Counter {
    window_us: u64,
    index: u64,
    own: Pair,
    others: Pair,
    acknowledged: Pair,
}

impl Counter {
    pub(super) fn new(window: &Window, now_us: u64) -> Self {
        Self {
            window_us: window.window_us,
            index: window.index(now_us),
            own: Pair::default(),
            others: Pair::default(),
            acknowledged: Pair::default(),
        }
    }

    pub(super) const fn window_us(&self) -> u64 {
        self.window_us
    }

    /// What the counter stands for: everybody's counts.
    pub(super) const fn counts(&self) -> Counts {
        Counts {
            index: self.index,
            previous: self.own.previous.saturating_add(self.others.previous),
            current: self.own.current.saturating_add(self.others.current),
        }
    }

    /// Moves the counter to the window that `now_us` is in. Returns how much of this node's own counts was never
    /// confirmed and belongs to windows that are over: they weigh nothing any more, but somebody may want to know.
    ///
    /// - A clock that is one window behind leaves the counter in its window ([`Counts::at`]). One that is further
    ///   behind has been wrong before: the counts are kept and read as those of the window of `now_us`, so that no
    ///   counter waits for a time that was never true.
    /// - A policy may give its rule another window. The counts stay, in proportion when the window became shorter, so
    ///   a reload grants nobody a fresh window and locks nobody out for what was allowed under the old one.
    pub(super) fn move_to(&mut self, window_us: u64, now_us: u64) -> u64 {
        let mut unconfirmed = 0;
        if window_us != self.window_us {
            unconfirmed += self.advance(now_us / self.window_us);
            for pair in [&mut self.own, &mut self.others, &mut self.acknowledged] {
                *pair = pair.rescale(self.window_us, window_us);
            }
            self.window_us = window_us;
            self.index = now_us / window_us;
        }
        let index = now_us / window_us;
        if self.index > index.saturating_add(1) {
            self.index = index;
        }
        unconfirmed.saturating_add(self.advance(index))
    }

    fn advance(&mut self, index: u64) -> u64 {
        let windows = index.saturating_sub(self.index);
        if windows == 0 {
            return 0;
        }
        let mut unconfirmed = self.own.previous.saturating_sub(self.acknowledged.previous);
        if windows > 1 {
            unconfirmed = unconfirmed.saturating_add(self.own.current.saturating_sub(self.acknowledged.current));
        }
        for pair in [&mut self.own, &mut self.others, &mut self.acknowledged] {
            if windows == 1 { pair.roll() } else { *pair = Pair::default() }
        }
        self.index = index;
        unconfirmed
    }

    pub(super) fn charge(&mut self, cost: u64) {
        self.own.current = self.own.current.saturating_add(cost);
    }

    /// The instant from which the counter says nothing that an absent one does not say.
    pub(super) const fn expires_us(&self) -> u64 {
        self.index.saturating_add(2).saturating_mul(self.window_us)
    }

    pub(super) const fn is_expired(&self, now_us: u64) -> bool {
        self.expires_us() <= now_us
    }

    /// Own counts that the shared store has not confirmed.
    pub(super) const fn unconfirmed(&self) -> u64 {
        let previous = self.own.previous.saturating_sub(self.acknowledged.previous);
        previous.saturating_add(self.own.current.saturating_sub(self.acknowledged.current))
    }

    pub(super) const fn has_own_counts(&self) -> bool {
        self.own.previous != 0 || self.own.current != 0
    }

    pub(super) fn own_totals(&self, key: CounterKey) -> OwnTotals {
        let Pair { previous, current } = self.own;
        OwnTotals {
            key,
            window_us: self.window_us,
            counts: Counts { index: self.index, previous, current },
            acknowledged_current: self.acknowledged.current,
        }
    }

    /// Takes what the shared store said. Returns unconfirmed counts of windows that are over, as `move_to` does.
    ///
    /// Within a window, the others' counts only grow: a store that came back empty does not make this node forget.
    pub(super) fn learn(&mut self, shared: &SharedCounts) -> u64 {
        let unconfirmed = self.advance(shared.counts.index);
        let others = Pair {
            previous: shared.counts.previous.saturating_sub(shared.own_previous),
            current: shared.counts.current.saturating_sub(shared.own_current),
        };
        match self.index - shared.counts.index {
            0 => {
                self.others.previous = self.others.previous.max(others.previous);
                self.others.current = self.others.current.max(others.current);
                self.acknowledged = Pair { previous: shared.own_previous, current: shared.own_current };
            }
            1 => {
                self.others.previous = self.others.previous.max(others.current);
                self.acknowledged.previous = shared.own_current;
            }
            _ => {}
        }
        unconfirmed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Window = Window { window_us: 1000, ceiling: 100 };

    fn counter(now_us: u64, current: u64) -> Counter {
        let mut counter = Counter::new(&WINDOW, now_us);
        counter.charge(current);
        counter
    }

    fn shared(index: u64, previous: u64, current: u64, own_previous: u64, own_current: u64) -> SharedCounts {
        SharedCounts { counts: Counts { index, previous, current }, own_previous, own_current }
    }

    #[test]
    fn others_are_the_sum_without_our_own_part() {
        let mut counter = counter(5_500, 10);
        assert_eq!(counter.learn(&shared(5, 7, 40, 0, 10)), 0);
        assert_eq!(counter.counts(), Counts { index: 5, previous: 7, current: 40 });
        assert_eq!(counter.unconfirmed(), 0);
    }

    #[test]
    fn a_reply_of_the_window_before_counts_as_previous() {
        let mut counter = counter(5_500, 10);
        assert_eq!(counter.move_to(1000, 6_100), 0);
        counter.charge(3);
        counter.learn(&shared(5, 7, 40, 0, 10));
        assert_eq!(counter.counts(), Counts { index: 6, previous: 40, current: 3 });
        assert_eq!(counter.unconfirmed(), 3);
    }

    #[test]
    fn a_reply_of_the_next_window_moves_the_counter() {
        let mut counter = counter(5_999, 10);
        counter.learn(&shared(6, 30, 4, 10, 0));
        assert_eq!(counter.counts(), Counts { index: 6, previous: 30, current: 4 });
        counter.move_to(1000, 5_999);
        assert_eq!(counter.counts(), Counts { index: 6, previous: 30, current: 4 }, "our clock is a little behind");
    }

    #[test]
    fn a_store_that_came_back_empty_does_not_make_us_forget_the_others() {
        let mut counter = counter(5_500, 10);
        counter.learn(&shared(5, 7, 40, 0, 10));
        counter.learn(&shared(5, 0, 10, 0, 10));
        assert_eq!(counter.counts(), Counts { index: 5, previous: 7, current: 40 });
    }

    #[test]
    fn counts_of_windows_that_are_over_are_reported() {
        let mut counter = counter(5_500, 10);
        assert_eq!(counter.move_to(1000, 6_500), 0, "the previous window can still be sent");
        assert_eq!(counter.move_to(1000, 7_500), 10);
        assert_eq!(counter.move_to(1000, 9_500), 0);
    }

    #[test]
    fn a_clock_that_steps_back_keeps_the_counts() {
        let mut counter = counter(5_500, 10);
        counter.move_to(1000, 4_999);
        assert_eq!(counter.counts(), Counts { index: 5, previous: 0, current: 10 });
        counter.move_to(1000, 2_500);
        assert_eq!(counter.counts(), Counts { index: 2, previous: 0, current: 10 });
    }

    #[test]
    fn another_window_keeps_the_counts_in_proportion() {
        let mut longer = counter(5_500, 10);
        longer.move_to(60_000, 6_500);
        assert_eq!(longer.counts(), Counts { index: 0, previous: 10, current: 0 });
        let mut shorter = counter(5_500, 10);
        shorter.move_to(150, 5_600);
        assert_eq!(shorter.counts(), Counts { index: 37, previous: 0, current: 2 });
    }
}

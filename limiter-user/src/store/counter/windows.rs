//! The state of sliding and fixed windows: counts of two windows, of this node and of the others.

use limiter_common::sliding_window::Counts;

use super::OwnState;

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

    const fn beyond(&self, known: &Self) -> u64 {
        let previous = self.previous.saturating_sub(known.previous);
        previous.saturating_add(self.current.saturating_sub(known.current))
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct WindowState {
    index: u64,
    own: Pair,
    others: Pair,
    acknowledged: Pair,
}

impl WindowState {
    pub(super) fn new(index: u64) -> Self {
        Self::of_others(index, 0)
    }

    /// With counts that are nobody's own.
    pub(super) fn of_others(index: u64, current: u64) -> Self {
        let others = Pair { previous: 0, current };
        Self { index, own: Pair::default(), others, acknowledged: Pair::default() }
    }

    #[inline]
    pub(super) const fn counts(&self) -> Counts {
        Counts {
            index: self.index,
            previous: self.own.previous.saturating_add(self.others.previous),
            current: self.own.current.saturating_add(self.others.current),
        }
    }

    pub(super) const fn counts_of_others(&self) -> Counts {
        Counts { index: self.index, previous: self.others.previous, current: self.others.current }
    }

    /// Those of this node alone.
    pub(super) const fn own_counts(&self) -> Counts {
        Counts { index: self.index, previous: self.own.previous, current: self.own.current }
    }

    /// Moves to the window that `now_us` is in.
    ///
    /// A clock that is one window behind leaves the counter in its window ([`Counts::at`]). One that is further behind has
    /// been wrong before: the counts are kept and read as those of the window of `now_us`, so that no counter waits for a
    /// time that was never true.
    #[inline]
    pub(super) fn move_to(&mut self, from_us: u64, window_us: u64, now_us: u64) -> u64 {
        let mut unconfirmed = 0;
        if window_us != from_us {
            unconfirmed += self.advance(now_us / from_us);
            for pair in [&mut self.own, &mut self.others, &mut self.acknowledged] {
                *pair = pair.rescale(from_us, window_us);
            }
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

    #[inline]
    pub(super) fn charge(&mut self, cost: u64) {
        self.own.current = self.own.current.saturating_add(cost);
    }

    pub(super) fn give_back(&mut self, cost: u64) {
        let of_current = cost.min(self.own.current);
        self.own.current -= of_current;
        self.own.previous = self.own.previous.saturating_sub(cost - of_current);
    }

    pub(super) const fn ends_us(&self, window_us: u64) -> u64 {
        self.index.saturating_add(1).saturating_mul(window_us)
    }

    pub(super) const fn expires_us(&self, window_us: u64) -> u64 {
        self.index.saturating_add(2).saturating_mul(window_us)
    }

    pub(super) const fn unconfirmed(&self) -> u64 {
        self.own.beyond(&self.acknowledged)
    }

    pub(super) const fn differs(&self) -> bool {
        self.own.beyond(&self.acknowledged) != 0 || self.acknowledged.beyond(&self.own) != 0
    }

    pub(super) const fn has_own_counts(&self) -> bool {
        self.own.previous != 0 || self.own.current != 0 || self.differs()
    }

    pub(super) const fn own_state(&self) -> OwnState {
        let Pair { previous, current } = self.own;
        OwnState::Windows {
            counts: Counts { index: self.index, previous, current },
            acknowledged_current: self.acknowledged.current,
        }
    }

    /// Within a window, the others' counts only grow: a store that came back empty does not make this node forget.
    pub(super) fn learn(&mut self, sums: Counts, own_previous: u64, own_current: u64, adopts: bool) -> u64 {
        let unconfirmed = self.advance(sums.index);
        let others = if adopts {
            Pair {
                previous: sums.previous.saturating_sub(own_previous),
                current: sums.current.saturating_sub(own_current),
            }
        } else {
            Pair::default()
        };
        match self.index - sums.index {
            0 => {
                self.others.previous = self.others.previous.max(others.previous);
                self.others.current = self.others.current.max(others.current);
                self.acknowledged = Pair { previous: own_previous, current: own_current };
            }
            1 => {
                self.others.previous = self.others.previous.max(others.current);
                self.acknowledged.previous = own_current;
            }
            _ => {}
        }
        unconfirmed
    }

    /// Takes sums that a decision of the shared store left, lower ones as well: what it gave back is given back.
    pub(super) fn inform(&mut self, sums: Counts) -> u64 {
        let unconfirmed = self.advance(sums.index);
        match self.index - sums.index {
            0 => {
                self.others.previous = sums.previous.saturating_sub(self.acknowledged.previous);
                self.others.current = sums.current.saturating_sub(self.acknowledged.current);
            }
            1 => self.others.previous = sums.current.saturating_sub(self.acknowledged.previous),
            _ => {}
        }
        unconfirmed
    }
}

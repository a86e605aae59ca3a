//! The sliding-window counter, in integers: two counts stand for a window that moves.
//!
//! ```text
//! index    = now div window            elapsed = now mod window
//! estimate = (previous * (window - elapsed)) div window + current
//! allow when estimate + cost <= ceiling
//! ```
//!
//! `lua/sliding_window.lua` does the same sums; both are held to the same vectors.

/// `burst_factor` in thousandths, exact: 1000 × 1.001 is 1001.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BurstFactor(u32);

impl BurstFactor {
    pub const ONE: Self = Self(1000);

    /// From thousandths; `None` below 1.000 or above 1000.000.
    pub const fn from_thousandths(thousandths: u32) -> Option<Self> {
        if thousandths < 1000 || thousandths > 1_000_000 { None } else { Some(Self(thousandths)) }
    }

    pub const fn thousandths(self) -> u32 {
        self.0
    }

    /// `floor(limit * factor)`; `None` above 2^64 − 1.
    pub fn ceiling(self, limit: u64) -> Option<u64> {
        u64::try_from(u128::from(limit) * u128::from(self.0) / 1000).ok()
    }
}

/// A window and the most that it admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Length in microseconds, at least 1.
    pub window_us: u64,
    pub ceiling: u64,
}

/// The state: counts of the window `index` and of the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Counts {
    pub index: u64,
    pub previous: u64,
    pub current: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    Allowed,
    /// Would be allowed `retry_after_us` later if nothing else arrived, and not one microsecond earlier.
    Denied {
        retry_after_us: u64,
    },
    /// The cost is above the ceiling.
    Never,
}

impl Counts {
    /// The same counts seen from the window `index`. A clock that steps back stays in the window it was in.
    #[must_use]
    #[inline]
    pub const fn at(self, index: u64) -> Self {
        if index <= self.index {
            self
        } else if index == self.index + 1 {
            Self { index, previous: self.current, current: 0 }
        } else {
            Self { index, previous: 0, current: 0 }
        }
    }
}

impl Window {
    #[inline]
    pub const fn index(&self, now_us: u64) -> u64 {
        now_us / self.window_us
    }

    /// End of the window that `counts` is in.
    #[inline]
    pub const fn reset_us(&self, counts: &Counts) -> u64 {
        counts.index.saturating_add(1).saturating_mul(self.window_us)
    }

    /// What `counts` (already moved with [`Counts::at`]) stands for at `now_us`. Rounds the previous window's share
    /// down, as the definition does. Saturates.
    #[inline]
    pub fn estimate(&self, counts: &Counts, now_us: u64) -> u64 {
        // Most counters have no previous window, and then nothing is divided.
        if counts.previous == 0 {
            return counts.current;
        }
        let left = self.window_us - self.elapsed(counts, now_us);
        let share = match counts.previous.checked_mul(left) {
            Some(product) => product / self.window_us,
            // At most `previous`, so it fits.
            None => {
                let share = u128::from(counts.previous) * u128::from(left) / u128::from(self.window_us);
                u64::try_from(share).unwrap_or(u64::MAX)
            }
        };
        share.saturating_add(counts.current)
    }

    /// Microseconds into the window. 0 when the clock has stepped back before it: the previous window counts in full.
    #[inline]
    const fn elapsed(&self, counts: &Counts, now_us: u64) -> u64 {
        if now_us / self.window_us < counts.index { 0 } else { now_us % self.window_us }
    }

    /// Whether `cost` fits at `now_us` into `counts` (already moved with [`Counts::at`]). Changes nothing: the caller
    /// adds the cost once all of a request's rules allow it.
    #[inline]
    pub fn check(&self, counts: &Counts, now_us: u64, cost: u64) -> Outcome {
        if cost > self.ceiling {
            return Outcome::Never;
        }
        if self.estimate(counts, now_us) <= self.ceiling - cost {
            return Outcome::Allowed;
        }
        Outcome::Denied { retry_after_us: self.retry_after_us(counts, now_us, self.ceiling - cost) }
    }

    #[inline]
    pub fn remaining(&self, counts: &Counts, now_us: u64) -> u64 {
        self.ceiling.saturating_sub(self.estimate(counts, now_us))
    }

    /// Time until the estimate is at most `target`, which it is not at `now_us`.
    ///
    /// A count `n` weighs at most `m` while `n * left < (m + 1) * window`, so at most
    /// `((m + 1) * window - 1) div n` may be left of the window in which it is the previous one.
    fn retry_after_us(&self, counts: &Counts, now_us: u64, target: u64) -> u64 {
        let window = u128::from(self.window_us);
        let most_left = |count: u64, weight: u64| ((u128::from(weight) + 1) * window - 1) / u128::from(count);
        let to_window_end = u128::from(self.reset_us(counts).saturating_sub(now_us));
        let wait = if counts.current <= target {
            // Then the previous window's share is what is too much, so `previous` is not 0.
            to_window_end - most_left(counts.previous, target - counts.current).min(to_window_end)
        } else {
            to_window_end + window - most_left(counts.current, target).min(window)
        };
        u64::try_from(wait).unwrap_or(u64::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn burst_factor_is_exact() {
        let factor = |thousandths| BurstFactor::from_thousandths(thousandths).unwrap();
        assert_eq!(factor(1001).ceiling(1000), Some(1001));
        assert_eq!(factor(1250).ceiling(1), Some(1));
        assert_eq!(factor(1500).ceiling(u64::MAX), None);
        assert_eq!(BurstFactor::ONE.ceiling(u64::MAX), Some(u64::MAX));
        assert_eq!(BurstFactor::from_thousandths(999), None);
    }

    #[test]
    fn a_lowered_limit_denies_with_nothing_remaining() {
        let counts = Counts { index: 5, previous: 0, current: 100 };
        let window = Window { window_us: 1000, ceiling: 10 };
        assert_eq!(window.remaining(&counts, 5500), 0);
        assert!(matches!(window.check(&counts, 5500, 1), Outcome::Denied { .. }));
    }

    #[test]
    fn one_request_a_second_under_ten_in_ten_seconds_is_never_denied() {
        let window = Window { window_us: 10_000_000, ceiling: 10 };
        let mut counts = Counts::default();
        for second in 0..1000u64 {
            // Not on the boundary itself, where the closed interval of ten seconds holds eleven requests.
            let now = second * 1_000_000 + 1;
            counts = counts.at(window.index(now));
            assert_eq!(window.check(&counts, now, 1), Outcome::Allowed, "second {second}");
            counts.current += 1;
        }
    }

    #[test]
    fn extreme_parameters_give_an_answer() {
        let extremes = [1, (1 << 31) - 1, 1 << 31, (1 << 32) + 1, 1 << 53, 1 << 63, u64::MAX];
        for window_us in extremes {
            for ceiling in [0].into_iter().chain(extremes) {
                for count in [0].into_iter().chain(extremes) {
                    for now in extremes {
                        let window = Window { window_us, ceiling };
                        let counts = Counts { index: window.index(now), previous: count, current: count };
                        for cost in extremes {
                            match window.check(&counts, now, cost) {
                                Outcome::Allowed => assert!(count <= ceiling),
                                Outcome::Denied { retry_after_us } => assert!(retry_after_us > 0),
                                Outcome::Never => assert!(cost > ceiling),
                            }
                        }
                        assert!(window.remaining(&counts, now) <= ceiling);
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn denies_one_microsecond_before_retry_after_and_allows_at_it(
            window_us in 1u64..1 << 40, ceiling in 1u64..1 << 34, previous in 0u64..1 << 34, current in 0u64..1 << 34,
            cost in 1u64..1 << 34, index in 0u64..1 << 20, elapsed: u64,
        ) {
            let window = Window { window_us, ceiling };
            let now = index * window_us + elapsed % window_us;
            let counts = Counts { index, previous, current };
            if let Outcome::Denied { retry_after_us } = window.check(&counts, now, cost.min(ceiling)) {
                for (at, allowed) in [(now + retry_after_us - 1, false), (now + retry_after_us, true)] {
                    let later = counts.at(window.index(at));
                    prop_assert_eq!(window.check(&later, at, cost.min(ceiling)) == Outcome::Allowed, allowed, "{}", at);
                }
            }
        }

        #[test]
        fn admits_at_most_the_ceiling_in_an_aligned_window_and_twice_it_in_any(
            window_us in 1u64..1000, ceiling in 1u64..50,
            arrivals in prop::collection::vec((1u64..5, 0u64..400), 1..200),
        ) {
            let window = Window { window_us, ceiling };
            let (mut counts, mut now) = (Counts::default(), 0);
            let mut admitted = std::vec::Vec::new();
            for (cost, pause) in arrivals {
                now += pause;
                counts = counts.at(window.index(now));
                if window.check(&counts, now, cost) == Outcome::Allowed {
                    counts.current += cost;
                    admitted.push((now, cost));
                }
                prop_assert!(window.remaining(&counts, now) <= ceiling);
            }
            for (first, &(from, _)) in admitted.iter().enumerate() {
                let within = admitted[first..].iter().take_while(|(at, _)| at - from < window_us);
                prop_assert!(within.map(|(_, cost)| cost).sum::<u64>() <= 2 * ceiling);
                let aligned = window.index(from);
                let sum: u64 = admitted.iter().filter(|(at, _)| window.index(*at) == aligned).map(|(_, cost)| cost).sum();
                prop_assert!(sum <= ceiling);
            }
        }
    }
}

//! The algorithms as the stores see them: parameters of one cell, and what a counter says to it.
//!
//! There are three kinds of state. Windows (sliding and fixed) count; buckets (token and leaky) keep an instant; a log
//! keeps each admission. A rule that
//! changes its algorithm within a kind keeps its counters as they are; between kinds what was taken is carried over.

use limiter_common::{
    adaptive::{self, FULL},
    bucket::{Bucket, BucketError, MAX_FILL_NS},
    fixed_window,
    leaky_bucket::LeakyBucket,
    sliding_log,
    sliding_window::{Counts, Outcome, Window},
};

/// An algorithm and its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    SlidingWindow(Window),
    FixedWindow(Window),
    SlidingLog(Window),
    /// `window_us` says what the rate is counted by, and is not needed to decide.
    TokenBucket {
        bucket: Bucket,
        window_us: u64,
    },
    LeakyBucket {
        bucket: LeakyBucket,
        window_us: u64,
    },
}

/// What a counter says, after it was moved to the time and the parameters of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    Windows(Counts),
    Bucket {
        tat_ns: u64,
    },
    /// `wait_us` is the time until the cost that was asked for fits, `reset_us` when the last admission leaves.
    Log {
        used: u64,
        wait_us: u64,
        reset_us: u64,
    },
}

/// What kind of state an algorithm has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind<'a> {
    Windows,
    Bucket(&'a Bucket),
    Log(&'a Window),
}

impl Default for View {
    fn default() -> Self {
        Self::Windows(Counts::default())
    }
}

impl Algorithm {
    pub const fn sliding_window(window_us: u64, ceiling: u64) -> Self {
        Self::SlidingWindow(Window { window_us, ceiling })
    }

    #[inline]
    pub const fn window_us(&self) -> u64 {
        match self {
            Self::SlidingWindow(window) | Self::FixedWindow(window) | Self::SlidingLog(window) => window.window_us,
            Self::TokenBucket { window_us, .. } | Self::LeakyBucket { window_us, .. } => *window_us,
        }
    }

    /// The time that answers count the ceiling by. For a leaky bucket it is that in which a full queue leaves, since the
    /// queue's length and the window have nothing to do with each other.
    #[inline]
    pub const fn quota_us(&self) -> u64 {
        match self {
            Self::LeakyBucket { bucket, .. } => bucket.bucket().fill_ns() / 1000,
            Self::SlidingWindow(_) | Self::FixedWindow(_) | Self::SlidingLog(_) | Self::TokenBucket { .. } => {
                self.window_us()
            }
        }
    }

    /// The most that can pass at once.
    #[inline]
    pub const fn ceiling(&self) -> u64 {
        match self {
            Self::SlidingWindow(window) | Self::FixedWindow(window) | Self::SlidingLog(window) => window.ceiling,
            Self::TokenBucket { bucket, .. } => bucket.burst(),
            Self::LeakyBucket { bucket, .. } => bucket.bucket().burst(),
        }
    }

    /// The algorithm while only a share of its limit is granted. Where its ceiling stands for a limit, that shrinks down to
    /// `floor_ceiling`; where it has a rate, that shrinks down to `floor` units a window. A queue keeps its length.
    ///
    /// There is an error only where the floor itself is too slow for a bucket.
    #[inline]
    pub fn tightened(&self, floor: u64, floor_ceiling: u64, share: u32) -> Result<Self, BucketError> {
        if share >= FULL {
            return Ok(*self);
        }
        let window =
            |window: &Window| Window { ceiling: adaptive::effective(window.ceiling, floor_ceiling, share), ..*window };
        Ok(match self {
            Self::SlidingWindow(given) => Self::SlidingWindow(window(given)),
            Self::FixedWindow(given) => Self::FixedWindow(window(given)),
            Self::SlidingLog(given) => Self::SlidingLog(window(given)),
            Self::TokenBucket { bucket, window_us } => {
                let interval_ns = slower(bucket, *window_us, floor, share);
                let burst = adaptive::effective(bucket.burst(), floor_ceiling, share);
                // The interval is rounded up, so that the product may be more than it was.
                let burst = burst.min(MAX_FILL_NS / interval_ns.max(1)).max(1);
                Self::TokenBucket { bucket: Bucket::from_interval(interval_ns, burst)?, window_us: *window_us }
            }
            Self::LeakyBucket { bucket, window_us } => {
                let interval_ns = slower(bucket.bucket(), *window_us, floor, share);
                Self::LeakyBucket { bucket: bucket.with_interval(interval_ns)?, window_us: *window_us }
            }
        })
    }

    /// The share at which [`Self::tightened`] reaches the floor.
    pub fn share_of_floor(&self, floor: u64, floor_ceiling: u64) -> u32 {
        let share = match self {
            Self::SlidingWindow(_) | Self::FixedWindow(_) | Self::SlidingLog(_) | Self::TokenBucket { .. } => {
                u128::from(floor_ceiling) * u128::from(FULL) / u128::from(self.ceiling().max(1))
            }
            Self::LeakyBucket { bucket, window_us } => {
                let slowest = slower(bucket.bucket(), *window_us, floor, 0);
                u128::from(bucket.bucket().interval_ns()) * u128::from(FULL) / u128::from(slowest.max(1))
            }
        };
        u32::try_from(share).unwrap_or(FULL).min(FULL)
    }

    #[inline]
    pub const fn bucket(&self) -> Option<&Bucket> {
        match self {
            Self::SlidingWindow(_) | Self::FixedWindow(_) | Self::SlidingLog(_) => None,
            Self::TokenBucket { bucket, .. } => Some(bucket),
            Self::LeakyBucket { bucket, .. } => Some(bucket.bucket()),
        }
    }

    #[inline]
    pub(super) const fn kind(&self) -> Kind<'_> {
        match self {
            Self::SlidingWindow(_) | Self::FixedWindow(_) => Kind::Windows,
            Self::SlidingLog(window) => Kind::Log(window),
            Self::TokenBucket { bucket, .. } => Kind::Bucket(bucket),
            Self::LeakyBucket { bucket, .. } => Kind::Bucket(bucket.bucket()),
        }
    }

    /// What a counter says that nobody has used.
    #[inline]
    pub const fn unused(&self, now_us: u64) -> View {
        match self {
            Self::SlidingWindow(window) | Self::FixedWindow(window) => {
                View::Windows(Counts { index: window.index(now_us), previous: 0, current: 0 })
            }
            Self::TokenBucket { .. } | Self::LeakyBucket { .. } => View::Bucket { tat_ns: 0 },
            Self::SlidingLog(window) => View::Log { used: 0, wait_us: window.window_us, reset_us: now_us },
        }
    }

    /// Whether `cost` fits, and for how long the answer is to be held if it does.
    #[inline]
    pub fn check(&self, view: View, now_us: u64, cost: u64) -> (Outcome, u64) {
        match (self, view) {
            (Self::SlidingWindow(window), View::Windows(counts)) => (window.check(&counts, now_us, cost), 0),
            (Self::FixedWindow(window), View::Windows(counts)) => {
                (fixed_window::check(window, &counts, now_us, cost), 0)
            }
            (Self::TokenBucket { bucket, .. }, View::Bucket { tat_ns }) => {
                (bucket.check(tat_ns, in_ns(now_us), cost), 0)
            }
            (Self::LeakyBucket { bucket, .. }, View::Bucket { tat_ns }) => {
                let outcome = bucket.check(tat_ns, in_ns(now_us), cost);
                let delay_us = if outcome == Outcome::Allowed { bucket.delay_us(tat_ns, in_ns(now_us)) } else { 0 };
                (outcome, delay_us)
            }
            (Self::SlidingLog(window), View::Log { used, wait_us, .. }) => {
                (sliding_log::check(window, used, wait_us, cost), 0)
            }
            // A counter is moved to its cell's kind before it is looked at.
            (_, View::Windows(_) | View::Bucket { .. } | View::Log { .. }) => (Outcome::Never, 0),
        }
    }

    /// What the counter says after `cost` units were taken.
    #[inline]
    pub fn taken(&self, view: View, now_us: u64, cost: u64) -> View {
        match view {
            View::Windows(counts) => View::Windows(Counts { current: counts.current.saturating_add(cost), ..counts }),
            View::Bucket { tat_ns } if cost > 0 => match self.bucket() {
                Some(bucket) => View::Bucket { tat_ns: bucket.taken(tat_ns, in_ns(now_us), cost) },
                None => view,
            },
            View::Log { used, wait_us, .. } if cost > 0 => {
                let reset_us = now_us.saturating_add(self.window_us());
                View::Log { used: used.saturating_add(cost), wait_us, reset_us }
            }
            View::Bucket { .. } | View::Log { .. } => view,
        }
    }

    /// Units that count as used. Of a bucket 0: it has no window that they would be counted in.
    pub fn used(&self, view: View, now_us: u64) -> u64 {
        match (self, view) {
            (Self::SlidingWindow(window), View::Windows(counts)) => window.estimate(&counts, now_us),
            (Self::FixedWindow(_), View::Windows(counts)) => counts.current,
            (Self::SlidingLog(_), View::Log { used, .. }) => used,
            (_, View::Windows(_) | View::Bucket { .. } | View::Log { .. }) => 0,
        }
    }

    /// By how much the counter is above the ceiling.
    pub fn over(&self, view: View, now_us: u64) -> u64 {
        match (view, self.bucket()) {
            (View::Bucket { tat_ns }, Some(bucket)) => bucket.owed(tat_ns, in_ns(now_us)),
            (View::Windows(_) | View::Bucket { .. } | View::Log { .. }, _) => {
                self.used(view, now_us).saturating_sub(self.ceiling())
            }
        }
    }

    /// How much more could be taken from a counter that allows `cost`, and it would still allow it, then and later: units,
    /// or for a bucket nanoseconds of its time.
    pub(super) fn room(&self, view: View, now_us: u64, cost: u64) -> u64 {
        let of_bucket = |bucket: &Bucket, most_ns: u64, tat_ns: u64| {
            let place = bucket.fill_ns().saturating_sub(bucket.increment_ns(cost));
            place.min(most_ns).saturating_sub(bucket.ahead_ns(tat_ns, in_ns(now_us)))
        };
        match (self, view) {
            (Self::TokenBucket { bucket, .. }, View::Bucket { tat_ns }) => of_bucket(bucket, u64::MAX, tat_ns),
            (Self::LeakyBucket { bucket, .. }, View::Bucket { tat_ns }) => {
                of_bucket(bucket.bucket(), in_ns(bucket.max_delay_us()), tat_ns)
            }
            (_, View::Windows(_) | View::Bucket { .. } | View::Log { .. }) => {
                self.remaining(view, now_us).saturating_sub(cost)
            }
        }
    }

    #[inline]
    pub fn remaining(&self, view: View, now_us: u64) -> u64 {
        match (self, view) {
            (Self::SlidingWindow(window), View::Windows(counts)) => window.remaining(&counts, now_us),
            (Self::FixedWindow(window), View::Windows(counts)) => fixed_window::remaining(window, &counts),
            (Self::TokenBucket { bucket, .. }, View::Bucket { tat_ns }) => bucket.remaining(tat_ns, in_ns(now_us)),
            (Self::LeakyBucket { bucket, .. }, View::Bucket { tat_ns }) => bucket.remaining(tat_ns, in_ns(now_us)),
            (Self::SlidingLog(window), View::Log { used, .. }) => window.ceiling.saturating_sub(used),
            (_, View::Windows(_) | View::Bucket { .. } | View::Log { .. }) => 0,
        }
    }

    /// End of the window, or when the bucket is as good as new.
    #[inline]
    pub fn reset_us(&self, view: View, now_us: u64) -> u64 {
        match (self, view) {
            (Self::SlidingWindow(window) | Self::FixedWindow(window), View::Windows(counts)) => {
                window.reset_us(&counts)
            }
            (_, View::Bucket { tat_ns }) => self.bucket().map_or(now_us, |bucket| bucket.reset_us(tat_ns, now_us)),
            (_, View::Log { reset_us, .. }) => reset_us,
            (_, View::Windows(_)) => now_us,
        }
    }
}

/// The interval of a bucket at a share of its rate, at most that of `floor` units a window.
fn slower(bucket: &Bucket, window_us: u64, floor: u64, share: u32) -> u64 {
    let interval_ns = bucket.interval_ns();
    let slowest = (u128::from(window_us) * 1000).div_ceil(u128::from(floor.max(1)));
    let slower = (u128::from(interval_ns) * u128::from(FULL)).div_ceil(u128::from(share.max(1)));
    u64::try_from(slower.min(slowest)).unwrap_or(u64::MAX).max(interval_ns)
}

/// Saturates in the year 2554.
#[inline]
pub(super) const fn in_ns(us: u64) -> u64 {
    us.saturating_mul(1000)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(limit: u64, window_us: u64) -> [Algorithm; 5] {
        let window = Window { window_us, ceiling: limit };
        [
            Algorithm::SlidingWindow(window),
            Algorithm::FixedWindow(window),
            Algorithm::SlidingLog(window),
            Algorithm::TokenBucket { bucket: Bucket::new(limit, window_us, limit).unwrap(), window_us },
            Algorithm::LeakyBucket { bucket: LeakyBucket::new(limit, window_us, 9, 1_000_000).unwrap(), window_us },
        ]
    }

    proptest! {
        /// Both the ceiling and the rate stay between floor and limit, and go the same way as the share.
        #[test]
        fn each_algorithm_is_tightened_between_floor_and_limit(
            limit in 1u64..10_000, floor in 1u64..20_000, a in 0..=FULL, b in 0..=FULL,
        ) {
            let window_us = 60_000_000;
            for algorithm in all(limit, window_us) {
                let tightened = |share| algorithm.tightened(floor, floor, share).unwrap();
                let (less, more) = (tightened(a.min(b)), tightened(a.max(b)));
                let interval = |algorithm: &Algorithm| algorithm.bucket().map_or(1, Bucket::interval_ns);
                prop_assert!(less.ceiling() <= more.ceiling() && interval(&less) >= interval(&more));
                prop_assert!(more.ceiling() <= algorithm.ceiling() && interval(&more) >= interval(&algorithm));
                let lowest = tightened(0);
                let keeps_its_queue = matches!(algorithm, Algorithm::LeakyBucket { .. });
                let least = if keeps_its_queue { algorithm.ceiling() } else { floor.min(limit) };
                prop_assert_eq!(lowest.ceiling(), least);
                let slowest = (window_us * 1000).div_ceil(floor).max(interval(&algorithm));
                prop_assert!(algorithm.bucket().is_none() || interval(&lowest) == slowest);
                prop_assert_eq!(tightened(FULL), algorithm);
                let share = algorithm.share_of_floor(floor, floor);
                prop_assert_eq!(tightened(share).ceiling(), lowest.ceiling());
            }
        }
    }
}

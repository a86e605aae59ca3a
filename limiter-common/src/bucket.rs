//! Token and leaky buckets of request rules: GCRA in nanoseconds since 1970.
//!
//! Both keep one number, the instant at which the bucket is as good as new (`tat`). A token bucket lets a burst pass at
//! once; a leaky bucket gives each request its turn. `lua/lib/counter.lua` does the same sums.

use core::fmt;

use crate::{
    gcra::{self, GcraParams},
    sliding_window::Outcome,
};

/// The longest that an exhausted bucket may take to fill, 104 days: up to here nanoseconds are exact in Lua's numbers,
/// with room for a fraction of a microsecond beside them.
pub const MAX_FILL_NS: u64 = (1 << 53) - 1024;

/// A rate, and how much may come above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Time that one unit takes to come back.
    interval_ns: u64,
    /// The most units that fit.
    burst: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketError {
    ZeroLimit,
    ZeroWindow,
    ZeroBurst,
    /// Whole nanoseconds a unit are more than a hundredth off.
    TooFast,
    /// An exhausted bucket would take more than [`MAX_FILL_NS`] to fill.
    TooSlow,
}

impl fmt::Display for BucketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ZeroLimit => "limit is 0: use \"unlimited\" or remove the entry",
            Self::ZeroWindow => "the window is 0",
            Self::ZeroBurst => "burst is 0, so nothing could ever pass: use at least 1",
            Self::TooFast => {
                "the rate is too high for a bucket, whose units take whole nanoseconds: use sliding_window"
            }
            Self::TooSlow => "an exhausted bucket would take more than 104 days to fill: use sliding_window",
        })
    }
}

impl core::error::Error for BucketError {}

impl Bucket {
    /// `limit` units every `window_us`, and at most `burst` at once. The interval is rounded up, so the long-run rate is
    /// never above the given one, and at most a hundredth below it.
    pub fn new(limit: u64, window_us: u64, burst: u64) -> Result<Self, BucketError> {
        if limit == 0 {
            return Err(BucketError::ZeroLimit);
        }
        if window_us == 0 {
            return Err(BucketError::ZeroWindow);
        }
        let window_ns = u128::from(window_us) * 1000;
        let interval = window_ns.div_ceil(u128::from(limit));
        if (interval * u128::from(limit) - window_ns) * 100 > window_ns {
            return Err(BucketError::TooFast);
        }
        Self::from_interval(u64::try_from(interval).map_err(|_too_long| BucketError::TooSlow)?, burst)
    }

    /// One unit every `interval_ns`.
    pub fn from_interval(interval_ns: u64, burst: u64) -> Result<Self, BucketError> {
        if interval_ns == 0 {
            return Err(BucketError::TooFast);
        }
        if burst == 0 {
            return Err(BucketError::ZeroBurst);
        }
        match interval_ns.checked_mul(burst) {
            Some(fill_ns) if fill_ns <= MAX_FILL_NS => Ok(Self { interval_ns, burst }),
            Some(_) | None => Err(BucketError::TooSlow),
        }
    }

    #[inline]
    pub const fn interval_ns(&self) -> u64 {
        self.interval_ns
    }

    #[inline]
    pub const fn burst(&self) -> u64 {
        self.burst
    }

    /// Time that an exhausted bucket takes to fill.
    #[inline]
    pub const fn fill_ns(&self) -> u64 {
        // The constructors have seen that it fits.
        self.interval_ns.wrapping_mul(self.burst)
    }

    /// Time that `cost` units take; saturates.
    #[inline]
    pub const fn increment_ns(&self, cost: u64) -> u64 {
        self.interval_ns.saturating_mul(cost)
    }

    #[inline]
    fn params(&self) -> GcraParams {
        // The default has a burst of 0 and allows nothing.
        GcraParams::from_interval(self.interval_ns, self.burst).unwrap_or_default()
    }

    /// How far `tat_ns` is ahead of `now_ns`: what has been taken and did not come back yet. It is more than the bucket holds
    /// where several nodes took from it before they heard of each other: then they owe, until time has made up for it.
    #[inline]
    pub const fn ahead_ns(&self, tat_ns: u64, now_ns: u64) -> u64 {
        tat_ns.saturating_sub(now_ns)
    }

    /// Whole units that were taken and that the bucket did not hold.
    pub const fn owed(&self, tat_ns: u64, now_ns: u64) -> u64 {
        self.ahead_ns(tat_ns, now_ns).saturating_sub(self.fill_ns()) / self.interval_ns
    }

    /// Whether `cost` units can be taken at `now_ns`. Changes nothing.
    #[inline]
    pub fn check(&self, tat_ns: u64, now_ns: u64, cost: u64) -> Outcome {
        let ahead = self.ahead_ns(tat_ns, now_ns);
        // Debts are not known there: who owes waits for so much longer.
        let within = ahead.min(self.fill_ns());
        match gcra::check(now_ns.wrapping_add(within), &self.params(), now_ns, cost).outcome {
            gcra::Outcome::Conforming => Outcome::Allowed,
            gcra::Outcome::NonConforming { retry_after } => {
                Outcome::Denied { retry_after_us: retry_after.saturating_add(ahead - within).div_ceil(1000) }
            }
            gcra::Outcome::NeverConforming => Outcome::Never,
        }
    }

    /// The state after `cost` units were taken, whether they fit or not.
    #[inline]
    pub const fn taken(&self, tat_ns: u64, now_ns: u64, cost: u64) -> u64 {
        now_ns.saturating_add(self.ahead_ns(tat_ns, now_ns)).saturating_add(self.increment_ns(cost))
    }

    /// The state after `cost` units were given back. It is never more than full.
    pub const fn given_back(&self, tat_ns: u64, now_ns: u64, cost: u64) -> u64 {
        now_ns.saturating_add(self.ahead_ns(tat_ns, now_ns).saturating_sub(self.increment_ns(cost)))
    }

    /// Whole units left.
    #[inline]
    pub const fn remaining(&self, tat_ns: u64, now_ns: u64) -> u64 {
        self.fill_ns().saturating_sub(self.ahead_ns(tat_ns, now_ns)) / self.interval_ns
    }

    /// When it is full again, rounded up to a microsecond; `now_us` when it is.
    #[inline]
    pub const fn reset_us(&self, tat_ns: u64, now_us: u64) -> u64 {
        now_us.saturating_add(self.ahead_ns(tat_ns, now_us.saturating_mul(1000)).div_ceil(1000))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_a_bucket_cannot_do_is_an_error() {
        for (limit, window_us, burst, expected) in [
            (0, 1, 1, Err(BucketError::ZeroLimit)),
            (1, 0, 1, Err(BucketError::ZeroWindow)),
            (1, 1, 0, Err(BucketError::ZeroBurst)),
            (1, 1, 1, Ok(1000)),
            (3, 1_000_000, 10, Ok(333_333_334)),
            (1000, 1, 1000, Ok(1)),
            (1011, 1, 1000, Err(BucketError::TooFast)),
            (u64::MAX, 1, 1, Err(BucketError::TooFast)),
            (u64::MAX, u64::MAX, u64::MAX, Err(BucketError::TooSlow)),
            (1, u64::MAX, 1, Err(BucketError::TooSlow)),
            (1, 60_000_000, 1 << 53, Err(BucketError::TooSlow)),
            (1 << 31, 1 << 31, (1 << 31) + 1, Ok(1000)),
            ((1 << 32) + 1, 1 << 32, 1, Ok(1000)),
        ] {
            let made = Bucket::new(limit, window_us, burst).map(|bucket| bucket.interval_ns());
            assert_eq!(made, expected, "{limit} {window_us} {burst}");
        }
    }

    proptest! {
        /// The model fills a bucket of nanoseconds step by step. What others took, they took whether it was there or not.
        #[test]
        fn decides_as_a_bucket_that_is_filled_does(
            interval in 1u64..5_000_000, burst in 1u64..50, start_us in 0u64..1 << 50,
            steps in prop::collection::vec((0u64..60, 0..5, 0u64..20_000), 1..200),
        ) {
            let bucket = Bucket::from_interval(interval, burst).unwrap();
            let (full, mut tat, mut now_us) = ((interval * burst).cast_signed(), 0, start_us);
            let (mut level, ns) = (full, |units: u64| (units * interval).cast_signed());
            for (cost, what, pause_us) in steps {
                now_us += pause_us;
                level = full.min(level + (pause_us * 1000).cast_signed());
                let now = now_us * 1000;
                if what == 0 {
                    tat = bucket.given_back(tat, now, cost);
                    level = full.min(level + ns(cost));
                } else if what == 1 {
                    tat = bucket.taken(tat, now, cost);
                    level -= ns(cost);
                } else {
                    match bucket.check(tat, now, cost) {
                        Outcome::Allowed => {
                            prop_assert!(cost == 0 || ns(cost) <= level);
                            level -= ns(cost);
                            tat = bucket.taken(tat, now, cost);
                        }
                        Outcome::Denied { retry_after_us } => {
                            prop_assert!(cost <= burst && retry_after_us > 0);
                            let level_in = |us: u64| level + (us * 1000).cast_signed();
                            prop_assert!(level_in(retry_after_us - 1) < ns(cost));
                            prop_assert!(level_in(retry_after_us) >= ns(cost));
                        }
                        Outcome::Never => prop_assert!(cost > burst),
                    }
                }
                prop_assert_eq!(bucket.remaining(tat, now), level.max(0).cast_unsigned() / interval);
                prop_assert_eq!(bucket.owed(tat, now), (-level).max(0).cast_unsigned() / interval);
                let lacks = (full - level).cast_unsigned();
                prop_assert_eq!(bucket.reset_us(tat, now_us), now_us + lacks.div_ceil(1000));
            }
        }
    }
}

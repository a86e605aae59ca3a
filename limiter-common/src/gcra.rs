//! The generic cell rate algorithm (ITU-T I.371, virtual scheduling): an exact token bucket in one integer.
//!
//! The state is the theoretical arrival time (`tat`): the instant at which the bucket is full again. A caller
//! chooses what a tick is. The XDP program uses 1/256 ns ([`TICKS_PER_NS`]), so that byte rates up to 100 Gbit/s
//! (0.08 ns a byte) stay within 0.1 %; stores use nanoseconds or microseconds.
//!
//! `tat` and `now` are compared by signed difference, so a clock that wraps is no special case: with 1/256 ns a
//! wrap comes after 2.2 years of uptime. A bucket left alone for half of that reads as exhausted instead of full,
//! and refills at its rate from then on.

/// Bits of a nanosecond's fraction in the XDP program's ticks.
pub const TICK_SHIFT: u32 = 8;
/// Ticks in a nanosecond, in the XDP program.
pub const TICKS_PER_NS: u64 = 1 << TICK_SHIFT;

/// How late a reading of the clock may be when the XDP program acts on it, about a second: a tick by the clock itself,
/// more where the CPU was taken away between the reading and the update.
pub const MAX_CLOCK_LAG: u64 = TICKS_PER_NS << 30;

/// A clock that moves once a kernel tick (10 ms at most) refills a bucket no better than this: what a bucket holds has to
/// come back in four ticks or more, or a part of every tick finds it full and is lost.
pub const MIN_TICKED_TOLERANCE: u64 = 40_000_000 * TICKS_PER_NS;

/// Integers derived from a [`crate::quota::Quota`].
///
/// Map value: host byte order, no padding.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct GcraParams {
    /// Time that one unit takes to come back, in ticks, with `frac_bits` bits of fraction.
    emission_interval: u64,
    /// How far `tat` may be ahead of `now`: the time that the whole burst takes, in ticks.
    burst_tolerance: u64,
    /// The most units that fit in the bucket.
    burst: u64,
    frac_bits: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<GcraParams>() == 8 + 8 + 8 + 4 + 4);

/// The pure result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    Conforming,
    /// Would conform `retry_after` ticks later if nothing else arrived, and not one tick earlier.
    NonConforming {
        retry_after: u64,
    },
    /// The cost is above the burst.
    NeverConforming,
}

/// An outcome and the state to store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Step {
    pub outcome: Outcome,
    /// Differs from the state before when the check conforms, or when that state lay further ahead than these
    /// parameters allow (a quota was lowered): it is then cut to an exhausted bucket, so that a client waits by the
    /// new quota and never out an old one's debt.
    pub tat: u64,
}

impl Step {
    /// Whether a refused check has cut what no lag of the clock explains, in the XDP program's ticks. Where many CPUs
    /// change one state, only such a cut may be stored: whoever reads the clock late takes an exhausted bucket for one
    /// with too much debt. To cut that gives back what came since, and two CPUs that disagree about the time would give
    /// back, and take, in turns without end.
    #[inline(always)]
    pub const fn cuts_debt(&self, before: u64) -> bool {
        before.wrapping_sub(self.tat) > MAX_CLOCK_LAG
    }
}

impl GcraParams {
    /// Parameters from an interval in whole ticks. `None` when the interval or the burst is 0, or when the tolerance
    /// does not fit in 62 bits.
    pub const fn from_interval(emission_interval: u64, burst: u64) -> Option<Self> {
        Self::with_fraction(emission_interval, 0, burst)
    }

    /// As [`Self::from_interval`], with `frac_bits` bits of fraction in the interval.
    pub const fn with_fraction(emission_interval: u64, frac_bits: u32, burst: u64) -> Option<Self> {
        if emission_interval == 0 || burst == 0 || frac_bits > 32 {
            return None;
        }
        let Some(product) = emission_interval.checked_mul(burst) else { return None };
        if product >> 62 != 0 {
            return None;
        }
        Some(Self { emission_interval, burst_tolerance: product >> frac_bits, burst, frac_bits, reserved: 0 })
    }

    #[inline(always)]
    pub const fn burst(&self) -> u64 {
        self.burst
    }

    #[inline(always)]
    pub const fn burst_tolerance(&self) -> u64 {
        self.burst_tolerance
    }

    /// Whether a clock that moves once a kernel tick would cap the rate below the configured one, in the XDP program.
    #[inline]
    pub const fn needs_fine_clock(&self) -> bool {
        self.burst_tolerance < MIN_TICKED_TOLERANCE
    }

    /// Ticks that `cost` units take. Rounds down to a tick: at most one tick a check too generous, and never so much
    /// that a burst of equal costs is one short. Needs `cost <= burst`, which keeps the product in 62 bits.
    #[inline(always)]
    pub const fn increment(&self, cost: u64) -> u64 {
        // Masked so that the compiler, and with it the verifier, knows the shift is in range.
        (self.emission_interval.wrapping_mul(cost)) >> (self.frac_bits & 63)
    }

    /// Whole units left at `now`.
    pub const fn remaining(&self, tat: u64, now: u64) -> u64 {
        let left = self.burst_tolerance - ahead(tat, now, self.burst_tolerance);
        if left == self.burst_tolerance {
            return self.burst;
        }
        (left << self.frac_bits) / self.emission_interval
    }
}

/// How far `tat` is ahead of `now`, at most `limit`; 0 when it lies in the past.
#[inline(always)]
const fn ahead(tat: u64, now: u64, limit: u64) -> u64 {
    let difference = tat.wrapping_sub(now);
    // The upper half of the range is the past.
    if difference >> 63 != 0 {
        0
    } else if difference > limit {
        limit
    } else {
        difference
    }
}

/// Takes `cost` units at `now` from the bucket whose state is `tat`, or says when it could.
///
/// A cost of 0 is a peek: it conforms and changes nothing.
#[inline(always)]
pub const fn check(tat: u64, params: &GcraParams, now: u64, cost: u64) -> Step {
    if cost == 0 {
        return Step { outcome: Outcome::Conforming, tat };
    }
    match take(tat, params, now, cost) {
        Some(tat) => Step { outcome: Outcome::Conforming, tat },
        None => refuse(tat, params, now, cost),
    }
}

/// The state after `cost` units, not 0, are taken at `now`; `None` where they do not conform, which [`refuse`] explains.
#[inline(always)]
pub const fn take(tat: u64, params: &GcraParams, now: u64, cost: u64) -> Option<u64> {
    if cost > params.burst {
        return None;
    }
    let needed = ahead(tat, now, params.burst_tolerance) + params.increment(cost);
    if needed > params.burst_tolerance { None } else { Some(now.wrapping_add(needed)) }
}

/// Why a cost that [`take`] has refused does not conform, and what is to be stored all the same.
#[inline(always)]
pub const fn refuse(tat: u64, params: &GcraParams, now: u64, cost: u64) -> Step {
    if cost > params.burst {
        return Step { outcome: Outcome::NeverConforming, tat };
    }
    let ahead = ahead(tat, now, params.burst_tolerance);
    let retry_after = ahead + params.increment(cost) - params.burst_tolerance;
    let cut = now.wrapping_add(params.burst_tolerance);
    let tat = if ahead == params.burst_tolerance { cut } else { tat };
    Step { outcome: Outcome::NonConforming { retry_after }, tat }
}

/// The state of a bucket that is full at `now`.
#[inline(always)]
pub const fn full(now: u64) -> u64 {
    now
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params(interval: u64, burst: u64) -> GcraParams {
        GcraParams::from_interval(interval, burst).unwrap()
    }

    #[test]
    fn zero_interval_zero_burst_and_overflow_are_refused() {
        for (interval, burst) in [(0, 1), (1, 0), (u64::MAX, 2), (1 << 62, 1), (1 << 31, 1 << 31)] {
            assert_eq!(GcraParams::from_interval(interval, burst), None, "{interval} {burst}");
        }
    }

    #[test]
    fn lowered_quota_waits_by_the_new_quota() {
        let slow = params(60_000_000_000, 100);
        let fast = params(1_000_000, 10);
        let mut tat = full(0);
        for _ in 0..100 {
            tat = check(tat, &slow, 0, 1).tat;
        }
        let denied = check(tat, &fast, 0, 1);
        assert_eq!(denied.outcome, Outcome::NonConforming { retry_after: 1_000_000 });
        assert_eq!(fast.remaining(denied.tat, 0), 0);
        assert_eq!(check(denied.tat, &fast, 1_000_000, 1).outcome, Outcome::Conforming);
    }

    /// A thousand a second, asked for a hundred times as often, by two CPUs in turns. To cut the debt that the late one
    /// believes in would admit four times as much.
    #[test]
    fn two_clocks_a_tick_apart_share_one_burst() {
        const MS: u64 = 1_000_000 * TICKS_PER_NS;
        let params = params(MS, 2000);
        let start = 1000 * MS;
        let (mut tat, mut admitted) = (full(start), 0);
        for packet in 0..16_000 {
            let late = if packet % 2 == 0 { 0 } else { 4 * MS };
            let step = check(tat, &params, start + packet / 100 * MS - late, 1);
            let conforms = step.outcome == Outcome::Conforming;
            admitted += u64::from(conforms);
            if conforms || step.cuts_debt(tat) {
                tat = step.tat;
            }
        }
        assert_eq!(admitted, 2000 + 159);
    }

    #[test]
    fn holds_across_idle_times_and_wraps() {
        let hour_ns = 3_600_000_000_000u64;
        for start_ns in [0, 1, (1 << 55) - 1, 1 << 62, (1 << 63) - 1, u64::MAX] {
            for idle_ns in [hour_ns, hour_ns / 60 * 72, 100 * 24 * hour_ns] {
                for interval_ns in [60_000_000_000, 333_333_334, 142_857_143, 1_000] {
                    let params = params(interval_ns * TICKS_PER_NS, 5);
                    let ticks = |ns: u64| ns.wrapping_mul(TICKS_PER_NS);
                    let mut tat = full(ticks(start_ns));
                    for now_ns in [start_ns, start_ns.wrapping_add(idle_ns)] {
                        let now = ticks(now_ns);
                        for unit in 0..6 {
                            let step = check(tat, &params, now, 1);
                            assert_eq!(step.outcome == Outcome::Conforming, unit < 5, "{start_ns} {idle_ns}");
                            tat = step.tat;
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn only_a_debt_that_no_lag_explains_is_cut() {
        let slow = params(MAX_CLOCK_LAG, 3);
        let fast = params(1000, 10);
        let exhausted = (0..3).fold(full(0), |tat, _| check(tat, &slow, 0, 1).tat);
        for (lag, cuts) in [(0, false), (1, false), (MAX_CLOCK_LAG, false), (MAX_CLOCK_LAG + 1, true)] {
            let late = check(exhausted, &slow, lag.wrapping_neg(), 1);
            assert_ne!(late.outcome, Outcome::Conforming);
            assert_eq!(late.cuts_debt(exhausted), cuts, "{lag}");
        }
        assert!(check(exhausted, &fast, 0, 1).cuts_debt(exhausted), "a lowered quota");
    }

    proptest! {
        #[test]
        fn denies_one_tick_before_retry_after_and_allows_at_it(
            interval in 1u64..1 << 30, burst in 1u64..1 << 20, start: u64,
            costs in prop::collection::vec((1u64..1 << 20, 0u64..1 << 40), 1..50),
        ) {
            let params = params(interval, burst);
            let (mut tat, mut now) = (full(start), start);
            for (cost, pause) in costs {
                now = now.wrapping_add(pause);
                let cost = cost.min(burst);
                let step = check(tat, &params, now, cost);
                if let Outcome::NonConforming { retry_after } = step.outcome {
                    prop_assert!(retry_after > 0);
                    let early = check(tat, &params, now.wrapping_add(retry_after - 1), cost).outcome;
                    prop_assert_ne!(early, Outcome::Conforming);
                    let due = check(tat, &params, now.wrapping_add(retry_after), cost).outcome;
                    prop_assert_eq!(due, Outcome::Conforming);
                }
                tat = step.tat;
                prop_assert!(params.remaining(tat, now) <= burst);
            }
        }

        #[test]
        fn admits_at_most_burst_plus_rate_in_any_window(
            interval in 1u64..1 << 20, burst in 1u64..1000, start: u64,
            arrivals in prop::collection::vec((1u64..20, 0u64..1 << 22), 1..200),
        ) {
            let params = params(interval, burst);
            let (mut tat, mut now) = (full(start), start);
            let mut admitted = std::vec::Vec::new();
            for (cost, pause) in arrivals {
                now = now.wrapping_add(pause);
                let step = check(tat, &params, now, cost);
                if step.outcome == Outcome::Conforming {
                    admitted.push((now.wrapping_sub(start), cost));
                }
                tat = step.tat;
            }
            for (first, &(from, _)) in admitted.iter().enumerate() {
                let mut sum = 0;
                for &(at, cost) in &admitted[first..] {
                    sum += cost;
                    prop_assert!(sum <= burst + (at - from) / interval, "{sum} units in {} ticks", at - from);
                }
            }
        }

        /// As above, for CPUs that share the state and read the clock more or less late.
        #[test]
        fn late_readings_only_delay_refill(
            interval in 1u64..1 << 40, burst in 1u64..1000, start: u64,
            arrivals in prop::collection::vec((1u64..20, 0u64..1 << 38, 0..=MAX_CLOCK_LAG), 1..200),
        ) {
            let params = params(interval, burst);
            let (mut tat, mut now) = (full(start), start);
            let mut admitted = std::vec::Vec::new();
            for (cost, pause, lag) in arrivals {
                now = now.wrapping_add(pause);
                let step = check(tat, &params, now.wrapping_sub(lag), cost);
                if step.outcome == Outcome::Conforming {
                    admitted.push((now.wrapping_sub(start), lag, cost));
                }
                if step.outcome == Outcome::Conforming || step.cuts_debt(tat) {
                    tat = step.tat;
                }
            }
            for (first, &(from, lag, _)) in admitted.iter().enumerate() {
                let mut sum = 0;
                for &(at, _, cost) in &admitted[first..] {
                    sum += cost;
                    prop_assert!(sum <= burst + (at - from + lag) / interval, "{sum} units in {} ticks", at - from);
                }
            }
        }
    }
}

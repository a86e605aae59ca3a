//! What the operator configures for a bucket, and the GCRA parameters made of it.

use core::fmt;

use crate::gcra::{GcraParams, TICKS_PER_NS};

/// `count` units every `per_ns` nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    pub count: u64,
    pub per_ns: u64,
}

/// A rate and the most units that may come at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    pub rate: Rate,
    pub burst: u64,
}

/// The longest that an exhausted bucket may take to fill: 30 days. Beyond it a packet limit is surely a mistake.
pub const MAX_FILL_NS: u64 = 30 * 24 * 3600 * 1_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaError {
    ZeroRate,
    ZeroBurst,
    /// More than 10^11 units a second: a unit would take less than the resolution of the arithmetic.
    TooFast,
    /// An exhausted bucket would take more than [`MAX_FILL_NS`] to fill.
    TooSlow,
}

impl fmt::Display for QuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ZeroRate => "rate is 0: use \"unlimited\" or remove the entry",
            Self::ZeroBurst => "burst is 0, so nothing could ever pass: use at least 1",
            Self::TooFast => "rate is above 100000000000 a second: use \"unlimited\"",
            Self::TooSlow => {
                "an exhausted bucket would take more than 30 days to fill: lower the burst or raise the rate"
            }
        })
    }
}

impl core::error::Error for QuotaError {}

impl Quota {
    /// Parameters in the XDP program's ticks (1/256 ns).
    ///
    /// The interval is rounded up, so that the long-run rate is never above the configured one. It has as many bits
    /// of fraction (at most 16) as let the whole burst fit, so the error is below 2^-16 at any rate.
    pub fn params(&self) -> Result<GcraParams, QuotaError> {
        let Rate { count, per_ns } = self.rate;
        if count == 0 || per_ns == 0 {
            return Err(QuotaError::ZeroRate);
        }
        if self.burst == 0 {
            return Err(QuotaError::ZeroBurst);
        }
        if u128::from(count) * 1_000_000_000 > u128::from(per_ns) * 100_000_000_000 {
            return Err(QuotaError::TooFast);
        }
        let fill_ns = u128::from(per_ns) * u128::from(self.burst) / u128::from(count);
        if fill_ns > u128::from(MAX_FILL_NS) {
            return Err(QuotaError::TooSlow);
        }
        let ticks = u128::from(per_ns) * u128::from(TICKS_PER_NS);
        // A whole number of ticks keeps bursts exact; a fraction is needed only where a tick is a coarse unit.
        let mut frac_bits = if ticks / u128::from(count) >= 1 << 16 { 0 } else { 16 };
        loop {
            let interval = (ticks << frac_bits).div_ceil(u128::from(count));
            let params = u64::try_from(interval)
                .ok()
                .and_then(|interval| GcraParams::with_fraction(interval, frac_bits, self.burst));
            match params {
                Some(params) => return Ok(params),
                None if frac_bits == 0 => return Err(QuotaError::TooSlow),
                None => frac_bits -= 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gcra::{Outcome, check, full};

    const SECOND_NS: u64 = 1_000_000_000;

    fn quota(count: u64, per_ns: u64, burst: u64) -> Quota {
        Quota { rate: Rate { count, per_ns }, burst }
    }

    #[test]
    fn bad_quotas_are_refused() {
        for (quota, error) in [
            (quota(0, SECOND_NS, 1), QuotaError::ZeroRate),
            (quota(1, 0, 1), QuotaError::ZeroRate),
            (quota(1, SECOND_NS, 0), QuotaError::ZeroBurst),
            (quota(1, SECOND_NS, u64::MAX), QuotaError::TooSlow),
            (quota(u64::MAX, SECOND_NS, 1), QuotaError::TooFast),
            (quota(1, u64::MAX, 2), QuotaError::TooSlow),
        ] {
            assert_eq!(quota.params(), Err(error), "{quota:?}");
        }
    }

    /// Through idle times and clocks, those included at which a signed or a shifted clock would turn over.
    #[test]
    fn a_source_that_comes_back_finds_its_burst_and_then_its_rate() {
        const HOUR_NS: u64 = 3600 * SECOND_NS;
        for (count, per_ns) in [(1, 60 * SECOND_NS), (3, SECOND_NS), (7, SECOND_NS), (1_000_000, SECOND_NS)] {
            let params = quota(count, per_ns, 5).params().unwrap();
            let interval = params.increment(1);
            for idle_ns in [HOUR_NS, HOUR_NS / 60 * 72, 100 * 24 * HOUR_NS] {
                let ends = [0, 1 << 55, 1 << 62, 1 << 63, 0u64].map(|turn: u64| turn.wrapping_sub(idle_ns / 2));
                for start_ns in [0, (1 << 63) - 1, u64::MAX].into_iter().chain(ends) {
                    let context = std::format!("{count} in {per_ns} ns, idle for {idle_ns} ns from {start_ns}");
                    let start = start_ns.wrapping_mul(TICKS_PER_NS);
                    let back = start.wrapping_add(idle_ns.wrapping_mul(TICKS_PER_NS));
                    let mut tat = full(start);
                    // The burst at once, then one unit an interval and none a tick earlier.
                    for from in [start, back] {
                        for unit in 0..5 {
                            let step = check(tat, &params, from, 1);
                            assert_eq!(step.outcome, Outcome::Conforming, "{context}: unit {unit}");
                            tat = step.tat;
                        }
                        for unit in 1..=3 {
                            let due = from.wrapping_add(unit * interval);
                            let early = check(tat, &params, due.wrapping_sub(1), 1).outcome;
                            assert_eq!(early, Outcome::NonConforming { retry_after: 1 }, "{context}");
                            let step = check(tat, &params, due, 1);
                            assert_eq!(step.outcome, Outcome::Conforming, "{context}");
                            tat = step.tat;
                        }
                    }
                    // A unit takes what the rate says, rounded up to a tick.
                    let exact = u128::from(per_ns) * u128::from(TICKS_PER_NS);
                    let error = u128::from(interval) * u128::from(count) - exact;
                    assert!(error < u128::from(count), "{context}");
                }
            }
        }
    }

    #[test]
    fn long_run_rate_is_within_a_thousandth_and_bursts_are_exact() {
        // (rate a second, burst, cost): slow and fast packets, byte rates up to 100 Gbit/s with small and large frames.
        for (rate, burst, cost) in [
            (1, 5, 1),
            (3, 10, 1),
            (7, 10, 1),
            (1_000_000, 1000, 1),
            (100_000_000, 1000, 1),
            (10_000_000, 1_500_000, 1500),
            (1_250_000_000, 12_500_000, 60),
            (12_500_000_000, 60_000_000, 60),
            (12_500_000_000, 15_000_000, 1500),
            (12_500_000_000, 90_000_000, 9000),
        ] {
            let params = quota(rate, SECOND_NS, burst).params().unwrap();
            let (mut tat, mut at_once) = (full(0), 0u64);
            loop {
                let step = check(tat, &params, 0, cost);
                tat = step.tat;
                match step.outcome {
                    Outcome::Conforming => at_once += 1,
                    Outcome::NonConforming { .. } | Outcome::NeverConforming => break,
                }
            }
            let exact = burst / cost;
            assert!(at_once >= exact && at_once <= exact + exact / 1000, "{rate}/s: {at_once} of {exact} at once");

            let (mut now, mut admitted) = (0, 0u64);
            for _ in 0..100_000 {
                let step = check(tat, &params, now, cost);
                match step.outcome {
                    Outcome::Conforming => {
                        admitted += cost;
                        tat = step.tat;
                    }
                    Outcome::NonConforming { retry_after } => now += retry_after,
                    Outcome::NeverConforming => unreachable!("cost is below burst"),
                }
            }
            let expected = u128::from(now) * u128::from(rate) / (u128::from(TICKS_PER_NS) * u128::from(SECOND_NS));
            let error = u128::from(admitted).abs_diff(expected);
            assert!(error * 1000 <= expected + u128::from(cost) * 1000, "{rate}/s: {admitted} for {expected}");
        }
    }
}

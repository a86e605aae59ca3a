//! The fixed window: one count that begins anew with each window.
//!
//! It has the state of a sliding window ([`Counts`]) and ignores the previous one, so a rule can change between the two
//! and keep its counts. What it admits around the end of a window is up to twice its ceiling.

use crate::sliding_window::{Counts, Outcome, Window};

/// Whether `cost` fits into `counts` (already moved with [`Counts::at`]). Changes nothing.
#[inline]
pub fn check(window: &Window, counts: &Counts, now_us: u64, cost: u64) -> Outcome {
    if cost > window.ceiling {
        return Outcome::Never;
    }
    if counts.current <= window.ceiling - cost {
        return Outcome::Allowed;
    }
    // Not 0, which would mean at once.
    Outcome::Denied { retry_after_us: window.reset_us(counts).saturating_sub(now_us).max(1) }
}

#[inline]
pub fn remaining(window: &Window, counts: &Counts) -> u64 {
    window.ceiling.saturating_sub(counts.current)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn extreme_parameters_give_an_answer() {
        let extremes = [0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) + 1, 1 << 53, 1 << 63, u64::MAX];
        for window_us in extremes.into_iter().filter(|&window| window > 0) {
            for ceiling in extremes {
                for count in extremes {
                    for now in extremes {
                        let window = Window { window_us, ceiling };
                        let counts = Counts { index: window.index(now), previous: count, current: count };
                        for cost in extremes {
                            match check(&window, &counts, now, cost) {
                                Outcome::Allowed => assert!(u128::from(count) + u128::from(cost) <= ceiling.into()),
                                Outcome::Denied { retry_after_us } => assert!(retry_after_us > 0),
                                Outcome::Never => assert!(cost > ceiling),
                            }
                        }
                        assert!(remaining(&window, &counts) <= ceiling);
                    }
                }
            }
        }
    }

    proptest! {
        /// The model keeps every admission and adds up those of the same window.
        #[test]
        fn decides_as_a_list_of_admissions_does(
            window_us in 1u64..1000, ceiling in 0u64..20, start in 0u64..1 << 50,
            arrivals in prop::collection::vec((0u64..8, 0u64..400), 1..200),
        ) {
            let window = Window { window_us, ceiling };
            let (mut counts, mut now) = (Counts::default(), start);
            let mut admitted: Vec<(u64, u64)> = Vec::new();
            let used = |admitted: &[(u64, u64)], at: u64| -> u64 {
                admitted.iter().filter(|(time, _)| time / window_us == at / window_us).map(|(_, cost)| cost).sum()
            };
            for (cost, pause) in arrivals {
                now += pause;
                counts = counts.at(window.index(now));
                let fits = used(&admitted, now) + cost <= ceiling;
                match check(&window, &counts, now, cost) {
                    Outcome::Allowed => {
                        prop_assert!(fits);
                        counts.current += cost;
                        admitted.push((now, cost));
                    }
                    Outcome::Denied { retry_after_us } => {
                        prop_assert!(!fits && cost <= ceiling);
                        for (at, allowed) in [(now + retry_after_us - 1, false), (now + retry_after_us, true)] {
                            prop_assert_eq!(used(&admitted, at) + cost <= ceiling, allowed);
                        }
                    }
                    Outcome::Never => prop_assert!(cost > ceiling),
                }
                prop_assert_eq!(remaining(&window, &counts), ceiling - used(&admitted, now));
            }
        }
    }
}

//! The sliding log: every admission is remembered until it leaves the window, so the count is exact.
//!
//! The log is the caller's, oldest admission first; this only reads it. An admission at `at_us` counts until
//! `at_us + window`, and no longer at that instant.

use crate::sliding_window::{Outcome, Window};

/// The most that a window may admit: each unit may be an admission to remember.
pub const MAX_CEILING: u64 = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    pub at_us: u64,
    pub cost: u64,
}

impl Admission {
    /// When it leaves the window. One from the future, by a clock that has stepped back since, counts from now on.
    const fn leaves_us(&self, window: &Window, now_us: u64) -> u64 {
        let at_us = if self.at_us > now_us { now_us } else { self.at_us };
        at_us.saturating_add(window.window_us)
    }

    pub const fn counts(&self, window: &Window, now_us: u64) -> bool {
        self.leaves_us(window, now_us) > now_us
    }
}

/// Units admitted in the window that ends now.
pub fn used(window: &Window, log: impl Iterator<Item = Admission>, now_us: u64) -> u64 {
    let counting = log.filter(|admission| admission.counts(window, now_us));
    counting.fold(0, |sum, admission| sum.saturating_add(admission.cost))
}

/// Time until `cost` fits, if nothing else is admitted; 0 when it does now. What cannot fit even then takes a window.
pub fn wait_us(window: &Window, used: u64, log: impl Iterator<Item = Admission>, now_us: u64, cost: u64) -> u64 {
    let Some(most) = window.ceiling.checked_sub(cost) else { return window.window_us };
    let mut left = used;
    if left <= most {
        return 0;
    }
    for admission in log.filter(|admission| admission.counts(window, now_us)) {
        left = left.saturating_sub(admission.cost);
        if left <= most {
            return admission.leaves_us(window, now_us) - now_us;
        }
    }
    window.window_us
}

/// Whether `cost` fits beside `used`, where `wait_us` is the time that it takes to.
pub const fn check(window: &Window, used: u64, wait_us: u64, cost: u64) -> Outcome {
    if cost > window.ceiling {
        Outcome::Never
    } else if used <= window.ceiling - cost {
        Outcome::Allowed
    } else {
        Outcome::Denied { retry_after_us: if wait_us == 0 { 1 } else { wait_us } }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The model is the definition: no window of this length, wherever it ends, admits more than the ceiling.
        #[test]
        fn admits_the_ceiling_in_any_window_and_no_less_than_fits(
            window_us in 1u64..1000, ceiling in 0u64..20, start in 0u64..1 << 50,
            arrivals in prop::collection::vec((0u64..8, 0u64..300), 1..150),
        ) {
            let window = Window { window_us, ceiling };
            let (mut log, mut now) = (Vec::<Admission>::new(), start);
            let sum = |log: &[Admission], at: u64| -> u64 {
                log.iter().filter(|admission| at - admission.at_us < window_us).map(|admission| admission.cost).sum()
            };
            for (cost, pause) in arrivals {
                now += pause;
                let used = used(&window, log.iter().copied(), now);
                prop_assert_eq!(used, sum(&log, now));
                let wait = wait_us(&window, used, log.iter().copied(), now, cost);
                match check(&window, used, wait, cost) {
                    Outcome::Allowed => {
                        prop_assert!(used + cost <= ceiling && wait == 0);
                        log.push(Admission { at_us: now, cost });
                    }
                    Outcome::Denied { retry_after_us } => {
                        prop_assert!(sum(&log, now + retry_after_us - 1) + cost > ceiling);
                        prop_assert!(sum(&log, now + retry_after_us) + cost <= ceiling);
                    }
                    Outcome::Never => prop_assert!(cost > ceiling),
                }
                prop_assert!(sum(&log, now) <= ceiling);
            }
        }
    }

    #[test]
    fn a_clock_that_stepped_back_locks_nobody_out() {
        let window = Window { window_us: 1000, ceiling: 1 };
        let log = [Admission { at_us: 1 << 40, cost: 1 }];
        assert_eq!(used(&window, log.into_iter(), 5000), 1);
        assert_eq!(wait_us(&window, 1, log.into_iter(), 5000, 1), 1000);
    }
}

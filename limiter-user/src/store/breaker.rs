//! When one server is asked, and when it is left alone because it fails.
//!
//! Pure: `now` is the time since any fixed instant, and the jitter is an argument.

use std::{collections::VecDeque, time::Duration};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BreakerConfig {
    /// So many calls that fail …
    pub failures: u32,
    /// … within this time open the breaker.
    pub within: Duration,
    /// The longest time between two probes of a server that fails.
    pub probe: Duration,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self { failures: 5, within: Duration::from_secs(10), probe: Duration::from_secs(30) }
    }
}

impl BreakerConfig {
    pub fn new(failures: u32, within: Duration, probe: Duration) -> Self {
        Self { failures: failures.max(1), within, probe }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BreakerState {
    /// Calls are made.
    #[default]
    Closed,
    /// None is made but a probe now and then.
    Open,
    /// A probe is under way.
    Probing,
}

impl BreakerState {
    pub const ALL: &[Self] = &[Self::Closed, Self::Open, Self::Probing];

    /// Of two, the one that is further from being asked.
    #[must_use]
    pub const fn worse(self, other: Self) -> Self {
        match (self, other) {
            (Self::Open, _) | (_, Self::Open) => Self::Open,
            (Self::Probing, _) | (_, Self::Probing) => Self::Probing,
            (Self::Closed, Self::Closed) => Self::Closed,
        }
    }

    /// The name in status and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::Probing => "probing",
        }
    }
}

#[derive(Debug)]
pub struct Breaker {
    config: BreakerConfig,
    state: BreakerState,
    /// When the last calls failed, oldest first, since the breaker closed: as many as would open it, less one.
    failed: VecDeque<Duration>,
    /// While open.
    probe_at: Duration,
}

impl Breaker {
    pub fn new(config: BreakerConfig) -> Self {
        Self { config, state: BreakerState::Closed, failed: VecDeque::new(), probe_at: Duration::ZERO }
    }

    pub const fn state(&self) -> BreakerState {
        self.state
    }

    /// When the next probe is due; `None` unless one is waited for.
    pub fn probe_at(&self) -> Option<Duration> {
        (self.state == BreakerState::Open).then_some(self.probe_at)
    }

    /// A call that was made has failed. Returns whether that opens the breaker. One that was made before it opened says
    /// nothing new.
    pub fn call_failed(&mut self, now: Duration, jitter: u64) -> bool {
        if self.state != BreakerState::Closed {
            return false;
        }
        while self.failed.front().is_some_and(|&at| now.saturating_sub(at) >= self.config.within) {
            self.failed.pop_front();
        }
        if self.failed.len() + 1 < self.config.failures as usize {
            self.failed.push_back(now);
            return false;
        }
        self.open(now, jitter);
        true
    }

    /// Whether a probe is due; if so it begins, and [`Self::probed`] has to follow.
    pub fn begin_probe(&mut self, now: Duration) -> bool {
        let is_due = self.state == BreakerState::Open && now >= self.probe_at;
        if is_due {
            self.state = BreakerState::Probing;
        }
        is_due
    }

    /// The probe has ended. Returns whether that closes the breaker.
    pub fn probed(&mut self, succeeded: bool, now: Duration, jitter: u64) -> bool {
        if self.state != BreakerState::Probing {
            return false;
        }
        if succeeded {
            self.state = BreakerState::Closed;
        } else {
            self.open(now, jitter);
        }
        succeeded
    }

    /// There is news of the server, such as a connection that was made: the next probe need not wait.
    pub fn hasten(&mut self, now: Duration) {
        if self.state == BreakerState::Open {
            self.probe_at = self.probe_at.min(now);
        }
    }

    /// Up to half of the time between probes is taken off, so that a fleet does not probe in step.
    fn open(&mut self, now: Duration, jitter: u64) {
        self.failed.clear();
        self.state = BreakerState::Open;
        let half_us = u64::try_from(self.config.probe.as_micros()).unwrap_or(u64::MAX) / 2;
        let wait = self.config.probe.saturating_sub(Duration::from_micros(jitter % (half_us + 1)));
        self.probe_at = now.saturating_add(wait);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Fails,
        Probes {
            succeeds: bool,
        },
        /// A probe begins, calls from before it end meanwhile, and then it ends.
        SlowProbe {
            succeeds: bool,
        },
        Hastens,
    }

    fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
        let step = prop_oneof![
            4 => Just(Step::Fails),
            2 => any::<bool>().prop_map(|succeeds| Step::Probes { succeeds }),
            1 => any::<bool>().prop_map(|succeeds| Step::SlowProbe { succeeds }),
            1 => Just(Step::Hastens),
        ];
        // Often at the same time, often just at the edge of the time within which failures count.
        prop::collection::vec((prop_oneof![0u64..3, 90u64..110, 0u64..400], step), 1..200)
    }

    /// The rules, said with the whole history: which failures there were since the breaker closed, and when it opened last.
    struct Model {
        config: BreakerConfig,
        failures: Vec<Duration>,
        opened: Option<Duration>,
        hastened: bool,
    }

    impl Model {
        fn fails(&mut self, now: Duration) {
            if self.opened.is_some() {
                return;
            }
            self.failures.push(now);
            let recent = self.failures.iter().filter(|&&at| now - at < self.config.within);
            if recent.count() >= self.config.failures as usize {
                self.open(now);
            }
        }

        fn open(&mut self, now: Duration) {
            (self.opened, self.hastened) = (Some(now), false);
            self.failures.clear();
        }

        /// From when on a probe may be made, and from when on it has to be.
        fn bounds(&self) -> Option<(Duration, Duration)> {
            let opened = self.opened?;
            if self.hastened {
                return Some((Duration::ZERO, Duration::ZERO));
            }
            Some((opened + self.config.probe / 2, opened + self.config.probe))
        }
    }

    proptest! {
        #[test]
        fn does_what_the_rules_say(
            failures in 1u32..6,
            jitters in prop::collection::vec(any::<u64>(), 1..10),
            steps in steps(),
        ) {
            let config = BreakerConfig::new(failures, Duration::from_millis(100), Duration::from_millis(300));
            let mut breaker = Breaker::new(config);
            let mut model = Model { config, failures: Vec::new(), opened: None, hastened: false };
            let mut now = Duration::from_secs(1);
            for (number, (passes_ms, step)) in steps.into_iter().enumerate() {
                now += Duration::from_millis(passes_ms);
                let jitter = jitters[number % jitters.len()];
                let was_open = model.opened.is_some();
                match step {
                    Step::Fails => {
                        model.fails(now);
                        prop_assert_eq!(breaker.call_failed(now, jitter), !was_open && model.opened.is_some());
                    }
                    Step::Hastens => {
                        model.hastened |= was_open;
                        breaker.hasten(now);
                    }
                    Step::Probes { succeeds } | Step::SlowProbe { succeeds } => {
                        let begun = breaker.begin_probe(now);
                        match model.bounds() {
                            None => prop_assert!(!begun),
                            Some((earliest, latest)) => {
                                prop_assert!(!begun || now >= earliest);
                                prop_assert!(begun || now < latest);
                            }
                        }
                        if matches!(step, Step::SlowProbe { .. }) && begun {
                            prop_assert_eq!(breaker.state(), BreakerState::Probing);
                            prop_assert!(!breaker.begin_probe(now), "one at a time");
                            prop_assert!(!breaker.call_failed(now, jitter), "a call from before it");
                            now += Duration::from_millis(5);
                        }
                        prop_assert_eq!(breaker.probed(succeeds, now, jitter), begun && succeeds);
                        if begun {
                            if succeeds { model.opened = None } else { model.open(now) }
                        }
                    }
                }
                let expected = if model.opened.is_some() { BreakerState::Open } else { BreakerState::Closed };
                prop_assert_eq!(breaker.state(), expected);
                prop_assert_eq!(breaker.probe_at().is_some(), model.opened.is_some());
            }
        }
    }
}

//! What is reported, and what is known of it at a step.

use std::{fmt, time::Duration};

use limiter_common::adaptive::{FULL, Pressure};

use crate::{config::units, policy::Adaptive};

/// Longer latencies are a mistake in the unit, or as good as this one.
const MAX_LATENCY: Duration = Duration::from_secs(3600);

/// One report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// How loaded the origin says it is, in millionths.
    Level(u32),
    /// How long the origin took to answer.
    LatencyUs(u64),
}

impl Report {
    /// A level from 0 to 1, as it is written.
    pub fn level(text: &str) -> Result<Self, ReportError> {
        level(text).map(Self::Level).ok_or(ReportError::Level)
    }

    /// A latency in milliseconds, as it is written.
    pub fn latency_ms(text: &str) -> Result<Self, ReportError> {
        let latency_us = units::decimal(text, 3).filter(|us| u128::from(*us) <= MAX_LATENCY.as_micros());
        latency_us.map(Self::LatencyUs).ok_or(ReportError::Latency)
    }
}

/// A number from 0 to 1, in millionths.
pub fn level(text: &str) -> Option<u32> {
    u32::try_from(units::decimal(text, 6)?).ok().filter(|level| *level <= FULL)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportError {
    Level,
    Latency,
}

impl fmt::Display for ReportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Level => "the level is not a number from 0 to 1",
            Self::Latency => "latency_ms is not a number from 0 to 3600000",
        })
    }
}

/// What is known, as far as it has not expired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    pub level: Option<u32>,
    pub latency_us: Option<u64>,
}

impl Reading {
    /// The origin beside the targets of a rule: above one of them is above.
    pub fn beside(&self, adaptive: &Adaptive) -> Pressure {
        let level = self.level.map(|level| level.cmp(&adaptive.target));
        let latency = self.latency_us.zip(adaptive.target_latency_us).map(|(latency, target)| latency.cmp(&target));
        match level.into_iter().chain(latency).max() {
            None => Pressure::Unknown,
            Some(std::cmp::Ordering::Greater) => Pressure::Above,
            Some(std::cmp::Ordering::Equal) => Pressure::On,
            Some(std::cmp::Ordering::Less) => Pressure::Below,
        }
    }
}

/// A value and when it was last heard.
#[derive(Clone, Copy, Debug)]
struct Heard<T> {
    value: T,
    at_us: u64,
}

/// What was gathered since the last step, and what is known from before.
#[derive(Debug, Default)]
pub(super) struct Reports {
    highest_level: Option<u32>,
    latency_sum_us: u64,
    latencies: u64,
    level: Option<Heard<u32>>,
    latency_us: Option<Heard<u64>>,
}

impl Reports {
    pub(super) fn add(&mut self, report: Report) {
        match report {
            Report::Level(level) => self.highest_level = self.highest_level.max(Some(level)),
            Report::LatencyUs(us) => {
                self.latency_sum_us = self.latency_sum_us.saturating_add(us);
                self.latencies += 1;
            }
        }
    }

    /// Closes an interval. What was heard in it counts from now.
    pub(super) fn read(&mut self, now_us: u64, expires_us: u64) -> Reading {
        let mean_us = self.latency_sum_us.checked_div(self.latencies);
        hear(&mut self.level, self.highest_level.take(), now_us, expires_us);
        hear(&mut self.latency_us, mean_us, now_us, expires_us);
        (self.latency_sum_us, self.latencies) = (0, 0);
        self.reading()
    }

    pub(super) fn reading(&self) -> Reading {
        Reading { level: self.level.map(|heard| heard.value), latency_us: self.latency_us.map(|heard| heard.value) }
    }
}

fn hear<T: Copy>(known: &mut Option<Heard<T>>, value: Option<T>, now_us: u64, expires_us: u64) {
    if let Some(value) = value {
        *known = Some(Heard { value, at_us: now_us });
    } else if known.is_some_and(|heard| now_us.saturating_sub(heard.at_us) >= expires_us) {
        *known = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_as_they_are_written() {
        for (text, expected) in [
            ("0", Some(0)),
            ("1", Some(FULL)),
            ("0.5", Some(500_000)),
            ("0.1234567", Some(123_456)),
            ("1.0", Some(FULL)),
            ("1.000001", None),
            ("2", None),
            ("-0.1", None),
            ("", None),
            (".", None),
            ("1e-1", None),
            ("NaN", None),
            ("0,5", None),
            ("99999999999999999999999999", None),
        ] {
            assert_eq!(level(text), expected, "{text}");
        }
        assert_eq!(Report::latency_ms("12.5"), Ok(Report::LatencyUs(12_500)));
        assert_eq!(Report::latency_ms("3600000"), Ok(Report::LatencyUs(3_600_000_000)));
        for text in ["3600000.001", "-1", "x"] {
            assert_eq!(Report::latency_ms(text), Err(ReportError::Latency), "{text}");
        }
    }

    #[test]
    fn of_levels_the_highest_counts_of_latencies_the_mean_and_both_expire() {
        let mut reports = Reports::default();
        assert_eq!(reports.read(0, 10), Reading::default());
        for report in
            [Report::Level(5), Report::Level(9), Report::Level(7), Report::LatencyUs(10), Report::LatencyUs(20)]
        {
            reports.add(report);
        }
        let reading = Reading { level: Some(9), latency_us: Some(15) };
        assert_eq!(reports.read(1, 10), reading);
        // Nothing new is said, and the last word holds.
        assert_eq!((reports.read(10, 10), reports.reading()), (reading, reading));
        reports.add(Report::LatencyUs(u64::MAX));
        reports.add(Report::LatencyUs(u64::MAX));
        assert_eq!(reports.read(11, 10), Reading { level: None, latency_us: Some(u64::MAX / 2) });
        assert_eq!(reports.read(21, 10), Reading::default());
    }

    #[test]
    fn above_any_target_is_above() {
        let adaptive = |target_latency_us| Adaptive {
            floor: 1,
            floor_ceiling: 1,
            target: 500,
            target_latency_us,
            decrease: 0,
            recover_us: 0,
        };
        for (level, latency_us, target_latency_us, expected) in [
            (None, None, Some(5), Pressure::Unknown),
            (None, Some(9), None, Pressure::Unknown),
            (Some(501), None, None, Pressure::Above),
            (Some(500), None, None, Pressure::On),
            (Some(499), None, None, Pressure::Below),
            (Some(0), Some(6), Some(5), Pressure::Above),
            (Some(501), Some(0), Some(5), Pressure::Above),
            (Some(0), Some(5), Some(5), Pressure::On),
            (Some(0), Some(9), None, Pressure::Below),
        ] {
            assert_eq!(Reading { level, latency_us }.beside(&adaptive(target_latency_us)), expected);
        }
    }
}

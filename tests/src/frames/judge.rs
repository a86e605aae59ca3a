//! Runs frames in the kernel and holds what it did against the scenario.

use std::{collections::BTreeMap, fmt::Write as _};

use limiter_common::{stats::Counter, verdict::Verdict};

use super::scenario::Scenario;
use crate::fixture::{Counters, Loaded};

/// How many frames got which verdict.
pub type Tally = BTreeMap<u32, u64>;

#[derive(Debug)]
pub struct Judge<'a> {
    scenario: &'a Scenario,
    loaded: Loaded,
}

impl<'a> Judge<'a> {
    pub fn new(scenario: &'a Scenario) -> Self {
        Self { scenario, loaded: scenario.load() }
    }

    /// Compares the action of every frame, and the counters of all of them together. An error names the frames, each
    /// with a command that runs it again.
    pub fn compare(&self, frames: &[Vec<u8>]) -> Result<Tally, String> {
        let before = self.loaded.counters();
        let mut expected = before.clone();
        let mut tally = Tally::new();
        let mut is_right = true;
        for frame in frames {
            let (verdict, rule) = self.scenario.verdict(frame);
            let run = self.loaded.dataplane.test_run(frame, 1).map_err(|error| format!("{error}: {}", hex(frame)))?;
            is_right &= run.dropped == matches!(verdict, Verdict::Drop(_));
            count(&mut expected, (rule.map(str::to_owned), verdict.index()), frame.len());
            *tally.entry(verdict.index()).or_default() += 1;
        }
        if is_right && self.loaded.counters() == expected {
            return Ok(tally);
        }
        Err(self.accuse(frames))
    }

    /// Verdicts depend on nothing but the frame, so a second run shows which of many it was.
    fn accuse(&self, frames: &[Vec<u8>]) -> String {
        let name = self.scenario.name;
        let mut report = String::new();
        for frame in frames {
            let (verdict, rule) = self.scenario.verdict(frame);
            let (got, by) = self.loaded.judge(frame);
            if (got, by.as_deref()) != (verdict, rule) {
                let frame = hex(frame);
                writeln!(
                    report,
                    "{name}: {got:?} by {by:?}, but the parser makes it {verdict:?} by {rule:?}\n    \
                     cargo xtask frames --frame {frame}"
                )
                .expect("write to a string");
            }
        }
        if report.is_empty() {
            return format!("{name}: {} frames were counted wrong together, and none of them alone", frames.len());
        }
        report
    }
}

fn count(counters: &mut Counters, key: (Option<String>, u32), len: usize) {
    let counter = counters.entry(key).or_default();
    *counter = counter.plus(Counter { packets: 1, bytes: len as u64 });
}

fn hex(frame: &[u8]) -> String {
    frame.iter().fold(String::with_capacity(frame.len() * 2), |mut text, byte| {
        write!(text, "{byte:02x}").expect("write to a string");
        text
    })
}

/// # Panics
///
/// When the text is no hexadecimal number of whole bytes.
pub fn from_hex(text: &str) -> Vec<u8> {
    assert!(text.is_ascii() && text.len().is_multiple_of(2), "{text:?}: two hexadecimal digits a byte");
    let digits = (0..text.len()).step_by(2).map(|at| &text[at..at + 2]);
    digits.map(|byte| u8::from_str_radix(byte, 16).unwrap_or_else(|error| panic!("{byte:?}: {error}"))).collect()
}

//! The counters against right answers that were found by search: every file of the folder in `LIMITER_VECTORS`.

use std::{fs, path::PathBuf};

use limiter_common::{
    gcra::{self, GcraParams},
    sliding_window::{BurstFactor, Counts, Outcome, Window},
};
use serde::{Deserialize, de::DeserializeOwned};

/// The named folder, else the one beside a checkout, else the copy in the repository.
fn folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("LIMITER_VECTORS") {
        return folder.into();
    }
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let beside = root.join("../shared/vectors");
    if beside.is_dir() { beside } else { root.join("tests/vectors") }
}

fn read<T: DeserializeOwned>(file: &str) -> Vec<T> {
    let path = folder().join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("reading {}: {error}", path.display()));
    let cases: Vec<T> = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(!cases.is_empty(), "{} has no cases", path.display());
    cases
}

#[derive(Deserialize)]
struct GcraCase {
    name: String,
    emission_interval_ns: u64,
    burst: u64,
    steps: Vec<GcraStep>,
}

#[derive(Deserialize)]
struct GcraStep {
    now_ns: u64,
    cost: u64,
    conforming: bool,
    never: bool,
    tat_ns: u64,
    remaining: u64,
    retry_after_ns: Option<u64>,
}

#[test]
fn vectors_gcra() {
    for case in read::<GcraCase>("gcra.json") {
        let params = GcraParams::from_interval(case.emission_interval_ns, case.burst).expect("parameters");
        let mut tat = 0;
        for (number, step) in case.steps.iter().enumerate() {
            let result = gcra::check(tat, &params, step.now_ns, step.cost);
            let (conforming, never, retry_after) = match result.outcome {
                gcra::Outcome::Conforming => (true, false, None),
                gcra::Outcome::NonConforming { retry_after } => (false, false, Some(retry_after)),
                gcra::Outcome::NeverConforming => (false, true, None),
            };
            tat = result.tat;
            assert_eq!(
                (conforming, never, tat, params.remaining(tat, step.now_ns), retry_after),
                (step.conforming, step.never, step.tat_ns, step.remaining, step.retry_after_ns),
                "{} step {number}",
                case.name
            );
        }
    }
}

#[derive(Deserialize)]
struct SlidingCase {
    name: String,
    window_us: u64,
    limit: u64,
    burst_factor: String,
    ceiling: u64,
    steps: Vec<SlidingStep>,
}

#[derive(Deserialize)]
struct SlidingStep {
    now_us: u64,
    cost: u64,
    allowed: bool,
    estimate_before: u64,
    previous: u64,
    current: u64,
    remaining: u64,
    reset_us: u64,
    retry_after_us: Option<u64>,
    never: bool,
}

/// `"1.25"` in thousandths.
fn thousandths(decimal: &str) -> u32 {
    let (whole, fraction) = decimal.split_once('.').unwrap_or((decimal, ""));
    let fraction: u32 = format!("{fraction:0<3}").parse().expect("three decimals");
    whole.parse::<u32>().expect("a number") * 1000 + fraction
}

#[test]
fn vectors_sliding_window() {
    for case in read::<SlidingCase>("sliding_window.json") {
        let factor = BurstFactor::from_thousandths(thousandths(&case.burst_factor)).expect("burst factor");
        let ceiling = factor.ceiling(case.limit).expect("ceiling");
        assert_eq!(ceiling, case.ceiling, "{}", case.name);
        let window = Window { window_us: case.window_us, ceiling };
        let mut counts = Counts::default();
        for (number, step) in case.steps.iter().enumerate() {
            counts = counts.at(window.index(step.now_us));
            let estimate_before = window.estimate(&counts, step.now_us);
            let (allowed, never, retry_after) = match window.check(&counts, step.now_us, step.cost) {
                Outcome::Allowed => (true, false, None),
                Outcome::Denied { retry_after_us } => (false, false, Some(retry_after_us)),
                Outcome::Never => (false, true, None),
            };
            if allowed {
                counts.current += step.cost;
            }
            assert_eq!(
                (allowed, never, retry_after, estimate_before, counts.previous, counts.current),
                (step.allowed, step.never, step.retry_after_us, step.estimate_before, step.previous, step.current),
                "{} step {number}",
                case.name
            );
            assert_eq!(
                (window.remaining(&counts, step.now_us), window.reset_us(&counts)),
                (step.remaining, step.reset_us),
                "{} step {number}",
                case.name
            );
        }
    }
}

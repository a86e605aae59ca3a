//! Frames by the hundred thousand: the program in the kernel gives each the verdict that the parser says on the host.
//! Needs root and the XDP object. `cargo xtask frames` runs as many as one likes.

use std::{
    collections::BTreeMap,
    env,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use limiter_common::verdict::{DropReason, Verdict};
use limiter_tests::frames::{Generator, Judge, Scenario, Tally, from_hex, parser_corpus, scenarios, templates};

const COUNT: u64 = 200_000;
const SEED: u64 = 1;
const BATCH: u64 = 5_000;

fn number(variable: &str, default: u64) -> u64 {
    match env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("{variable}={text}: {error}")),
        Err(_) => default,
    }
}

#[test]
fn frames_get_the_verdict_that_the_parser_says() {
    if let Ok(frame) = env::var("LIMITER_FRAME") {
        let frame = from_hex(&frame);
        for scenario in scenarios() {
            let (verdict, rule) = scenario.verdict(&frame);
            println!("{}: {verdict:?} by {rule:?}", scenario.name);
            Judge::new(&scenario).compare(std::slice::from_ref(&frame)).unwrap_or_else(|report| panic!("{report}"));
        }
        return;
    }
    let (count, seed) = (number("LIMITER_FRAMES", COUNT), number("LIMITER_FRAMES_SEED", SEED));
    let (templates, scenarios) = (templates(), scenarios());
    // At least one batch for each scenario.
    let batches = count.div_ceil(BATCH).max(scenarios.len() as u64);
    let next = AtomicU64::new(0);
    let tallies = Mutex::new(vec![Tally::new(); scenarios.len()]);
    let wrong = Mutex::new(BTreeMap::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, Into::into) {
            scope.spawn(|| {
                let judges: Vec<_> = scenarios.iter().map(Judge::new).collect();
                loop {
                    let batch = next.fetch_add(1, Ordering::Relaxed);
                    if batch >= batches || !wrong.lock().expect("no panic").is_empty() {
                        return;
                    }
                    // What a batch holds depends on the seed and its number, not on who runs it.
                    let mut generator = Generator::new(seed ^ batch.rotate_right(16), &templates);
                    let frames: Vec<_> = (0..BATCH).map(|_| generator.frame()).collect();
                    let scenario = usize::try_from(batch % scenarios.len() as u64).expect("an index");
                    match judges[scenario].compare(&frames) {
                        Ok(tally) => add(&mut tallies.lock().expect("no panic")[scenario], tally),
                        Err(report) => drop(wrong.lock().expect("no panic").insert(batch, report)),
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().expect("no panic");
    let reports: Vec<_> = wrong.values().map(String::as_str).collect();
    assert!(wrong.is_empty(), "seed {seed}, batches {:?}:\n{}", wrong.keys(), reports.concat());
    let tallies = tallies.into_inner().expect("no panic");
    for (scenario, tally) in scenarios.iter().zip(&tallies) {
        println!("{} frames of seed {seed} for {:?}:", tally.values().sum::<u64>(), scenario.name);
        for (verdict, count) in
            Verdict::all().zip(0..).filter_map(|(verdict, index)| Some((verdict, tally.get(&index)?)))
        {
            println!("{count:>10} {verdict:?}");
        }
        is_varied(scenario, tally);
    }
}

fn add(sum: &mut Tally, tally: Tally) {
    for (verdict, count) in tally {
        *sum.entry(verdict).or_default() += count;
    }
}

/// Frames that are all refused for the same reason would show nothing.
fn is_varied(scenario: &Scenario, tally: &Tally) {
    let of = |verdict: Verdict| tally.get(&verdict.index()).copied().unwrap_or_default();
    for verdict in &scenario.shows {
        assert!(of(*verdict) > 0, "{}: no frame was {verdict:?}", scenario.name);
    }
    let malformed = of(Verdict::Drop(DropReason::Malformed)) + of(Verdict::ShadowDrop(DropReason::Malformed));
    let all: u64 = tally.values().sum();
    assert!(malformed * 3 < all * 2, "{}: {malformed} of {all} frames are malformed", scenario.name);
}

#[test]
fn the_parsers_corpus_gets_the_verdict_that_the_parser_says() {
    // The kernel runs nothing that is shorter than an Ethernet header.
    let frames: Vec<_> =
        parser_corpus().into_iter().map(|(_, frame)| frame).filter(|frame| frame.len() >= 14).collect();
    assert!(!frames.is_empty());
    for scenario in scenarios() {
        Judge::new(&scenario).compare(&frames).unwrap_or_else(|report| panic!("{report}"));
    }
}

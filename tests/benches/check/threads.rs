//! One kind of work done by one thread or by several.

use std::{sync::Barrier, thread, time::Duration};

use limiter_tests::bench::{Case, Goal, Row};
use limiter_user::clock::Stopwatch;

/// Works off `positions`, each thread its own part of them; how long one of them took on average, from the outside.
/// `work` gets a state of its thread's own.
pub(crate) fn over<S>(
    threads: usize,
    positions: &[u32],
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) + Sync,
) -> Duration {
    let run = |part: &[u32], ready: &Barrier| {
        let mut state = state();
        ready.wait();
        let stopwatch = Stopwatch::start();
        for &position in part {
            work(&mut state, position as usize);
        }
        stopwatch.elapsed()
    };
    let ready = Barrier::new(threads);
    let mut parts = positions.chunks(positions.len().div_ceil(threads));
    let first = parts.next().expect("there is work to do");
    let longest = thread::scope(|scope| {
        let others: Vec<_> = parts.map(|part| scope.spawn(|| run(part, &ready))).collect();
        let took = run(first, &ready);
        let others = others.into_iter().map(|other| other.join().expect("the work is done"));
        others.fold(took, Duration::max)
    });
    longest / u32::try_from(positions.len()).expect("not that many positions")
}

/// How many decisions two threads make in a second, beside those of one.
#[expect(clippy::float_arithmetic, reason = "a rate out of a time")]
pub(crate) fn row(one: &Case<'_>, two: &Case<'_>, goal: Option<Goal>) -> Row {
    let rate = |case: &Case<'_>| Row::new(format!("{}, rate", case.name()), "per ms", 1e6 / case.nanoseconds());
    let row = rate(two).beside(&rate(one));
    match goal {
        Some(goal) => row.goal(goal),
        None => row,
    }
}

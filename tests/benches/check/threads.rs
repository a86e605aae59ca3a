//! One kind of work done by one thread or by several.

use std::{ops::Range, sync::Barrier, thread, time::Duration};

use limiter_tests::bench::{Case, Goal, Row};
use limiter_user::clock::Stopwatch;

/// Works off `turns`, each thread its own part of them; how long one of them took on average, from the outside.
/// `work` gets a state of its thread's own.
pub(crate) fn over<S>(
    threads: usize,
    turns: Range<usize>,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) + Sync,
) -> Duration {
    let run = |part: Range<usize>, ready: &Barrier| {
        let mut state = state();
        ready.wait();
        let stopwatch = Stopwatch::start();
        for turn in part {
            work(&mut state, turn);
        }
        stopwatch.elapsed()
    };
    let ready = Barrier::new(threads);
    let count = turns.len();
    let end_of = |thread: usize| turns.start + count * thread / threads;
    let longest = thread::scope(|scope| {
        let part = |thread| end_of(thread)..end_of(thread + 1);
        let others: Vec<_> = (1..threads)
            .map(|thread| {
                let (run, part, ready) = (&run, part(thread), &ready);
                scope.spawn(move || run(part, ready))
            })
            .collect();
        let took = run(part(0), &ready);
        let others = others.into_iter().map(|other| other.join().expect("the work is done"));
        others.fold(took, Duration::max)
    });
    longest / u32::try_from(count).expect("not that many turns")
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

//! `cargo xtask bench check [-- --rounds N] [--only PART]`: nanoseconds that a decision takes in process, beside the keyed limiter of the
//! crate `governor`, which does one limit by the same 100,000 keys in the same order.
//!
//! The counter step alone, with identity and rule known, and the whole check: an API key from headers, the endpoint
//! groups of a path, the rules and their counters, metrics. With one thread and with two, and for denied requests as well.

#[path = "check/clients.rs"]
mod clients;
#[path = "check/counters.rs"]
mod counters;
#[path = "check/gate.rs"]
mod gate;
#[path = "check/matching.rs"]
mod matching;
#[path = "check/threads.rs"]
mod threads;

use limiter_tests::bench::{Case, Goal, Row, measure_warm, only, report, rounds};

use crate::{clients::Clients, counters::Counters, gate::Checks, matching::Paths};

/// The most that one thread's time may be of governor's for the counter step.
const COUNTER_STEP: Goal = Goal::AtMost(1.0);
/// The same of the whole check.
const WHOLE_CHECK: Goal = Goal::AtMost(2.5);
/// Decisions a second of two threads beside those of one.
const TWO_THREADS: Goal = Goal::AtLeast(1.7);
/// A denial that is remembered beside one that is not.
const REMEMBERED: Goal = Goal::AtMost(1.0);
/// Ten thousand endpoints beside ten.
const FLAT: Goal = Goal::AtMost(1.3);

/// What a case is beside.
#[derive(Clone, Copy)]
enum Beside {
    Nothing,
    Governor,
    /// Another case by its position, the same with fewer threads or endpoints.
    Case(usize),
}

#[derive(Default)]
struct Table<'a> {
    cases: Vec<Case<'a>>,
    beside: Vec<(Beside, Option<Goal>)>,
}

impl<'a> Table<'a> {
    /// Returns the position of the case.
    fn add(&mut self, case: Case<'a>, beside: Beside, goal: Option<Goal>) -> usize {
        self.cases.push(case);
        self.beside.push((beside, goal));
        self.cases.len() - 1
    }

    fn rows(&self) -> Vec<Row> {
        let rows: Vec<Row> = self.cases.iter().map(|case| case.row("ns/check")).collect();
        let beside = rows.iter().zip(&self.beside).map(|(row, (beside, goal))| {
            let row = match beside {
                Beside::Nothing => row.clone(),
                Beside::Governor => row.clone().beside(&rows[0]),
                Beside::Case(other) => row.clone().beside(&rows[*other]),
            };
            match goal {
                Some(goal) => row.goal(*goal),
                None => row,
            }
        });
        beside.collect()
    }
}

fn main() {
    let clients = Clients::new();
    let counters = Counters::new(&clients);
    let checks = [1, 5, 20].map(|rules| Checks::new(&clients, rules));
    let paths = [(10, 10), (10_000, 10), (10_000, 10_000)].map(|(groups, asked)| Paths::new(groups, asked));

    let mut table = Table::default();
    let governor = table.add(counters.governor(1), Beside::Nothing, None);
    let mut pairs = vec![(governor, table.add(counters.governor(2), Beside::Nothing, None), None)];
    for algorithm in counters::ALGORITHMS {
        let one = table.add(counters.step(algorithm, 1), Beside::Governor, Some(COUNTER_STEP));
        let two = table.add(counters.step(algorithm, 2), Beside::Nothing, None);
        pairs.push((one, two, Some(TWO_THREADS)));
    }
    for checks in &checks {
        let goal = (checks.rules() == 1).then_some(WHOLE_CHECK);
        let one = table.add(checks.allowed(1), Beside::Governor, goal);
        let two = table.add(checks.allowed(2), Beside::Nothing, None);
        pairs.push((one, two, Some(TWO_THREADS)));
    }
    for checks in &checks {
        table.add(checks.denied(1), Beside::Governor, None);
    }
    for checks in &checks {
        let [looked_at, remembered] = checks.abused();
        let looked_at = table.add(looked_at, Beside::Governor, None);
        table.add(remembered, Beside::Case(looked_at), Some(REMEMBERED));
    }
    let few = table.add(paths[0].case(), Beside::Nothing, None);
    table.add(paths[1].case(), Beside::Case(few), Some(FLAT));
    // Beside the work, what it costs that nothing of it is in the cache.
    table.add(paths[2].case(), Beside::Case(few), None);

    if let Some(only) = only() {
        // For a profiler: nothing is compared.
        table.cases.retain(|case| case.name().contains(&only));
        measure_warm(&mut table.cases, rounds(300));
        report("check", &table.cases.iter().map(|case| case.row("ns/check")).collect::<Vec<_>>());
        return;
    }
    measure_warm(&mut table.cases, rounds(300));
    let mut rows = table.rows();
    rows.extend(pairs.iter().map(|(one, two, goal)| threads::row(&table.cases[*one], &table.cases[*two], *goal)));
    report("check", &rows);
}

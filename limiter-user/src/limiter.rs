//! The decision engine: a request, the rules that apply to it, their counters, one answer.
//!
//! Architecture invariant: deciding never waits. It reads the policy through one atomic pointer, locks the shards of
//! the counters it touches, and returns. Where a rule shapes, the answer says how long it is to be held, and whoever gives
//! it holds it.

mod decision;
mod failure;
mod select;
mod turns;

use std::{sync::Arc, time::Duration};

use arc_swap::Guard;
pub use decision::{AddressDenial, Answer, Decision, Kind};
use failure::Failing;
use limiter_common::addr::SrcPrefixes;
pub use select::{Attribute, Caller, Request, Subject};
use smallvec::SmallVec;
use tokio::time::Instant;
pub use turns::Turn;
use turns::Turns;

use crate::{
    active::{Active, SharedActive},
    clock::Clock,
    policy::{FailurePolicy, Scratch},
    store::{
        Algorithm, CellOutcome, CellRef, Charge, Outcomes,
        memory::{INLINE_CELLS, MemoryStore},
        redis::RedisStore,
    },
};

/// Decides requests by the active policy, from the counters in memory.
pub struct Limiter {
    active: SharedActive,
    counters: Arc<MemoryStore>,
    turns: Arc<Turns>,
    clock: Arc<dyn Clock>,
    prefixes: SrcPrefixes,
    /// Where counters are shared; `None` for a node alone.
    shared: Option<RedisStore>,
}

/// The counters that a request touches, and beside each the index of its rule. Inline as long as few rules match.
#[derive(Default)]
struct Touched<'a> {
    cells: SmallVec<[CellRef<'a>; INLINE_CELLS]>,
    rules: select::Rules,
    /// Of the request.
    plan: Option<usize>,
    /// What its endpoint groups want while counters cannot be shared.
    of_endpoints: Option<FailurePolicy>,
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Limiter").field("rules", &self.active.load().policy.rules.len()).finish_non_exhaustive()
    }
}

impl Limiter {
    pub fn new(active: SharedActive, counters: Arc<MemoryStore>, clock: Arc<dyn Clock>, prefixes: SrcPrefixes) -> Self {
        let turns = Turns::new(Arc::clone(&counters), Arc::clone(&clock));
        Self { active, counters, turns, clock, prefixes, shared: None }
    }

    /// Does what rules want while `store` cannot be asked for their counters.
    #[must_use]
    pub fn sharing_through(self, store: RedisStore) -> Self {
        Self { shared: Some(store), ..self }
    }

    /// The policy that requests are decided by.
    pub fn active(&self) -> Guard<Arc<Active>> {
        self.active.load()
    }

    /// Index of a plan by its name in the active policy.
    pub fn plan(&self, name: &str) -> Option<usize> {
        self.active.load().policy.plans.iter().position(|plan| **plan == *name)
    }

    /// Decides a request, and charges its counters when every enforced rule allows it.
    pub fn decide(&self, request: &Request<'_>, scratch: &mut Scratch) -> Decision {
        let active = self.active.load();
        let now = self.clock.now();
        if let Some(kind) = select::bypass(&active.policy.bypass, request, scratch) {
            if request.charge == Charge::Commit {
                active.bypassed.count(kind);
            }
            let decision = Decision::without_rule(request.subject.is_unauthenticated(), now);
            return Decision { bypass: Some(kind), ..decision };
        }
        let mut touched = Touched::default();
        self.touch(&active, request, scratch, &mut touched);
        if touched.cells.is_empty() {
            return Decision::without_rule(request.subject.is_unauthenticated(), now);
        }
        let shapes = request.charge == Charge::Commit && touched.cells.iter().any(is_shaped);
        let queues = shapes.then(|| self.turns.lock());
        let mut outcomes = Outcomes::new();
        let failing = match self.shared.as_ref().filter(|store| !store.is_whole()) {
            None => Failing::default(),
            Some(store) => failure::apply(store, &self.counters, now, request, &active, &mut touched),
        };
        let charge = failing.charge(request.charge, &touched);
        self.counters.decide_into(now, charge, &touched.cells, &mut outcomes);
        failing.settle(&touched.cells, &mut outcomes);
        let mut decision =
            decision::conclude(request, now, &touched, &outcomes, &failing, &active.policy.rules, &active.metrics);
        if let Some(mut queues) = queues
            && !decision.is_refusal()
            && let Some((cell, outcome)) = longest_delay(&touched.cells, &outcomes)
        {
            let turn = Instant::now() + Duration::from_micros(outcome.delay_us);
            decision.turn = Some(queues.join(&self.turns, cell.to_owned(), turn));
        }
        decision
    }

    fn touch<'a>(&self, active: &'a Active, request: &Request<'a>, scratch: &mut Scratch, touched: &mut Touched<'a>) {
        touched.plan = request.subject.plan(&active.policy.plans);
        let matches = select::matches(&active.policy.endpoints, request, scratch);
        let rules = select::rules(active, &matches);
        touched.of_endpoints = select::failure_policy(active, &matches);
        for &index in &rules {
            if let Some(cell) = select::cell(active, index, request, touched.plan, self.prefixes) {
                touched.cells.push(cell);
                touched.rules.push(index);
            }
        }
    }
}

/// Whether a cell holds answers. In shadow mode it changes nothing.
const fn is_shaped(cell: &CellRef<'_>) -> bool {
    cell.enforced && matches!(cell.algorithm, Algorithm::LeakyBucket { .. })
}

fn longest_delay<'a>(
    cells: &'a [CellRef<'a>],
    outcomes: &'a [CellOutcome],
) -> Option<(&'a CellRef<'a>, &'a CellOutcome)> {
    let shaped = cells.iter().zip(outcomes).filter(|(cell, outcome)| is_shaped(cell) && outcome.delay_us > 0);
    shaped.max_by_key(|(_, outcome)| outcome.delay_us)
}

//! The decision engine: a request, the rules that apply to it, their counters, one answer.
//!
//! Architecture invariant: deciding never waits. It reads the policy through one atomic pointer, locks the shards of
//! the counters it touches, and returns. Where a rule shapes, the answer says how long it is to be held, and whoever gives
//! it holds it.

mod decision;
mod denials;
mod select;
mod turns;

use std::{sync::Arc, time::Duration};

use arc_swap::Guard;
pub use decision::{AddressDenial, Answer, Decision, Kind};
use denials::{Denial, Denials};
use limiter_common::{addr::SrcPrefixes, time::UnixMicros};
pub use select::{Attribute, Caller, Request, Subject};
use smallvec::SmallVec;
use tokio::time::Instant;
pub use turns::Turn;
use turns::Turns;

use crate::{
    active::{Active, SharedActive},
    clock::{Clock, Stopwatch},
    policy::Scratch,
    store::{
        Algorithm, CellOutcome, CellRef, Charge, Outcomes,
        memory::{INLINE_CELLS, MemoryStore, Watched},
    },
};

/// Decides requests by the active policy, from the counters in memory.
pub struct Limiter {
    active: SharedActive,
    counters: Arc<MemoryStore>,
    turns: Arc<Turns>,
    clock: Arc<dyn Clock>,
    prefixes: SrcPrefixes,
    /// `None` where nothing is remembered.
    denials: Option<Denials>,
}

/// The counters that a request touches, and beside each the index of its rule. Inline as long as few rules match.
#[derive(Default)]
struct Touched<'a> {
    cells: SmallVec<[CellRef<'a>; INLINE_CELLS]>,
    rules: select::Rules,
    /// Of the request.
    plan: Option<usize>,
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Limiter").field("rules", &self.active.load().policy.rules.len()).finish_non_exhaustive()
    }
}

impl Limiter {
    pub fn new(active: SharedActive, counters: Arc<MemoryStore>, clock: Arc<dyn Clock>, prefixes: SrcPrefixes) -> Self {
        let turns = Turns::new(Arc::clone(&counters), Arc::clone(&clock));
        let denials = Some(Denials::new(counters.capacity()));
        Self { active, counters, turns, clock, prefixes, denials }
    }

    /// Looks at every counter for every request. The answers are the same: it is what remembering is measured against.
    #[must_use]
    pub fn remembering_nothing(self) -> Self {
        Self { denials: None, ..self }
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
        self.decide_at(self.clock.now(), request, scratch)
    }

    /// Like [`Self::decide`], of a request that began with this stopwatch: the clock is not read again.
    pub fn decide_since(&self, begin: Stopwatch, request: &Request<'_>, scratch: &mut Scratch) -> Decision {
        self.decide_at(self.clock.at(begin), request, scratch)
    }

    fn decide_at(&self, now: UnixMicros, request: &Request<'_>, scratch: &mut Scratch) -> Decision {
        let active = self.active.load();
        if let Some(kind) = select::bypass(&active.policy.bypass, request, scratch) {
            if request.charge == Charge::Commit {
                active.bypassed.count(kind);
            }
            let decision = Decision::without_rule(request.subject.is_unauthenticated(), now);
            return Decision { bypass: Some(kind), ..decision };
        }
        let plan = request.subject.plan(&active.policy.plans);
        let matches = select::matches(&active.policy.endpoints, request, scratch);
        let denials = self.denials.as_ref().filter(|_| Denials::are_of(request));
        let caller = denials::Caller::of(request, self.prefixes);
        let key = |denials: &Denials| denials.key(&active, request, self.prefixes, plan, &matches);
        let known = denials.filter(|denials| denials.may_have(caller, now)).map(|denials| (denials, key(denials)));
        if let Some(denial) = known.as_ref().and_then(|(denials, key)| denials.find(key, now, &self.counters)) {
            return denial.answer(&active, request.subject.is_unauthenticated(), now);
        }
        let mut touched = Touched { plan, ..Touched::default() };
        self.touch(&active, request, &matches, &mut touched);
        if touched.cells.is_empty() {
            return Decision::without_rule(request.subject.is_unauthenticated(), now);
        }
        let shapes = request.charge == Charge::Commit && touched.cells.iter().any(is_shaped);
        let queues = shapes.then(|| self.turns.lock());
        let (mut outcomes, mut watched) = (Outcomes::new(), Watched::default());
        let remembering = denials.filter(|denials| denials.comes_back(caller));
        let watching = remembering.map(|_| &mut watched);
        self.counters.decide_into(now, request.charge, &touched.cells, &mut outcomes, watching);
        let (mut decision, deciding) =
            decision::conclude(request, now, &touched, &outcomes, &active.policy.rules, &active.metrics);
        if let Some(mut queues) = queues
            && !decision.is_refusal()
            && let Some((cell, outcome)) = longest_delay(&touched.cells, &outcomes)
        {
            let turn = Instant::now() + Duration::from_micros(outcome.delay_us);
            decision.turn = Some(queues.join(&self.turns, cell.to_owned(), turn));
        }
        if let (Some(denials), Some(deciding), true) = (denials, deciding, decision.is_refusal()) {
            if remembering.is_none() {
                denials.note(caller);
            } else if let Some(denial) = Denial::new(now, &touched, &outcomes, &watched, (&decision, deciding), &active)
            {
                let key = known.map_or_else(|| key(denials), |(_, key)| key);
                denials.remember(caller, &key, denial);
            }
        }
        decision
    }

    fn touch<'a>(
        &self,
        active: &'a Active,
        request: &Request<'a>,
        matches: &select::Matches,
        touched: &mut Touched<'a>,
    ) {
        let rules = select::rules(active, matches);
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

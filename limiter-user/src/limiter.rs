//! The decision engine: a request, the rules that apply to it, their counters, one answer.
//!
//! Architecture invariant: deciding never waits. It reads the policy through one atomic pointer, locks the shards of
//! the counters it touches, and returns. Where a rule shapes, the answer says how long it is to be held, and whoever gives
//! it holds it.

mod decision;
mod denials;
mod failure;
mod precise;
mod select;
mod turns;
mod unanswered;

use std::{sync::Arc, time::Duration};

use arc_swap::Guard;
pub use decision::{AddressDenial, Answer, Decision, Kind};
use denials::{Denial, Denials};
use failure::{Failing, Stores};
use limiter_common::{addr::SrcPrefixes, time::UnixMicros};
use parking_lot::MutexGuard;
use precise::Judging;
pub use precise::Precise;
pub use select::{Attribute, Caller, Request, Subject};
use select::{Matches, Rules};
use smallvec::SmallVec;
use tokio::time::Instant;
pub use turns::Turn;
use turns::{Queues, Turns};

use crate::{
    active::{Active, SharedActive},
    clock::{Clock, Stopwatch},
    policy::{FailurePolicy, Precision, Scratch},
    store::{
        Algorithm, CellOutcome, CellRef, Charge, Outcomes,
        memory::{INLINE_CELLS, MemoryStore, Watched},
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
    /// `None` where nothing is remembered.
    denials: Option<Denials>,
    /// `None` of a node alone, whose memory is exact.
    precise: Option<Precise>,
}

/// The counters that a request touches, and beside each the index of its rule. Inline as long as few rules match.
struct Touched<'a> {
    cells: SmallVec<[CellRef<'a>; INLINE_CELLS]>,
    rules: Rules,
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
        let denials = Denials::new(counters.capacity());
        Self { active, counters, turns, clock, prefixes, denials, shared: None, precise: None }
    }

    /// Does what rules want while `store` cannot be asked for their counters.
    #[must_use]
    pub fn sharing_through(self, store: RedisStore) -> Self {
        Self { shared: Some(store), ..self }
    }

    /// Asks Redis where a rule wants that.
    #[must_use]
    pub fn with_precise(mut self, precise: Precise) -> Self {
        self.precise = Some(precise);
        self
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

    /// Decides a request, and charges its counters when every enforced rule allows it. `None` when Redis has to be asked:
    /// nothing is charged then, and [`Self::ask`] decides.
    pub fn decide(&self, request: &Request<'_>, scratch: &mut Scratch) -> Option<Decision> {
        self.decide_at(self.clock.now(), request, scratch)
    }

    /// Like [`Self::decide`], of a request that began with this stopwatch: the clock is not read again.
    pub fn decide_since(&self, begin: Stopwatch, request: &Request<'_>, scratch: &mut Scratch) -> Option<Decision> {
        self.decide_at(self.clock.at(begin), request, scratch)
    }

    fn decide_at(&self, now: UnixMicros, request: &Request<'_>, scratch: &mut Scratch) -> Option<Decision> {
        let active = self.active.load();
        if let Some(kind) = select::bypass(&active.policy.bypass, request, scratch) {
            if request.charge == Charge::Commit {
                active.bypassed.count(kind);
            }
            let decision = Decision::without_rule(request.subject.is_unauthenticated(), now);
            return Some(Decision { bypass: Some(kind), ..decision });
        }
        // The path first: who asks may still be on its way from memory.
        let mut matches = Matches::default();
        select::matches(&active.policy.endpoints, request, scratch, &mut matches);
        let plan = request.subject.plan(&active.policy.plans);
        // What is denied while counters cannot be shared may be allowed as soon as they can, and the other way round.
        let is_whole = self.is_whole(&active);
        let denials = self.denials.as_ref().filter(|_| is_whole && Denials::are_of(request));
        let caller = denials::Caller::of(request, self.prefixes);
        let key = |denials: &Denials| denials.key(&active, request, self.prefixes, plan, &matches);
        let known = denials.filter(|denials| denials.may_have(caller, now)).map(|denials| (denials, key(denials)));
        if let Some(denial) = known.as_ref().and_then(|(denials, key)| denials.find(key, now, &self.counters)) {
            return Some(denial.answer(&active, request.subject.is_unauthenticated(), now));
        }
        let mut touched = Touched::of_plan(plan);
        self.touch(&active, request, &matches, &mut touched);
        if touched.cells.is_empty() {
            return Some(Decision::without_rule(request.subject.is_unauthenticated(), now));
        }
        let failing = match is_whole {
            true => Failing::default(),
            false => self.failing(&active, request, &mut touched, now),
        };
        if active.asks_redis
            && let Some(precise) = &self.precise
            && touched.ask_redis(&active, &failing)
        {
            return self.decide_precisely(&active, precise, request, &touched, failing, now);
        }
        if !is_whole {
            return Some(self.decide_in_memory(&active, request, &touched, &failing, now));
        }
        let shapes = request.charge == Charge::Commit && touched.cells.iter().any(is_shaped);
        let queues = shapes.then(|| self.turns.lock());
        let (mut outcomes, mut watched) = (Outcomes::new(), Watched::default());
        let remembering = denials.filter(|denials| denials.comes_back(caller));
        let watching = remembering.map(|_| &mut watched);
        self.counters.decide_into(now, request.charge, &touched.cells, &mut outcomes, watching);
        let (rules, metrics) = (&active.policy.rules, &active.metrics);
        let (mut decision, deciding) = decision::conclude(request, now, &touched, &outcomes, &failing, rules, metrics);
        if let Some(queues) = queues {
            self.hold(queues, &mut decision, &touched, &outcomes);
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
        Some(decision)
    }

    /// Whether all counters can be shared as rules want it: one look at the breakers.
    #[inline]
    fn is_whole(&self, active: &Active) -> bool {
        let precise = self.precise.as_ref().filter(|_| active.asks_redis);
        self.shared.as_ref().is_none_or(RedisStore::is_whole) && precise.is_none_or(|precise| precise.redis.is_whole())
    }

    /// Which counters of a request cannot be shared.
    #[cold]
    fn failing(&self, active: &Active, request: &Request<'_>, touched: &mut Touched<'_>, now: UnixMicros) -> Failing {
        let Some(shared) = &self.shared else { return Failing::default() };
        let precise = self.precise.as_ref().filter(|_| active.asks_redis);
        failure::apply(Stores { shared, precise }, &self.counters, now, request, active, touched)
    }

    /// As those are decided of which counters cannot be shared: nothing is remembered.
    #[cold]
    fn decide_in_memory(
        &self,
        active: &Active,
        request: &Request<'_>,
        touched: &Touched<'_>,
        failing: &Failing,
        now: UnixMicros,
    ) -> Decision {
        let shapes = request.charge == Charge::Commit && touched.cells.iter().any(is_shaped);
        let queues = shapes.then(|| self.turns.lock());
        let mut outcomes = Outcomes::new();
        let charge = failing.charge(request.charge, touched);
        self.counters.decide_into(now, charge, &touched.cells, &mut outcomes, None);
        failing.settle(&touched.cells, &mut outcomes);
        let (mut decision, _) =
            decision::conclude(request, now, touched, &outcomes, failing, &active.policy.rules, &active.metrics);
        if let Some(queues) = queues {
            self.hold(queues, &mut decision, touched, &outcomes);
        }
        decision
    }

    /// Has the answer wait for its turn, if it has one.
    fn hold(
        &self,
        mut queues: MutexGuard<'_, Queues>,
        decision: &mut Decision,
        touched: &Touched<'_>,
        outcomes: &[CellOutcome],
    ) {
        if !decision.is_refusal()
            && let Some((cell, outcome)) = longest_delay(&touched.cells, outcomes)
        {
            let turn = Instant::now() + Duration::from_micros(outcome.delay_us);
            decision.turn = Some(queues.join(&self.turns, cell.to_owned(), turn));
        }
    }

    /// Out of line, since most policies have no such rules.
    #[cold]
    fn decide_precisely(
        &self,
        active: &Active,
        precise: &Precise,
        request: &Request<'_>,
        touched: &Touched<'_>,
        failing: Failing,
        now: UnixMicros,
    ) -> Option<Decision> {
        let shapes = touched.cells.iter().any(is_shaped);
        if request.charge != Charge::Commit || shapes {
            return None;
        }
        let mut judging = Judging::new(precise, &self.counters, now, active, touched, failing);
        if !judging.at_once() {
            return None;
        }
        let Judging { failing, mut outcomes, .. } = judging;
        failing.settle(&touched.cells, &mut outcomes);
        let (rules, metrics) = (&active.policy.rules, &active.metrics);
        Some(decision::conclude(request, now, touched, &outcomes, &failing, rules, metrics).0)
    }

    /// Decides a request of which memory alone cannot. Waits for Redis no longer than its deadline is.
    pub async fn ask(&self, request: &Request<'_>) -> Decision {
        let active = self.active.load_full();
        let mut touched = Touched::of_plan(request.subject.plan(&active.policy.plans));
        let mut matches = Matches::default();
        select::matches(&active.policy.endpoints, request, &mut Scratch::default(), &mut matches);
        self.touch(&active, request, &matches, &mut touched);
        let now = self.clock.now();
        let Some(precise) = self.precise.as_ref().filter(|_| !touched.cells.is_empty()) else {
            return Decision::without_rule(request.subject.is_unauthenticated(), now);
        };
        let failing = match self.is_whole(&active) {
            true => Failing::default(),
            false => self.failing(&active, request, &mut touched, now),
        };
        if !touched.ask_redis(&active, &failing) {
            // It was left alone only now.
            return self.decide_in_memory(&active, request, &touched, &failing, now);
        }
        let mut judging = Judging::new(precise, &self.counters, now, &active, &touched, failing);
        let charged = match request.charge {
            Charge::Commit => judging.prepare().await,
            Charge::Peek => judging.peek().await,
            Charge::Refund => judging.refund().await,
        };
        let shapes = request.charge == Charge::Commit && touched.cells.iter().any(is_shaped);
        let queues = shapes.then(|| self.turns.lock());
        if let Some(charged) = charged {
            judging.finish(charged);
        }
        let Judging { failing, mut outcomes, .. } = judging;
        failing.settle(&touched.cells, &mut outcomes);
        let (mut decision, _) =
            decision::conclude(request, now, &touched, &outcomes, &failing, &active.policy.rules, &active.metrics);
        if let Some(queues) = queues {
            self.hold(queues, &mut decision, &touched, &outcomes);
        }
        decision
    }

    fn touch<'a>(&self, active: &'a Active, request: &Request<'a>, matches: &Matches, touched: &mut Touched<'a>) {
        let mut rules = Rules::new();
        select::rules(active, matches, &mut rules);
        touched.of_endpoints = select::failure_policy(active, matches);
        for &index in &rules {
            if let Some(cell) = select::cell(active, index, request, touched.plan, self.prefixes) {
                touched.cells.push(cell);
                touched.rules.push(index);
            }
        }
    }
}

impl Touched<'_> {
    /// Nothing yet. Made where it stays: it is too large to be moved for each request.
    #[inline]
    const fn of_plan(plan: Option<usize>) -> Self {
        Self { cells: SmallVec::new_const(), rules: SmallVec::new_const(), plan, of_endpoints: None }
    }

    /// Of each rule; memory decides where a counter cannot be shared.
    fn precisions(&self, active: &Active, failing: &Failing) -> impl Iterator<Item = Precision> {
        let precision = |(place, index): (usize, &usize)| match failing.at(place) {
            None => active.policy.rules[*index].precision,
            Some(_) => Precision::Async,
        };
        self.rules.iter().enumerate().map(precision)
    }

    /// Whether memory alone may not be able to decide. What is denied anyway needs nobody else.
    fn ask_redis(&self, active: &Active, failing: &Failing) -> bool {
        self.precisions(active, failing).any(Precision::asks_redis) && !failing.denies(self)
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

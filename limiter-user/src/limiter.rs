//! The decision engine: a request, the rules that apply to it, their counters, one answer.
//!
//! Architecture invariant: deciding never waits. It reads the policy through one atomic pointer, locks the shards of
//! the counters it touches, and returns.

mod decision;
mod select;

use std::sync::Arc;

use arc_swap::Guard;
pub use decision::{AddressDenial, Answer, Decision, Kind};
use limiter_common::addr::SrcPrefixes;
pub use select::{Caller, Request, Subject};
use smallvec::SmallVec;

use crate::{
    active::{Active, SharedActive},
    clock::Clock,
    policy::Scratch,
    store::{
        Cell,
        memory::{INLINE_CELLS, MemoryStore},
    },
};

/// Decides requests by the active policy, from the counters in memory.
pub struct Limiter {
    active: SharedActive,
    counters: Arc<MemoryStore>,
    clock: Arc<dyn Clock>,
    prefixes: SrcPrefixes,
}

/// The counters that a request touches, and beside each the index of its rule. Inline as long as few rules match.
#[derive(Default)]
struct Touched {
    cells: SmallVec<[Cell; INLINE_CELLS]>,
    rules: SmallVec<[usize; INLINE_CELLS]>,
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Limiter").field("rules", &self.active.load().policy.rules.len()).finish_non_exhaustive()
    }
}

impl Limiter {
    pub fn new(active: SharedActive, counters: Arc<MemoryStore>, clock: Arc<dyn Clock>, prefixes: SrcPrefixes) -> Self {
        Self { active, counters, clock, prefixes }
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
        let touched = self.touched(&active, request, scratch);
        if touched.cells.is_empty() {
            return Decision::without_rule(request.subject.is_unauthenticated(), now);
        }
        let outcomes = self.counters.decide(now, request.charge, &touched.cells);
        decision::conclude(request, now, &touched, &outcomes, &active.policy.rules, &active.metrics)
    }

    fn touched(&self, active: &Active, request: &Request<'_>, scratch: &mut Scratch) -> Touched {
        let policy = &active.policy;
        let plan = request.subject.plan(&policy.plans);
        let mut endpoints: SmallVec<[usize; 8]> =
            policy.endpoints.matches(request.method, request.path, scratch).into();
        for (method, path) in request.also {
            for endpoint in policy.endpoints.matches(method, path, scratch) {
                if !endpoints.contains(endpoint) {
                    endpoints.push(*endpoint);
                }
            }
        }
        let named = endpoints.iter().flat_map(|&endpoint| &active.by_endpoint[endpoint]);
        let mut touched = Touched::default();
        for &index in active.always.iter().chain(named) {
            if let Some(cell) = select::cell(&policy.rules[index], request, plan, self.prefixes) {
                touched.cells.push(cell);
                touched.rules.push(index);
            }
        }
        touched
    }
}

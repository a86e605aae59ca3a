//! What holds for a request whose question to Redis was not answered.
//!
//! It is what the rule's `on_store_failure` says, with one exception: of a `leased` rule that goes on by itself, only what was lent
//! may be used, so that an answer which is lost or late lets nobody through. When Redis has not answered for a while it is
//! what this node knows, as for the others.

use std::time::Duration;

use limiter_common::{sliding_window::Outcome, time::UnixMicros};

use super::{
    Precise,
    failure::{Failing, Outage},
};
use crate::{
    policy::{FailurePolicy, Precision, Rule},
    store::{Algorithm, CellOutcome, CellRef, memory::MemoryStore},
};

/// A client that is refused for want of one answer should not wait long: the next answer helps it.
const RETRY_AFTER_US: u64 = 100_000;

/// What takes the place of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Instead {
    /// Memory decides, by what the cell was made.
    Memory,
    Outcome(CellOutcome),
}

/// Of one cell of so many. The one place that decides it.
pub(super) struct Unanswered<'a> {
    pub(super) precise: &'a Precise,
    pub(super) counters: &'a MemoryStore,
    pub(super) now: UnixMicros,
    pub(super) rule: &'a Rule,
    pub(super) of_endpoints: Option<FailurePolicy>,
    pub(super) place: usize,
    pub(super) len: usize,
}

impl Unanswered<'_> {
    pub(super) fn instead(&self, cell: &mut CellRef<'_>, failing: &mut Failing) -> Instead {
        let Self { precise: Precise { redis, leases }, counters, now, rule, of_endpoints, place, len } = *self;
        let until_probe = redis.outage(&cell.identity);
        let goes_on = of_endpoints.unwrap_or(rule.on_store_failure) == FailurePolicy::Local;
        if rule.precision == Precision::Leased && goes_on {
            if until_probe.is_none() && !leases.is_away() {
                let outcome = Outcome::Denied { retry_after_us: RETRY_AFTER_US };
                let reset_us = reset_us(&cell.algorithm, now.get());
                return Instead::Outcome(CellOutcome { outcome, ..CellOutcome::allowed(reset_us) });
            }
            // What was said of it last is with the leases.
            if let Some((view, at)) = leases.known(cell) {
                counters.inform(cell, view, at);
            }
        }
        let until_probe = until_probe.unwrap_or(Duration::ZERO);
        let outage = Outage { rule, of_endpoints, until_probe, counters, now, nodes: redis.live_nodes().into() };
        let failed = failing.fail(place, len, cell, &outage);
        match failed.policy {
            FailurePolicy::Open | FailurePolicy::Local => Instead::Memory,
            FailurePolicy::Closed => {
                let reset_us = reset_us(&cell.algorithm, now.get());
                Instead::Outcome(CellOutcome { outcome: failed.denied(), ..CellOutcome::allowed(reset_us) })
            }
        }
    }
}

fn reset_us(algorithm: &Algorithm, now_us: u64) -> u64 {
    algorithm.reset_us(algorithm.unused(now_us), now_us)
}

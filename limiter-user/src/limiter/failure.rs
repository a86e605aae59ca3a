//! What becomes of a request while counters of it cannot be shared: each rule does what its `on_store_failure` says.
//!
//! Deciding stays what it is, from memory and all at once. Before it, the cells of such counters are made what their rules
//! want of them ([`apply`]); after it, their outcomes are made what is true of them ([`Failing::settle`]).

use std::time::Duration;

use limiter_common::{
    bucket::Bucket,
    sliding_window::{Outcome, Window},
    time::UnixMicros,
};

use super::{Precise, Request, Touched};
use crate::{
    active::Active,
    policy::{FailurePolicy, Precision, Rule},
    store::{
        Algorithm, CellOutcome, CellRef, Charge, Outcomes,
        memory::{MemoryStore, OwnPart},
        redis::RedisStore,
    },
};

/// A client is never told to come back sooner than this.
const LEAST_WAIT: Duration = Duration::from_secs(1);

/// The cells of a request whose counters cannot be shared.
#[derive(Debug, Default)]
pub(super) struct Failing {
    /// By the places of the cells; empty where all can be shared, and then nothing is allocated.
    cells: Vec<Option<FailingCell>>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct FailingCell {
    pub(super) policy: FailurePolicy,
    /// What the rule grants while all is well.
    pub(super) whole: Algorithm,
    /// Whether it is this node's share that is used up, and not the limit.
    pub(super) is_of_share: bool,
    /// When the counter may be shared again.
    retry_us: u64,
    /// Until both the limit and the share have room, as far as is known.
    wait_us: u64,
}

impl FailingCell {
    /// Until it can be shared again.
    pub(super) const fn denied(&self) -> Outcome {
        Outcome::Denied { retry_after_us: self.retry_us }
    }
}

impl Failing {
    pub(super) fn at(&self, position: usize) -> Option<&FailingCell> {
        self.cells.get(position)?.as_ref()
    }

    /// Whether a rule denies the request whatever counters say.
    pub(super) fn denies(&self, touched: &Touched<'_>) -> bool {
        let closed = |(cell, failing): (&CellRef<'_>, &Option<FailingCell>)| {
            cell.enforced && failing.is_some_and(|failing| failing.policy == FailurePolicy::Closed)
        };
        touched.cells.iter().zip(&self.cells).any(closed)
    }

    /// What is charged of a request: nothing where it is denied anyway.
    pub(super) fn charge(&self, charge: Charge, touched: &Touched<'_>) -> Charge {
        if self.denies(touched) { Charge::Peek } else { charge }
    }

    /// Makes one of `len` cells what its rule wants of it, and says what that is.
    pub(super) fn fail(
        &mut self,
        place: usize,
        len: usize,
        cell: &mut CellRef<'_>,
        outage: &Outage<'_>,
    ) -> FailingCell {
        let policy = outage.of_endpoints.unwrap_or(outage.rule.on_store_failure);
        let mut failing = FailingCell {
            policy,
            whole: cell.algorithm,
            is_of_share: false,
            retry_us: u64::try_from(outage.until_probe.max(LEAST_WAIT).as_micros()).unwrap_or(u64::MAX),
            wait_us: 0,
        };
        match policy {
            // It is still counted, as far as it fits: the limit holds again when counts are shared again.
            FailurePolicy::Open => cell.enforced = false,
            FailurePolicy::Closed => {}
            FailurePolicy::Local => share(outage, cell, &mut failing),
        }
        self.cells.resize(len, None);
        self.cells[place] = Some(failing);
        failing
    }

    /// Makes the outcomes what the rules want them to be.
    pub(super) fn settle(&self, cells: &[CellRef<'_>], outcomes: &mut Outcomes) {
        for ((failing, cell), outcome) in self.cells.iter().zip(cells).zip(outcomes) {
            let Some(failing) = failing else { continue };
            match failing.policy {
                FailurePolicy::Open => outcome.outcome = Outcome::Allowed,
                FailurePolicy::Closed => {
                    *outcome = CellOutcome { outcome: failing.denied(), remaining: 0, delay_us: 0, ..*outcome };
                }
                FailurePolicy::Local => match outcome.outcome {
                    Outcome::Allowed => {}
                    Outcome::Denied { retry_after_us } => {
                        let retry_after_us = if failing.wait_us > 0 { failing.wait_us } else { retry_after_us };
                        outcome.outcome = Outcome::Denied { retry_after_us };
                    }
                    // It fits the limit, and not the share of it.
                    Outcome::Never if cell.cost <= failing.whole.ceiling() => outcome.outcome = failing.denied(),
                    Outcome::Never => {}
                },
            }
        }
    }
}

/// Of one counter.
#[derive(Debug)]
pub(super) struct Outage<'a> {
    pub(super) rule: &'a Rule,
    pub(super) of_endpoints: Option<FailurePolicy>,
    /// How long until the counter may be shared again; no time where nothing is known of that.
    pub(super) until_probe: Duration,
    pub(super) counters: &'a MemoryStore,
    pub(super) now: UnixMicros,
    pub(super) nodes: u64,
}

/// Where the counters of a request are shared, and where they are decided if that is elsewhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stores<'a> {
    pub(super) shared: &'a RedisStore,
    pub(super) precise: Option<&'a Precise>,
}

impl Stores<'_> {
    /// `None` while the counter can be shared as its rule wants it.
    fn outage(&self, rule: &Rule, of_endpoints: Option<FailurePolicy>, cell: &CellRef<'_>) -> Option<Duration> {
        let shared = || self.shared.outage(&cell.identity);
        let precise = || self.precise.and_then(|precise| precise.redis.outage(&cell.identity));
        match rule.precision {
            // Nobody else has them.
            Precision::Local => None,
            Precision::Async => shared(),
            Precision::Strict => shared().max(precise()),
            // What was lent is used first.
            Precision::Leased if of_endpoints.unwrap_or(rule.on_store_failure) == FailurePolicy::Local => None,
            Precision::Leased => shared().max(precise()),
        }
    }
}

/// Makes the cells whose counters cannot be shared what their rules want of them.
#[cold]
pub(super) fn apply(
    stores: Stores<'_>,
    counters: &MemoryStore,
    now: UnixMicros,
    request: &Request<'_>,
    active: &Active,
    touched: &mut Touched<'_>,
) -> Failing {
    let mut failing = Failing::default();
    // What is given back is given back.
    if request.charge == Charge::Refund {
        return failing;
    }
    let (nodes, of_endpoints, len) = (stores.shared.live_nodes().into(), touched.of_endpoints, touched.cells.len());
    for (place, (cell, index)) in touched.cells.iter_mut().zip(&touched.rules).enumerate() {
        let rule = &active.policy.rules[*index];
        if let Some(until_probe) = stores.outage(rule, of_endpoints, cell) {
            let outage = Outage { rule, of_endpoints, until_probe, counters, now, nodes };
            failing.fail(place, len, cell, &outage);
        }
    }
    failing
}

/// Leaves this node its part of a limit, and at least one request.
fn share(outage: &Outage<'_>, cell: &mut CellRef<'_>, failing: &mut FailingCell) {
    let Outage { rule, counters, now, nodes, .. } = *outage;
    let whole = cell.algorithm;
    let part = (whole.ceiling() / nodes).max(rule.cost).min(whole.ceiling());
    if let Some(slower) = slower(&whole, nodes, part) {
        cell.algorithm = slower;
        // What a bucket lacks is not known by nodes.
        failing.is_of_share = nodes > 1;
        return;
    }
    let with_ceiling = |ceiling| match whole {
        Algorithm::SlidingWindow(window) => Algorithm::SlidingWindow(Window { ceiling, ..window }),
        Algorithm::FixedWindow(window) => Algorithm::FixedWindow(Window { ceiling, ..window }),
        Algorithm::SlidingLog(window) => Algorithm::SlidingLog(Window { ceiling, ..window }),
        bucket @ (Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. }) => bucket,
    };
    let OwnPart { all, own } = counters.own_part(now, cell, part);
    let used = |view| whole.used(view, now.get());
    // What the others have used as well does not change meanwhile. So this node's own admissions are held to its part by
    // holding all of them to this, in one step with charging them.
    let of_others = used(all).saturating_sub(used(own));
    cell.algorithm = with_ceiling(of_others.saturating_add(part).min(whole.ceiling()));
    let wait = |algorithm: &Algorithm, view| match algorithm.check(view, now.get(), cell.cost).0 {
        Outcome::Allowed => 0,
        Outcome::Denied { retry_after_us } => retry_after_us,
        Outcome::Never => failing.retry_us,
    };
    let (of_limit, of_part) = (wait(&whole, all), wait(&with_ceiling(part), own));
    failing.is_of_share = of_part > 0 && of_limit == 0;
    failing.wait_us = of_limit.max(of_part);
}

/// A bucket with a part of its rate. `None` of what is no bucket.
fn slower(algorithm: &Algorithm, nodes: u64, part: u64) -> Option<Algorithm> {
    let interval = |bucket: &Bucket| bucket.interval_ns().saturating_mul(nodes);
    match *algorithm {
        Algorithm::TokenBucket { bucket, window_us } => {
            // One that would take too long to fill holds less.
            let slower =
                Bucket::from_interval(interval(&bucket), part).or_else(|_| Bucket::from_interval(interval(&bucket), 1));
            Some(Algorithm::TokenBucket { bucket: slower.unwrap_or(bucket), window_us })
        }
        Algorithm::LeakyBucket { bucket, window_us } => {
            let slower = bucket.with_interval(interval(bucket.bucket())).unwrap_or(bucket);
            Some(Algorithm::LeakyBucket { bucket: slower, window_us })
        }
        Algorithm::SlidingWindow(_) | Algorithm::FixedWindow(_) | Algorithm::SlidingLog(_) => None,
    }
}

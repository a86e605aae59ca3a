//! Sources without a bucket: whether one is made, and what they share otherwise.

use limiter_common::{
    aggregate::{self, ROWS},
    gcra::{self, GcraParams, Outcome},
    verdict::DropReason,
};

use crate::{
    globals,
    maps::{self, AggregateState, Tat},
    rate_limit::{self, Charge, Cost, Limits},
    source::Family,
};

const RESERVE: GcraParams = aggregate::creation_reserve();

/// Takes the packet's cost from a bucket that is made for its source now, or else from those of its neighbourhood.
#[inline(always)]
pub(crate) fn take<F: Family>(
    source: F,
    key: &F::Key,
    limits: &Limits,
    cost: Cost,
    now: u64,
) -> Result<(), DropReason> {
    let [first, second] = source.aggregates();
    // The places are always in range; whoever has no bucket is not let through.
    let (Some(first), Some(second)) = (maps::aggregate(first), maps::aggregate(second)) else {
        return Err(DropReason::NewSources);
    };
    let neighbourhood = [first, second];
    if may_create(&neighbourhood, now) {
        F::create_bucket(key, now);
        if let Some(bucket) = F::bucket(key) {
            return rate_limit::take(bucket, limits, cost, now);
        }
    }
    // Charged to each that has room, so that a neighbourhood by itself has one quota and not two.
    let taken = rate_limit::take(first.bucket, limits, cost, now);
    let taken_too = rate_limit::take(second.bucket, limits, cost, now);
    if taken_too.is_ok() { Ok(()) } else { taken.map_err(of_new_source) }
}

/// Takes one bucket from the budget for new ones: anybody while there is plenty, and then who has made none lately.
#[inline(always)]
fn may_create(neighbourhood: &[AggregateState; ROWS], now: u64) -> bool {
    let Some(tat) = maps::creation_tat() else { return false };
    let common = globals::CREATION_COMMON.load();
    let is_plenty = has_room(tat, &common, now);
    let [first, second] = neighbourhood.map(|aggregate| has_room(aggregate.creation, &RESERVE, now));
    if !(is_plenty || first || second) {
        return false;
    }
    let quota = globals::CREATION_QUOTA.load();
    if one(tat, &quota).commit(now).is_err() {
        return false;
    }
    // Remembered in both; where one is not free it is another neighbourhood's.
    for aggregate in neighbourhood {
        let _noted = one(aggregate.creation, &RESERVE).commit(now);
    }
    true
}

#[inline(always)]
fn one(tat: Tat, params: &GcraParams) -> Charge<'_> {
    Charge { tat, params, cost: 1, reason: DropReason::NewSources }
}

/// Reads only: a part of a budget must not cut the debt of the whole.
#[inline(always)]
fn has_room(tat: Tat, params: &GcraParams, now: u64) -> bool {
    matches!(gcra::check(tat.load(), params, now, 1).outcome, Outcome::Conforming)
}

#[inline(always)]
fn of_new_source(reason: DropReason) -> DropReason {
    match reason {
        DropReason::Contended => DropReason::Contended,
        DropReason::RateLimitedPackets
        | DropReason::RateLimitedBytes
        | DropReason::RateLimitedConnections
        | DropReason::NewSources
        | DropReason::Malformed
        | DropReason::Denied
        | DropReason::Blocked => DropReason::NewSources,
    }
}

//! Sources without a bucket: whether one is made, and what they share otherwise.

use limiter_common::{
    aggregate::{self, ROWS},
    event::EventKind,
    gcra::{self, GcraParams, Outcome},
    verdict::DropReason,
};

use crate::{
    globals,
    maps::{self, AggregateState, BucketState, Tat},
    packet,
    rate_limit::{self, Charge, Cost, Limits},
    source::Family,
};

/// How often an update is tried while other CPUs change a bucket that many share.
const ATTEMPTS: u32 = 4;

const RESERVE: GcraParams = aggregate::creation_reserve();

/// The buckets of a neighbourhood under the rule of this slot. The places are always in range; whoever has no bucket is
/// not let through.
#[inline(always)]
fn neighbourhood<F: Family>(source: F, slot: u32) -> Option<[AggregateState; ROWS]> {
    let [first, second] = source.aggregates(slot);
    Some([maps::aggregate(first)?, maps::aggregate(second)?])
}

/// A bucket that is made for a source now, or why it gets none.
#[inline(always)]
pub(crate) fn bucket<F: Family>(source: F, key: &F::Key, slot: u32, now: u64) -> Result<BucketState, EventKind> {
    let neighbourhood = neighbourhood(source, slot);
    if let Some([first, second]) = neighbourhood {
        first.begin(now);
        second.begin(now);
    }
    match neighbourhood {
        Some(neighbourhood) if may_create(&neighbourhood, now) => {}
        Some(_) | None => return Err(EventKind::NewSourcesOver),
    }
    F::create_bucket(key, now);
    F::bucket(key).ok_or(EventKind::InsertFailed)
}

/// Takes the packet's cost from the buckets of its neighbourhood.
#[inline(always)]
pub(crate) fn share<F: Family>(source: F, limits: &Limits<'_>, cost: Cost, now: u64) -> Result<(), DropReason> {
    let [first, second] = neighbourhood(source, limits.slot).ok_or(DropReason::NewSources)?;
    // Charged to each that has room, so that a neighbourhood by itself has one quota and not two. Not a loop: the
    // verifier does not follow pointers through an array.
    let first = charge(first, limits, cost, now);
    let second = charge(second, limits, cost, now);
    match (first.passed | second.passed, first.contended | second.contended) {
        (0, 0) => Err(DropReason::NewSources),
        (0, _) => Err(DropReason::Contended),
        _ => Ok(()),
    }
}

/// Not 0 where it is so.
struct Charged {
    passed: usize,
    contended: usize,
}

#[inline(always)]
fn charge(aggregate: AggregateState, limits: &Limits<'_>, cost: Cost, now: u64) -> Charged {
    let (passed, contended) = match rate_limit::take::<ATTEMPTS>(aggregate.bucket, limits, cost, now) {
        Ok(()) => (1, 0),
        Err(reason) => (0, usize::from(is_contended(reason))),
    };
    // So that the verifier walks the second bucket once, and not once for every outcome of the first.
    Charged { passed: packet::forget(passed, cost.bytes), contended: packet::forget(contended, cost.bytes) }
}

/// Takes one bucket from the budget for new ones: anybody while there is plenty, and then who has made none lately.
#[inline(always)]
fn may_create(neighbourhood: &[AggregateState; ROWS], now: u64) -> bool {
    let Some(tat) = maps::creation_tat() else { return false };
    tat.begin(gcra::full(now));
    let common = globals::CREATION_COMMON.load();
    let is_plenty = has_room(tat, &common, now);
    let [first, second] = neighbourhood.map(|aggregate| has_room(aggregate.creation, &RESERVE, now));
    if !(is_plenty || first || second) {
        return false;
    }
    let quota = globals::CREATION_QUOTA.load();
    if one(tat, &quota).commit::<ATTEMPTS>(now).is_err() {
        return false;
    }
    // Remembered in both; where one is not free it is another neighbourhood's. Tried once: where another CPU was
    // quicker, it has noted the same.
    let [first, second] = neighbourhood;
    let _noted = one(first.creation, &RESERVE).commit::<1>(now);
    let _noted = one(second.creation, &RESERVE).commit::<1>(now);
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
fn is_contended(reason: DropReason) -> bool {
    matches!(reason, DropReason::Contended)
}

//! Packet rules and buckets: which limits hold for a source, and taking from its bucket. The arithmetic is
//! `limiter_common::gcra`.

use limiter_common::{
    budget::Budget,
    gcra::{self, GcraParams, Outcome},
    rule::{Dimension, PacketRule},
    time::KtimeNs,
    verdict::{DropReason, PassReason, Verdict},
};

use crate::{
    globals,
    maps::{self, BucketState, Tat},
    source::Family,
    stats::Ruling,
};

/// What a packet takes from a bucket, beside one packet.
#[derive(Clone, Copy)]
pub(crate) struct Cost {
    pub(crate) bytes: u64,
    pub(crate) opens_connection: bool,
}

#[inline(always)]
pub(crate) fn judge<F: Family>(
    source: F,
    key: &F::Key,
    budget: Option<&'static Budget>,
    cost: Cost,
    now: KtimeNs,
) -> Ruling {
    // A rule that is off limits nothing; a budget holds without a rule too.
    let rule = source.rule().filter(|rule| !rule.is_off());
    let (slot, shadow) = match (rule, budget) {
        (Some(rule), _) => (rule.slot(), rule.is_shadow()),
        (None, Some(budget)) => (budget.rule_slot(), false),
        (None, None) => return Verdict::Pass(PassReason::Unlimited).into(),
    };
    let now_ticks = now.ticks();
    let taken = match own_bucket::<F>(key, now_ticks) {
        Some(bucket) => take(bucket, rule, budget, cost, now_ticks),
        None => match source.aggregate() {
            Some(bucket) => take(bucket, rule, budget, cost, now_ticks).map_err(of_new_source),
            // The index is always in range; whoever has no bucket is not let through.
            None => Err(DropReason::NewSources),
        },
    };
    let verdict = match taken {
        Ok(()) => Verdict::Pass(PassReason::Conforming),
        Err(reason) if shadow => Verdict::ShadowDrop(reason),
        Err(reason) => Verdict::Drop(reason),
    };
    Ruling { verdict, slot }
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

/// The bucket of this source, made now if it is new and the budget for new ones allows.
#[inline(always)]
fn own_bucket<F: Family>(key: &F::Key, now_ticks: u64) -> Option<BucketState> {
    if let Some(bucket) = F::bucket(key) {
        return Some(bucket);
    }
    let quota = globals::CREATION_QUOTA.load();
    let creation = Charge::prepare(maps::creation_tat()?, &quota, now_ticks, 1, DropReason::NewSources);
    creation.and_then(|charge| charge.commit(now_ticks)).ok()?;
    F::create_bucket(key, now_ticks);
    F::bucket(key)
}

/// Takes the packet's cost in every dimension that is limited, or nothing.
#[inline(always)]
fn take(
    bucket: BucketState,
    rule: Option<&PacketRule>,
    budget: Option<&Budget>,
    cost: Cost,
    now: u64,
) -> Result<(), DropReason> {
    let limit = |dimension: Dimension| {
        if globals::LIMITS.load() & dimension.bit() == 0 { None } else { rule?.limit(dimension) }
    };
    // A budget replaces the packet limit and leaves the others.
    let packets = match budget {
        Some(budget) => Some(budget.packets()),
        None => limit(Dimension::Packets),
    };
    let connections = if cost.opens_connection { limit(Dimension::Connections) } else { None };

    let packets = prepare(bucket.packets, packets, now, 1, DropReason::RateLimitedPackets)?;
    let bytes = prepare(bucket.bytes, limit(Dimension::Bytes), now, cost.bytes, DropReason::RateLimitedBytes)?;
    let connections = prepare(bucket.connections, connections, now, 1, DropReason::RateLimitedConnections)?;

    // Other CPUs may have taken meanwhile. What one dimension refuses is given back in the others.
    if let Some(charge) = &packets {
        charge.commit(now)?;
    }
    if let Some(charge) = &bytes
        && let Err(reason) = charge.commit(now)
    {
        give_back(&packets);
        return Err(reason);
    }
    if let Some(charge) = &connections
        && let Err(reason) = charge.commit(now)
    {
        give_back(&packets);
        give_back(&bytes);
        return Err(reason);
    }
    Ok(())
}

#[inline(always)]
fn prepare(
    tat: Tat,
    params: Option<&GcraParams>,
    now: u64,
    cost: u64,
    reason: DropReason,
) -> Result<Option<Charge<'_>>, DropReason> {
    match params {
        Some(params) => Charge::prepare(tat, params, now, cost, reason).map(Some),
        None => Ok(None),
    }
}

#[inline(always)]
fn give_back(charge: &Option<Charge<'_>>) {
    if let Some(charge) = charge {
        charge.tat.subtract(charge.params.increment(charge.cost));
    }
}

/// A cost that conforms to the state that was seen.
#[derive(Clone, Copy)]
struct Charge<'a> {
    tat: Tat,
    params: &'a GcraParams,
    cost: u64,
    reason: DropReason,
    seen: u64,
    next: u64,
}

impl<'a> Charge<'a> {
    #[inline(always)]
    fn prepare(
        tat: Tat,
        params: &'a GcraParams,
        now: u64,
        cost: u64,
        reason: DropReason,
    ) -> Result<Self, DropReason> {
        let seen = tat.load();
        let next = next(tat, params, seen, now, cost).ok_or(reason)?;
        Ok(Self { tat, params, cost, reason, seen, next })
    }

    /// Stores the new state; where another CPU was quicker, judges again by what it left.
    #[inline(always)]
    fn commit(&self, now: u64) -> Result<(), DropReason> {
        let (mut seen, mut after) = (self.seen, self.next);
        for _ in 0..globals::SWAP_ATTEMPTS.load().min(globals::MAX_SWAP_ATTEMPTS) {
            match self.tat.swap(seen, after) {
                Ok(()) => return Ok(()),
                Err(found) => seen = found,
            }
            after = next(self.tat, self.params, seen, now, self.cost).ok_or(self.reason)?;
        }
        Err(DropReason::Contended)
    }
}

/// The state after a conforming cost.
#[inline(always)]
fn next(tat: Tat, params: &GcraParams, seen: u64, now: u64, cost: u64) -> Option<u64> {
    let step = gcra::check(seen, params, now, cost);
    match step.outcome {
        Outcome::Conforming => Some(step.tat),
        Outcome::NonConforming { .. } | Outcome::NeverConforming => {
            if step.tat != seen {
                // A quota was lowered: the debt is cut to the new one. Where the swap fails, the next packet does it.
                let _: Result<(), u64> = tat.swap(seen, step.tat);
            }
            None
        }
    }
}

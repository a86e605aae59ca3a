//! Packet rules and buckets: which limits hold for a source, and taking from its bucket. The arithmetic is
//! `limiter_common::gcra`.

use limiter_common::{
    budget::Budget,
    event::News,
    gcra::{self, GcraParams},
    rule::{Dimension, PacketRule},
    time::KtimeNs,
    verdict::{DropReason, PassReason, Verdict},
};

use crate::{
    events,
    globals::{self, MAX_SWAP_ATTEMPTS},
    maps::{BucketState, BudgetState, Tat},
    newcomer, packet,
    source::Family,
    stats::Ruling,
};

/// What a packet takes from a bucket, beside one packet.
#[derive(Clone, Copy)]
pub(crate) struct Cost {
    pub(crate) bytes: u64,
    /// 1 for a segment that opens a connection.
    pub(crate) connections: u64,
}

#[inline(always)]
pub(crate) fn judge<F: Family>(
    source: F,
    key: &F::Key,
    budget: Option<BudgetState>,
    cost: Cost,
    now: KtimeNs,
) -> Ruling {
    let Some(limits) = limits(source.rule(), budget.as_deref(), cost) else {
        return Verdict::Pass(PassReason::Unlimited).into();
    };
    let now_ticks = now.ticks();
    let bucket = match F::bucket(key) {
        Some(bucket) => Ok(bucket),
        None => newcomer::bucket(source, key, limits.slot, now_ticks),
    };
    let (taken, mut news) = match bucket {
        Ok(bucket) => (take::<MAX_SWAP_ATTEMPTS>(bucket, &limits, cost, now_ticks), News::NONE),
        Err(pressure) => (newcomer::share(source, &limits, cost, now_ticks), events::of_pressure(pressure, now)),
    };
    if taken.is_err()
        && let Ok(bucket) = bucket
    {
        news = events::of_limit::<F>(bucket, key, limits.by_budget != 0, now);
    }
    let verdict = match taken {
        Ok(()) => Verdict::Pass(PassReason::Conforming),
        Err(reason) if limits.shadow != 0 => Verdict::ShadowDrop(reason),
        Err(reason) => Verdict::Drop(reason),
    };
    Ruling { verdict, slot: limits.slot, news }
}

/// What limits a source.
pub(crate) struct Limits<'a> {
    /// Bits of the dimensions that are limited.
    set: usize,
    /// A copy, so that for the verifier it is the same whether it comes from a rule or from a budget.
    packets: GcraParams,
    /// Of the rule, in place.
    bytes: Option<&'a GcraParams>,
    connections: Option<&'a GcraParams>,
    pub(crate) slot: u32,
    /// Not 0 for a rule that only counts.
    shadow: usize,
    /// Not 0 where a budget replaces the packet limit.
    by_budget: usize,
}

/// A rule that is off limits nothing. A budget replaces the packet limit of a rule and leaves the others; without a
/// rule it holds by itself.
#[inline(always)]
fn limits<'a>(rule: Option<&'a PacketRule>, budget: Option<&Budget>, cost: Cost) -> Option<Limits<'a>> {
    let used = used_dimensions();
    let rule = rule.filter(|rule| !rule.is_off());
    let mut limits = Limits {
        set: 0,
        packets: GcraParams::default(),
        bytes: None,
        connections: None,
        slot: 0,
        shadow: 0,
        by_budget: budget.is_some().into(),
    };
    match (rule, budget) {
        (None, None) => return None,
        (None, Some(budget)) => limits.slot = budget.rule_slot(),
        (Some(rule), _) => {
            limits.set = rule.limits() as usize;
            limits.slot = rule.slot();
            limits.shadow = rule.is_shadow().into();
            if used & Dimension::Packets.bit() != 0 {
                limits.packets = *rule.params(Dimension::Packets);
            }
            if used & Dimension::Bytes.bit() != 0 {
                limits.bytes = Some(rule.params(Dimension::Bytes));
            }
            if used & Dimension::Connections.bit() != 0 {
                limits.connections = Some(rule.params(Dimension::Connections));
            }
        }
    }
    if let Some(budget) = budget {
        limits.set |= Dimension::Packets.bit() as usize;
        limits.packets = *budget.packets();
    }
    // Of the dimensions that nothing limits, the verifier goes on to know that they are not set.
    limits.set = packet::forget(limits.set, cost.bytes) & used as usize;
    limits.shadow = packet::forget(limits.shadow, cost.bytes);
    limits.by_budget = packet::forget(limits.by_budget, cost.bytes);
    Some(limits)
}

/// Bits of the dimensions that anything limits: known before load.
#[inline(always)]
fn used_dimensions() -> u32 {
    let by_budgets = if globals::is_on(&globals::HAS_BUDGETS) { Dimension::Packets.bit() } else { 0 };
    globals::LIMITS.load() | by_budgets
}

/// Takes the packet's cost in every dimension that is limited, or nothing.
#[inline(always)]
pub(crate) fn take<const ATTEMPTS: u32>(
    bucket: BucketState,
    limits: &Limits<'_>,
    cost: Cost,
    now: u64,
) -> Result<(), DropReason> {
    let Some(packets) = Taking::of(limits.charge(Dimension::Packets, bucket, cost), now) else {
        return Err(DropReason::RateLimitedPackets);
    };
    let Some(bytes) = Taking::of(limits.charge(Dimension::Bytes, bucket, cost), now) else {
        return Err(DropReason::RateLimitedBytes);
    };
    let Some(connections) = Taking::of(limits.charge(Dimension::Connections, bucket, cost), now) else {
        return Err(DropReason::RateLimitedConnections);
    };
    // Other CPUs may have taken meanwhile. What one dimension refuses is given back in the others.
    packets.commit::<ATTEMPTS>(now)?;
    if let Err(reason) = bytes.commit::<ATTEMPTS>(now) {
        limits.give_back(Dimension::Packets, bucket, cost);
        return Err(reason);
    }
    if let Err(reason) = connections.commit::<ATTEMPTS>(now) {
        limits.give_back(Dimension::Packets, bucket, cost);
        limits.give_back(Dimension::Bytes, bucket, cost);
        return Err(reason);
    }
    Ok(())
}

impl Limits<'_> {
    /// The charge in one dimension; `None` when the packet takes nothing there.
    #[inline(always)]
    fn charge(&self, dimension: Dimension, bucket: BucketState, cost: Cost) -> Option<Charge<'_>> {
        if self.set & dimension.bit() as usize == 0 {
            return None;
        }
        let (tat, params, cost, reason) = match dimension {
            Dimension::Packets => (bucket.packets, &self.packets, 1, DropReason::RateLimitedPackets),
            Dimension::Bytes => (bucket.bytes, self.bytes?, cost.bytes, DropReason::RateLimitedBytes),
            Dimension::Connections => {
                (bucket.connections, self.connections?, cost.connections, DropReason::RateLimitedConnections)
            }
        };
        if cost == 0 { None } else { Some(Charge { tat, params, cost, reason }) }
    }

    #[inline(always)]
    fn give_back(&self, dimension: Dimension, bucket: BucketState, cost: Cost) {
        if let Some(charge) = self.charge(dimension, bucket, cost) {
            charge.tat.subtract(charge.params.increment(charge.cost));
        }
    }
}

/// A cost in one dimension; not 0.
#[derive(Clone, Copy)]
pub(crate) struct Charge<'a> {
    pub(crate) tat: Tat,
    pub(crate) params: &'a GcraParams,
    pub(crate) cost: u64,
    pub(crate) reason: DropReason,
}

impl Charge<'_> {
    #[inline(always)]
    pub(crate) fn commit<const ATTEMPTS: u32>(self, now: u64) -> Result<(), DropReason> {
        match Taking::of(Some(self), now) {
            Some(taking) => taking.commit::<ATTEMPTS>(now),
            None => Err(self.reason),
        }
    }

    /// The state after this cost, if it conforms.
    #[inline(always)]
    fn next(&self, seen: u64, now: u64) -> Option<u64> {
        gcra::take(seen, self.params, now, self.cost)
    }

    /// Where a quota was lowered, the debt is cut to the new one. Where the swap fails, the next packet does it.
    #[inline(always)]
    fn cut_debt(&self, seen: u64, now: u64) {
        let step = gcra::refuse(seen, self.params, now, self.cost);
        if step.cuts_debt(seen) {
            self.tat.swap(seen, step.tat);
        }
    }
}

/// A charge that conformed to the state that was seen; or none, which always does.
struct Taking<'a> {
    charge: Option<Charge<'a>>,
    seen: u64,
    next: u64,
}

impl<'a> Taking<'a> {
    /// `None` where the charge does not conform.
    #[inline(always)]
    fn of(charge: Option<Charge<'a>>, now: u64) -> Option<Self> {
        let Some(charge) = charge else { return Some(Self { charge: None, seen: 0, next: 0 }) };
        let seen = charge.tat.load();
        let next = charge.next(seen, now);
        if next.is_none() {
            charge.cut_debt(seen, now);
        }
        Some(Self { charge: Some(charge), seen, next: next? })
    }

    /// Stores the state after this cost; where another CPU was quicker, judges again by what it left.
    #[inline(always)]
    fn commit<const ATTEMPTS: u32>(self, now: u64) -> Result<(), DropReason> {
        let Self { charge: Some(charge), mut seen, mut next } = self else { return Ok(()) };
        for _ in 0..globals::SWAP_ATTEMPTS.load().min(ATTEMPTS) {
            let found = charge.tat.swap(seen, next);
            if found == seen {
                return Ok(());
            }
            seen = found;
            let Some(after) = charge.next(found, now) else { return Err(charge.reason) };
            next = after;
        }
        Err(DropReason::Contended)
    }
}

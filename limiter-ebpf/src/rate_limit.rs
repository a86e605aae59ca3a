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
    globals::{self, MAX_SWAP_ATTEMPTS},
    maps::{BucketState, Tat},
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
    budget: Option<&'static Budget>,
    cost: Cost,
    now: KtimeNs,
) -> Ruling {
    let Some(limits) = limits(source.rule(), budget, cost) else {
        return Verdict::Pass(PassReason::Unlimited).into();
    };
    let now_ticks = now.ticks();
    let taken = match F::bucket(key).or_else(|| newcomer::bucket(source, key, now_ticks)) {
        Some(bucket) => take::<MAX_SWAP_ATTEMPTS>(bucket, &limits, cost, now_ticks),
        None => newcomer::share(source, &limits, cost, now_ticks),
    };
    let verdict = match taken {
        Ok(()) => Verdict::Pass(PassReason::Conforming),
        Err(reason) if limits.shadow != 0 => Verdict::ShadowDrop(reason),
        Err(reason) => Verdict::Drop(reason),
    };
    Ruling { verdict, slot: limits.slot }
}

/// What limits a source. A copy, so that for the verifier it is the same wherever it comes from.
pub(crate) struct Limits {
    /// Bits of the dimensions that are limited.
    set: usize,
    packets: GcraParams,
    bytes: GcraParams,
    connections: GcraParams,
    slot: u32,
    /// Not 0 for a rule that only counts.
    shadow: usize,
}

/// A rule that is off limits nothing. A budget replaces the packet limit of a rule and leaves the others; without a
/// rule it holds by itself.
#[inline(always)]
fn limits(rule: Option<&PacketRule>, budget: Option<&Budget>, cost: Cost) -> Option<Limits> {
    let rule = rule.filter(|rule| !rule.is_off());
    let mut limits = Limits {
        set: 0,
        packets: GcraParams::default(),
        bytes: GcraParams::default(),
        connections: GcraParams::default(),
        slot: 0,
        shadow: 0,
    };
    match (rule, budget) {
        (None, None) => return None,
        (None, Some(budget)) => limits.slot = budget.rule_slot(),
        (Some(rule), _) => {
            limits.set = rule.limits() as usize;
            limits.slot = rule.slot();
            limits.shadow = rule.is_shadow().into();
            if is_used(Dimension::Packets) {
                limits.packets = *rule.params(Dimension::Packets);
            }
            if is_used(Dimension::Bytes) {
                limits.bytes = *rule.params(Dimension::Bytes);
            }
            if is_used(Dimension::Connections) {
                limits.connections = *rule.params(Dimension::Connections);
            }
        }
    }
    if let Some(budget) = budget {
        limits.set |= Dimension::Packets.bit() as usize;
        limits.packets = *budget.packets();
    }
    limits.set = packet::forget(limits.set, cost.bytes);
    limits.shadow = packet::forget(limits.shadow, cost.bytes);
    Some(limits)
}

/// Whether anything limits this dimension: known before load.
#[inline(always)]
fn is_used(dimension: Dimension) -> bool {
    let by_budget = matches!(dimension, Dimension::Packets) && globals::is_on(&globals::HAS_BUDGETS);
    by_budget || globals::LIMITS.load() & dimension.bit() != 0
}

/// Takes the packet's cost in every dimension that is limited, or nothing.
#[inline(always)]
pub(crate) fn take<const ATTEMPTS: u32>(
    bucket: BucketState,
    limits: &Limits,
    cost: Cost,
    now: u64,
) -> Result<(), DropReason> {
    let packets = Dimension::Packets;
    let bytes = Dimension::Bytes;
    let connections = Dimension::Connections;
    let several = [packets, bytes, connections].into_iter().filter(|dimension| is_used(*dimension)).count() > 1;
    if several {
        limits.peek(packets, bucket, cost, now)?;
        limits.peek(bytes, bucket, cost, now)?;
        limits.peek(connections, bucket, cost, now)?;
    }
    // Other CPUs may have taken meanwhile. What one dimension refuses is given back in the others.
    limits.charge::<ATTEMPTS>(packets, bucket, cost, now)?;
    if let Err(reason) = limits.charge::<ATTEMPTS>(bytes, bucket, cost, now) {
        limits.give_back(packets, bucket, cost);
        return Err(reason);
    }
    if let Err(reason) = limits.charge::<ATTEMPTS>(connections, bucket, cost, now) {
        limits.give_back(packets, bucket, cost);
        limits.give_back(bytes, bucket, cost);
        return Err(reason);
    }
    Ok(())
}

impl Limits {
    /// The charge in one dimension; `None` when the packet takes nothing there.
    #[inline(always)]
    fn in_dimension(&self, dimension: Dimension, bucket: BucketState, cost: Cost) -> Option<Charge<'_>> {
        if !is_used(dimension) || self.set & dimension.bit() as usize == 0 {
            return None;
        }
        let (tat, params, cost, reason) = match dimension {
            Dimension::Packets => (bucket.packets, &self.packets, 1, DropReason::RateLimitedPackets),
            Dimension::Bytes => (bucket.bytes, &self.bytes, cost.bytes, DropReason::RateLimitedBytes),
            Dimension::Connections => {
                (bucket.connections, &self.connections, cost.connections, DropReason::RateLimitedConnections)
            }
        };
        if cost == 0 { None } else { Some(Charge { tat, params, cost, reason }) }
    }

    #[inline(always)]
    fn peek(&self, dimension: Dimension, bucket: BucketState, cost: Cost, now: u64) -> Result<(), DropReason> {
        match self.in_dimension(dimension, bucket, cost) {
            Some(charge) => charge.next(charge.tat.load(), now).map(|_| ()),
            None => Ok(()),
        }
    }

    #[inline(always)]
    fn charge<const ATTEMPTS: u32>(
        &self,
        dimension: Dimension,
        bucket: BucketState,
        cost: Cost,
        now: u64,
    ) -> Result<(), DropReason> {
        match self.in_dimension(dimension, bucket, cost) {
            Some(charge) => charge.commit::<ATTEMPTS>(now),
            None => Ok(()),
        }
    }

    #[inline(always)]
    fn give_back(&self, dimension: Dimension, bucket: BucketState, cost: Cost) {
        if let Some(charge) = self.in_dimension(dimension, bucket, cost) {
            charge.tat.subtract(charge.params.increment(charge.cost));
        }
    }
}

/// A cost in one dimension.
#[derive(Clone, Copy)]
pub(crate) struct Charge<'a> {
    pub(crate) tat: Tat,
    pub(crate) params: &'a GcraParams,
    pub(crate) cost: u64,
    pub(crate) reason: DropReason,
}

impl Charge<'_> {
    /// Stores the state after this cost; where another CPU was quicker, judges again by what it left.
    #[inline(always)]
    pub(crate) fn commit<const ATTEMPTS: u32>(&self, now: u64) -> Result<(), DropReason> {
        let mut seen = self.tat.load();
        for _ in 0..globals::SWAP_ATTEMPTS.load().min(ATTEMPTS) {
            match self.tat.swap(seen, self.next(seen, now)?) {
                Ok(()) => return Ok(()),
                Err(found) => seen = found,
            }
        }
        Err(DropReason::Contended)
    }

    /// The state after this cost, if it conforms.
    #[inline(always)]
    pub(crate) fn next(&self, seen: u64, now: u64) -> Result<u64, DropReason> {
        let step = gcra::check(seen, self.params, now, self.cost);
        match step.outcome {
            Outcome::Conforming => Ok(step.tat),
            Outcome::NonConforming { .. } | Outcome::NeverConforming => {
                // A quota was lowered: the debt is cut to the new one. Where the swap fails, the next packet does it.
                if step.tat != seen && self.tat.swap(seen, step.tat).is_err() {
                    return Err(self.reason);
                }
                Err(self.reason)
            }
        }
    }
}

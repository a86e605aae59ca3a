//! The order of the stages. Each can end the walk.

use limiter_common::{
    packet::{IpPacket, PacketRead as _, Parsed, Source, parse},
    verdict::{DropReason, PassReason, Verdict},
};

use crate::{
    acl, budget, clock, events, globals,
    packet::Frame,
    ports,
    rate_limit::{self, Cost},
    source::Family,
    stats::Ruling,
};

#[inline(always)]
pub(crate) fn run(frame: &Frame) -> Ruling {
    let IpPacket { source, transport } = match parse(frame) {
        Parsed::NotIp => return Verdict::Pass(PassReason::NotIp).into(),
        Parsed::Control => return Verdict::Pass(PassReason::Control).into(),
        Parsed::Malformed => return malformed().into(),
        Parsed::Ip(packet) => packet,
    };
    if !ports::protects(transport) {
        return Verdict::Pass(PassReason::NotProtected).into();
    }
    let opens_connection = transport.opens_connection().into();
    let cost = Cost { bytes: frame.len(), connections: frame.forget(opens_connection) as u64 };
    match source {
        Source::V4(address) => judge(address, cost),
        Source::V6(address) => judge(address, cost),
    }
}

#[inline(always)]
fn malformed() -> Verdict {
    if globals::is_on(&globals::DROP_MALFORMED) {
        Verdict::Drop(DropReason::Malformed)
    } else {
        Verdict::ShadowDrop(DropReason::Malformed)
    }
}

#[inline(always)]
fn judge<F: Family>(source: F, cost: Cost) -> Ruling {
    let now = clock::now();
    if acl::allows(source, now) {
        return Verdict::Pass(PassReason::Allowed).into();
    }
    if acl::denies(source, now) {
        return Verdict::Drop(DropReason::Denied).into();
    }
    let key = source.key();
    let budget = budget::of::<F>(&key, now);
    if let Some(budget) = budget
        && budget.is_block()
    {
        let news = events::of_budget(&budget, now);
        return Ruling { verdict: Verdict::Drop(DropReason::Blocked), slot: budget.rule_slot(), news };
    }
    rate_limit::judge(source, &key, budget, cost, now)
}

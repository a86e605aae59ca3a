//! `[[packet_rules]]`.

use std::{collections::HashMap, fmt::Display, sync::Arc};

use ipnet::IpNet;
use limiter_common::quota::{Quota, QuotaError, Rate};

use super::{Names, mode, one_or_more, required};
use crate::{
    config::{
        Place, Value,
        prefix::prefix,
        units::{self, Counted, RateSetting, UNLIMITED},
    },
    policy::{
        PacketRuleSpec, PrefixSet,
        raw::{RawPacketLimit, RawPacketRule},
    },
};

/// An Ethernet frame of 1500 bytes with its header: a smaller burst of bytes would never let it pass.
const MIN_BYTE_BURST: u64 = 1514;
/// Least burst of bytes where none is given: receive offloads merge packets up to this size before a program in generic
/// mode sees them.
const DEFAULT_BYTE_BURST: u64 = 65_536;

pub(super) fn packet_rule(
    raw: &RawPacketRule<'_>,
    ids: &mut Names,
    cidrs: &mut HashMap<IpNet, Arc<str>>,
    allowed: &PrefixSet,
) -> Option<PacketRuleSpec> {
    let id = ids.take(raw.id.as_ref(), &raw.place, "id");
    let own = required(raw.cidr.as_ref(), &raw.place, "cidr").and_then(|value| {
        let nothing = "is empty, so nothing would ever be limited: name a prefix, or remove the rule";
        let prefixes = one_or_more(value, "a prefix, or a list of prefixes", nothing)?;
        let own = prefixes.iter().filter_map(|value| packet_rule_prefix(value, id.as_ref(), cidrs, allowed));
        let own: Vec<_> = own.collect();
        (!own.is_empty()).then_some(own)
    });
    let limits =
        [(&raw.packets, Counted::Events), (&raw.bytes, Counted::Bytes), (&raw.new_connections, Counted::Events)];
    if limits.iter().all(|(limit, _)| limit.is_none()) {
        raw.place.error("limits nothing: give packets, bytes or new_connections, or say \"unlimited\"");
    }
    let [packets, bytes, new_connections] =
        limits.map(|(limit, counted)| limit.as_ref().and_then(|limit| packet_limit(limit, counted)));
    Some(PacketRuleSpec { id: id?, cidrs: own?, packets, bytes, new_connections, mode: mode(raw.mode.as_ref()) })
}

fn packet_rule_prefix(
    value: &Value<'_>,
    id: Option<&Arc<str>>,
    cidrs: &mut HashMap<IpNet, Arc<str>>,
    allowed: &PrefixSet,
) -> Option<IpNet> {
    let cidr = value.parsed("a prefix", prefix)?;
    if let Some(id) = id
        && let Some(other) = cidrs.insert(cidr, Arc::clone(id))
    {
        if other == *id {
            value.error(format_args!("{cidr} is named twice"));
        } else {
            value.error(format_args!("the packet rules \"{other}\" and \"{id}\" both have the prefix {cidr}"));
        }
    }
    if let Some(around) = allowed.around(cidr) {
        value.error(format_args!("{cidr} would never be limited: allow has {around}, and allow wins"));
    }
    Some(cidr)
}

/// `None` for "unlimited", and for a mistake.
fn packet_limit(value: &Value<'_>, counted: Counted) -> Option<Quota> {
    if value.as_str() == Some(UNLIMITED) {
        return None;
    }
    let raw = RawPacketLimit::read(value.table()?);
    let rate = required(raw.rate.as_ref(), &raw.place, "rate")
        .and_then(|rate| rate.parsed("a rate such as \"100/s\"", |text| units::rate(text, counted)));
    let burst = raw.burst.as_ref().map(|burst| packet_burst(burst, counted));
    match (rate?, burst) {
        (RateSetting::Unlimited, Some(_)) => {
            raw.place.error_in("burst", "has no meaning where the rate is \"unlimited\"");
            None
        }
        (RateSetting::Unlimited, None) => None,
        (RateSetting::Rate(_), Some(None)) => None,
        (RateSetting::Rate(rate), Some(Some(burst))) => checked(Quota { rate, burst }, &raw.place),
        (RateSetting::Rate(rate), None) => checked(Quota { rate, burst: default_burst(rate, counted) }, &raw.place),
    }
}

/// What a second brings, and at least one packet of any size.
fn default_burst(rate: Rate, counted: Counted) -> u64 {
    let second = u128::from(rate.count) * 1_000_000_000 / u128::from(rate.per_ns);
    let least = match counted {
        Counted::Events => 1,
        Counted::Bytes => DEFAULT_BYTE_BURST,
    };
    u64::try_from(second).unwrap_or(u64::MAX).max(least)
}

fn packet_burst(value: &Value<'_>, counted: Counted) -> Option<u64> {
    let burst = match counted {
        Counted::Bytes if !value.is_integer() => value.parsed("a size such as \"64KiB\"", units::size)?,
        Counted::Bytes | Counted::Events => value.unsigned()?,
    };
    if burst == 0 {
        value.error(QuotaError::ZeroBurst);
        return None;
    }
    if counted == Counted::Bytes && burst < MIN_BYTE_BURST {
        value.error(format_args!("{burst} bytes never let a packet of full size pass: use at least {MIN_BYTE_BURST}"));
        return None;
    }
    Some(burst)
}

fn checked(quota: Quota, place: &Place<'_>) -> Option<Quota> {
    let mistake = |field: &str, error: &dyn Display| place.error_in(field, error);
    match quota.params() {
        Ok(_) => return Some(quota),
        Err(error @ (QuotaError::ZeroRate | QuotaError::TooFast)) => mistake("rate", &error),
        Err(error @ (QuotaError::ZeroBurst | QuotaError::TooSlow)) => mistake("burst", &error),
    }
    None
}

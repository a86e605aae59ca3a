//! From packet rules of the policy to what goes into the maps. Pure.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use ipnet::IpNet;
use limiter_common::{
    gcra::GcraParams,
    rule::{Dimension, EnforcementMode, PacketRule},
    schema::MAX_RULE_PREFIXES,
    stats::RULE_SLOTS,
};

use super::{DataplaneError, acl::canonical};
use crate::policy::PacketRuleSpec;

/// Packet rules, in the order of their indices.
#[derive(Debug, Default)]
pub(super) struct CompiledRules {
    pub(super) rules: Vec<CompiledRule>,
    /// Prefixes that are shorter than all addresses, with the index of their rule.
    pub(super) prefixes: Vec<(IpNet, u32)>,
    pub(super) default_v4: Option<u32>,
    pub(super) default_v6: Option<u32>,
    /// Bits of the dimensions that any rule limits.
    pub(super) limits: u32,
    /// Whether any rule needs a finer clock than the kernel's tick.
    pub(super) need_fine_clock: bool,
}

#[derive(Debug)]
pub(super) struct CompiledRule {
    pub(super) id: Arc<str>,
    /// Length of its shortest prefix.
    shortest: u8,
    mode: EnforcementMode,
    limits: Vec<(Dimension, GcraParams)>,
}

impl CompiledRules {
    pub(super) fn ids(&self) -> HashSet<&str> {
        self.rules.iter().map(|rule| &*rule.id).collect()
    }

    /// Ids of the rules, those first that are likely to decide about many packets: rules that limit anything by their
    /// shortest prefix, then the others.
    pub(super) fn by_width(&self) -> Vec<&Arc<str>> {
        let mut rules: Vec<_> = self.rules.iter().collect();
        let counts_nothing = |rule: &CompiledRule| rule.limits.is_empty() || rule.mode == EnforcementMode::Off;
        rules.sort_by_key(|rule| (counts_nothing(rule), rule.shortest));
        rules.into_iter().map(|rule| &rule.id).collect()
    }
}

impl CompiledRule {
    pub(super) fn entry(&self, slot: u32) -> PacketRule {
        let rule = PacketRule::new(self.mode, slot);
        self.limits.iter().fold(rule, |rule, (dimension, params)| rule.with_limit(*dimension, *params))
    }
}

pub(super) fn compile(specs: &[PacketRuleSpec]) -> Result<CompiledRules, DataplaneError> {
    if specs.len() >= RULE_SLOTS as usize {
        return Err(DataplaneError::TooMany { what: "packet rules", count: specs.len(), capacity: RULE_SLOTS - 1 });
    }
    let mut compiled = CompiledRules::default();
    let mut by_prefix: HashMap<IpNet, &PacketRuleSpec> = HashMap::new();
    for (index, spec) in (0..).zip(specs) {
        for prefix in spec.cidrs.iter().copied().map(canonical) {
            if let Some(other) = by_prefix.insert(prefix, spec) {
                let (first, second) = (other.id.to_string(), spec.id.to_string());
                return Err(DataplaneError::DuplicatePrefix { first, second, prefix });
            }
            match (prefix, prefix.prefix_len()) {
                (IpNet::V4(_), 0) => compiled.default_v4 = Some(index),
                (IpNet::V6(_), 0) => compiled.default_v6 = Some(index),
                (IpNet::V4(_) | IpNet::V6(_), _) => compiled.prefixes.push((prefix, index)),
            }
        }
        let rule = compile_rule(spec)?;
        compiled.limits |= rule.limits.iter().fold(0, |bits, (dimension, _)| bits | dimension.bit());
        let is_charged = rule.mode != EnforcementMode::Off;
        compiled.need_fine_clock |= is_charged && rule.limits.iter().any(|(_, params)| params.needs_fine_clock());
        compiled.rules.push(rule);
    }
    for (what, is_ipv4) in [("IPv4 prefixes of packet rules", true), ("IPv6 prefixes of packet rules", false)] {
        let count = compiled.prefixes.iter().filter(|(prefix, _)| prefix.addr().is_ipv4() == is_ipv4).count();
        if count > MAX_RULE_PREFIXES as usize {
            return Err(DataplaneError::TooMany { what, count, capacity: MAX_RULE_PREFIXES });
        }
    }
    Ok(compiled)
}

fn compile_rule(spec: &PacketRuleSpec) -> Result<CompiledRule, DataplaneError> {
    let mut limits = Vec::new();
    for (dimension, quota) in [
        (Dimension::Packets, spec.packets),
        (Dimension::Bytes, spec.bytes),
        (Dimension::Connections, spec.new_connections),
    ] {
        if let Some(quota) = quota {
            let params =
                quota.params().map_err(|source| DataplaneError::Quota { rule: spec.id.to_string(), source })?;
            limits.push((dimension, params));
        }
    }
    let shortest = spec.cidrs.iter().map(IpNet::prefix_len).min().unwrap_or(0);
    Ok(CompiledRule { id: Arc::clone(&spec.id), shortest, mode: spec.mode, limits })
}

#[cfg(test)]
mod tests {
    use limiter_common::quota::{Quota, Rate};

    use super::*;

    fn spec(id: &str, cidr: &str, packets_a_second: u64) -> PacketRuleSpec {
        let rate = Rate { count: packets_a_second, per_ns: 1_000_000_000 };
        let mut spec = PacketRuleSpec::new(id, cidr.parse().unwrap(), EnforcementMode::Enforce);
        spec.packets = Some(Quota { rate, burst: 10 });
        spec
    }

    #[test]
    fn all_addresses_are_no_prefix() {
        let compiled =
            compile(&[spec("six", "::/0", 1), spec("net", "192.0.2.0/24", 1), spec("four", "0.0.0.0/0", 1)]).unwrap();
        assert_eq!((compiled.default_v4, compiled.default_v6), (Some(2), Some(0)));
        assert_eq!(compiled.prefixes, [("192.0.2.0/24".parse().unwrap(), 1)]);
        assert_eq!(compiled.limits, Dimension::Packets.bit());
    }

    #[test]
    fn bursts_that_come_back_within_a_few_ticks_need_a_finer_clock() {
        let quota = |count, burst| Some(Quota { rate: Rate { count, per_ns: 1_000_000_000 }, burst });
        let (plenty, few) = (quota(10_000, 400), quota(10_000, 399));
        for (name, mode, packets, bytes, new_connections, expected) in [
            ("40 ms", EnforcementMode::Enforce, plenty, None, None, false),
            ("less than 40 ms", EnforcementMode::Enforce, few, None, None, true),
            ("bytes", EnforcementMode::Enforce, plenty, quota(50_000_000, 32_768), None, true),
            ("many bytes", EnforcementMode::Enforce, plenty, quota(50_000_000, 2_000_000), None, false),
            ("connections", EnforcementMode::Enforce, plenty, None, quota(1000, 1), true),
            ("one a second", EnforcementMode::Enforce, quota(1, 1), None, None, false),
            ("only counted", EnforcementMode::Shadow, few, None, None, true),
            ("off", EnforcementMode::Off, few, None, None, false),
            ("nothing", EnforcementMode::Enforce, None, None, None, false),
        ] {
            let mut one = PacketRuleSpec::new("one", "192.0.2.0/24".parse().unwrap(), mode);
            (one.packets, one.bytes, one.new_connections) = (packets, bytes, new_connections);
            let compiled = compile(&[spec("other", "0.0.0.0/0", 1), one]).unwrap();
            assert_eq!(compiled.need_fine_clock, expected, "{name}");
        }
    }

    #[test]
    fn wide_rules_come_first_and_those_that_count_nothing_last() {
        let mut off = spec("off", "10.0.0.0/7", 1);
        off.mode = EnforcementMode::Off;
        let mut both = spec("both", "2001:db8::/32", 1);
        both.cidrs.push("0.0.0.0/0".parse().unwrap());
        let compiled = compile(&[off, spec("host", "192.0.2.1/32", 1), spec("net", "10.0.0.0/8", 1), both]).unwrap();
        let ids: Vec<&str> = compiled.by_width().into_iter().map(|id| &**id).collect();
        assert_eq!(ids, ["both", "net", "host", "off"]);
        assert_eq!(compiled.default_v4, Some(3));
        assert!(compiled.prefixes.contains(&("2001:db8::/32".parse().unwrap(), 3)));
    }

    #[test]
    fn two_rules_of_one_prefix_and_impossible_quotas_are_refused() {
        let duplicate = compile(&[spec("a", "192.0.2.1/24", 1), spec("b", "192.0.2.0/24", 1)]).unwrap_err();
        assert_eq!(duplicate.to_string(), "packet rules a and b have the same prefix 192.0.2.0/24");
        let zero = compile(&[spec("a", "192.0.2.1/24", 0)]).unwrap_err();
        assert!(zero.to_string().starts_with("packet rule a: rate is 0"), "{zero}");
    }
}

//! Read-only globals of the XDP program: what of the configuration and the policy the verifier knows before load.

use std::collections::BTreeSet;

use aya::EbpfLoader;
use limiter_common::{
    addr::{SrcMaskV4, SrcMaskV6},
    event,
    gcra::GcraParams,
    prefix_filter::PrefixFilter,
    quota::{Quota, Rate},
    rule::PacketRule,
    stats::NO_RULE,
};

use super::{
    DataplaneError, List, Protect,
    acl::Acl,
    diagnosis,
    loader::{NO_LIMIT, Plan, port_bit},
    slots::Slots,
};

const V4: u8 = 1;
const V6: u8 = 2;
/// Numbers that hold two protected ports each.
const FEW_PORTS: usize = 2;

/// By list (allow, deny) and family (IPv4, IPv6): what the program asks before it looks into the list. `None` where there
/// is nothing in it, and it never looks.
pub(super) type AclFilters = [[Option<PrefixFilter>; 2]; 2];

pub(super) fn acl_filters(acl: &Acl) -> AclFilters {
    [List::Allow, List::Deny]
        .map(|list| [true, false].map(|is_ipv4| (acl.count(list, is_ipv4) > 0).then(|| acl.filter(list, is_ipv4))))
}

/// Bits of the families of which there is something.
fn families([v4, v6]: [bool; 2]) -> u8 {
    (u8::from(v4) * V4) | (u8::from(v6) * V6)
}

/// Values of the program's read-only globals.
pub(super) struct Globals {
    drop_malformed: u8,
    protect_all: u8,
    protect_ports: u8,
    has_few_ports: u8,
    few_ports: [u64; FEW_PORTS],
    allow_families: u8,
    deny_families: u8,
    filters: [[PrefixFilter; 2]; 2],
    rule_families: u8,
    default_rule_v4: u32,
    default_rule_v6: u32,
    only_rule_v4: PacketRule,
    only_rule_v6: PacketRule,
    limits: u32,
    more_rules: u8,
    has_budgets: u8,
    src_mask_v4: u32,
    src_mask_v6: [u64; 2],
    creation_quota: GcraParams,
    creation_common: GcraParams,
    aggregate_seed: u64,
    fine_clock: u8,
    clock_offset: u64,
    swap_attempts: u32,
    has_events: u8,
    sampled_below: u64,
    sample_one_in: u32,
    event_quota: GcraParams,
    log_level: u8,
}

impl Globals {
    pub(super) fn new(
        plan: &Plan<'_>,
        aggregate_seed: u64,
        slots: &Slots,
        filters: AclFilters,
    ) -> Result<Self, DataplaneError> {
        let Plan { config, tuning, rules, .. } = plan;
        let prefixes = config.src_prefixes;
        let has_prefix = |is_ipv4| rules.prefixes.iter().any(|(prefix, _)| prefix.addr().is_ipv4() == is_ipv4);
        let [allow, deny] = filters;
        let few_ports = few_ports(&config.protect);
        let only_rule = |index: Option<u32>| {
            let rule = index.and_then(|index| rules.rules.get(index as usize));
            rule.map_or(NO_LIMIT, |rule| rule.entry(slots.slot(&rule.id).unwrap_or(NO_RULE)))
        };
        let new_sources = tuning.new_sources.unwrap_or_else(|| default_creation(config.max_sources));
        let params = |quota: Quota| {
            quota.params().map_err(|source| DataplaneError::Quota { rule: "for new sources".to_owned(), source })
        };
        let creation_quota = params(new_sources)?;
        let creation_common = params(without_reserve(new_sources))?;
        Ok(Self {
            drop_malformed: config.drop_malformed.into(),
            protect_all: (config.protect == Protect::All).into(),
            protect_ports: matches!(&config.protect, Protect::Ports(ports) if !ports.is_empty()).into(),
            has_few_ports: few_ports.is_some().into(),
            few_ports: few_ports.unwrap_or([u64::MAX; FEW_PORTS]),
            allow_families: families(allow.map(|filter| filter.is_some())),
            deny_families: families(deny.map(|filter| filter.is_some())),
            filters: filters.map(|list| list.map(|filter| filter.unwrap_or(PrefixFilter::ALL))),
            rule_families: families([true, false].map(has_prefix)),
            default_rule_v4: rules.default_v4.unwrap_or(u32::MAX),
            default_rule_v6: rules.default_v6.unwrap_or(u32::MAX),
            only_rule_v4: only_rule(rules.default_v4),
            only_rule_v6: only_rule(rules.default_v6),
            limits: rules.limits,
            more_rules: slots.need_more().into(),
            has_budgets: config.budgets.into(),
            src_mask_v4: u32::from_ne_bytes(SrcMaskV4::new(prefixes.ipv4).0),
            src_mask_v6: SrcMaskV6::new(prefixes.ipv6).halves().map(u64::from_ne_bytes),
            creation_quota,
            creation_common,
            aggregate_seed,
            fine_clock: [creation_quota, creation_common]
                .iter()
                .any(GcraParams::needs_fine_clock)
                .max(rules.need_fine_clock)
                .into(),
            clock_offset: tuning.clock_offset_ns,
            swap_attempts: tuning.swap_attempts,
            has_events: tuning.events.is_some().into(),
            sampled_below: tuning.events.map_or(0, |_| event::sampled_below(tuning.sample_one_in)),
            sample_one_in: tuning.sample_one_in,
            event_quota: (tuning.events.map(|events| events.params()).transpose())
                .map_err(|source| DataplaneError::Quota { rule: "for events".to_owned(), source })?
                .unwrap_or_default(),
            log_level: config.diagnosis.level(),
        })
    }

    pub(super) fn apply<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        let [[allow_v4, allow_v6], [deny_v4, deny_v6]] = &self.filters;
        loader
            .override_global("ALLOW_FILTER_V4", allow_v4, true)
            .override_global("ALLOW_FILTER_V6", allow_v6, true)
            .override_global("DENY_FILTER_V4", deny_v4, true)
            .override_global("DENY_FILTER_V6", deny_v6, true)
            .override_global("DROP_MALFORMED", &self.drop_malformed, true)
            .override_global("PROTECT_ALL", &self.protect_all, true)
            .override_global("PROTECT_PORTS", &self.protect_ports, true)
            .override_global("HAS_FEW_PORTS", &self.has_few_ports, true)
            .override_global("FEW_PORTS", &self.few_ports, true)
            .override_global("ALLOW_FAMILIES", &self.allow_families, true)
            .override_global("DENY_FAMILIES", &self.deny_families, true)
            .override_global("RULE_FAMILIES", &self.rule_families, true)
            .override_global("DEFAULT_RULE_V4", &self.default_rule_v4, true)
            .override_global("DEFAULT_RULE_V6", &self.default_rule_v6, true)
            .override_global("ONLY_RULE_V4", &self.only_rule_v4, true)
            .override_global("ONLY_RULE_V6", &self.only_rule_v6, true)
            .override_global("LIMITS", &self.limits, true)
            .override_global("MORE_RULES", &self.more_rules, true)
            .override_global("HAS_BUDGETS", &self.has_budgets, true)
            .override_global("SRC_MASK_V4", &self.src_mask_v4, true)
            .override_global("SRC_MASK_V6", &self.src_mask_v6, true)
            .override_global("CREATION_QUOTA", &self.creation_quota, true)
            .override_global("CREATION_COMMON", &self.creation_common, true)
            .override_global("AGGREGATE_SEED", &self.aggregate_seed, true)
            .override_global("FINE_CLOCK", &self.fine_clock, true)
            .override_global("CLOCK_OFFSET", &self.clock_offset, true)
            .override_global("SWAP_ATTEMPTS", &self.swap_attempts, true)
            .override_global("HAS_EVENTS", &self.has_events, true)
            .override_global("SAMPLED_BELOW", &self.sampled_below, true)
            .override_global("SAMPLE_ONE_IN", &self.sample_one_in, true)
            .override_global("EVENT_QUOTA", &self.event_quota, true)
            .override_global(diagnosis::LEVEL, &self.log_level, true);
    }
}

/// A hundredth of the buckets a second, and a tenth at once: a flood of new sources needs 90 seconds and more to push
/// out a bucket that is not in use.
fn default_creation(max_sources: u32) -> Quota {
    const SECOND_NS: u64 = 1_000_000_000;
    let max_sources = u64::from(max_sources);
    let rate = Rate { count: (max_sources / 100).max(1), per_ns: SECOND_NS };
    Quota { rate, burst: (max_sources / 10).max(100) }
}

/// A quarter of the burst is kept for neighbourhoods that have made no bucket lately.
fn without_reserve(quota: Quota) -> Quota {
    Quota { burst: quota.burst - quota.burst / 4, ..quota }
}

/// Two a number, if no more are protected than the program has room for beside the map.
fn few_ports(protect: &Protect) -> Option<[u64; FEW_PORTS]> {
    let Protect::Ports(ports) = protect else { return None };
    let bits: BTreeSet<u32> = ports.iter().map(port_bit).collect();
    let mut bits = bits.into_iter();
    let mut next = || u64::from(bits.next().unwrap_or(u32::MAX));
    let few = std::array::from_fn(|_| next() | next() << 32);
    bits.next().is_none().then_some(few)
}

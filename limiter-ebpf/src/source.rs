//! Sources of either family: what they are called in which map.

use aya_ebpf::Global;
use limiter_common::{
    acl::AclEntry,
    addr::{AddressV4, AddressV6, SrcKeyV4, SrcKeyV6, SrcMaskV4, SrcMaskV6},
    aggregate::{self, ROWS},
    prefix_filter::PrefixFilter,
    rule::PacketRule,
};

use crate::{
    globals,
    maps::{self, BucketState, BudgetState},
};

/// A source address, whole.
pub(crate) trait Family: Copy {
    type Key;
    /// Its bit in the globals that name families.
    const BIT: u8;
    const ALLOW_FILTER: &'static Global<PrefixFilter>;
    const DENY_FILTER: &'static Global<PrefixFilter>;

    /// The first 64 bits as a number.
    fn leading(self) -> u64;
    fn key(self) -> Self::Key;
    /// The longest allow prefix.
    fn allow<'a>(self) -> Option<&'a AclEntry>;
    fn deny<'a>(self) -> Option<&'a AclEntry>;
    fn rule<'a>(self) -> Option<&'a PacketRule>;
    fn budget(key: &Self::Key) -> Option<BudgetState>;
    fn bucket(key: &Self::Key) -> Option<BucketState>;
    /// Puts a full bucket there unless there is one.
    fn create_bucket(key: &Self::Key, now_ticks: u64);
    /// Where the buckets are that new sources of its neighbourhood share under the rule of this slot.
    fn aggregates(self, slot: u32) -> [u32; ROWS];
}

impl Family for AddressV4 {
    type Key = SrcKeyV4;
    const BIT: u8 = 1;
    const ALLOW_FILTER: &'static Global<PrefixFilter> = &globals::ALLOW_FILTER_V4;
    const DENY_FILTER: &'static Global<PrefixFilter> = &globals::DENY_FILTER_V4;

    #[inline(always)]
    fn leading(self) -> u64 {
        AddressV4::leading(self)
    }

    #[inline(always)]
    fn key(self) -> SrcKeyV4 {
        SrcKeyV4::of(self, SrcMaskV4(globals::SRC_MASK_V4.load().to_ne_bytes()))
    }

    #[inline(always)]
    fn allow<'a>(self) -> Option<&'a AclEntry> {
        maps::allow_v4(self)
    }

    #[inline(always)]
    fn deny<'a>(self) -> Option<&'a AclEntry> {
        maps::deny_v4(self)
    }

    #[inline(always)]
    fn rule<'a>(self) -> Option<&'a PacketRule> {
        if globals::RULE_FAMILIES.load() & Self::BIT == 0 {
            return Some(maps::global_rule(&globals::ONLY_RULE_V4));
        }
        maps::rule(maps::rule_index_v4(self).unwrap_or_else(|| globals::DEFAULT_RULE_V4.load()))
    }

    #[inline(always)]
    fn budget(key: &SrcKeyV4) -> Option<BudgetState> {
        maps::budget_v4(key)
    }

    #[inline(always)]
    fn bucket(key: &SrcKeyV4) -> Option<BucketState> {
        maps::bucket_v4(key)
    }

    #[inline(always)]
    fn create_bucket(key: &SrcKeyV4, now_ticks: u64) {
        maps::create_bucket_v4(key, now_ticks);
    }

    #[inline(always)]
    fn aggregates(self, slot: u32) -> [u32; ROWS] {
        aggregate::index::v4(self.octets(), slot, globals::AGGREGATE_SEED.load())
    }
}

impl Family for AddressV6 {
    type Key = SrcKeyV6;
    const BIT: u8 = 2;
    const ALLOW_FILTER: &'static Global<PrefixFilter> = &globals::ALLOW_FILTER_V6;
    const DENY_FILTER: &'static Global<PrefixFilter> = &globals::DENY_FILTER_V6;

    #[inline(always)]
    fn leading(self) -> u64 {
        AddressV6::leading(self)
    }

    #[inline(always)]
    fn key(self) -> SrcKeyV6 {
        let [high, low] = globals::SRC_MASK_V6.load();
        SrcKeyV6::of(self, SrcMaskV6::from_halves(high.to_ne_bytes(), low.to_ne_bytes()).of(self))
    }

    #[inline(always)]
    fn allow<'a>(self) -> Option<&'a AclEntry> {
        maps::allow_v6(self)
    }

    #[inline(always)]
    fn deny<'a>(self) -> Option<&'a AclEntry> {
        maps::deny_v6(self)
    }

    #[inline(always)]
    fn rule<'a>(self) -> Option<&'a PacketRule> {
        if globals::RULE_FAMILIES.load() & Self::BIT == 0 {
            return Some(maps::global_rule(&globals::ONLY_RULE_V6));
        }
        maps::rule(maps::rule_index_v6(self).unwrap_or_else(|| globals::DEFAULT_RULE_V6.load()))
    }

    #[inline(always)]
    fn budget(key: &SrcKeyV6) -> Option<BudgetState> {
        maps::budget_v6(key)
    }

    #[inline(always)]
    fn bucket(key: &SrcKeyV6) -> Option<BucketState> {
        maps::bucket_v6(key)
    }

    #[inline(always)]
    fn create_bucket(key: &SrcKeyV6, now_ticks: u64) {
        maps::create_bucket_v6(key, now_ticks);
    }

    #[inline(always)]
    fn aggregates(self, slot: u32) -> [u32; ROWS] {
        aggregate::index::v6(self.octets(), slot, globals::AGGREGATE_SEED.load())
    }
}

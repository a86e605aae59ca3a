//! The maps that the XDP program and the agent share, as one table. `cargo xtask schema --check` holds it against
//! `tests/golden/map_schema.txt`; the loader holds pinned maps against it.

use crate::{
    acl::AclEntry,
    addr::{SrcKeyV4, SrcKeyV6},
    aggregate::Aggregate,
    budget::BudgetEntry,
    budget_filter,
    event::{EventClass, EventMeter},
    rule::{Bucket, PacketRule},
    stats::{Counters, PER_CPU_SLOTS, RULE_SLOTS, RuleName},
};

/// Version of everything below. Pins live in `<pin_dir>/v<SCHEMA_VERSION>`.
pub const SCHEMA_VERSION: u32 = 4;

/// Most allow prefixes, and most deny prefixes, of one family.
pub const MAX_ACL_PREFIXES: u32 = 131_072;
/// Most prefixes of packet rules of one family.
pub const MAX_RULE_PREFIXES: u32 = 16_384;
/// Most pushed budgets of one family at one time: 7 MB.
pub const MAX_BUDGETS: u32 = 65_536;
/// Default of `xdp.max_sources`: buckets of each family, about 140 MB when both are in use.
pub const DEFAULT_MAX_SOURCES: u32 = 524_288;
/// Places in a row of the buckets that new sources share when too many are new.
pub const AGGREGATE_ROW: u32 = 131_072;
/// All rows: fixed, 10 MB.
pub const AGGREGATES: u32 = 2 * AGGREGATE_ROW;
/// Bytes of the ring of events: some 18,000 of them.
pub const EVENT_RING_BYTES: u32 = 1 << 20;
/// Words of the protected-port bitmap: 65,536 bits for TCP, then as many for UDP.
pub const PORT_WORDS: u32 = 2 * 65_536 / 64;

/// Bit of `PORTS` that protects this TCP port.
#[inline(always)]
pub const fn tcp_port_bit(port: u16) -> u32 {
    port as u32
}

/// Bit of `PORTS` that protects this UDP port.
#[inline(always)]
pub const fn udp_port_bit(port: u16) -> u32 {
    (1 << 16) + port as u32
}

/// Slots of the `CREATION` map.
pub mod creation {
    /// State of the budget for new buckets, see [`crate::gcra`].
    pub const TAT: u32 = 0;
    /// Seed of [`crate::aggregate::index`], kept so that the aggregates of one source stay the same across
    /// reloads. 0: not chosen yet.
    pub const SEED: u32 = 1;
    /// Buckets ever made. None is removed but by the map itself when it is full, so this tells how many there are.
    pub const CREATED_V4: u32 = 2;
    pub const CREATED_V6: u32 = 3;
    /// Until when it is known that too many sources are new, see [`crate::event::mark`].
    pub const NEW_SOURCES_OVER: u32 = 4;
    /// Until when it is known that inserts fail.
    pub const INSERT_FAILED: u32 = 5;
    pub const SLOTS: u32 = 6;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapKind {
    Array,
    Hash,
    LpmTrie,
    LruHash,
    PerCpuArray,
    RingBuf,
}

impl MapKind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Array => "array",
            Self::Hash => "hash",
            Self::LpmTrie => "lpm_trie",
            Self::LruHash => "lru_hash",
            Self::PerCpuArray => "percpu_array",
            Self::RingBuf => "ring_buf",
        }
    }
}

/// How long a map lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// State: pinned, taken over by every later program.
    Shared,
    /// State of what not every policy uses: as [`Self::Shared`] once one does. Until then each program has a stand-in
    /// of one entry, which is not pinned.
    WhenUsed,
    /// Made and filled anew for each policy.
    Policy,
}

#[derive(Clone, Copy, Debug)]
pub struct MapSpec {
    pub name: &'static str,
    pub kind: MapKind,
    pub key_size: u32,
    pub value_size: u32,
    pub capacity: u32,
    pub lifetime: Lifetime,
}

#[expect(clippy::cast_possible_truncation, reason = "keys and values are small")]
const fn spec<K, V>(name: &'static str, kind: MapKind, capacity: u32, lifetime: Lifetime) -> MapSpec {
    MapSpec { name, kind, key_size: size_of::<K>() as u32, value_size: size_of::<V>() as u32, capacity, lifetime }
}

/// Key of an LPM trie: the prefix length, then the address.
#[repr(C)]
struct Lpm<A>(u32, A);

pub const MAPS: &[MapSpec] = &[
    spec::<Lpm<[u8; 4]>, AclEntry>("ALLOW_V4", MapKind::LpmTrie, MAX_ACL_PREFIXES, Lifetime::Policy),
    spec::<Lpm<[u8; 16]>, AclEntry>("ALLOW_V6", MapKind::LpmTrie, MAX_ACL_PREFIXES, Lifetime::Policy),
    spec::<Lpm<[u8; 4]>, AclEntry>("DENY_V4", MapKind::LpmTrie, MAX_ACL_PREFIXES, Lifetime::Policy),
    spec::<Lpm<[u8; 16]>, AclEntry>("DENY_V6", MapKind::LpmTrie, MAX_ACL_PREFIXES, Lifetime::Policy),
    spec::<Lpm<[u8; 4]>, u32>("RULES_V4", MapKind::LpmTrie, MAX_RULE_PREFIXES, Lifetime::Policy),
    spec::<Lpm<[u8; 16]>, u32>("RULES_V6", MapKind::LpmTrie, MAX_RULE_PREFIXES, Lifetime::Policy),
    spec::<u32, PacketRule>("RULES", MapKind::Array, RULE_SLOTS, Lifetime::Policy),
    spec::<u32, u64>("PORTS", MapKind::Array, PORT_WORDS, Lifetime::Policy),
    spec::<u32, u64>("BUDGET_FILTER", MapKind::Array, budget_filter::WORDS, Lifetime::Policy),
    spec::<SrcKeyV4, BudgetEntry>("BUDGETS_V4", MapKind::Hash, MAX_BUDGETS, Lifetime::Shared),
    spec::<SrcKeyV6, BudgetEntry>("BUDGETS_V6", MapKind::Hash, MAX_BUDGETS, Lifetime::Shared),
    spec::<SrcKeyV4, Bucket>("BUCKETS_V4", MapKind::LruHash, DEFAULT_MAX_SOURCES, Lifetime::Shared),
    spec::<SrcKeyV6, Bucket>("BUCKETS_V6", MapKind::LruHash, DEFAULT_MAX_SOURCES, Lifetime::Shared),
    spec::<u32, Aggregate>("AGGREGATES", MapKind::Array, AGGREGATES, Lifetime::Shared),
    spec::<u32, u64>("CREATION", MapKind::Array, creation::SLOTS, Lifetime::Shared),
    spec::<u32, Counters>("STATS", MapKind::PerCpuArray, PER_CPU_SLOTS, Lifetime::Shared),
    spec::<u32, Counters>("MORE_STATS", MapKind::Array, RULE_SLOTS - PER_CPU_SLOTS, Lifetime::WhenUsed),
    spec::<(), ()>("EVENTS", MapKind::RingBuf, EVENT_RING_BYTES, Lifetime::Shared),
    spec::<u32, EventMeter>("EVENT_METERS", MapKind::PerCpuArray, EventClass::COUNT, Lifetime::Shared),
    spec::<u32, RuleName>("RULE_NAMES", MapKind::Array, RULE_SLOTS, Lifetime::Shared),
];

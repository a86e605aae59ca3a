//! Read-only settings. The loader overrides them before load, so the verifier knows their values and removes the code
//! of every feature that the policy does not use: the hot path pays only for what is switched on.
//!
//! The loader finds them by name, and refuses an object in which one is missing or has another size.

use aya_ebpf::Global;
use limiter_common::{
    gcra::GcraParams,
    prefix_filter::PrefixFilter,
    rule::{EnforcementMode, PacketRule},
};

/// 0: truncated and contradictory packets are counted as a shadow drop and passed.
#[unsafe(no_mangle)]
pub(crate) static DROP_MALFORMED: Global<u8> = Global::new(1);

/// 1: every IP packet is for a protected port.
#[unsafe(no_mangle)]
pub(crate) static PROTECT_ALL: Global<u8> = Global::new(0);

/// 1: at least one bit of `PORTS` is set.
#[unsafe(no_mangle)]
pub(crate) static PROTECT_PORTS: Global<u8> = Global::new(1);

/// 1: all protected ports are among `FEW_PORTS`, and no map is asked.
#[unsafe(no_mangle)]
pub(crate) static HAS_FEW_PORTS: Global<u8> = Global::new(0);

/// Bits of `PORTS`, two a number; all ones where there is none.
#[unsafe(no_mangle)]
pub(crate) static FEW_PORTS: [Global<u64>; 2] = [Global::new(u64::MAX), Global::new(u64::MAX)];

/// Families (bits of `source::Family::BIT`) that have allow prefixes.
#[unsafe(no_mangle)]
pub(crate) static ALLOW_FAMILIES: Global<u8> = Global::new(3);

/// Families that have deny prefixes.
#[unsafe(no_mangle)]
pub(crate) static DENY_FAMILIES: Global<u8> = Global::new(3);

/// Which addresses the lists may contain; asked before the lists.
#[unsafe(no_mangle)]
pub(crate) static ALLOW_FILTER_V4: Global<PrefixFilter> = Global::new(PrefixFilter::ALL);
#[unsafe(no_mangle)]
pub(crate) static ALLOW_FILTER_V6: Global<PrefixFilter> = Global::new(PrefixFilter::ALL);
#[unsafe(no_mangle)]
pub(crate) static DENY_FILTER_V4: Global<PrefixFilter> = Global::new(PrefixFilter::ALL);
#[unsafe(no_mangle)]
pub(crate) static DENY_FILTER_V6: Global<PrefixFilter> = Global::new(PrefixFilter::ALL);

/// Families that have packet rules for less than all addresses.
#[unsafe(no_mangle)]
pub(crate) static RULE_FAMILIES: Global<u8> = Global::new(3);

/// Index in `RULES` of the packet rule for 0.0.0.0/0; beyond the end of the map when there is none. A /0 is kept out
/// of the prefix map, so that a policy of one default rule needs no prefix lookup.
#[unsafe(no_mangle)]
pub(crate) static DEFAULT_RULE_V4: Global<u32> = Global::new(u32::MAX);

/// As above, for ::/0.
#[unsafe(no_mangle)]
pub(crate) static DEFAULT_RULE_V6: Global<u32> = Global::new(u32::MAX);

/// The rule itself, for a policy without prefixes: the verifier knows it, and no map is asked.
#[unsafe(no_mangle)]
pub(crate) static ONLY_RULE_V4: Global<PacketRule> = Global::new(PacketRule::new(EnforcementMode::Off, 0));

#[unsafe(no_mangle)]
pub(crate) static ONLY_RULE_V6: Global<PacketRule> = Global::new(PacketRule::new(EnforcementMode::Off, 0));

/// Dimensions (bits of `Dimension::bit`) that any rule limits.
#[unsafe(no_mangle)]
pub(crate) static LIMITS: Global<u32> = Global::new(7);

/// 1: there are more rules than `STATS` has counters for.
#[unsafe(no_mangle)]
pub(crate) static MORE_RULES: Global<u8> = Global::new(1);

/// 1: the agent may push budgets.
#[unsafe(no_mangle)]
pub(crate) static HAS_BUDGETS: Global<u8> = Global::new(1);

/// Bits of an address that make its source key, in network order.
#[unsafe(no_mangle)]
pub(crate) static SRC_MASK_V4: Global<u32> = Global::new(u32::MAX);

#[unsafe(no_mangle)]
pub(crate) static SRC_MASK_V6: Global<[u64; 2]> = Global::new([u64::MAX, 0]);

/// How many new sources get a bucket of their own.
#[unsafe(no_mangle)]
pub(crate) static CREATION_QUOTA: Global<GcraParams> = Global::new(match GcraParams::from_interval(1, 1) {
    Some(params) => params,
    None => unreachable!(),
});

/// The part of it that is for everybody. The rest is a reserve for neighbourhoods that have made no bucket lately.
#[unsafe(no_mangle)]
pub(crate) static CREATION_COMMON: Global<GcraParams> = Global::new(match GcraParams::from_interval(1, 1) {
    Some(params) => params,
    None => unreachable!(),
});

/// Secret of the hash that spreads new sources over the aggregate buckets.
#[unsafe(no_mangle)]
pub(crate) static AGGREGATE_SEED: Global<u64> = Global::new(0);

/// 1: some bucket needs a clock that is finer than a tick, see `GcraParams::needs_fine_clock`.
#[unsafe(no_mangle)]
pub(crate) static FINE_CLOCK: Global<u8> = Global::new(0);

/// How much later it is than the kernel's clock says: 0, but for tests of times that no host has reached.
#[unsafe(no_mangle)]
pub(crate) static CLOCK_OFFSET: Global<u64> = Global::new(0);

/// How often an update of a bucket is tried while other CPUs change it. 0 is for the test of that outcome.
#[unsafe(no_mangle)]
pub(crate) static SWAP_ATTEMPTS: Global<u32> = Global::new(MAX_SWAP_ATTEMPTS);

/// 1: the agent is told of what is new, and of samples.
#[unsafe(no_mangle)]
pub(crate) static HAS_EVENTS: Global<u8> = Global::new(1);

/// Threshold of `event::is_sampled`; 0: no packet is a sample.
#[unsafe(no_mangle)]
pub(crate) static SAMPLED_BELOW: Global<u64> = Global::new(0);

/// How many packets a sample stands for.
#[unsafe(no_mangle)]
pub(crate) static SAMPLE_ONE_IN: Global<u32> = Global::new(0);

/// How many events of a class one CPU may send.
#[unsafe(no_mangle)]
pub(crate) static EVENT_QUOTA: Global<GcraParams> = Global::new(match GcraParams::from_interval(1, 1) {
    Some(params) => params,
    None => unreachable!(),
});

/// What the verifier can follow with ease. Each failed attempt means that another CPU has succeeded.
pub(crate) const MAX_SWAP_ATTEMPTS: u32 = 8;

#[inline(always)]
pub(crate) fn is_on(global: &Global<u8>) -> bool {
    global.load() != 0
}

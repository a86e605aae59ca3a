//! Every map: what it holds, who writes it, what it costs. Sizes are those of `limiter_common::schema`, where the
//! agent finds them too. Outside this file a map value is a shared reference or a [`Tat`].

use aya_ebpf::{
    bindings::BPF_NOEXIST,
    macros::map,
    maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, lpm_trie::Key},
};
use limiter_common::{
    acl::AclEntry,
    addr::{SrcKeyV4, SrcKeyV6},
    aggregate::Aggregate,
    budget::Budget,
    rule::{Bucket, PacketRule},
    schema,
    stats::{Counter, Counters, PER_CPU_SLOTS, RULE_SLOTS, RuleName},
    verdict::Verdict,
};

use crate::globals;

/// Allow prefixes. The agent writes; at most 131,072 of a family, about 15 MB when full, nothing when empty.
#[map]
static ALLOW_V4: LpmTrie<[u8; 4], AclEntry> = LpmTrie::with_max_entries(schema::MAX_ACL_PREFIXES, 0);
#[map]
static ALLOW_V6: LpmTrie<[u8; 16], AclEntry> = LpmTrie::with_max_entries(schema::MAX_ACL_PREFIXES, 0);

/// Deny prefixes. As the allow prefixes.
#[map]
static DENY_V4: LpmTrie<[u8; 4], AclEntry> = LpmTrie::with_max_entries(schema::MAX_ACL_PREFIXES, 0);
#[map]
static DENY_V6: LpmTrie<[u8; 16], AclEntry> = LpmTrie::with_max_entries(schema::MAX_ACL_PREFIXES, 0);

/// Prefix to index in `RULES`. The agent writes, before the program is attached; at most 16,384 of a family.
#[map]
static RULES_V4: LpmTrie<[u8; 4], u32> = LpmTrie::with_max_entries(schema::MAX_RULE_PREFIXES, 0);
#[map]
static RULES_V6: LpmTrie<[u8; 16], u32> = LpmTrie::with_max_entries(schema::MAX_RULE_PREFIXES, 0);

/// Packet rules. The agent writes, before the program is attached, and makes the map as large as the policy is;
/// 112 bytes a rule.
#[map]
static RULES: Array<PacketRule> = Array::with_max_entries(RULE_SLOTS, 0);

/// Bitmap of protected ports. The agent writes, before the program is attached; 16 KB.
#[map]
static PORTS: Array<u64> = Array::with_max_entries(schema::PORT_WORDS, 0);

/// Pushed budgets. The agent writes; 7 MB a family.
#[map]
static BUDGETS_V4: HashMap<SrcKeyV4, Budget> = HashMap::with_max_entries(schema::MAX_BUDGETS, 0);
#[map]
static BUDGETS_V6: HashMap<SrcKeyV6, Budget> = HashMap::with_max_entries(schema::MAX_BUDGETS, 0);

/// Buckets of sources. Only the program writes; the agent sets the size, about 130 bytes a source.
#[map]
static BUCKETS_V4: LruHashMap<SrcKeyV4, Bucket> = LruHashMap::with_max_entries(schema::DEFAULT_MAX_SOURCES, 0);
#[map]
static BUCKETS_V6: LruHashMap<SrcKeyV6, Bucket> = LruHashMap::with_max_entries(schema::DEFAULT_MAX_SOURCES, 0);

/// Buckets that new sources share while too many are new. Only the program writes; 8 MB.
#[map]
static AGGREGATES: Array<Aggregate> = Array::with_max_entries(schema::AGGREGATES, 0);

/// State of the creation of buckets, see `schema::creation`. The program writes, but for the seed.
#[map]
static CREATION: Array<u64> = Array::with_max_entries(schema::creation::SLOTS, 0);

/// Counters of the first slots. The program writes, each CPU its own, so no atomics are needed; 0.5 MB a CPU.
#[map]
static STATS: PerCpuArray<Counters> = PerCpuArray::with_max_entries(PER_CPU_SLOTS, 0);

/// Counters of the other slots, which all CPUs add to. The agent makes it as small as can be for policies whose rules
/// fit in the first slots; otherwise 16 MB.
#[map]
static MORE_STATS: Array<Counters> = Array::with_max_entries(RULE_SLOTS - PER_CPU_SLOTS, 0);

/// Which rule a slot of the counters belongs to. Only the agent writes and reads; 2 MB.
#[map]
static RULE_NAMES: Array<RuleName> = Array::with_max_entries(RULE_SLOTS, 0);

/// One number in a map, which other CPUs change at the same time.
#[derive(Clone, Copy)]
pub(crate) struct Tat {
    cell: *mut u64,
}

impl Tat {
    #[inline(always)]
    pub(crate) fn load(self) -> u64 {
        // JUSTIFICATION: an atomic load does not select on this target; an aligned 64-bit load cannot tear.
        // SAFETY: `cell` points into a map value, which stays readable while the program runs.
        unsafe { core::ptr::read_volatile(self.cell) }
    }

    /// Stores `new` if the number is still `old`; otherwise the error is what it is.
    #[inline(always)]
    pub(crate) fn swap(self, old: u64, new: u64) -> Result<(), u64> {
        // SAFETY: as above, and every writer of these numbers is atomic.
        let found = unsafe { compare_exchange(self.cell, old, new) };
        if found == old { Ok(()) } else { Err(found) }
    }

    #[inline(always)]
    pub(crate) fn subtract(self, amount: u64) {
        self.add(amount.wrapping_neg());
    }

    #[inline(always)]
    fn add(self, amount: u64) {
        // SAFETY: as above.
        unsafe { fetch_add(self.cell, amount) };
    }
}

#[cfg(target_arch = "bpf")]
#[inline(always)]
unsafe fn compare_exchange(cell: *mut u64, old: u64, new: u64) -> u64 {
    use core::intrinsics::{AtomicOrdering::SeqCst, atomic_cxchg};
    // SAFETY: the caller's.
    unsafe { atomic_cxchg::<u64, { SeqCst }, { SeqCst }>(cell, old, new) }.0
}

#[cfg(target_arch = "bpf")]
#[inline(always)]
unsafe fn fetch_add(cell: *mut u64, amount: u64) {
    use core::intrinsics::{AtomicOrdering::Relaxed, atomic_xadd};
    // SAFETY: the caller's.
    unsafe { atomic_xadd::<u64, u64, { Relaxed }>(cell, amount) };
}

#[cfg(not(target_arch = "bpf"))]
unsafe fn compare_exchange(cell: *mut u64, old: u64, new: u64) -> u64 {
    use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
    // SAFETY: the caller's.
    let cell = unsafe { AtomicU64::from_ptr(cell) };
    cell.compare_exchange(old, new, SeqCst, SeqCst).unwrap_or_else(|found| found)
}

#[cfg(not(target_arch = "bpf"))]
unsafe fn fetch_add(cell: *mut u64, amount: u64) {
    use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
    // SAFETY: the caller's.
    unsafe { AtomicU64::from_ptr(cell) }.fetch_add(amount, Relaxed);
}

/// A bucket in a map.
#[derive(Clone, Copy)]
pub(crate) struct BucketState {
    pub(crate) packets: Tat,
    pub(crate) bytes: Tat,
    pub(crate) connections: Tat,
}

impl BucketState {
    #[inline(always)]
    fn new(bucket: *mut Bucket) -> Self {
        // SAFETY: `bucket` is the address of a whole map value, so its fields are in bounds.
        let packets = unsafe { &raw mut (*bucket).packets_tat };
        // SAFETY: as above.
        let bytes = unsafe { &raw mut (*bucket).bytes_tat };
        // SAFETY: as above.
        let connections = unsafe { &raw mut (*bucket).connections_tat };
        Self { packets: Tat { cell: packets }, bytes: Tat { cell: bytes }, connections: Tat { cell: connections } }
    }
}

/// An aggregate bucket in its map.
#[derive(Clone, Copy)]
pub(crate) struct AggregateState {
    pub(crate) bucket: BucketState,
    pub(crate) creation: Tat,
}

impl AggregateState {
    #[inline(always)]
    fn new(aggregate: *mut Aggregate) -> Self {
        // SAFETY: `aggregate` is the address of a whole map value, so its fields are in bounds.
        let bucket = unsafe { &raw mut (*aggregate).bucket };
        // SAFETY: as above.
        let creation = unsafe { &raw mut (*aggregate).creation_tat };
        Self { bucket: BucketState::new(bucket), creation: Tat { cell: creation } }
    }
}

#[inline(always)]
pub(crate) fn allow_v4<'a>(address: [u8; 4], prefix_len: u32) -> Option<&'a AclEntry> {
    ALLOW_V4.get(Key::new(prefix_len, address))
}

#[inline(always)]
pub(crate) fn allow_v6<'a>(address: [u8; 16], prefix_len: u32) -> Option<&'a AclEntry> {
    ALLOW_V6.get(Key::new(prefix_len, address))
}

#[inline(always)]
pub(crate) fn deny_v4<'a>(address: [u8; 4], prefix_len: u32) -> Option<&'a AclEntry> {
    DENY_V4.get(Key::new(prefix_len, address))
}

#[inline(always)]
pub(crate) fn deny_v6<'a>(address: [u8; 16], prefix_len: u32) -> Option<&'a AclEntry> {
    DENY_V6.get(Key::new(prefix_len, address))
}

#[inline(always)]
pub(crate) fn rule_index_v4(address: [u8; 4]) -> Option<u32> {
    RULES_V4.get(Key::new(32, address)).copied()
}

#[inline(always)]
pub(crate) fn rule_index_v6(address: [u8; 16]) -> Option<u32> {
    RULES_V6.get(Key::new(128, address)).copied()
}

#[inline(always)]
pub(crate) fn rule<'a>(index: u32) -> Option<&'a PacketRule> {
    RULES.get(index)
}

#[inline(always)]
pub(crate) fn port_word(index: u32) -> u64 {
    PORTS.get(index).copied().unwrap_or(0)
}

#[inline(always)]
pub(crate) fn budget_v4<'a>(key: &SrcKeyV4) -> Option<&'a Budget> {
    // SAFETY: the value is only read. While the agent removes an expired budget, its place may be given to another
    // source, whose deadline and quota would then apply to the packet at hand, and to no other.
    unsafe { BUDGETS_V4.get(key) }
}

#[inline(always)]
pub(crate) fn budget_v6<'a>(key: &SrcKeyV6) -> Option<&'a Budget> {
    // SAFETY: as for IPv4.
    unsafe { BUDGETS_V6.get(key) }
}

#[inline(always)]
pub(crate) fn bucket_v4(key: &SrcKeyV4) -> Option<BucketState> {
    BUCKETS_V4.get_ptr_mut(key).map(BucketState::new)
}

#[inline(always)]
pub(crate) fn bucket_v6(key: &SrcKeyV6) -> Option<BucketState> {
    BUCKETS_V6.get_ptr_mut(key).map(BucketState::new)
}

#[inline(always)]
pub(crate) fn create_bucket_v4(key: &SrcKeyV4, now_ticks: u64) {
    // BPF_NOEXIST: the insert of another CPU that was quicker must not be refilled. Whoever looks next finds its bucket.
    if BUCKETS_V4.insert(key, Bucket::full(now_ticks), u64::from(BPF_NOEXIST)).is_ok() {
        count_creation(schema::creation::CREATED_V4);
    }
}

#[inline(always)]
pub(crate) fn create_bucket_v6(key: &SrcKeyV6, now_ticks: u64) {
    // As for IPv4.
    if BUCKETS_V6.insert(key, Bucket::full(now_ticks), u64::from(BPF_NOEXIST)).is_ok() {
        count_creation(schema::creation::CREATED_V6);
    }
}

#[inline(always)]
pub(crate) fn aggregate(index: u32) -> Option<AggregateState> {
    AGGREGATES.get_ptr_mut(index).map(AggregateState::new)
}

#[inline(always)]
pub(crate) fn creation_tat() -> Option<Tat> {
    CREATION.get_ptr_mut(schema::creation::TAT).map(|cell| Tat { cell })
}

#[inline(always)]
fn count_creation(slot: u32) {
    if let Some(cell) = CREATION.get_ptr_mut(slot) {
        Tat { cell }.add(1);
    }
}

#[inline(always)]
pub(crate) fn count(slot: u32, verdict: Verdict, bytes: u64) {
    if let Some(counters) = STATS.get_ptr_mut(slot) {
        // SAFETY: each CPU has its own copy, and the program is not interrupted by itself on one CPU.
        let counter = unsafe { &mut *counter_of(counters, verdict) };
        *counter = counter.plus(Counter { packets: 1, bytes });
    } else if globals::is_on(&globals::MORE_RULES)
        && let Some(counters) = MORE_STATS.get_ptr_mut(slot.wrapping_sub(PER_CPU_SLOTS))
    {
        let counter = counter_of(counters, verdict);
        // SAFETY: `counter` is the address of a whole counter in a map value, so its fields are in bounds.
        Tat { cell: unsafe { &raw mut (*counter).packets } }.add(1);
        // SAFETY: as above.
        Tat { cell: unsafe { &raw mut (*counter).bytes } }.add(bytes);
    }
}

#[inline(always)]
fn counter_of(counters: *mut Counters, verdict: Verdict) -> *mut Counter {
    // SAFETY: the index is that of a counter in the value, which holds nothing else.
    unsafe { counters.cast::<Counter>().add(Counters::index(verdict)) }
}

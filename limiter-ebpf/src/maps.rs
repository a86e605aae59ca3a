//! Every map: what it holds, who writes it, what it costs. Sizes are those of `limiter_common::schema`, where the
//! agent finds them too. Outside this file a map value is a shared reference or a [`Tat`].

use core::ops::Deref;

use aya_ebpf::{
    Global,
    bindings::{BPF_NOEXIST, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP},
    macros::map,
    maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf, lpm_trie::Key},
};
use limiter_common::{
    acl::AclEntry,
    addr::{AddressV4, AddressV6, SrcKeyV4, SrcKeyV6},
    aggregate::Aggregate,
    budget::{Budget, BudgetEntry},
    budget_filter::{self, Place},
    event::{Event, EventClass, EventKind, EventMeter},
    gcra,
    rule::{Bucket, PacketRule},
    schema,
    stats::{Counter, Counters, PER_CPU_SLOTS, RULE_SLOTS, RuleName},
    time::KtimeNs,
    verdict::Verdict,
};

use crate::globals;

/// Allow prefixes. The agent writes; at most 131,072 of a family, about 16 MB when full, nothing when empty.
#[map]
static ALLOW_V4: LpmTrie<AddressV4, AclEntry> = LpmTrie::with_max_entries(schema::MAX_ACL_PREFIXES, 0);
#[map]
static ALLOW_V6: LpmTrie<AddressV6, AclEntry> = LpmTrie::with_max_entries(schema::MAX_ACL_PREFIXES, 0);

/// Deny prefixes. As the allow prefixes.
#[map]
static DENY_V4: LpmTrie<AddressV4, AclEntry> = LpmTrie::with_max_entries(schema::MAX_ACL_PREFIXES, 0);
#[map]
static DENY_V6: LpmTrie<AddressV6, AclEntry> = LpmTrie::with_max_entries(schema::MAX_ACL_PREFIXES, 0);

/// Prefix to index in `RULES`. The agent writes, before the program is attached; at most 16,384 of a family.
#[map]
static RULES_V4: LpmTrie<AddressV4, u32> = LpmTrie::with_max_entries(schema::MAX_RULE_PREFIXES, 0);
#[map]
static RULES_V6: LpmTrie<AddressV6, u32> = LpmTrie::with_max_entries(schema::MAX_RULE_PREFIXES, 0);

/// Packet rules. The agent writes, before the program is attached, and makes the map as large as the policy is;
/// 112 bytes a rule.
#[map]
static RULES: Array<PacketRule> = Array::with_max_entries(RULE_SLOTS, 0);

/// Bitmap of protected ports. The agent writes, before the program is attached; 16 KB.
#[map]
static PORTS: Array<u64> = Array::with_max_entries(schema::PORT_WORDS, 0);

/// Which sources may have a budget: bits, see `limiter_common::budget_filter`. The agent writes, and sets a bit before
/// the budget is there; 8 KB. Each program has its own, filled before it is attached.
#[map]
static BUDGET_FILTER: Array<u64> = Array::with_max_entries(budget_filter::WORDS, 0);

/// Pushed budgets. The agent writes, and the program its marks; 7 MB a family.
#[map]
static BUDGETS_V4: HashMap<SrcKeyV4, BudgetEntry> = HashMap::with_max_entries(schema::MAX_BUDGETS, 0);
#[map]
static BUDGETS_V6: HashMap<SrcKeyV6, BudgetEntry> = HashMap::with_max_entries(schema::MAX_BUDGETS, 0);

/// Buckets of sources. Only the program writes; the agent sets the size, about 140 bytes a source.
#[map]
static BUCKETS_V4: LruHashMap<SrcKeyV4, Bucket> = LruHashMap::with_max_entries(schema::DEFAULT_MAX_SOURCES, 0);
#[map]
static BUCKETS_V6: LruHashMap<SrcKeyV6, Bucket> = LruHashMap::with_max_entries(schema::DEFAULT_MAX_SOURCES, 0);

/// Buckets that new sources share while too many are new. Only the program writes; 10 MB.
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

/// Events for the agent. The program writes, if its meters allow; 1 MB.
#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(schema::EVENT_RING_BYTES, 0);

/// What each CPU has sent of which class of events. The program writes, each CPU its own, so no atomics are needed.
#[map]
static EVENT_METERS: PerCpuArray<EventMeter> = PerCpuArray::with_max_entries(EventClass::COUNT, 0);

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

    /// Stores `new` if the number is still `old`, and tells what it was.
    #[inline(always)]
    pub(crate) fn swap(self, old: u64, new: u64) -> u64 {
        // SAFETY: as above, and every writer of these numbers is atomic.
        unsafe { compare_exchange(self.cell, old, new) }
    }

    /// Gives a number that nobody has written yet its first value: the zero in its place is an instant like any other,
    /// and to a clock in the upper half of its range one to come.
    #[inline(always)]
    pub(crate) fn begin(self, first: u64) {
        if self.load() == 0 {
            // Where this fails, another CPU was quicker.
            let _begun = self.swap(0, first);
        }
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
    /// A mark, see `limiter_common::event::mark`.
    pub(crate) reported: Tat,
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
        // SAFETY: as above.
        let reported = unsafe { &raw mut (*bucket).reported };
        let [packets, bytes, connections, reported] = [packets, bytes, connections, reported].map(|cell| Tat { cell });
        Self { packets, bytes, connections, reported }
    }
}

/// A budget in a map.
#[derive(Clone, Copy)]
pub(crate) struct BudgetState {
    budget: &'static Budget,
    /// A mark, see `limiter_common::event::mark`.
    pub(crate) reported: Tat,
}

impl BudgetState {
    #[inline(always)]
    fn new(entry: *mut BudgetEntry) -> Self {
        // SAFETY: `entry` is the address of a whole map value. The budget in it is only read. While the agent removes an
        // expired budget, its place may be given to another source, whose deadline and quota would then apply to the
        // packet at hand, and to no other.
        let budget = unsafe { &(*entry).budget };
        // SAFETY: the mark is a field beside the budget, so no reference to it exists.
        let reported = unsafe { &raw mut (*entry).reported };
        Self { budget, reported: Tat { cell: reported } }
    }
}

impl Deref for BudgetState {
    type Target = Budget;

    #[inline(always)]
    fn deref(&self) -> &Budget {
        self.budget
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

    /// Makes one that nobody has used yet full. All that is used has been through this.
    #[inline(always)]
    pub(crate) fn begin(self, now_ticks: u64) {
        if self.creation.load() == 0 {
            let BucketState { packets, bytes, connections, reported: _ } = self.bucket;
            let full = gcra::full(now_ticks);
            packets.begin(full);
            bytes.begin(full);
            connections.begin(full);
            self.creation.begin(full);
        }
    }
}

/// An address to look up in a trie, at a place in memory where whole words can fill it: the kernel puts the address
/// right behind four bytes of length, so these begin in the middle of a word.
#[repr(C, align(8))]
struct PrefixKey<A> {
    before: u32,
    key: Key<A>,
}

impl<A> PrefixKey<A> {
    #[inline(always)]
    fn new(prefix_len: u32, address: A) -> Self {
        Self { before: 0, key: Key::new(prefix_len, address) }
    }

    #[inline(always)]
    fn key(&self) -> &Key<A> {
        // The compiler must not see that the first part is unused: it would forget the alignment along with it.
        #[cfg(target_arch = "bpf")]
        // SAFETY: the instruction, without which the kernel refuses the line information, changes nothing.
        unsafe {
            core::arch::asm!("{key} = {key}", key = in(reg) self, options(nostack, preserves_flags));
        }
        &self.key
    }
}

#[inline(always)]
pub(crate) fn allow_v4<'a>(address: AddressV4) -> Option<&'a AclEntry> {
    ALLOW_V4.get(PrefixKey::new(32, address).key())
}

#[inline(always)]
pub(crate) fn allow_v6<'a>(address: AddressV6) -> Option<&'a AclEntry> {
    ALLOW_V6.get(PrefixKey::new(128, address).key())
}

#[inline(always)]
pub(crate) fn deny_v4<'a>(address: AddressV4) -> Option<&'a AclEntry> {
    DENY_V4.get(PrefixKey::new(32, address).key())
}

#[inline(always)]
pub(crate) fn deny_v6<'a>(address: AddressV6) -> Option<&'a AclEntry> {
    DENY_V6.get(PrefixKey::new(128, address).key())
}

#[inline(always)]
pub(crate) fn rule_index_v4(address: AddressV4) -> Option<u32> {
    RULES_V4.get(PrefixKey::new(32, address).key()).copied()
}

#[inline(always)]
pub(crate) fn rule_index_v6(address: AddressV6) -> Option<u32> {
    RULES_V6.get(PrefixKey::new(128, address).key()).copied()
}

#[inline(always)]
pub(crate) fn rule<'a>(index: u32) -> Option<&'a PacketRule> {
    RULES.get(index)
}

/// A rule among the read-only globals, in place.
#[inline(always)]
pub(crate) fn global_rule(rule: &'static Global<PacketRule>) -> &'static PacketRule {
    let rule = opaque(core::ptr::from_ref(rule).cast::<PacketRule>());
    // SAFETY: a global is transparent, and read-only while the program runs.
    unsafe { &*rule }
}

/// The same address, which the compiler does not take for that of what the object says: the loader puts another value
/// in its place.
#[cfg(target_arch = "bpf")]
#[inline(always)]
fn opaque<T>(mut address: *const T) -> *const T {
    // SAFETY: the instruction changes nothing.
    unsafe {
        core::arch::asm!("{address} = {address}", address = inout(reg) address, options(nostack, preserves_flags));
    }
    address
}

#[cfg(not(target_arch = "bpf"))]
fn opaque<T>(address: *const T) -> *const T {
    address
}

#[inline(always)]
pub(crate) fn port_word(index: u32) -> u64 {
    PORTS.get(index).copied().unwrap_or(0)
}

#[inline(always)]
pub(crate) fn budget_v4(key: &SrcKeyV4) -> Option<BudgetState> {
    if !may_have_budget(key.digest()) {
        return None;
    }
    BUDGETS_V4.get_ptr_mut(key).map(BudgetState::new)
}

#[inline(always)]
pub(crate) fn budget_v6(key: &SrcKeyV6) -> Option<BudgetState> {
    if !may_have_budget(key.digest()) {
        return None;
    }
    BUDGETS_V6.get_ptr_mut(key).map(BudgetState::new)
}

#[inline(always)]
fn may_have_budget(digest: u64) -> bool {
    let place = Place::of(digest);
    // The place is always in range.
    BUDGET_FILTER.get(place.word()).is_none_or(|word| word & place.mask() != 0)
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

/// Where it is kept until when pressure of this kind is known.
#[inline(always)]
pub(crate) fn pressure_mark(kind: EventKind) -> Option<Tat> {
    let slot = match kind {
        EventKind::NewSourcesOver => schema::creation::NEW_SOURCES_OVER,
        EventKind::InsertFailed => schema::creation::INSERT_FAILED,
        EventKind::Sample | EventKind::SourceLimited | EventKind::BudgetHit => return None,
    };
    CREATION.get_ptr_mut(slot).map(|cell| Tat { cell })
}

#[inline(always)]
fn meter(class: EventClass) -> Option<&'static mut EventMeter> {
    let meter = EVENT_METERS.get_ptr_mut(class as u32)?;
    // SAFETY: as for the counters; whoever asks lets go of it before it asks again.
    Some(unsafe { &mut *meter })
}

/// Whether this CPU may send another event, and for how many it stands.
#[inline(always)]
pub(crate) fn admit_event(class: EventClass, now: KtimeNs) -> Option<u64> {
    let quota = globals::EVENT_QUOTA.load();
    meter(class)?.admit(&quota, now)
}

/// Sends an event that was admitted. Samples wait in the ring until the reader looks; news wake it.
#[inline(always)]
pub(crate) fn send_event(class: EventClass, event: Event) {
    let wakeup = match class {
        EventClass::Samples => BPF_RB_NO_WAKEUP,
        EventClass::Sources | EventClass::Maps => BPF_RB_FORCE_WAKEUP,
    };
    let entry = EVENTS.reserve::<Event>(0);
    let was_sent = entry.is_some();
    if let Some(mut entry) = entry {
        entry.write(event);
        entry.submit(u64::from(wakeup));
    }
    if let Some(meter) = meter(class) {
        meter.done(was_sent);
    }
}

/// Counts a packet, and tells how many there are now.
#[inline(always)]
pub(crate) fn count(slot: u32, verdict: Verdict, bytes: u64) -> u64 {
    if let Some(counters) = STATS.get_ptr_mut(slot) {
        // SAFETY: each CPU has its own copy, and the program is not interrupted by itself on one CPU.
        let counter = unsafe { &mut *counter_of(counters, verdict) };
        *counter = counter.plus(Counter { packets: 1, bytes });
        return counter.packets;
    }
    if globals::is_on(&globals::MORE_RULES)
        && let Some(counters) = MORE_STATS.get_ptr_mut(slot.wrapping_sub(PER_CPU_SLOTS))
    {
        let counter = counter_of(counters, verdict);
        // SAFETY: `counter` is the address of a whole counter in a map value, so its fields are in bounds.
        let packets = Tat { cell: unsafe { &raw mut (*counter).packets } };
        packets.add(1);
        // SAFETY: as above.
        Tat { cell: unsafe { &raw mut (*counter).bytes } }.add(bytes);
        return packets.load();
    }
    0
}

#[inline(always)]
fn counter_of(counters: *mut Counters, verdict: Verdict) -> *mut Counter {
    // SAFETY: the index is that of a counter in the value, which holds nothing else.
    unsafe { counters.cast::<Counter>().add(Counters::index(verdict)) }
}

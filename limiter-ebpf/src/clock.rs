//! The one clock of the program: the kernel's monotonic clock, by the tick where that is fine enough for every bucket.

use core::sync::atomic::AtomicU64;

use aya_ebpf::helpers::generated::{bpf_jiffies64, bpf_ktime_get_coarse_ns, bpf_ktime_get_ns};
use limiter_common::time::{KtimeNs, TickReading};

use crate::globals;

/// The last reading of any CPU. All see it change once a tick, so it costs no traffic between them.
static LAST: AtomicU64 = AtomicU64::new(0);

/// A bucket that holds less than what comes back in a tick would be full at its beginning, and the rest of the tick
/// lost: for such buckets the clock itself is read for every packet. Both readings are of one timeline.
#[inline(always)]
pub(crate) fn now() -> KtimeNs {
    if globals::is_on(&globals::FINE_CLOCK) {
        // SAFETY: the helper takes no argument and only returns a number.
        return KtimeNs::new(unsafe { bpf_ktime_get_ns() }).saturating_add_ns(globals::CLOCK_OFFSET.load());
    }
    of_tick()
}

/// A load and a comparison while the tick is the one of the last reading; the coarse clock itself, which costs ten
/// times as much, advances only with it. Neither may be the newest: a late reading only delays refill.
#[inline(always)]
fn of_tick() -> KtimeNs {
    // SAFETY: the helper takes no argument and only returns a number.
    let tick = unsafe { bpf_jiffies64() };
    // JUSTIFICATION: atomic loads and stores do not select on this target; aligned 64-bit ones cannot tear.
    // SAFETY: the pointer is that of a static.
    let last = TickReading::from_bits(unsafe { LAST.as_ptr().read_volatile() });
    if last.is_of(tick) {
        return last.time();
    }
    // SAFETY: as above.
    let time = KtimeNs::new(unsafe { bpf_ktime_get_coarse_ns() }).saturating_add_ns(globals::CLOCK_OFFSET.load());
    let reading = TickReading::new(tick, time);
    // A CPU that was held up may put an older reading in the place of a newer one. Its tick is over, so nobody uses it.
    // SAFETY: the pointer is that of a static.
    unsafe { LAST.as_ptr().write_volatile(reading.bits()) };
    reading.time()
}

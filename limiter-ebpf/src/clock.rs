//! The one clock of the program.

use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use limiter_common::time::KtimeNs;

/// A sixth of the cost of the precise clock; it advances once a tick, which only delays refill.
#[inline(always)]
pub(crate) fn now() -> KtimeNs {
    // SAFETY: the helper takes no argument and only returns a number.
    KtimeNs::new(unsafe { bpf_ktime_get_coarse_ns() })
}

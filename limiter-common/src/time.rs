//! One type a clock. There is no `From` between them: a conversion needs a reading of both clocks at one instant.

/// Nanoseconds of the kernel's coarse monotonic clock (`bpf_ktime_get_coarse_ns`, `CLOCK_MONOTONIC_COARSE`).
///
/// It advances once a tick (1 to 10 ms). A late reading only delays refill, and only moves a deadline by one tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KtimeNs(u64);

impl KtimeNs {
    /// A deadline that never comes: 584 years of uptime.
    pub const NEVER: Self = Self(u64::MAX);

    #[inline(always)]
    pub const fn new(ns: u64) -> Self {
        Self(ns)
    }

    #[inline(always)]
    pub const fn get(self) -> u64 {
        self.0
    }

    #[must_use]
    pub const fn saturating_add_ns(self, ns: u64) -> Self {
        Self(self.0.saturating_add(ns))
    }

    /// The same instant in bucket ticks, see [`crate::gcra::TICKS_PER_NS`]. Wraps; GCRA compares by difference.
    #[inline(always)]
    pub const fn ticks(self) -> u64 {
        self.0.wrapping_shl(crate::gcra::TICK_SHIFT)
    }
}

/// Microseconds since 1970, the clock of windows. With a Redis store it is Redis' clock (`TIME`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixMicros(u64);

impl UnixMicros {
    #[inline]
    pub const fn new(us: u64) -> Self {
        Self(us)
    }

    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }

    #[must_use]
    pub const fn saturating_add_us(self, us: u64) -> Self {
        Self(self.0.saturating_add(us))
    }
}

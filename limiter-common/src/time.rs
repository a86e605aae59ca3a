//! One type a clock. There is no `From` between them: a conversion needs a reading of both clocks at one instant.

/// Nanoseconds of the kernel's monotonic clock: the coarse one (`bpf_ktime_get_coarse_ns`, `CLOCK_MONOTONIC_COARSE`), or,
/// where a bucket holds too little for that, the exact one (`bpf_ktime_get_ns`).
///
/// The coarse one advances once a tick (1 to 10 ms) to what the other says. A late reading only delays refill, and only
/// moves a deadline by one tick.
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

    #[inline(always)]
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

/// A reading of [`KtimeNs`] and the kernel tick at which it was taken, in one number, so that CPUs can share it without
/// a lock.
///
/// Fifteen bits are the tick's, so the time is rounded up to 65 microseconds: a deadline that the coarse clock has
/// reached has passed. After 32,768 ticks (half a minute or
/// more) without a reading, the tick looks the same again: what comes in that very tick is judged by the old time, that
/// is, as if it had come right after the packet before. 0 is a reading of no tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TickReading(u64);

impl TickReading {
    const MASK: u64 = 0xffff;
    /// Set in every reading.
    const TAKEN: u64 = 0x8000;

    #[inline(always)]
    pub const fn new(tick: u64, time: KtimeNs) -> Self {
        Self(time.0.wrapping_add(Self::MASK) & !Self::MASK | (tick | Self::TAKEN) & Self::MASK)
    }

    #[inline(always)]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    #[inline(always)]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether it was taken at this tick.
    #[inline(always)]
    pub const fn is_of(self, tick: u64) -> bool {
        (self.0 ^ (tick | Self::TAKEN)) & Self::MASK == 0
    }

    #[inline(always)]
    pub const fn time(self) -> KtimeNs {
        KtimeNs(self.0 & !Self::MASK)
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_reading_is_of_its_tick_and_of_no_other_near_it(tick: u64, ns: u64, later in 1u64..1 << 15) {
            let reading = TickReading::from_bits(TickReading::new(tick, KtimeNs::new(ns)).bits());
            prop_assert!(reading.is_of(tick));
            prop_assert!(!reading.is_of(tick.wrapping_add(later)));
            prop_assert!(!TickReading::from_bits(0).is_of(tick));
            prop_assert!(reading.time().get().wrapping_sub(ns) < 1 << 16);
        }
    }
}

//! The one place of the agent that reads a clock.

use std::{
    sync::atomic::{AtomicI64, Ordering},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use limiter_common::time::{KtimeNs, UnixMicros};
use nix::time::{ClockId, clock_gettime};

/// Where a component takes the time of windows from.
pub trait Clock: Send + Sync + 'static {
    fn now(&self) -> UnixMicros;

    /// The time at which a stopwatch was started, or a little later: whoever has one need not read the clock again.
    fn at(&self, _start: Stopwatch) -> UnixMicros {
        self.now()
    }
}

/// The wall clock as it was at start, carried on by the monotonic clock, plus what the store's clock differs by.
///
/// A wall clock that jumps does not move it, so no window is skipped or begun twice.
#[derive(Debug)]
pub struct SharedClock {
    start: Instant,
    wall_at_start_us: u64,
    offset_us: AtomicI64,
}

impl SharedClock {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn new() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall_at_start_us = u64::try_from(wall.as_micros()).unwrap_or(u64::MAX);
        Self { start: Instant::now(), wall_at_start_us, offset_us: AtomicI64::new(0) }
    }

    /// Sets how far the store's clock is ahead of this host's.
    pub fn set_offset_us(&self, offset_us: i64) {
        self.offset_us.store(offset_us, Ordering::Relaxed);
    }

    pub fn offset_us(&self) -> i64 {
        self.offset_us.load(Ordering::Relaxed)
    }

    /// This host's time, without the store's offset.
    #[inline]
    pub fn local(&self) -> UnixMicros {
        self.local_at(Stopwatch::start())
    }

    #[inline]
    fn local_at(&self, Stopwatch(now): Stopwatch) -> UnixMicros {
        let elapsed = now.saturating_duration_since(self.start);
        // 64 bits are enough for half a million years, and sooner done than 128.
        let elapsed_us = elapsed.as_secs().wrapping_mul(1_000_000).wrapping_add(elapsed.subsec_micros().into());
        UnixMicros::new(self.wall_at_start_us.saturating_add(elapsed_us))
    }
}

impl Default for SharedClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SharedClock {
    #[inline]
    fn now(&self) -> UnixMicros {
        self.at(Stopwatch::start())
    }

    #[inline]
    fn at(&self, start: Stopwatch) -> UnixMicros {
        UnixMicros::new(self.local_at(start).get().saturating_add_signed(self.offset_us()))
    }
}

/// The clock by which the XDP program judges deadlines.
pub fn ktime() -> KtimeNs {
    // Linux has had this clock since 2.6.32; without it every deadline reads as passed, never as eternal.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).map_or(Duration::MAX, Duration::from);
    KtimeNs::new(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

/// A point on the monotonic clock, for measuring how long something took.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    #[inline]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    pub fn is_after(&self, other: &Self) -> bool {
        self.0 > other.0
    }
}

/// A clock that tests move.
#[derive(Debug, Default)]
pub struct ManualClock(std::sync::atomic::AtomicU64);

impl ManualClock {
    pub fn at(us: u64) -> Self {
        Self(us.into())
    }

    pub fn set(&self, us: u64) {
        self.0.store(us, Ordering::Relaxed);
    }

    pub fn advance(&self, us: u64) {
        self.0.fetch_add(us, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> UnixMicros {
        UnixMicros::new(self.0.load(Ordering::Relaxed))
    }
}

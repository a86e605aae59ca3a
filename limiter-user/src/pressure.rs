//! What the origin reports of its load, and how far rules that opted in give way to it.
//!
//! Reports are gathered between two steps and judged together: of levels the highest counts, of latencies the mean. A
//! report holds until it expires; then nothing is known any more, and limits recover. Deciding reads one atomic a rule.

mod report;

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use limiter_common::adaptive::{Aimd, FULL, State};
use parking_lot::Mutex;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use self::report::Reports;
pub use self::report::{Reading, Report, ReportError, level};
use crate::{
    active::{Active, SharedActive},
    config::PressureConfig,
    policy::{Adaptive, Rule},
};

/// Reports, and the shares that follow from them. Shares outlive a change of the policy, by the id of their rule.
pub struct Pressure {
    config: PressureConfig,
    reports: Mutex<Reports>,
    shares: Mutex<HashMap<Arc<str>, Arc<Share>>>,
    counts: Counts,
    changes: ShareChanges,
}

/// How often shares have changed: whoever remembers what followed from them sees that it may not follow any more.
#[derive(Clone, Debug, Default)]
pub struct ShareChanges(Arc<AtomicU64>);

impl ShareChanges {
    #[inline]
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// Reports since the start.
#[derive(Debug, Default)]
struct Counts {
    levels: AtomicU64,
    latencies: AtomicU64,
    refused: AtomicU64,
}

/// How much of its limit a rule grants, in millionths.
#[derive(Debug)]
pub struct Share {
    share: AtomicU32,
    stepped_at_us: AtomicU64,
}

impl Share {
    #[inline]
    pub fn get(&self) -> u32 {
        self.share.load(Ordering::Relaxed)
    }
}

/// A rule's share, and how it moves.
#[derive(Clone, Debug)]
pub struct Tightened {
    share: Arc<Share>,
    aimd: Aimd,
}

impl Tightened {
    #[inline]
    pub fn share(&self) -> u32 {
        self.share.get()
    }
}

impl fmt::Debug for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pressure").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Pressure {
    pub fn new(config: PressureConfig) -> Self {
        Self {
            config,
            reports: Mutex::default(),
            shares: Mutex::default(),
            counts: Counts::default(),
            changes: ShareChanges::default(),
        }
    }

    /// Of which nobody ever hears.
    #[cfg(test)]
    pub(crate) fn unreported() -> Self {
        Self::new(PressureConfig { header: false, interval: Duration::from_secs(1), expires: Duration::from_secs(10) })
    }

    /// Whether the header of a check is looked at.
    pub const fn reads_header(&self) -> bool {
        self.config.header
    }

    /// Takes a report of somebody who is believed.
    pub fn report(&self, report: Report) {
        let count = match report {
            Report::Level(_) => &self.counts.levels,
            Report::LatencyUs(_) => &self.counts.latencies,
        };
        count.fetch_add(1, Ordering::Relaxed);
        self.reports.lock().add(report);
    }

    /// Counts a report that is not believed or not understood.
    pub fn refuse(&self) {
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Reports since the start, by what they were.
    pub fn counts(&self) -> [(&'static str, u64); 3] {
        let Counts { levels, latencies, refused } = &self.counts;
        [("level", levels), ("latency", latencies), ("refused", refused)]
            .map(|(kind, count)| (kind, count.load(Ordering::Relaxed)))
    }

    pub fn share_changes(&self) -> ShareChanges {
        self.changes.clone()
    }

    /// What was known at the last step.
    pub fn reading(&self) -> Reading {
        self.reports.lock().reading()
    }

    /// The shares of `rules`, in their order. What a rule had before it keeps, within its new bounds; shares of rules that
    /// are gone are forgotten.
    pub fn shares_of(&self, rules: &[Rule]) -> Vec<Option<Tightened>> {
        let mut known = self.shares.lock();
        let mut kept = HashMap::new();
        let shares = rules.iter().map(|rule| {
            let aimd = self.aimd(rule.adaptive.as_ref()?, rule)?;
            let share = known
                .get(&rule.id)
                .map(Arc::clone)
                .unwrap_or_else(|| Arc::new(Share { share: AtomicU32::new(FULL), stepped_at_us: AtomicU64::new(0) }));
            kept.insert(Arc::clone(&rule.id), Arc::clone(&share));
            Some(Tightened { share, aimd })
        });
        let shares = shares.collect();
        *known = kept;
        shares
    }

    fn aimd(&self, adaptive: &Adaptive, rule: &Rule) -> Option<Aimd> {
        let interval_us = u64::try_from(self.config.interval.as_micros()).ok()?;
        Aimd::new(rule.share_of_floor(adaptive), adaptive.decrease, interval_us, adaptive.recover_us)
    }

    /// One step of every rule that opted in, at `now_us` of the steps' own clock.
    pub(crate) fn step(&self, active: &Active, now_us: u64) {
        let expires_us = u64::try_from(self.config.expires.as_micros()).unwrap_or(u64::MAX);
        let reading = self.reports.lock().read(now_us, expires_us);
        for (rule, tightened) in active.policy.rules.iter().zip(&active.shares) {
            let (Some(adaptive), Some(Tightened { share, aimd })) = (&rule.adaptive, tightened) else { continue };
            let state = State { share: share.get(), stepped_at_us: share.stepped_at_us.load(Ordering::Relaxed) };
            let next = aimd.step(state, reading.beside(adaptive), now_us);
            if share.share.swap(next.share, Ordering::Relaxed) != next.share {
                // After the share: what was remembered of it is not found under the next number.
                self.changes.0.fetch_add(1, Ordering::Release);
            }
            share.stepped_at_us.store(next.stepped_at_us, Ordering::Relaxed);
            if (state.share < FULL) != (next.share < FULL) {
                let (is_tightened, share) = (next.share < FULL, next.share);
                tracing::info!(target: "limiter::pressure", rule = &*rule.id, is_tightened, share_millionths = share, "a limit gives way to pressure, or is whole again");
            }
        }
    }

    /// Steps once an interval until `shutdown`.
    pub async fn run(self: Arc<Self>, active: SharedActive, shutdown: CancellationToken) {
        let start = Instant::now();
        // The first step is an interval after the start.
        let mut ticks = tokio::time::interval_at(start + self.config.interval, self.config.interval);
        // Steps stay on the grid of intervals, and so never come closer together than one.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            tokio::select! {
                tick = ticks.tick() => self.step(&active.load(), micros(tick - start)),
                () = shutdown.cancelled() => return,
            }
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Millionths as a number for people and monitoring.
pub fn fraction(millionths: u32) -> f64 {
    // A microsecond is to a second as a millionth to the whole.
    Duration::from_micros(millionths.into()).as_secs_f64()
}

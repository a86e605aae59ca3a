//! A breaker for each server: calls about counters go through it, and the request path asks it what can be shared.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    clock::Stopwatch,
    store::{
        StoreError,
        breaker::{Breaker, BreakerConfig, BreakerState},
    },
};

/// What the breakers of a store have in common.
#[derive(Debug)]
pub(super) struct Breakers {
    /// `None`: no server is ever left alone.
    config: Option<BreakerConfig>,
    calls: CallsOf,
    /// What breakers count time from.
    clock: Stopwatch,
    /// How many of them are not closed: what every request reads.
    broken: AtomicUsize,
    counts: Arc<Counts>,
}

/// Who leaves a server alone. Both may, and one of them alone: a server that is too slow for a request may do for a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallsOf {
    /// Those that share counts.
    Background,
    /// Those that requests wait for.
    Requests,
}

impl CallsOf {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Background => "sharing in the background",
            Self::Requests => "requests that ask it",
        }
    }
}

#[derive(Debug, Default)]
struct Counts {
    opened: AtomicU64,
    closed: AtomicU64,
    failed_probes: AtomicU64,
    refused: AtomicU64,
}

/// Of all servers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BreakerCounts {
    /// Times that one opened, and closed again.
    pub opened: u64,
    pub closed: u64,
    pub failed_probes: u64,
    /// Calls that were not made.
    pub refused: u64,
}

impl Breakers {
    pub(super) fn new(config: Option<BreakerConfig>) -> Arc<Self> {
        Self::counting(config, CallsOf::Background, Arc::default())
    }

    /// For the calls of requests; counted together with others.
    pub(super) fn beside(others: &Self, config: Option<BreakerConfig>) -> Arc<Self> {
        Self::counting(config, CallsOf::Requests, Arc::clone(&others.counts))
    }

    fn counting(config: Option<BreakerConfig>, calls: CallsOf, counts: Arc<Counts>) -> Arc<Self> {
        Arc::new(Self { config, calls, clock: Stopwatch::start(), broken: AtomicUsize::new(0), counts })
    }

    /// The longest time between two probes; `None` where no server is ever left alone.
    pub(super) fn probe(&self) -> Option<Duration> {
        self.config.map(|config| config.probe)
    }

    #[inline]
    pub(super) fn are_closed(&self) -> bool {
        self.broken.load(Ordering::Relaxed) == 0
    }

    pub(super) fn counts(&self) -> BreakerCounts {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        BreakerCounts {
            opened: load(&self.counts.opened),
            closed: load(&self.counts.closed),
            failed_probes: load(&self.counts.failed_probes),
            refused: load(&self.counts.refused),
        }
    }
}

/// That of one server.
#[derive(Debug)]
pub(super) struct ServerBreaker {
    name: String,
    all: Arc<Breakers>,
    /// The breaker's own state, to be read without a lock.
    state: AtomicU8,
    /// `None`: it never opens.
    inner: Option<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    breaker: Breaker,
    /// Why the last call failed.
    reason: String,
}

impl ServerBreaker {
    pub(super) fn new(name: String, all: &Arc<Breakers>) -> Self {
        let inner = |config| Mutex::new(Inner { breaker: Breaker::new(config), reason: String::new() });
        Self { name, all: Arc::clone(all), state: AtomicU8::new(0), inner: all.config.map(inner) }
    }

    pub(super) fn state(&self) -> BreakerState {
        BreakerState::ALL.get(usize::from(self.state.load(Ordering::Relaxed))).copied().unwrap_or_default()
    }

    /// How long until the server is asked again; `None` while it is asked.
    pub(super) fn until_probe(&self) -> Option<Duration> {
        if self.state() == BreakerState::Closed {
            return None;
        }
        let probe_at = self.inner.as_ref()?.lock().breaker.probe_at();
        Some(probe_at.map_or(Duration::ZERO, |at| at.saturating_sub(self.all.clock.elapsed())))
    }

    /// Whether a call may be made. The error says why the calls before it failed.
    pub(super) fn admit(&self, operation: &'static str) -> Result<(), StoreError> {
        if self.state() == BreakerState::Closed {
            return Ok(());
        }
        self.all.counts.refused.fetch_add(1, Ordering::Relaxed);
        let reason = self.inner.as_ref().map_or_else(String::new, |inner| inner.lock().reason.clone());
        Err(StoreError::Unavailable { operation, store: self.name.clone(), reason: format!("left alone: {reason}") })
    }

    /// A call that was made has failed.
    pub(super) fn failed(&self, reason: impl FnOnce() -> String) {
        let Some(inner) = &self.inner else { return };
        let mut inner = inner.lock();
        if inner.breaker.state() != BreakerState::Closed {
            return;
        }
        let opens = inner.breaker.call_failed(self.all.clock.elapsed(), jitter());
        if opens {
            inner.reason = reason();
            self.show(&inner.breaker);
            self.all.broken.fetch_add(1, Ordering::Relaxed);
            self.all.counts.opened.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                target: "limiter::store",
                redis = self.name,
                calls = self.all.calls.as_str(),
                error = inner.reason,
                "this Redis is left alone but for probes: rules follow their on_store_failure"
            );
        }
    }

    /// A probe, if one is due. It has failed unless it is told otherwise.
    pub(super) fn begin_probe(&self) -> Option<Probe<'_>> {
        if self.state() != BreakerState::Open {
            return None;
        }
        {
            let mut inner = self.inner.as_ref()?.lock();
            if !inner.breaker.begin_probe(self.all.clock.elapsed()) {
                return None;
            }
            self.show(&inner.breaker);
        }
        Some(Probe { breaker: self, result: Err(None) })
    }

    fn probed(&self, result: Result<(), Option<String>>) {
        let Some(inner) = &self.inner else { return };
        let mut inner = inner.lock();
        let succeeded = result.is_ok();
        if let Err(Some(reason)) = result {
            inner.reason = reason;
        }
        let closes = inner.breaker.probed(succeeded, self.all.clock.elapsed(), jitter());
        self.show(&inner.breaker);
        if closes {
            self.all.broken.fetch_sub(1, Ordering::Relaxed);
            self.all.counts.closed.fetch_add(1, Ordering::Relaxed);
            tracing::info!(target: "limiter::store", redis = self.name, calls = self.all.calls.as_str(), "this Redis answers again");
        } else {
            self.all.counts.failed_probes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// There is news of the server: the next probe need not wait.
    pub(super) fn hasten(&self) {
        if let Some(inner) = &self.inner
            && self.state() != BreakerState::Closed
        {
            inner.lock().breaker.hasten(self.all.clock.elapsed());
        }
    }

    fn show(&self, breaker: &Breaker) {
        let state = BreakerState::ALL.iter().position(|state| *state == breaker.state()).unwrap_or_default();
        self.state.store(u8::try_from(state).unwrap_or_default(), Ordering::Relaxed);
    }
}

/// A server that is not used any more is missing to nobody.
impl Drop for ServerBreaker {
    fn drop(&mut self) {
        if self.state() != BreakerState::Closed {
            self.all.broken.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A probe that is under way, also if its task is dropped.
pub(super) struct Probe<'a> {
    breaker: &'a ServerBreaker,
    result: Result<(), Option<String>>,
}

impl Probe<'_> {
    pub(super) fn ended<T>(mut self, result: &Result<T, StoreError>) {
        self.result = result.as_ref().map(drop).map_err(|error| Some(error.reason().to_owned()));
    }
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        self.breaker.probed(std::mem::replace(&mut self.result, Ok(())));
    }
}

/// `RandomState` is randomly keyed: enough to keep a fleet from probing in step.
fn jitter() -> u64 {
    RandomState::new().hash_one(0)
}

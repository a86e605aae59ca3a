//! Shares the counters in memory with other nodes, in the background.
//!
//! Every interval the worker sends this node's totals of all counters that changed, and takes back what all nodes
//! together have. Totals, not differences: a batch that arrived though its answer did not is simply sent again.
//!
//! Architecture invariant: no request waits for the worker, and it holds nothing that grows but one batch: what is to
//! be sent is in the memory store, which is bounded.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use limiter_common::time::UnixMicros;
use parking_lot::Mutex;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use self::{bound::Bounds, live_nodes::LiveNodes, offset::OffsetBounds, servers::Servers};
use super::{
    CounterKey, StoreError,
    counter::{Adopts, OwnState, OwnTotals},
    memory::{MemoryStore, WalkedTo},
    redis::{RedisStore, SyncReply},
};
use crate::clock::{Clock, SharedClock, Stopwatch};

mod bound;
mod live_nodes;
mod offset;
mod servers;

/// Changes of the clock's offset from here on are counted and logged.
const STEP_US: u64 = 100_000;

#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SyncConfig {
    pub interval: Duration,
    /// Counters in one pipeline.
    pub batch: usize,
    /// How long one pipeline may take. Longer than a request would wait, since nobody waits for it: a server at the other end
    /// of a continent is one to share with.
    pub batch_deadline: Duration,
    /// Between two times that this node says that it is alive, and asks for Redis' clock and the other nodes.
    pub heartbeat: Duration,
}

impl Default for SyncConfig {
    fn default() -> Self {
        Self {
            interval: Duration::from_millis(50),
            batch: 512,
            batch_deadline: Duration::from_millis(250),
            heartbeat: Duration::from_secs(1),
        }
    }
}

/// Whether the counters are shared at present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyncState {
    /// Redis has not answered yet.
    #[default]
    Starting,
    Connected,
    /// Requests are decided from what this node knows.
    Degraded,
}

impl SyncState {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Connected => "connected",
            Self::Degraded => "degraded",
        }
    }
}

/// A snapshot of how sharing goes.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SyncStats {
    pub state: SyncState,
    /// Age of the oldest counts that Redis has not confirmed.
    pub lag: Duration,
    /// Time since Redis last answered.
    pub last_success: Option<Duration>,
    /// How far Redis' clock is ahead of this host's.
    pub clock_offset_us: i64,
    /// Times that the offset changed by more than 100 ms.
    pub clock_steps: u64,
    pub batches: u64,
    /// Counters that were sent, and those in the last batch.
    pub counters_sent: u64,
    pub last_batch: usize,
    pub failed_rounds: u64,
    /// Why the last of them failed; `None` once Redis has answered again.
    pub last_error: Option<String>,
    /// Servers that may evict counters when their memory ends, by name, and their `maxmemory-policy`.
    pub may_evict: BTreeMap<String, String>,
    /// Counters that Redis refused or answered unintelligibly.
    pub refused_counters: u64,
    /// Counters that Redis knew less of than it had confirmed.
    pub lost_counters: u64,
    /// Times that Redis was found empty or another one, and everything live was sent again.
    pub refills: u64,
    /// Totals of windows that had not begun by Redis' clock.
    pub ahead: u64,
    /// Rounds that did not wait for the interval, since a counter came near its ceiling.
    pub early_rounds: u64,
}

#[derive(Debug, Default)]
struct Progress {
    stats: SyncStats,
    pending_since: Option<Stopwatch>,
    last_success: Option<Stopwatch>,
    bounds: Bounds,
}

/// Where others read how sharing goes.
#[derive(Clone, Debug, Default)]
pub struct SyncStatus(Arc<Mutex<Progress>>);

impl SyncStatus {
    pub fn get(&self) -> SyncStats {
        let progress = self.0.lock();
        SyncStats {
            lag: progress.pending_since.map_or(Duration::ZERO, |since| since.elapsed()),
            last_success: progress.last_success.map(|since| since.elapsed()),
            ..progress.stats.clone()
        }
    }

    /// By rule, how many units above its ceiling all nodes together may let one counter get, as this node has seen them use it:
    /// the nodes times the most that this node has admitted on one counter between two exchanges.
    pub fn overshoot_bounds(&self) -> Vec<(Arc<str>, u64)> {
        self.0.lock().bounds.all()
    }
}

/// Whether a counter is one of some.
pub type IsOf = Box<dyn Fn(&CounterKey) -> bool + Send + Sync>;

/// Counters that Redis alone decides, and is to be told what was heard of them, since it has lost them.
#[derive(Debug)]
struct Restoring {
    next: WalkedTo,
    /// Those that have lost them; `None`: any.
    servers: Option<Vec<String>>,
}

pub struct SyncWorker {
    memory: Arc<MemoryStore>,
    redis: RedisStore,
    clock: Arc<SharedClock>,
    config: SyncConfig,
    /// Of the last message.
    number: u64,
    status: SyncStatus,
    servers: Servers,
    clock_is_set: bool,
    nodes: LiveNodes,
    /// By which requests are decided.
    beside: Option<RedisStore>,
    batch: Vec<OwnTotals>,
    is_local: IsOf,
    is_strict: IsOf,
    restoring: Option<Restoring>,
    /// Whether the last round succeeded: what was admitted since then is what one interval admits.
    is_sharing: bool,
}

impl std::fmt::Debug for SyncWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SyncWorker").field("redis", &self.redis).field("config", &self.config).finish_non_exhaustive()
    }
}

impl SyncWorker {
    /// `memory` should be [`MemoryStore::shared`] and take its time from `clock`.
    pub fn new(memory: Arc<MemoryStore>, redis: RedisStore, clock: Arc<SharedClock>, config: SyncConfig) -> Self {
        memory.is_of(redis.fleet());
        let status = SyncStatus::default();
        status.0.lock().bounds.is_of(redis.fleet());
        Self {
            memory,
            redis,
            clock,
            config: SyncConfig { batch: config.batch.max(1), ..config },
            number: 0,
            status,
            servers: Servers::default(),
            clock_is_set: false,
            nodes: LiveNodes::new("", config.heartbeat),
            beside: None,
            batch: Vec::new(),
            is_local: Box::new(|_| false),
            is_strict: Box::new(|_| false),
            restoring: None,
            is_sharing: false,
        }
    }

    /// Tries the servers of `store` as well, while it leaves them alone.
    #[must_use]
    pub fn probing(mut self, store: RedisStore) -> Self {
        self.beside = Some(store);
        self
    }

    /// What the node is called where others see it.
    #[must_use]
    pub fn of_node(mut self, name: &str) -> Self {
        self.nodes = LiveNodes::new(name, self.config.heartbeat);
        self
    }

    /// Says of which counters the others' counts are taken once. All others are shared, unless this is called.
    #[must_use]
    pub fn with_local(mut self, is_local: IsOf) -> Self {
        self.is_local = is_local;
        self
    }

    /// Says which counters Redis alone decides: where it loses them, it is told what was heard of them. None, unless this is
    /// called.
    #[must_use]
    pub fn with_strict(mut self, is_strict: IsOf) -> Self {
        self.is_strict = is_strict;
        self
    }

    fn adopts(&self, key: &CounterKey) -> Adopts {
        if (self.is_local)(key) { Adopts::Once } else { Adopts::Always }
    }

    pub fn status(&self) -> SyncStatus {
        self.status.clone()
    }

    /// Shares until `shutdown`, and then what is left, as long as Redis answers, for at most one second.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut ticks = tokio::time::interval(self.config.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_round = Stopwatch::start();
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                _ = ticks.tick() => {}
                () = self.early(&last_round) => {
                    // In place of the next one.
                    ticks.reset();
                    self.status.0.lock().stats.early_rounds += 1;
                }
            }
            last_round = Stopwatch::start();
            tokio::select! {
                () = shutdown.cancelled() => {
                    // The round was cut off: what it had sent may not have arrived.
                    self.requeue_batch();
                    break;
                }
                () = self.round() => {}
            }
        }
        if self.flush(Duration::from_secs(1)).await {
            // Who stays does not reckon with this node any more. Where this does not arrive, its time runs out.
            let left = self.redis.beat(self.nodes.name(), Duration::ZERO, self.config.batch_deadline).await;
            tracing::debug!(target: "limiter::store", heard = left.is_ok(), "left the other nodes");
        }
    }

    /// Until a counter nears its ceiling, and a quarter of the interval has passed since the last round. While Redis is away
    /// nobody hears of it anyway.
    async fn early(&self, last_round: &Stopwatch) {
        loop {
            self.memory.nears_a_ceiling().await;
            if self.status.0.lock().stats.state == SyncState::Connected {
                break;
            }
        }
        tokio::time::sleep((self.config.interval / 4).saturating_sub(last_round.elapsed())).await;
    }

    /// Sends what is queued, for at most `deadline`. Returns whether everything was confirmed.
    pub async fn flush(&mut self, deadline: Duration) -> bool {
        let watch = Stopwatch::start();
        while self.memory.stats().queued > 0 && watch.elapsed() < deadline {
            let failures = self.status.0.lock().stats.failed_rounds;
            self.round().await;
            if self.status.0.lock().stats.failed_rounds != failures {
                return false;
            }
        }
        self.memory.stats().queued == 0
    }

    /// The first one, for which a node that starts waits: a server that is far away has the time to be connected to as well.
    pub async fn first_round(&mut self, within: Duration) {
        let usual = std::mem::replace(&mut self.config.batch_deadline, within);
        self.round().await;
        self.config.batch_deadline = usual;
    }

    /// One exchange with Redis: everything that was queued when it began.
    pub async fn round(&mut self) {
        let start = Stopwatch::start();
        self.memory.begin_sharing();
        if self.memory.stats().queued > 0 {
            self.status.0.lock().pending_since.get_or_insert(start);
        }
        let result = self.exchange().await;
        self.is_sharing = result.is_ok();
        match result {
            Ok(()) => {
                // What is queued by now is younger than the round.
                let pending = self.memory.stats().queued > 0;
                self.status.0.lock().pending_since = pending.then_some(start);
            }
            Err(error) => self.failed(&error),
        }
    }

    async fn exchange(&mut self) -> Result<(), StoreError> {
        let state = self.status.0.lock().stats.state;
        self.redis.probe(self.config.batch_deadline, true).await;
        if let Some(beside) = &self.beside {
            beside.probe(beside.timeout(), false).await;
        }
        // Before the first totals, whose windows are Redis'; and while Redis is away, since this costs less than a batch.
        let asks = !self.clock_is_set || state != SyncState::Connected || self.nodes.is_due();
        let heard = if asks { self.beat().await } else { Ok(()) };
        if heard.is_err() {
            if !self.redis.is_cluster() {
                return heard;
            }
            // Others have counters as well.
            if !self.clock_is_set {
                self.ask_any_time().await?;
            }
        }
        self.look_at_servers().await;
        let mut left = self.memory.stats().queued;
        while left > 0 {
            let take = left.min(self.config.batch);
            self.batch.clear();
            self.memory.take_dirty(self.clock.now(), take, &mut self.batch);
            if self.batch.is_empty() {
                break;
            }
            left -= take;
            self.send_batch().await?;
        }
        self.restore().await?;
        // Only now: a Redis that tells the time and takes no counts (full, read-only) is none to share with.
        heard?;
        if asks {
            self.answered();
        }
        Ok(())
    }

    async fn beat(&mut self) -> Result<(), StoreError> {
        let start = self.clock.local();
        let heard = self.redis.beat(self.nodes.name(), self.nodes.lasts(), self.config.batch_deadline).await?;
        let live_nodes = self.nodes.heard(heard.live_nodes);
        self.redis.set_live_nodes(live_nodes);
        self.take_time(heard.now_us, start);
        Ok(())
    }

    async fn ask_any_time(&mut self) -> Result<(), StoreError> {
        let start = self.clock.local();
        let now_us = self.redis.any_time_us(self.config.batch_deadline).await?;
        self.take_time(now_us, start);
        Ok(())
    }

    fn take_time(&mut self, now_us: u64, start: UnixMicros) {
        let mut bounds = OffsetBounds::default();
        bounds.narrow(now_us, start, self.clock.local());
        self.set_clock(&bounds);
    }

    async fn send_batch(&mut self) -> Result<(), StoreError> {
        let start = self.clock.local();
        self.number += 1;
        let result = self.redis.exchange(self.number, &self.batch, self.config.batch_deadline).await;
        let end = self.clock.local();
        let replies = match result {
            Ok(replies) => replies,
            Err(error) => {
                self.requeue_batch();
                return Err(error);
            }
        };
        let sent = self.batch.len();
        let mut bounds = OffsetBounds::default();
        let mut seen = Seen::default();
        let mut refusal = None;
        let mut batch = std::mem::take(&mut self.batch);
        for (totals, reply) in batch.drain(..).zip(replies) {
            match reply {
                Ok(reply) => {
                    if reply.is_of_clock {
                        bounds.narrow(reply.now_us, start, end);
                    }
                    if self.is_sharing {
                        self.status.0.lock().bounds.see(&totals);
                    }
                    seen.lost += u64::from(is_lost(&totals, &reply));
                    if reply.ahead {
                        seen.ahead += 1;
                        self.memory.requeue(&totals.key);
                    } else {
                        let now = UnixMicros::new(reply.now_us);
                        self.memory.apply(&totals, &reply.shared, now, self.adopts(&totals.key));
                    }
                }
                Err(error) => {
                    seen.refused += 1;
                    self.memory.requeue(&totals.key);
                    refusal = Some(error);
                }
            }
        }
        // With its room, for the next one.
        self.batch = batch;
        // One may have been evicted, and has just been told again; whether its server has lost all of them, its mark says.
        self.servers.seem_emptied |= seen.lost > 0;
        self.set_clock(&bounds);
        {
            let stats = &mut self.status.0.lock().stats;
            stats.batches += 1;
            stats.counters_sent += sent as u64;
            stats.last_batch = sent;
            stats.refused_counters += seen.refused;
            stats.ahead += seen.ahead;
            stats.lost_counters += seen.lost;
        }
        match refusal {
            // Nothing went through: the server is not able, whatever is wrong with single counters.
            Some(error) if seen.refused == sent as u64 => return Err(error),
            Some(error) => {
                tracing::debug!(target: "limiter::store", %error, refused = seen.refused, "counters refused")
            }
            None => {}
        }
        self.status.0.lock().last_success = Some(Stopwatch::start());
        Ok(())
    }

    /// Sends what these servers should have, or all of them.
    fn refill(&mut self, reason: &'static str, servers: Option<Vec<String>>) {
        self.redis.has_lost();
        let servers = servers.filter(|_| self.redis.is_cluster());
        let is_wanted = |key: &CounterKey| self.is_at(key, servers.as_deref());
        let counters = self.memory.queue_live(self.clock.now(), &is_wanted);
        // One that is under way begins anew, with those of all.
        let of_all = self.restoring.is_some();
        self.restoring = Some(Restoring { next: WalkedTo::default(), servers: servers.clone().filter(|_| !of_all) });
        self.status.0.lock().stats.refills += 1;
        let which = servers.map_or_else(|| self.redis.name().to_owned(), |servers| servers.join(", "));
        tracing::warn!(
            target: "limiter::store",
            redis = which,
            counters,
            "{reason}: sending its live counters again"
        );
    }

    /// Whether one of these servers has the counter, or nobody knows which.
    fn is_at(&self, key: &CounterKey, servers: Option<&[String]>) -> bool {
        servers.is_none_or(|servers| {
            let server = self.redis.server_of(&key.identity.borrowed());
            server.is_none_or(|server| servers.contains(&server))
        })
    }

    /// Nobody who comes later may take a counter that was lost for a new one. What is not answered is said again.
    async fn restore(&mut self) -> Result<(), StoreError> {
        while let Some(Restoring { next, servers }) = &self.restoring {
            let mut heard = Vec::new();
            let is_wanted = |key: &CounterKey| (self.is_strict)(key) && self.is_at(key, servers.as_deref());
            let next = self.memory.heard_of(self.clock.now(), *next, self.config.batch, &is_wanted, &mut heard);
            if !heard.is_empty() {
                self.redis.restore(&heard, self.config.batch_deadline).await?;
            }
            self.restoring = match (next, self.restoring.take()) {
                (Some(next), Some(restoring)) => Some(Restoring { next, ..restoring }),
                (None, _) | (_, None) => None,
            };
        }
        Ok(())
    }

    fn requeue_batch(&mut self) {
        for totals in self.batch.drain(..) {
            self.memory.requeue(&totals.key);
        }
    }

    fn set_clock(&mut self, bounds: &OffsetBounds) {
        let before = self.clock.offset_us();
        let Some(offset_us) = bounds.correct(self.clock_is_set.then_some(before)) else { return };
        self.clock.set_offset_us(offset_us);
        let step = offset_us.abs_diff(before) >= STEP_US;
        if step {
            tracing::warn!(
                target: "limiter::store",
                offset_ms = offset_us / 1000,
                before_ms = before / 1000,
                "redis' clock and this host's moved apart; windows follow redis"
            );
        }
        self.clock_is_set = true;
        let stats = &mut self.status.0.lock().stats;
        stats.clock_offset_us = offset_us;
        stats.clock_steps += u64::from(step);
    }

    fn answered(&self) {
        let mut progress = self.status.0.lock();
        progress.last_success = Some(Stopwatch::start());
        if progress.stats.state != SyncState::Connected {
            progress.stats.state = SyncState::Connected;
            progress.stats.last_error = None;
            drop(progress);
            tracing::info!(target: "limiter::store", redis = self.redis.name(), "sharing counters");
        }
    }

    fn failed(&self, error: &StoreError) {
        let mut progress = self.status.0.lock();
        progress.stats.failed_rounds += 1;
        progress.stats.last_error = Some(error.to_string());
        if progress.stats.state != SyncState::Degraded {
            progress.stats.state = SyncState::Degraded;
            drop(progress);
            tracing::warn!(target: "limiter::store", %error, "not sharing counters, deciding from what this node knows");
        }
    }
}

/// What one batch showed.
#[derive(Default)]
struct Seen {
    refused: u64,
    ahead: u64,
    /// Counters of which Redis knew less than it had confirmed.
    lost: u64,
}

/// Buckets and logs heal by themselves: what Redis does not have of them is told with the next message.
fn is_lost(totals: &OwnTotals, reply: &SyncReply) -> bool {
    match &totals.state {
        OwnState::Windows { acknowledged_current, .. } => {
            reply.known.is_some_and(|known| known < *acknowledged_current)
        }
        OwnState::Bucket { .. } | OwnState::Log { .. } => false,
    }
}

//! What `limiter status` and `/v1/status` show: one reading of everything.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use limiter_common::{acl::Origin, budget::BudgetReason};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::{
    active::SharedActive,
    clock::Stopwatch,
    config::{Config, StoreKind},
    dataplane::{AclListing, BudgetListing, Dataplane, DataplaneError, List, RuleCounter},
    identity::{FollowedKeys, Refusals},
    limiter::Kind,
    metrics::{RuleMetrics, Shared, Snapshot, Source},
    policy::{Adaptive, Limit, Rule},
    pressure::{self, Pressure, Tightened},
    store::{
        breaker::BreakerState,
        lease::Leases,
        memory::MemoryStore,
        redis::{RedisStore, Shard},
        sync::{SyncState, SyncStats, SyncStatus},
    },
    watch::NotInForce,
};

/// The whole answer.
#[derive(Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Status {
    pub version: String,
    pub node: String,
    pub uptime_seconds: u64,
    pub ready: bool,
    /// Something that is configured does not work; `degraded_by` says what.
    pub degraded: bool,
    #[serde(default)]
    pub degraded_by: Vec<String>,
    /// What is right and yet may surprise.
    #[serde(default)]
    pub notes: Vec<String>,
    pub xdp: Option<XdpStatus>,
    pub policy: PolicyStatus,
    /// Why the configuration as it was last read is not in force.
    #[serde(default)]
    pub configuration_error: Option<String>,
    /// Why the key file as it was last read is not in force.
    #[serde(default)]
    pub key_file_error: Option<String>,
    /// Why the keys of tokens as they were last read are not in force.
    #[serde(default)]
    pub token_keys_error: Option<String>,
    pub store: StoreStatus,
    /// Of API keys in Redis; `None` where they are in a file.
    #[serde(default)]
    pub keys: Option<KeysStatus>,
    #[serde(default)]
    pub pressure: PressureStatus,
    pub rules: Vec<RuleStatus>,
}

/// What is known of the origin's load; `None` where nothing was reported lately.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct PressureStatus {
    /// From 0 to 1.
    pub level: Option<f64>,
    pub latency_ms: Option<u64>,
}

/// What a rule that gives way to pressure grants at this time.
#[derive(Debug, Serialize, Deserialize)]
pub struct AdaptiveStatus {
    /// Of its limit, from 0 to 1.
    pub share: f64,
    pub floor: u64,
    /// What requests without a plan of their own may do at once: of the whole limit, and now. `None` when that is unlimited.
    pub ceiling: Option<u64>,
    pub effective_ceiling: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct PolicyStatus {
    pub file: String,
    /// When the policy in force was loaded, in epoch seconds.
    pub loaded_at: u64,
    /// Why the file, as it was last read, is not in force.
    pub error: Option<String>,
    /// Settings of the configuration, as it was last read, that take effect after a restart.
    #[serde(default)]
    pub needs_restart: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct XdpStatus {
    pub interfaces: Vec<InterfaceStatus>,
    /// Interfaces of the configuration on which nothing is limited.
    pub missing: Vec<MissingStatus>,
    pub counters: Vec<PacketCounter>,
    pub budgets: Vec<Entry>,
    /// All entries of operators, and the first `LISTED` of the policy.
    pub allow: Vec<Entry>,
    pub deny: Vec<Entry>,
    /// How many more the policy has.
    #[serde(default)]
    pub more_allow: u64,
    #[serde(default)]
    pub more_deny: u64,
    pub events: Vec<EventStatus>,
    /// What could not be read.
    pub errors: Vec<String>,
}

/// Most prefixes of the policy that are listed: whoever wants to know all reads the policy file, and with a hundred
/// thousand of them an answer would take seconds.
const LISTED: u64 = 1000;

#[derive(Debug, Serialize, Deserialize)]
pub struct InterfaceStatus {
    pub name: String,
    pub mode: String,
    pub program_id: u32,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct MissingStatus {
    pub name: String,
    pub reason: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct PacketCounter {
    pub rule: Option<String>,
    pub verdict: String,
    pub reason: String,
    pub packets: u64,
    pub bytes: u64,
}

/// What became of the events of a class.
#[derive(Debug, Serialize, Deserialize)]
pub struct EventStatus {
    pub class: String,
    pub sent: u64,
    /// Lost, since a CPU sent too many.
    pub rate_limited: u64,
    /// Lost, since the ring was full.
    pub ring_full: u64,
}

/// A prefix with what holds for it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Entry {
    pub prefix: String,
    /// `None`: until it is taken back.
    pub remaining_ms: Option<u64>,
    pub reason: String,
    pub rule: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct StoreStatus {
    pub kind: String,
    pub counters: u64,
    pub capacity: u64,
    /// Counters given up for want of room that still counted, since the start.
    #[serde(default)]
    pub evicted: u64,
    /// `None` for a store without Redis.
    pub state: Option<String>,
    /// Age of the oldest counts that Redis does not have yet.
    pub lag_ms: Option<u64>,
    /// Nodes that share the counters, as Redis last said.
    #[serde(default)]
    pub live_nodes: Option<u32>,
    /// The servers, and whether they are asked.
    #[serde(default)]
    pub shards: Vec<ShardStatus>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ShardStatus {
    pub name: String,
    /// `closed`: it is asked; `open`: it is left alone; `probing`: it is tried.
    pub breaker: String,
    /// Its `maxmemory-policy`, if that may evict counters.
    #[serde(default)]
    pub may_evict: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct KeysStatus {
    pub keys: u64,
    /// Whether Redis answered last.
    pub connected: bool,
    /// Records that cannot be read.
    pub unreadable: u64,
    /// Times that Redis had lost keys.
    pub losses: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct RuleStatus {
    pub id: String,
    pub scope: String,
    pub mode: String,
    /// Requests that this rule decided.
    pub allowed: u64,
    pub denied: u64,
    /// Requests that this rule, in shadow mode, would have denied.
    pub shadow_denied: u64,
    #[serde(default)]
    pub adaptive: Option<AdaptiveStatus>,
}

/// Files that were read and are not in force: what was before stays.
#[derive(Debug, Default)]
struct FilesNotInForce {
    configuration: Option<NotInForce>,
    policy: Option<NotInForce>,
    key_file: Option<NotInForce>,
    token_keys: Option<NotInForce>,
}

impl FilesNotInForce {
    /// Each with its label, and as a sentence begins with it.
    const fn all(&self) -> [(&'static str, &'static str, Option<&NotInForce>); 4] {
        let Self { configuration, policy, key_file, token_keys } = self;
        [
            ("configuration", "the configuration", configuration.as_ref()),
            ("policy", "the policy", policy.as_ref()),
            ("api_keys", "the key file", key_file.as_ref()),
            ("token_keys", "the keys of tokens", token_keys.as_ref()),
        ]
    }
}

/// Reads everything that has a state.
pub struct StatusSource {
    node: String,
    started: Stopwatch,
    active: SharedActive,
    policy_file: String,
    not_in_force: Mutex<FilesNotInForce>,
    notes: Mutex<Vec<String>>,
    needs_restart: Mutex<Vec<&'static str>>,
    store: &'static str,
    counters: Arc<MemoryStore>,
    dataplane: Option<Arc<dyn Dataplane>>,
    shared: Option<(SyncStatus, RedisStore)>,
    leases: Option<Leases>,
    keys: Option<FollowedKeys>,
    refusals: Arc<Refusals>,
    pressure: Arc<Pressure>,
    ready: AtomicBool,
}

impl fmt::Debug for StatusSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StatusSource").field("node", &self.node).finish_non_exhaustive()
    }
}

impl StatusSource {
    pub fn new(
        config: &Config,
        active: SharedActive,
        counters: Arc<MemoryStore>,
        dataplane: Option<Arc<dyn Dataplane>>,
        shared: Option<(SyncStatus, RedisStore)>,
        pressure: Arc<Pressure>,
    ) -> Self {
        Self {
            node: config.node.id.clone(),
            started: Stopwatch::start(),
            active,
            policy_file: config.policy.file.display().to_string(),
            not_in_force: Mutex::default(),
            notes: Mutex::new(Vec::new()),
            needs_restart: Mutex::new(Vec::new()),
            store: match config.store.kind {
                StoreKind::Memory => "memory",
                StoreKind::Redis(_) => "redis",
            },
            counters,
            dataplane,
            shared,
            leases: None,
            keys: None,
            refusals: Arc::default(),
            pressure,
            ready: AtomicBool::new(false),
        }
    }

    /// Says how leases serve.
    #[must_use]
    pub fn with_leases(mut self, leases: Option<Leases>) -> Self {
        self.leases = leases;
        self
    }

    /// Says how API keys in Redis are followed.
    #[must_use]
    pub fn with_keys(mut self, keys: Option<FollowedKeys>) -> Self {
        self.keys = keys;
        self
    }

    /// Says how many keys and tokens were refused.
    #[must_use]
    pub fn with_refusals(mut self, refusals: Arc<Refusals>) -> Self {
        self.refusals = refusals;
        self
    }

    /// Everything is bound and loaded, and requests are answered.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Release);
    }

    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Why the policy file, as it was last read, is not in force.
    pub fn set_policy_error(&self, error: Option<NotInForce>) {
        self.not_in_force.lock().policy = error;
    }

    /// Why the configuration, as it was last read, is not in force.
    pub fn set_configuration_error(&self, error: Option<NotInForce>) {
        self.not_in_force.lock().configuration = error;
    }

    pub fn policy_error(&self) -> Option<String> {
        error_of(self.not_in_force.lock().policy.as_ref())
    }

    /// What is wrong with the key file, and with the keys of tokens, as they were last read.
    pub fn set_key_errors(&self, key_file: Option<&NotInForce>, token_keys: Option<&NotInForce>) {
        let mut shown = self.not_in_force.lock();
        shown.key_file = key_file.cloned();
        shown.token_keys = token_keys.cloned();
    }

    pub fn set_notes(&self, notes: Vec<String>) {
        *self.notes.lock() = notes;
    }

    /// Files that were read and are not in force.
    pub fn files_not_in_force(&self) -> [(&'static str, bool); 4] {
        self.not_in_force.lock().all().map(|(label, _, error)| (label, error.is_some()))
    }

    /// What the running agent does not have of the configuration, as it was last read.
    pub fn set_needs_restart(&self, settings: Vec<&'static str>) {
        *self.needs_restart.lock() = settings;
    }

    pub fn needs_restart(&self) -> Vec<&'static str> {
        self.needs_restart.lock().clone()
    }

    /// Of each rule that gives way to pressure.
    fn shares(&self) -> Vec<(Arc<str>, u32)> {
        let active = self.active.load();
        let shares = active.policy.rules.iter().zip(&active.shares);
        shares.filter_map(|(rule, share)| Some((Arc::clone(&rule.id), share.as_ref()?.share()))).collect()
    }

    /// The servers; of each, the worse of how it is asked by those who share and by those who decide.
    fn shards(&self) -> Vec<Shard> {
        let mut shards = self.shared.as_ref().map(|(_, redis)| redis.shards()).unwrap_or_default();
        for other in self.leases.iter().flat_map(|leases| leases.store().shards()) {
            match shards.iter_mut().find(|shard| shard.name == other.name) {
                Some(shard) => shard.state = shard.state.worse(other.state),
                // Who decides may not know the servers yet.
                None if other.state == BreakerState::Closed => {}
                None => shards.push(other),
            }
        }
        shards
    }

    /// What is configured and does not work.
    fn degraded_by(&self) -> Vec<String> {
        let mut by = Vec::new();
        let sync = self.shared.as_ref().map(|(sync, _)| sync.get());
        if let Some(sync) = sync.filter(|sync| sync.state != SyncState::Connected) {
            by.push(match sync.last_error {
                Some(error) => format!("Redis does not answer, decisions are from local counts: {error}"),
                None => "Redis does not answer, decisions are from local counts".to_owned(),
            });
        }
        // Of several, one may be missing while the others are shared with.
        let in_background = self.shared.as_ref().map(|(_, redis)| redis.shards()).unwrap_or_default();
        let of_requests: Vec<_> = self.leases.iter().flat_map(|leases| leases.store().shards()).collect();
        let is_open = |shards: &[Shard], name: &str| {
            shards.iter().any(|shard| shard.name == name && shard.state != BreakerState::Closed)
        };
        for Shard { name, .. } in self.shards().into_iter().filter(|shard| shard.state != BreakerState::Closed) {
            let by_whom = match (is_open(&in_background, &name), is_open(&of_requests, &name)) {
                (true, false) => "by sharing in the background",
                (false, true) => "by requests that ask it",
                (true, true) | (false, false) => "by sharing in the background and by requests that ask it",
            };
            by.push(format!("Redis {name} is left alone {by_whom}: rules follow their on_store_failure"));
        }
        by.extend(self.keys.iter().filter_map(FollowedKeys::degraded_by));
        let missing = self.dataplane.iter().flat_map(|dataplane| dataplane.missing());
        by.extend(missing.map(|interface| format!("nothing is limited on {}: {}", interface.name, interface.reason)));
        let files = self.not_in_force.lock();
        by.extend(files.all().into_iter().filter_map(|(_, file, error)| Some(error?.at_start.tell(file))));
        by
    }

    pub fn read(&self) -> Status {
        let sync = self.shared.as_ref().map(|(sync, _)| sync.get());
        let memory = self.counters.stats();
        let active = self.active.load();
        let rules = active.policy.rules.iter().zip(&active.metrics).zip(&active.shares);
        let reading = self.pressure.reading();
        let degraded_by = self.degraded_by();
        let [configuration_error, policy_error, key_file_error, token_keys_error] =
            self.not_in_force.lock().all().map(|(.., error)| error_of(error));
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node: self.node.clone(),
            uptime_seconds: self.started.elapsed().as_secs(),
            ready: self.is_ready(),
            degraded: !degraded_by.is_empty(),
            degraded_by,
            notes: self.notes.lock().clone(),
            configuration_error,
            key_file_error,
            token_keys_error,
            xdp: self.dataplane.as_deref().map(xdp),
            policy: PolicyStatus {
                file: self.policy_file.clone(),
                loaded_at: active.loaded_at.get() / 1_000_000,
                error: policy_error,
                needs_restart: self.needs_restart().into_iter().map(str::to_owned).collect(),
            },
            store: StoreStatus {
                kind: self.store.to_owned(),
                counters: memory.counters as u64,
                capacity: memory.capacity as u64,
                evicted: memory.evicted,
                state: sync.as_ref().map(|sync| sync.state.as_str().to_owned()),
                lag_ms: sync.as_ref().map(|sync| u64::try_from(sync.lag.as_millis()).unwrap_or(u64::MAX)),
                live_nodes: self.shared.as_ref().map(|(_, redis)| redis.live_nodes()),
                shards: self.shards().into_iter().map(|shard| shard_status(shard, sync.as_ref())).collect(),
            },
            keys: self.keys.as_ref().map(|keys| {
                let keys = keys.get();
                KeysStatus {
                    keys: keys.keys as u64,
                    connected: keys.connected,
                    unreadable: keys.unreadable as u64,
                    losses: keys.losses,
                }
            }),
            pressure: PressureStatus {
                level: reading.level.map(pressure::fraction),
                latency_ms: reading.latency_us.map(|us| us.div_ceil(1000)),
            },
            rules: rules.map(|((rule, metrics), share)| rule_status(rule, metrics, share.as_ref())).collect(),
        }
    }
}

fn error_of(file: Option<&NotInForce>) -> Option<String> {
    file.map(|file| file.error.clone())
}

fn shard_status(shard: Shard, sync: Option<&SyncStats>) -> ShardStatus {
    let may_evict = sync.and_then(|sync| sync.may_evict.get(&shard.name).cloned());
    ShardStatus { name: shard.name, breaker: shard.state.as_str().to_owned(), may_evict }
}

fn rule_status(rule: &Rule, metrics: &RuleMetrics, share: Option<&Tightened>) -> RuleStatus {
    RuleStatus {
        id: rule.id.to_string(),
        scope: rule.scope.as_str().to_owned(),
        mode: rule.mode.as_str().to_owned(),
        allowed: metrics.decided(Kind::Allowed),
        denied: [Kind::Denied, Kind::Unsatisfiable, Kind::Unavailable].map(|kind| metrics.decided(kind)).iter().sum(),
        shadow_denied: metrics.shadow_denied(),
        adaptive: rule
            .adaptive
            .as_ref()
            .zip(share)
            .map(|(adaptive, tightened)| adaptive_status(rule, adaptive, tightened)),
    }
}

fn adaptive_status(rule: &Rule, adaptive: &Adaptive, tightened: &Tightened) -> AdaptiveStatus {
    let share = tightened.share();
    let effective = match rule.limit {
        Limit::Unlimited => None,
        Limit::Limited(algorithm) => algorithm.tightened(adaptive.floor, adaptive.floor_ceiling, share).ok(),
    };
    AdaptiveStatus {
        share: pressure::fraction(share),
        floor: adaptive.floor,
        ceiling: rule.limit.ceiling(),
        effective_ceiling: effective.map(|algorithm| algorithm.ceiling()),
    }
}

fn xdp(dataplane: &dyn Dataplane) -> XdpStatus {
    let mut errors = Vec::new();
    let mut keep = |error: DataplaneError| errors.push(error.to_string());
    let interfaces = dataplane.interfaces().unwrap_or_else(|error| {
        keep(error);
        Vec::new()
    });
    let counters = dataplane.counters().unwrap_or_else(|error| {
        keep(error);
        Vec::new()
    });
    let events = dataplane.event_counts().unwrap_or_else(|error| {
        keep(error);
        Vec::new()
    });
    let (allow, deny): (Vec<_>, Vec<_>) = dataplane.acl().into_iter().partition(|entry| entry.list == List::Allow);
    let ((allow, more_allow), (deny, more_deny)) = (entries(allow), entries(deny));
    let budget = |budget: BudgetListing| Entry {
        prefix: budget.source.to_string(),
        remaining_ms: Some(millis(budget.remaining)),
        reason: budget.reason.map_or("unknown", BudgetReason::as_str).to_owned(),
        rule: budget.rule.map(|rule| rule.to_string()),
    };
    XdpStatus {
        interfaces: interfaces
            .into_iter()
            .map(|interface| InterfaceStatus {
                name: interface.name.to_string(),
                mode: interface.mode.as_str().to_owned(),
                program_id: interface.program_id,
            })
            .collect(),
        missing: dataplane
            .missing()
            .into_iter()
            .map(|interface| MissingStatus { name: interface.name.to_string(), reason: interface.reason })
            .collect(),
        counters: counters
            .into_iter()
            .map(|counter| PacketCounter {
                rule: counter.rule.map(|rule| rule.to_string()),
                verdict: counter.verdict.as_str().to_owned(),
                reason: counter.verdict.reason().to_owned(),
                packets: counter.counter.packets,
                bytes: counter.counter.bytes,
            })
            .collect(),
        budgets: dataplane.budgets().into_iter().map(budget).collect(),
        allow,
        deny,
        more_allow,
        more_deny,
        events: events
            .into_iter()
            .map(|(class, counts)| EventStatus {
                class: class.as_str().to_owned(),
                sent: counts.sent,
                rate_limited: counts.suppressed,
                ring_full: counts.ring_full,
            })
            .collect(),
        errors,
    }
}

/// A list, and how many prefixes of the policy are left out of it.
fn entries(listing: Vec<AclListing>) -> (Vec<Entry>, u64) {
    let (mut entries, mut of_policy) = (Vec::new(), 0u64);
    for AclListing { prefix, origin, remaining, is_behind_policy, .. } in listing {
        let reason = match origin {
            Origin::Policy => {
                of_policy += 1;
                if of_policy > LISTED {
                    continue;
                }
                "policy"
            }
            Origin::Operator if is_behind_policy => "operator, counts once the policy does not list it",
            Origin::Operator => "operator",
        };
        let remaining_ms = remaining.map(millis);
        entries.push(Entry { prefix: prefix.to_string(), remaining_ms, reason: reason.to_owned(), rule: None });
    }
    (entries, of_policy.saturating_sub(LISTED))
}

fn millis(remaining: Duration) -> u64 {
    u64::try_from(remaining.as_millis()).unwrap_or(u64::MAX)
}

impl Source for Arc<StatusSource> {
    fn snapshot(&self) -> Snapshot {
        let (mut packets, mut maps, mut interfaces, mut events) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        if let Some(dataplane) = &self.dataplane {
            let counters = dataplane.counters().unwrap_or_else(|error| {
                tracing::warn!(target: "limiter::dataplane", %error, "reading the packet counters failed");
                Vec::new()
            });
            let counter =
                |counter: RuleCounter| (counter.rule.map(|rule| rule.to_string()), counter.verdict, counter.counter);
            packets = counters.into_iter().map(counter).collect();
            let missing = dataplane.missing().into_iter().map(|interface| (interface.name, false));
            let attached = dataplane.interfaces().unwrap_or_else(|error| {
                tracing::warn!(target: "limiter::dataplane", %error, "reading the interfaces failed");
                Vec::new()
            });
            interfaces = attached.into_iter().map(|interface| (interface.name, true)).chain(missing).collect();
            maps = dataplane.map_usage().unwrap_or_else(|error| {
                tracing::warn!(target: "limiter::dataplane", %error, "reading the sizes of maps failed");
                Vec::new()
            });
            events = dataplane.event_counts().unwrap_or_else(|error| {
                tracing::warn!(target: "limiter::dataplane", %error, "reading the counts of events failed");
                Vec::new()
            });
        }
        Snapshot {
            packets,
            maps,
            interfaces,
            events,
            memory: self.counters.stats(),
            shares: self.shares(),
            reports: self.pressure.counts(),
            files_not_in_force: self.files_not_in_force(),
            pressure: self.pressure.reading(),
            shared: self.shared.as_ref().map(|(sync, redis)| Shared {
                sync: sync.get(),
                calls: redis.calls(),
                shards: self.shards(),
                breakers: redis.breaker_counts(),
                live_nodes: redis.live_nodes(),
            }),
            overshoot_bounds: self.shared.as_ref().map(|(sync, _)| sync.overshoot_bounds()).unwrap_or_default(),
            leases: self.leases.as_ref().map(Leases::stats),
            keys: self.keys.as_ref().map(FollowedKeys::get),
            refused_credentials: self.refusals.counts().collect(),
        }
    }
}

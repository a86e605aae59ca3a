//! Every metric, declared once. The only file with metric names.
//!
//! Labels come from rules, enums and map names; never from an address or a key.

#[cfg(test)]
mod documented;
mod durations;

use std::{
    collections::HashMap,
    fmt,
    hash::BuildHasher as _,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use foldhash::fast::FixedState;
use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text::encode},
    metrics::{
        MetricType,
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::{ConstGauge, Gauge},
        info::Info,
    },
    registry::{Registry, Unit},
};

use limiter_common::{
    event::{EventClass, EventCounts, EventKind},
    schema::SCHEMA_VERSION,
    stats,
    time::UnixMicros,
    verdict::Verdict,
};

use self::durations::{ConstDurations, Durations};
use crate::{
    dataplane::MapUsage,
    identity::key_follower::FollowedState,
    limiter::{CheckSource, Kind},
    policy::{BypassKind, FailurePolicy, Precision, Rule},
    pressure,
    store::{
        breaker::BreakerState,
        lease::LeaseStats,
        memory::MemoryStats,
        redis::{BreakerCounts, CallStats, DURATION_BOUNDS_US, Shard},
        sync::{SyncState, SyncStats},
    },
};

/// Labels of `limiter_checks_total`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CheckLabels {
    rule: String,
    decision: &'static str,
    /// What the decision was made from.
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RuleLabels {
    rule: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PushLabels {
    reason: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BypassLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    rule: String,
    policy: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReloadLabels {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EventLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LossLabels {
    class: &'static str,
    cause: &'static str,
}

/// How an attempt to put a changed policy in force ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadResult {
    Ok,
    /// The policy is wrong.
    Invalid,
    /// The policy is right, and the kernel did not take it.
    Failed,
}

impl ReloadResult {
    pub const ALL: &[Self] = &[Self::Ok, Self::Invalid, Self::Failed];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Invalid => "invalid",
            Self::Failed => "failed",
        }
    }
}

/// All metrics of the agent's own.
pub struct Metrics {
    registry: Registry,
    checks: Family<CheckLabels, Counter>,
    store_failures: Family<FailureLabels, Counter>,
    overshoot: Family<RuleLabels, Gauge>,
    /// By rule, its limits and since when they hold.
    limits: Mutex<HashMap<Arc<str>, (u64, UnixMicros)>>,
    bypassed: Family<BypassLabels, Counter>,
    remembered: RememberedMetrics,
    check_duration: Durations<{ CHECK_BUCKETS_NS.len() }>,
    pushes: Family<PushLabels, Counter>,
    policy_reloads: Family<ReloadLabels, Counter>,
    bad_requests: Counter,
    events: [Counter; EventKind::ALL.len()],
    held_answers: Gauge,
    without_rule: [Counter; Kind::ALL.len()],
}

/// Denials that were remembered, whatever rules they are of.
#[derive(Clone, Debug, Default)]
pub struct RememberedMetrics(Counter);

impl RememberedMetrics {
    pub fn count(&self) {
        self.0.inc();
    }

    pub fn counted(&self) -> u64 {
        self.0.get()
    }
}

/// Counters of one request rule, resolved once per policy.
#[derive(Clone, Debug)]
pub struct RuleMetrics {
    /// By [`Kind`], of decisions from memory.
    decisions: [Counter; Kind::ALL.len()],
    /// The same of other sources that the rule's precision has.
    elsewhere: Vec<(CheckSource, [Counter; Kind::ALL.len()])>,
    shadow_denied: Counter,
    also_denied: Counter,
    /// By [`FailurePolicy`].
    store_failures: [Counter; FailurePolicy::ALL.len()],
    overshoot: Gauge,
    /// Before, a counter may be above its ceiling since that was lowered.
    overshoot_from: UnixMicros,
}

impl RuleMetrics {
    pub fn count(&self, kind: Kind, source: CheckSource) {
        let elsewhere = self.elsewhere.iter().find(|(other, _)| *other == source);
        elsewhere.map_or(&self.decisions, |(_, decisions)| decisions)[kind as usize].inc();
    }

    /// From wherever.
    pub fn decided(&self, kind: Kind) -> u64 {
        let elsewhere: u64 = self.elsewhere.iter().map(|(_, decisions)| decisions[kind as usize].get()).sum();
        self.decisions[kind as usize].get() + elsewhere
    }

    /// A request came while the rule's counter could not be shared.
    pub fn count_failure(&self, policy: FailurePolicy) {
        self.store_failures[policy as usize].inc();
    }

    pub fn failures(&self, policy: FailurePolicy) -> u64 {
        self.store_failures[policy as usize].get()
    }

    /// A counter stands so far above its ceiling.
    #[inline]
    pub fn saw_overshoot(&self, units: u64, now: UnixMicros) {
        if units > 0 && now >= self.overshoot_from {
            self.overshoot.inner().fetch_max(signed(units), Ordering::Relaxed);
        }
    }

    /// The most so far.
    pub fn overshoot(&self) -> u64 {
        u64::try_from(self.overshoot.get()).unwrap_or(0)
    }

    pub fn count_shadow_denied(&self) {
        self.shadow_denied.inc();
    }

    pub fn shadow_denied(&self) -> u64 {
        self.shadow_denied.get()
    }

    /// The rule denies a request as well, of which another one decided the answer.
    pub fn count_also_denied(&self) {
        self.also_denied.inc();
    }

    pub fn also_denied(&self) -> u64 {
        self.also_denied.get()
    }
}

/// Counters of requests that a bypass lets through, by [`BypassKind`].
#[derive(Clone, Debug)]
pub struct BypassMetrics([Counter; BypassKind::ALL.len()]);

impl BypassMetrics {
    pub fn count(&self, kind: BypassKind) {
        self.0[kind as usize].inc();
    }
}

/// Counts answers as held while it lives.
#[derive(Debug)]
pub struct HeldAnswers {
    gauge: Gauge,
    answers: i64,
}

impl Drop for HeldAnswers {
    fn drop(&mut self) {
        self.gauge.dec_by(self.answers);
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// From half a microsecond, what a decision in memory takes, to 10 ms, what none may take.
const CHECK_BUCKETS_NS: [u64; 14] = [
    500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000, 512_000, 1_000_000, 5_000_000,
    10_000_000,
];

/// The rule label of requests that no rule applies to.
const NO_RULE: &str = "";

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("limiter");
        let checks = Family::<CheckLabels, Counter>::default();
        registry.register("checks", "Requests decided, by the rule that decided", checks.clone());
        let store_failures = Family::<FailureLabels, Counter>::default();
        let help = "Requests to a rule whose counter could not be shared, by what on_store_failure did about it";
        registry.register("store_failures", help, store_failures.clone());
        let overshoot = Family::<RuleLabels, Gauge>::default();
        let help = "The most units that a counter was seen above its ceiling, since other nodes had admitted them";
        registry.register("overshoot_units", help, overshoot.clone());
        let check_duration = Durations::new(CHECK_BUCKETS_NS.map(Duration::from_nanos));
        registry.register_with_unit(
            "check_duration",
            "Time from a parsed request to its decision",
            Unit::Seconds,
            check_duration.clone(),
        );
        let pushes = Family::<PushLabels, Counter>::default();
        registry.register("pushes", "Budgets pushed into the BPF maps", pushes.clone());
        let policy_reloads = Family::<ReloadLabels, Counter>::default();
        registry.register("policy_reloads", "Changed policies, by whether they are in force", policy_reloads.clone());
        for result in ReloadResult::ALL {
            // Present from the start, so that the first failure is an increase.
            drop(policy_reloads.get_or_create(&ReloadLabels { result: result.as_str() }));
        }
        let bypassed = Family::<BypassLabels, Counter>::default();
        registry.register("bypassed", "Requests that no limit applied to, by what lets them through", bypassed.clone());
        let remembered = RememberedMetrics::default();
        let help = "Denials given because the same request was denied before, without a look at its counters";
        registry.register("remembered_denials", help, remembered.0.clone());
        let held_answers = Gauge::default();
        let help = "Requests that wait for their turn in a leaky bucket";
        registry.register("held_answers", help, held_answers.clone());
        let bad_requests = Counter::default();
        registry.register("bad_requests", "Requests to the API that could not be understood", bad_requests.clone());
        let events = Family::<EventLabels, Counter>::default();
        registry.register("events", "Events of the XDP program that were read", events.clone());
        let events =
            EventKind::ALL.iter().map(|kind| events.get_or_create(&EventLabels { kind: kind.as_str() }).clone());
        let events = events.collect::<Vec<_>>().try_into().unwrap_or_else(|_| unreachable!("one a kind"));
        let without_rule = Kind::ALL.iter().map(|kind| {
            let labels =
                CheckLabels { rule: NO_RULE.into(), decision: kind.as_str(), source: CheckSource::Memory.as_str() };
            checks.get_or_create(&labels).clone()
        });
        let without_rule = without_rule.collect::<Vec<_>>().try_into().unwrap_or_else(|_| unreachable!("one a kind"));
        Self {
            registry,
            checks,
            store_failures,
            overshoot,
            limits: Mutex::default(),
            bypassed,
            remembered,
            check_duration,
            pushes,
            policy_reloads,
            bad_requests,
            events,
            held_answers,
            without_rule,
        }
    }

    /// The counters of a rule that memory decides. They go on where they were when a policy is loaded again.
    pub fn rule(&self, id: &str) -> RuleMetrics {
        self.rule_from(id, CheckSource::of(Precision::Async))
    }

    fn rule_from(&self, id: &str, sources: &[CheckSource]) -> RuleMetrics {
        let counter = |decision, source: CheckSource| {
            let labels = CheckLabels { rule: id.into(), decision, source: source.as_str() };
            self.checks.get_or_create(&labels).clone()
        };
        let of = |source: CheckSource| {
            let decisions: Vec<Counter> = Kind::ALL.iter().map(|kind| counter(kind.as_str(), source)).collect();
            decisions.try_into().unwrap_or_else(|_| unreachable!("one a kind"))
        };
        let elsewhere = sources.iter().filter(|source| **source != CheckSource::Memory);
        let (decisions, elsewhere) =
            (of(CheckSource::Memory), elsewhere.map(|source| (*source, of(*source))).collect());
        let failures = FailurePolicy::ALL.iter().map(|policy| {
            let labels = FailureLabels { rule: id.into(), policy: policy.as_str() };
            self.store_failures.get_or_create(&labels).clone()
        });
        let store_failures: Vec<Counter> = failures.collect();
        let store_failures = store_failures.try_into().unwrap_or_else(|_| unreachable!("one a policy"));
        let overshoot = self.overshoot.get_or_create(&RuleLabels { rule: id.into() }).clone();
        let overshoot_from = UnixMicros::new(0);
        let [shadow_denied, also_denied] =
            ["shadow_denied", "also_denied"].map(|decision| counter(decision, CheckSource::Memory));
        RuleMetrics { decisions, elsewhere, shadow_denied, also_denied, store_failures, overshoot, overshoot_from }
    }

    /// The same of a rule of a policy that is put in force at `loaded_at`.
    pub fn rule_in_force(&self, rule: &Rule, loaded_at: UnixMicros) -> RuleMetrics {
        let counters = self.rule_from(&rule.id, CheckSource::of(rule.precision));
        RuleMetrics { overshoot_from: self.overshoot_from(rule, loaded_at), ..counters }
    }

    /// Two windows after the rule's limits changed; at once where it is new.
    fn overshoot_from(&self, rule: &Rule, loaded_at: UnixMicros) -> UnixMicros {
        let mut overrides: Vec<_> = rule.overrides.iter().collect();
        overrides.sort_unstable_by_key(|(client, _)| Arc::clone(client));
        let what = format!("{:?} {:?} {overrides:?}", rule.limit, rule.plans);
        let hash = FixedState::default().hash_one(what);
        let after = UnixMicros::new(loaded_at.get().saturating_add(rule.window_us.saturating_mul(2)));
        let mut limits = self.limits.lock();
        let known = limits.entry(Arc::clone(&rule.id)).or_insert((hash, UnixMicros::new(0)));
        if known.0 != hash {
            *known = (hash, after);
        }
        known.1
    }

    /// The counters of bypassed requests, present from the start.
    pub fn bypassed(&self) -> BypassMetrics {
        let counter = |kind: &BypassKind| self.bypassed.get_or_create(&BypassLabels { kind: kind.as_str() }).clone();
        let counters = BypassKind::ALL.iter().map(counter).collect::<Vec<_>>();
        BypassMetrics(counters.try_into().unwrap_or_else(|_| unreachable!("one a kind")))
    }

    pub fn remembered(&self) -> RememberedMetrics {
        self.remembered.clone()
    }

    pub fn decided_without_rule(&self, kind: Kind) {
        self.without_rule[kind as usize].inc();
    }

    pub fn observe_check(&self, took: Duration) {
        self.check_duration.observe(took);
    }

    pub fn pushed(&self, reason: &'static str, result: &'static str) {
        self.pushes.get_or_create(&PushLabels { reason, result }).inc();
    }

    pub fn policy_reloaded(&self, result: ReloadResult) {
        self.policy_reloads.get_or_create(&ReloadLabels { result: result.as_str() }).inc();
    }

    pub fn event(&self, kind: EventKind) {
        self.events[kind as usize].inc();
    }

    pub fn held(&self, answers: usize) -> HeldAnswers {
        let (gauge, answers) = (self.held_answers.clone(), signed(answers as u64));
        gauge.inc_by(answers);
        HeldAnswers { gauge, answers }
    }

    pub fn bad_request(&self) {
        self.bad_requests.inc();
    }

    /// Adds what is read at the moment of a scrape.
    pub fn register_source(&mut self, source: impl Source) {
        self.registry.register_collector(Box::new(Scraped(source)));
    }

    /// The OpenMetrics text format.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// Gives the state of everything that keeps its own counters.
pub trait Source: fmt::Debug + Send + Sync + 'static {
    fn snapshot(&self) -> Snapshot;
}

/// Counters and levels at one moment.
#[derive(Debug)]
pub struct Snapshot {
    /// Of the XDP program: packets and bytes by rule (`None` where none decided) and verdict.
    pub packets: Vec<(Option<String>, Verdict, stats::Counter)>,
    pub maps: Vec<MapUsage>,
    /// Of the configuration, and whether packets are limited there.
    pub interfaces: Vec<(Arc<str>, bool)>,
    /// What became of the events of the XDP program.
    pub events: Vec<(EventClass, EventCounts)>,
    pub memory: MemoryStats,
    /// Of rules that give way to pressure, what they grant of their limit, in millionths.
    pub shares: Vec<(Arc<str>, u32)>,
    /// Reports of load by what they were.
    pub reports: [(&'static str, u64); 3],
    /// Files by what they hold, and whether they cannot be used as they were last read.
    pub files_not_in_force: [(&'static str, bool); 4],
    pub pressure: pressure::Reading,
    /// Sharing through Redis; `None` for a node alone.
    pub shared: Option<Shared>,
    /// By rule, how far above its ceiling nodes may let a counter get.
    pub overshoot_bounds: Vec<(Arc<str>, u64)>,
    /// `None` for a node alone.
    pub leases: Option<LeaseStats>,
    /// API keys in Redis; `None` where they are in a file.
    pub keys: Option<FollowedState>,
    /// Tokens that are not valid, by why; none where tokens are not believed.
    pub refused_credentials: Vec<([&'static str; 2], u64)>,
}

/// Sharing through Redis.
#[derive(Debug)]
pub struct Shared {
    pub sync: SyncStats,
    pub calls: CallStats,
    pub shards: Vec<Shard>,
    pub breakers: BreakerCounts,
    pub live_nodes: u32,
}

#[derive(Debug)]
struct Scraped<S>(S);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PacketLabels {
    rule: String,
    verdict: &'static str,
    reason: &'static str,
}

impl<S: Source> Collector for Scraped<S> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let snapshot = self.0.snapshot();
        type Pick = fn(&stats::Counter) -> u64;
        let families: [(&str, &str, Pick); 2] = [
            ("xdp_packets", "Packets seen by the XDP program", |counter| counter.packets),
            ("xdp_bytes", "Bytes seen by the XDP program, with Ethernet headers", |counter| counter.bytes),
        ];
        for (name, help, pick) in families {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (rule, verdict, counter) in &snapshot.packets {
                let labels = PacketLabels {
                    rule: rule.clone().unwrap_or_default(),
                    verdict: verdict.as_str(),
                    reason: verdict.reason(),
                };
                ConstCounter::new(pick(counter)).encode(family.encode_family(&labels)?)?;
            }
        }
        let mut gauges = |name: &str, help: &str, value: fn(&MapUsage) -> u64| {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for usage in &snapshot.maps {
                ConstGauge::new(signed(value(usage))).encode(family.encode_family(&[("map", usage.map)])?)?;
            }
            Ok(())
        };
        gauges("map_entries", "Entries of a BPF map", |usage| usage.entries)?;
        gauges("map_capacity", "Most entries of a BPF map", |usage| usage.capacity)?;
        let help =
            "1 while the XDP program limits packets on an interface, 0 while the interface or the program is missing";
        let mut family = encoder.encode_descriptor("xdp_interface_attached", help, None, MetricType::Gauge)?;
        for (interface, is_attached) in &snapshot.interfaces {
            let labels = [("interface", &**interface)];
            ConstGauge::new(i64::from(*is_attached)).encode(family.encode_family(&labels)?)?;
        }
        let help = "1 while a file is not in force as it was last read: what was before stays, and a start would differ or fail";
        let mut family = encoder.encode_descriptor("file_not_in_force", help, None, MetricType::Gauge)?;
        for (file, is_wrong) in snapshot.files_not_in_force {
            ConstGauge::new(i64::from(is_wrong)).encode(family.encode_family(&[("file", file)])?)?;
        }
        encode_losses(&mut encoder, &snapshot.events)?;
        encode_pressure(&mut encoder, &snapshot)?;
        encode_memory(&mut encoder, &snapshot.memory)?;
        if let Some(shared) = &snapshot.shared {
            encode_shared(&mut encoder, shared)?;
            encode_breakers(&mut encoder, shared)?;
            encode_overshoot_bounds(&mut encoder, &snapshot.overshoot_bounds)?;
        }
        if let Some(leases) = &snapshot.leases {
            encode_leases(&mut encoder, leases)?;
        }
        if let Some(keys) = &snapshot.keys {
            encode_keys(&mut encoder, keys)?;
        }
        let help = "API keys and tokens that were answered with 401, by why they are not valid";
        let mut family = encoder.encode_descriptor("credentials_refused", help, None, MetricType::Counter)?;
        for ([credential, reason], count) in &snapshot.refused_credentials {
            let labels = [("credential", *credential), ("reason", *reason)];
            ConstCounter::new(*count).encode(family.encode_family(&labels)?)?;
        }
        let info =
            encoder.encode_descriptor("build", "Version of the agent and of its maps", None, MetricType::Info)?;
        let schema = SCHEMA_VERSION.to_string();
        Info::new([("version", env!("CARGO_PKG_VERSION")), ("schema", &schema)]).encode(info)
    }
}

fn encode_losses(encoder: &mut DescriptorEncoder<'_>, events: &[(EventClass, EventCounts)]) -> fmt::Result {
    let help = "Events of the XDP program that nobody will read: since a CPU sent too many, or since the ring was full";
    let mut family = encoder.encode_descriptor("events_lost", help, None, MetricType::Counter)?;
    for (class, counts) in events {
        for (cause, count) in [("rate_limited", counts.suppressed), ("ring_full", counts.ring_full)] {
            let labels = LossLabels { class: class.as_str(), cause };
            ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn encode_pressure(encoder: &mut DescriptorEncoder<'_>, snapshot: &Snapshot) -> fmt::Result {
    let help = "What a rule that gives way to pressure grants of its limit, from 0 to 1";
    let mut family = encoder.encode_descriptor("adaptive_share", help, None, MetricType::Gauge)?;
    for (rule, share) in &snapshot.shares {
        let labels = [("rule", &**rule)];
        ConstGauge::new(pressure::fraction(*share)).encode(family.encode_family(&labels)?)?;
    }
    let help = "Reports of load; refused are those that were not believed or not understood";
    let mut family = encoder.encode_descriptor("pressure_reports", help, None, MetricType::Counter)?;
    for (kind, count) in snapshot.reports {
        ConstCounter::new(count).encode(family.encode_family(&[("kind", kind)])?)?;
    }
    if let Some(level) = snapshot.pressure.level {
        let help = "How loaded the origin says it is, from 0 to 1; absent when nobody has said so lately";
        let gauge = encoder.encode_descriptor("pressure_level", help, None, MetricType::Gauge)?;
        ConstGauge::new(pressure::fraction(level)).encode(gauge)?;
    }
    if let Some(latency_us) = snapshot.pressure.latency_us {
        let help = "How long the origin takes to answer, as reported; absent when nobody has said so lately";
        let gauge = encoder.encode_descriptor("pressure_latency", help, Some(&Unit::Seconds), MetricType::Gauge)?;
        ConstGauge::new(Duration::from_micros(latency_us).as_secs_f64()).encode(gauge)?;
    }
    Ok(())
}

fn encode_memory(encoder: &mut DescriptorEncoder<'_>, memory: &MemoryStats) -> fmt::Result {
    for (name, help, value) in [
        ("counters", "Counters in memory", memory.counters),
        ("counters_capacity", "Most counters in memory", memory.capacity),
        ("sync_pending", "Counters that wait to be shared", memory.queued),
    ] {
        let gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(signed(value as u64)).encode(gauge)?;
    }
    for (name, help, value) in [
        ("counters_evicted", "Counters given up because memory was full", memory.evicted),
        ("sync_late_units", "Units whose window was over before Redis had them", memory.late_units),
    ] {
        ConstCounter::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
    }
    let help = "Units that Redis will not hear of, by why: their window was over, or their counter was given up";
    let mut family = encoder.encode_descriptor("sync_dropped_units", help, None, MetricType::Counter)?;
    for (reason, count) in [("window_over", memory.late_units), ("evicted", memory.evicted_unconfirmed_units)] {
        ConstCounter::new(count).encode(family.encode_family(&[("reason", reason)])?)?;
    }
    Ok(())
}

fn encode_shared(encoder: &mut DescriptorEncoder<'_>, shared: &Shared) -> fmt::Result {
    let Shared { sync, calls, .. } = shared;
    let mut family = encoder.encode_descriptor("store_calls", "Calls to Redis", None, MetricType::Counter)?;
    for (result, count) in [
        ("ok", calls.ok),
        ("timeout", calls.timeout),
        ("unavailable", calls.unavailable),
        ("bad_reply", calls.bad_reply),
    ] {
        ConstCounter::new(count).encode(family.encode_family(&[("result", result)])?)?;
    }
    for (name, help, value) in [
        (
            "sync_lost_counters",
            "Counters that Redis knew less of than it had confirmed or said",
            sync.lost_counters + calls.restored_counters,
        ),
        ("sync_refused_counters", "Counters that Redis refused or answered unintelligibly", sync.refused_counters),
        ("sync_ahead", "Counts of windows that had not begun by Redis' clock", sync.ahead),
        ("sync_batches", "Batches of counters that Redis took", sync.batches),
        ("sync_counters", "Counters in those batches", sync.counters_sent),
        ("sync_refills", "Times that a Redis was found to have lost counters, and was told them again", sync.refills),
        ("sync_early", "Exchanges before their time, since a counter came near its ceiling", sync.early_rounds),
    ] {
        ConstCounter::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
    }
    let help = "1 while Redis answers, 0 while decisions are from local counts alone";
    let connected = encoder.encode_descriptor("store_connected", help, None, MetricType::Gauge)?;
    ConstGauge::new(i64::from(sync.state == SyncState::Connected)).encode(connected)?;
    let help = "Age of the oldest count that Redis does not have yet";
    let lag = encoder.encode_descriptor("sync_lag", help, Some(&Unit::Seconds), MetricType::Gauge)?;
    ConstGauge::new(sync.lag.as_secs_f64()).encode(lag)?;
    let help = "Counters in the last batch";
    let batch = encoder.encode_descriptor("sync_last_batch", help, None, MetricType::Gauge)?;
    ConstGauge::new(signed(sync.last_batch as u64)).encode(batch)?;
    let help = "Time of calls to Redis, each with all that was sent at once";
    let durations =
        encoder.encode_descriptor("store_call_duration", help, Some(&Unit::Seconds), MetricType::Histogram)?;
    ConstDurations { bounds_us: &DURATION_BOUNDS_US, counts: &calls.buckets, sum_us: calls.duration_us }
        .encode(durations)
}

fn encode_breakers(encoder: &mut DescriptorEncoder<'_>, shared: &Shared) -> fmt::Result {
    let help = "Whether a Redis is asked (0), left alone since it fails (1), or tried (2): the worse of how the background and requests \
                have it";
    let mut family = encoder.encode_descriptor("breaker_state", help, None, MetricType::Gauge)?;
    for shard in &shared.shards {
        let state = match shard.state {
            BreakerState::Closed => 0i64,
            BreakerState::Open => 1,
            BreakerState::Probing => 2,
        };
        ConstGauge::new(state).encode(family.encode_family(&[("shard", &*shard.name)])?)?;
    }
    let BreakerCounts { opened, closed, failed_probes, refused, .. } = shared.breakers;
    let help =
        "Times that a Redis was left alone (open), and asked again (closed), by the background and by requests alike";
    let mut family = encoder.encode_descriptor("breaker_transitions", help, None, MetricType::Counter)?;
    for (to, count) in [("open", opened), ("closed", closed)] {
        ConstCounter::new(count).encode(family.encode_family(&[("to", to)])?)?;
    }
    for (name, help, value) in [
        ("breaker_failed_probes", "Tries of a Redis that is left alone, which failed", failed_probes),
        ("breaker_refused", "Calls that were not made, since their Redis is left alone", refused),
    ] {
        ConstCounter::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
    }
    let help = "Nodes that share counters through this Redis, as it last said";
    let nodes = encoder.encode_descriptor("live_nodes", help, None, MetricType::Gauge)?;
    ConstGauge::new(i64::from(shared.live_nodes)).encode(nodes)
}

fn encode_overshoot_bounds(encoder: &mut DescriptorEncoder<'_>, bounds: &[(Arc<str>, u64)]) -> fmt::Result {
    let help = "Units above its ceiling that nodes may let one counter of an async rule get: nodes times the most that this one \
                has admitted between two exchanges";
    let mut family = encoder.encode_descriptor("overshoot_bound_units", help, None, MetricType::Gauge)?;
    for (rule, bound) in bounds {
        ConstGauge::new(signed(*bound)).encode(family.encode_family(&[("rule", &**rule)])?)?;
    }
    Ok(())
}

fn encode_leases(encoder: &mut DescriptorEncoder<'_>, leases: &LeaseStats) -> fmt::Result {
    let help = "Requests that found their cost in a lease, that waited for Redis, or that a lease refused";
    let mut family = encoder.encode_descriptor("lease_requests", help, None, MetricType::Counter)?;
    for (result, count) in [("hit", leases.hits), ("miss", leases.misses), ("refused", leases.refusals)] {
        ConstCounter::new(count).encode(family.encode_family(&[("result", result)])?)?;
    }
    let help = "Units lent by Redis, given back in time, and left over when their window ended";
    let mut family = encoder.encode_descriptor("lease_units", help, None, MetricType::Counter)?;
    for (fate, count) in [("lent", leases.lent), ("returned", leases.returned), ("expired", leases.expired)] {
        ConstCounter::new(count).encode(family.encode_family(&[("fate", fate)])?)?;
    }
    Ok(())
}

fn encode_keys(encoder: &mut DescriptorEncoder<'_>, keys: &FollowedState) -> fmt::Result {
    for (name, help, value) in [
        ("key_store_keys", "API keys that are known, of the key store in Redis", keys.keys as u64),
        ("key_store_unreadable", "Records of the key store in Redis that cannot be read", keys.unreadable as u64),
        (
            "key_store_connected",
            "1 while the API keys in Redis are followed, 0 while the last known ones are in force",
            u64::from(keys.connected && keys.problem.is_none()),
        ),
    ] {
        let gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(signed(value)).encode(gauge)?;
    }
    let help = "Times that Redis was found to have lost API keys, which stayed in force and were given back to it";
    let losses = encoder.encode_descriptor("key_store_losses", help, None, MetricType::Counter)?;
    ConstCounter::new(keys.losses).encode(losses)
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

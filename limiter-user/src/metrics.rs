//! Every metric, declared once. The only file with metric names.
//!
//! Labels come from rules, enums and map names; never from an address or a key.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text::encode},
    metrics::{
        MetricType,
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::ConstGauge,
        histogram::Histogram,
    },
    registry::{Registry, Unit},
};

use limiter_common::{stats, verdict::Verdict};

use crate::limiter::Kind;

/// Labels of `limiter_checks_total`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CheckLabels {
    rule: String,
    decision: &'static str,
    /// What the decision was made from.
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PushLabels {
    reason: &'static str,
    result: &'static str,
}

/// All metrics of the agent's own.
pub struct Metrics {
    registry: Registry,
    checks: Family<CheckLabels, Counter>,
    check_duration: Histogram,
    pushes: Family<PushLabels, Counter>,
    bad_requests: Counter,
    without_rule: [Counter; Kind::ALL.len()],
}

/// Counters of one request rule, resolved once per policy.
#[derive(Clone, Debug)]
pub struct RuleMetrics {
    /// By [`Kind`].
    pub(crate) decisions: [Counter; Kind::ALL.len()],
    pub(crate) shadow_denied: Counter,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Seconds: from half a microsecond, what a decision in memory takes, to 10 ms, what none may take.
const CHECK_BUCKETS: [f64; 14] =
    [5e-7, 1e-6, 2e-6, 4e-6, 8e-6, 1.6e-5, 3.2e-5, 6.4e-5, 1.28e-4, 2.56e-4, 5.12e-4, 1e-3, 5e-3, 1e-2];

const MEMORY: &str = "memory";
/// The rule label of requests that no rule applies to.
const NO_RULE: &str = "";

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("limiter");
        let checks = Family::<CheckLabels, Counter>::default();
        registry.register("checks", "Requests decided, by the rule that decided", checks.clone());
        let check_duration = Histogram::new(CHECK_BUCKETS);
        registry.register_with_unit(
            "check_duration",
            "Time from a parsed request to its decision",
            Unit::Seconds,
            check_duration.clone(),
        );
        let pushes = Family::<PushLabels, Counter>::default();
        registry.register("pushes", "Budgets pushed into the BPF maps", pushes.clone());
        let bad_requests = Counter::default();
        registry.register("bad_requests", "Requests to the API that could not be understood", bad_requests.clone());
        let without_rule = Kind::ALL.iter().map(|kind| {
            let labels = CheckLabels { rule: NO_RULE.into(), decision: kind.as_str(), source: MEMORY };
            checks.get_or_create(&labels).clone()
        });
        let without_rule = without_rule.collect::<Vec<_>>().try_into().unwrap_or_else(|_| unreachable!("one a kind"));
        Self { registry, checks, check_duration, pushes, bad_requests, without_rule }
    }

    /// The counters of a rule. They go on where they were when a policy is loaded again.
    pub fn rule(&self, id: &str) -> RuleMetrics {
        let counter = |decision| {
            self.checks.get_or_create(&CheckLabels { rule: id.into(), decision, source: MEMORY }).clone()
        };
        let decisions: Vec<Counter> = Kind::ALL.iter().map(|kind| counter(kind.as_str())).collect();
        let decisions = decisions.try_into().unwrap_or_else(|_| unreachable!("one a kind"));
        RuleMetrics { decisions, shadow_denied: counter("shadow_denied") }
    }

    pub fn decided_without_rule(&self, kind: Kind) {
        self.without_rule[kind as usize].inc();
    }

    pub fn observe_check(&self, seconds: f64) {
        self.check_duration.observe(seconds);
    }

    pub fn pushed(&self, reason: &'static str, result: &'static str) {
        self.pushes.get_or_create(&PushLabels { reason, result }).inc();
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
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Of the XDP program: packets and bytes by rule (`None` where none decided) and verdict.
    pub packets: Vec<(Option<String>, Verdict, stats::Counter)>,
    pub maps: Vec<MapUsage>,
    pub store: Option<StoreSnapshot>,
    pub version: &'static str,
    pub schema: u32,
}

#[derive(Clone, Debug)]
pub struct MapUsage {
    pub map: &'static str,
    /// `None` where counting would read the whole map.
    pub entries: Option<u64>,
    pub capacity: u64,
}

/// The Redis store, as its background worker sees it.
#[derive(Clone, Debug, Default)]
pub struct StoreSnapshot {
    /// By result: `ok`, `timeout`, `unavailable`, `bad_reply`.
    pub calls: Vec<(&'static str, u64)>,
    pub connected: bool,
    /// Age of the oldest count that Redis does not have yet.
    pub lag_seconds: f64,
    /// Counts of windows that were over before they could be shared.
    pub late: u64,
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
        let mut entries = encoder.encode_descriptor("map_entries", "Entries of a BPF map", None, MetricType::Gauge)?;
        for usage in &snapshot.maps {
            if let Some(count) = usage.entries {
                ConstGauge::new(signed(count)).encode(entries.encode_family(&[("map", usage.map)])?)?;
            }
        }
        let mut capacity =
            encoder.encode_descriptor("map_capacity", "Most entries of a BPF map", None, MetricType::Gauge)?;
        for usage in &snapshot.maps {
            ConstGauge::new(signed(usage.capacity)).encode(capacity.encode_family(&[("map", usage.map)])?)?;
        }
        if let Some(store) = &snapshot.store {
            let mut calls = encoder.encode_descriptor("store_calls", "Calls to Redis", None, MetricType::Counter)?;
            for (result, count) in &store.calls {
                ConstCounter::new(*count).encode(calls.encode_family(&[("result", *result)])?)?;
            }
            let help = "1 while Redis answers, 0 while decisions are from local counts alone";
            let connected = encoder.encode_descriptor("store_connected", help, None, MetricType::Gauge)?;
            ConstGauge::new(i64::from(store.connected)).encode(connected)?;
            let help = "Age of the oldest count that Redis does not have yet";
            let lag = encoder.encode_descriptor("sync_lag", help, Some(&Unit::Seconds), MetricType::Gauge)?;
            ConstGauge::new(store.lag_seconds).encode(lag)?;
            let help = "Counts of windows that were over before they could be shared";
            let late = encoder.encode_descriptor("sync_late", help, None, MetricType::Counter)?;
            ConstCounter::new(store.late).encode(late)?;
        }
        let info = encoder.encode_descriptor("build", "Version of the agent and of its maps", None, MetricType::Info)?;
        let labels = [("version", snapshot.version.to_owned()), ("schema", snapshot.schema.to_string())];
        prometheus_client::metrics::info::Info::new(labels).encode(info)
    }
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

//! What `limiter status` and `/v1/status` show: one reading of everything.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::{
    clock::Stopwatch,
    dataplane::Dataplane,
    metrics::{MapUsage, Snapshot, Source, StoreSnapshot},
};

/// The whole answer.
#[derive(Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Status {
    pub version: String,
    pub node: String,
    pub uptime_seconds: u64,
    pub ready: bool,
    /// Decisions are made from local counts alone, since Redis does not answer.
    pub degraded: bool,
    pub xdp: Option<XdpStatus>,
    pub store: StoreStatus,
    pub rules: Vec<RuleStatus>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct XdpStatus {
    pub interfaces: Vec<InterfaceStatus>,
    pub counters: Vec<PacketCounter>,
    pub budgets: Vec<Entry>,
    pub allow: Vec<Entry>,
    pub deny: Vec<Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct InterfaceStatus {
    pub name: String,
    pub mode: String,
    pub program_id: u32,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct PacketCounter {
    pub rule: Option<String>,
    pub verdict: String,
    pub reason: String,
    pub packets: u64,
    pub bytes: u64,
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
    pub connected: bool,
    pub lag_seconds: f64,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct RuleStatus {
    pub id: String,
    pub scope: String,
    pub mode: String,
}

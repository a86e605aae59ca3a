//! The agent of edge-limiter, as a library: everything but reading arguments and choosing the exit code.
#![forbid(unsafe_code)]

pub mod active;
pub mod agent;
pub mod api;
pub mod capability;
pub mod cli;
pub mod clock;
pub mod config;
pub mod dataplane;
pub mod doctor;
pub mod events;
pub mod exit;
pub mod file;
pub mod host;
pub mod identity;
pub mod limiter;
pub mod metrics;
mod netlink;
pub mod policy;
pub mod pressure;
pub mod push;
pub mod reload;
pub mod status;
pub mod store;
pub mod telemetry;
pub mod top;
pub mod watch;

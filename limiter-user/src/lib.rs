//! The agent of edge-limiter, as a library: everything but reading arguments and choosing the exit code.
#![forbid(unsafe_code)]

pub mod cli;
pub mod clock;
pub mod config;
pub mod dataplane;
pub mod exit;
pub mod identity;
pub mod policy;
pub mod store;

//! The agent of edge-limiter, as a library: everything but reading arguments and choosing the exit code.
#![forbid(unsafe_code)]

pub mod clock;
pub mod dataplane;
pub mod policy;
pub mod store;

//! What the XDP program and the agent share: one definition of every map type, one definition of the arithmetic.
//!
//! Architecture invariant: this crate never allocates, reads a clock, touches a map or does I/O, and no shared
//! struct has a `cfg` inside. Time is an argument everywhere.
#![no_std]

#[cfg(test)]
extern crate std;

pub mod acl;
pub mod adaptive;
pub mod addr;
pub mod aggregate;
pub mod bucket;
pub mod budget;
pub mod budget_filter;
pub mod event;
pub mod fixed_window;
pub mod gcra;
pub mod leaky_bucket;
pub mod packet;
#[cfg(feature = "user")]
mod pod;
pub mod prefix_filter;
pub mod quota;
pub mod rule;
pub mod schema;
pub mod sliding_log;
pub mod sliding_window;
pub mod stats;
pub mod time;
pub mod verdict;
pub mod walk;

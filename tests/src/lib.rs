//! Harness.

pub mod eventually;
pub mod redis_server;
pub mod vectors;

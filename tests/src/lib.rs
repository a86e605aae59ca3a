//! The harness: starts real programs, and drives them with real traffic.

pub mod agent;
pub mod eventually;
pub mod gateway;
pub mod http;
pub mod redis_server;
pub mod vectors;

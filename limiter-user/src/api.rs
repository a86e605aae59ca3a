//! What gateways, operators and monitoring talk to.

pub mod accept;
pub mod admin;
pub mod body;
pub mod callers;
pub mod check;
pub mod decide;
pub mod gate;
pub mod headers;
pub mod hold;
pub mod pressure;
pub mod serve;

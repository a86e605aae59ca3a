//! Runs edge-limiter against real programs in network namespaces.

pub mod eventually;
pub mod fixture;
pub mod netns;
pub mod object;
pub mod packet;

//! The harness: starts real programs, and drives them with real traffic in network namespaces.

pub mod agent;
pub mod bench;
pub mod chaos_proxy;
pub mod delay_proxy;
pub mod demo;
pub mod eventually;
pub mod fixture;
pub mod fleet_node;
pub mod frames;
pub mod gateway;
pub mod http;
pub mod in_process;
pub mod ip;
pub mod netns;
pub mod object;
pub mod older;
pub mod packet;
pub mod packet_socket;
pub mod ping_pong;
pub mod random;
pub mod redis_cluster;
pub mod redis_sentinel;
pub mod redis_server;
pub mod redis_tls;
pub mod traffic;
pub mod vectors;

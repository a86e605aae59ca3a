//! Who takes part, how much each sends, and what the agent is told to limit.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use crate::{
    agent::Setup,
    netns::{CLIENT_V4, GATEWAY_V4, INTERFACE, TestNet},
};

pub(super) const GATEWAY: IpAddr = GATEWAY_V4;
pub(super) const PORT: u16 = 80;

pub(super) const GOOD: IpAddr = CLIENT_V4[0];
pub(super) const FLOODING: IpAddr = CLIENT_V4[1];
pub(super) const KEYED: IpAddr = IpAddr::V4(KEYED_V4);
pub(super) const IMPATIENT: IpAddr = IpAddr::V4(IMPATIENT_V4);
const KEYED_V4: Ipv4Addr = Ipv4Addr::new(10, 203, 0, 4);
const IMPATIENT_V4: Ipv4Addr = Ipv4Addr::new(10, 203, 0, 5);

pub(super) const GOOD_EVERY: Duration = Duration::from_millis(200);
pub(super) const KEYED_EVERY: Duration = Duration::from_millis(100);
/// In batches that no queue of the veth pair is too small for.
pub(super) const FLOOD_BATCH: u64 = 100;
pub(super) const FLOOD_EVERY: Duration = Duration::from_millis(10);
/// Far more in a window than the limit of an address.
pub(super) const BURST_EVERY: Duration = Duration::from_millis(20);

/// Of one address: packets a second, as many of them at once.
pub(super) const PACKETS: u64 = 1000;
/// Of one address: requests in a window. More than the well-behaved client and the API key send.
pub(super) const ADDRESS_LIMIT: u64 = 40;
pub(super) const ADDRESS_WINDOW: Duration = Duration::from_secs(4);
/// Of one API key: requests in a window.
pub(super) const PLAN: &str = "free";
pub(super) const PLAN_LIMIT: u64 = 10;
pub(super) const PLAN_WINDOW: Duration = Duration::from_secs(2);

pub(super) fn namespaces() -> TestNet {
    let net = TestNet::new();
    net.add_client_address(KEYED_V4);
    net.add_client_address(IMPATIENT_V4);
    net
}

pub(super) fn setup(net: &TestNet) -> Setup {
    let configuration = format!(
        r#"
        [xdp]
        interfaces = ["{INTERFACE}"]
        protect = ["tcp/{PORT}", "udp/{PORT}"]
        pin_dir = "{}"
        max_sources = 65536

        [identity]
        key_file = "keys.toml"
        key_secret_file = "keys.secret"
        "#,
        net.pin_dir().display()
    );
    let policy = format!(
        r#"
        [plans.{PLAN}]

        [[rules]]
        id = "per-key"
        scope = "key"
        plans = {{ {PLAN} = {PLAN_LIMIT} }}
        window = "{}s"

        [[rules]]
        id = "per-address"
        scope = "ip"
        limit = {ADDRESS_LIMIT}
        window = "{}s"

        [[packet_rules]]
        id = "per-source"
        cidr = "0.0.0.0/0"
        packets = {{ rate = "{PACKETS}/s", burst = {PACKETS} }}
        "#,
        PLAN_WINDOW.as_secs(),
        ADDRESS_WINDOW.as_secs()
    );
    Setup::new(&configuration, &policy)
}

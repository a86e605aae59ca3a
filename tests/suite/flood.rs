//! One million spoofed sources, over veth, at the real binary: who is limited, who loses nothing, and what it costs.

use std::{
    collections::HashMap,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _},
    time::Duration,
};

use aya::maps::{Array, HashMap as BpfMap, Map, MapData};
use ipnet::IpNet;
use limiter_common::{
    addr::{SrcKeyV4, SrcKeyV6},
    aggregate,
    rule::Bucket,
    schema::{AGGREGATES, Lifetime, MAPS, SCHEMA_VERSION, creation},
};
use limiter_tests::{
    agent::{Agent, Setup},
    netns::{CLIENT_INTERFACE, GATEWAY_V4, GATEWAY_V6, INTERFACE, TestNet},
    packet_socket::{Datagram, PacketSocket, hardware_address},
};
use limiter_user::clock::Stopwatch;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::socket::{setsockopt, sockopt::RcvBufForce},
    unistd::Pid,
};

/// Where the clients are counted, and where the flood goes.
const SERVICE: u16 = 443;
const FLOODED: u16 = 8443;

const SOURCES: u32 = 1_000_000;
/// Neighbourhoods that they are in: those of a /12.
const NEIGHBOURHOODS: u32 = 4096;
const MAX_SOURCES: u64 = 65_536;
/// What the agent makes of it: so many buckets at once, and so many a second.
const CREATION_BURST: u64 = MAX_SOURCES / 10;
const CREATION_RATE: u64 = MAX_SOURCES / 100;

const BURST: u64 = 20;
const RATE: u64 = 10;
const HEAVY_BURST: u64 = 1000;
const HEAVY_RATE: u64 = 2000;
/// The slot of the widest rule.
const EVERYBODY: u32 = 1;

/// What differs between the families.
struct Family {
    gateway: IpAddr,
    all: &'static str,
    /// The neighbourhood with a quota of its own.
    heavy: &'static str,
    /// A host of the n-th neighbourhood from this network on.
    host: fn(network: u8, n: u32, host: u8) -> IpAddr,
    /// Where the aggregate buckets of a source are.
    places: fn(IpAddr, u64) -> [u32; aggregate::ROWS],
    buckets: &'static str,
}

/// Networks for [`Family::host`].
const SPOOFED: u8 = 0;
const QUIET: u8 = 1;
const HEAVY: u8 = 2;
const CONTROL: u8 = 3;

const V4: Family = Family {
    gateway: GATEWAY_V4,
    all: "0.0.0.0/0",
    heavy: "66.0.0.0/8",
    host: |network, n, host| {
        let [_, _, middle, low] = n.to_be_bytes();
        Ipv4Addr::new(64 + network, middle, low, host).into()
    },
    places: |address, seed| match address {
        IpAddr::V4(address) => aggregate::index::v4(address.octets(), EVERYBODY, seed),
        IpAddr::V6(_) => unreachable!("an address of another family"),
    },
    buckets: "BUCKETS_V4",
};

const V6: Family = Family {
    gateway: GATEWAY_V6,
    all: "::/0",
    heavy: "2001:db2::/32",
    host: |network, n, host| {
        let site = u16::try_from(n).expect("a few thousand sites");
        Ipv6Addr::new(0x2001, 0xdb0 + u16::from(network), site, host.into(), 0, 0, 0, 1).into()
    },
    places: |address, seed| match address {
        IpAddr::V4(_) => unreachable!("an address of another family"),
        IpAddr::V6(address) => aggregate::index::v6(address.octets(), EVERYBODY, seed),
    },
    buckets: "BUCKETS_V6",
};

impl Family {
    /// The n-th spoofed source: one in every neighbourhood, and then the next in each.
    fn spoofed(&self, n: u32) -> IpAddr {
        let host = u8::try_from(n / NEIGHBOURHOODS).expect("a host of a /24");
        (self.host)(SPOOFED, n % NEIGHBOURHOODS, host)
    }

    fn policy(&self) -> String {
        let rule = |id: &str, cidr, rate, burst| {
            format!(
                "[[packet_rules]]\nid = \"{id}\"\ncidr = \"{cidr}\"\npackets = {{ rate = \"{rate}/s\", burst = {burst} }}\n"
            )
        };
        let all = rule("everybody", self.all, RATE, BURST);
        let heavy = rule("heavy", self.heavy, HEAVY_RATE, HEAVY_BURST);
        format!("allow = [\"{}\"]\n{all}{heavy}", IpNet::from(self.control()))
    }

    /// Sends what is never limited.
    fn control(&self) -> IpAddr {
        (self.host)(CONTROL, 0, 1)
    }

    /// New clients in quiet neighbourhoods, half of which have one of their two aggregate buckets in common with a flooded
    /// neighbourhood. Those with both are the one in a thousand who may lose. Two in each: what is kept of the new buckets
    /// is for the first, and the second shares.
    fn newcomers(&self, seed: u64) -> Vec<IpAddr> {
        let mut flooded = vec![false; AGGREGATES as usize];
        for n in 0..NEIGHBOURHOODS {
            for place in (self.places)(self.spoofed(n), seed) {
                flooded[place as usize] = true;
            }
        }
        let shared = |n: &u32| {
            let places = (self.places)((self.host)(QUIET, *n, 7), seed);
            places.into_iter().filter(|place| flooded[*place as usize]).count()
        };
        let with = |count| (100..4000).filter(move |n| shared(n) == count).take(16);
        let neighbourhoods: Vec<_> = with(0).chain(with(1)).collect();
        assert_eq!(neighbourhoods.len(), 32);
        let hosts = |host| neighbourhoods.iter().map(move |n| (self.host)(QUIET, *n, host));
        hosts(7).chain(hosts(8)).collect()
    }
}

/// What has arrived at the service, by source.
struct Service {
    socket: UdpSocket,
}

impl Service {
    fn open(net: &TestNet, family: &Family) -> Self {
        let socket = net.gateway(|| UdpSocket::bind(SocketAddr::new(family.gateway, SERVICE))).expect("the service");
        setsockopt(&socket, RcvBufForce, &(64 << 20)).expect("a large queue");
        socket.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
        Self { socket }
    }

    /// Counts until something arrives from `last`.
    fn count_until(&self, last: IpAddr) -> HashMap<IpAddr, u64> {
        let mut arrived = HashMap::new();
        loop {
            let (_, source) = self.socket.recv_from(&mut [0; 64]).expect("the last packet arrives");
            if source.ip() == last {
                return arrived;
            }
            *arrived.entry(source.ip()).or_default() += 1;
        }
    }
}

/// What the limiter holds in memory, by the kernel's account and the agent's.
#[derive(Debug, PartialEq, Eq)]
struct Memory {
    maps_bytes: u64,
    agent_kib: u64,
}

fn pinned(net: &TestNet, map: &str) -> MapData {
    MapData::from_pin(net.pin_dir().join(format!("v{SCHEMA_VERSION}")).join(map)).expect("a pinned map")
}

/// A number of a file in /proc that has lines of names and numbers.
fn number(path: &str, name: &str) -> u64 {
    let text = fs::read_to_string(path).expect("a file in /proc");
    let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("the line");
    let digits = line.split_whitespace().next().expect("a number");
    digits.parse().expect("a number")
}

impl Memory {
    fn now(net: &TestNet, agent: &Agent<'_>) -> Self {
        let shared = MAPS.iter().filter(|map| map.lifetime == Lifetime::Shared);
        let maps = shared.map(|map| {
            let map = pinned(net, map.name);
            number(&format!("/proc/self/fdinfo/{}", map.fd().as_fd().as_raw_fd()), "memlock:")
        });
        let agent_kib = number(&format!("/proc/{}/status", agent.pid()), "VmRSS:");
        Self { maps_bytes: maps.sum(), agent_kib }
    }
}

fn seed(net: &TestNet) -> u64 {
    let creation: Array<_, u64> = Map::Array(pinned(net, "CREATION")).try_into().expect("an array");
    creation.get(&creation::SEED, 0).expect("the seed")
}

/// Buckets that are in the map, one by one.
fn buckets(net: &TestNet, family: &Family) -> u64 {
    let map = Map::LruHashMap(pinned(net, family.buckets));
    let count = if family.gateway.is_ipv4() {
        BpfMap::<_, SrcKeyV4, Bucket>::try_from(map).expect("buckets").keys().filter_map(Result::ok).count()
    } else {
        BpfMap::<_, SrcKeyV6, Bucket>::try_from(map).expect("buckets").keys().filter_map(Result::ok).count()
    };
    count as u64
}

fn packets(agent: &Agent<'_>, verdict: &str, reason: &str) -> u64 {
    let status = agent.status();
    let counters = status["xdp"]["counters"].as_array().expect("counters");
    let counters = counters.iter().filter(|counter| counter["verdict"] == verdict && counter["reason"] == reason);
    counters.filter_map(|counter| counter["packets"].as_u64()).sum()
}

/// Sends everything from one CPU, so that all of it arrives in its order.
struct Sender {
    wire: PacketSocket,
    service: Datagram,
    flooded: Datagram,
}

impl Sender {
    fn open(net: &TestNet, family: &Family) -> Self {
        let hardware_address = net.gateway(|| hardware_address(INTERFACE));
        let to = |port| Datagram::to(hardware_address, family.gateway, port);
        let wire = net.client(|| PacketSocket::open(CLIENT_INTERFACE));
        Self { wire, service: to(SERVICE), flooded: to(FLOODED) }
    }

    fn ask(&mut self, source: IpAddr) {
        self.wire.send(self.service.from(source));
    }

    fn ask_all(&mut self, sources: &[IpAddr]) {
        for source in sources {
            self.ask(*source);
        }
    }
}

/// The flood, with everybody else's packets in it. Tells how long the heavy source and the new ones sent.
fn send(sender: &mut Sender, family: &Family, clients: &Clients) -> [Duration; 2] {
    let mut cpu = CpuSet::new();
    cpu.set(0).expect("a CPU");
    sched_setaffinity(Pid::from_raw(0), &cpu).expect("stay on one CPU");

    sender.ask_all(&clients.known);
    let started = Stopwatch::start();
    let mut heavy_new_since = Duration::ZERO;
    for n in 0..SOURCES {
        sender.wire.send(sender.flooded.from(family.spoofed(n)));
        if n.is_multiple_of(16) {
            sender.ask(clients.heavy);
        }
        if n.is_multiple_of(100_000) {
            sender.ask_all(&clients.known);
        }
        if n == 200_000 {
            heavy_new_since = started.elapsed();
        }
        if n >= 200_000 && n.is_multiple_of(64) {
            sender.ask_all(&clients.heavy_new);
        }
        if matches!(n, 300_000 | 600_000 | 900_000) {
            for _ in 0..4 {
                sender.ask_all(&clients.new);
            }
        }
    }
    let elapsed = started.elapsed();
    sender.ask(family.control());
    [elapsed, elapsed - heavy_new_since]
}

struct Clients {
    heavy: IpAddr,
    /// Good ones, with a bucket before the flood; the last is in a flooded neighbourhood.
    known: Vec<IpAddr>,
    /// Good ones in quiet neighbourhoods.
    new: Vec<IpAddr>,
    /// In a quiet neighbourhood, and in a flooded one.
    heavy_new: [IpAddr; 2],
}

#[expect(clippy::float_arithmetic, reason = "an expected count")]
fn quota(burst: u64, rate: u64, time: Duration) -> f64 {
    burst as f64 + rate as f64 * time.as_secs_f64()
}

#[expect(clippy::float_arithmetic, reason = "a hundredth of a count")]
#[expect(clippy::print_stderr, reason = "for whoever reads the output of a test")]
fn a_flood_harms_nobody_else(mode: &str, family: &Family) {
    let net = TestNet::new();
    let pin_dir = net.pin_dir().display();
    let setup = Setup::new(
        &format!(
            "[xdp]\ninterfaces = [\"{INTERFACE}\"]\nmode = \"{mode}\"\nprotect = [\"udp/{SERVICE}\", \"udp/{FLOODED}\"]\n\
             pin_dir = \"{pin_dir}\"\nmax_sources = {MAX_SOURCES}\n"
        ),
        &family.policy(),
    );
    let agent = net.gateway(|| setup.start());
    assert_eq!(agent.status()["xdp"]["interfaces"][0]["mode"], mode);
    let clients = Clients {
        heavy: (family.host)(HEAVY, 0, 1),
        known: (0..8).map(|n| (family.host)(QUIET, n, 1)).chain([(family.host)(SPOOFED, 5, 255)]).collect(),
        new: family.newcomers(seed(&net)),
        heavy_new: [(family.host)(QUIET, 50, 1), (family.host)(SPOOFED, 6, 255)],
    };
    let service = Service::open(&net, family);
    let mut sender = Sender::open(&net, family);
    let before = Memory::now(&net, &agent);
    let running = Stopwatch::start();

    let (arrived, [heavy_time, heavy_new_time]) = std::thread::scope(|scope| {
        let arrived = scope.spawn(|| service.count_until(family.control()));
        let times = scope.spawn(|| send(&mut sender, family, &clients)).join().expect("the sender ends");
        (arrived.join().expect("the service ends"), times)
    });
    let arrived = |source: &IpAddr| arrived.get(source).copied().unwrap_or(0);

    // (a) The heavy source has its quota, and no more.
    let expected = quota(HEAVY_BURST, HEAVY_RATE, heavy_time);
    let heavy = arrived(&clients.heavy);
    eprintln!("{mode}: {SOURCES} sources in {heavy_time:?}; heavy: {heavy} of {expected:.0}");
    assert!((heavy as f64 - expected).abs() <= expected / 100.0, "the heavy source: {heavy}, not {expected}");

    // (b) Good clients lose nothing.
    for client in &clients.known {
        assert_eq!(arrived(client), 11, "{client}, known before the flood");
    }
    for client in &clients.new {
        assert_eq!(arrived(client), 12, "{client}, new in a quiet neighbourhood");
    }

    // (c) Memory does not grow.
    let after = Memory::now(&net, &agent);
    assert_eq!(after.maps_bytes, before.maps_bytes);
    assert!(after.agent_kib < before.agent_kib + 8192, "{before:?} {after:?}");
    let entries = buckets(&net, family);
    let most = quota(CREATION_BURST, CREATION_RATE, running.elapsed());
    // A quarter is kept for neighbourhoods that have made none lately.
    assert!(entries >= CREATION_BURST * 3 / 4 && entries as f64 <= most, "{entries} buckets, at most {most}");
    let told = agent.metric(&format!("limiter_map_entries{{map=\"{}\"}}", family.buckets));
    assert_eq!(told, entries as f64, "what the agent tells");

    // (d) Nobody new is unlimited: at most a share of an aggregate bucket, and then one of its own.
    for source in &clients.heavy_new {
        let most = quota(2 * BURST, RATE, heavy_new_time) + 1.0;
        let passed = arrived(source);
        assert!(passed > 0 && passed as f64 <= most, "{source}, new and heavy: {passed} of {most}");
    }
    // Every neighbourhood has one quota, and every bucket that was made has passed one packet.
    let passed = packets(&agent, "pass", "conforming") as f64;
    let most =
        f64::from(NEIGHBOURHOODS) * quota(BURST, RATE, running.elapsed()) + entries as f64 + heavy as f64 + 1000.0;
    assert!(passed <= most, "{passed} packets passed, at most {most}");
    let dropped = packets(&agent, "drop", "new_sources");
    eprintln!("{mode}: {passed} passed, {dropped} of new sources dropped, {entries} buckets, {before:?} {after:?}");
    assert!(dropped > u64::from(SOURCES) / 2, "{dropped} dropped");
}

/// Nothing beside them, since they measure time.
mod alone {
    use super::{V4, V6, a_flood_harms_nobody_else};

    #[test]
    fn a_million_spoofed_ipv4_sources_harm_nobody_else_in_native_mode() {
        a_flood_harms_nobody_else("native", &V4);
    }

    #[test]
    fn a_million_spoofed_ipv6_sources_harm_nobody_else_in_generic_mode() {
        a_flood_harms_nobody_else("generic", &V6);
    }
}

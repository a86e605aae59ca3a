//! Policies under which the verdict of any frame can be said from the frame alone: no rule ever gets to its limit by
//! what passes, or it is there from the start.

use std::{
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

use limiter_common::{
    addr::SrcPrefixes,
    budget::BudgetReason,
    packet::{self, IpPacket, Parsed, Source},
    rule::EnforcementMode::{self, Enforce, Shadow},
    verdict::{DropReason, PassReason, Verdict},
};
use limiter_user::{
    dataplane::{Dataplane as _, Protect, Transport},
    policy::PacketRuleSpec,
};

use crate::{
    fixture::{Limited, Loaded, World},
    packet::{Packet, SYN},
};

const DAY: Duration = Duration::from_secs(24 * 3600);
/// No test passes as much.
const ENDLESS: u64 = 1 << 40;
/// Below the length of any frame.
const TINY: u64 = 13;
const BLOCKED: [&str; 2] = ["198.51.100.9", "2001:db8:b:1::9"];
const BLOCKING_RULE: &str = "per-ip";

/// Sources that some scenario treats in its own way, and their neighbours.
pub(super) const SOURCES: &[&str] = &[
    "192.0.2.7",
    "192.0.2.8",
    "203.0.113.9",
    "203.0.112.9",
    "203.0.111.9",
    "198.51.100.7",
    "198.51.100.9",
    "198.51.100.10",
    "10.1.2.3",
    "2001:db8:1:2::7",
    "2001:db8:1:2::8",
    "2001:db8:1:3::7",
    "2001:db8:a::9",
    "2001:db8:b::9",
    "2001:db8:b:1::9",
    "2001:db8:b:1::a",
    "2001:db8:c::9",
    "fe80::1",
];

#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: &'static str,
    world: World,
    /// Sources whose budget drops everything.
    blocked: &'static [&'static str],
    /// They use up what their rules grant.
    earlier: Vec<Packet>,
    /// Verdicts that frames for this scenario have to bring about; others may come too.
    pub shows: Vec<Verdict>,
}

pub fn scenarios() -> Vec<Scenario> {
    vec![lists(), limits(), endless()]
}

fn lists() -> Scenario {
    let world = World::new().protect(Protect::All).allow("203.0.113.0/24").allow("2001:db8:a::/48");
    let mut world = world.deny("203.0.112.0/23").deny("192.0.2.7/32").deny("2001:db8:a::/47").deny("fe80::/10");
    world.config.budgets = false;
    Scenario {
        name: "lists",
        world,
        blocked: &[],
        earlier: Vec::new(),
        shows: vec![
            Verdict::Pass(PassReason::NotIp),
            Verdict::Pass(PassReason::Control),
            Verdict::Pass(PassReason::Allowed),
            Verdict::Pass(PassReason::Unlimited),
            Verdict::Drop(DropReason::Malformed),
            Verdict::Drop(DropReason::Denied),
        ],
    }
}

fn limits() -> Scenario {
    const FOUR: &str = "192.0.2.7";
    const SIX: &str = "2001:db8:1:2::7";
    let world = World::new()
        .rule("spent4", "192.0.2.7/32", Enforce, &[(Limited::Connections, 1)])
        .rule("spent6", "2001:db8:1:2::/64", Enforce, &[(Limited::Connections, 1)])
        .rule("tiny", "198.51.100.7/32", Shadow, &[(Limited::Bytes, TINY)])
        .rule("tiny6", "2001:db8:1:3::/64", Enforce, &[(Limited::Bytes, TINY)])
        .deny("2001:db8:c::/48");
    Scenario {
        name: "limits",
        world,
        blocked: &BLOCKED,
        earlier: [FOUR, SIX].map(|source| Packet::tcp(source, 443, SYN)).into(),
        shows: vec![
            Verdict::Pass(PassReason::NotIp),
            Verdict::Pass(PassReason::Control),
            Verdict::Pass(PassReason::NotProtected),
            Verdict::Pass(PassReason::Conforming),
            Verdict::Pass(PassReason::Unlimited),
            Verdict::Drop(DropReason::Malformed),
            Verdict::Drop(DropReason::Denied),
            Verdict::Drop(DropReason::Blocked),
            Verdict::Drop(DropReason::RateLimitedBytes),
            Verdict::Drop(DropReason::RateLimitedConnections),
            Verdict::ShadowDrop(DropReason::RateLimitedBytes),
        ],
    }
}

fn endless() -> Scenario {
    let all = [(Limited::Packets, ENDLESS), (Limited::Bytes, ENDLESS), (Limited::Connections, ENDLESS)];
    let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &all).rule("six", "2001:db8::/32", Shadow, &all);
    world.config.drop_malformed = false;
    world.config.src_prefixes = SrcPrefixes { ipv4: 24, ipv6: 48 };
    Scenario {
        name: "endless",
        world,
        blocked: &[],
        earlier: Vec::new(),
        shows: vec![
            Verdict::Pass(PassReason::NotProtected),
            Verdict::Pass(PassReason::Conforming),
            Verdict::Pass(PassReason::Unlimited),
            Verdict::ShadowDrop(DropReason::Malformed),
        ],
    }
}

impl Scenario {
    /// Loads the program, with everything that is spent spent.
    pub(super) fn load(&self) -> Loaded {
        let loaded = self.world.load();
        for source in self.blocked {
            let source = source.parse().expect("an address");
            let reason = BudgetReason::AddressOverLimit;
            loaded.dataplane.push_budget(source, DAY, reason, BLOCKING_RULE).expect("push a budget");
        }
        for packet in &self.earlier {
            loaded.dataplane.test_run(&packet.build(), 1).expect("run the program");
        }
        loaded
    }

    /// The verdict that this frame must get, and the rule that it comes from.
    pub fn verdict(&self, frame: &[u8]) -> (Verdict, Option<&str>) {
        let World { config, policy, .. } = &self.world;
        let packet = match packet::parse(frame) {
            Parsed::NotIp => return (Verdict::Pass(PassReason::NotIp), None),
            Parsed::Control => return (Verdict::Pass(PassReason::Control), None),
            Parsed::Malformed if config.drop_malformed => return (Verdict::Drop(DropReason::Malformed), None),
            Parsed::Malformed => return (Verdict::ShadowDrop(DropReason::Malformed), None),
            Parsed::Ip(packet) => packet,
        };
        if !is_protected(&config.protect, packet) {
            return (Verdict::Pass(PassReason::NotProtected), None);
        }
        let address = match packet.source {
            Source::V4(address) => IpAddr::from(address.octets()),
            Source::V6(address) => IpAddr::from(address.octets()),
        };
        if policy.allow.iter().any(|prefix| prefix.contains(&address)) {
            return (Verdict::Pass(PassReason::Allowed), None);
        }
        if policy.deny.iter().any(|prefix| prefix.contains(&address)) {
            return (Verdict::Drop(DropReason::Denied), None);
        }
        if self.blocked.iter().any(|source| is_same_source(source, address)) {
            return (Verdict::Drop(DropReason::Blocked), Some(BLOCKING_RULE));
        }
        let prefixes = policy.packet_rules.iter().flat_map(|rule| rule.cidrs.iter().map(move |cidr| (cidr, rule)));
        let matching = prefixes.filter(|(cidr, _)| cidr.contains(&address));
        match matching.max_by_key(|(cidr, _)| cidr.prefix_len()) {
            Some((_, rule)) => (ruled(rule, packet), Some(&rule.id)),
            None => (Verdict::Pass(PassReason::Unlimited), None),
        }
    }
}

fn is_protected(protect: &Protect, packet: IpPacket) -> bool {
    let Protect::Ports(ports) = protect else { return true };
    match packet.transport {
        packet::Transport::Tcp { destination_port, .. } => ports.contains(&(Transport::Tcp, destination_port)),
        packet::Transport::Udp { destination_port } => ports.contains(&(Transport::Udp, destination_port)),
        packet::Transport::Unreadable { .. } => !ports.is_empty(),
        packet::Transport::Other => false,
    }
}

/// By /32 and /64, which are the source prefixes of the scenario that blocks.
fn is_same_source(blocked: &str, address: IpAddr) -> bool {
    let upper_half = |address: Ipv6Addr| address.to_bits() >> 64;
    match (blocked.parse().expect("an address"), address) {
        (IpAddr::V6(blocked), IpAddr::V6(address)) => upper_half(blocked) == upper_half(address),
        (blocked, address) => blocked == address,
    }
}

fn ruled(rule: &PacketRuleSpec, packet: IpPacket) -> Verdict {
    let reason = if rule.bytes.is_some_and(|quota| quota.burst == TINY) {
        DropReason::RateLimitedBytes
    } else if packet.transport.opens_connection() && rule.new_connections.is_some_and(|quota| quota.burst == 1) {
        DropReason::RateLimitedConnections
    } else {
        return Verdict::Pass(PassReason::Conforming);
    };
    match rule.mode {
        Enforce => Verdict::Drop(reason),
        Shadow => Verdict::ShadowDrop(reason),
        EnforcementMode::Off => Verdict::Pass(PassReason::Unlimited),
    }
}

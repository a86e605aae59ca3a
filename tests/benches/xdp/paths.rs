//! The ways through the program, each with a policy that leads there.

use std::{net::IpAddr, time::Duration};

use limiter_common::{
    budget::BudgetReason,
    rule::EnforcementMode::{self, Enforce, Shadow},
    verdict::{DropReason, PassReason, Verdict},
};
use limiter_tests::{
    fixture::{Limited, Loaded, World, burst_of},
    packet::{self, Packet},
};
use limiter_user::dataplane::Dataplane as _;

const V4: &str = "192.0.2.7";
const V6: &str = "2001:db8:1:2::7";
const NEIGHBOUR_V4: &str = "192.0.2.8";
const NEIGHBOUR_V6: &str = "2001:db8:1:3::7";

pub(crate) struct Path {
    pub(crate) name: &'static str,
    loaded: Loaded,
    frame: Vec<u8>,
    expect: Verdict,
    /// The most that it may cost, as a multiple of what xdp-filter does.
    pub(crate) goal: Option<f64>,
}

impl Path {
    fn new(name: &'static str, world: World, packet: Packet, expect: Verdict) -> Self {
        Self { name, loaded: world.load(), frame: packet.build(), expect, goal: None }
    }

    fn goal(mut self, goal: f64) -> Self {
        self.goal = Some(goal);
        self
    }

    fn block(self, source: &str) -> Self {
        let pushed = self.loaded.dataplane.push_budget(address(source), HOUR, BudgetReason::KeepsSending, "four");
        pushed.expect("push a budget");
        self
    }

    fn replace_limit(self, source: &str) -> Self {
        let (source, limit) = (address(source), burst_of(1 << 40));
        let pushed = self.loaded.dataplane.replace_budget(source, limit, HOUR, BudgetReason::AddressOverLimit, "four");
        pushed.expect("push a budget");
        self
    }

    pub(crate) fn run(&self, repeat: u32) -> Duration {
        self.loaded.dataplane.test_run(&self.frame, repeat).expect("run the program").duration
    }

    /// Sees to it that the way is the one that the name says.
    pub(crate) fn check(&self) {
        // The first packet may be the one that a limit lets pass.
        self.run(1);
        let (verdict, _) = self.loaded.judge(&self.frame);
        assert_eq!(verdict, self.expect, "{}", self.name);
    }
}

const HOUR: Duration = Duration::from_secs(3600);

fn address(source: &str) -> IpAddr {
    source.parse().expect("an address")
}

/// What no run of the benchmark uses up.
const HUGE: [(Limited, u64); 3] =
    [(Limited::Packets, 1 << 40), (Limited::Bytes, 1 << 46), (Limited::Connections, 1 << 40)];

/// One default rule for each family, and nothing else.
fn defaults(mode: EnforcementMode, limits: &[(Limited, u64)]) -> World {
    let mut world = World::new().rule("four", "0.0.0.0/0", mode, limits).rule("six", "::/0", mode, limits);
    world.config.budgets = false;
    world
}

fn with_budgets(mut world: World) -> World {
    world.config.budgets = true;
    world
}

/// Budgets (of other sources), allow and deny prefixes, rules by prefix, every limit.
fn everything() -> World {
    let world = with_budgets(defaults(Enforce, &HUGE)).rule("narrow", "192.0.2.0/24", Enforce, &HUGE).rule(
        "narrow6",
        "2001:db8:1::/48",
        Enforce,
        &HUGE,
    );
    world.allow("203.0.113.0/24").allow("2001:db8:a::/48").deny("203.0.112.0/24").deny("2001:db8:b::/48")
}

pub(crate) fn paths() -> Vec<Path> {
    const CONFORMING: Verdict = Verdict::Pass(PassReason::Conforming);
    const OVER: DropReason = DropReason::RateLimitedPackets;
    let packets = &HUGE[..1];
    let one = [(Limited::Packets, 1)];
    let syn4 = || Packet::tcp(V4, 443, packet::SYN);
    let syn6 = || Packet::tcp(V6, 443, packet::SYN);
    let ssh = Packet::tcp(V4, 22, packet::SYN);
    vec![
        Path::new(
            "not IP",
            defaults(Enforce, packets),
            Packet::raw(0x88cc, &[0; 50]),
            Verdict::Pass(PassReason::NotIp),
        ),
        Path::new("not protected", defaults(Enforce, packets), ssh, Verdict::Pass(PassReason::NotProtected)),
        Path::new("deny hit, IPv4", World::new().deny("192.0.2.7/32"), syn4(), Verdict::Drop(DropReason::Denied))
            .goal(1.2),
        Path::new(
            "deny hit, IPv6",
            World::new().deny("2001:db8:1:2::7/128"),
            syn6(),
            Verdict::Drop(DropReason::Denied),
        ),
        Path::new("bucket, one default rule, IPv4", defaults(Enforce, packets), syn4(), CONFORMING).goal(1.5),
        Path::new("bucket, one default rule, IPv6", defaults(Enforce, packets), syn6(), CONFORMING).goal(1.8),
        Path::new("the same with budgets on, IPv4", with_budgets(defaults(Enforce, packets)), syn4(), CONFORMING)
            .block(NEIGHBOUR_V4),
        Path::new("the same with budgets on, IPv6", with_budgets(defaults(Enforce, packets)), syn6(), CONFORMING)
            .block(NEIGHBOUR_V6),
        Path::new("over the limit, IPv4", defaults(Enforce, &one), syn4(), Verdict::Drop(OVER)),
        Path::new("over the limit, IPv6", defaults(Enforce, &one), syn6(), Verdict::Drop(OVER)),
        Path::new("over the limit in shadow, IPv4", defaults(Shadow, &one), syn4(), Verdict::ShadowDrop(OVER)),
        Path::new(
            "budget hit, IPv4",
            with_budgets(defaults(Enforce, packets)),
            syn4(),
            Verdict::Drop(DropReason::Blocked),
        )
        .block(V4),
        Path::new(
            "a budget with a limit of its own, IPv4",
            with_budgets(defaults(Enforce, packets)),
            syn4(),
            CONFORMING,
        )
        .replace_limit(V4),
        Path::new(
            "a budget with a limit of its own, IPv6",
            with_budgets(defaults(Enforce, packets)),
            syn6(),
            CONFORMING,
        )
        .replace_limit(V6),
        Path::new("everything switched on, IPv4", everything(), syn4(), CONFORMING).block(NEIGHBOUR_V4).goal(3.0),
        Path::new("everything switched on, IPv6", everything(), syn6(), CONFORMING).block(NEIGHBOUR_V6).goal(3.0),
    ]
}

//! Times that no host of these tests has reached: clocks near their ends, and sources that come back after months. The
//! program is told that it is later than it is, and a later program that it is later still. Needs root and the XDP
//! object.

use std::{net::IpAddr, time::Duration};

use limiter_common::{
    budget::BudgetReason,
    quota::{Quota, Rate},
    rule::EnforcementMode::Enforce,
    verdict::{DropReason, PassReason, Verdict},
};
use limiter_tests::{
    eventually::until,
    fixture::{Limited, Loaded, World, burst_of},
    packet::Packet,
};
use limiter_user::{clock::ktime, dataplane::Dataplane as _};

const CONFORMING: Verdict = Verdict::Pass(PassReason::Conforming);
const SECOND_NS: u64 = 1_000_000_000;
const MINUTE_NS: u64 = 60 * SECOND_NS;
const DAY_NS: u64 = 24 * 60 * MINUTE_NS;
/// By how much the program's clock may be late, with room for a host that is busy.
const LATE_NS: u64 = SECOND_NS / 10;
/// What the program's clock may be early by: it keeps time and tick in one number.
const EARLY_NS: u64 = 1 << 16;

/// Instants by the kernel's clock that are unlike others to the program.
const EDGES: [(&str, u64); 3] = [
    ("the ticks of buckets turn negative", 1 << 55),
    ("the ticks of buckets begin anew", 1 << 56),
    ("nanoseconds turn negative", 1 << 63),
];

/// The same world where it is `now_ns`.
fn at(world: &World, now_ns: u64) -> World {
    let mut world = world.clone();
    world.tuning.clock_offset_ns = now_ns - ktime().get();
    world
}

/// What the clock of this world says.
fn now(world: &World) -> u64 {
    ktime().get() + world.tuning.clock_offset_ns
}

/// A limit by its rate, and the sources that it holds for.
struct Limit {
    rate: Rate,
    burst: u64,
    sources: [String; 2],
}

fn limits() -> Vec<Limit> {
    let rates = [(1, MINUTE_NS, 5), (3, SECOND_NS, 5), (7, SECOND_NS, 5), (1_000_000, SECOND_NS, 50_000)];
    let limits = rates.into_iter().enumerate().map(|(n, (count, per_ns, burst))| Limit {
        rate: Rate { count, per_ns },
        burst,
        sources: [format!("10.{n}.0.7"), format!("2001:db8:{n}::7")],
    });
    limits.collect()
}

impl Limit {
    /// Units that come back in this time, without fractions.
    fn units(&self, time_ns: u64) -> u64 {
        let units = u128::from(time_ns) * u128::from(self.rate.count) / u128::from(self.rate.per_ns);
        units.try_into().expect("fewer than that")
    }
}

/// What became of packets that were more than a bucket holds.
#[derive(Clone, Copy)]
struct Drained {
    began_ns: u64,
    ended_ns: u64,
    passed: u64,
}

fn drain(loaded: &Loaded, world: &World, source: &str, burst: u64) -> Drained {
    let before = loaded.packets(CONFORMING);
    let began_ns = now(world);
    let packets = u32::try_from(2 * burst).expect("few");
    loaded.dataplane.test_run(&Packet::udp(source, 443).build(), packets).expect("run the program");
    let ended_ns = now(world);
    Drained { began_ns, ended_ns, passed: loaded.packets(CONFORMING) - before }
}

#[test]
fn a_source_that_was_idle_has_what_came_back_meanwhile_and_no_more() {
    let limits = limits();
    let mut world = World::new();
    for (n, limit) in limits.iter().enumerate() {
        for cidr in [format!("10.{n}.0.0/16"), format!("2001:db8:{n}::/48")] {
            world = world.rule(&format!("{cidr} {n}"), &cidr, Enforce, &[(Limited::Packets, 1)]);
            let quota = Quota { rate: limit.rate, burst: limit.burst };
            world.policy.packet_rules.last_mut().expect("it has one").packets = Some(quota);
        }
    }
    for (edge, edge_ns) in [("none", 2 * DAY_NS)].into_iter().chain(EDGES) {
        // The edge is passed within the first hour of idling.
        let mut here = at(&world, edge_ns - 30 * MINUTE_NS);
        let mut loaded = here.load();
        let drain_all = |loaded: &Loaded, here: &World| {
            let all = limits.iter().flat_map(|limit| limit.sources.iter().map(move |source| (limit, source)));
            all.map(|(limit, source)| (limit, source, drain(loaded, here, source, limit.burst))).collect::<Vec<_>>()
        };
        let mut earlier = drain_all(&loaded, &here);
        for (limit, source, drained) in &earlier {
            let back = limit.units(drained.ended_ns - drained.began_ns + LATE_NS);
            let expected = limit.burst..=limit.burst + back;
            assert!(expected.contains(&drained.passed), "{edge}, {source}: {} passed at first", drained.passed);
        }
        for (idle, idle_ns) in [
            ("two minutes and a half", 150 * SECOND_NS),
            ("an hour", 60 * MINUTE_NS),
            ("72 minutes", 72 * MINUTE_NS),
            ("100 days", 100 * DAY_NS),
        ] {
            let drained_ns = earlier.iter().map(|(_, _, drained)| drained.ended_ns).max().expect("some");
            here = at(&world, drained_ns + idle_ns);
            loaded = loaded.restart(&here);
            let later = drain_all(&loaded, &here);
            for ((limit, source, before), (_, _, after)) in earlier.iter().zip(&later) {
                let least = limit.burst.min(limit.units(after.began_ns - LATE_NS - before.ended_ns));
                let came_meanwhile = limit.units(after.ended_ns - after.began_ns + LATE_NS);
                // No more than a burst and what comes back passes in any time.
                let of_both = limit.burst + limit.units(after.ended_ns - before.began_ns + LATE_NS) - before.passed;
                let most = of_both.min(limit.burst + came_meanwhile);
                assert!(
                    (least..=most).contains(&after.passed),
                    "{edge}, {source}, idle for {idle}: {} passed, and not {least} to {most}",
                    after.passed,
                );
            }
            earlier = later;
        }
    }
}

/// Sources under a deadline, and what they get until it has passed.
const UNDER_DEADLINE: [([&str; 2], DropReason); 3] = [
    (["192.0.2.7", "2001:db8:1:2::7"], DropReason::Denied),
    (["192.0.2.8", "2001:db8:1:3::8"], DropReason::Blocked),
    (["192.0.2.9", "2001:db8:1:4::9"], DropReason::RateLimitedPackets),
];
const BUDGET: u64 = 5;

/// Puts each of [`UNDER_DEADLINE`] under it.
fn set_deadlines(loaded: &Loaded, lasts: Duration) {
    let parse = |source: &str| source.parse::<IpAddr>().expect("an address");
    let [denied, blocked, limited] = UNDER_DEADLINE.map(|(sources, _)| sources.map(parse));
    for source in denied {
        loaded.dataplane.block(source.into(), Some(lasts)).expect("block");
    }
    for source in blocked {
        loaded.dataplane.push_budget(source, lasts, BudgetReason::KeepsSending, "four").expect("push");
    }
    for source in limited {
        let (budget, reason) = (burst_of(BUDGET), BudgetReason::AddressOverLimit);
        loaded.dataplane.replace_budget(source, budget, lasts, reason, "four").expect("push");
    }
}

#[test]
fn deadlines_hold_until_they_have_passed_and_no_longer() {
    let plenty = [(Limited::Packets, 1 << 20)];
    let world = World::new().rule("four", "0.0.0.0/0", Enforce, &plenty).rule("six", "::/0", Enforce, &plenty);
    for (edge, edge_ns) in EDGES {
        // Loading takes as long as it takes.
        let mut lead_ns = SECOND_NS;
        let (loaded, here) = loop {
            let here = at(&world, edge_ns - lead_ns);
            let loaded = here.load();
            if now(&here) < edge_ns - SECOND_NS / 2 {
                break (loaded, here);
            }
            lead_ns *= 2;
        };
        let lasts = Duration::from_nanos(edge_ns + SECOND_NS / 2 - now(&here));
        let first_deadline_ns = now(&here) + u64::try_from(lasts.as_nanos()).expect("not that long");
        set_deadlines(&loaded, lasts);
        let last_deadline_ns = now(&here) + u64::try_from(lasts.as_nanos()).expect("not that long");
        let budgets = loaded.dataplane.budgets();
        assert_eq!(budgets.len(), 4, "{edge}");
        assert!(budgets.iter().all(|budget| budget.remaining <= lasts && !budget.remaining.is_zero()), "{budgets:?}");

        let judge = |source: &str| loaded.judge(&Packet::udp(source, 443).build()).0;
        for source in UNDER_DEADLINE[2].0 {
            for _ in 0..BUDGET {
                assert_eq!(judge(source), CONFORMING, "{edge}, {source}");
            }
        }
        let all = UNDER_DEADLINE.iter().flat_map(|(sources, reason)| sources.iter().map(|source| (*source, *reason)));
        let (mut before_edge, mut after_edge) = (0, 0);
        until("every deadline passes", Duration::from_secs(60), || {
            let mut refused = 0;
            for (source, reason) in all.clone() {
                let before_ns = now(&here);
                let verdict = judge(source);
                let after_ns = now(&here);
                if verdict == CONFORMING {
                    assert!(after_ns + EARLY_NS >= first_deadline_ns, "{edge}, {source} passes at {after_ns}");
                } else {
                    assert_eq!(verdict, Verdict::Drop(reason), "{edge}, {source}");
                    assert!(before_ns <= last_deadline_ns + LATE_NS, "{edge}, {source} is refused at {before_ns}");
                    refused += 1;
                    before_edge += u32::from(after_ns < edge_ns);
                    after_edge += u32::from(before_ns >= edge_ns);
                }
            }
            (refused == 0).then_some(())
        });
        assert!(
            before_edge > 0 && after_edge > 0,
            "{edge}: refused {before_edge} times before it and {after_edge} after"
        );
    }
}

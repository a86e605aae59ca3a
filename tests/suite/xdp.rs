//! The XDP program on packets, by BPF_PROG_TEST_RUN. Needs root and the XDP object.

use std::{collections::BTreeSet, net::IpAddr, sync::Barrier, thread, time::Duration};

use aya::maps::{Array, Map, MapData};
use limiter_common::{
    addr::{SrcKeyV4, SrcKeyV6, SrcMaskV4, SrcMaskV6},
    budget::BudgetReason,
    budget_filter::Place,
    quota::{Quota, Rate},
    rule::EnforcementMode::Enforce,
    verdict::{DropReason, PassReason, Verdict},
};
use limiter_tests::{
    eventually::until,
    fixture::{Fixture, Limited, Loaded, World, burst_of, fixtures},
    packet::{self, Packet},
};
use limiter_user::dataplane::{Dataplane as _, Protect};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

#[test]
fn every_fixture_gets_its_verdict_and_its_counter() {
    let mut wrong = Vec::new();
    for fixture in fixtures() {
        let loaded = fixture.prepare();
        let (verdict, rule) = loaded.judge(&fixture.packet.build());
        if (verdict, rule.as_deref()) != (fixture.expect, fixture.rule) {
            let Fixture { name, expect, rule: by, .. } = fixture;
            wrong.push(format!("{name}: {verdict:?} by {rule:?}, expected {expect:?} by {by:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_reason_has_a_fixture() {
    let shown: BTreeSet<u32> = fixtures().iter().map(|fixture| fixture.expect.index()).collect();
    let missing: Vec<_> =
        Verdict::all().filter(|verdict| is_reachable(*verdict) && !shown.contains(&verdict.index())).collect();
    assert!(missing.is_empty(), "no fixture for {missing:?}");
}

/// A deny prefix and a budget have no shadow mode.
fn is_reachable(verdict: Verdict) -> bool {
    match verdict {
        Verdict::Pass(_) | Verdict::Drop(_) => true,
        Verdict::ShadowDrop(reason) => match reason {
            DropReason::Denied | DropReason::Blocked => false,
            DropReason::Malformed
            | DropReason::RateLimitedPackets
            | DropReason::RateLimitedBytes
            | DropReason::RateLimitedConnections
            | DropReason::NewSources
            | DropReason::Contended => true,
        },
    }
}

#[test]
fn names_of_fixtures_are_unique() {
    let mut names = BTreeSet::new();
    for fixture in fixtures() {
        assert!(names.insert(fixture.name), "{}", fixture.name);
    }
}

/// Runs `frame` on two CPUs at once, `repeat` times on each.
fn hammer(loaded: &Loaded, frames: [&[u8]; 2], repeat: u32) {
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        for (cpu, frame) in frames.into_iter().enumerate() {
            let barrier = &barrier;
            scope.spawn(move || {
                let mut cpus = CpuSet::new();
                cpus.set(cpu).expect("a CPU");
                sched_setaffinity(Pid::from_raw(0), &cpus).expect("two CPUs");
                barrier.wait();
                loaded.dataplane.test_run(frame, repeat).expect("run the program");
            });
        }
    });
}

#[test]
fn two_cpus_hammering_one_source_admit_exactly_the_quota() {
    const BURST: u64 = 100_000;
    const REPEAT: u32 = 300_000;
    let syn = Packet::tcp("192.0.2.7", 443, packet::SYN).build();
    for (limited, burst, reason) in [
        (Limited::Packets, BURST, DropReason::RateLimitedPackets),
        (Limited::Bytes, BURST * syn.len() as u64, DropReason::RateLimitedBytes),
        (Limited::Connections, BURST, DropReason::RateLimitedConnections),
    ] {
        let loaded = World::new().rule("four", "0.0.0.0/0", Enforce, &[(limited, burst)]).load();
        hammer(&loaded, [&syn, &syn], REPEAT);
        let passed = loaded.packets(Verdict::Pass(PassReason::Conforming));
        let refused = loaded.packets(Verdict::Drop(reason));
        let contended = loaded.packets(Verdict::Drop(DropReason::Contended));
        assert_eq!(passed, BURST, "{limited:?}");
        assert_eq!(passed + refused + contended, u64::from(2 * REPEAT), "{limited:?}: every packet is counted");
    }
}

#[test]
fn two_cpus_charge_every_dimension_or_none() {
    const BURST: u64 = 50_000;
    let syn = Packet::tcp("192.0.2.7", 443, packet::SYN).build();
    let ack = Packet::tcp("192.0.2.7", 443, packet::ACK).build();
    // Connections run out first. What those denials cost in packets would be missing below.
    let limits =
        [(Limited::Packets, 2 * BURST), (Limited::Bytes, 2 * BURST * syn.len() as u64), (Limited::Connections, BURST)];
    let loaded = World::new().rule("four", "0.0.0.0/0", Enforce, &limits).load();
    hammer(&loaded, [&syn, &syn], 200_000);
    let passed = || loaded.packets(Verdict::Pass(PassReason::Conforming));
    assert_eq!(passed(), BURST);
    hammer(&loaded, [&ack, &ack], 200_000);
    assert_eq!(passed(), 2 * BURST);
}

#[test]
fn a_racing_insert_never_refills() {
    const ROUNDS: u8 = 200;
    const BURST: u64 = 50;
    let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &[(Limited::Packets, BURST)]);
    world.tuning.new_sources = Some(burst_of(1000));
    let loaded = world.load();
    for round in 0..ROUNDS {
        // New on both CPUs at the same time.
        let frame = Packet::udp(&format!("192.0.2.{round}"), 443).build();
        hammer(&loaded, [&frame, &frame], 200);
        let passed = loaded.packets(Verdict::Pass(PassReason::Conforming));
        assert_eq!(passed, BURST * (u64::from(round) + 1), "round {round}");
    }
}

#[test]
fn a_flood_of_new_sources_stays_limited_and_memory_bounded() {
    const SOURCES: u32 = 100_000;
    const BURST: u64 = 10;
    let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &[(Limited::Packets, BURST)]);
    world.config.max_sources = 1000;
    let creation_burst = 100;
    world.tuning.new_sources = Some(burst_of(creation_burst));
    let loaded = world.load();
    let heavy = Packet::udp("192.0.2.7", 443).build();
    loaded.dataplane.test_run(&heavy, 5).expect("run the program");
    for source in 0..SOURCES {
        // Spoofed, in 100 neighbourhoods of a thousand packets each.
        let [_, _, host_high, host] = source.to_be_bytes();
        let frame = Packet::udp(&format!("10.0.{}.{host}", host_high % 100), 443).build();
        loaded.dataplane.test_run(&frame, 1).expect("run the program");
    }
    let passed = loaded.packets(Verdict::Pass(PassReason::Conforming)) - 5;
    // Every neighbourhood has one burst at most, and so has each of the sources with a bucket of its own.
    assert!(passed <= BURST * (100 + creation_burst), "{passed} of {SOURCES} passed");
    assert!(loaded.packets(Verdict::Drop(DropReason::NewSources)) > u64::from(SOURCES) / 2);
    let usage = loaded.dataplane.map_usage().expect("read the usage");
    let buckets = usage.iter().find(|usage| usage.map == "BUCKETS_V4").expect("BUCKETS_V4");
    assert_eq!((buckets.entries, buckets.capacity), (creation_burst, 1000));
    // The bucket of the heavy source has outlived the flood: five packets are left of its burst.
    loaded.dataplane.test_run(&heavy, 100).expect("run the program");
    assert_eq!(loaded.packets(Verdict::Pass(PassReason::Conforming)) - 5 - passed, BURST - 5);
    // Good clients in quiet neighbourhoods are new as well, and lose nothing: the chance that one has both of its aggregate
    // buckets in common with flooded neighbourhoods is less than one in a million.
    for neighbourhood in 0..20 {
        let (verdict, _) = loaded.judge(&Packet::udp(&format!("203.0.{neighbourhood}.1"), 443).build());
        assert_eq!(verdict, Verdict::Pass(PassReason::Conforming), "{neighbourhood}");
    }
}

#[test]
fn a_part_of_the_new_buckets_is_kept_for_quiet_neighbourhoods() {
    const NEW: u64 = 100;
    const BURST: u64 = 10;
    let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &[(Limited::Packets, BURST)]);
    world.tuning.new_sources = Some(burst_of(NEW));
    let loaded = world.load();
    let buckets = || {
        let usage = loaded.dataplane.map_usage().expect("read the usage");
        usage.iter().find(|usage| usage.map == "BUCKETS_V4").expect("BUCKETS_V4").entries
    };
    let from = |neighbourhood: u64, host: u64| Packet::udp(&format!("192.0.{neighbourhood}.{host}"), 443).build();
    for host in 0..200 {
        loaded.dataplane.test_run(&from(0, host), 1).expect("run the program");
    }
    let common = NEW * 3 / 4;
    assert_eq!(buckets(), common);
    // By itself a neighbourhood shares one quota, though it has two buckets.
    assert_eq!(loaded.packets(Verdict::Pass(PassReason::Conforming)), common + BURST);
    for quiet in 1..=NEW - common {
        // One of its own, and one that shares.
        for host in 0..2 {
            loaded.dataplane.test_run(&from(quiet, host), 1).expect("run the program");
        }
        assert_eq!(buckets(), common + quiet, "{quiet}");
    }
    // All are made; whoever comes now shares.
    let (verdict, _) = loaded.judge(&from(200, 0));
    assert_eq!((verdict, buckets()), (Verdict::Pass(PassReason::Conforming), NEW));
}

#[test]
fn sources_of_two_rules_in_one_neighbourhood_share_nothing() {
    const NEW: u64 = 8;
    const WIDE: u64 = 50;
    const NARROW: u64 = 1;
    let limit = |burst| [(Limited::Packets, burst)];
    for (network, [wide, narrow], [of_wide, of_narrow]) in [
        ("10.0.0.0/8", ["192.0.2.0/25", "192.0.2.128/25"], ["192.0.2.1", "192.0.2.129"]),
        ("10.0.0.0/8", ["2001:db8:1::/49", "2001:db8:1:8000::/49"], ["2001:db8:1:1::1", "2001:db8:1:8001::1"]),
    ] {
        let mut world = World::new()
            .rule("others", network, Enforce, &limit(1))
            .rule("wide", wide, Enforce, &limit(WIDE))
            .rule("narrow", narrow, Enforce, &limit(NARROW));
        world.tuning.new_sources = Some(burst_of(NEW));
        let loaded = world.load();
        // Nobody gets a bucket of its own any more.
        for n in 0..2 * NEW {
            loaded.dataplane.test_run(&Packet::udp(&format!("10.0.{n}.1"), 443).build(), 1).expect("run the program");
        }
        for _ in 0..2 * WIDE {
            for source in [of_wide, of_narrow] {
                loaded.dataplane.test_run(&Packet::udp(source, 443).build(), 1).expect("run the program");
            }
        }
        let counters = loaded.counters();
        let passed = |rule: &str| {
            let key = (Some(rule.to_owned()), Verdict::Pass(PassReason::Conforming).index());
            counters.get(&key).map_or(0, |counter| counter.packets)
        };
        assert_eq!((passed("wide"), passed("narrow")), (WIDE, NARROW), "{wide} and {narrow}");
    }
}

#[test]
fn a_client_that_keeps_sending_outlives_newcomers_that_fill_the_map_many_times() {
    const MAX_SOURCES: u32 = 16_384;
    const TURNS: u32 = 6;
    const BURST: u64 = 50;
    let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &[(Limited::Packets, BURST)]);
    world.config.max_sources = MAX_SOURCES;
    // As if the flood had lasted for hours.
    world.tuning.new_sources = Some(burst_of(1 << 30));
    let loaded = world.load();
    let client = Packet::udp("192.0.2.7", 443).build();
    let mut newcomer = Packet::udp("10.0.0.0", 443).build();
    let mut used = 0;
    for number in 0..TURNS * MAX_SOURCES {
        newcomer[27..30].copy_from_slice(&number.to_be_bytes()[1..]);
        loaded.dataplane.test_run(&newcomer, 1).expect("run the program");
        if number.is_multiple_of(MAX_SOURCES / 8) {
            used += 1;
            let run = loaded.dataplane.test_run(&client, 1).expect("run the program");
            assert!(!run.dropped, "after {number} newcomers");
        }
    }
    // Its bucket was never made anew.
    let passed = loaded.packets(Verdict::Pass(PassReason::Conforming));
    loaded.dataplane.test_run(&client, 100).expect("run the program");
    assert_eq!(loaded.packets(Verdict::Pass(PassReason::Conforming)) - passed, BURST - used);
}

#[test]
fn buckets_refill_at_their_rate() {
    let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &[(Limited::Packets, 1)]);
    let quota = Quota { rate: Rate { count: 100, per_ns: 1_000_000_000 }, burst: 1 };
    world.policy.packet_rules[0].packets = Some(quota);
    let loaded = world.load();
    let frame = Packet::udp("192.0.2.7", 443).build();
    let passes = || matches!(loaded.judge(&frame).0, Verdict::Pass(_));
    assert!(passes());
    assert!(!passes());
    until("a unit has come back", Duration::from_secs(10), || passes().then_some(()));
}

#[test]
fn everything_switched_on_stays_below_a_hundred_thousand_instructions() {
    let everything = || {
        let all = [(Limited::Packets, 1_000_000_000), (Limited::Bytes, 1 << 40), (Limited::Connections, 1_000_000_000)];
        let world = World::new().rule("four", "0.0.0.0/0", Enforce, &all).rule("six", "::/0", Enforce, &all);
        let world =
            world.rule("narrow", "198.51.100.0/24", Enforce, &all).rule("narrow6", "2001:db8:9::/48", Enforce, &all);
        world.allow("203.0.113.0/24").allow("2001:db8:a::/48").deny("203.0.112.0/24").deny("2001:db8:b::/48")
    };
    let one = || World::new().rule("four", "0.0.0.0/0", Enforce, &[(Limited::Packets, 1_000_000_000)]);
    let mut one_without_budgets = one();
    one_without_budgets.config.budgets = false;
    let mut most = 0;
    for (name, world) in [
        ("everything", everything()),
        ("everything, all protected", everything().protect(Protect::All)),
        ("one default rule", one()),
        ("one default rule, no budgets", one_without_budgets),
        ("nothing", World::new()),
    ] {
        let instructions = world.load().dataplane.verified_instructions().expect("the verifier's count");
        eprintln!("verified instructions: {instructions:>7}  {name}");
        most = most.max(instructions);
    }
    assert!(most < 100_000, "{most}");
}

/// Rough, for whoever reads the output; nothing here fails by time.
#[test]
fn nanoseconds_a_packet() {
    const REPEAT: u32 = 1_000_000;
    let huge = [(Limited::Packets, 1 << 40)];
    let all = [(Limited::Packets, 1 << 40), (Limited::Bytes, 1 << 46), (Limited::Connections, 1 << 40)];
    let one = || World::new().rule("four", "0.0.0.0/0", Enforce, &huge).rule("six", "::/0", Enforce, &huge);
    let mut one_without_budgets = one();
    one_without_budgets.config.budgets = false;
    let everything = || {
        let world = World::new().rule("four", "0.0.0.0/0", Enforce, &all).rule("six", "::/0", Enforce, &all);
        let world =
            world.rule("narrow", "192.0.2.0/24", Enforce, &all).rule("narrow6", "2001:db8:1::/48", Enforce, &all);
        world.allow("203.0.113.0/24").allow("2001:db8:a::/48").deny("203.0.112.0/24").deny("2001:db8:b::/48")
    };
    let syn4 = || Packet::tcp("192.0.2.7", 443, packet::SYN);
    let syn6 = || Packet::tcp("2001:db8:1:2::7", 443, packet::SYN);
    for (name, world, packet) in [
        ("not IP", one(), Packet::raw(0x88cc, &[0; 50])),
        ("not protected", one(), Packet::tcp("192.0.2.7", 22, packet::SYN)),
        ("deny hit", World::new().deny("192.0.2.7/32"), syn4()),
        (
            "deny hit, no budgets",
            {
                let mut world = World::new().deny("192.0.2.7/32");
                world.config.budgets = false;
                world
            },
            syn4(),
        ),
        ("IPv4, one default rule, no budgets", one_without_budgets.clone(), syn4()),
        ("IPv6, one default rule, no budgets", one_without_budgets, syn6()),
        ("IPv4, one default rule", one(), syn4()),
        ("IPv6, one default rule", one(), syn6()),
        ("IPv4, over the limit", World::new().rule("four", "0.0.0.0/0", Enforce, &[(Limited::Packets, 1)]), syn4()),
        ("IPv4, everything", everything(), syn4()),
        ("IPv6, everything", everything(), syn6()),
    ] {
        let loaded = world.load();
        let frame = packet.build();
        let best = (0..5).map(|_| loaded.dataplane.test_run(&frame, REPEAT).expect("run the program").duration).min();
        eprintln!("{:>4} ns  {name}", best.expect("five runs").as_nanos());
    }
}

/// As the XDP program and the agent find it.
fn bit_of(source: IpAddr) -> Place {
    Place::of(match source {
        IpAddr::V4(v4) => SrcKeyV4::new(v4.octets(), SrcMaskV4::new(32)).digest(),
        IpAddr::V6(v6) => SrcKeyV6::new(v6.octets(), SrcMaskV6::new(64)).digest(),
    })
}

/// Two sources of each family for which one bit stands.
fn sources_of_one_bit() -> [IpAddr; 4] {
    let first = IpAddr::from([192, 0, 2, 7]);
    let same = |source: &IpAddr| bit_of(*source) == bit_of(first);
    let mut v4 = (0u32..).map(|n| IpAddr::from((0x0a00_0000 + n).to_be_bytes())).filter(same);
    let mut v6 = (0u128..).map(|n| IpAddr::V6((0x2001_0db8 << 96 | n << 64 | 7).into())).filter(same);
    [Some(first), v4.next(), v6.next(), v6.next()].map(|source| source.expect("another"))
}

#[test]
fn sources_that_share_a_bit_keep_and_lose_their_budgets_each_by_itself() {
    const HOUR: Duration = Duration::from_secs(3600);
    let plenty = [(Limited::Packets, 1 << 20)];
    let world = World::new().rule("four", "0.0.0.0/0", Enforce, &plenty).rule("six", "::/0", Enforce, &plenty);
    let mut loaded = world.load();
    let sources = sources_of_one_bit();
    let [a, b, c, d] = sources;
    let push = |loaded: &Loaded, source, lasts| {
        loaded.dataplane.push_budget(source, lasts, BudgetReason::KeepsSending, "four").expect("push");
    };
    let remove = |loaded: &Loaded, source| assert!(loaded.dataplane.remove_budget(source).expect("remove"));
    let is_blocked = |loaded: &Loaded, source: IpAddr| {
        let (verdict, _) = loaded.judge(&Packet::udp(&source.to_string(), 443).build());
        verdict == Verdict::Drop(DropReason::Blocked)
    };
    let blocked =
        |loaded: &Loaded| sources.into_iter().filter(|source| is_blocked(loaded, *source)).collect::<Vec<_>>();
    let bits = |loaded: &Loaded| {
        let map = MapData::from_pin(loaded.pinned("BUDGET_FILTER")).expect("open the filter");
        let words = Array::<_, u64>::try_from(Map::Array(map)).expect("the filter's type");
        words.iter().map(|word| word.expect("a word").count_ones()).sum::<u32>()
    };
    assert_eq!((blocked(&loaded), bits(&loaded)), (vec![], 0));
    push(&loaded, a, HOUR);
    assert_eq!((blocked(&loaded), bits(&loaded)), (vec![a], 1));
    push(&loaded, c, HOUR);
    push(&loaded, a, HOUR);
    assert_eq!((blocked(&loaded), bits(&loaded)), (vec![a, c], 1));
    remove(&loaded, a);
    assert_eq!((blocked(&loaded), bits(&loaded)), (vec![c], 1), "pushed twice, and removed once");
    loaded.dataplane.reload(&world.policy).expect("reload");
    assert_eq!((blocked(&loaded), bits(&loaded)), (vec![c], 1), "a new program");
    push(&loaded, b, HOUR);
    remove(&loaded, c);
    assert_eq!((blocked(&loaded), bits(&loaded)), (vec![b], 1));
    push(&loaded, d, HOUR);
    loaded = loaded.restart(&world);
    assert_eq!((blocked(&loaded), bits(&loaded)), (vec![b, d], 1), "a new agent");
    push(&loaded, a, Duration::from_millis(1));
    until("it expires", Duration::from_secs(30), || (loaded.dataplane.expire().expect("expire") == 1).then_some(()));
    assert_eq!((blocked(&loaded), bits(&loaded)), (vec![b, d], 1), "one has expired");
    loaded.dataplane.unblock(b.into()).expect("unblock");
    assert_eq!((blocked(&loaded), bits(&loaded)), (vec![d], 1));
    remove(&loaded, d);
    assert!(!loaded.dataplane.remove_budget(d).expect("remove"), "there is none any more");
    assert_eq!((blocked(&loaded), bits(&loaded)), (vec![], 0));
}

#[test]
fn a_budget_that_is_pushed_while_a_program_is_made_holds_in_it() {
    const HOUR: Duration = Duration::from_secs(3600);
    let world = World::new();
    let loaded = world.load();
    let mut pushed: Vec<IpAddr> = Vec::new();
    for _ in 0..4 {
        thread::scope(|scope| {
            let reload = scope.spawn(|| loaded.dataplane.reload(&world.policy).expect("reload"));
            while !reload.is_finished() {
                let n = u32::try_from(pushed.len()).expect("few");
                // Far from each other, so that each has a word of its own.
                let source = IpAddr::from((0x0a00_0000 + n * 0x101).to_be_bytes());
                loaded.dataplane.push_budget(source, HOUR, BudgetReason::KeepsSending, "four").expect("push");
                pushed.push(source);
                thread::park_timeout(Duration::from_millis(2));
            }
        });
    }
    assert!(pushed.len() > 8, "{}", pushed.len());
    for source in pushed {
        let (verdict, _) = loaded.judge(&Packet::udp(&source.to_string(), 443).build());
        assert_eq!(verdict, Verdict::Drop(DropReason::Blocked), "{source}");
    }
}

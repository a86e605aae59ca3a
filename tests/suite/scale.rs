//! As many packet rules and prefixes as the product promises. Needs root and the XDP object.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Barrier,
    thread,
    time::Duration,
};

use ipnet::IpNet;
use limiter_common::{
    rule::EnforcementMode::Enforce,
    verdict::{DropReason, PassReason, Verdict},
};
use limiter_tests::{
    agent::Setup,
    eventually::until,
    fixture::{Counters, Limited, Loaded, World, rule},
    http,
    netns::{CLIENT_V4, CLIENT_V6, GATEWAY_V4, GATEWAY_V6, INTERFACE, TestNet},
    packet::Packet,
    random::Random,
};
use limiter_user::{
    clock::Stopwatch,
    dataplane::{Dataplane as _, DataplaneError},
    policy::Policy,
};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

/// On a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(100);
const RULES: u32 = 10_000;
const PREFIXES: usize = 100_000;
/// How many packets a table is tried with; the kernel needs up to a millisecond for a run of one packet.
const SOURCES: usize = 5000;
const HOUR: Option<Duration> = Some(Duration::from_secs(3600));

/// For whoever reads the output; nothing here fails by it.
#[expect(clippy::print_stderr, reason = "a measurement that goes with the test's output")]
fn tell(what: &str, took: Stopwatch) {
    eprintln!("{:>8} ms  {what}", took.elapsed().as_millis());
}

/// The best of a few readings is quick: a machine that is busy with other tests makes any one of them slow.
#[track_caller]
fn within_a_second<T>(what: &str, read: impl Fn() -> T) -> T {
    for _ in 0..10 {
        let reading = Stopwatch::start();
        let answer = read();
        let took = reading.elapsed();
        if took < Duration::from_secs(1) {
            tell(what, reading);
            return answer;
        }
    }
    panic!("{what} takes more than a second");
}

fn udp(source: IpAddr) -> Vec<u8> {
    Packet::udp(&source.to_string(), 443).build()
}

fn v4(bits: u32) -> IpAddr {
    Ipv4Addr::from(bits).into()
}

fn v6(bits: u128) -> IpAddr {
    Ipv6Addr::from(bits).into()
}

/// Within 2001:db8::/32, by the 64 bits behind it.
fn documentation(bits: u64) -> u128 {
    0x2001_0db8 << 96 | u128::from(bits) << 32
}

/// `count` prefixes of either family, each once, of lengths as they come in practice, many within others.
fn prefixes(random: &mut Random, count: usize) -> Vec<IpNet> {
    let mut all = BTreeSet::new();
    for is_ipv4 in [true, false] {
        let mut family = BTreeSet::new();
        while family.len() < count {
            let net = if is_ipv4 {
                // 8.0.0.0/7, so that they nest.
                IpNet::new(v4(8 << 24 | random.below(1u32 << 25)), 12 + random.below(21u8))
            } else {
                IpNet::new(v6(documentation(random.next() >> 8)), 36 + random.below(93u8))
            };
            family.insert(net.expect("a length in range").trunc());
        }
        all.extend(family);
    }
    all.into_iter().collect()
}

/// What a longest-prefix lookup must find: walks from the address to /0.
fn longest<V: Copy>(table: &BTreeMap<IpNet, V>, address: IpAddr) -> Option<V> {
    std::iter::successors(Some(IpNet::from(address)), IpNet::supernet).find_map(|net| table.get(&net).copied())
}

/// An address of a prefix, or any of the neighbourhood.
fn source(random: &mut Random, prefixes: &[IpNet]) -> IpAddr {
    let prefix = prefixes[random.below(prefixes.len())];
    let is_inside = random.below(4u8) > 0;
    match prefix {
        IpNet::V4(net) if is_inside => v4(net.addr().to_bits() | random.below(u32::MAX) & net.hostmask().to_bits()),
        IpNet::V6(net) if is_inside => {
            let bits = u128::from(random.next()) << 64 | u128::from(random.next());
            v6(net.addr().to_bits() | bits & net.hostmask().to_bits())
        }
        IpNet::V4(_) => v4(8 << 24 | random.below(1u32 << 26)),
        IpNet::V6(_) => v6(documentation(random.next() >> 6)),
    }
}

/// Packets by rule and verdict that have come since `before`.
fn since(before: &Counters, loaded: &Loaded) -> BTreeMap<(Option<String>, u32), u64> {
    let after = loaded.counters();
    let grown = after.into_iter().map(|(key, counter)| {
        let earlier = before.get(&key).map_or(0, |counter| counter.packets);
        (key, counter.packets - earlier)
    });
    grown.filter(|(_, packets)| *packets > 0).collect()
}

fn many_rules(random: &mut Random) -> (World, BTreeMap<IpNet, usize>) {
    let mut world = World::new();
    world.config.max_sources = 1 << 16;
    world.tuning.new_sources = Some(limiter_tests::fixture::burst_of(1 << 16));
    let mut by_prefix = BTreeMap::new();
    let mut nets = prefixes(random, RULES as usize);
    nets.extend(["0.0.0.0/0", "::/0"].map(|net| net.parse::<IpNet>().expect("a prefix")));
    for (index, net) in nets.iter().enumerate() {
        let limits = [(Limited::Packets, 1_000_000)];
        world.policy.packet_rules.push(rule(&format!("r{index}"), &net.to_string(), Enforce, &limits));
        by_prefix.insert(*net, index);
    }
    (world, by_prefix)
}

#[test]
fn the_longest_of_ten_thousand_rules_of_each_family_decides() {
    let mut random = Random::new(1);
    let (world, by_prefix) = many_rules(&mut random);
    let nets: Vec<IpNet> = by_prefix.keys().copied().filter(|net| net.prefix_len() > 0).collect();
    let start = Stopwatch::start();
    let loaded = world.load();
    tell("start with 20,002 packet rules", start);

    let before = loaded.counters();
    let mut expected = BTreeMap::new();
    for _ in 0..SOURCES {
        let source = source(&mut random, &nets);
        loaded.dataplane.test_run(&udp(source), 1).expect("run the program");
        let rule = longest(&by_prefix, source).map(|index| format!("r{index}"));
        *expected.entry((rule, Verdict::Pass(PassReason::Conforming).index())).or_insert(0u64) += 1;
    }
    assert!(expected.len() > 2000, "{} rules were met", expected.len());
    within_a_second("reading the counters", || loaded.counters());
    assert_eq!(since(&before, &loaded), expected);

    let reload = Stopwatch::start();
    loaded.dataplane.reload(&world.policy).expect("reload");
    tell("reload of the same", reload);
    assert_eq!(since(&before, &loaded), expected, "counters stay with their rules");
    let loaded = loaded.restart(&world);
    assert_eq!(since(&before, &loaded), expected, "also when another agent starts");

    // A policy of few rules keeps the counters of the rules that it keeps.
    let (kept, _) = expected.iter().next_back().expect("rules were met");
    let mut few = World::new();
    let is_kept = |id: &str| Some(id) == kept.0.as_deref();
    few.policy.packet_rules = world.policy.packet_rules.iter().filter(|rule| is_kept(&rule.id)).cloned().collect();
    assert_eq!(few.policy.packet_rules.len(), 1);
    let reload = Stopwatch::start();
    loaded.dataplane.reload(&few.policy).expect("reload");
    tell("reload of one of the rules", reload);
    let net = few.policy.packet_rules[0].cidrs[0];
    loaded.dataplane.test_run(&udp(net.addr()), 1).expect("run the program");
    assert_eq!(since(&before, &loaded)[kept], expected[kept] + 1);
}

#[test]
fn a_rule_of_many_prefixes_is_one_rule_with_a_bucket_for_each_source() {
    let mut random = Random::new(2);
    let nets = prefixes(&mut random, RULES as usize);
    let mut world = World::new();
    let mut many = rule("many", "192.0.2.0/24", Enforce, &[(Limited::Packets, 2)]);
    many.cidrs.extend(&nets);
    world.policy.packet_rules.push(many);
    let start = Stopwatch::start();
    let loaded = world.load();
    tell("start with one rule of 20,001 prefixes", start);
    let dropped = Verdict::Drop(DropReason::RateLimitedPackets);
    for net in [nets[0], nets[RULES as usize - 1], nets[RULES as usize], nets[nets.len() - 1]] {
        let frame = udp(net.addr());
        let verdicts = [0; 3].map(|_| loaded.judge(&frame));
        let rule = Some("many".to_owned());
        let passed = (Verdict::Pass(PassReason::Conforming), rule.clone());
        assert_eq!(verdicts, [passed.clone(), passed, (dropped, rule)], "{net}");
    }
}

#[test]
fn counters_of_all_cpus_lose_nothing() {
    const REPEAT: u32 = 200_000;
    let mut world = World::new();
    for n in 0..2000 {
        let net = format!("10.0.{}.{}/32", n / 250, n % 250);
        world.policy.packet_rules.push(rule(&format!("r{n}"), &net, Enforce, &[(Limited::Packets, 1000)]));
    }
    let loaded = world.load();
    // The last of equally long prefixes is not among those that each CPU counts by itself.
    let frame = udp(v4(0x0a00_0000 | 7 << 8 | 249));
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        for cpu in 0..2 {
            let (loaded, frame, barrier) = (&loaded, &frame, &barrier);
            scope.spawn(move || {
                let mut cpus = CpuSet::new();
                cpus.set(cpu).expect("a CPU");
                sched_setaffinity(Pid::from_raw(0), &cpus).expect("two CPUs");
                barrier.wait();
                loaded.dataplane.test_run(frame, REPEAT).expect("run the program");
            });
        }
    });
    let counters = loaded.counters();
    let (packets, bytes) = counters.iter().fold((0, 0), |(packets, bytes), ((rule, _), counter)| {
        assert_eq!(rule.as_deref(), Some("r1999"));
        (packets + counter.packets, bytes + counter.bytes)
    });
    assert_eq!((packets, bytes), (u64::from(2 * REPEAT), u64::from(2 * REPEAT) * frame.len() as u64));
    assert_eq!(loaded.packets(Verdict::Pass(PassReason::Conforming)), 1000);
}

#[test]
fn rules_and_prefixes_beyond_the_room_are_refused_by_number() {
    let one = rule("r", "0.0.0.0/0", Enforce, &[(Limited::Packets, 1)]);
    let loaded = World::new().rule("four", "0.0.0.0/0", Enforce, &[(Limited::Packets, 1)]).load();
    let refused = |policy: &Policy| match loaded.dataplane.reload(policy) {
        Err(error @ DataplaneError::TooMany { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let mut policy = Policy::default();
    policy.packet_rules = vec![one.clone(); 32_768];
    assert_eq!(refused(&policy), "too many packet rules: 32768, and there is room for 32767");
    for (is_ipv4, family) in [(true, "IPv4"), (false, "IPv6")] {
        let mut many = one.clone();
        let host = |n: u32| if is_ipv4 { v4(n) } else { v6(n.into()) };
        many.cidrs = (0..=16_384).map(|n| host(n).into()).collect();
        policy.packet_rules = vec![many];
        let expected = format!("too many {family} prefixes of packet rules: 16385, and there is room for 16384");
        assert_eq!(refused(&policy), expected);
    }
    let (verdict, rule) = loaded.judge(&udp(v4(7)));
    assert_eq!((verdict, rule.as_deref()), (Verdict::Pass(PassReason::Conforming), Some("four")), "nothing changed");
}

/// The verdict of lists alone.
fn by_lists(allow: &BTreeMap<IpNet, ()>, deny: &BTreeMap<IpNet, ()>, source: IpAddr) -> Verdict {
    if longest(allow, source).is_some() {
        Verdict::Pass(PassReason::Allowed)
    } else if longest(deny, source).is_some() {
        Verdict::Drop(DropReason::Denied)
    } else {
        Verdict::Pass(PassReason::Unlimited)
    }
}

#[test]
fn a_hundred_thousand_prefixes_of_each_kind() {
    let mut random = Random::new(3);
    let of = |nets: &[IpNet]| nets.iter().map(|net| (*net, ())).collect::<BTreeMap<_, _>>();
    // In practice what is allowed is narrower than what is denied.
    let allow: Vec<IpNet> = {
        let nets = prefixes(&mut random, PREFIXES);
        nets.into_iter()
            .map(|net| IpNet::new(net.addr(), net.max_prefix_len() - 2).expect("a length").trunc())
            .collect()
    };
    let allow = of(&allow);
    let deny = of(&prefixes(&mut random, PREFIXES));
    let mut world = World::new();
    world.policy.allow = allow.keys().copied().collect();
    world.policy.deny = deny.keys().copied().collect();
    let nets: Vec<IpNet> = allow.keys().chain(deny.keys()).copied().collect();
    eprintln!("{} allow and {} deny prefixes", allow.len(), deny.len());
    let start = Stopwatch::start();
    let loaded = world.load();
    tell("start", start);

    let check = |loaded: &Loaded, deny: &BTreeMap<IpNet, ()>, random: &mut Random| {
        let before = loaded.counters();
        let mut expected = BTreeMap::new();
        for _ in 0..SOURCES {
            let source = source(random, &nets);
            let run = loaded.dataplane.test_run(&udp(source), 1).expect("run the program");
            let verdict = by_lists(&allow, deny, source);
            assert_eq!(run.dropped, matches!(verdict, Verdict::Drop(_)), "{source}: {verdict:?}");
            *expected.entry((None, verdict.index())).or_insert(0u64) += 1;
        }
        assert_eq!(since(&before, loaded), expected);
        assert!(expected.len() == 3 && expected.values().all(|count| *count > 100), "{expected:?}");
    };
    check(&loaded, &deny, &mut random);
    for frame in [udp(nets[0].addr()), udp(nets[nets.len() - 1].addr())] {
        let run = loaded.dataplane.test_run(&frame, 100_000).expect("run the program");
        eprintln!("{:>8} ns  a packet", run.duration.as_nanos());
    }

    let reload = Stopwatch::start();
    loaded.dataplane.reload(&world.policy).expect("reload");
    tell("reload of the same", reload);

    // What operators block beside that, some of it for a time that is over at once.
    let beside = |n: u32| IpNet::from(v4(0xc633_6400 | n));
    let put = Stopwatch::start();
    for n in 0..200 {
        let lasts = if n % 2 == 0 { HOUR } else { Some(Duration::ZERO) };
        loaded.dataplane.block(beside(n), lasts).expect("block");
    }
    tell("200 blocks of operators", put);
    let is_blocked =
        |loaded: &Loaded, n: u32| loaded.judge(&udp(beside(n).addr())).0 == Verdict::Drop(DropReason::Denied);
    let held = |loaded: &Loaded| (0..200).filter(|n| is_blocked(loaded, *n)).collect::<Vec<_>>();
    let even: Vec<u32> = (0..200).step_by(2).collect();
    assert_eq!(held(&loaded), even);
    let expire = Stopwatch::start();
    assert_eq!(loaded.dataplane.expire().expect("expire"), 100);
    tell("expiry of 100 of them", expire);
    assert_eq!(held(&loaded), even);

    // Half of the denied prefixes are gone from the policy, and operators' blocks hold on, also over a restart.
    let fewer: BTreeMap<_, _> = deny.iter().step_by(2).map(|(net, ())| (*net, ())).collect();
    world.policy.deny = fewer.keys().copied().collect();
    loaded.dataplane.reload(&world.policy).expect("reload");
    check(&loaded, &fewer, &mut random);
    assert_eq!(held(&loaded), even);
    let start = Stopwatch::start();
    let loaded = loaded.restart(&world);
    tell("start in the place of another agent", start);
    check(&loaded, &fewer, &mut random);
    assert_eq!(held(&loaded), even);

    // The room is 131,072 of a kind: the policy takes all but three, and operators those.
    let room = 131_072 - fewer.keys().filter(|net| net.addr().is_ipv4()).count() - even.len();
    let fill = |n: usize| IpNet::from(v4(0xcb00_0000 | u32::try_from(n).expect("few")));
    world.policy.deny.extend((0..room - 3).map(fill));
    loaded.dataplane.reload(&world.policy).expect("reload");
    for n in room - 3..room {
        loaded.dataplane.block(fill(n), HOUR).expect("block");
    }
    let error = loaded.dataplane.block(fill(room), HOUR).expect_err("there is no more room");
    assert_eq!(error.to_string(), "too many deny prefixes: 131073, and there is room for 131072");
    assert_eq!(loaded.judge(&udp(fill(room).addr())).0, Verdict::Pass(PassReason::Unlimited));
    assert_eq!(loaded.judge(&udp(fill(room - 1).addr())).0, Verdict::Drop(DropReason::Denied));
}

#[test]
fn a_wide_block_holds_in_a_hundred_thousand_narrow_ones() {
    // Their time is over, and no agent has removed them.
    let narrow = |n: usize| v4(0xcb00_0000 | u32::try_from(n).expect("few") << 4);
    let wide: IpNet = "203.0.0.0/8".parse().expect("a prefix");
    let loaded = World::new().load();
    let put = Stopwatch::start();
    for n in 0..PREFIXES {
        loaded.dataplane.block(narrow(n).into(), Some(Duration::ZERO)).expect("block");
    }
    tell("100,000 blocks of operators", put);
    let dropped = |loaded: &Loaded| {
        let some = (0..PREFIXES).step_by(997).map(|n| loaded.dataplane.test_run(&udp(narrow(n)), 1));
        some.filter(|run| run.as_ref().expect("run the program").dropped).count()
    };
    let all = (0..PREFIXES).step_by(997).count();
    assert_eq!(dropped(&loaded), 0);
    let block = Stopwatch::start();
    loaded.dataplane.block(wide, HOUR).expect("block");
    tell("a block of all of them", block);
    assert_eq!(dropped(&loaded), all);
    let unblock = Stopwatch::start();
    loaded.dataplane.unblock(wide).expect("unblock");
    tell("its end", unblock);
    assert_eq!(dropped(&loaded), 0);
    loaded.dataplane.block(wide, HOUR).expect("block");
    let expire = Stopwatch::start();
    assert_eq!(loaded.dataplane.expire().expect("expire"), PREFIXES);
    tell("expiry of the narrow ones", expire);
    assert_eq!(dropped(&loaded), all);
}

/// A policy file with everything at its full size.
fn large_policy(random: &mut Random) -> String {
    let mut text = String::new();
    for name in ["allow", "deny"] {
        let mut nets = prefixes(random, PREFIXES);
        if name == "allow" {
            // Aside from the others: what is allowed is never denied or limited.
            let moved = |bits: u32| bits & 0x00ff_ffff | 20 << 24;
            for net in &mut nets {
                *net = match net {
                    IpNet::V4(net) => IpNet::new(v4(moved(net.addr().to_bits())), 32),
                    IpNet::V6(net) => IpNet::new(v6(net.addr().to_bits() ^ 1 << 96), net.prefix_len()),
                }
                .expect("a length");
            }
            nets = nets.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
        }
        writeln!(text, "{name} = [").expect("a String takes all");
        for net in nets {
            writeln!(text, "  \"{net}\",").expect("a String takes all");
        }
        text += "]\n";
    }
    let limit = "packets = { rate = \"1/h\", burst = 3 }";
    for (index, net) in prefixes(random, RULES as usize).iter().enumerate() {
        writeln!(text, "[[packet_rules]]\nid = \"r{index}\"\ncidr = \"{net}\"\n{limit}").expect("a String takes all");
    }
    let clients = [CLIENT_V4[0], CLIENT_V6[0]];
    writeln!(text, "[[packet_rules]]\nid = \"clients\"\ncidr = {:?}\n{limit}", clients.map(|ip| ip.to_string()))
        .expect("a String takes all");
    text
}

#[test]
fn an_agent_runs_a_policy_of_full_size() {
    let net = TestNet::new();
    let policy = large_policy(&mut Random::new(4));
    eprintln!("{:>8} KB  policy", policy.len() / 1024);
    let configuration = format!(
        // Sources are single addresses, since some rules are for those.
        "[xdp]\ninterfaces = [\"{INTERFACE}\"]\nprotect = [\"quic/443\"]\npin_dir = \"{}\"\nmax_sources = 65536\n\
         [identity]\nipv6_prefix = 128\n",
        net.pin_dir().display(),
    );
    let setup = Setup::new(&configuration, &policy);
    let validate = Stopwatch::start();
    let output = setup.run(&["validate"]);
    tell("limiter validate", validate);
    assert!(output.status.success(), "{output:?}");
    let start = Stopwatch::start();
    let mut agent = net.gateway(|| setup.spawn());
    until("the agent is ready", PATIENCE, || {
        assert!(agent.is_running(), "the agent ended:\n{}", setup.log());
        agent.is_ready().then_some(())
    });
    tell("start until ready", start);

    for (client, gateway) in [(CLIENT_V4[0], GATEWAY_V4), (CLIENT_V6[0], GATEWAY_V6)] {
        let server = net.gateway(|| UdpSocket::bind((gateway, 443)).expect("bind"));
        server.set_read_timeout(Some(PATIENCE)).expect("set the timeout");
        let socket = net.client(|| UdpSocket::bind(SocketAddr::new(client, 0)).expect("bind"));
        for _ in 0..5 {
            socket.send_to(b"packet", (gateway, 443)).expect("send");
        }
        for _ in 0..3 {
            server.recv(&mut [0; 16]).expect("three packets pass");
        }
    }
    let series = |verdict: &str, reason: &str| {
        format!("limiter_xdp_packets_total{{rule=\"clients\",verdict=\"{verdict}\",reason=\"{reason}\"}}")
    };
    until("the counters are there", PATIENCE, || {
        let passed = agent.metric(&series("pass", "conforming"));
        (passed == 6.0 && agent.metric(&series("drop", "rate_limited_packets")) == 4.0).then_some(())
    });
    let metrics = within_a_second("metrics", || http::get(&setup.admin(), "/metrics", &[]).expect("an answer").body);
    let of_rules = metrics.lines().filter(|line| line.starts_with("limiter_xdp_packets_total{rule=\"r"));
    assert_eq!(of_rules.count(), 0, "no series for a rule that has not decided anything");
    let status = within_a_second("status", || agent.status());
    assert_eq!(status["policy"]["error"], serde_json::Value::Null);
    let xdp = &status["xdp"];
    assert_eq!((xdp["deny"].as_array().map(Vec::len), xdp["more_deny"].as_u64()), (Some(1000), Some(199_000)));
    let read = Stopwatch::start();
    let output = setup.run(&["status"]);
    tell("limiter status", read);
    assert!(output.status.success(), "{output:?}");
    eprintln!("{:>8} KB  limiter status prints", output.stdout.len() / 1024);
    let memory = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).expect("the agent runs");
    let resident = memory.lines().find(|line| line.starts_with("VmRSS")).expect("a size");
    eprintln!("agent {resident}");

    let reload = Stopwatch::start();
    setup.replace("policy.toml", &policy.replace("burst = 3", "burst = 4"));
    agent.hang_up();
    until("the policy is in force", PATIENCE, || (agent.reloads("ok") >= 1.0).then_some(()));
    tell("reload until in force", reload);
    assert_eq!(agent.reloads("failed") + agent.reloads("invalid"), 0.0);

    setup.write("policy.toml", &format!("{policy}[[packet_rules]]\nid = \"twice\"\ncidr = \"{}\"\n", CLIENT_V4[0]));
    let output = setup.run(&["validate"]);
    let says = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(78));
    let mistake = format!("the packet rules \"clients\" and \"twice\" both have the prefix {}/32", CLIENT_V4[0]);
    assert!(says.contains(&mistake), "{says}");
}

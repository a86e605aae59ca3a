//! What the XDP program tells, and what becomes of it: events, `limiter top`, lines for diagnosis.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::Barrier,
    thread,
    time::Duration,
};

use limiter_common::{
    budget::BudgetReason,
    event::{Event, EventClass, EventCounts, EventKind},
    quota::{Quota, Rate},
    rule::EnforcementMode::{Enforce, Shadow},
    verdict::{DropReason, PassReason, Verdict},
};
use limiter_tests::{
    agent::{Agent, Setup},
    eventually::until,
    fixture::{Limited, Loaded, World, burst_of},
    netns::{CLIENT_V4, GATEWAY_V4, INTERFACE, TestNet},
    packet::{self, Packet},
};
use limiter_user::dataplane::{Dataplane as _, Diagnosis, EventReader};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

const V4: &str = "192.0.2.7";
const V6: &str = "2001:db8:1:2::7";
const WAIT: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);

/// No samples unless a test asks, and room for every event.
fn world() -> World {
    let mut world = World::new();
    world.tuning.sample_one_in = 0;
    world.tuning.events = Some(Quota { rate: Rate { count: 1_000_000, per_ns: 1_000_000_000 }, burst: 1 << 20 });
    world
}

fn limited(burst: u64) -> World {
    let burst = [(Limited::Packets, burst)];
    world().rule("four", "0.0.0.0/0", Enforce, &burst).rule("six", "::/0", Enforce, &burst)
}

fn reader(loaded: &Loaded) -> EventReader {
    loaded.dataplane.events().expect("open the ring").expect("the kernel tells")
}

fn read(reader: &mut EventReader) -> Vec<Event> {
    std::iter::from_fn(|| reader.read()).collect()
}

fn counts(loaded: &Loaded, class: EventClass) -> EventCounts {
    let counts = loaded.dataplane.event_counts().expect("read the counts");
    counts.into_iter().find(|(of, _)| *of == class).expect("every class").1
}

fn run(loaded: &Loaded, packet: &Packet, repeat: u32) {
    loaded.dataplane.test_run(&packet.build(), repeat).expect("run the program");
}

/// What an event says, in words.
fn told(loaded: &Loaded, event: &Event) -> (Vec<EventKind>, Option<IpAddr>, Option<Verdict>, Option<String>) {
    let rule = event.slot().and_then(|slot| loaded.dataplane.rule_in(slot)).map(|rule| rule.to_string());
    (event.news().kinds().collect(), event.source(), event.verdict(), rule)
}

/// Per-CPU bounds are exact on one CPU.
fn stay_on_one_cpu() {
    let mut cpus = CpuSet::new();
    cpus.set(0).expect("a CPU");
    sched_setaffinity(Pid::from_raw(0), &cpus).expect("the first CPU");
}

#[test]
fn a_source_that_begins_to_be_limited_is_told_once() {
    let with = |mode, limited, burst| {
        let limits = [(limited, burst)];
        world().rule("four", "0.0.0.0/0", mode, &limits).rule("six", "::/0", mode, &limits)
    };
    let syn = |source| Packet::tcp(source, 443, packet::SYN);
    use DropReason::{RateLimitedBytes, RateLimitedConnections, RateLimitedPackets};
    for (name, world, source, rule, verdict) in [
        ("packets", with(Enforce, Limited::Packets, 10), V4, "four", Verdict::Drop(RateLimitedPackets)),
        ("packets, IPv6", with(Enforce, Limited::Packets, 10), V6, "six", Verdict::Drop(RateLimitedPackets)),
        ("bytes", with(Enforce, Limited::Bytes, 1000), V4, "four", Verdict::Drop(RateLimitedBytes)),
        ("connections", with(Enforce, Limited::Connections, 3), V6, "six", Verdict::Drop(RateLimitedConnections)),
        ("shadow", with(Shadow, Limited::Packets, 10), V4, "four", Verdict::ShadowDrop(RateLimitedPackets)),
    ] {
        let loaded = world.load();
        let mut reader = reader(&loaded);
        run(&loaded, &syn(source), 5000);
        assert!(loaded.packets(verdict) > 4900, "{name}");
        let events: Vec<_> = read(&mut reader).iter().map(|event| told(&loaded, event)).collect();
        let source = Some(source.parse().expect("an address"));
        let expected = (vec![EventKind::SourceLimited], source, Some(verdict), Some(rule.to_owned()));
        assert_eq!(events, [expected], "{name}");
        // Another source has news of its own.
        run(&loaded, &syn("198.51.100.1"), 5000);
        assert_eq!(read(&mut reader).len(), 1, "{name}");
    }
}

#[test]
fn two_cpus_that_see_it_at_once_tell_it_once() {
    for round in 0..20_u8 {
        let loaded = limited(1).load();
        let mut reader = reader(&loaded);
        let barrier = Barrier::new(2);
        thread::scope(|scope| {
            for cpu in 0..2 {
                let (barrier, loaded) = (&barrier, &loaded);
                scope.spawn(move || {
                    let mut cpus = CpuSet::new();
                    cpus.set(cpu).expect("a CPU");
                    sched_setaffinity(Pid::from_raw(0), &cpus).expect("two CPUs");
                    barrier.wait();
                    run(loaded, &Packet::udp(V4, 443), 2000);
                });
            }
        });
        assert_eq!(read(&mut reader).len(), 1, "round {round}");
    }
}

#[test]
fn a_pushed_budget_that_drops_is_told_once_however_often_it_is_pushed() {
    type Push = fn(&Loaded);
    let block: Push = |loaded| {
        let source = V4.parse().expect("an address");
        loaded.dataplane.push_budget(source, HOUR, BudgetReason::KeepsSending, "login").expect("push");
    };
    let replace: Push = |loaded| {
        let (source, reason) = (V4.parse().expect("an address"), BudgetReason::AddressOverLimit);
        loaded.dataplane.replace_budget(source, burst_of(5), HOUR, reason, "login").expect("push");
    };
    for (name, push, reason, rule) in
        [("block", block, DropReason::Blocked, "login"), ("replace", replace, DropReason::RateLimitedPackets, "four")]
    {
        let loaded = limited(1_000_000).load();
        let mut reader = reader(&loaded);
        let packet = Packet::udp(V4, 443);
        run(&loaded, &packet, 100);
        push(&loaded);
        assert!(read(&mut reader).is_empty(), "{name}: a budget that drops nothing yet");
        run(&loaded, &packet, 3000);
        push(&loaded);
        run(&loaded, &packet, 3000);
        let events: Vec<_> = read(&mut reader).iter().map(|event| told(&loaded, event)).collect();
        let source = Some(V4.parse().expect("an address"));
        let verdict = Some(Verdict::Drop(reason));
        assert_eq!(events, [(vec![EventKind::BudgetHit], source, verdict, Some(rule.to_owned()))], "{name}");
        // One that was taken back and pushed again is another.
        loaded.dataplane.remove_budget(V4.parse().expect("an address")).expect("remove");
        push(&loaded);
        run(&loaded, &packet, 3000);
        assert_eq!(read(&mut reader).len(), 1, "{name}");
    }
}

#[test]
fn too_many_new_sources_are_told_once() {
    let mut world = limited(1_000_000);
    world.tuning.new_sources = Some(burst_of(20));
    let loaded = world.load();
    let mut reader = reader(&loaded);
    for source in 0..2000 {
        run(&loaded, &Packet::udp(&format!("10.0.{}.{}", source / 250, source % 250), 443), 1);
    }
    let events = read(&mut reader);
    let kinds: Vec<_> = events.iter().flat_map(|event| event.news().kinds()).collect();
    assert_eq!(kinds, [EventKind::NewSourcesOver]);
    // The one that came after the fifteen that are for everybody: a quarter is kept for other neighbourhoods.
    assert_eq!(events[0].source(), Some("10.0.0.15".parse().expect("an address")));
    assert_eq!(counts(&loaded, EventClass::Maps), EventCounts { sent: 1, suppressed: 0, ring_full: 0 });
}

/// With room for one bucket, two CPUs with a source each push out each other's, or find nothing that they could push
/// out.
#[test]
fn buckets_that_cannot_be_made_are_told_once() {
    const PACKETS: u32 = 100_000;
    for (sources, rule) in [(["10.0.0.1", "10.0.1.1"], "four"), (["2001:db8:1::1", "2001:db8:2::1"], "six")] {
        // More than all packets of the test.
        let mut world = limited(1 << 40);
        world.config.max_sources = 1;
        world.tuning.new_sources = Some(burst_of(1 << 30));
        let loaded = world.load();
        let mut reader = reader(&loaded);
        let hammer = || {
            thread::scope(|scope| {
                for (cpu, source) in sources.into_iter().enumerate() {
                    let loaded = &loaded;
                    scope.spawn(move || {
                        let mut cpus = CpuSet::new();
                        cpus.set(cpu).expect("a CPU");
                        sched_setaffinity(Pid::from_raw(0), &cpus).expect("two CPUs");
                        run(loaded, &Packet::udp(source, 443), PACKETS);
                    });
                }
            });
        };
        // Where two CPUs have the place of one bucket in hand, either may find the other's number there and be refused.
        let mut failed = || {
            hammer();
            let of_inserts = |event: &Event| event.news().kinds().any(|kind| kind == EventKind::InsertFailed);
            read(&mut reader).into_iter().filter(of_inserts).collect::<Vec<_>>()
        };
        let event = until("an insert fails", WAIT, || {
            let events = failed();
            assert!(events.len() < 2, "{events:?}");
            events.first().copied()
        });
        let (kinds, source, verdict, by) = told(&loaded, &event);
        assert_eq!(kinds, [EventKind::InsertFailed]);
        assert!(sources.iter().any(|address| source == Some(address.parse().expect("an address"))), "{source:?}");
        // It shares the bucket of its neighbourhood, which is full.
        assert_eq!((verdict, by.as_deref()), (Some(Verdict::Pass(PassReason::Conforming)), Some(rule)));
        assert!(failed().is_empty(), "what goes on is no news");
        assert_eq!(counts(&loaded, EventClass::Maps), EventCounts { sent: 1, suppressed: 0, ring_full: 0 });
    }
}

#[test]
fn samples_are_a_true_picture_of_what_passes_and_what_is_dropped() {
    const ONE_IN: u32 = 64;
    const BUSY: u32 = 300_000;
    const DROPPED: u32 = 100_000;
    let mut world = limited(u64::from(BUSY)).deny("198.51.100.0/24");
    world.tuning.sample_one_in = ONE_IN;
    let loaded = world.load();
    let mut reader = reader(&loaded);
    run(&loaded, &Packet::udp(V4, 443), BUSY);
    run(&loaded, &Packet::tcp("198.51.100.9", 443, packet::SYN), DROPPED);
    let events = read(&mut reader);
    assert_eq!(events.iter().filter(|event| event.represents() == 0).count(), 0, "nothing but samples");
    for (source, packets, verdict) in [
        (V4, BUSY, Verdict::Pass(PassReason::Conforming)),
        ("198.51.100.9", DROPPED, Verdict::Drop(DropReason::Denied)),
    ] {
        let source = Some(source.parse::<IpAddr>().expect("an address"));
        let samples: Vec<_> = events.iter().filter(|event| event.source() == source).collect();
        assert!(samples.iter().all(|event| event.verdict() == Some(verdict)), "{verdict:?}");
        let expected = packets / ONE_IN;
        let found = u32::try_from(samples.len()).expect("not that many");
        // Six standard deviations.
        assert!(found.abs_diff(expected) <= 6 * expected.isqrt(), "{found} samples, {expected} expected: {verdict:?}");
        let stand_for: u64 = samples.iter().map(|event| event.represents()).sum();
        assert_eq!(stand_for, u64::from(found * ONE_IN), "none was held back");
    }
}

#[test]
fn a_sample_names_the_source_of_every_kind_of_frame() {
    let mut world = limited(5).deny("192.0.2.0/24");
    world.tuning.sample_one_in = 1;
    let loaded = world.load();
    let mut reader = reader(&loaded);
    for (name, packet, source) in [
        ("plain", Packet::udp(V4, 443), Some(V4)),
        ("IPv6", Packet::udp(V6, 443), Some(V6)),
        ("tagged", Packet::udp(V4, 443).tag(packet::VLAN), Some(V4)),
        ("tagged twice", Packet::udp(V6, 443).tag(packet::VLAN).tag(packet::PROVIDER_VLAN), Some(V6)),
        ("options", Packet::udp(V4, 443).options(3), Some(V4)),
        ("extension", Packet::udp(V6, 443).empty_extension(packet::HOP_BY_HOP), Some(V6)),
        ("a later fragment", Packet::udp(V4, 443).fragment(100, false), Some(V4)),
        ("not protected", Packet::udp(V4, 22), Some(V4)),
        ("malformed", Packet::udp(V4, 443).stated_len(10), Some(V4)),
        ("ARP", Packet::raw(packet::ARP, &[0; 46]), None),
    ] {
        run(&loaded, &packet, 1);
        let sources: Vec<_> = read(&mut reader).iter().map(Event::source).collect();
        assert_eq!(sources, [source.map(|source| source.parse().expect("an address"))], "{name}");
    }
}

#[test]
fn a_flood_of_events_is_bounded_by_the_kernel_and_counted() {
    const SOURCES: u32 = 1000;
    stay_on_one_cpu();
    let mut world = limited(1);
    world.config.max_sources = 4096;
    world.tuning.new_sources = Some(burst_of(4000));
    world.tuning.events = Some(burst_of(100));
    let loaded = world.load();
    let mut reader = reader(&loaded);
    for source in 0..SOURCES {
        run(&loaded, &Packet::udp(&format!("10.0.{}.{}", source / 250, source % 250), 443), 3);
    }
    let expected = EventCounts { sent: 100, suppressed: u64::from(SOURCES) - 100, ring_full: 0 };
    assert_eq!(counts(&loaded, EventClass::Sources), expected);
    assert_eq!(read(&mut reader).len(), 100);
    // Another class has room of its own.
    assert_eq!(counts(&loaded, EventClass::Maps), EventCounts::default());
}

#[test]
fn what_finds_the_ring_full_is_counted_and_a_later_sample_stands_for_it() {
    const PACKETS: u32 = 40_000;
    stay_on_one_cpu();
    let mut world = limited(1_000_000);
    world.tuning.sample_one_in = 1;
    let loaded = world.load();
    let packet = Packet::udp(V4, 443);
    run(&loaded, &packet, PACKETS);
    let full = counts(&loaded, EventClass::Samples);
    assert_eq!(full.sent + full.ring_full, u64::from(PACKETS));
    assert!(full.sent > 10_000 && full.ring_full > 10_000, "{full:?}");
    let mut reader = reader(&loaded);
    assert_eq!(read(&mut reader).len() as u64, full.sent, "what is in the ring waits for its reader");
    run(&loaded, &packet, 1);
    let stands_for: Vec<_> = read(&mut reader).iter().map(Event::represents).collect();
    assert_eq!(stands_for, [full.ring_full + 1]);
}

#[test]
fn events_go_on_over_a_reload() {
    let world = limited(5);
    let loaded = world.load();
    let mut reader = reader(&loaded);
    run(&loaded, &Packet::udp(V4, 443), 100);
    assert_eq!(read(&mut reader).len(), 1);
    loaded.dataplane.reload(&world.policy).expect("reload");
    run(&loaded, &Packet::udp(V4, 443), 100);
    assert!(read(&mut reader).is_empty(), "what was told before the reload is no news after it");
    run(&loaded, &Packet::udp(V6, 443), 100);
    assert_eq!(read(&mut reader).len(), 1);
    assert_eq!(counts(&loaded, EventClass::Sources).sent, 2, "counts go on");
}

#[test]
fn lines_for_diagnosis_are_in_the_program_only_when_they_are_asked_for() {
    let size = |diagnosis| {
        let mut world = limited(5);
        world.config.diagnosis = diagnosis;
        let loaded = world.load();
        run(&loaded, &Packet::udp(V4, 443), 100);
        loaded.dataplane.program_bytes().expect("the kernel tells the size")
    };
    let off = size(Diagnosis::Off);
    for diagnosis in Diagnosis::ALL.iter().filter(|diagnosis| **diagnosis != Diagnosis::Off) {
        let on = size(*diagnosis);
        assert!(on > off + 500, "{diagnosis:?}: {on} bytes, {off} without");
    }
    let told = |events: bool| {
        let mut world = limited(5);
        if !events {
            world.tuning.events = None;
        }
        world.load().dataplane.program_bytes().expect("the kernel tells the size")
    };
    assert!(told(true) > told(false) + 500, "{} bytes, {} without events", told(true), told(false));
}

const POLICY: &str =
    "[[packet_rules]]\nid = \"per-source\"\ncidr = \"0.0.0.0/0\"\npackets = { rate = \"1/h\", burst = 20 }\n";

/// One of the client's addresses, which sends to the gateway.
struct Sender {
    socket: UdpSocket,
}

impl Sender {
    fn new(net: &TestNet, address: IpAddr) -> Self {
        Self { socket: net.client(|| UdpSocket::bind(SocketAddr::new(address, 0))).expect("a socket") }
    }

    fn send(&self, port: u16, packets: u32) {
        for _ in 0..packets {
            // A full queue, or an answer that nobody listens there, is no concern here.
            drop(self.socket.send_to(&[0; 64], SocketAddr::new(GATEWAY_V4, port)));
        }
    }
}

fn setup(net: &TestNet, more: &str) -> Setup {
    let pin_dir = net.pin_dir().display();
    let xdp = format!(
        "[xdp]\ninterfaces = [\"{INTERFACE}\"]\nprotect = [\"udp/80\"]\npin_dir = \"{pin_dir}\"\nmax_sources = 65536\n{more}"
    );
    Setup::new(&xdp, POLICY)
}

fn told_by(agent: &Agent<'_>, kind: &str) -> f64 {
    agent.metric(&format!("limiter_events_total{{kind=\"{kind}\"}}"))
}

#[test]
fn the_agent_counts_and_logs_news_also_of_the_time_in_which_it_did_not_run() {
    let net = TestNet::new();
    let setup = setup(&net, "");
    let [first, second] = CLIENT_V4.map(|address| (address, Sender::new(&net, address)));
    let agent = net.gateway(|| setup.start());
    first.1.send(80, 2000);
    until("the news is read", WAIT, || (told_by(&agent, "source_limited") == 1.0).then_some(()));
    let line = format!("src=\"{}\" rule=\"per-source\" verdict=\"drop\" reason=\"rate_limited_packets\"", first.0);
    until("the news is logged", WAIT, || setup.log().contains(&line).then_some(()));
    agent.reload(&POLICY.replace("burst = 20", "burst = 30"));
    agent.kill();
    second.1.send(80, 2000);
    let agent = net.gateway(|| setup.start());
    until("the news is read", WAIT, || (told_by(&agent, "source_limited") == 1.0).then_some(()));
    let line = line.replace(&first.0.to_string(), &second.0.to_string());
    until("the news is logged", WAIT, || setup.log().contains(&line).then_some(()));
    assert_eq!(setup.log().matches("a source is over a limit").count(), 2);
    let status = agent.status();
    let sources = &status["xdp"]["events"][1];
    assert_eq!((&sources["class"], &sources["sent"]), (&"sources".into(), &2.into()), "{status}");
    for cause in ["rate_limited", "ring_full"] {
        let series = format!("limiter_events_lost_total{{class=\"sources\",cause=\"{cause}\"}}");
        assert_eq!(agent.metric(&series), 0.0);
    }
    assert!(agent.stop().success());
}

#[test]
fn top_names_the_busiest_source_and_the_most_dropped_one() {
    let net = TestNet::new();
    let setup = setup(&net, "");
    let agent = net.gateway(|| setup.start());
    let [busy, flooding] = CLIENT_V4.map(|address| (address.to_string(), Sender::new(&net, address)));
    let top = || -> serde_json::Value {
        let output = setup.run(&["top", "--once", "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let report = until("both are seen", WAIT, || {
        busy.1.send(22, 12_000);
        flooding.1.send(80, 4000);
        let report = top();
        let first = |list: &str| report[list][0]["source"].clone();
        (first("busiest") == *busy.0 && first("most_dropped") == *flooding.0).then_some(report)
    });
    let dropped = &report["most_dropped"][0];
    assert_eq!((&dropped["reason"], &dropped["rule"]), (&"rate_limited_packets".into(), &"per-source".into()));
    assert_eq!(report["busiest"][0]["dropped_per_second"], 0, "{report}");
    assert_eq!(report["most_dropped"].as_array().map(Vec::len), Some(1), "{report}");
    let text = String::from_utf8(setup.run(&["top"]).stdout).expect("text");
    assert!(text.contains("rate_limited_packets by per-source") && !text.contains('\x1b'), "{text}");
    assert!(agent.stop().success());
}

#[test]
fn a_line_for_diagnosis_names_source_verdict_and_rule() {
    let net = TestNet::new();
    let setup = setup(&net, "diagnosis = \"debug\"\n");
    let agent = net.gateway(|| setup.start());
    let [source, _] = CLIENT_V4;
    Sender::new(&net, source).send(80, 100);
    let line = format!("drop rate_limited_packets rule per-source bytes 106 src {source}");
    until("a line", WAIT, || setup.log().contains(&line).then_some(()));
    // A reload makes another program, whose lines are read as well.
    agent.reload(POLICY);
    let lines = || setup.log().matches(&line).count();
    let before = lines();
    Sender::new(&net, source).send(80, 100);
    until("more lines", WAIT, || (lines() > before).then_some(()));
    assert!(!setup.log().contains("pass conforming"), "debug is about drops");
    assert!(agent.stop().success());
}

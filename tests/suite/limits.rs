//! What a limit admits: alone and together with others, at every rate, over every idle time and for every length of the
//! source prefix. Needs root and the XDP object.

use std::{net::UdpSocket, time::Duration};

use aya::maps::{HashMap, Map, MapData};
use limiter_common::{
    addr::{SrcKeyV4, SrcMaskV4, SrcPrefixes},
    gcra::{GcraParams, TICKS_PER_NS},
    quota::{Quota, Rate},
    rule::{
        Bucket,
        EnforcementMode::{self, Enforce, Off, Shadow},
    },
    verdict::{DropReason, PassReason, Verdict},
};
use limiter_tests::{
    fixture::{Limited, Loaded, World, burst_of},
    ip::ip,
    netns::{CLIENT_INTERFACE, CLIENT_V4, CLIENT_V6, GATEWAY_V4, GATEWAY_V6, INTERFACE, TestNet},
    object::xdp_object,
    packet::{self, Packet},
    random::Random,
};
use limiter_user::{
    clock::{Stopwatch, ktime},
    dataplane::{AttachedMode, Dataplane as _, KernelDataplane, XdpMode},
};

const CONFORMING: Verdict = Verdict::Pass(PassReason::Conforming);
const SECOND_NS: u64 = 1_000_000_000;

/// What is left of a bucket to which nothing comes back. `None`: not limited.
struct Model {
    packets: Option<u64>,
    bytes: Option<u64>,
    connections: Option<u64>,
}

impl Model {
    /// Takes what a packet costs in every dimension, or nothing, and names the first that has too little.
    fn take(&mut self, len: u64, connections: u64) -> Option<DropReason> {
        let mut dimensions = [
            (&mut self.packets, 1, DropReason::RateLimitedPackets),
            (&mut self.bytes, len, DropReason::RateLimitedBytes),
            (&mut self.connections, connections, DropReason::RateLimitedConnections),
        ];
        for (left, cost, reason) in &dimensions {
            if left.is_some_and(|left| left < *cost) {
                return Some(*reason);
            }
        }
        for (left, cost, _) in &mut dimensions {
            **left = left.map(|left| left - *cost);
        }
        None
    }
}

#[test]
fn every_limit_is_exact_alone_and_together_with_the_others() {
    const LIMITS: [(Limited, u64); 3] = [(Limited::Packets, 30), (Limited::Bytes, 5000), (Limited::Connections, 6)];
    let frames: [(Vec<u8>, u64); 4] = [
        (Packet::udp("192.0.2.7", 443).build(), 0),
        (Packet::udp_of_len("192.0.2.7", 443, 458).build(), 0),
        (Packet::tcp("192.0.2.7", 443, packet::SYN).build(), 1),
        (Packet::tcp("192.0.2.7", 443, packet::ACK).build(), 0),
    ];
    let mut random = Random::new(1);
    for mode in [Enforce, Shadow, Off] {
        for subset in 1..8u32 {
            let is_set = |bit: u32| subset >> bit & 1 != 0;
            let limits: Vec<_> = (0..3).zip(LIMITS).filter(|(bit, _)| is_set(*bit)).map(|(_, limit)| limit).collect();
            let loaded = World::new().rule("four", "0.0.0.0/0", mode, &limits).load();
            let left = |bit| is_set(bit).then(|| LIMITS[bit as usize].1);
            let mut model = Model { packets: left(0), bytes: left(1), connections: left(2) };
            for n in 0..80 {
                let (frame, connections) = &frames[random.below(frames.len())];
                let denied = model.take(frame.len() as u64, *connections);
                let expected = expected(mode, denied);
                let (verdict, rule) = loaded.judge(frame);
                assert_eq!(verdict, expected, "packet {n} of {limits:?} in mode {mode:?}");
                assert_eq!(rule.as_deref(), (mode != Off).then_some("four"));
            }
        }
    }
}

fn expected(mode: EnforcementMode, denied: Option<DropReason>) -> Verdict {
    match (mode, denied) {
        (Off, _) => Verdict::Pass(PassReason::Unlimited),
        (Enforce | Shadow, None) => CONFORMING,
        (Enforce, Some(reason)) => Verdict::Drop(reason),
        (Shadow, Some(reason)) => Verdict::ShadowDrop(reason),
    }
}

const SOURCE: [u8; 4] = [192, 0, 2, 7];

/// Sends until nothing is left, and tells the state of the bucket and the bytes that have passed so far.
fn drained(loaded: &Loaded, buckets: &Buckets, params: &GcraParams, frame: &[u8]) -> (u64, u64) {
    let before = ktime();
    while !loaded.dataplane.test_run(frame, 500_000).expect("run the program").dropped {}
    let tat = buckets.tat(SOURCE);
    // An empty bucket is ahead of the clock by all that it holds, but for less than a frame.
    let empty_at = tat.wrapping_sub(params.burst_tolerance());
    let frame_ticks = params.increment(frame.len() as u64);
    assert!(
        empty_at + frame_ticks >= before.ticks() && empty_at <= ktime().ticks(),
        "the bucket keeps the kernel's time"
    );
    let counters = loaded.counters();
    let passed = counters.iter().find(|((_, index), _)| *index == CONFORMING.index()).expect("some have passed");
    (tat, passed.1.bytes)
}

#[test]
fn byte_rates_up_to_a_hundred_gigabits_are_within_a_thousandth() {
    const MEASURE: u64 = SECOND_NS / 4 * TICKS_PER_NS;
    for (bytes_a_second, frame_len) in [
        (1_000_000, 60),
        (12_500_000, 1514),
        (125_000_000, 1514),
        (1_250_000_000, 9000),
        (5_000_000_000, 9000),
        (12_500_000_000, 9000),
        (12_500_000_000, 60_000),
    ] {
        let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &[(Limited::Bytes, 1)]);
        let rate = Rate { count: bytes_a_second, per_ns: SECOND_NS };
        // So much that the bucket is never full between two runs.
        let quota = Quota { rate, burst: 4 * bytes_a_second };
        world.policy.packet_rules[0].bytes = Some(quota);
        let loaded = world.load();
        let buckets = Buckets::of(&loaded);
        let params = quota.params().expect("a quota");
        let frame = Packet::udp_of_len("192.0.2.7", 443, frame_len - 42).build();
        // From one moment at which the bucket was empty, by the kernel's clock, to another.
        let (from, before) = drained(&loaded, &buckets, &params, &frame);
        let (to, after) = loop {
            let (to, after) = drained(&loaded, &buckets, &params, &frame);
            if to - from >= MEASURE {
                break (to, after);
            }
        };
        let passed = u128::from(after - before) * u128::from(SECOND_NS * TICKS_PER_NS);
        let due = u128::from(to - from) * u128::from(bytes_a_second);
        let millionths = passed.abs_diff(due) * 1_000_000 / due;
        eprintln!("{bytes_a_second:>11} bytes/s in frames of {frame_len}: {millionths} millionths off");
        assert!(millionths <= 1000, "{bytes_a_second} bytes/s in frames of {frame_len}: {millionths} millionths off");
    }
}

/// Less at once than comes back in a tick of the kernel, and, at last, just enough for the clock that moves with it.
#[test]
fn a_small_burst_does_not_cap_the_rate() {
    const REPEAT: u32 = 2_000_000;
    /// How late the clock is that moves by the tick.
    const TICK_NS: u64 = 10_000_000 + (1 << 16);
    for (limited, a_second, burst, frame) in [
        (Limited::Packets, 10_000, 10, Packet::udp("192.0.2.7", 443)),
        (Limited::Packets, 200_000, 50, Packet::udp("192.0.2.7", 443)),
        (Limited::Bytes, 50_000_000, 32_768, Packet::udp_of_len("192.0.2.7", 443, 1000)),
        (Limited::Connections, 1000, 1, Packet::tcp("192.0.2.7", 443, packet::SYN)),
        (Limited::Packets, 10_000, 400, Packet::udp("192.0.2.7", 443)),
    ] {
        let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &[(limited, 1)]);
        let quota = Quota { rate: Rate { count: a_second, per_ns: SECOND_NS }, burst };
        let rule = &mut world.policy.packet_rules[0];
        let limit = match limited {
            Limited::Packets => &mut rule.packets,
            Limited::Bytes => &mut rule.bytes,
            Limited::Connections => &mut rule.new_connections,
        };
        *limit = Some(quota);
        let frame = frame.build();
        let cost = if matches!(limited, Limited::Bytes) { frame.len() as u64 } else { 1 };
        let fit = |time_ns: u64| time_ns * a_second / SECOND_NS / cost;
        let loaded = world.load();
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).expect("not that long");
        // Where the CPU is taken away for longer than the bucket takes to fill, something is lost: best of several.
        let most_of_it = (0..5).any(|_| {
            let before = loaded.packets(CONFORMING);
            let clock = Stopwatch::start();
            let run = loaded.dataplane.test_run(&frame, REPEAT).expect("run the program");
            let most = fit(nanoseconds(clock.elapsed()) + TICK_NS) + burst / cost + 1;
            let passed = loaded.packets(CONFORMING) - before;
            assert!(passed <= most, "{limited:?}, {a_second}/s, burst {burst}: {passed} passed, at most {most} fit");
            let running = fit(nanoseconds(run.duration) * u64::from(REPEAT));
            eprintln!("{limited:?}, {a_second}/s, burst {burst}: {passed} passed, {running} fit");
            passed * 10 >= running * 9
        });
        assert!(most_of_it, "{limited:?}, {a_second}/s: a burst of {burst} caps the rate");
    }
}

/// The buckets of IPv4 sources.
struct Buckets(HashMap<MapData, SrcKeyV4, Bucket>);

impl Buckets {
    fn of(loaded: &Loaded) -> Self {
        let map = MapData::from_pin(loaded.pinned("BUCKETS_V4")).expect("open the buckets");
        Self(HashMap::try_from(Map::LruHashMap(map)).expect("the buckets' type"))
    }

    fn tat(&self, source: [u8; 4]) -> u64 {
        self.0.get(&SrcKeyV4::new(source, SrcMaskV4::new(32)), 0).expect("a bucket").bytes_tat
    }

    /// Gives the source a bucket in this state, as if its earlier packets had left it.
    fn set(&mut self, source: [u8; 4], tat: u64) {
        let bucket = Bucket { packets_tat: tat, bytes_tat: tat, connections_tat: tat, reported: 0 };
        self.0.insert(SrcKeyV4::new(source, SrcMaskV4::new(32)), bucket, 0).expect("write a bucket");
    }
}

#[test]
fn a_bucket_left_alone_is_full_and_no_fuller() {
    const HOUR_NS: u64 = 3600 * SECOND_NS;
    let ticks = |ns: u64| ns * TICKS_PER_NS;
    for (name, count, per_ns, burst) in [
        ("1/min", 1, 60 * SECOND_NS, 5),
        ("3/s", 3, SECOND_NS, 5),
        ("7/s", 7, SECOND_NS, 5),
        ("1000000/s", 1_000_000, SECOND_NS, 50_000),
    ] {
        let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &[(Limited::Packets, 1)]);
        let quota = Quota { rate: Rate { count, per_ns }, burst };
        world.policy.packet_rules[0].packets = Some(quota);
        let loaded = world.load();
        let mut buckets = Buckets::of(&loaded);
        let params: GcraParams = quota.params().expect("a quota");
        let full = params.burst_tolerance();
        let unit = params.increment(1);
        let frame = Packet::udp("192.0.2.7", 443).build();
        // How far the state is ahead of the clock, and how many units are then left.
        for (state, ahead, left) in [
            ("just filled", 0, burst),
            ("idle for an hour", ticks(HOUR_NS).wrapping_neg(), burst),
            ("idle for 72 minutes", ticks(HOUR_NS / 60 * 72).wrapping_neg(), burst),
            ("idle for 100 days", ticks(100 * 24 * HOUR_NS).wrapping_neg(), burst),
            // An hour short of what reads as the future: the clock goes on while the packets come in.
            ("idle for more than a year", (1 << 63) + ticks(HOUR_NS), burst),
            ("as far in the future as can be", (1 << 63) - 1, 0),
            ("exhausted", full, 0),
            ("two units and a half left", full - 5 * unit / 2, 2),
            ("all but one unit left", unit, burst - 1),
            ("the debt of a larger quota", 10 * full, 0),
        ] {
            let before = ktime();
            buckets.set(SOURCE, before.ticks().wrapping_add(ahead));
            let passed_before = loaded.packets(CONFORMING);
            let tries = u32::try_from(2 * burst).expect("few");
            loaded.dataplane.test_run(&frame, tries).expect("run the program");
            let passed = loaded.packets(CONFORMING) - passed_before;
            // Units come back while the packets come in; one more is the half of the state in between.
            let elapsed_ns = ktime().get() - before.get();
            let back = if elapsed_ns == 0 { 0 } else { elapsed_ns * count / per_ns + 1 };
            assert!(
                passed >= left && passed <= (left + back).min(tries.into()),
                "{name}, {state}: {passed} passed, {left} were left, at most {back} came back"
            );
        }
    }
}

#[test]
fn sources_are_cut_at_every_configured_length() {
    let v4 = 0xc000_02b5u32;
    let v6 = 0x2001_0db8_a5a5_5a5a_c3c3_3c3c_9696_6969u128;
    let of_v4 = |bits: u32| Packet::udp(&std::net::Ipv4Addr::from(bits).to_string(), 443).build();
    let of_v6 = |bits: u128| Packet::udp(&std::net::Ipv6Addr::from(bits).to_string(), 443).build();
    let lengths = [(24, 48), (25, 49), (26, 56), (28, 63), (30, 64), (31, 65), (32, 96), (32, 127), (32, 128)];
    for (len_v4, len_v6) in lengths {
        let one = [(Limited::Packets, 1)];
        let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &one).rule("six", "::/0", Enforce, &one);
        world.config.src_prefixes = SrcPrefixes { ipv4: len_v4, ipv6: len_v6 };
        world.tuning.new_sources = Some(burst_of(1024));
        let loaded = world.load();
        let passes = |frame: &[u8]| loaded.judge(frame).0 == CONFORMING;
        assert!(passes(&of_v4(v4)) && passes(&of_v6(v6)));
        // One bucket for all that differs only behind the prefix, another one for each bit within.
        for bit in 0..32 {
            let is_within = bit >= 32 - u32::from(len_v4);
            assert_eq!(passes(&of_v4(v4 ^ 1 << bit)), is_within, "/{len_v4}: bit {bit} from the right");
        }
        for bit in 0..128 {
            let is_within = bit >= 128 - u32::from(len_v6);
            assert_eq!(passes(&of_v6(v6 ^ 1 << bit)), is_within, "/{len_v6}: bit {bit} from the right");
        }
    }
}

#[test]
fn no_two_sources_share_a_bucket() {
    const SOURCES: u32 = 1500;
    let one = [(Limited::Packets, 1)];
    let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &one).rule("six", "::/0", Enforce, &one);
    world.config.max_sources = 1 << 17;
    world.tuning.new_sources = Some(burst_of(1 << 17));
    let loaded = world.load();
    let mut random = Random::new(2);
    let mut frames = Vec::new();
    for n in 0..SOURCES {
        // An odd factor makes each number another, far from its neighbours.
        let bits = n.wrapping_mul(0x9e37_79b1);
        frames.push(Packet::udp(&std::net::Ipv4Addr::from(bits).to_string(), 443).build());
        // The same lower half with another upper half, and the halves of it exchanged: a folded key would not tell
        // them apart.
        let upper = u64::from(bits) << 32 | u64::from(n % 7);
        for upper in [upper, upper.rotate_left(32)] {
            let bits = u128::from(upper) << 64 | u128::from(random.next() % 3);
            frames.push(Packet::udp(&std::net::Ipv6Addr::from(bits).to_string(), 443).build());
        }
    }
    frames.sort();
    let key = |frame: &[u8]| if frame.len() == 42 { frame[26..30].to_vec() } else { frame[22..30].to_vec() };
    frames.dedup_by_key(|frame| key(frame));
    for expected in [CONFORMING, Verdict::Drop(DropReason::RateLimitedPackets)] {
        let before = loaded.packets(expected);
        for frame in &frames {
            loaded.dataplane.test_run(frame, 1).expect("run the program");
        }
        assert_eq!(loaded.packets(expected) - before, frames.len() as u64, "{expected:?}");
    }
}

#[test]
fn jumbo_frames_are_counted_over_all_their_buffers() {
    const PAYLOAD: usize = 8900;
    const ADMITTED: u64 = 3;
    for (mode, attached) in [(XdpMode::Native, AttachedMode::Native), (XdpMode::Generic, AttachedMode::Generic)] {
        for (client, gateway, headers) in [(CLIENT_V4[0], GATEWAY_V4, 42), (CLIENT_V6[0], GATEWAY_V6, 62)] {
            let net = TestNet::new();
            net.client(|| ip(&format!("link set {CLIENT_INTERFACE} mtu 9000")));
            net.gateway(|| ip(&format!("link set {INTERFACE} mtu 9000")));
            let len = PAYLOAD as u64 + headers;
            let burst = [(Limited::Bytes, ADMITTED * len)];
            let mut world =
                World::new().rule("four", "0.0.0.0/0", Enforce, &burst).rule("six", "::/0", Enforce, &burst);
            world.config.interfaces = vec![INTERFACE.to_owned()];
            world.config.pin_dir = net.pin_dir().to_owned();
            world.config.mode = mode;
            let World { config, policy, tuning } = world;
            let dataplane = net.gateway(|| KernelDataplane::start(xdp_object(), config, &policy, tuning));
            let dataplane = dataplane.unwrap_or_else(|error| panic!("start in {mode:?} mode: {error}"));
            assert_eq!(dataplane.interfaces().expect("the interfaces")[0].mode, attached);

            let server = net.gateway(|| UdpSocket::bind((gateway, 443)).expect("bind"));
            server.set_read_timeout(Some(Duration::from_secs(10))).expect("set the timeout");
            let socket = net.client(|| UdpSocket::bind((client, 0)).expect("bind"));
            let sent: Vec<u8> = (0..PAYLOAD).map(|at| u8::try_from(at % 251).expect("small")).collect();
            for _ in 0..ADMITTED + 2 {
                socket.send_to(&sent, (gateway, 443)).expect("send");
            }
            for _ in 0..ADMITTED {
                let mut received = vec![0; 2 * PAYLOAD];
                let len = server.recv(&mut received).expect("a packet passes");
                assert!(received[..len] == sent, "{len} bytes arrived of {PAYLOAD}");
            }
            let counted = |verdict| {
                let counters = dataplane.counters().expect("the counters");
                let counter = counters.into_iter().find(|row| row.rule.is_some() && row.verdict == verdict);
                counter.map(|row| (row.counter.packets, row.counter.bytes)).unwrap_or_default()
            };
            let dropped = Verdict::Drop(DropReason::RateLimitedBytes);
            limiter_tests::eventually::until("the others are dropped", Duration::from_secs(10), || {
                (counted(dropped) == (2, 2 * len)).then_some(())
            });
            assert_eq!(counted(CONFORMING), (ADMITTED, ADMITTED * len), "{mode:?} {client}");
        }
    }
}

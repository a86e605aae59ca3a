//! `cargo xtask bench flood [-- --rounds N --rate N --origin card|socket]`: what a flood of small UDP packets does to an
//! HTTP server behind the interface: without a limiter, with this one, with nftables and with iptables.
#![expect(clippy::float_arithmetic, reason = "medians and differences of measurements")]

#[path = "flood/guard.rs"]
mod guard;
#[path = "flood/sender.rs"]
mod sender;
#[path = "flood/usage.rs"]
mod usage;
#[path = "flood/web.rs"]
mod web;

use std::{
    env, fs,
    process::Command,
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use aya::Ebpf;
use limiter_tests::{
    bench::{Goal, Row, report, rounds},
    netns::{CLIENT_INTERFACE, INTERFACE, TestNet},
};
use limiter_user::clock::Stopwatch;

use crate::{
    guard::Guard,
    sender::{Origin, Sender, Sent},
    usage::Usage,
    web::{Server, requests_per_second},
};

/// Where the flood goes: QUIC's port.
const FLOODED: u16 = 443;
/// How long one measurement takes.
const SECONDS: u32 = 1;

fn main() {
    let rate = argument("--rate").unwrap_or(500_000);
    let origins = match argument::<String>("--origin").as_deref() {
        Some("card") => vec![Origin::Card],
        Some("socket") => vec![Origin::Socket],
        None => vec![Origin::Card, Origin::Socket],
        Some(other) => panic!("--origin is followed by card or socket, not by {other}"),
    };
    let rounds = rounds(5);
    let mut results: Vec<(Origin, Guard, Vec<Round>)> = origins
        .iter()
        .flat_map(|origin| Guard::ALL.into_iter().chain([Guard::DropAll]).map(|guard| (*origin, guard, Vec::new())))
        .collect();
    for _ in 0..rounds {
        for (origin, guard, measured) in &mut results {
            measured.push(Round::measure(*origin, *guard, rate));
        }
    }
    let mut rows = Vec::new();
    for origin in origins {
        let of_origin = results.iter().filter(|(of, ..)| *of == origin);
        let medians: Vec<_> = of_origin.map(|(_, guard, measured)| (*guard, Round::median(measured))).collect();
        rows.extend(rows_of(origin, &medians));
    }
    report("flood", &rows);
}

/// What was measured once, in front of one guard.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    /// Requests a second without a flood, and with it.
    quiet: f64,
    flooded: f64,
    /// What was sent of the flood in a second, while requests were made.
    sent: f64,
    /// Of a flood without requests: seconds of CPU time in a second, packets a second, and those dropped.
    busy: f64,
    received: f64,
    dropped: f64,
    /// Packets a second when the sender sends as fast as it can, with the work of both sides on its CPU; and seconds of CPU
    /// time that each took.
    most: f64,
    cost: f64,
}

impl Round {
    fn measure(origin: Origin, guard: Guard, rate: u32) -> Self {
        let net = TestNet::new();
        // As it is for every network card. With it an interface takes packets by NAPI, as the driver of a card does, and
        // lets frames be sent through it.
        net.gateway(|| offload(INTERFACE, "gro", "on"));
        net.client(|| offload(CLIENT_INTERFACE, "gro", "on"));
        // A sender that segments by itself: without XDP, too, what it sends is then taken by NAPI, the good client's
        // requests with it. Otherwise these pass the flood by on a way that no network card has.
        net.client(|| offload(CLIENT_INTERFACE, "tso", "off"));
        let server = (guard != Guard::DropAll).then(|| Server::start(&net));
        let _standing = guard.stand(&net);
        let mut sender = Sender::open(&net, origin);
        let mut round = Self::default();
        if server.is_some() {
            round.quiet = requests_per_second(&net, SECONDS);
            let (flooded, _, sent) = flooding(&net, &mut sender, Some(rate), || requests_per_second(&net, SECONDS));
            round.flooded = flooded;
            round.sent = sent.packets;
        }
        let idle = || wait(Duration::from_secs(SECONDS.into()));
        let ((), usage, _) = flooding(&net, &mut sender, Some(rate), idle);
        round.busy = usage.busy;
        round.received = usage.received;
        round.dropped = usage.received - usage.let_in;
        let ((), usage, sent) = flooding(&net, &mut sender, None, idle);
        round.most = usage.received;
        round.cost = sent.cpu / usage.received;
        round
    }

    /// Of each number by itself.
    fn median(rounds: &[Self]) -> Self {
        let of = |number: fn(&Self) -> f64| {
            let mut numbers: Vec<_> = rounds.iter().map(number).collect();
            numbers.sort_by(f64::total_cmp);
            numbers[numbers.len() / 2]
        };
        Self {
            quiet: of(|round| round.quiet),
            flooded: of(|round| round.flooded),
            sent: of(|round| round.sent),
            busy: of(|round| round.busy),
            received: of(|round| round.received),
            dropped: of(|round| round.dropped),
            most: of(|round| round.most),
            cost: of(|round| round.cost),
        }
    }
}

/// Does `work` in a flood, and tells what was used in each second of it, by whom.
fn flooding<T>(net: &TestNet, sender: &mut Sender, rate: Option<u32>, work: impl FnOnce() -> T) -> (T, Usage, Sent) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let sent = scope.spawn(|| sender.send(rate, &stop));
        // The buckets of the sources empty first.
        wait(Duration::from_millis(200));
        let clock = Stopwatch::start();
        let before = Usage::now(net);
        let result = work();
        let used = Usage::now(net).since(before);
        let seconds = clock.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        let usage =
            Usage { busy: used.busy / seconds, received: used.received / seconds, let_in: used.let_in / seconds };
        (result, usage, sent.join().expect("the sender ends"))
    })
}

fn rows_of(origin: Origin, medians: &[(Guard, Round)]) -> Vec<Row> {
    let from = match origin {
        Origin::Card => "card",
        Origin::Socket => "socket",
    };
    let of = |guard: Guard, unit: &'static str, what: &str, number: fn(&Round) -> f64| {
        let (_, round) = medians.iter().find(|(of, _)| *of == guard).expect("it was measured");
        Row::new(format!("{from}: {what}, {}", guard.name()), unit, number(round))
    };
    let others = [Guard::Nftables, Guard::Iptables];
    let ours = [Guard::Native, Guard::Generic];
    let mut rows = Vec::new();

    let quiet = |guard| of(guard, "requests/s", "goodput without a flood", |round| round.quiet);
    rows.push(quiet(Guard::Nothing));
    rows.extend(ours.into_iter().chain(others).map(|guard| quiet(guard).beside(&quiet(Guard::Nothing))));

    let goodput = |guard| of(guard, "requests/s", "goodput in the flood", |round| round.flooded);
    rows.push(goodput(Guard::Nothing));
    rows.extend(others.map(|guard| goodput(guard).beside(&goodput(Guard::Nothing))));
    for guard in ours {
        rows.extend(others.map(|other| goodput(guard).beside(&goodput(other)).goal(Goal::AtLeast(1.0))));
    }
    rows.extend(Guard::ALL.map(|guard| of(guard, "packets/s", "flood sent beside it", |round| round.sent)));

    let busy = |guard| of(guard, "% of a CPU", "CPU in use in the flood", |round| round.busy * 100.0);
    rows.push(busy(Guard::DropAll));
    rows.push(busy(Guard::Nothing));
    rows.extend(others.map(|guard| busy(guard).beside(&busy(Guard::Nothing))));
    for guard in ours {
        rows.extend(others.map(|other| busy(guard).beside(&busy(other)).goal(Goal::AtMost(1.0))));
    }
    let all = Guard::ALL.into_iter().chain([Guard::DropAll]);
    rows.extend(all.clone().map(|guard| of(guard, "packets/s", "flood that arrived", |round| round.received)));
    rows.extend(all.clone().map(|guard| of(guard, "packets/s", "dropped of it", |round| round.dropped)));

    let cost = |guard| of(guard, "ns", "CPU time a packet, with sending it", |round| round.cost * 1e9);
    rows.push(cost(Guard::DropAll));
    rows.push(cost(Guard::Nothing));
    rows.extend(others.map(cost));
    for guard in ours {
        rows.extend(others.map(|other| cost(guard).beside(&cost(other)).goal(Goal::AtMost(1.0))));
    }
    rows.extend(all.map(|guard| of(guard, "packets/s", "most that one CPU sends and takes", |round| round.most)));
    rows
}

/// Lets time pass.
fn wait(time: Duration) {
    let clock = Stopwatch::start();
    // May wake early.
    while clock.elapsed() < time {
        thread::park_timeout(time - clock.elapsed().min(time));
    }
}

/// Switches an offload of an interface in the namespace of this thread.
fn offload(interface: &str, name: &str, value: &str) {
    let status = Command::new("ethtool").args(["-K", interface, name, value]).status().expect("start ethtool");
    assert!(status.success(), "ethtool: {status}");
}

fn argument<T: FromStr<Err: std::fmt::Debug>>(name: &str) -> Option<T> {
    let value = env::args().skip_while(|argument| argument != name).nth(1)?;
    Some(value.parse().unwrap_or_else(|error| panic!("{name} {value}: {error:?}")))
}

/// The programs that only benchmarks use.
fn bench_bytes() -> Vec<u8> {
    let path =
        env::var_os("LIMITER_BENCH_OBJECT").expect("LIMITER_BENCH_OBJECT is set; run \"cargo xtask bench flood\"");
    fs::read(&path).expect("read the programs of the benchmark")
}

fn bench_object() -> Ebpf {
    Ebpf::load(&bench_bytes()).expect("load the object of the benchmark")
}

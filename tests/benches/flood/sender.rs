//! The flood: small UDP packets from a few sources, as fast as asked.

use std::{
    fs,
    net::IpAddr,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader,
    programs::{Xdp, XdpMode},
};
use limiter_tests::{
    netns::{CLIENT_INTERFACE, GATEWAY_V4, INTERFACE, SECOND_CLIENT_INTERFACE, SECOND_INTERFACE, TestNet},
    packet_socket::{Datagram, PacketSocket, hardware_address, index},
};
use limiter_user::clock::Stopwatch;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

/// 198.18.0.0 and those after it.
const FIRST_SOURCE: u32 = 0xc612_0000;
const SOURCES: u32 = 64;
/// Packets between two looks at the clock.
const BATCH: u32 = 64;
/// What a flood that fell behind does not make up for.
const MOST_BEHIND: Duration = Duration::from_millis(20);

/// How packets come to the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// As bare frames, which is how a network card gives them to its driver: there is no socket buffer yet.
    Card,
    /// In socket buffers, since a socket of this host has sent them, as from a container.
    Socket,
}

pub(crate) struct Sender {
    socket: PacketSocket,
    datagram: Datagram,
    /// What makes bare frames of the packets, on their way through the second pair of interfaces.
    _forward: Option<Ebpf>,
}

/// What a sender did in a second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    pub(crate) packets: f64,
    /// Seconds that its CPU worked for it, or for the interface that takes what it sent.
    pub(crate) cpu: f64,
}

impl Sender {
    pub(crate) fn open(net: &TestNet, origin: Origin) -> Self {
        let datagram = Datagram::to(net.gateway(|| hardware_address(INTERFACE)), GATEWAY_V4, crate::FLOODED);
        match origin {
            Origin::Card => {
                let forward = forward(net);
                let socket = net.gateway(|| PacketSocket::open(SECOND_INTERFACE));
                Self { socket, datagram, _forward: Some(forward) }
            }
            Origin::Socket => {
                let socket = net.client(|| PacketSocket::open(CLIENT_INTERFACE));
                Self { socket, datagram, _forward: None }
            }
        }
    }

    /// Sends from one CPU until told to stop; without a rate, as fast as it can.
    pub(crate) fn send(&mut self, rate: Option<u32>, stop: &AtomicBool) -> Sent {
        let mut cpu = CpuSet::new();
        cpu.set(0).expect("a CPU");
        sched_setaffinity(Pid::from_raw(0), &cpu).expect("stay on one CPU");
        let clock = Stopwatch::start();
        let cpu_before = cpu_time();
        let mut packets = 0u64;
        let mut due = Duration::ZERO;
        while !stop.load(Ordering::Relaxed) {
            if let Some(rate) = rate {
                let now = clock.elapsed();
                if due > now {
                    thread::park_timeout(due - now);
                    continue;
                }
                due = due.max(now.saturating_sub(MOST_BEHIND)) + Duration::from_secs(BATCH.into()) / rate;
            }
            for number in 0..BATCH {
                let source = IpAddr::V4((FIRST_SOURCE + number % SOURCES).into());
                self.socket.send(self.datagram.from(source));
            }
            packets += u64::from(BATCH);
        }
        let seconds = clock.elapsed().as_secs_f64();
        Sent { packets: packets as f64 / seconds, cpu: (cpu_time() - cpu_before) / seconds }
    }
}

/// From the client's second interface to its first.
fn forward(net: &TestNet) -> Ebpf {
    let to = net.client(|| index(CLIENT_INTERFACE));
    let mut loader = EbpfLoader::new();
    loader.override_global("FORWARD_TO", &to, true);
    let mut object = loader.load(&crate::bench_bytes()).expect("load the object of the benchmark");
    let program: &mut Xdp = object.program_mut("forward").expect("a program").try_into().expect("an XDP program");
    program.load().expect("the verifier accepts it");
    net.client(|| program.attach(SECOND_CLIENT_INTERFACE, XdpMode::Driver).map(drop)).expect("attach it");
    object
}

/// Seconds that this thread and the softirqs of its CPU have run. What a packet costs at the other end of the veth pair
/// is in one or the other.
fn cpu_time() -> f64 {
    let of_thread = run_time("/proc/thread-self/schedstat");
    let ksoftirqd = fs::read_dir("/proc").expect("list the processes").flatten().find_map(|process| {
        let is_it = fs::read_to_string(process.path().join("comm")).is_ok_and(|name| name == "ksoftirqd/0\n");
        is_it.then(|| run_time(process.path().join("schedstat")))
    });
    of_thread + ksoftirqd.unwrap_or(0.0)
}

fn run_time(path: impl AsRef<Path>) -> f64 {
    let text = fs::read_to_string(path).expect("read how long a thread has run");
    let nanoseconds: f64 = text.split_whitespace().next().expect("a number").parse().expect("a number");
    nanoseconds / 1e9
}

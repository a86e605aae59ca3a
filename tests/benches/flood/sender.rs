//! The flood: small UDP packets from a few sources, as fast as asked.

use std::{
    net::IpAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader,
    programs::{TestRun as _, TestRunAttrs, TestRunOptions, Xdp},
};
use limiter_common::walk::{STATE_OFFSET, Walk};
use limiter_tests::{
    netns::{CLIENT_INTERFACE, GATEWAY_V4, INTERFACE, TestNet},
    packet_socket::{Datagram, PacketSocket, hardware_address, index},
};
use limiter_user::clock::Stopwatch;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

/// 198.18.0.0 and those after it.
const FIRST_SOURCE: u32 = 0xc612_0000;
pub(crate) const SOURCES: u32 = 64;
/// What the kernel sends at a time, and what one call asks of it: a call by itself costs some microseconds.
const BATCH: u32 = 64;
const CALL: u32 = 512;
/// What a flood that fell behind does not make up for.
const MOST_BEHIND: Duration = Duration::from_millis(20);

/// How packets come to the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Bare frames, as a network card gives them to its driver: the kernel has no socket buffer for them yet.
    Card,
    /// Sent by a socket of this host, as from a container: the kernel has a socket buffer already.
    Socket,
}

pub(crate) struct Sender {
    frame: Vec<u8>,
    wire: Wire,
}

enum Wire {
    Card(Ebpf),
    Socket(PacketSocket, Datagram),
}

impl Sender {
    pub(crate) fn open(net: &TestNet, origin: Origin) -> Self {
        let mut datagram = Datagram::to(net.gateway(|| hardware_address(INTERFACE)), GATEWAY_V4, crate::FLOODED);
        let walk = Walk { first: FIRST_SOURCE, count: SOURCES, stride: 1, index: 0 };
        let mut frame = datagram.from(source(0)).to_vec();
        frame[STATE_OFFSET..][..Walk::LEN].copy_from_slice(&walk.to_bytes());
        let wire = match origin {
            Origin::Card => {
                let from = net.client(|| index(CLIENT_INTERFACE));
                let mut loader = EbpfLoader::new();
                loader.override_global("SPRAY_FROM", &from, true);
                let mut object = loader.load(&crate::bench_bytes()).expect("load the object of the benchmark");
                let program: &mut Xdp =
                    object.program_mut("spray").expect("a program").try_into().expect("an XDP program");
                program.load().expect("the verifier accepts it");
                Wire::Card(object)
            }
            Origin::Socket => Wire::Socket(net.client(|| PacketSocket::open(CLIENT_INTERFACE)), datagram),
        };
        Self { frame, wire }
    }

    /// Sends from one CPU until told to stop; without a rate, as fast as it can. Tells how many a second it were.
    ///
    /// In the client's namespace.
    #[expect(clippy::float_arithmetic, reason = "a rate")]
    pub(crate) fn send(&mut self, rate: Option<u32>, stop: &AtomicBool) -> f64 {
        let mut cpu = CpuSet::new();
        cpu.set(0).expect("a CPU");
        sched_setaffinity(Pid::from_raw(0), &cpu).expect("stay on one CPU");
        let clock = Stopwatch::start();
        let mut sent = 0u64;
        let mut due = Duration::ZERO;
        while !stop.load(Ordering::Relaxed) {
            if let Some(rate) = rate {
                let now = clock.elapsed();
                if due > now {
                    thread::park_timeout(due - now);
                    continue;
                }
                due = due.max(now.saturating_sub(MOST_BEHIND)) + Duration::from_secs(CALL.into()) / rate;
            }
            self.send_some();
            sent += u64::from(CALL);
        }
        sent as f64 / clock.elapsed().as_secs_f64()
    }

    fn send_some(&mut self) {
        match &mut self.wire {
            Wire::Card(object) => {
                let program: &Xdp = object.program("spray").expect("a program").try_into().expect("an XDP program");
                let attrs = TestRunAttrs::new().xdp_live_frames(BATCH);
                let options =
                    TestRunOptions { data_in: Some(&self.frame), repeat: CALL, attrs, ..TestRunOptions::new() };
                program.test_run(options).expect("send frames");
            }
            Wire::Socket(socket, datagram) => {
                for number in 0..CALL {
                    socket.send(datagram.from(source(number % SOURCES)));
                }
            }
        }
    }
}

fn source(number: u32) -> IpAddr {
    IpAddr::V4((FIRST_SOURCE + number).into())
}

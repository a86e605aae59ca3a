//! One packet at a time, of both families, from clients that are denied and from clients that are not: any packet that is
//! judged wrongly is noticed by its number.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use crate::netns::{CLIENT_V4, CLIENT_V6, GATEWAY_V4, GATEWAY_V6, TestNet};

/// Addresses whose packets must never arrive, of each family.
pub const DENIED: [IpAddr; 2] = [CLIENT_V4[1], CLIENT_V6[1]];
/// Addresses whose packets must always arrive.
pub const GOOD: [IpAddr; 2] = [CLIENT_V4[0], CLIENT_V6[0]];

const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub struct PingPong {
    port: u16,
    sink: UdpSocket,
    denied: [UdpSocket; 2],
    good: [UdpSocket; 2],
}

impl PingPong {
    /// To a port of the gateway.
    ///
    /// # Panics
    ///
    /// When the port is taken.
    pub fn new(net: &TestNet, port: u16) -> Self {
        let bind = |address: IpAddr| net.client(|| UdpSocket::bind(SocketAddr::new(address, 0)).expect("a socket"));
        let sink = net.gateway(|| UdpSocket::bind(("::", port)).expect("a socket"));
        sink.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Self { port, sink, denied: DENIED.map(bind), good: GOOD.map(bind) }
    }

    /// Of each family a packet that must not arrive, and then one that must.
    ///
    /// # Panics
    ///
    /// When a packet is judged wrongly.
    pub fn play(&self, number: u64) {
        for (gateway, (denied, good)) in [GATEWAY_V4, GATEWAY_V6].into_iter().zip(self.denied.iter().zip(&self.good)) {
            let to = SocketAddr::new(gateway, self.port);
            denied.send_to(b"denied", to).expect("sent");
            good.send_to(&number.to_le_bytes(), to).expect("sent");
            assert_eq!(self.receive(), number.to_le_bytes(), "one that must arrive does, and none that must not");
        }
    }

    /// Plays until `stop`, and tells how many rounds.
    ///
    /// # Panics
    ///
    /// When a packet is judged wrongly.
    pub fn play_until(&self, stop: &AtomicBool) -> u64 {
        let mut rounds = 0;
        while !stop.load(Ordering::Relaxed) {
            self.play(rounds);
            rounds += 1;
        }
        rounds
    }

    /// A packet that is expected to arrive from a denied client, since its port is not protected.
    ///
    /// # Panics
    ///
    /// When it does not.
    pub fn passes_from_denied(&self) {
        self.denied[0].send_to(b"passes", SocketAddr::new(GATEWAY_V4, self.port)).expect("sent");
        assert_eq!(self.receive(), b"passes");
    }

    fn receive(&self) -> Vec<u8> {
        let mut buffer = [0; 16];
        let len = self.sink.recv(&mut buffer).expect("a packet that must arrive");
        buffer[..len].to_vec()
    }
}

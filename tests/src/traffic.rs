//! Packets that a test sends one by one, so that no queue is ever full.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use crate::netns::{CLIENT_V4, CLIENT_V6, GATEWAY_V4, GATEWAY_V6, TestNet};

/// Protected by the configuration of [`crate::fixture::World`].
pub const PORT: u16 = 443;
/// Not protected.
pub const OTHER_PORT: u16 = 22;

/// UDP between the client's addresses and two ports of the gateway. Made once a test: a process that another test starts
/// may hold a closed socket, and with it the port, for a moment.
#[derive(Debug)]
pub struct Traffic {
    protected: UdpSocket,
    other: UdpSocket,
    clients: Vec<(IpAddr, UdpSocket)>,
}

impl Traffic {
    /// # Panics
    ///
    /// When a port is taken, as it is by another value of the same namespace.
    pub fn new(net: &TestNet) -> Self {
        let bind = |port| {
            let server = net.gateway(|| UdpSocket::bind(("::", port)).expect("bind the server"));
            server.set_read_timeout(Some(Duration::from_secs(10))).expect("set the timeout");
            server
        };
        let clients = CLIENT_V4.into_iter().chain(CLIENT_V6).map(|address| {
            let socket = net.client(|| UdpSocket::bind(SocketAddr::new(address, 0)).expect("bind a client"));
            (address, socket)
        });
        Self { protected: bind(PORT), other: bind(OTHER_PORT), clients: clients.collect() }
    }

    /// # Panics
    ///
    /// When `from` is no address of the client's.
    pub fn send(&self, from: IpAddr, port: u16, text: &[u8]) {
        let (_, socket) = self.clients.iter().find(|(address, _)| *address == from).expect("a client");
        let gateway = if from.is_ipv4() { GATEWAY_V4 } else { GATEWAY_V6 };
        socket.send_to(text, (gateway, port)).expect("send");
    }

    /// How many of `count` packets to the protected port arrive.
    ///
    /// A marker to the other port follows them on the wire, so that when it is there all of them are through. It is
    /// then passed on to the protected port over loopback, where no program is attached.
    ///
    /// # Panics
    ///
    /// When the marker does not arrive.
    pub fn arriving(&self, from: IpAddr, count: u64) -> u64 {
        for _ in 0..count {
            self.send(from, PORT, b"packet");
        }
        self.send(CLIENT_V4[1], OTHER_PORT, b"marker");
        self.other_receives();
        self.other.send_to(b"marker", (Ipv6Addr::LOCALHOST, PORT)).expect("send");
        let mut arrived = 0;
        let mut buffer = [0; 64];
        loop {
            let len = self.protected.recv(&mut buffer).expect("the marker arrives");
            if &buffer[..len] == b"marker" {
                return arrived;
            }
            arrived += 1;
        }
    }

    /// Length of the next packet at the port that is not protected.
    ///
    /// # Panics
    ///
    /// When none arrives.
    pub fn other_receives(&self) -> usize {
        self.other.recv(&mut [0; 64]).expect("a packet arrives at the port that is not protected")
    }
}

//! The flooding address: packets to the protected port, and the socket of the gateway that they are for.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result};

use super::{
    pace::{Pace, Stop},
    scene,
    tally::Tally,
};
use crate::netns::TestNet;

const PAYLOAD: [u8; 64] = [0; 64];
/// The longest that the receiver goes on after the end.
const LINGER: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Flood<'a> {
    sender: UdpSocket,
    receiver: UdpSocket,
    tally: &'a Tally,
}

impl<'a> Flood<'a> {
    pub(super) fn open(net: &TestNet, tally: &'a Tally) -> Result<Self> {
        let target = SocketAddr::new(scene::GATEWAY, scene::PORT);
        let receiver = net.gateway(|| UdpSocket::bind(target)).context("opening the UDP port of the gateway")?;
        receiver.set_read_timeout(Some(LINGER))?;
        let sender = net.client(|| -> io::Result<UdpSocket> {
            let socket = UdpSocket::bind(SocketAddr::new(scene::FLOODING, 0))?;
            socket.connect(target)?;
            Ok(socket)
        });
        Ok(Self { sender: sender.context("opening the socket of the flood")?, receiver, tally })
    }

    pub(super) fn send(&self, stop: &Stop) {
        let mut pace = Pace::every(scene::FLOOD_EVERY);
        while pace.tick(stop) {
            // What does not fit into the sender's own queue was not sent.
            let sent = (0..scene::FLOOD_BATCH).filter(|_| self.sender.send(&PAYLOAD).is_ok()).count();
            self.tally.add(|counts| counts.sent += sent as u64);
        }
    }

    /// Counts what arrives, until nothing comes any more.
    pub(super) fn receive(&self, stop: &Stop) {
        loop {
            if self.receiver.recv(&mut [0; PAYLOAD.len()]).is_ok() {
                self.tally.add(|counts| counts.let_in += 1);
            } else if !stop.wait(Duration::ZERO) {
                return;
            }
        }
    }
}

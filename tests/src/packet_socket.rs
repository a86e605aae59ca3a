//! Frames of any source, put on the wire as they are.

use std::{
    fs::File,
    io::{ErrorKind, Write as _},
    net::IpAddr,
    os::fd::{AsRawFd as _, OwnedFd},
    thread,
};

use nix::{
    errno::Errno,
    ifaddrs::getifaddrs,
    sys::socket::{AddressFamily, LinkAddr, SockFlag, SockType, bind, socket},
};

use crate::packet::{IPV6, Packet};

/// Sends frames from an interface, past routing and the checks of sources.
#[derive(Debug)]
pub struct PacketSocket {
    socket: File,
}

impl PacketSocket {
    /// In the network namespace of this thread.
    ///
    /// # Panics
    ///
    /// When there is no such interface, or no permission.
    pub fn open(interface: &str) -> Self {
        let socket: OwnedFd = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)
            .expect("open a packet socket; these tests need root");
        bind(socket.as_raw_fd(), &link(interface)).expect("bind the packet socket");
        Self { socket: socket.into() }
    }

    /// Sends a frame, and waits while the interface takes none.
    ///
    /// # Panics
    ///
    /// When the interface is gone.
    pub fn send(&self, frame: &[u8]) {
        loop {
            match (&self.socket).write(frame) {
                Ok(_) => return,
                Err(error) if is_full(&error) => thread::yield_now(),
                Err(error) => panic!("send a frame: {error}"),
            }
        }
    }
}

fn is_full(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::WouldBlock || error.raw_os_error() == Some(Errno::ENOBUFS as i32)
}

/// The number of an interface in the network namespace of this thread.
///
/// # Panics
///
/// When there is none.
pub fn index(interface: &str) -> u32 {
    u32::try_from(link(interface).ifindex()).expect("the number of an interface")
}

/// The hardware address of an interface in the network namespace of this thread.
///
/// # Panics
///
/// When there is none.
pub fn hardware_address(interface: &str) -> [u8; 6] {
    link(interface).addr().expect("a hardware address")
}

fn link(interface: &str) -> LinkAddr {
    let mut interfaces = getifaddrs().expect("list the interfaces").filter(|entry| entry.interface_name == interface);
    interfaces.find_map(|entry| entry.address?.as_link_addr().copied()).expect("an interface of this name")
}

/// A UDP datagram that arrives whichever source it has: its checksums are right.
#[derive(Debug)]
pub struct Datagram {
    frame: Vec<u8>,
}

const IP: usize = 14;
const PAYLOAD_LEN: usize = 18;

impl Datagram {
    /// To a port of the host behind this hardware address.
    pub fn to(hardware_address: [u8; 6], destination: IpAddr, port: u16) -> Self {
        let any = if destination.is_ipv4() { "0.0.0.0" } else { "::" };
        let mut frame = Packet::udp_of_len(any, port, PAYLOAD_LEN).build();
        frame[..6].copy_from_slice(&hardware_address);
        match destination {
            IpAddr::V4(address) => frame[IP + 16..IP + 20].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => frame[IP + 24..IP + 40].copy_from_slice(&address.octets()),
        }
        Self { frame }
    }

    /// The frame from this source, which is of the family of the destination.
    pub fn from(&mut self, source: IpAddr) -> &[u8] {
        match source {
            IpAddr::V4(address) => {
                let header = &mut self.frame[IP..IP + 20];
                header[12..16].copy_from_slice(&address.octets());
                header[10..12].fill(0);
                let sum = checksum([&*header]);
                header[10..12].copy_from_slice(&sum);
            }
            IpAddr::V6(address) => {
                let (header, datagram) = self.frame[IP..].split_at_mut(40);
                header[8..24].copy_from_slice(&address.octets());
                datagram[6..8].fill(0);
                // The pseudo header: both addresses, the length, and the protocol.
                let len = [datagram[4], datagram[5], 0, header[6]];
                let sum = checksum([&header[8..40], &len, datagram]);
                datagram[6..8].copy_from_slice(&sum);
            }
        }
        &self.frame
    }

    pub fn is_ipv6(&self) -> bool {
        self.frame[12..14] == IPV6.to_be_bytes()
    }
}

/// The Internet checksum of parts of even length.
fn checksum<const N: usize>(parts: [&[u8]; N]) -> [u8; 2] {
    let words = parts.into_iter().flat_map(|part| part.chunks_exact(2));
    let sum: u32 = words.map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let [_, _, high, low] = (sum + (sum >> 16)).to_be_bytes();
    [!high, !low]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_with_its_checksum_sums_to_nothing() {
        let mut v4 = Datagram::to([2; 6], "192.0.2.1".parse().unwrap(), 443);
        let frame = v4.from("198.51.100.255".parse().unwrap());
        assert_eq!(checksum([&frame[IP..IP + 20]]), [0, 0]);
        let mut v6 = Datagram::to([2; 6], "2001:db8::1".parse().unwrap(), 443);
        assert!(v6.is_ipv6() && !v4.is_ipv6());
        let frame = v6.from("2001:db8:ffff:ffff::2".parse().unwrap());
        let (header, datagram) = frame[IP..].split_at(40);
        assert_eq!(checksum([&header[8..40], &[datagram[4], datagram[5], 0, 17], datagram]), [0, 0]);
    }
}

//! Frames for tests, from well-formed to lying.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub const VLAN: u16 = 0x8100;
pub const PROVIDER_VLAN: u16 = 0x88a8;
pub const OLD_VLAN: u16 = 0x9100;

pub const IPV4: u16 = 0x0800;
pub const IPV6: u16 = 0x86dd;
pub const ARP: u16 = 0x0806;

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ICMPV6: u8 = 58;

pub const HOP_BY_HOP: u8 = 0;
pub const ROUTING: u8 = 43;
pub const FRAGMENT: u8 = 44;
pub const ENCRYPTION: u8 = 50;
pub const AUTHENTICATION: u8 = 51;
pub const NO_NEXT_HEADER: u8 = 59;
pub const DESTINATION: u8 = 60;

pub const SYN: u8 = 0x02;
pub const ACK: u8 = 0x10;

/// A frame in the making. What is not set is right.
#[derive(Clone, Debug)]
pub struct Packet {
    /// Type and VLAN id.
    tags: Vec<(u16, u16)>,
    network: Network,
    payload: Vec<u8>,
    /// What the IP header says its length is.
    stated_len: Option<u16>,
    version: Option<u8>,
    /// Bytes behind what the IP header tells of.
    trailer: usize,
}

#[derive(Clone, Debug)]
enum Network {
    Raw { ether_type: u16 },
    V4 { source: Ipv4Addr, protocol: u8, options: usize, fragment: u16, header_words: Option<u8> },
    V6 { source: Ipv6Addr, next: u8, extensions: Vec<(u8, Vec<u8>)>, hop_limit: u8 },
}

impl Packet {
    /// Something else than IP.
    pub fn raw(ether_type: u16, payload: &[u8]) -> Self {
        Self::of(Network::Raw { ether_type }, payload)
    }

    /// From `source`, of either family, with an L4 payload.
    pub fn ip(source: &str, protocol: u8, payload: &[u8]) -> Self {
        let network = match source.parse().expect("a source address") {
            IpAddr::V4(source) => Network::V4 { source, protocol, options: 0, fragment: 0, header_words: None },
            IpAddr::V6(source) => Network::V6 { source, next: protocol, extensions: Vec::new(), hop_limit: 64 },
        };
        Self::of(network, payload)
    }

    pub fn udp(source: &str, port: u16) -> Self {
        Self::ip(source, UDP, &udp_header(port, 0))
    }

    /// `payload_len` bytes of UDP payload.
    pub fn udp_of_len(source: &str, port: u16, payload_len: usize) -> Self {
        let mut payload = udp_header(port, payload_len);
        payload.resize(payload.len() + payload_len, 0);
        Self::ip(source, UDP, &payload)
    }

    pub fn tcp(source: &str, port: u16, flags: u8) -> Self {
        let mut header = [0; 20];
        header[..2].copy_from_slice(&40_000u16.to_be_bytes());
        header[2..4].copy_from_slice(&port.to_be_bytes());
        header[12] = 5 << 4;
        header[13] = flags;
        Self::ip(source, TCP, &header)
    }

    pub fn icmpv6(source: &str, kind: u8, hop_limit: u8) -> Self {
        let mut packet = Self::ip(source, ICMPV6, &[kind, 0, 0, 0, 0, 0, 0, 0]);
        if let Network::V6 { hop_limit: field, .. } = &mut packet.network {
            *field = hop_limit;
        }
        packet
    }

    fn of(network: Network, payload: &[u8]) -> Self {
        Self { tags: Vec::new(), network, payload: payload.to_vec(), stated_len: None, version: None, trailer: 0 }
    }

    /// Adds a VLAN tag inside those that are there.
    #[must_use]
    pub fn tag(mut self, ether_type: u16) -> Self {
        self.tags.push((ether_type, 100));
        self
    }

    /// Adds a tag that gives a priority and no VLAN, inside those that are there.
    #[must_use]
    pub fn priority_tag(mut self, ether_type: u16) -> Self {
        const PRIORITY: u16 = 5 << 13;
        self.tags.push((ether_type, PRIORITY));
        self
    }

    /// Adds `words` times four bytes of IPv4 options.
    #[must_use]
    pub fn options(mut self, words: usize) -> Self {
        if let Network::V4 { options, .. } = &mut self.network {
            *options = words;
        }
        self
    }

    /// What the IPv4 header says its length is, in words.
    #[must_use]
    pub fn header_words(mut self, words: u8) -> Self {
        if let Network::V4 { header_words, .. } = &mut self.network {
            *header_words = Some(words);
        }
        self
    }

    /// Makes a fragment: `offset` in units of eight bytes, `more` when it is not the last.
    #[must_use]
    pub fn fragment(mut self, offset: u16, more: bool) -> Self {
        match &mut self.network {
            Network::V4 { fragment, .. } => *fragment = offset | if more { 0x2000 } else { 0 },
            Network::V6 { .. } => {
                let [high, low] = (offset << 3 | u16::from(more)).to_be_bytes();
                return self.extension(FRAGMENT, &[0, high, low, 0, 0, 0, 7]);
            }
            Network::Raw { .. } => {}
        }
        self
    }

    /// Adds an IPv6 extension header; `body` follows its first byte.
    #[must_use]
    pub fn extension(mut self, kind: u8, body: &[u8]) -> Self {
        if let Network::V6 { extensions, .. } = &mut self.network {
            extensions.push((kind, body.to_vec()));
        }
        self
    }

    /// An extension header of eight bytes that says nothing.
    #[must_use]
    pub fn empty_extension(self, kind: u8) -> Self {
        self.extension(kind, &[0, 1, 4, 0, 0, 0, 0])
    }

    /// What the IP header says the length is: the total of IPv4, the payload of IPv6.
    #[must_use]
    pub fn stated_len(mut self, len: u16) -> Self {
        self.stated_len = Some(len);
        self
    }

    /// Adds bytes behind the packet, as Ethernet pads short ones.
    #[must_use]
    pub fn trailer(mut self, len: usize) -> Self {
        self.trailer = len;
        self
    }

    /// The version field of the IP header.
    #[must_use]
    pub fn version(mut self, version: u8) -> Self {
        self.version = Some(version);
        self
    }

    pub fn build(&self) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        for (ether_type, id) in &self.tags {
            frame.extend(ether_type.to_be_bytes());
            frame.extend(id.to_be_bytes());
        }
        match &self.network {
            Network::Raw { ether_type } => frame.extend(ether_type.to_be_bytes()),
            Network::V4 { source, protocol, options, fragment, header_words } => {
                frame.extend(IPV4.to_be_bytes());
                let header_len = 20 + options * 4;
                let words = header_words.unwrap_or(u8::try_from(header_len / 4).expect("options fit"));
                let total = self.stated_len.unwrap_or_else(|| fits(header_len + self.payload.len()));
                frame.push(self.version.unwrap_or(4) << 4 | words);
                frame.push(0);
                frame.extend(total.to_be_bytes());
                frame.extend([0, 1]);
                frame.extend(fragment.to_be_bytes());
                frame.extend([64, *protocol, 0, 0]);
                frame.extend(source.octets());
                frame.extend([198, 18, 0, 1]);
                frame.extend(std::iter::repeat_n(1, options * 4));
            }
            Network::V6 { source, next, extensions, hop_limit } => {
                frame.extend(IPV6.to_be_bytes());
                let extensions_len: usize = extensions.iter().map(|(_, body)| body.len() + 1).sum();
                frame.extend([self.version.unwrap_or(6) << 4, 0, 0, 0]);
                frame
                    .extend(self.stated_len.unwrap_or_else(|| fits(extensions_len + self.payload.len())).to_be_bytes());
                frame.push(extensions.first().map_or(*next, |(kind, _)| *kind));
                frame.push(*hop_limit);
                frame.extend(source.octets());
                frame.extend(Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, 1).octets());
                for (index, (_, body)) in extensions.iter().enumerate() {
                    frame.push(extensions.get(index + 1).map_or(*next, |(kind, _)| *kind));
                    frame.extend(body);
                }
            }
        }
        frame.extend(&self.payload);
        frame.extend(std::iter::repeat_n(0xff, self.trailer));
        frame
    }
}

fn fits(len: usize) -> u16 {
    u16::try_from(len).expect("what an IP header can state")
}

fn udp_header(port: u16, payload_len: usize) -> Vec<u8> {
    let mut header = 40_000u16.to_be_bytes().to_vec();
    header.extend(port.to_be_bytes());
    header.extend(u16::try_from(8 + payload_len).expect("fits").to_be_bytes());
    header.extend([0, 0]);
    header
}

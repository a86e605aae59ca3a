//! The packet parser: one function for the XDP program, tests and fuzzing.
//!
//! Reads Ethernet, up to three VLAN tags, IPv4 with options, IPv6 with up to eight extension headers, and of TCP and UDP
//! what rules need. L4 fields are never read from a fragment that is not the first, nor from beyond the end that the
//! IP header states (Ethernet pads short frames). What the packet has and the parser does not reach, behind more headers
//! than that, is judged by its source: a host may well read it.

use network_types::{
    eth::{EthHdr, EtherType},
    ip::{IpProto, Ipv4Hdr, Ipv6Hdr},
    tcp::TcpHdr,
    udp::UdpHdr,
    vlan::VlanHdr,
};

use crate::addr::{AddressV4, AddressV6};

/// The furthest offset at which a header is read. What lies behind it is [`Transport::Unreadable`]. The bound is the same in
/// the XDP program, where the verifier needs one, and on the host.
pub const MAX_READ_OFFSET: usize = 512;

/// How a parser sees a frame.
pub trait PacketRead {
    type Header<'a, const N: usize>: Header<N>
    where
        Self: 'a;

    /// `N` bytes at `offset`, or `None` when the frame, or the part of it that can be read, ends before, or when
    /// `offset` is above [`MAX_READ_OFFSET`].
    fn read<const N: usize>(&self, offset: usize) -> Option<Self::Header<'_, N>>;

    /// Bytes of the whole frame, with all its buffers.
    fn frame_len(&self) -> usize;

    /// Whether the whole frame, with all its buffers, has at least `len` bytes.
    fn has(&self, len: usize) -> bool;

    /// The same number. The verifier of the XDP program forgets here what it knows of it, so that paths which differ
    /// in nothing else become one; without this it walks through every combination of headers.
    #[inline(always)]
    fn forget(&self, number: usize) -> usize {
        number
    }
}

/// `N` bytes that can be read. The program takes what it needs of them by whole words, without a copy.
pub trait Header<const N: usize>: Copy {
    fn byte<const AT: usize>(self) -> u8;

    /// A number in network order.
    fn be16<const AT: usize>(self) -> u16;

    fn be32<const AT: usize>(self) -> u32;

    fn address_v4<const AT: usize>(self) -> AddressV4;

    fn address_v6<const AT: usize>(self) -> AddressV6;
}

impl PacketRead for [u8] {
    type Header<'a, const N: usize> = &'a [u8; N];

    fn read<const N: usize>(&self, offset: usize) -> Option<&[u8; N]> {
        if offset > MAX_READ_OFFSET {
            return None;
        }
        self.get(offset..)?.first_chunk()
    }

    fn frame_len(&self) -> usize {
        self.len()
    }

    fn has(&self, len: usize) -> bool {
        self.len() >= len
    }
}

impl<const N: usize> Header<N> for &[u8; N] {
    fn byte<const AT: usize>(self) -> u8 {
        self[AT]
    }

    fn be16<const AT: usize>(self) -> u16 {
        u16::from_be_bytes(core::array::from_fn(|index| self[AT + index]))
    }

    fn be32<const AT: usize>(self) -> u32 {
        u32::from_be_bytes(core::array::from_fn(|index| self[AT + index]))
    }

    fn address_v4<const AT: usize>(self) -> AddressV4 {
        AddressV4::new(core::array::from_fn(|index| self[AT + index]))
    }

    fn address_v6<const AT: usize>(self) -> AddressV6 {
        AddressV6::new(core::array::from_fn(|index| self[AT + index]))
    }
}

/// A length that no IP header can state.
const SUPER: usize = 1 << 16;

/// The length that a header states, of a frame in which it ends at `end` if it is 0. The kernel joins segments to
/// super-frames of more than 64 KiB (BIG TCP), whose length it states as 0: they go on to the end of the frame, of which
/// no more is asked than that.
#[inline(always)]
fn true_len<P: PacketRead + ?Sized>(frame: &P, stated: u16, end: usize) -> usize {
    const SIGN: u32 = usize::BITS - 1;
    // Without a branch: the verifier would walk on with either kind of frame.
    let stated = frame.forget(stated.into());
    let is_none = stated.wrapping_sub(1) >> SIGN;
    let is_long = frame.frame_len().wrapping_sub(end) / SUPER;
    let is_long = frame.forget(is_long).wrapping_neg() >> SIGN;
    (stated | ((is_none & is_long) * SUPER)) & (2 * SUPER - 1)
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Parsed {
    NotIp,
    /// ARP, IPv6 neighbour discovery (RFC 4861) and MLD (RFC 2710, RFC 3810): links stop working without them.
    Control,
    /// Truncated or contradictory.
    Malformed,
    Ip(IpPacket),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpPacket {
    pub source: Source,
    pub transport: Transport,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    V4(AddressV4),
    V6(AddressV6),
}

/// What follows the IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Tcp {
        destination_port: u16,
        /// SYN without ACK.
        opens_connection: bool,
    },
    Udp {
        destination_port: u16,
    },
    /// TCP or UDP may be inside, but the port or the flags are not in this packet, a fragment, or behind too many headers.
    Unreadable {
        /// SYN without ACK may be what cannot be read. In parts, a connection would be opened for nothing.
        opens_connection: bool,
    },
    /// Anything else.
    Other,
}

impl Transport {
    /// Whether it is charged as a new connection.
    #[inline(always)]
    pub const fn opens_connection(self) -> bool {
        match self {
            Self::Tcp { opens_connection, .. } | Self::Unreadable { opens_connection } => opens_connection,
            Self::Udp { .. } | Self::Other => false,
        }
    }
}

/// The crate keeps them in network order.
const fn host_order(ether_type: EtherType) -> u16 {
    u16::from_be(ether_type as u16)
}

const ETH_LEN: usize = EthHdr::LEN;
const VLAN_LEN: usize = VlanHdr::LEN;
const ETH_IPV4: u16 = host_order(EtherType::Ipv4);
const ETH_ARP: u16 = host_order(EtherType::Arp);
const ETH_IPV6: u16 = host_order(EtherType::Ipv6);
/// IEEE 802.1Q, 802.1ad, and the older double-tagging type.
const ETH_VLAN: [u16; 3] =
    [host_order(EtherType::Ieee8021q), host_order(EtherType::Ieee8021ad), host_order(EtherType::Ieee8021QinQ1)];
const MAX_VLAN_TAGS: usize = 3;

const IPV4_MIN_LEN: usize = Ipv4Hdr::LEN;
const IPV6_LEN: usize = Ipv6Hdr::LEN;
/// RFC 8200 names six kinds, one of which may come twice.
pub const MAX_EXTENSION_HEADERS: usize = 8;

const TCP: u8 = IpProto::Tcp as u8;
const UDP: u8 = IpProto::Udp as u8;
const HOP_BY_HOP: u8 = IpProto::HopOpt as u8;
const ROUTING: u8 = IpProto::Ipv6Route as u8;
const FRAGMENT: u8 = IpProto::Ipv6Frag as u8;
const AUTHENTICATION: u8 = IpProto::Ah as u8;
const ICMPV6: u8 = IpProto::Ipv6Icmp as u8;
const DESTINATION: u8 = IpProto::Ipv6Opts as u8;
const MOBILITY: u8 = IpProto::MobilityHeader as u8;
const HOST_IDENTITY: u8 = IpProto::Hip as u8;
const SHIM6: u8 = IpProto::Shim6 as u8;

const TCP_MIN_LEN: usize = TcpHdr::LEN;
const UDP_LEN: usize = UdpHdr::LEN;
const TCP_SYN: u8 = 0x02;
const TCP_ACK: u8 = 0x10;

/// Ethernet's type, and of the IP header the version and the length.
const PLAIN_V4: u32 = ((ETH_IPV4 as u32) << 8) | 0x45;
/// The length of IPv6's header is always the same.
const PLAIN_V6: u32 = ((ETH_IPV6 as u32) << 4) | 6;

/// Whether a packet is a fragment. Constants, not an enum, for [`PacketRead::forget`].
mod fragment {
    pub(super) const WHOLE: usize = 0;
    pub(super) const FIRST: usize = 1;
    pub(super) const LATER: usize = 2;
}

/// Parses a frame that begins with its Ethernet header.
#[inline(always)]
pub fn parse<P: PacketRead + ?Sized>(frame: &P) -> Parsed {
    match parse_plain(frame) {
        Some(packet) => Parsed::Ip(packet),
        None => parse_any(frame),
    }
}

/// What almost every frame is, by a few instructions: TCP or UDP right behind an IP header of the usual length, without tags,
/// whole, and of the length that its header states. Of these it says what [`parse_any`] says, and of all others `None`.
#[inline(always)]
fn parse_plain<P: PacketRead + ?Sized>(frame: &P) -> Option<IpPacket> {
    const V4_AT: usize = ETH_LEN + IPV4_MIN_LEN;
    const V6_AT: usize = ETH_LEN + IPV6_LEN;
    // As far as the flags of TCP, where the IP header is the shorter one.
    let header = frame.read::<{ V4_AT + 14 }>(0)?;
    // The protocol, and in IPv4 the length of the header, by one load.
    let kind = header.be32::<{ ETH_LEN - 2 }>();
    if kind >> 8 == PLAIN_V4 {
        let total_len = usize::from(header.be16::<{ ETH_LEN + 2 }>());
        if header.be16::<{ ETH_LEN + 6 }>() & 0x3fff != 0 || !frame.has(ETH_LEN + total_len) {
            return None;
        }
        let source = Source::V4(header.address_v4::<{ ETH_LEN + 12 }>());
        let destination_port = header.be16::<{ V4_AT + 2 }>();
        let transport = match header.byte::<{ ETH_LEN + 9 }>() {
            TCP if total_len >= IPV4_MIN_LEN + TCP_MIN_LEN => {
                let opens_connection = opens(header.byte::<{ V4_AT + 13 }>());
                Transport::Tcp { destination_port, opens_connection }
            }
            UDP if total_len >= IPV4_MIN_LEN + UDP_LEN => Transport::Udp { destination_port },
            _ => return None,
        };
        return Some(IpPacket { source, transport });
    }
    if kind >> 12 == PLAIN_V6 {
        let header = frame.read::<{ V6_AT + 14 }>(0)?;
        let payload_len = usize::from(header.be16::<{ ETH_LEN + 4 }>());
        if !frame.has(V6_AT + payload_len) {
            return None;
        }
        let source = Source::V6(header.address_v6::<{ ETH_LEN + 8 }>());
        let destination_port = header.be16::<{ V6_AT + 2 }>();
        let transport = match header.byte::<{ ETH_LEN + 6 }>() {
            TCP if payload_len >= TCP_MIN_LEN => {
                let opens_connection = opens(header.byte::<{ V6_AT + 13 }>());
                Transport::Tcp { destination_port, opens_connection }
            }
            UDP if payload_len >= UDP_LEN => Transport::Udp { destination_port },
            _ => return None,
        };
        return Some(IpPacket { source, transport });
    }
    None
}

/// Whether these flags are SYN without ACK.
#[inline(always)]
const fn opens(flags: u8) -> bool {
    flags & (TCP_SYN | TCP_ACK) == TCP_SYN
}

/// Every kind of frame.
#[inline(always)]
fn parse_any<P: PacketRead + ?Sized>(frame: &P) -> Parsed {
    let Some(header) = frame.read::<2>(ETH_LEN - 2) else { return Parsed::Malformed };
    let mut ether_type = header.be16::<0>();
    let mut offset = ETH_LEN;
    for _ in 0..MAX_VLAN_TAGS {
        // What most frames are is asked first.
        if ether_type == ETH_IPV4 || ether_type == ETH_IPV6 || !is_vlan(ether_type) {
            break;
        }
        let Some(inner) = frame.read::<2>(offset + 2) else { return Parsed::Malformed };
        ether_type = inner.be16::<0>();
        offset += VLAN_LEN;
    }
    let offset = frame.forget(offset);
    match ether_type {
        ETH_IPV4 => parse_ipv4(frame, offset),
        ETH_IPV6 => parse_ipv6(frame, offset),
        ETH_ARP => Parsed::Control,
        // Passed as something else than IP, it would be a way around the limits for whoever can add a tag.
        _ if is_vlan(ether_type) => Parsed::Malformed,
        _ => Parsed::NotIp,
    }
}

/// The source address alone, as [`parse`] finds it; also that of an IP packet that is malformed. For what is told of
/// single packets: the verifier does not walk through all the headers once more.
#[inline(always)]
pub fn source_of<P: PacketRead + ?Sized>(frame: &P) -> Option<Source> {
    let mut ether_type = frame.read::<2>(ETH_LEN - 2)?.be16::<0>();
    let mut offset = ETH_LEN;
    for _ in 0..MAX_VLAN_TAGS {
        if !is_vlan(ether_type) {
            break;
        }
        ether_type = frame.read::<2>(offset + 2)?.be16::<0>();
        offset += VLAN_LEN;
    }
    let offset = frame.forget(offset);
    match ether_type {
        ETH_IPV4 => Some(Source::V4(frame.read::<4>(offset + 12)?.address_v4::<0>())),
        ETH_IPV6 => Some(Source::V6(frame.read::<16>(offset + 8)?.address_v6::<0>())),
        _ => None,
    }
}

#[inline(always)]
const fn is_vlan(ether_type: u16) -> bool {
    ether_type == ETH_VLAN[0] || ether_type == ETH_VLAN[1] || ether_type == ETH_VLAN[2]
}

#[inline(always)]
fn parse_ipv4<P: PacketRead + ?Sized>(frame: &P, offset: usize) -> Parsed {
    let Some(header) = frame.read::<IPV4_MIN_LEN>(offset) else { return Parsed::Malformed };
    let version_and_len = header.byte::<0>();
    let header_len = usize::from(version_and_len & 0x0f) * 4;
    let total_len = true_len(frame, header.be16::<2>(), offset);
    if version_and_len >> 4 != 4
        || header_len < IPV4_MIN_LEN
        || total_len < header_len
        || !frame.has(offset + total_len)
    {
        return Parsed::Malformed;
    }
    let source = Source::V4(header.address_v4::<12>());
    let flags_and_offset = header.be16::<6>();
    let fragment = match (flags_and_offset & 0x1fff, flags_and_offset & 0x2000) {
        (0, 0) => fragment::WHOLE,
        (0, _) => fragment::FIRST,
        _ => fragment::LATER,
    };
    let fragment = frame.forget(fragment);
    transport(frame, source, header.byte::<9>(), fragment, offset + header_len, total_len - header_len)
}

#[inline(always)]
fn parse_ipv6<P: PacketRead + ?Sized>(frame: &P, offset: usize) -> Parsed {
    // As far as the source address.
    let Some(header) = frame.read::<24>(offset) else { return Parsed::Malformed };
    let payload_len = true_len(frame, header.be16::<4>(), offset + IPV6_LEN);
    if header.byte::<0>() >> 4 != 6 || !frame.has(offset + IPV6_LEN + payload_len) {
        return Parsed::Malformed;
    }
    let address = header.address_v6::<8>();
    let source = Source::V6(address);
    let hop_limit = header.byte::<7>();
    let mut next = header.byte::<6>();
    let mut fragment = fragment::WHOLE;
    // Bytes of the payload that extension headers have taken.
    let mut taken = 0;
    for _ in 0..=MAX_EXTENSION_HEADERS {
        let is_extension = matches!(
            next,
            HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION | MOBILITY | HOST_IDENTITY | SHIM6
        );
        if !is_extension {
            let at = offset + IPV6_LEN + taken;
            // RFC 6980 forbids fragments here.
            if next == ICMPV6 && fragment == fragment::WHOLE {
                return icmpv6(frame, address, hop_limit, at, payload_len - taken);
            }
            return transport(frame, source, next, fragment, at, payload_len - taken);
        }
        if fragment == fragment::LATER {
            // The rest of the chain is in the first fragment.
            return unreadable(source, false);
        }
        let Some(extension) = frame.read::<4>(offset + IPV6_LEN + taken) else {
            return out_of_reach(source, 4, payload_len - taken);
        };
        taken += match next {
            FRAGMENT => 8,
            AUTHENTICATION => (usize::from(extension.byte::<1>()) + 2) * 4,
            _ => (usize::from(extension.byte::<1>()) + 1) * 8,
        };
        if taken > payload_len {
            // In a first fragment the chain may go on in the next one; RFC 7112 lets a receiver drop that.
            return Parsed::Malformed;
        }
        if next == FRAGMENT {
            let offset_and_flags = extension.be16::<2>();
            fragment = match (offset_and_flags & 0xfff8, offset_and_flags & 1) {
                (0, 0) => fragment,
                (0, _) => fragment::FIRST,
                _ => fragment::LATER,
            };
        }
        next = extension.byte::<0>();
        taken = frame.forget(taken);
        fragment = frame.forget(fragment);
    }
    // Linux reads chains of any length.
    unreadable(source, true)
}

#[inline(always)]
fn icmpv6<P: PacketRead + ?Sized>(frame: &P, source: AddressV6, hop_limit: u8, offset: usize, len: usize) -> Parsed {
    if len < 4 {
        return Parsed::Malformed;
    }
    // Never a single byte: the verifier does not accept the bounds check that a compiler makes of that.
    let other = Parsed::Ip(IpPacket { source: Source::V6(source), transport: Transport::Other });
    let Some(header) = frame.read::<4>(offset) else { return other };
    match header.byte::<0>() {
        // MLD (RFC 3810, section 5) and multicast router discovery (RFC 4286) count only as what does not leave a link.
        130..=132 | 143 | 151..=153 if hop_limit == 1 && source.is_of_link() => Parsed::Control,
        // Neighbour discovery counts only from this link, which a hop limit of 255 proves (RFC 4861, section 3.1).
        133..=137 | 141 | 142 | 148 | 149 if hop_limit == 255 => Parsed::Control,
        _ => other,
    }
}

#[inline(always)]
const fn unreadable(source: Source, opens_connection: bool) -> Parsed {
    Parsed::Ip(IpPacket { source, transport: Transport::Unreadable { opens_connection } })
}

/// What is to be made of a header of `header_len` bytes that could not be read where the packet has `len`.
#[inline(always)]
const fn out_of_reach(source: Source, header_len: usize, len: usize) -> Parsed {
    if len < header_len { Parsed::Malformed } else { unreadable(source, true) }
}

/// `len` is how many bytes the IP header says follow `offset`.
#[inline(always)]
fn transport<P: PacketRead + ?Sized>(
    frame: &P,
    source: Source,
    protocol: u8,
    fragment: usize,
    offset: usize,
    len: usize,
) -> Parsed {
    let min_len = match protocol {
        TCP => TCP_MIN_LEN,
        UDP => UDP_LEN,
        _ => return Parsed::Ip(IpPacket { source, transport: Transport::Other }),
    };
    if fragment == fragment::LATER {
        return unreadable(source, false);
    }
    if len < min_len {
        if fragment == fragment::FIRST {
            // Who cuts off the flags (RFC 1858, section 3) sends them where nobody looks for them.
            return unreadable(source, protocol == TCP);
        }
        return Parsed::Malformed;
    }
    let Some(header) = frame.read::<4>(offset) else { return unreadable(source, protocol == TCP) };
    let destination_port = header.be16::<2>();
    if protocol == UDP {
        return Parsed::Ip(IpPacket { source, transport: Transport::Udp { destination_port } });
    }
    let Some(offset_and_flags) = frame.read::<2>(offset + 12) else { return unreadable(source, true) };
    let opens_connection = opens(offset_and_flags.byte::<1>());
    Parsed::Ip(IpPacket { source, transport: Transport::Tcp { destination_port, opens_connection } })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn ipv4(protocol: u8, flags_and_offset: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = std::vec![0; 12];
        frame.extend(ETH_IPV4.to_be_bytes());
        let total = u16::try_from(20 + payload.len()).unwrap().to_be_bytes();
        let fragment = flags_and_offset.to_be_bytes();
        frame.extend([0x45, 0, total[0], total[1], 0, 0, fragment[0], fragment[1], 64, protocol, 0, 0]);
        frame.extend([192, 0, 2, 1, 198, 51, 100, 1]);
        frame.extend(payload);
        frame
    }

    #[test]
    fn ports_are_not_read_from_padding_or_later_fragments() {
        let udp = [0x30, 0x39, 0x01, 0xbb, 0, 8, 0, 0];
        let mut ack = [0; 20];
        ack[2..4].copy_from_slice(&443u16.to_be_bytes());
        ack[13] = TCP_ACK;
        let port = Transport::Udp { destination_port: 443 };
        let hidden = Transport::Unreadable { opens_connection: true };
        let unreadable = Transport::Unreadable { opens_connection: false };
        let cases: [(Vec<u8>, Option<Transport>); 10] = [
            (ipv4(TCP, 0x2000, &ack), Some(Transport::Tcp { destination_port: 443, opens_connection: false })),
            (ipv4(TCP, 0x2000, &ack[..16]), Some(hidden)),
            (ipv4(TCP, 0x2000, &ack[..8]), Some(hidden)),
            (ipv4(TCP, 0x2001, &ack[..8]), Some(unreadable)),
            (ipv4(TCP, 0, &ack[..16]), None),
            (ipv4(UDP, 0, &udp), Some(port)),
            (ipv4(UDP, 0x2000, &udp), Some(port)),
            (ipv4(UDP, 0x2000, &udp[..4]), Some(unreadable)),
            (ipv4(UDP, 185, &udp), Some(unreadable)),
            ([ipv4(UDP, 0, &udp[..4]), std::vec![0; 30]].concat(), None),
        ];
        for (frame, transport) in cases {
            let expected = match transport {
                Some(transport) => {
                    Parsed::Ip(IpPacket { source: Source::V4(AddressV4::new([192, 0, 2, 1])), transport })
                }
                None => Parsed::Malformed,
            };
            assert_eq!(parse(frame.as_slice()), expected, "{frame:?}");
        }
    }

    fn ipv6(next: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = std::vec![0; 12];
        frame.extend(ETH_IPV6.to_be_bytes());
        let len = u16::try_from(payload.len()).unwrap().to_be_bytes();
        frame.extend([0x60, 0, 0, 0, len[0], len[1], next, 64]);
        frame.extend([0x20; 32]);
        frame.extend(payload);
        frame
    }

    #[test]
    fn what_most_frames_are_is_told_without_the_rest_of_the_parser() {
        for protocol in [TCP, UDP] {
            let payload = [7; TCP_MIN_LEN];
            for frame in [ipv4(protocol, 0, &payload), ipv4(protocol, 0x4000, &payload), ipv6(protocol, &payload)] {
                let plain = parse_plain(frame.as_slice()).map(Parsed::Ip);
                assert_eq!(plain, Some(parse_any(frame.as_slice())), "{frame:?}");
            }
        }
    }

    proptest! {
        /// Of frames that are ordinary but for a few bytes, or their end.
        #[test]
        fn the_short_way_says_what_the_long_one_says(
            is_v4: bool, protocol in prop::sample::select(std::vec![TCP, UDP, ICMPV6, FRAGMENT]),
            flags_and_offset in prop::sample::select(std::vec![0u16, 0x4000, 0x2000, 1, 0x8000]),
            payload in prop::collection::vec(any::<u8>(), 0..40), padding in 0usize..8, cut in 0usize..8,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        ) {
            let mut frame =
                if is_v4 { ipv4(protocol, flags_and_offset, &payload) } else { ipv6(protocol, &payload) };
            frame.resize(frame.len() + padding, 0);
            frame.truncate(frame.len() - cut);
            for (place, byte) in changes {
                let place = place.index(frame.len());
                frame[place] = byte;
            }
            if let Some(packet) = parse_plain(frame.as_slice()) {
                prop_assert_eq!(parse_any(frame.as_slice()), Parsed::Ip(packet));
            }
        }

        #[test]
        fn any_bytes_have_an_answer(
            tail in prop::collection::vec(any::<u8>(), 0..200),
            ether_type in prop::sample::select(std::vec![ETH_IPV4, ETH_IPV6, ETH_ARP, 0x8100, 0x88a8, 0x9100, 0]),
        ) {
            let mut frame = std::vec![0u8; 12];
            frame.extend(ether_type.to_be_bytes());
            frame.extend(tail);
            for len in 0..frame.len() {
                prop_assert_eq!(parse(&frame[..len]), parse(&frame[..len]));
            }
        }
    }
}

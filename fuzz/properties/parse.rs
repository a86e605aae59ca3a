//! What holds of the parser's answer, whatever the frame. The fuzzer looks for a frame that breaks it, and an ordinary
//! test runs the corpus through it.

use std::cell::Cell;

use limiter_common::{
    addr::{AddressV4, AddressV6},
    packet::{IpPacket, MAX_READ_OFFSET, PacketRead, Parsed, Source, Transport, parse},
};

const ETHER_TYPE: usize = 12;
const TAGS: [u16; 3] = [0x8100, 0x88a8, 0x9100];
const MAX_TAGS: usize = 3;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;

/// # Panics
///
/// When a property does not hold.
pub(crate) fn check(frame: &[u8]) {
    let parsed = parse(frame);
    let watched = Watched { frame, end: Cell::new(0), furthest: Cell::new(0) };
    assert_eq!(parse(&watched), parsed);
    assert!(watched.end.get() <= frame.len(), "a read beyond the end");
    only_readable_bytes_count(frame, parsed, watched.end.get());
    addresses_of_the_link_do_not_count(frame, parsed);
    if parsed == Parsed::Malformed {
        return;
    }
    what_follows_does_not_count(frame, parsed);
    a_tag_does_not_count(frame, parsed, watched.furthest.get());
    if let Some((ether_type, at)) = network(frame) {
        match ether_type {
            IPV4 => agrees_with_ipv4(frame, at, parsed),
            IPV6 => agrees_with_ipv6(frame, at, parsed),
            _ => assert!(matches!(parsed, Parsed::NotIp | Parsed::Control)),
        }
    }
}

/// Remembers what is read.
struct Watched<'a> {
    frame: &'a [u8],
    /// Of what was read, the end that lies furthest behind.
    end: Cell<usize>,
    /// The furthest offset that was asked for.
    furthest: Cell<usize>,
}

impl PacketRead for Watched<'_> {
    type Header<'a, const N: usize>
        = &'a [u8; N]
    where
        Self: 'a;

    fn read<const N: usize>(&self, offset: usize) -> Option<&[u8; N]> {
        self.furthest.set(self.furthest.get().max(offset));
        let bytes = self.frame.read(offset)?;
        self.end.set(self.end.get().max(offset + N));
        Some(bytes)
    }

    fn frame_len(&self) -> usize {
        self.frame.len()
    }

    fn has(&self, len: usize) -> bool {
        self.frame.has(len)
    }
}

/// A frame of several buffers, of which only the first can be read.
struct Linear<'a> {
    frame: &'a [u8],
    readable: usize,
}

impl PacketRead for Linear<'_> {
    type Header<'a, const N: usize>
        = &'a [u8; N]
    where
        Self: 'a;

    fn read<const N: usize>(&self, offset: usize) -> Option<&[u8; N]> {
        self.frame[..self.readable].read(offset)
    }

    fn frame_len(&self) -> usize {
        self.frame.len()
    }

    fn has(&self, len: usize) -> bool {
        self.frame.has(len)
    }
}

/// Headers that are not in the first buffer are out of reach: such a frame is malformed, or judged by its source.
fn only_readable_bytes_count(frame: &[u8], parsed: Parsed, read: usize) {
    for readable in [0, 13, 14, 18, 33, 34, 54, 62, read.saturating_sub(1), read, frame.len()] {
        let readable = readable.min(frame.len());
        let answer = parse(&Linear { frame, readable });
        if readable >= read {
            assert_eq!(answer, parsed, "{readable} bytes are readable");
        } else {
            assert!(answer == parsed || is_less_of(answer, parsed), "{readable} bytes are readable: {answer:?}");
        }
    }
}

/// Whether `answer` says of the same packet that not all of it could be read. What is wrong with it may be there.
fn is_less_of(answer: Parsed, parsed: Parsed) -> bool {
    match (answer, parsed) {
        (Parsed::Ip(IpPacket { transport: Transport::Unreadable { .. }, .. }), Parsed::Malformed) => true,
        (Parsed::Malformed, _) | (Parsed::Ip(_), Parsed::Control) => true,
        (Parsed::Ip(IpPacket { source, transport }), Parsed::Ip(whole)) => {
            source == whole.source && matches!(transport, Transport::Unreadable { .. } | Transport::Other)
        }
        _ => false,
    }
}

fn addresses_of_the_link_do_not_count(frame: &[u8], parsed: Parsed) {
    let mut other = frame.to_vec();
    other.iter_mut().take(ETHER_TYPE).for_each(|byte| *byte = !*byte);
    assert_eq!(parse(other.as_slice()), parsed);
}

fn what_follows_does_not_count(frame: &[u8], parsed: Parsed) {
    for byte in [0, 0xff] {
        let padded = [frame, &[byte; 60]].concat();
        assert_eq!(parse(padded.as_slice()), parsed);
    }
}

/// Unless it is one too many, or moves a header out of reach.
fn a_tag_does_not_count(frame: &[u8], parsed: Parsed, furthest: usize) {
    let tags = tags(frame);
    for tag in TAGS {
        let [high, low] = tag.to_be_bytes();
        let mut tagged = frame.to_vec();
        tagged.splice(ETHER_TYPE..ETHER_TYPE, [high, low, 0, 100]);
        let answer = parse(tagged.as_slice());
        if tags >= MAX_TAGS {
            assert_eq!(answer, Parsed::Malformed);
        } else if furthest + 4 > MAX_READ_OFFSET {
            assert!(answer == parsed || is_less_of(answer, parsed), "{answer:?}");
        } else {
            assert_eq!(answer, parsed);
        }
    }
}

fn field(frame: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().expect("two bytes")))
}

/// How many tags stand in a row.
fn tags(frame: &[u8]) -> usize {
    (0..).take_while(|index| field(frame, ETHER_TYPE + 4 * index).is_some_and(|tag| TAGS.contains(&tag))).count()
}

/// The ether type behind the tags, and where its header is.
fn network(frame: &[u8]) -> Option<(u16, usize)> {
    let at = ETHER_TYPE + 4 * tags(frame).min(MAX_TAGS);
    Some((field(frame, at)?, at + 2))
}

fn agrees_with_ipv4(frame: &[u8], at: usize, parsed: Parsed) {
    let Parsed::Ip(IpPacket { source, transport }) = parsed else { panic!("{parsed:?} in the ether type of IPv4") };
    let header = &frame[at..];
    assert_eq!(source, Source::V4(AddressV4::new([header[12], header[13], header[14], header[15]])));
    assert_eq!(header[0] >> 4, 4);
    let len = usize::from(header[0] & 0x0f) * 4;
    assert!(len >= 20);
    let payload = &header[len..];
    let is_later = field(header, 6).expect("a header") & 0x1fff != 0;
    match transport {
        Transport::Tcp { destination_port, opens_connection } => {
            assert!(header[9] == 6 && !is_later);
            assert_eq!(field(payload, 2), Some(destination_port));
            assert_eq!(opens_connection, payload[13] & 0x12 == 0x02);
        }
        Transport::Udp { destination_port } => {
            assert!(header[9] == 17 && !is_later);
            assert_eq!(field(payload, 2), Some(destination_port));
        }
        Transport::Unreadable { opens_connection } => {
            assert!(matches!(header[9], 6 | 17) && field(header, 6).expect("a header") != 0);
            assert_eq!(opens_connection, header[9] == 6 && !is_later);
        }
        Transport::Other => assert!(!matches!(header[9], 6 | 17)),
    }
    ends_where_it_says(frame, at + usize::from(field(header, 2).expect("a header")), parsed);
}

fn agrees_with_ipv6(frame: &[u8], at: usize, parsed: Parsed) {
    let header = &frame[at..];
    assert_eq!(header[0] >> 4, 6);
    match parsed {
        Parsed::Ip(IpPacket { source, transport }) => {
            assert_eq!(source, Source::V6(AddressV6::new(header[8..24].try_into().expect("an address"))));
            let is_direct = matches!(header[6], 6 | 17);
            let is_read = matches!(transport, Transport::Tcp { .. } | Transport::Udp { .. });
            assert!(is_read || !is_direct, "{transport:?} without any fragment");
        }
        Parsed::Control | Parsed::NotIp | Parsed::Malformed => assert_eq!(parsed, Parsed::Control),
    }
    ends_where_it_says(frame, at + 40 + usize::from(field(header, 4).expect("a header")), parsed);
}

/// The frame is as long as its IP header says, or longer; and what is longer is no part of the packet.
fn ends_where_it_says(frame: &[u8], end: usize, parsed: Parsed) {
    assert!(end <= frame.len());
    assert_eq!(parse(&frame[..end]), parsed);
    assert_eq!(parse(&frame[..end - 1]), Parsed::Malformed);
}

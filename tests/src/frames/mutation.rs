//! What can be wrong with a frame.

use super::random::Random;
use crate::packet;

/// Values that fields of headers turn on.
const BYTES: [u8; 20] = [0, 1, 4, 5, 6, 8, 14, 17, 20, 43, 44, 50, 51, 58, 59, 60, 0x45, 0x4f, 0x60, 0xff];
const ETHER_TYPES: [u16; 6] =
    [packet::IPV4, packet::IPV6, packet::ARP, packet::VLAN, packet::PROVIDER_VLAN, packet::OLD_VLAN];
const ETHER_TYPE_OFFSET: usize = 12;
const IPV6_LEN: usize = 40;
/// Where the headers are; what comes later is seldom read.
const HEADERS: usize = 128;

/// Changes one thing. The frame may get any length.
pub(super) fn mutate(frame: &mut Vec<u8>, random: &mut Random, others: &[Vec<u8>]) {
    if frame.len() <= ETHER_TYPE_OFFSET + 2 {
        let other = random.below(others.len());
        frame.clone_from(&others[other]);
        return;
    }
    match random.below(11) {
        0 | 1 => {
            let at = place(frame, random);
            frame[at] ^= 1 << random.below(8);
        }
        2 => {
            let at = place(frame, random);
            let any = random.byte();
            frame[at] = if random.one_in(4) { any } else { random.pick(&BYTES) };
        }
        3 => frame.truncate(random.below(frame.len())),
        4 => frame.truncate(frame.len() - random.below(9).min(frame.len())),
        5 => {
            let len = random.below(65);
            let padding = random.many(len);
            frame.extend(padding);
        }
        6 => lie_about_a_length(frame, random),
        7 => {
            let other = &others[random.below(others.len())];
            let (head, tail) = (random.below(frame.len()), random.below(other.len() + 1));
            frame.truncate(head);
            frame.extend(&other[tail..]);
        }
        8 => {
            let [high, low] = random.pick(&ETHER_TYPES).to_be_bytes();
            let tag = [high, low, 0, random.byte()];
            frame.splice(ETHER_TYPE_OFFSET..ETHER_TYPE_OFFSET, tag);
        }
        9 => {
            let (one, other) = (place(frame, random), place(frame, random));
            let region = one.min(other)..one.max(other);
            let copy = if random.one_in(2) { frame[region.clone()].repeat(2) } else { Vec::new() };
            frame.splice(region, copy);
        }
        _ => insert_extension(frame, random),
    }
}

fn place(frame: &[u8], random: &mut Random) -> usize {
    let end = if random.one_in(8) { frame.len() } else { frame.len().min(HEADERS) };
    random.below(end)
}

/// Writes what might be a length, about as large as what is left of the frame, somewhere among the headers.
fn lie_about_a_length(frame: &mut [u8], random: &mut Random) {
    let at = ETHER_TYPE_OFFSET + random.below(frame.len().min(HEADERS) - ETHER_TYPE_OFFSET - 1);
    let left = u16::try_from(frame.len() - at).unwrap_or(u16::MAX);
    let around = left.wrapping_add(8).wrapping_sub(u16::from(random.byte() % 64));
    let any = u16::from_be_bytes(random.bytes());
    let lie = random.pick(&[around, around, left, any, 0, u16::MAX]);
    frame[at..at + 2].copy_from_slice(&lie.to_be_bytes());
}

/// Puts an extension header behind the IPv6 header, and corrects the lengths half of the time.
fn insert_extension(frame: &mut Vec<u8>, random: &mut Random) {
    let is_ipv6 = |at: &usize| frame.get(*at..at + 2) == Some(&packet::IPV6.to_be_bytes());
    let Some(at) = [12, 16, 20].into_iter().find(is_ipv6) else { return };
    let header = at + 2;
    if frame.len() < header + IPV6_LEN {
        return;
    }
    let next = frame[header + 6];
    frame[header + 6] = random.pick(&[packet::HOP_BY_HOP, packet::ROUTING, packet::FRAGMENT, packet::DESTINATION, 51]);
    let stated = random.pick(&[0, 0, 1, 2]);
    let mut extension = vec![0; (usize::from(stated) + 1) * 8];
    extension[..4].copy_from_slice(&[next, stated, 0, random.byte() & 1]);
    if random.one_in(2) {
        let len = u16::from_be_bytes([frame[header + 4], frame[header + 5]]);
        let longer = len.wrapping_add(u16::try_from(extension.len()).expect("a short header"));
        frame[header + 4..header + 6].copy_from_slice(&longer.to_be_bytes());
    }
    frame.splice(header + IPV6_LEN..header + IPV6_LEN, extension);
}

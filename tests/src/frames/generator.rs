//! Frames made of parts that mean something to the parser, then mutated.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr},
};

use super::{corpus::parser_corpus, mutation::mutate, random::Random, scenario::SOURCES};
use crate::{
    fixture::fixtures,
    packet::{self, Packet},
};

/// The kernel runs nothing that is shorter than an Ethernet header.
pub(super) const MIN_LEN: usize = 14;
/// Several buffers.
pub(super) const MAX_LEN: usize = 9000;

/// What frames are mutated from, beside those that are made anew: the frames of the fixtures, and the corpus.
pub fn templates() -> Vec<Vec<u8>> {
    let of_fixtures = fixtures().into_iter().map(|fixture| fixture.packet.build());
    let of_corpus = parser_corpus().into_iter().map(|(_, frame)| frame);
    of_fixtures.chain(of_corpus).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The same seed makes the same frames of the same templates.
#[derive(Debug)]
pub struct Generator<'a> {
    random: Random,
    templates: &'a [Vec<u8>],
}

impl<'a> Generator<'a> {
    pub fn new(seed: u64, templates: &'a [Vec<u8>]) -> Self {
        Self { random: Random::new(seed), templates }
    }

    pub fn frame(&mut self) -> Vec<u8> {
        let random = &mut self.random;
        let mut frame =
            if random.one_in(3) { self.templates[random.below(self.templates.len())].clone() } else { built(random) };
        for _ in 0..random.below(4) {
            mutate(&mut frame, random, self.templates);
        }
        frame.truncate(MAX_LEN);
        if frame.len() < MIN_LEN {
            frame.resize(MIN_LEN, 0);
        }
        frame
    }
}

fn built(random: &mut Random) -> Vec<u8> {
    let source = source(random);
    let port = random.pick(&[80, 443, 443, 22, 53]);
    let mut packet = match random.below(8) {
        0 | 1 => {
            let any = random.byte();
            let flags = random.pick(&[packet::SYN, packet::ACK, packet::SYN | packet::ACK, 0, any]);
            Packet::tcp(&source, port, flags)
        }
        2 | 3 => Packet::udp(&source, port),
        4 => {
            let len = if random.one_in(64) { random.below(8800) } else { random.below(600) };
            Packet::udp_of_len(&source, port, len)
        }
        5 => {
            let kind = 125 + random.byte() % 32;
            let hop_limit = random.pick(&[255, 255, 64, 1]);
            Packet::icmpv6(&source, kind, hop_limit)
        }
        6 => {
            let protocol = random.byte();
            let len = random.below(64);
            let payload = random.many(len);
            Packet::ip(&source, protocol, &payload)
        }
        _ => {
            let protocol = random.pick(&[packet::TCP, packet::UDP, packet::ICMPV6, packet::NO_NEXT_HEADER, 4, 41, 50]);
            let len = random.below(24);
            let payload = random.many(len);
            Packet::ip(&source, protocol, &payload)
        }
    };
    if random.one_in(32) {
        let len = random.below(64);
        let payload = random.many(len);
        let ether_type = random.pick(&[packet::ARP, packet::IPV4, packet::IPV6, packet::VLAN, 0x88cc, 46]);
        packet = Packet::raw(ether_type, &payload);
    }
    for _ in 0..random.pick(&[0, 0, 0, 0, 1, 1, 2, 3]) {
        packet = packet.tag(random.pick(&[packet::VLAN, packet::PROVIDER_VLAN, packet::OLD_VLAN]));
    }
    if random.one_in(4) {
        packet = packet.options(random.below(11));
    }
    if random.one_in(3) {
        for _ in 0..random.pick(&[1, 1, 2, 3, 7, 8, 9, 10]) {
            packet = extended(packet, random);
        }
    }
    if random.one_in(4) {
        let offset = random.pick(&[0, 0, 1, 185, 0x1fff]);
        packet = packet.fragment(offset, random.one_in(2));
    }
    if random.one_in(16) {
        packet = packet.header_words(random.byte() & 0x0f);
    }
    if random.one_in(16) {
        let any = u16::from_be_bytes(random.bytes());
        packet = packet.stated_len(random.pick(&[0, 7, 8, 19, 20, 24, 28, 40, 1500, any]));
    }
    if random.one_in(32) {
        packet = packet.version(random.byte() & 0x0f);
    }
    packet.build()
}

/// An extension header of IPv6, whose length is right most of the time.
fn extended(packet: Packet, random: &mut Random) -> Packet {
    const KINDS: [u8; 10] = [
        packet::HOP_BY_HOP,
        packet::ROUTING,
        packet::FRAGMENT,
        packet::AUTHENTICATION,
        packet::DESTINATION,
        // Mobility, host identity, shim6; ESP and "no next header" end a chain.
        135,
        139,
        140,
        50,
        packet::NO_NEXT_HEADER,
    ];
    let any = random.byte();
    let kind = random.pick(&KINDS);
    let stated = random.pick(&[0, 0, 0, 1, 2, 7, 8, any]);
    let len = match kind {
        packet::FRAGMENT => 8,
        packet::AUTHENTICATION => (usize::from(stated) + 2) * 4,
        _ => (usize::from(stated) + 1) * 8,
    };
    let mut body = vec![0; len - 1];
    body[0] = stated;
    if kind == packet::FRAGMENT {
        body[1..3].copy_from_slice(&random.pick(&[0u16, 1, 8, 9, 0xfff8]).to_be_bytes());
    }
    if random.one_in(16) {
        body.truncate(random.below(body.len()) + 1);
    }
    packet.extension(kind, &body)
}

fn source(random: &mut Random) -> String {
    if random.one_in(16) {
        return Ipv4Addr::from(random.bytes::<4>()).to_string();
    }
    if random.one_in(16) {
        return Ipv6Addr::from(random.bytes::<16>()).to_string();
    }
    random.pick(SOURCES).to_owned()
}

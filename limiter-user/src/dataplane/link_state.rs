//! What an interface is and which XDP program it runs, asked of the kernel by rtnetlink: `/sys` may be of another network
//! namespace.

use std::{fmt, io};

use nix::net::if_::if_nametoindex;

use super::AttachedMode;
use crate::netlink::{Attributes, LINK_INFO_LEN, Netlink, attribute, u16_at, u32_at, u64_at};

const IFLA_XDP: u16 = 43;
const IFLA_XDP_ATTACHED: u16 = 2;
const IFLA_XDP_PROG_ID: u16 = 4;
const IFLA_XDP_DRV_PROG_ID: u16 = 5;
const IFLA_XDP_SKB_PROG_ID: u16 = 6;
const XDP_ATTACHED_DRV: u8 = 1;
const XDP_ATTACHED_SKB: u8 = 2;

/// Frames up to this long are in one buffer of a page, whatever the driver keeps beside them.
pub(crate) const ONE_BUFFER_MTU: u32 = 3400;

/// What the driver can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct XdpFeatures {
    pub(crate) native: bool,
    /// Takes programs for frames of several buffers.
    pub(crate) frags: bool,
}

/// `None` when the kernel does not tell (before 6.3).
pub(crate) fn xdp_features(netlink: &Netlink, index: u32) -> io::Result<Option<XdpFeatures>> {
    const DEV_GET: u8 = 1;
    const IFINDEX: u16 = 1;
    const FEATURES: u16 = 3;
    const BASIC: u64 = 1;
    const RX_SG: u64 = 1 << 5;
    let question = Attributes::default().with(IFINDEX, &index.to_ne_bytes());
    let reply = netlink.ask_family(netlink.family("netdev")?, DEV_GET, &question)?;
    let bits = attribute(&reply, FEATURES).and_then(|bits| u64_at(bits, 0));
    Ok(bits.map(|bits| XdpFeatures { native: bits & BASIC != 0, frags: bits & RX_SG != 0 }))
}

/// Of what the kernel says of an interface.
pub(crate) fn mtu_of(reply: &[u8]) -> Option<u32> {
    const MTU: u16 = 4;
    attribute(reply.get(LINK_INFO_LEN..)?, MTU).and_then(|mtu| u32_at(mtu, 0))
}

/// Whether the driver says that it takes the program. A kernel that does not tell says no.
pub(super) fn takes_native(interface: &str) -> bool {
    let look = || -> io::Result<bool> {
        let index = if_nametoindex(interface)?;
        let is_short = mtu_of(&Netlink::link(index)?).is_some_and(|mtu| mtu <= ONE_BUFFER_MTU);
        let features = xdp_features(&Netlink::generic()?, index)?;
        Ok(features.is_some_and(|features| features.native && (features.frags || is_short)))
    };
    look().unwrap_or(false)
}

/// The program that an interface runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Running {
    pub(super) program_id: u32,
    /// `None` when the device itself runs it.
    pub(super) mode: Option<AttachedMode>,
}

/// What frames of an interface begin with: a number of `<linux/if_arp.h>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkType(u16);

impl LinkType {
    const ETHERNET: u16 = 1;
    const LOOPBACK: u16 = 772;
    /// Those that gateways have.
    const NAMES: &[(u16, &str)] = &[
        (512, "ppp"),
        (768, "ipip"),
        (769, "ip6tnl"),
        (776, "sit"),
        (778, "gre"),
        (823, "ip6gre"),
        (65534, "no header, as of tun and WireGuard"),
    ];

    /// Of what the kernel says of an interface.
    pub(crate) fn of(reply: &[u8]) -> io::Result<Self> {
        u16_at(reply, 2).map(Self).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Loopback has them too.
    pub(crate) const fn has_ethernet_headers(self) -> bool {
        matches!(self.0, Self::ETHERNET | Self::LOOPBACK)
    }
}

impl fmt::Display for LinkType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMES.iter().find(|(number, _)| *number == self.0) {
            Some((number, name)) => write!(f, "{number}: {name}"),
            None => write!(f, "{}", self.0),
        }
    }
}

pub(super) fn link_type(interface: &str) -> io::Result<LinkType> {
    LinkType::of(&Netlink::link(if_nametoindex(interface)?)?)
}

/// The id of the program that is attached to `interface`, if any is.
pub(super) fn program_id(interface: &str) -> io::Result<Option<u32>> {
    Ok(running(interface)?.map(|running| running.program_id))
}

/// The program that is attached to `interface`, if any is.
pub(super) fn running(interface: &str) -> io::Result<Option<Running>> {
    read_running(&Netlink::link(if_nametoindex(interface)?)?)
}

fn read_running(reply: &[u8]) -> io::Result<Option<Running>> {
    let attributes = reply.get(LINK_INFO_LEN..).ok_or(io::ErrorKind::UnexpectedEof)?;
    let Some(xdp) = attribute(attributes, IFLA_XDP) else { return Ok(None) };
    let id = |kind| attribute(xdp, kind).and_then(|id| u32_at(id, 0)).filter(|id| *id != 0);
    // With one in the device and another before it, none is "the" program.
    let program_id = [IFLA_XDP_PROG_ID, IFLA_XDP_DRV_PROG_ID, IFLA_XDP_SKB_PROG_ID].into_iter().find_map(id);
    let mode = match attribute(xdp, IFLA_XDP_ATTACHED).and_then(|attached| attached.first()) {
        Some(&XDP_ATTACHED_DRV) => Some(AttachedMode::Native),
        Some(&XDP_ATTACHED_SKB) => Some(AttachedMode::Generic),
        Some(_) | None => None,
    };
    Ok(program_id.map(|program_id| Running { program_id, mode }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::link_info;

    #[test]
    fn loopback_answers_and_runs_nothing() {
        assert_eq!(program_id("lo").unwrap(), None);
        assert!(program_id("nope0").is_err());
        assert!(link_type("lo").unwrap().has_ethernet_headers() && link_type("nope0").is_err());
    }

    #[test]
    fn interfaces_without_ethernet_headers_are_told_by_their_type() {
        for (number, fits) in [(1u16, true), (772, true), (512, false), (768, false), (778, false), (65534, false)] {
            let mut reply = link_info(1);
            reply[2..4].copy_from_slice(&number.to_ne_bytes());
            assert_eq!(LinkType::of(&reply).unwrap().has_ethernet_headers(), fits, "{number}");
        }
        assert!(LinkType::of(&[0; 3]).is_err());
    }

    #[test]
    fn finds_the_program_among_attributes_and_survives_any_cut() {
        let attribute = |kind: u16, payload: &[u8]| {
            let mut bytes = u16::try_from(payload.len() + 4).unwrap().to_ne_bytes().to_vec();
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(payload);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let xdp =
            [attribute(IFLA_XDP_ATTACHED, &[XDP_ATTACHED_SKB]), attribute(IFLA_XDP_PROG_ID, &77u32.to_ne_bytes())]
                .concat();
        let mut reply = link_info(1).to_vec();
        reply.extend(attribute(3, b"eth0\0"));
        reply.extend(attribute(IFLA_XDP | 0x8000, &xdp));
        let running = Running { program_id: 77, mode: Some(AttachedMode::Generic) };
        assert_eq!(read_running(&reply).unwrap(), Some(running));
        for len in 0..reply.len() {
            assert!(!matches!(read_running(&reply[..len]), Ok(Some(_))), "{len}");
        }
    }
}

//! Which XDP program an interface runs, asked of the kernel by rtnetlink.

use std::io;

use nix::net::if_::if_nametoindex;

use super::AttachedMode;
use crate::netlink::{LINK_INFO_LEN, Netlink, attribute, u32_at};

const IFLA_XDP: u16 = 43;
const IFLA_XDP_ATTACHED: u16 = 2;
const IFLA_XDP_PROG_ID: u16 = 4;
const IFLA_XDP_DRV_PROG_ID: u16 = 5;
const IFLA_XDP_SKB_PROG_ID: u16 = 6;
const XDP_ATTACHED_DRV: u8 = 1;
const XDP_ATTACHED_SKB: u8 = 2;

/// The program that an interface runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Running {
    pub(super) program_id: u32,
    /// `None` when the device itself runs it.
    pub(super) mode: Option<AttachedMode>,
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

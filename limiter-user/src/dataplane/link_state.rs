//! Which XDP program an interface runs, asked of the kernel by rtnetlink.

use std::{io, os::fd::AsRawFd as _};

use nix::{
    net::if_::if_nametoindex,
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket},
};

use super::AttachedMode;

const RTM_GETLINK: u16 = 18;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_ATTACHED: u16 = 2;
const IFLA_XDP_PROG_ID: u16 = 4;
const IFLA_XDP_DRV_PROG_ID: u16 = 5;
const IFLA_XDP_SKB_PROG_ID: u16 = 6;
const XDP_ATTACHED_DRV: u8 = 1;
const XDP_ATTACHED_SKB: u8 = 2;
/// Flags in the type of an attribute.
const NLA_TYPE_MASK: u16 = 0x3fff;
/// Of `struct nlmsghdr`, and of `struct ifinfomsg`.
const HEADER_LEN: usize = 16;
const REQUEST_LEN: u32 = 32;

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
    let index = if_nametoindex(interface)?;
    let netlink = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
    send(netlink.as_raw_fd(), &request(index), MsgFlags::empty())?;
    // Information on one interface fits, with its statistics and all its names.
    let mut reply = vec![0; 32 * 1024];
    let len = recv(netlink.as_raw_fd(), &mut reply, MsgFlags::empty())?;
    reply.truncate(len);
    read_running(&reply)
}

fn request(index: u32) -> Vec<u8> {
    let mut message = REQUEST_LEN.to_ne_bytes().to_vec();
    message.extend(RTM_GETLINK.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    // Sequence number and port.
    message.extend([0; 8]);
    // Family, padding and device type.
    message.extend([0; 4]);
    message.extend(index.to_ne_bytes());
    // Flags and their mask.
    message.extend([0; 8]);
    debug_assert_eq!(message.len(), 2 * HEADER_LEN);
    message
}

fn read_running(reply: &[u8]) -> io::Result<Option<Running>> {
    let cut_short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let kind = u16_at(reply, 4).ok_or_else(cut_short)?;
    if kind == NLMSG_ERROR {
        let code = u32_at(reply, HEADER_LEN).ok_or_else(cut_short)?;
        return Err(io::Error::from_raw_os_error(code.cast_signed().wrapping_neg()));
    }
    let attributes = reply.get(2 * HEADER_LEN..).ok_or_else(cut_short)?;
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

/// The payload of the first attribute of a kind.
fn attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    const ATTRIBUTE_HEADER_LEN: usize = 4;
    loop {
        let len = usize::from(u16_at(attributes, 0)?);
        let kind = u16_at(attributes, 2)? & NLA_TYPE_MASK;
        let payload = attributes.get(ATTRIBUTE_HEADER_LEN..len)?;
        if kind == wanted {
            return Some(payload);
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(offset..offset + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut reply = request(1);
        reply.extend(attribute(3, b"eth0\0"));
        reply.extend(attribute(IFLA_XDP | 0x8000, &xdp));
        let running = Running { program_id: 77, mode: Some(AttachedMode::Generic) };
        assert_eq!(read_running(&reply).unwrap(), Some(running));
        for len in 0..reply.len() {
            assert!(!matches!(read_running(&reply[..len]), Ok(Some(_))), "{len}");
        }
    }
}

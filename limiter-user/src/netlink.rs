//! Questions to the kernel by netlink: one message there, one back.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
/// Of `struct nlmsghdr`.
const HEADER_LEN: usize = 16;
/// Of `struct genlmsghdr`.
const GENERIC_HEADER_LEN: usize = 4;
/// Flags in the type of an attribute.
const NLA_TYPE_MASK: u16 = 0x3fff;
const NLA_F_NESTED: u16 = 0x8000;

/// Of `struct ifinfomsg`.
pub(crate) const LINK_INFO_LEN: usize = 16;

#[derive(Debug)]
pub(crate) struct Netlink(OwnedFd);

/// A family of generic netlink: its number, which differs from boot to boot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Family(u16);

impl Netlink {
    pub(crate) fn generic() -> io::Result<Self> {
        Self::open(SockProtocol::NetlinkGeneric)
    }

    fn open(protocol: SockProtocol) -> io::Result<Self> {
        Ok(Self(socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?))
    }

    /// What follows the header of the reply.
    fn ask(&self, kind: u16, body: &[u8]) -> io::Result<Vec<u8>> {
        send(self.0.as_raw_fd(), &request(kind, body), MsgFlags::empty())?;
        // The longest reply is about one interface, with its statistics and all its names.
        let mut reply = vec![0; 64 * 1024];
        let len = recv(self.0.as_raw_fd(), &mut reply, MsgFlags::empty())?;
        reply.truncate(len);
        body_of(reply)
    }

    /// What the kernel says of an interface: a `struct ifinfomsg` of [`LINK_INFO_LEN`] bytes, then attributes.
    pub(crate) fn link(index: u32) -> io::Result<Vec<u8>> {
        const RTM_GETLINK: u16 = 18;
        Self::open(SockProtocol::NetlinkRoute)?.ask(RTM_GETLINK, &link_info(index))
    }

    /// A family that the kernel does not have is an error of kind `NotFound`.
    pub(crate) fn family(&self, name: &str) -> io::Result<Family> {
        const CONTROL: Family = Family(16);
        const GET_FAMILY: u8 = 3;
        const FAMILY_ID: u16 = 1;
        const FAMILY_NAME: u16 = 2;
        let question = Attributes::default().with(FAMILY_NAME, format!("{name}\0").as_bytes());
        let reply = self.ask_family(CONTROL, GET_FAMILY, &question)?;
        let id = attribute(&reply, FAMILY_ID).and_then(|id| u16_at(id, 0));
        id.map(Family).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The attributes of the reply to a command of a family.
    pub(crate) fn ask_family(&self, family: Family, command: u8, question: &Attributes) -> io::Result<Vec<u8>> {
        let mut body = vec![command, 1, 0, 0];
        body.extend(&question.0);
        let mut reply = self.ask(family.0, &body)?;
        if reply.len() < GENERIC_HEADER_LEN {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(reply.split_off(GENERIC_HEADER_LEN))
    }
}

/// One that names the interface alone.
pub(crate) fn link_info(index: u32) -> [u8; LINK_INFO_LEN] {
    let mut info = [0; LINK_INFO_LEN];
    info[4..8].copy_from_slice(&index.to_ne_bytes());
    info
}

fn request(kind: u16, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(HEADER_LEN + body.len()).unwrap_or(u32::MAX);
    let mut message = len.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    // Sequence number and port.
    message.extend([0; 8]);
    message.extend(body);
    message
}

fn body_of(mut reply: Vec<u8>) -> io::Result<Vec<u8>> {
    let cut_short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let kind = u16_at(&reply, 4).ok_or_else(cut_short)?;
    if kind == NLMSG_ERROR {
        let code = u32_at(&reply, HEADER_LEN).ok_or_else(cut_short)?;
        return Err(io::Error::from_raw_os_error(code.cast_signed().wrapping_neg()));
    }
    if reply.len() < HEADER_LEN {
        return Err(cut_short());
    }
    Ok(reply.split_off(HEADER_LEN))
}

/// Attributes of a question.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attributes(Vec<u8>);

impl Attributes {
    pub(crate) fn with(mut self, kind: u16, payload: &[u8]) -> Self {
        self.push(kind, payload);
        self
    }

    pub(crate) fn with_nested(mut self, kind: u16, inner: &Self) -> Self {
        self.push(kind | NLA_F_NESTED, &inner.0);
        self
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn push(&mut self, kind: u16, payload: &[u8]) {
        let len = u16::try_from(4 + payload.len()).unwrap_or(u16::MAX);
        self.0.extend(len.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(payload);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

/// Attributes of a reply, or of one in it: their kinds and payloads. Ends where one is cut short.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const ATTRIBUTE_HEADER_LEN: usize = 4;
    std::iter::from_fn(move || {
        let len = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, 2)? & NLA_TYPE_MASK;
        let payload = bytes.get(ATTRIBUTE_HEADER_LEN..len)?;
        // The padding after the last one may be missing.
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, payload))
    })
}

/// The payload of the first attribute of a kind.
pub(crate) fn attribute(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find_map(|(kind, payload)| (kind == wanted).then_some(payload))
}

/// Text of an attribute, which ends with a zero.
pub(crate) fn text(payload: &[u8]) -> Option<&str> {
    std::str::from_utf8(payload).ok().map(|text| text.trim_end_matches('\0'))
}

pub(crate) fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(offset..offset + 2)?.try_into().ok()?))
}

pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?))
}

pub(crate) fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(offset..offset + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_come_back_and_survive_any_cut() {
        let inner = Attributes::default().with(2, &[1]).with(4, &77u32.to_ne_bytes());
        let bytes = Attributes::default().with(3, b"eth0\0").with_nested(43, &inner).0;
        let number = |bytes: &[u8]| u32_at(attribute(attribute(bytes, 43)?, 4)?, 0);
        assert_eq!(attribute(&bytes, 3).and_then(text), Some("eth0"));
        assert_eq!(number(&bytes), Some(77));
        for len in 0..bytes.len() {
            assert_eq!(number(&bytes[..len]), None, "{len}");
        }
    }

    #[test]
    fn an_error_of_the_kernel_is_one() {
        let mut reply = request(NLMSG_ERROR, &(-19i32).to_ne_bytes());
        assert_eq!(body_of(reply.clone()).unwrap_err().raw_os_error(), Some(19));
        for len in 0..reply.len() {
            reply.truncate(reply.len() - 1);
            assert_eq!(body_of(reply.clone()).unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{len} cut off");
        }
    }

    #[test]
    fn families_are_found_by_name() {
        let netlink = Netlink::generic().unwrap();
        assert!(netlink.family("nlctrl").is_ok());
        assert_eq!(netlink.family("no such").unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

//! What the kernel says of an interface: by netlink where it can, since `/sys` may be of another network namespace.

use std::{fs, io, path::PathBuf};

use nix::{errno::Errno, net::if_::if_nametoindex};

use crate::dataplane::{LinkType, XdpFeatures, mtu_of, xdp_features};
use crate::netlink::{Attributes, LINK_INFO_LEN, Netlink, attribute, attributes, text, u32_at};

/// An interface as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) is_up: bool,
    /// `None` when the kernel does not tell.
    pub(super) link_type: Option<LinkType>,
    pub(super) mtu: u32,
    /// Of hardware its driver, of a virtual interface its kind.
    pub(super) driver: Option<String>,
    pub(super) is_virtual: bool,
    /// `None` when the kernel does not tell (before 6.3).
    pub(super) xdp: Option<XdpFeatures>,
    pub(super) offloads: Option<Offloads>,
    pub(super) channels: Option<Channels>,
}

/// What is switched on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Offloads {
    pub(super) lro: bool,
    pub(super) gro_hw: bool,
    pub(super) vlan: bool,
}

/// Receive queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Channels {
    pub(super) now: u32,
    pub(super) most: u32,
}

impl Device {
    /// An interface that does not exist is an error of kind `NotFound`.
    pub(super) fn read(name: &str) -> io::Result<Self> {
        let index = if_nametoindex(name).map_err(|error| {
            let is_absent = error == Errno::ENODEV;
            if is_absent { io::ErrorKind::NotFound.into() } else { io::Error::from(error) }
        })?;
        let mut device = link(index)?;
        if let Ok(netlink) = Netlink::generic() {
            device.xdp = xdp_features(&netlink, index).ok().flatten();
            device.offloads = offloads(&netlink, index).ok();
            device.channels = channels(&netlink, index).ok().flatten();
        }
        Ok(device)
    }
}

fn link(index: u32) -> io::Result<Device> {
    const IFF_UP: u32 = 1;
    const LINKINFO: u16 = 18;
    const LINKINFO_KIND: u16 = 1;
    const PARENT_NAME: u16 = 56;
    const PARENT_BUS: u16 = 57;
    let reply = Netlink::link(index)?;
    let flags = u32_at(&reply, 8).unwrap_or_default();
    let found = reply.get(LINK_INFO_LEN..).unwrap_or_default();
    let word = |kind| attribute(found, kind).and_then(text);
    let kind = attribute(found, LINKINFO).and_then(|info| attribute(info, LINKINFO_KIND)).and_then(text);
    let parent = word(PARENT_BUS).zip(word(PARENT_NAME));
    Ok(Device {
        is_up: flags & IFF_UP != 0,
        link_type: LinkType::of(&reply).ok(),
        mtu: mtu_of(&reply).unwrap_or_default(),
        driver: kind.map(str::to_owned).or_else(|| driver(parent?)),
        is_virtual: parent.is_none(),
        ..Device::default()
    })
}

/// The driver of the hardware behind an interface; the folder of a bus is the same in every network namespace.
fn driver((bus, device): (&str, &str)) -> Option<String> {
    let link: PathBuf = ["/sys/bus", bus, "devices", device, "driver"].iter().collect();
    let driver = fs::read_link(link).ok()?;
    Some(driver.file_name()?.to_str()?.to_owned())
}

fn ethtool(netlink: &Netlink, command: u8, index: u32) -> io::Result<Vec<u8>> {
    const HEADER: u16 = 1;
    const DEV_INDEX: u16 = 1;
    let header = Attributes::default().with(DEV_INDEX, &index.to_ne_bytes());
    netlink.ask_family(netlink.family("ethtool")?, command, &Attributes::default().with_nested(HEADER, &header))
}

fn offloads(netlink: &Netlink, index: u32) -> io::Result<Offloads> {
    const FEATURES_GET: u8 = 11;
    const ACTIVE: u16 = 4;
    let reply = ethtool(netlink, FEATURES_GET, index)?;
    let active = attribute(&reply, ACTIVE).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(read_offloads(active))
}

/// Reads a list of the bits that are set, by name.
fn read_offloads(active: &[u8]) -> Offloads {
    const BITS: u16 = 3;
    const BIT_NAME: u16 = 2;
    let bits = attribute(active, BITS).unwrap_or_default();
    let mut offloads = Offloads::default();
    for (_, bit) in attributes(bits) {
        match attribute(bit, BIT_NAME).and_then(text) {
            Some("rx-lro") => offloads.lro = true,
            Some("rx-gro-hw") => offloads.gro_hw = true,
            Some("rx-vlan-hw-parse") => offloads.vlan = true,
            Some(_) | None => {}
        }
    }
    offloads
}

/// `None` when the driver does not tell.
fn channels(netlink: &Netlink, index: u32) -> io::Result<Option<Channels>> {
    const CHANNELS_GET: u8 = 17;
    let reply = ethtool(netlink, CHANNELS_GET, index)?;
    let number = |kind| attribute(&reply, kind).and_then(|number| u32_at(number, 0)).unwrap_or_default();
    // Queues for receiving alone, and queues for both ways.
    let (most, now) = (number(2) + number(5), number(6) + number(9));
    Ok((now > 0).then_some(Channels { now, most }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_read() {
        let device = Device::read("lo").unwrap();
        assert!(device.mtu >= 1500 && device.is_virtual, "{device:?}");
        assert_eq!(device.xdp.map(|xdp| xdp.native), Some(false), "{device:?}");
        assert_eq!(Device::read("nope0").unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn offloads_are_found_by_name() {
        let bit = |name: &str| Attributes::default().with(1, &[0; 4]).with(2, format!("{name}\0").as_bytes());
        let names = ["tx-checksum-ipv4", "rx-lro", "rx-vlan-hw-parse"];
        let bits = names.iter().fold(Attributes::default(), |bits, name| bits.with_nested(1, &bit(name)));
        let active = Attributes::default().with(1, &[]).with_nested(3, &bits);
        let read = read_offloads(active.bytes());
        assert_eq!(read, Offloads { lro: true, gro_hw: false, vlan: true });
        assert_eq!(read_offloads(&[]), Offloads::default());
    }
}

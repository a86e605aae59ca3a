//! Which interface each pinned link is on. A pin has the name that its interface had; the link stays with the interface
//! itself, whatever that is called later.

use std::{fs, path::Path};

use aya::programs::links::{FdLink, PinnedLink};
use nix::net::if_::if_nametoindex;

use super::{
    DataplaneError,
    error::{Source, is_permission},
    link_state,
    pins::{LinkPin, PinDir},
};

/// Pinned links, with what the kernel tells of each.
#[derive(Debug)]
pub(super) struct OwnLinks(Vec<OwnLink>);

#[derive(Debug)]
pub(super) struct OwnLink {
    pub(super) pin: LinkPin,
    /// `None` when the pin cannot be opened as a link.
    seen: Option<Seen>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    program_id: u32,
    /// Zero when the interface is gone; `None` when the kernel does not tell.
    index: Option<u32>,
}

impl OwnLinks {
    pub(super) fn read(pins: &PinDir) -> Result<Self, DataplaneError> {
        Ok(Self::of(pins.links()?))
    }

    pub(super) fn of(pins: Vec<LinkPin>) -> Self {
        Self(pins.into_iter().map(OwnLink::look).collect())
    }

    /// The link that is on the interface of this name, whatever the pin is called.
    pub(super) fn on(&self, interface: &str) -> Option<&OwnLink> {
        let named = self.0.iter().filter(|link| link.pin.interface == interface);
        let others = self.0.iter().filter(|link| link.pin.interface != interface);
        named.chain(others).find(|link| link.is_on(interface))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &OwnLink> {
        self.0.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut OwnLink> {
        self.0.iter_mut()
    }
}

impl OwnLink {
    pub(super) fn look(pin: LinkPin) -> Self {
        let seen = look(&pin.path).ok();
        Self { pin, seen }
    }

    pub(super) fn is_readable(&self) -> bool {
        self.seen.is_some()
    }

    /// Whether its interface is gone, as far as the kernel tells.
    pub(super) fn is_dead(&self) -> bool {
        self.seen.is_some_and(|seen| seen.index == Some(0))
    }

    /// Whether the interface of this name runs the program of this link, and by it. An interface of another network
    /// namespace may have the same index, and all interfaces of an agent run the same program: both have to fit.
    pub(super) fn is_on(&self, interface: &str) -> bool {
        let (Some(seen), Ok(index)) = (self.seen, if_nametoindex(interface)) else { return false };
        match link_state::program_id(interface) {
            Ok(running) => running == Some(seen.program_id) && seen.index.is_none_or(|own| own == index),
            // Rather kept than detached for want of an answer.
            Err(_) => seen.index.is_none_or(|own| own == index),
        }
    }
}

fn look(path: &Path) -> Result<Seen, Source> {
    let link = FdLink::from(PinnedLink::from_pin(path)?);
    let info = link.info()?;
    Ok(Seen { program_id: info.program_id(), index: index_of(info.id()) })
}

/// The index of the interface of a link that this process has open. Only `/proc` tells it without a system call of its
/// own, and there only by the number of the open file.
fn index_of(link_id: u32) -> Option<u32> {
    let files = fs::read_dir("/proc/self/fd").ok()?.flatten();
    let links = files.filter(|file| {
        fs::read_link(file.path()).is_ok_and(|target| target.to_str().is_some_and(|name| name.contains("bpf")))
    });
    links.into_iter().find_map(|file| {
        let about = fs::read_to_string(Path::new("/proc/self/fdinfo").join(file.file_name())).ok()?;
        (field(&about, "link_id") == Some(link_id)).then(|| field(&about, "ifindex")).flatten()
    })
}

fn field(about: &str, name: &str) -> Option<u32> {
    let rest = |line: &str| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok();
    about.lines().find_map(rest)
}

/// The id of the program behind a pinned link.
pub(super) fn program_behind(link: &LinkPin) -> Result<u32, DataplaneError> {
    let read = || -> Result<u32, Source> { Ok(FdLink::from(PinnedLink::from_pin(&link.path)?).info()?.program_id()) };
    read().map_err(|source| link_source("read", &link.interface, source))
}

pub(super) fn link_source(operation: &'static str, interface: &str, source: Source) -> DataplaneError {
    let interface = interface.to_owned();
    if is_permission(source.as_ref()) {
        return DataplaneError::Permission { operation, object: format!("the link of {interface}"), source };
    }
    DataplaneError::Link { operation, interface, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_account_of_a_link_is_read() {
        let about = "pos:\t0\nflags:\t02\nlink_type:\txdp\nlink_id:\t17\nprog_tag:\tabc\nprog_id:\t23\nifindex:\t5\n";
        assert_eq!((field(about, "link_id"), field(about, "ifindex")), (Some(17), Some(5)));
        assert_eq!((field(about, "link"), field(about, "prog_tag"), field("", "ifindex")), (None, None, None));
    }
}

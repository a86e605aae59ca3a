//! Putting a program in force on interfaces: new links for new interfaces, an exchange in one step behind the links
//! that are pinned.

use std::process::Command;

use aya::programs::{
    ProgramError, Xdp, XdpMode as KernelMode,
    links::{FdLink, PinnedLink},
    xdp::XdpLink,
};
use nix::{errno::Errno, net::if_::if_nametoindex};

use super::{
    AttachedInterface, AttachedMode, DataplaneError, XdpMode,
    error::{Source, chain, errno, is_permission},
    pins::{self, LinkPin, PinDir, pin_error},
};

/// Attaches, or exchanges the program, on `wanted`, and detaches from every other interface that is pinned here. An
/// error leaves everything as it was.
pub(super) fn attach(
    program: &mut Xdp,
    mut previous: Option<&mut Xdp>,
    wanted: &[String],
    mode: XdpMode,
    pins: &PinDir,
) -> Result<Vec<AttachedInterface>, DataplaneError> {
    let pinned = pins.links()?;
    for interface in wanted {
        require_interface(interface)?;
    }
    let fits = |link: &&LinkPin| match mode {
        XdpMode::Auto => true,
        XdpMode::Native => link.mode == AttachedMode::Native,
        XdpMode::Generic => link.mode == AttachedMode::Generic,
    };
    let mut undo = Undo::default();
    let mut modes = Vec::new();
    for interface in wanted {
        let existing = pinned.iter().find(|link| link.interface == *interface);
        let attached = match existing.filter(fits) {
            Some(link) if exchange(program, link)? => {
                undo.exchanged.push(link.clone());
                link.mode
            }
            // The pin is of an interface that is gone; its name is another one's now.
            Some(link) => {
                pins::detach(link)?;
                undo.attach(program, interface, mode, pins, previous.as_deref_mut())?
            }
            None => {
                if let Some(link) = existing {
                    tracing::warn!(
                        target: "limiter::dataplane",
                        "{interface} changes from {} mode: nothing is limited there for a moment",
                        link.mode.as_str(),
                    );
                    pins::detach(link)?;
                }
                undo.attach(program, interface, mode, pins, previous.as_deref_mut())?
            }
        };
        modes.push(attached);
    }
    for link in pinned.iter().filter(|link| !wanted.contains(&link.interface)) {
        pins::detach(link)?;
    }
    let program_id = program.info().map_err(|error| link_error("look at", "the program", error))?.id();
    let named = wanted.iter().zip(modes);
    Ok(named.map(|(name, mode)| AttachedInterface { name: name.as_str().into(), mode, program_id }).collect())
}

fn require_interface(interface: &str) -> Result<(), DataplaneError> {
    match if_nametoindex(interface) {
        Ok(_) => Ok(()),
        Err(_) => Err(DataplaneError::NoSuchInterface { interface: interface.to_owned() }),
    }
}

/// What has been done so far.
#[derive(Debug, Default)]
struct Undo {
    attached: Vec<LinkPin>,
    exchanged: Vec<LinkPin>,
}

impl Undo {
    fn attach(
        &mut self,
        program: &mut Xdp,
        interface: &str,
        mode: XdpMode,
        pins: &PinDir,
        previous: Option<&mut Xdp>,
    ) -> Result<AttachedMode, DataplaneError> {
        match attach_one(program, interface, mode, pins) {
            Ok(link) => {
                let mode = link.mode;
                self.attached.push(link);
                Ok(mode)
            }
            Err(error) => {
                self.undo(previous);
                Err(error)
            }
        }
    }

    fn undo(&mut self, previous: Option<&mut Xdp>) {
        for link in self.attached.drain(..) {
            if let Err(error) = pins::detach(&link) {
                tracing::error!(target: "limiter::dataplane", %error, "could not detach from {} again", link.interface);
            }
        }
        let Some(previous) = previous else { return };
        for link in self.exchanged.drain(..) {
            match exchange(previous, &link) {
                Ok(true) => {}
                Ok(false) => tracing::error!(target: "limiter::dataplane", "{} is gone", link.interface),
                Err(error) => tracing::error!(
                    target: "limiter::dataplane", %error, "{} keeps the new program", link.interface,
                ),
            }
        }
    }
}

/// Replaces the program behind a pinned link, without a gap. `false` when the link's interface is gone.
fn exchange(program: &mut Xdp, link: &LinkPin) -> Result<bool, DataplaneError> {
    let open = || -> Result<XdpLink, Source> {
        let pinned = PinnedLink::from_pin(&link.path)?;
        Ok(XdpLink::try_from(FdLink::from(pinned))?)
    };
    let fd_link = open().map_err(|source| link_source("open", &link.interface, source))?;
    match program.attach_to_link(fd_link) {
        Ok(id) => {
            // Only the pin holds the link, so that removing it detaches, whoever runs.
            drop(program.take_link(id).map_err(|error| link_error("keep", &link.interface, error))?);
            Ok(true)
        }
        Err(error) if errno(&error) == Some(Errno::ENOLINK) => Ok(false),
        Err(error) => Err(link_error("exchange the program behind", &link.interface, error)),
    }
}

fn attach_one(
    program: &mut Xdp,
    interface: &str,
    mode: XdpMode,
    pins: &PinDir,
) -> Result<LinkPin, DataplaneError> {
    match mode {
        XdpMode::Native => attach_in(program, interface, AttachedMode::Native, pins),
        XdpMode::Generic => attach_in(program, interface, AttachedMode::Generic, pins),
        XdpMode::Auto => match attach_in(program, interface, AttachedMode::Native, pins) {
            Err(DataplaneError::NotSupported { source, .. }) => {
                tracing::warn!(
                    target: "limiter::dataplane",
                    "{interface} has no native XDP ({}); using generic mode, which costs more CPU a packet",
                    chain(source.as_ref()),
                );
                attach_in(program, interface, AttachedMode::Generic, pins)
            }
            result => result,
        },
    }
}

fn attach_in(
    program: &mut Xdp,
    interface: &str,
    mode: AttachedMode,
    pins: &PinDir,
) -> Result<LinkPin, DataplaneError> {
    let flags = match mode {
        AttachedMode::Native => KernelMode::Driver,
        AttachedMode::Generic => KernelMode::Skb,
    };
    let id = program.attach(interface, flags).map_err(|error| attach_error(interface, mode, error))?;
    let link = program.take_link(id).map_err(|error| link_error("keep", interface, error))?;
    // Kernels before 5.9 have no XDP links; dropped here, the program is detached again.
    let link = FdLink::try_from(link).map_err(|error| link_error("pin", interface, error))?;
    let path = pins.link(mode, interface);
    match link.pin(&path) {
        Ok(pinned) => drop(pinned),
        Err(aya::pin::PinError::SyscallError(error)) => return Err(pin_error("pin", path, error.io_error)),
        Err(error) => return Err(link_error("pin", interface, error)),
    }
    Ok(LinkPin { interface: interface.to_owned(), mode, path })
}

fn attach_error(interface: &str, mode: AttachedMode, error: ProgramError) -> DataplaneError {
    let interface = interface.to_owned();
    if is_permission(&error) {
        return DataplaneError::Permission { operation: "attach to", object: interface, source: Box::new(error) };
    }
    match (errno(&error), &error) {
        (_, ProgramError::UnknownInterface { .. }) | (Some(Errno::ENODEV), _) => {
            DataplaneError::NoSuchInterface { interface }
        }
        (Some(Errno::EBUSY | Errno::EEXIST), _) => {
            DataplaneError::Busy { holder: holder(&interface), interface, source: Box::new(error) }
        }
        _ => DataplaneError::NotSupported { interface, mode, source: Box::new(error) },
    }
}

/// Names the XDP program that is attached to an interface, as far as iproute2 can tell.
fn holder(interface: &str) -> String {
    let unknown = || "another XDP program".to_owned();
    let Ok(output) = Command::new("ip").args(["-details", "-json", "link", "show", "dev", interface]).output() else {
        return unknown();
    };
    let id = serde_json::from_slice::<serde_json::Value>(&output.stdout)
        .ok()
        .and_then(|links| links.get(0)?.get("xdp")?.get("prog")?.get("id")?.as_u64());
    let Some(id) = id else { return unknown() };
    let name = aya::programs::loaded_programs()
        .flatten()
        .find(|program| u64::from(program.id()) == id)
        .and_then(|program| program.name_as_str().filter(|name| !name.is_empty()).map(str::to_owned));
    match name {
        Some(name) => format!("another XDP program (\"{name}\", id {id})"),
        None => format!("another XDP program (id {id})"),
    }
}

fn link_error<E: std::error::Error + Send + Sync + 'static>(
    operation: &'static str,
    interface: &str,
    error: E,
) -> DataplaneError {
    link_source(operation, interface, Box::new(error))
}

fn link_source(operation: &'static str, interface: &str, source: Source) -> DataplaneError {
    let interface = interface.to_owned();
    if is_permission(source.as_ref()) {
        return DataplaneError::Permission { operation, object: format!("the link of {interface}"), source };
    }
    DataplaneError::Link { operation, interface, source }
}

/// The program that runs behind each pinned link.
pub(super) fn program_ids(pins: &PinDir) -> Result<Vec<(String, u32)>, DataplaneError> {
    let mut ids = Vec::new();
    for link in pins.links()? {
        let read = || -> Result<u32, Source> {
            let pinned = PinnedLink::from_pin(&link.path)?;
            Ok(FdLink::from(pinned).info()?.program_id())
        };
        ids.push((link.interface.clone(), read().map_err(|source| link_source("read", &link.interface, source))?));
    }
    Ok(ids)
}

/// Detaches from every interface that is pinned here.
pub(super) fn detach_all(pins: &PinDir) -> Result<(), DataplaneError> {
    pins.links()?.iter().try_for_each(pins::detach)
}

//! Putting a program in force on interfaces: new links for new interfaces, an exchange in one step behind the links
//! that are pinned.

use aya::programs::{
    ProgramError, Xdp, XdpMode as KernelMode,
    links::{FdLink, PinnedLink},
    xdp::XdpLink,
};
use nix::{errno::Errno, net::if_::if_nametoindex};

use super::{
    AttachedInterface, AttachedMode, DataplaneError, XdpMode,
    error::{Source, chain, errno, is_permission},
    link_state,
    pins::{self, LinkPin, PinDir, pin_error},
};

/// Attaches, or exchanges the program, on `wanted`. An error leaves everything as it was; what is returned beside the
/// interfaces can do the same later.
///
/// An interface that does not exist is an error at a start; while the agent runs (`previous`) it may come and go.
pub(super) fn attach(
    program: &mut Xdp,
    mut previous: Option<&mut Xdp>,
    wanted: &[String],
    mode: XdpMode,
    pins: &PinDir,
) -> Result<(Vec<AttachedInterface>, Undo), DataplaneError> {
    let pinned = pins.links()?;
    let find = |interface: &str| pinned.iter().find(|link| link.interface == interface);
    let may_be_missing = previous.is_some();
    for interface in wanted.iter().filter(|interface| !may_be_missing && find(interface).is_none()) {
        require_interface(interface)?;
    }
    let program_id = program.info().map_err(|error| link_error("look at", "the program", error))?.id();
    let mut undo = Undo::default();
    let mut attached = Vec::new();
    for interface in wanted {
        match put_in_force(program, interface, find(interface), mode, pins, &mut undo) {
            Ok(mode) => attached.push(AttachedInterface { name: interface.as_str().into(), mode, program_id }),
            Err(DataplaneError::NoSuchInterface { interface }) if may_be_missing => {
                tracing::warn!(target: "limiter::dataplane", "{interface} is gone: nothing is limited there");
            }
            Err(error) => {
                undo.undo(previous.take());
                return Err(error);
            }
        }
    }
    Ok((attached, undo))
}

/// Detaches from every interface that is pinned here and not `wanted`.
pub(super) fn detach_others(wanted: &[String], pins: &PinDir) -> Result<(), DataplaneError> {
    pins.links()?.iter().filter(|link| !wanted.contains(&link.interface)).try_for_each(pins::detach)
}

/// The mode that the interface uses from now on.
fn put_in_force(
    program: &mut Xdp,
    interface: &str,
    existing: Option<&LinkPin>,
    mode: XdpMode,
    pins: &PinDir,
    undo: &mut Undo,
) -> Result<AttachedMode, DataplaneError> {
    if let Some(link) = existing {
        if !mode.allows(link.mode) {
            tracing::warn!(
                target: "limiter::dataplane",
                "{interface} changes from {} mode: nothing is limited there for a moment",
                link.mode.as_str(),
            );
        } else if exchange(program, link)? {
            undo.exchanged.push(link.clone());
            return Ok(link.mode);
        }
        // Either another mode is wanted, or the pin is of an interface that is gone and whose name is another one's.
        pins::detach(link)?;
    }
    let link = attach_one(program, interface, mode, pins)?;
    let mode = link.mode;
    undo.attached.push(link);
    Ok(mode)
}

fn require_interface(interface: &str) -> Result<(), DataplaneError> {
    match if_nametoindex(interface) {
        Ok(_) => Ok(()),
        Err(_) => Err(DataplaneError::NoSuchInterface { interface: interface.to_owned() }),
    }
}

/// What has been done so far.
#[derive(Debug, Default)]
pub(super) struct Undo {
    attached: Vec<LinkPin>,
    exchanged: Vec<LinkPin>,
}

impl Undo {
    pub(super) fn undo(&mut self, previous: Option<&mut Xdp>) {
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

fn attach_one(program: &mut Xdp, interface: &str, mode: XdpMode, pins: &PinDir) -> Result<LinkPin, DataplaneError> {
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

fn attach_in(program: &mut Xdp, interface: &str, mode: AttachedMode, pins: &PinDir) -> Result<LinkPin, DataplaneError> {
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

/// Names the XDP program that is attached to an interface.
fn holder(interface: &str) -> String {
    let Some(id) = link_state::program_id(interface).ok().flatten() else { return "another XDP program".to_owned() };
    let name = aya::programs::loaded_programs()
        .flatten()
        .find(|program| program.id() == id)
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

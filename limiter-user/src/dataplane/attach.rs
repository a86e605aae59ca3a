//! Putting a program in force on interfaces: new links for new interfaces, an exchange in one step behind the links
//! that are pinned. What has been done can be taken back.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use aya::programs::{
    ProgramError, Xdp, XdpMode as KernelMode,
    links::{FdLink, PinnedLink},
    xdp::XdpLink,
};
use aya_obj::programs::XdpAttachType;
use nix::{errno::Errno, net::if_::if_nametoindex};

use super::{
    AttachedMode, DataplaneError, XdpMode,
    error::{Source, chain, errno, is_permission},
    foreign, link_state,
    own_links::{OwnLink, OwnLinks, link_source, program_behind},
    pins::{LinkPin, PinDir, pin_error},
    unpin,
};
use crate::clock::Stopwatch;

/// An interface of the configuration.
#[derive(Clone, Debug)]
pub(super) struct Interface {
    pub(super) name: Arc<str>,
    pub(super) state: InterfaceState,
    retry: Retry,
}

impl Interface {
    fn new(name: &str, state: InterfaceState) -> Self {
        Self { name: name.into(), state, retry: Retry::default() }
    }
}

/// When to try again what was refused: after a second, and then after twice as long each time.
#[derive(Clone, Debug, Default)]
struct Retry(Option<(Stopwatch, Duration)>);

impl Retry {
    const FIRST: Duration = Duration::from_secs(1);
    const LONGEST: Duration = Duration::from_secs(8);

    fn is_due(&self) -> bool {
        self.0.as_ref().is_none_or(|(refused, pause)| refused.elapsed() >= *pause)
    }

    fn refused(&mut self) {
        let pause = self.0.as_ref().map_or(Self::FIRST, |(_, pause)| Self::LONGEST.min(*pause * 2));
        self.0 = Some((Stopwatch::start(), pause));
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum InterfaceState {
    Attached(AttachedMode),
    /// It was there once, and is waited for.
    Gone,
    /// It is there, and the program could not be attached; why.
    Refused(String),
}

/// Puts the program in force on the interfaces of a configuration. An error leaves everything as it was; what is
/// returned beside the interfaces can do the same later.
///
/// What can fail for a reason outside comes first: new interfaces, then changes of mode, and last the exchanges behind
/// links that exist. An interface that is new must exist; one that has a pin and is gone is waited for.
pub(super) fn start(
    program: &mut Xdp,
    wanted: &[String],
    mode: XdpMode,
    pins: &PinDir,
) -> Result<(Vec<Interface>, Undo), DataplaneError> {
    let mut links = OwnLinks::read(pins)?;
    for interface in wanted.iter().filter(|name| if_nametoindex(name.as_str()).is_ok()) {
        require_ethernet(interface)?;
    }
    let missing = wanted.iter().find(|name| matches!(Step::of(name, wanted, mode, &links), Step::Missing));
    if let Some(interface) = missing {
        return Err(DataplaneError::NoSuchInterface { interface: interface.clone() });
    }
    let mut undo = Undo::new(pins);
    let mut in_force = || -> Result<Vec<Interface>, DataplaneError> {
        undo.set_aside(wanted, &mut links)?;
        let mut steps = steps(wanted, mode, &links);
        for (_, step) in &mut steps {
            // What kept the driver from it may be gone, or the generic mode was that of another configuration.
            if let Step::Exchange(link) = step
                && is_generic_by_chance(link, mode)
            {
                *step = Step::ChangeMode(link.clone());
            }
        }
        steps.sort_by_key(|(_, step)| step.order());
        let mut attached = Vec::new();
        for (interface, step) in steps {
            let state = step.run(program, interface, mode, pins, &mut undo)?;
            attached.push(Interface::new(interface, state));
        }
        Ok(attached)
    };
    let mut attached = match in_force() {
        Ok(attached) => attached,
        Err(error) => {
            undo.undo();
            return Err(error);
        }
    };
    attached.sort_by_key(|interface| wanted.iter().position(|name| **name == *interface.name));
    Ok((attached, undo))
}

/// Exchanges the program on the interfaces that this agent has, those that are not `wanted` excepted, and puts it in
/// force on those that are new: they come first, since they can fail for a reason outside, and must exist. Interfaces
/// that are gone stay so until [`mend`] finds them again. An error leaves everything as it was.
pub(super) fn exchange_all(
    program: &mut Xdp,
    interfaces: &[Interface],
    wanted: &[String],
    mode: XdpMode,
    pins: &PinDir,
) -> Result<(Vec<Interface>, Undo), DataplaneError> {
    let mut links = OwnLinks::read(pins)?;
    let known = |name: &str| interfaces.iter().find(|interface| *interface.name == *name);
    wanted.iter().filter(|name| known(name).is_none()).try_for_each(|name| require_ethernet(name))?;
    let mut undo = Undo::new(pins);
    let mut in_force = || -> Result<Vec<Interface>, DataplaneError> {
        undo.set_aside(wanted, &mut links)?;
        let mut in_force = Vec::new();
        let mut steps = steps(wanted, mode, &links);
        steps.retain(|(name, _)| match known(name) {
            // Waited for until it is back, unless it is by the name of another one.
            Some(interface) if !matches!(interface.state, InterfaceState::Attached(_)) && links.on(name).is_none() => {
                in_force.push(interface.clone());
                false
            }
            Some(_) | None => true,
        });
        steps.sort_by_key(|(name, step)| (known(name).is_some(), step.order()));
        for (name, step) in steps {
            let known = known(name);
            let mut interface = known.cloned().unwrap_or_else(|| Interface::new(name, InterfaceState::Gone));
            // Without a pin, which somebody has removed, a new policy is put in force nevertheless.
            interface.state = step.run(program, name, mode, pins, &mut undo)?;
            if known.is_none() {
                tracing::info!(target: "limiter::dataplane", "{name} is limited from now on");
            }
            in_force.push(interface);
        }
        Ok(in_force)
    };
    match in_force() {
        Ok(mut in_force) => {
            in_force.sort_by_key(|interface| wanted.iter().position(|name| **name == *interface.name));
            Ok((in_force, undo))
        }
        Err(error) => {
            undo.undo();
            Err(error)
        }
    }
}

/// Attaches again where an interface is back, and notices where one is gone. Each change is logged once.
pub(super) fn mend(
    program: &mut Xdp,
    interfaces: &mut [Interface],
    mode: XdpMode,
    pins: &PinDir,
) -> Result<(), DataplaneError> {
    let pinned = pins.links()?;
    let names: Vec<_> = interfaces.iter().map(|interface| Arc::clone(&interface.name)).collect();
    for interface in interfaces {
        let name = &*interface.name;
        let link = pinned.iter().find(|link| *link.interface == *name);
        let state = match (&interface.state, link) {
            // `limiter unpin` has detached, and means it.
            (InterfaceState::Attached(_), None) => continue,
            (InterfaceState::Attached(_), Some(link)) if runs(link)? => continue,
            // A link lives on when its interface gets another name, and no other one has taken the old name.
            (InterfaceState::Attached(_), Some(link))
                if if_nametoindex(name).is_err() && !is_on_any(link, &names) && exchange(program, link)? =>
            {
                continue;
            }
            (InterfaceState::Gone, _) if require_interface(name).is_err() => continue,
            (InterfaceState::Refused(_), _) if !interface.retry.is_due() => continue,
            (InterfaceState::Attached(_) | InterfaceState::Gone | InterfaceState::Refused(_), link) => {
                attach_again(program, name, link, mode, pins)?
            }
        };
        match &state {
            InterfaceState::Refused(_) => interface.retry.refused(),
            InterfaceState::Attached(_) | InterfaceState::Gone => interface.retry = Retry::default(),
        }
        if interface.state == state {
            continue;
        }
        if let InterfaceState::Refused(reason) = &state {
            tracing::error!(target: "limiter::dataplane", "nothing is limited on {name}: {reason}");
        }
        interface.state = state;
    }
    Ok(())
}

/// Whether the interface runs the program of its link, as far as a look from outside tells.
fn runs(link: &LinkPin) -> Result<bool, DataplaneError> {
    let program = program_behind(link)?;
    match link_state::program_id(&link.interface) {
        Ok(running) => Ok(running == Some(program)),
        // Rather kept than detached for want of an answer.
        Err(_) => Ok(require_interface(&link.interface).is_ok()),
    }
}

/// Whether an interface that has one of these names now is the one of this link.
fn is_on_any(link: &LinkPin, names: &[Arc<str>]) -> bool {
    let link = OwnLink::look(link.clone());
    names.iter().any(|name| link.is_on(name))
}

fn attach_again(
    program: &mut Xdp,
    interface: &str,
    dead: Option<&LinkPin>,
    mode: XdpMode,
    pins: &PinDir,
) -> Result<InterfaceState, DataplaneError> {
    if require_interface(interface).is_err() {
        return Ok(gone(interface));
    }
    // Of an interface that is gone, or that has another name now, which no configuration names.
    if let Some(dead) = dead {
        unpin::detach(dead)?;
    }
    match attach_one(program, interface, mode, pins) {
        Ok(link) => {
            tracing::info!(target: "limiter::dataplane", mode = link.mode.as_str(), "{interface} is back and limited");
            Ok(InterfaceState::Attached(link.mode))
        }
        Err(DataplaneError::NoSuchInterface { .. }) => Ok(gone(interface)),
        Err(error) => Ok(InterfaceState::Refused(error.to_string())),
    }
}

fn gone(interface: &str) -> InterfaceState {
    tracing::warn!(
        target: "limiter::dataplane",
        "{interface} is gone: nothing is limited there; the program is attached again when it is back",
    );
    InterfaceState::Gone
}

/// Detaches from every interface that is pinned here and not `wanted`.
pub(super) fn detach_others(wanted: &[String], pins: &PinDir) -> Result<(), DataplaneError> {
    for link in pins.links()?.iter().filter(|link| !wanted.contains(&link.interface)) {
        unpin::detach(link)?;
        tracing::info!(target: "limiter::dataplane", "nothing is limited any more on {}", link.interface);
    }
    Ok(())
}

/// By interface, in the order of the configuration.
fn steps<'a>(wanted: &'a [String], mode: XdpMode, links: &OwnLinks) -> Vec<(&'a str, Step)> {
    wanted.iter().map(|interface| (interface.as_str(), Step::of(interface, wanted, mode, links))).collect()
}

/// What is done on an interface.
#[derive(Clone, Debug)]
enum Step {
    Attach,
    ChangeMode(LinkPin),
    Exchange(LinkPin),
    /// There is no such interface, and no link that was on it.
    Missing,
}

impl Step {
    fn of(interface: &str, wanted: &[String], mode: XdpMode, links: &OwnLinks) -> Self {
        if let Some(link) = links.on(interface) {
            let link = LinkPin { interface: interface.to_owned(), ..link.pin.clone() };
            return if mode.allows(link.mode) { Self::Exchange(link) } else { Self::ChangeMode(link) };
        }
        let exists = if_nametoindex(interface).is_ok();
        let is_of_another = |link: &OwnLink| wanted.iter().any(|name| is_the_link_on(name, link, links));
        let mut named = links.iter().filter(|link| link.pin.interface == interface);
        // One that can be read, and is not on an interface of this name that exists, is not its.
        let is_its = |link: &OwnLink| !exists || !link.is_readable();
        match named.find(|link| is_its(link) && !is_of_another(link)) {
            // The interface has another name, or is gone.
            Some(link) => Self::Exchange(link.pin.clone()),
            None if exists => Self::Attach,
            None => Self::Missing,
        }
    }

    const fn order(&self) -> u8 {
        match self {
            Self::Attach | Self::Missing => 0,
            Self::ChangeMode(_) => 1,
            Self::Exchange(_) => 2,
        }
    }

    fn run(
        self,
        program: &mut Xdp,
        interface: &str,
        mode: XdpMode,
        pins: &PinDir,
        undo: &mut Undo,
    ) -> Result<InterfaceState, DataplaneError> {
        match self {
            Self::Attach => attach_new(program, interface, mode, pins, undo),
            Self::Missing => Ok(gone(interface)),
            Self::ChangeMode(link) => {
                tracing::warn!(
                    target: "limiter::dataplane",
                    "{interface} changes from {} mode: nothing is limited there for a moment",
                    link.mode.as_str(),
                );
                unpin::detach(&link)?;
                undo.detached.push(link);
                attach_new(program, interface, mode, pins, undo)
            }
            Self::Exchange(link) if exchange(program, &link)? => {
                let mode = link.mode;
                undo.exchanged.push(link);
                Ok(InterfaceState::Attached(mode))
            }
            Self::Exchange(_) => Ok(gone(interface)),
        }
    }
}

/// Whether the interface could be in native mode, and nobody asked for another.
fn is_generic_by_chance(link: &LinkPin, mode: XdpMode) -> bool {
    mode == XdpMode::Auto && link.mode == AttachedMode::Generic && link_state::takes_native(&link.interface)
}

/// Whether this is the link on the interface of that name.
fn is_the_link_on(interface: &str, link: &OwnLink, links: &OwnLinks) -> bool {
    links.on(interface).is_some_and(|own| own.pin.path == link.pin.path)
}

fn attach_new(
    program: &mut Xdp,
    interface: &str,
    mode: XdpMode,
    pins: &PinDir,
    undo: &mut Undo,
) -> Result<InterfaceState, DataplaneError> {
    let link = attach_one(program, interface, mode, pins)?;
    let mode = link.mode;
    undo.attached.push(link);
    Ok(InterfaceState::Attached(mode))
}

fn require_interface(interface: &str) -> Result<(), DataplaneError> {
    match if_nametoindex(interface) {
        Ok(_) => Ok(()),
        Err(_) => Err(DataplaneError::NoSuchInterface { interface: interface.to_owned() }),
    }
}

/// The program reads Ethernet headers: where frames have none, it would take other bytes for them.
fn require_ethernet(interface: &str) -> Result<(), DataplaneError> {
    require_interface(interface)?;
    match link_state::link_type(interface) {
        Ok(kind) if kind.has_ethernet_headers() => Ok(()),
        Ok(kind) => Err(DataplaneError::NotEthernet { interface: interface.to_owned(), kind }),
        Err(error) => Err(link_source("look at the type of", interface, Box::new(error))),
    }
}

/// What has been done so far, and the program that was in force before.
pub(super) struct Undo {
    pins: PinDir,
    /// Opened before it is exchanged: the last reference may be that of a link.
    previous: Option<Xdp>,
    attached: Vec<LinkPin>,
    detached: Vec<LinkPin>,
    exchanged: Vec<LinkPin>,
    /// Where pins are now, and where they were.
    moved: Vec<(PathBuf, PathBuf)>,
    /// The same of pins that have made room for those of other interfaces.
    aside: Vec<(PathBuf, PathBuf)>,
}

impl Undo {
    fn new(pins: &PinDir) -> Self {
        let path = pins.program();
        let previous = path.exists().then(|| Xdp::from_pin(path, XdpAttachType::Interface));
        let previous = previous.and_then(|opened| {
            opened
                .inspect_err(|error| {
                    tracing::warn!(target: "limiter::dataplane", %error, "the program in force cannot be opened");
                })
                .ok()
        });
        Self {
            pins: pins.clone(),
            previous,
            attached: Vec::new(),
            detached: Vec::new(),
            exchanged: Vec::new(),
            moved: Vec::new(),
            aside: Vec::new(),
        }
    }

    /// Pins whose name is that of a wanted interface on which another link is, or none yet, and pins of wanted interfaces
    /// that had another name: gives them names that no interface has. Those that are not wanted at all are detached when
    /// everything else is done.
    fn set_aside(&mut self, wanted: &[String], links: &mut OwnLinks) -> Result<(), DataplaneError> {
        let is_in_the_way = |link: &OwnLink| {
            let name = &link.pin.interface;
            match wanted.iter().find(|interface| is_the_link_on(interface, link, links)) {
                Some(interface) => interface != name,
                None => link.is_readable() && wanted.contains(name) && if_nametoindex(name.as_str()).is_ok(),
            }
        };
        let in_the_way: Vec<_> = links.iter().map(is_in_the_way).collect();
        for (link, _) in links.iter_mut().zip(in_the_way).filter(|(_, is_in_the_way)| *is_in_the_way) {
            let pin = link.pin.set_aside();
            fs::rename(&link.pin.path, &pin.path)
                .map_err(|source| pin_error("move the pin", link.pin.path.clone(), source))?;
            self.aside.push((pin.path.clone(), link.pin.path.clone()));
            link.pin = pin;
        }
        Ok(())
    }

    /// Moves links whose program was exchanged, and which are pinned under an older schema or another name, to where
    /// they belong.
    pub(super) fn move_links(&mut self) -> Result<(), DataplaneError> {
        for link in &self.exchanged {
            let path = self.pins.link(link.mode, &link.interface);
            if path == link.path {
                continue;
            }
            fs::rename(&link.path, &path).map_err(|source| pin_error("move the pin", link.path.clone(), source))?;
            self.moved.push((path, link.path.clone()));
        }
        Ok(())
    }

    pub(super) fn undo(&mut self) {
        move_back(&mut self.moved);
        self.take_back();
        move_back(&mut self.aside);
    }

    fn take_back(&mut self) {
        for link in self.attached.drain(..) {
            if let Err(error) = unpin::detach(&link) {
                tracing::error!(target: "limiter::dataplane", %error, "could not detach from {} again", link.interface);
            }
        }
        let Some(previous) = &mut self.previous else {
            for link in self.exchanged.iter().chain(&self.detached) {
                tracing::error!(target: "limiter::dataplane", "{} does not get its program back", link.interface);
            }
            return;
        };
        for link in self.exchanged.drain(..) {
            match exchange(previous, &link) {
                Ok(true) => {}
                Ok(false) => tracing::error!(target: "limiter::dataplane", "{} is gone", link.interface),
                Err(error) => tracing::error!(
                    target: "limiter::dataplane", %error, "{} keeps the new program", link.interface,
                ),
            }
        }
        for link in self.detached.drain(..) {
            if let Err(error) = attach_at(previous, &link.interface, link.mode, link.path.clone()) {
                tracing::error!(target: "limiter::dataplane", %error, "could not attach to {} again", link.interface);
            }
        }
    }
}

fn move_back(moved: &mut Vec<(PathBuf, PathBuf)>) {
    for (now, before) in moved.drain(..).rev() {
        if let Err(error) = fs::rename(&now, &before) {
            tracing::error!(target: "limiter::dataplane", %error, "could not move {} back", now.display());
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
    require_ethernet(interface)?;
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
    attach_at(program, interface, mode, pins.link(mode, interface))
}

fn attach_at(program: &mut Xdp, interface: &str, mode: AttachedMode, path: PathBuf) -> Result<LinkPin, DataplaneError> {
    let flags = match mode {
        AttachedMode::Native => KernelMode::Driver,
        AttachedMode::Generic => KernelMode::Skb,
    };
    let id = program.attach(interface, flags).map_err(|error| attach_error(interface, mode, error))?;
    let link = program.take_link(id).map_err(|error| link_error("keep", interface, error))?;
    // Kernels before 5.9 have no XDP links; dropped here, the program is detached again.
    let link = FdLink::try_from(link).map_err(|error| link_error("pin", interface, error))?;
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
            let (holder, remedy) = foreign::describe(&interface);
            DataplaneError::Busy { holder, remedy, interface, source: Box::new(error) }
        }
        _ => DataplaneError::NotSupported { interface, mode, source: Box::new(error) },
    }
}

fn link_error<E: std::error::Error + Send + Sync + 'static>(
    operation: &'static str,
    interface: &str,
    error: E,
) -> DataplaneError {
    link_source(operation, interface, Box::new(error))
}

/// Detaches from every interface that is pinned here.
pub(super) fn detach_all(pins: &PinDir) -> Result<(), DataplaneError> {
    pins.links()?.iter().try_for_each(unpin::detach)
}

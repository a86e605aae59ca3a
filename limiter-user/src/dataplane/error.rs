//! What can go wrong with the XDP program. Every message names the operation, the object, and where there is one the
//! remedy.

use std::{error::Error, io, path::PathBuf};

use ipnet::IpNet;
use limiter_common::quota::QuotaError;
use nix::errno::Errno;
use thiserror::Error as ThisError;

use super::{AttachedMode, LinkType, List};
use crate::capability::{Capabilities, Missing};

/// An error of the kernel interface, whichever call it is from.
pub(super) type Source = Box<dyn Error + Send + Sync>;

#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum DataplaneError {
    #[error("load the XDP program: this binary was built without it; build it with \"cargo xtask build\"")]
    NoObject,

    #[error(
        "{operation} {object}: no permission; run as root, or as the user who owns the pins: \"limiter doctor\" says more"
    )]
    Permission { operation: &'static str, object: String, source: Source },

    #[error(
        "start the packet layer: this process lacks {missing}: run as root, or give it the capabilities, as the unit's AmbientCapabilities does; the kernel refused to {refused}"
    )]
    Capabilities { missing: Missing, refused: String },

    #[error("attach to {interface}: there is no such interface; see \"ip link\"")]
    NoSuchInterface { interface: String },

    #[error(
        "attach to {interface}: its frames have no Ethernet header (link type {kind}), so nothing would be limited there: name the Ethernet interface that its packets arrive on, or leave it out of xdp.interfaces"
    )]
    NotEthernet { interface: String, kind: LinkType },

    #[error("attach to {interface}: {holder}; {remedy}, or leave the interface out of xdp.interfaces")]
    Busy { interface: String, holder: String, remedy: String, source: Source },

    #[error("attach to {interface} in {mode} mode: {}; use mode = \"auto\" or \"generic\"", chain(source.as_ref()), mode = mode.as_str())]
    NotSupported { interface: String, mode: AttachedMode, source: Source },

    #[error("pin in {}: not on a BPF file system; mount one with \"mount -t bpf bpf /sys/fs/bpf\"", path.display())]
    NoBpffs { path: PathBuf },

    #[error("another agent uses {}; stop it, or give this one an xdp.pin_dir of its own", path.display())]
    InUse { path: PathBuf },

    #[error("{operation} {}: {source}", path.display())]
    Pin { operation: &'static str, path: PathBuf, source: io::Error },

    #[error("load the XDP program: {}", chain(source.as_ref()))]
    Load { source: Source },

    #[error("load the XDP program: the kernel's verifier refuses it: {log}")]
    Verifier { log: String, source: Source },

    #[error("the object has no {what}; it is of another version of the agent")]
    Object { what: &'static str },

    #[error(
        "pinned maps in {} use schema {pinned}, this agent needs {ours}: run \"limiter unpin\" first, which detaches, or start an agent of schema {pinned} again", path.display()
    )]
    SchemaVersion { path: PathBuf, pinned: String, ours: u32 },

    #[error(
        "take over the pins of schema {pinned} for schema {ours}: {source}; nothing has changed; run \"limiter unpin\" first, which detaches, or start an agent of schema {pinned} again"
    )]
    Migration { pinned: u32, ours: u32, source: Box<DataplaneError> },

    #[error("pinned map {map} has {what} {pinned}, this agent needs {ours}: run \"limiter unpin\" first")]
    MapMismatch { map: &'static str, what: &'static str, pinned: String, ours: String },

    #[error("{operation} the map {map}: {}", chain(source.as_ref()))]
    Map { operation: &'static str, map: &'static str, source: Source },

    #[error("{operation} the XDP link of {interface}: {}", chain(source.as_ref()))]
    Link { operation: &'static str, interface: String, source: Source },

    #[error("packet rule {rule}: {source}")]
    Quota { rule: String, source: QuotaError },

    #[error("packet rules {first} and {second} have the same prefix {prefix}")]
    DuplicatePrefix { first: String, second: String, prefix: IpNet },

    #[error("rule {rule}: an id has 1 to 64 bytes")]
    RuleId { rule: String },

    #[error("too many {what}: {count}, and there is room for {capacity}")]
    TooMany { what: &'static str, count: usize, capacity: u32 },

    #[error("{prefix} is not in the {list} list of operators{}", if *.in_policy { "; the policy file has it, remove it there" } else { "" })]
    Absent { list: List, prefix: IpNet, in_policy: bool },

    #[error("{prefix} would not be blocked: the allow prefix {allow} contains it and goes first")]
    Covered { prefix: IpNet, allow: IpNet },

    #[error("push a budget: budgets are switched off")]
    BudgetsOff,

    #[error("run the XDP program on a packet: {}", chain(source.as_ref()))]
    TestRun { source: Source },
}

/// What an error means for whoever has to act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    Permission,
    /// The kernel, a driver or another program does not let us.
    Unavailable,
    /// The configuration, the policy or what an operator asked for.
    Configuration,
    Internal,
}

impl DataplaneError {
    /// What the kernel refuses for want of a capability looks like a wrong program, or like a map that cannot be made:
    /// says which capability it was.
    pub(super) fn explained(self) -> Self {
        let refused = if let Self::Permission { operation, object, .. } = &self {
            format!("{operation} {object}")
        } else if let Self::Verifier { source, .. } = &self
            && is_permission(source.as_ref())
        {
            "load the XDP program".to_owned()
        } else {
            return self;
        };
        match Capabilities::of_process().map(Capabilities::missing) {
            Ok(missing) if !missing.is_empty() => Self::Capabilities { missing: Missing(missing), refused },
            Ok(_) | Err(_) => self,
        }
    }

    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Permission { .. } | Self::Capabilities { .. } => ErrorKind::Permission,
            Self::Migration { source, .. } => source.kind(),
            Self::NoObject
            | Self::Busy { .. }
            | Self::NotSupported { .. }
            | Self::NoBpffs { .. }
            | Self::InUse { .. }
            | Self::SchemaVersion { .. }
            | Self::MapMismatch { .. }
            | Self::Verifier { .. }
            | Self::Load { .. }
            | Self::Pin { .. } => ErrorKind::Unavailable,
            Self::NoSuchInterface { .. }
            | Self::NotEthernet { .. }
            | Self::Quota { .. }
            | Self::DuplicatePrefix { .. }
            | Self::RuleId { .. }
            | Self::TooMany { .. }
            | Self::Absent { .. }
            | Self::Covered { .. }
            | Self::BudgetsOff => ErrorKind::Configuration,
            Self::Object { .. } | Self::Map { .. } | Self::Link { .. } | Self::TestRun { .. } => ErrorKind::Internal,
        }
    }
}

/// The number of the system call's error, wherever in the chain it is.
pub(super) fn errno(error: &(dyn Error + 'static)) -> Option<Errno> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(number) = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
            return Some(Errno::from_raw(number));
        }
        next = error.source();
    }
    None
}

pub(super) fn is_permission(error: &(dyn Error + 'static)) -> bool {
    matches!(errno(error), Some(Errno::EPERM | Errno::EACCES))
}

/// An error and what caused it, in one line. A cause that the error itself repeats is said once.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

/// For `map_err` on maps.
pub(super) fn map_error<E: Error + Send + Sync + 'static>(
    operation: &'static str,
    map: &'static str,
) -> impl FnOnce(E) -> DataplaneError {
    move |error| {
        if is_permission(&error) {
            DataplaneError::Permission { operation, object: format!("the map {map}"), source: Box::new(error) }
        } else {
            DataplaneError::Map { operation, map, source: Box::new(error) }
        }
    }
}

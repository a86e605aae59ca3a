//! What can be learnt of a host without changing it: whether its kernel takes the program, what is pinned, and which
//! program an interface runs.

use std::{
    fs, io,
    os::fd::{AsFd as _, AsRawFd as _},
    path::{Path, PathBuf},
};

use aya::EbpfLoader;
use limiter_common::schema::SCHEMA_VERSION;
use nix::net::if_::if_nametoindex;

use super::{
    DataplaneError,
    diagnosis::{self, Diagnosis},
    foreign, link_state,
    loader::{embedded_object, load_error, program, verifier_error},
    own_links::{OwnLink, OwnLinks},
    pins,
};

/// The kernel has taken the program; it is unloaded again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Accepted {
    /// Instructions that the verifier walked through.
    pub verified_instructions: Option<u32>,
    /// `None` when the kernel does not tell.
    pub compiled: Option<bool>,
}

/// Loads the program with small maps, lets the verifier judge it, and lets go of everything. Nothing is pinned or
/// attached.
pub fn try_program() -> Result<Accepted, DataplaneError> {
    const SOURCES: u32 = 1024;
    let mut loader = EbpfLoader::new();
    loader
        .map_max_entries("BUCKETS_V4", SOURCES)
        .map_max_entries("BUCKETS_V6", SOURCES)
        .map_max_entries(diagnosis::MAP, Diagnosis::Off.log_bytes())
        .override_global(diagnosis::LEVEL, &const { Diagnosis::Off.level() }, true);
    let mut ebpf = loader.load(embedded_object()?).map_err(load_error)?;
    let program = program(&mut ebpf)?;
    program.load().map_err(verifier_error)?;
    let verified_instructions = program.info().ok().and_then(|info| info.verified_instruction_count());
    let compiled = program.fd().ok().and_then(|fd| is_compiled(fd.as_fd().as_raw_fd()));
    Ok(Accepted { verified_instructions, compiled })
}

/// Whether the program behind a file descriptor of this process was compiled to machine code.
fn is_compiled(fd: i32) -> Option<bool> {
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
    about.lines().find_map(|line| line.strip_prefix("prog_jited:")).map(|value| value.trim() == "1")
}

/// What a pin directory is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PinPlace {
    /// On a BPF file system. Schema versions of pins that are not this agent's.
    Bpffs {
        other_versions: Vec<u32>,
    },
    /// An agent with [`crate::capability::SYS_ADMIN`] mounts the file system itself.
    Mountable {
        /// Pins would end with the agent: in another mount namespace than the first one, nobody else sees what it mounts.
        for_itself: bool,
    },
    Elsewhere,
}

/// What to do about [`PinPlace::Mountable`] for itself.
pub const OWN_MOUNTS_REMEDY: &str = pins::OWN_MOUNTS_REMEDY;

/// The version of the pins that this agent makes.
pub const PINS_VERSION: u32 = SCHEMA_VERSION;

pub fn pin_place(pin_dir: &Path) -> Result<PinPlace, DataplaneError> {
    if pins::is_bpffs(pin_dir)? {
        return Ok(PinPlace::Bpffs { other_versions: other_versions(pin_dir)? });
    }
    Ok(match pins::can_be_mounted(pin_dir)? {
        true => PinPlace::Mountable { for_itself: pins::has_own_mounts() == Some(true) },
        false => PinPlace::Elsewhere,
    })
}

/// The program that an interface runs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunningProgram {
    pub id: u32,
    /// `None` when this process may not look.
    pub name: Option<String>,
    /// Whether it is that of a link below the pin directory. `None` when this process may not look.
    pub is_ours: Option<bool>,
}

pub fn running_program(interface: &str, pin_dir: &Path) -> io::Result<Option<RunningProgram>> {
    let Some(id) = link_state::program_id(interface)? else { return Ok(None) };
    let is_ours = own_links(pin_dir).and_then(|links| {
        let are_seen = links.iter().all(OwnLink::is_readable);
        if links.on(interface).is_some() { Some(true) } else { are_seen.then_some(false) }
    });
    Ok(Some(RunningProgram { id, name: foreign::program_name(id), is_ours }))
}

/// How the program of another owner is removed from an interface.
pub fn remedy_of_program(interface: &str) -> String {
    foreign::describe(interface).1
}

/// Interfaces that run a program of an earlier configuration: links pinned below `pin_dir` that are on none of `wanted`.
/// `None` when this process may not look.
pub fn left_over(pin_dir: &Path, wanted: &[String]) -> Option<Vec<String>> {
    let links = own_links(pin_dir)?;
    let named = |name: &String| links.on(name).map(|link| link.pin.path.clone());
    let in_use: Vec<_> = wanted.iter().filter_map(named).collect();
    let is_left = |link: &&OwnLink| {
        let name = &link.pin.interface;
        // The link of an interface that is gone or has another name is waited with.
        let is_kept = wanted.contains(name) && if_nametoindex(name.as_str()).is_err();
        !in_use.contains(&link.pin.path) && !is_kept && !link.is_dead()
    };
    let left = links.iter().filter(is_left);
    Some(left.map(|link| link.pin.interface.clone()).collect())
}

/// Links of all schema versions.
fn own_links(pin_dir: &Path) -> Option<OwnLinks> {
    let mut found = Vec::new();
    for version in pins::versions(pin_dir).ok()? {
        found.extend(pins::links_in(&version).ok()?);
    }
    Some(OwnLinks::of(found))
}

fn other_versions(pin_dir: &Path) -> Result<Vec<u32>, DataplaneError> {
    let versions = pins::versions(pin_dir)?;
    let numbers = versions.iter().filter_map(|path| path.file_name()?.to_str()?.trim_start_matches('v').parse().ok());
    Ok(numbers.filter(|number| *number != SCHEMA_VERSION).collect())
}

/// The first part of a path that exists: what has to be writable for the rest to be made.
pub fn nearest_existing(path: &Path) -> PathBuf {
    path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/")).to_owned()
}

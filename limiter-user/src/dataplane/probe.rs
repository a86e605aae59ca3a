//! What can be learnt of a host without changing it: whether its kernel takes the program, what is pinned, and which
//! program an interface runs.

use std::{
    ffi::OsStr,
    fs, io,
    os::fd::{AsFd as _, AsRawFd as _},
    path::{Path, PathBuf},
};

use aya::EbpfLoader;
use limiter_common::schema::SCHEMA_VERSION;

use super::{
    DataplaneError,
    attach::program_behind,
    diagnosis::{self, Diagnosis},
    foreign, link_state,
    loader::{embedded_object, load_error, program, verifier_error},
    pins::{self, LinkPin},
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
    Mountable,
    Elsewhere,
}

/// The version of the pins that this agent makes.
pub const PINS_VERSION: u32 = SCHEMA_VERSION;

pub fn pin_place(pin_dir: &Path) -> Result<PinPlace, DataplaneError> {
    if pins::is_bpffs(pin_dir)? {
        return Ok(PinPlace::Bpffs { other_versions: other_versions(pin_dir)? });
    }
    Ok(if pins::can_be_mounted(pin_dir)? { PinPlace::Mountable } else { PinPlace::Elsewhere })
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
    Ok(Some(RunningProgram { id, name: foreign::program_name(id), is_ours: is_pinned(id, interface, pin_dir) }))
}

/// Looks at the links of all schema versions.
fn is_pinned(program_id: u32, interface: &str, pin_dir: &Path) -> Option<bool> {
    for version in pins::versions(pin_dir).ok()? {
        for path in pins::entries(&version).ok()? {
            let link = path.file_name().and_then(OsStr::to_str).and_then(pins::parse_link_name);
            let Some((mode, name)) = link.filter(|(_, name)| name == interface) else { continue };
            if program_behind(&LinkPin { interface: name, mode, path }).ok()? == program_id {
                return Some(true);
            }
        }
    }
    Some(false)
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

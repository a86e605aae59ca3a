//! What is pinned, where: maps and links under `<pin_dir>/v<SCHEMA_VERSION>/`.
//!
//! A pinned link keeps the program attached while no agent runs; pinned maps keep its state.

use std::{
    ffi::OsStr,
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use aya::programs::links::{FdLink, PinnedLink};
use limiter_common::schema::{Lifetime, MAPS, SCHEMA_VERSION};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use super::{AttachedMode, DataplaneError, error::is_permission, link_state};
use crate::clock::Stopwatch;

const BPFFS: &str = "/sys/fs/bpf";
const LINK: &str = "link-";
const PROGRAM: &str = "program";
/// Suffix of what is not in force yet.
const NEXT: &str = "-next";

/// The directory of this schema version.
#[derive(Clone, Debug)]
pub(super) struct PinDir {
    version: PathBuf,
}

/// A pinned link of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LinkPin {
    pub(super) interface: String,
    pub(super) mode: AttachedMode,
    pub(super) path: PathBuf,
}

impl PinDir {
    /// Makes the directory, and mounts the BPF file system where it usually is. Refuses pins of another schema.
    pub(super) fn prepare(root: &Path) -> Result<(Self, CreatedPins), DataplaneError> {
        let mut created = CreatedPins::default();
        ensure_bpffs(root)?;
        refuse_other_versions(root)?;
        let version = root.join(version_name());
        for directory in [root, &version] {
            created.directory(directory)?;
        }
        Ok((Self { version }, created))
    }

    /// Held for as long as an agent runs: two that share a directory would detach each other's interfaces. The kernel
    /// gives it back when a process dies, however it dies.
    pub(super) fn lock(&self) -> Result<File, DataplaneError> {
        let wrong = |source| pin_error("lock", self.version.clone(), source);
        let directory = File::open(&self.version).map_err(wrong)?;
        match directory.try_lock() {
            Ok(()) => Ok(directory),
            Err(TryLockError::WouldBlock) => Err(DataplaneError::InUse { path: self.version.clone() }),
            Err(TryLockError::Error(source)) => Err(wrong(source)),
        }
    }

    pub(super) fn map(&self, name: &str) -> PathBuf {
        self.version.join(name)
    }

    pub(super) fn next_map(&self, name: &str) -> PathBuf {
        self.version.join(format!("{name}{NEXT}"))
    }

    /// Of the program in force: whoever replaces it can put it back.
    pub(super) fn program(&self) -> PathBuf {
        self.map(PROGRAM)
    }

    pub(super) fn next_program(&self) -> PathBuf {
        self.next_map(PROGRAM)
    }

    pub(super) fn link(&self, mode: AttachedMode, interface: &str) -> PathBuf {
        self.version.join(link_name(mode, interface))
    }

    pub(super) fn links(&self) -> Result<Vec<LinkPin>, DataplaneError> {
        let mut links = Vec::new();
        for path in entries(&self.version)? {
            if let Some((mode, interface)) = path.file_name().and_then(OsStr::to_str).and_then(parse_link_name) {
                links.push(LinkPin { interface, mode, path });
            }
        }
        Ok(links)
    }

    /// Puts the pins of the new program and its policy maps in the place of the old ones.
    pub(super) fn promote_next(&self) -> Result<(), DataplaneError> {
        let policy_maps = MAPS.iter().filter(|map| map.lifetime == Lifetime::Policy).map(|map| map.name);
        for name in policy_maps.chain([PROGRAM]) {
            let (next, path) = (self.next_map(name), self.map(name));
            fs::rename(&next, &path).map_err(|source| pin_error("rename the pin", next, source))?;
        }
        Ok(())
    }
}

fn version_name() -> String {
    format!("v{SCHEMA_VERSION}")
}

pub(super) fn is_version_name(name: &OsStr) -> bool {
    name.to_str()
        .and_then(|name| name.strip_prefix('v'))
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The BPF file system refuses names with a dot, which interface names may have.
fn link_name(mode: AttachedMode, interface: &str) -> String {
    format!("{LINK}{}-{}", mode.as_str(), interface.replace('%', "%25").replace('.', "%2e"))
}

pub(super) fn parse_link_name(name: &str) -> Option<(AttachedMode, String)> {
    let (mode, interface) = name.strip_prefix(LINK)?.split_once('-')?;
    let mode = *AttachedMode::ALL.iter().find(|known| known.as_str() == mode)?;
    Some((mode, interface.replace("%2e", ".").replace("%25", "%")))
}

pub(super) fn pin_error(operation: &'static str, path: PathBuf, source: io::Error) -> DataplaneError {
    if is_permission(&source) {
        let object = path.display().to_string();
        return DataplaneError::Permission { operation, object, source: Box::new(source) };
    }
    DataplaneError::Pin { operation, path, source }
}

/// Whether a BPF file system that is mounted in the usual place would hold the directory.
pub(super) fn can_be_mounted(pin_dir: &Path) -> Result<bool, DataplaneError> {
    Ok(pin_dir.starts_with(BPFFS) && !is_bpffs(Path::new(BPFFS))?)
}

fn ensure_bpffs(pin_dir: &Path) -> Result<(), DataplaneError> {
    if is_bpffs(pin_dir)? {
        return Ok(());
    }
    if !can_be_mounted(pin_dir)? {
        return Err(DataplaneError::NoBpffs { path: pin_dir.to_owned() });
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    match mount(Some("bpf"), BPFFS, Some("bpf"), flags, Some("mode=0700")) {
        Ok(()) => {
            tracing::info!(target: "limiter::dataplane", "mounted the BPF file system on {BPFFS}");
            Ok(())
        }
        Err(Errno::EPERM | Errno::EACCES) => Err(DataplaneError::Permission {
            operation: "mount the BPF file system on",
            object: BPFFS.to_owned(),
            source: Box::new(io::Error::from(Errno::EPERM)),
        }),
        Err(_) => Err(DataplaneError::NoBpffs { path: pin_dir.to_owned() }),
    }
}

/// Whether the path, or what exists of it, is on a BPF file system.
pub(super) fn is_bpffs(path: &Path) -> Result<bool, DataplaneError> {
    for ancestor in path.ancestors() {
        match statfs(ancestor) {
            Ok(found) => return Ok(found.filesystem_type() == BPF_FS_MAGIC),
            Err(Errno::ENOENT) => {}
            Err(error) => return Err(pin_error("look at", ancestor.to_owned(), error.into())),
        }
    }
    Ok(false)
}

fn refuse_other_versions(root: &Path) -> Result<(), DataplaneError> {
    let ours = version_name();
    for path in entries(root)? {
        let Some(name) = path.file_name().filter(|name| is_version_name(name)) else { continue };
        if name != ours.as_str() {
            let pinned = name.to_string_lossy().trim_start_matches('v').to_owned();
            return Err(DataplaneError::SchemaVersion { path: root.to_owned(), pinned, ours: SCHEMA_VERSION });
        }
    }
    Ok(())
}

/// What is in a directory, sorted; nothing when it does not exist.
pub(super) fn entries(directory: &Path) -> Result<Vec<PathBuf>, DataplaneError> {
    let read = || -> io::Result<Vec<PathBuf>> {
        let mut paths = fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
        paths.sort();
        Ok(paths)
    };
    match read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        result => result.map_err(|source| pin_error("read the directory", directory.to_owned(), source)),
    }
}

/// What a start has made so far. Dropped before [`Self::keep`], it is removed again.
#[derive(Debug, Default)]
pub(super) struct CreatedPins {
    paths: Vec<PathBuf>,
}

impl CreatedPins {
    fn directory(&mut self, path: &Path) -> Result<(), DataplaneError> {
        if path.is_dir() {
            return Ok(());
        }
        fs::create_dir(path).map_err(|source| pin_error("make the directory", path.to_owned(), source))?;
        self.paths.push(path.to_owned());
        Ok(())
    }

    pub(super) fn file(&mut self, path: PathBuf) {
        self.paths.push(path);
    }

    pub(super) fn keep(mut self) {
        self.paths.clear();
    }
}

impl Drop for CreatedPins {
    fn drop(&mut self) {
        for path in self.paths.iter().rev() {
            let removed = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
            if let Err(error) = removed
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(target: "limiter::dataplane", %error, "could not remove {}", path.display());
            }
        }
    }
}

/// What [`unpin`] has removed.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Unpinned {
    pub links: usize,
    pub maps: usize,
    /// Interfaces whose link something else still holds.
    pub still_attached: Vec<String>,
}

/// Detaches and removes everything under the pin directory, of whichever schema version. Needs no agent, and no
/// object.
pub fn unpin(pin_dir: &Path) -> Result<Unpinned, DataplaneError> {
    let mut unpinned = Unpinned::default();
    let mut detaching = Vec::new();
    for version in entries(pin_dir)? {
        if !version.file_name().is_some_and(is_version_name) {
            continue;
        }
        let (links, maps): (Vec<_>, Vec<_>) = entries(&version)?.into_iter().partition(|path| is_link(path));
        for link in links {
            detaching.extend(Detaching::open(&link));
            remove(&link)?;
            unpinned.links += 1;
        }
        for map in maps {
            remove(&map)?;
            unpinned.maps += usize::from(!map.ends_with(PROGRAM));
        }
        fs::remove_dir(&version).map_err(|source| pin_error("remove the directory", version, source))?;
    }
    match fs::remove_dir(pin_dir) {
        Ok(()) => {}
        // Somebody else's files, a mount point, or nothing was there.
        Err(error)
            if matches!(
                error.raw_os_error().map(Errno::from_raw),
                Some(Errno::ENOTEMPTY | Errno::EBUSY | Errno::ENOENT | Errno::EPERM)
            ) => {}
        Err(source) => return Err(pin_error("remove the directory", pin_dir.to_owned(), source)),
    }
    let held = detaching.into_iter().filter(|link| !link.is_gone_soon());
    unpinned.still_attached = held.map(|link| link.interface).collect();
    Ok(unpinned)
}

fn is_link(path: &Path) -> bool {
    path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(LINK))
}

fn remove(path: &Path) -> Result<(), DataplaneError> {
    fs::remove_file(path).map_err(|source| pin_error("remove the pin", path.to_owned(), source))
}

/// A link whose pin is being removed.
struct Detaching {
    interface: String,
    link_id: u32,
    program_id: u32,
}

impl Detaching {
    /// `None` when the pin is no link.
    fn open(path: &Path) -> Option<Self> {
        let (_, interface) = path.file_name().and_then(OsStr::to_str).and_then(parse_link_name)?;
        let link = FdLink::from(PinnedLink::from_pin(path).ok()?).info().ok()?;
        Some(Self { interface, link_id: link.id(), program_id: link.program_id() })
    }

    /// The kernel detaches after the last reference is gone, in a worker of its own: first the link's id goes, then
    /// the program. Whether both have gone within a second.
    fn is_gone_soon(&self) -> bool {
        let waiting = Stopwatch::start();
        loop {
            let has_link = aya::programs::loaded_links().flatten().any(|link| link.id() == self.link_id);
            // An interface that is gone runs nothing.
            let runs = link_state::program_id(&self.interface).ok().flatten() == Some(self.program_id);
            if !has_link && !runs {
                return true;
            }
            if waiting.elapsed() > Duration::from_secs(1) {
                return false;
            }
            thread::park_timeout(Duration::from_millis(1));
        }
    }
}

/// Removes a pinned link and waits until the kernel has detached it.
pub(super) fn detach(link: &LinkPin) -> Result<(), DataplaneError> {
    let detaching = Detaching::open(&link.path);
    remove(&link.path)?;
    if detaching.is_some_and(|detaching| !detaching.is_gone_soon()) {
        tracing::warn!(target: "limiter::dataplane", "the link of {} is removed, but still held", link.interface);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_names_survive_the_file_system() {
        for interface in ["eth0", "eth0.100", "a%b", "%2e", "wan-1"] {
            let name = link_name(AttachedMode::Generic, interface);
            assert!(!name.contains('.'), "{name}");
            assert_eq!(parse_link_name(&name), Some((AttachedMode::Generic, interface.to_owned())), "{name}");
        }
        assert_eq!(parse_link_name("BUCKETS_V4"), None);
    }

    #[test]
    fn version_directories_are_told_from_others() {
        assert!(is_version_name(OsStr::new("v1")) && is_version_name(OsStr::new("v23")));
        assert!(!is_version_name(OsStr::new("v")) && !is_version_name(OsStr::new("vlan1")));
    }

    #[test]
    fn refuses_pins_of_another_schema() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("v4711")).unwrap();
        let error = refuse_other_versions(root.path()).unwrap_err().to_string();
        assert!(error.contains("use schema 4711, this agent needs") && error.contains("limiter unpin"), "{error}");
    }

    #[test]
    fn a_directory_elsewhere_is_no_bpf_file_system() {
        let root = tempfile::tempdir().unwrap();
        let error = PinDir::prepare(&root.path().join("limiter")).unwrap_err();
        assert!(matches!(error, DataplaneError::NoBpffs { .. }), "{error}");
        assert!(!root.path().join("limiter").exists());
    }
}

//! What is pinned, where: maps and links under `<pin_dir>/v<version of the schema>/`.
//!
//! A pinned link keeps the program attached while no agent runs; pinned maps keep its state. Pins of an older schema
//! are there only until a start has taken them over.

use std::{
    ffi::OsStr,
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
};

use limiter_common::schema::Lifetime;
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use super::{AttachedMode, DataplaneError, config::Schema, error::is_permission};

const BPFFS: &str = "/sys/fs/bpf";
pub(super) const LINK: &str = "link-";
pub(super) const PROGRAM: &str = "program";
/// Suffix of what is not in force yet.
const NEXT: &str = "-next";

/// The directory of this schema version, and those of older ones.
#[derive(Clone, Debug)]
pub(super) struct PinDir {
    schema: Schema,
    version: PathBuf,
    older: Vec<VersionDir>,
}

/// The pins of one schema version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VersionDir {
    pub(super) number: u32,
    pub(super) path: PathBuf,
}

/// A pinned link of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LinkPin {
    pub(super) interface: String,
    pub(super) mode: AttachedMode,
    pub(super) path: PathBuf,
}

impl LinkPin {
    /// Under a name that no interface has.
    pub(super) fn set_aside(&self) -> Self {
        const ASIDE: &str = ":aside";
        let mut path = self.path.clone().into_os_string();
        path.push(ASIDE);
        Self { interface: format!("{}{ASIDE}", self.interface), mode: self.mode, path: path.into() }
    }
}

impl PinDir {
    /// Makes the directory, and mounts the BPF file system where it usually is. Refuses pins of a newer schema.
    pub(super) fn prepare(root: &Path, schema: Schema) -> Result<(Self, CreatedPins), DataplaneError> {
        let mut created = CreatedPins::default();
        ensure_bpffs(root)?;
        let older = older_versions(root, schema.version)?;
        let version = root.join(version_name(schema.version));
        let mut above: Vec<&Path> = root.ancestors().skip(1).take_while(|directory| !directory.exists()).collect();
        above.reverse();
        for directory in above.into_iter().chain([root, &version]) {
            created.directory(directory)?;
        }
        Ok((Self { schema, version, older }, created))
    }

    /// Held for as long as an agent runs: two that share a directory would detach each other's interfaces. The kernel
    /// gives it back when a process dies, however it dies.
    pub(super) fn lock(&self) -> Result<File, DataplaneError> {
        lock(&self.version)
    }

    /// Held while the pins of older schemas are taken over, so that their agent does not run.
    pub(super) fn lock_older(&self) -> Result<Vec<File>, DataplaneError> {
        self.older.iter().map(|version| lock(&version.path)).collect()
    }

    pub(super) fn schema(&self) -> Schema {
        self.schema
    }

    /// The oldest first.
    pub(super) fn older(&self) -> &[VersionDir] {
        &self.older
    }

    /// From now on there are only the pins of this schema.
    pub(super) fn forget_older(&mut self) {
        self.older.clear();
    }

    pub(super) fn map(&self, name: &str) -> PathBuf {
        self.version.join(name)
    }

    pub(super) fn next_map(&self, name: &str) -> PathBuf {
        self.version.join(format!("{name}{NEXT}"))
    }

    /// Of the program in force: whoever replaces it can put it back.
    pub(super) fn program(&self) -> PathBuf {
        self.in_force(PROGRAM)
    }

    /// Where the pin of this name is that belongs to the program in force: in the newest directory that has a program.
    pub(super) fn in_force(&self, name: &str) -> PathBuf {
        let older = self.older.iter().rev().map(|version| &version.path);
        let mut versions = std::iter::once(&self.version).chain(older);
        let in_force = versions.find(|version| version.join(PROGRAM).exists()).unwrap_or(&self.version);
        in_force.join(name)
    }

    pub(super) fn next_program(&self) -> PathBuf {
        self.next_map(PROGRAM)
    }

    pub(super) fn link(&self, mode: AttachedMode, interface: &str) -> PathBuf {
        self.version.join(link_name(mode, interface))
    }

    /// Those of this schema first.
    pub(super) fn links(&self) -> Result<Vec<LinkPin>, DataplaneError> {
        let mut links = Vec::new();
        for version in std::iter::once(&self.version).chain(self.older.iter().rev().map(|version| &version.path)) {
            links.extend(links_in(version)?);
        }
        Ok(links)
    }

    /// Puts the pins of the new program and its policy maps in the place of the old ones.
    pub(super) fn promote_next(&self) -> Result<(), DataplaneError> {
        let policy_maps = self.schema.maps.iter().filter(|map| map.lifetime == Lifetime::Policy).map(|map| map.name);
        for name in policy_maps.chain([PROGRAM]) {
            let (next, path) = (self.next_map(name), self.map(name));
            fs::rename(&next, &path).map_err(|source| pin_error("rename the pin", next, source))?;
        }
        Ok(())
    }
}

fn version_name(number: u32) -> String {
    format!("v{number}")
}

pub(super) fn is_version_name(name: &OsStr) -> bool {
    name.to_str()
        .and_then(|name| name.strip_prefix('v'))
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Those of one schema version.
pub(super) fn links_in(version: &Path) -> Result<Vec<LinkPin>, DataplaneError> {
    let link = |path: PathBuf| {
        let (mode, interface) = path.file_name().and_then(OsStr::to_str).and_then(parse_link_name)?;
        Some(LinkPin { interface, mode, path })
    };
    Ok(entries(version)?.into_iter().filter_map(link).collect())
}

/// The directories of all schema versions.
pub(super) fn versions(root: &Path) -> Result<Vec<PathBuf>, DataplaneError> {
    let mut versions = entries(root)?;
    versions.retain(|path| path.file_name().is_some_and(is_version_name));
    Ok(versions)
}

/// Those of older schemas, the oldest first; an error when there is a newer one.
fn older_versions(root: &Path, ours: u32) -> Result<Vec<VersionDir>, DataplaneError> {
    let mut older = Vec::new();
    for path in versions(root)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let pinned = name.trim_start_matches('v').to_owned();
        match pinned.parse() {
            Ok(number) if number < ours => older.push(VersionDir { number, path }),
            Ok(number) if number == ours => {}
            Ok(_) | Err(_) => return Err(DataplaneError::SchemaVersion { path: root.to_owned(), pinned, ours }),
        }
    }
    older.sort_by_key(|version| version.number);
    Ok(older)
}

pub(super) fn lock(version: &Path) -> Result<File, DataplaneError> {
    let wrong = |source| pin_error("lock", version.to_owned(), source);
    let directory = File::open(version).map_err(wrong)?;
    match directory.try_lock() {
        Ok(()) => Ok(directory),
        Err(TryLockError::WouldBlock) => Err(DataplaneError::InUse { path: version.to_owned() }),
        Err(TryLockError::Error(source)) => Err(wrong(source)),
    }
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
            if has_own_mounts() == Some(true) {
                tracing::warn!(
                    target: "limiter::dataplane",
                    "this process has a mount namespace of its own, as \"ip netns exec\" makes one: {BPFFS} is seen by nobody \
                     else, and all pins, and with them the limits, end with the agent; {OWN_MOUNTS_REMEDY}"
                );
            }
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

/// What to do where [`has_own_mounts`].
pub(super) const OWN_MOUNTS_REMEDY: &str =
    "to limit another network namespace, start it with \"nsenter --net=/run/netns/NAME\"";

/// Whether what this process mounts is seen by processes of its namespace alone, and so goes with them. `None` when it may
/// not look.
pub(super) fn has_own_mounts() -> Option<bool> {
    let namespace = |process: String| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    // Where the first process is hidden from this one, whoever started it may be asked.
    let parent = nix::unistd::getppid().to_string();
    let other = namespace("1".to_owned()).or_else(|| namespace(parent))?;
    Some(namespace("self".to_owned())? != other)
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
    fn older_schemas_are_found_and_newer_ones_are_refused() {
        let root = tempfile::tempdir().unwrap();
        for name in ["v2", "v1", "v10", "v12", "vlan", "v"] {
            fs::create_dir(root.path().join(name)).unwrap();
        }
        let older = older_versions(root.path(), 12).unwrap();
        assert_eq!(older.iter().map(|version| version.number).collect::<Vec<_>>(), [1, 2, 10]);
        for newer in ["v13", "v4294967296"] {
            fs::create_dir(root.path().join(newer)).unwrap();
            let error = older_versions(root.path(), 12).unwrap_err().to_string();
            let says = format!("use schema {}, this agent needs 12", newer.trim_start_matches('v'));
            assert!(error.contains(&says) && error.contains("limiter unpin"), "{error}");
            fs::remove_dir(root.path().join(newer)).unwrap();
        }
    }

    #[test]
    fn a_directory_elsewhere_is_no_bpf_file_system() {
        let root = tempfile::tempdir().unwrap();
        let error = PinDir::prepare(&root.path().join("limiter"), Schema::default()).unwrap_err();
        assert!(matches!(error, DataplaneError::NoBpffs { .. }), "{error}");
        assert!(!root.path().join("limiter").exists());
    }
}

//! Detaching, and removing what is pinned.

use std::{
    ffi::OsStr,
    fs::{self, File},
    path::Path,
    thread,
    time::Duration,
};

use aya::programs::links::{FdLink, PinnedLink};
use nix::errno::Errno;

use super::{
    DataplaneError, link_state,
    pins::{self, LINK, LinkPin, PROGRAM, entries, parse_link_name, pin_error},
};
use crate::clock::Stopwatch;

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
    for version in pins::versions(pin_dir)? {
        remove_version(&version, &mut unpinned, &mut detaching)?;
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

/// Removes the pins of one schema version.
fn remove_version(
    version: &Path,
    unpinned: &mut Unpinned,
    detaching: &mut Vec<Detaching>,
) -> Result<(), DataplaneError> {
    let (links, maps): (Vec<_>, Vec<_>) = entries(version)?.into_iter().partition(|path| is_link(path));
    for link in links {
        detaching.extend(Detaching::open(&link));
        remove(&link)?;
        unpinned.links += 1;
    }
    for map in maps {
        remove(&map)?;
        unpinned.maps += usize::from(!map.ends_with(PROGRAM));
    }
    fs::remove_dir(version).map_err(|source| pin_error("remove the directory", version.to_owned(), source))
}

/// Removes the pins of a schema version that another one has taken the place of.
pub(super) fn remove_superseded(version: &Path) -> Result<(), DataplaneError> {
    let mut detaching = Vec::new();
    remove_version(version, &mut Unpinned::default(), &mut detaching)?;
    for link in detaching.iter().filter(|link| !link.is_gone_soon()) {
        tracing::warn!(target: "limiter::dataplane", "the link of {} is removed, but still held", link.interface);
    }
    Ok(())
}

/// Detaches from every interface that is pinned below the directory, of whichever schema version, and tells which. What
/// else is pinned stays for a later start. A directory that an agent uses is an error when anything is attached.
pub fn detach_pinned(pin_dir: &Path) -> Result<Vec<String>, DataplaneError> {
    let mut links = Vec::new();
    for version in pins::versions(pin_dir)? {
        links.extend(pins::links_in(&version)?);
    }
    if links.is_empty() {
        return Ok(Vec::new());
    }
    let _idle = lock_idle(pin_dir)?;
    links.iter().try_for_each(detach)?;
    Ok(links.into_iter().map(|link| link.interface).collect())
}

/// Makes sure that no agent runs on this pin directory, for as long as the answer is kept.
pub fn lock_idle(pin_dir: &Path) -> Result<Vec<File>, DataplaneError> {
    pins::versions(pin_dir)?.iter().map(|version| pins::lock(version)).collect()
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

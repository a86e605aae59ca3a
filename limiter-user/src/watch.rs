//! Notices that a file has changed, whichever way it was changed: written in place, replaced by another, or behind a
//! symbolic link that points elsewhere.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// A file that is not in force as it was last read: what was in force before stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotInForce {
    /// Why, with the name of the file.
    pub error: String,
    pub at_start: AtStart,
}

/// What a start would make of a file that is not in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtStart {
    /// It would fail: what is in the file is wrong.
    Fails,
    /// What can be a mishap while an agent runs is an empty file to one that starts.
    TakesNothing,
    /// It depends on more than the file: on the kernel, its memory, interfaces, or on another file.
    MayFail,
}

impl AtStart {
    /// What is said of `file`, in short.
    pub fn tell(self, file: &str) -> String {
        match self {
            Self::Fails => {
                format!("{file} cannot be used as last read, and a start would fail: \"limiter validate\" says why")
            }
            Self::TakesNothing => {
                format!(
                    "{file} is gone or empty as last read, and a start would do without all that it said: put it back"
                )
            }
            Self::MayFail => format!(
                "{file} could not be put in force as last read, and a start may fail as well: \"limiter status\" says why"
            ),
        }
    }
}

/// What of a file differs after it was written or replaced: device, inode, length and time of the last change.
/// `None` when it cannot be looked at.
pub type Stamp = Option<(u64, u64, u64, i64, i64)>;

/// Of the file itself, behind all symbolic links.
pub fn stamp(path: &Path) -> Stamp {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.len(), metadata.ctime(), metadata.ctime_nsec()))
}

/// Tells when a file is worth reading again: it is another than the one that was read, and has held still since the
/// last look, so that a file is not read while it is being written.
#[derive(Debug)]
pub struct FileWatch {
    path: PathBuf,
    read: Stamp,
    last: Stamp,
}

impl FileWatch {
    /// Starts with the file as it is: to be made before it is read for the first time.
    pub fn new(path: PathBuf) -> Self {
        let read = stamp(&path);
        Self { path, read, last: read }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// To be called at intervals.
    pub fn has_settled(&mut self) -> bool {
        let now = stamp(&self.path);
        let still = now == self.last;
        self.last = now;
        still && now != self.read
    }

    /// To be called before the file is read.
    pub fn mark_read(&mut self) {
        self.last = stamp(&self.path);
        self.read = self.last;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_change_is_told_once_it_holds_still_and_once_only() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("file"), folder.path().join("other"));
        fs::write(&path, "one").unwrap();
        let mut watch = FileWatch::new(path.clone());
        let mut told = |change: &dyn Fn()| {
            change();
            let looks = [(); 3].map(|()| watch.has_settled());
            watch.mark_read();
            (looks, watch.has_settled())
        };
        let changed = ([false, true, true], false);
        assert_eq!(told(&|| ()), ([false; 3], false));
        // Of another length, so that a clock with a coarse tick does not matter.
        assert_eq!(told(&|| fs::write(&path, "three").unwrap()), changed);
        assert_eq!(told(&|| fs::remove_file(&path).unwrap()), changed);
        fs::write(&other, "elsewhere").unwrap();
        assert_eq!(told(&|| symlink(&other, &path).unwrap()), changed);
        assert_eq!(told(&|| fs::write(&other, "written behind the link").unwrap()), changed);
    }

    #[test]
    fn a_file_that_goes_on_changing_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "").unwrap();
        let mut watch = FileWatch::new(path.clone());
        for len in 1..5 {
            fs::write(&path, "x".repeat(len)).unwrap();
            assert!(!watch.has_settled());
        }
        assert!(watch.has_settled());
    }
}

//! An archive that the kernel unpacks as its first file system: cpio, format "newc" (the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst).

use std::{
    collections::BTreeSet,
    fs,
    path::{Component, Path},
};

use anyhow::{Context as _, Result, bail};

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

#[derive(Debug, Default)]
pub(super) struct Initramfs {
    archive: Vec<u8>,
    folders: BTreeSet<String>,
    entries: usize,
}

impl Initramfs {
    /// A copy of a file of the host.
    pub(super) fn copy(&mut self, from: &Path, to: &str) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("read {}", from.display()))?;
        self.file(to, &content)
    }

    /// `path` is absolute, and every file is a program.
    pub(super) fn file(&mut self, path: &str, content: &[u8]) -> Result<()> {
        let parent = Path::new(path).parent().with_context(|| format!("{path} has no folder"))?;
        self.folder(&parent.to_string_lossy())?;
        self.entry(path, PROGRAM, content)
    }

    /// A folder, and those it is in.
    pub(super) fn folder(&mut self, path: &str) -> Result<()> {
        let mut folder = String::new();
        for component in Path::new(path).components() {
            match component {
                Component::RootDir => continue,
                Component::Normal(name) => {
                    folder.push('/');
                    folder.push_str(&name.to_string_lossy());
                }
                Component::Prefix(_) | Component::CurDir | Component::ParentDir => bail!("{path} is no plain path"),
            }
            if self.folders.insert(folder.clone()) {
                self.entry(&folder, FOLDER, &[])?;
            }
        }
        Ok(())
    }

    pub(super) fn finish(mut self) -> Result<Vec<u8>> {
        self.entry("/TRAILER!!!", 0, &[])?;
        Ok(self.archive)
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        let name = path.trim_start_matches('/');
        let size = u32::try_from(content.len()).with_context(|| format!("{path} is too large for an archive"))?;
        self.entries += 1;
        // Inode, mode, owner, group, links, time, size, four device numbers, length of the name, checksum (none).
        let number = self.entries;
        let header = format!(
            "070701{number:08x}{mode:08x}{0:08x}{0:08x}{1:08x}{0:08x}{size:08x}{0:08x}{0:08x}{0:08x}{0:08x}{2:08x}{0:08x}",
            0,
            1,
            name.len() + 1
        );
        self.archive.extend(header.as_bytes());
        self.archive.extend(name.as_bytes());
        self.archive.push(0);
        self.pad();
        self.archive.extend(content);
        self.pad();
        Ok(())
    }

    fn pad(&mut self) {
        self.archive.resize(self.archive.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_come_once_and_before_what_is_in_them() {
        let mut initramfs = Initramfs::default();
        for path in ["/a/b/one", "/a/b/two"] {
            initramfs.file(path, b"12345").expect("a plain path");
        }
        let archive = initramfs.finish().expect("it is small");
        let mut names = Vec::new();
        let mut at = 0;
        while at < archive.len() {
            let header = std::str::from_utf8(&archive[at..at + 110]).expect("digits");
            let field = |index: usize| {
                let digits = &header[6 + index * 8..][..8];
                usize::from_str_radix(digits, 16).expect("hexadecimal")
            };
            let (size, name_len) = (field(6), field(11));
            let name = &archive[at + 110..][..name_len - 1];
            names.push(String::from_utf8(name.to_vec()).expect("a name"));
            at = (at + 110 + name_len).next_multiple_of(4);
            assert_eq!(&archive[at..at + size], if size == 0 { &b""[..] } else { b"12345" });
            at = (at + size).next_multiple_of(4);
        }
        assert_eq!(names, ["a", "a/b", "a/b/one", "a/b/two", "TRAILER!!!"]);
    }
}

//! Reading the files that an operator names.

use std::{
    fs::OpenOptions,
    io::{self, ErrorKind, Read as _},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use nix::libc::{O_NONBLOCK, makedev};

/// More than any policy or key file has.
const MAX_LEN: u64 = 1 << 30;

/// The text of a regular file. Nothing else is waited for: a pipe in the place of a policy must not hold up reloads.
pub fn read_text(path: &Path) -> io::Result<String> {
    // Opening a pipe waits for a writer else.
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    // The null device is an empty file to whoever names it.
    let is_null = metadata.file_type().is_char_device() && metadata.rdev() == makedev(1, 3);
    if !metadata.is_file() && !is_null {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut text = String::new();
    file.take(MAX_LEN + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_LEN {
        return Err(ErrorKind::FileTooLarge.into());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::net::UnixListener};

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn only_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "text").unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        mkfifo(&at("pipe"), Mode::S_IRWXU).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        for name in ["file", "link"] {
            assert_eq!(read_text(&at(name)).unwrap(), "text", "{name}");
        }
        assert_eq!(read_text(Path::new("/dev/null")).unwrap(), "");
        for (path, kind) in [
            (at("pipe"), Some(ErrorKind::InvalidInput)),
            (at("socket"), None),
            ("/dev/zero".into(), Some(ErrorKind::InvalidInput)),
            (at(""), Some(ErrorKind::IsADirectory)),
            (at("nothing"), Some(ErrorKind::NotFound)),
        ] {
            let error = read_text(&path).unwrap_err();
            assert!(kind.is_none_or(|kind| error.kind() == kind), "{}: {error}", path.display());
        }
    }
}

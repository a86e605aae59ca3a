//! bpf-linker: the one in PATH, or the one that `setup` builds and keeps for all clones of a user.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::{process, workspace};

pub(crate) const VERSION: &str = "0.13.0";
/// The LLVM that `setup` builds bpf-linker with: Debian's Rust and Rust 1.95 to 1.97 emit its bitcode.
pub(crate) const LLVM_MAJOR: u32 = 22;

#[derive(Clone, Debug)]
pub(crate) struct Linker {
    pub(crate) path: PathBuf,
    /// Unknown when the program does not show it; such a linker is tried.
    pub(crate) llvm_major: Option<u32>,
}

impl Linker {
    /// LLVM reads the bitcode of its own and of every older release.
    pub(crate) fn reads(&self, bitcode_llvm_major: u32) -> bool {
        self.llvm_major.is_none_or(|own| own >= bitcode_llvm_major)
    }
}

/// Every linker that starts, the kept one first: its LLVM is known without a look inside.
pub(crate) fn installed() -> impl Iterator<Item = Linker> {
    let kept =
        kept_folder().ok().map(|folder| Linker { path: folder.join("bin/bpf-linker"), llvm_major: Some(LLVM_MAJOR) });
    let in_path = std::iter::once_with(|| process::find_program("bpf-linker"))
        .flatten()
        .map(|path| Linker { llvm_major: llvm_inside(&path), path });
    kept.into_iter().chain(in_path).filter(|linker| starts(&linker.path))
}

/// Builds bpf-linker against Debian's LLVM and keeps it, since it takes a minute.
pub(crate) fn install() -> Result<PathBuf> {
    let folder = kept_folder()?;
    let mut cargo = Command::new(workspace::host_cargo());
    cargo
        .args(install_arguments())
        .arg("--root")
        .arg(&folder)
        .env("LLVM_PREFIX", llvm_prefix())
        // A target folder of the caller's would be filled with, and locked by, a foreign build.
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("RUSTFLAGS");
    process::run(&mut cargo, "build bpf-linker")?;
    Ok(folder.join("bin/bpf-linker"))
}

/// What a person would type instead.
pub(crate) fn install_command() -> String {
    let root = kept_folder().map_or_else(|_| String::new(), |folder| format!(" --root {}", folder.display()));
    format!("LLVM_PREFIX={} cargo {}{root}", llvm_prefix(), install_arguments().join(" "))
}

fn install_arguments() -> Vec<String> {
    vec![
        "install".into(),
        "--locked".into(),
        format!("bpf-linker@{VERSION}"),
        "--no-default-features".into(),
        "--features".into(),
        format!("llvm-{LLVM_MAJOR}"),
    ]
}

fn llvm_prefix() -> String {
    format!("/usr/lib/llvm-{LLVM_MAJOR}")
}

/// A cache of the user, not of the clone: it outlives `cargo clean` and serves the next clone.
fn kept_folder() -> Result<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME")
        .filter(|cache| !cache.is_empty())
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .context("find the cache folder of this user: neither XDG_CACHE_HOME nor HOME is set")?;
    Ok(cache.join("edge-limiter").join(format!("bpf-linker-{VERSION}")))
}

/// A linker whose LLVM library has been removed does not start.
fn starts(linker: &Path) -> bool {
    linker.is_file() && process::output(Command::new(linker).arg("--version"), "ask bpf-linker for its version").is_ok()
}

/// bpf-linker does not print the LLVM it is built with, but it carries the name of the shared library, or, linked
/// statically, LLVM's signature of the bitcode it writes. grep finds either in a large file at once.
fn llvm_inside(linker: &Path) -> Option<u32> {
    let mut grep = Command::new("grep");
    grep.args(["-a", "-o", "-m1", "-E", r"LLVM(\.so\.|-)?[0-9]{2}\.[0-9]"]).arg(linker).env("LC_ALL", "C");
    llvm_major_named(&process::output(&mut grep, "look for the LLVM inside bpf-linker").ok()?)
}

fn llvm_major_named(signature: &str) -> Option<u32> {
    let from_number = signature.trim_start_matches(|character: char| !character.is_ascii_digit());
    from_number.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_llvm_of_either_kind_of_linker() {
        assert_eq!(llvm_major_named("LLVM.so.22.1\n"), Some(22));
        assert_eq!(llvm_major_named("LLVM23.1\nLLVM23.1\n"), Some(23));
        assert_eq!(llvm_major_named(""), None);
    }

    #[test]
    fn a_newer_linker_reads_older_bitcode_but_not_the_reverse() {
        let linker = Linker { path: PathBuf::new(), llvm_major: Some(22) };
        assert!(linker.reads(21));
        assert!(linker.reads(22));
        assert!(!linker.reads(23));
    }
}

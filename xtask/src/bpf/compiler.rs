//! Compilers that could build the XDP program: they bring the source of `core`, and are new enough for this workspace.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::process;

#[derive(Clone, Debug)]
pub(crate) struct Compiler {
    /// What a person calls it.
    name: String,
    rustc: PathBuf,
    cargo: PathBuf,
    release: String,
    llvm_major: u32,
}

impl Compiler {
    pub(crate) fn rustc(&self) -> &Path {
        &self.rustc
    }

    pub(crate) fn cargo(&self) -> &Path {
        &self.cargo
    }

    pub(crate) fn llvm_major(&self) -> u32 {
        self.llvm_major
    }
}

impl fmt::Display for Compiler {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "rustc {} ({}, LLVM {})", self.release, self.name, self.llvm_major)
    }
}

/// Every suitable compiler, the preferred first: rustup's, then Debian's.
pub(crate) fn installed() -> impl Iterator<Item = Compiler> {
    rustup_toolchains().into_iter().chain(debian()).filter_map(|candidate| candidate.examine().ok().flatten())
}

struct Candidate {
    name: String,
    sysroot: PathBuf,
}

impl Candidate {
    /// None when the source of `core` is missing or the compiler is too old.
    fn examine(&self) -> Result<Option<Compiler>> {
        let rustc = self.sysroot.join("bin/rustc");
        let cargo = self.sysroot.join("bin/cargo");
        let core = self.sysroot.join("lib/rustlib/src/rust/library/core/Cargo.toml");
        if !rustc.is_file() || !cargo.is_file() || !core.is_file() {
            return Ok(None);
        }
        let version = process::output(Command::new(&rustc).arg("-vV"), "ask a compiler for its version")?;
        let (Some(release), Some(llvm_major)) = (field(&version, "release: "), llvm_major(&version)) else {
            return Ok(None);
        };
        if major_minor(release) < major_minor(env!("CARGO_PKG_RUST_VERSION")) {
            return Ok(None);
        }
        Ok(Some(Compiler { name: self.name.clone(), rustc, cargo, release: release.to_owned(), llvm_major }))
    }
}

/// Toolchains are run by their own path, not through rustup's proxies: what rustup has put into the environment of
/// `cargo xtask` would select the wrong one.
fn rustup_toolchains() -> Vec<Candidate> {
    let home = env::var_os("RUSTUP_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".rustup")));
    let Some(entries) = home.and_then(|home| fs::read_dir(home.join("toolchains")).ok()) else {
        return Vec::new();
    };
    let mut found: Vec<_> = entries
        .flatten()
        .map(|entry| Candidate {
            name: format!("rustup {}", entry.file_name().to_string_lossy()),
            sysroot: entry.path(),
        })
        .collect();
    found.sort_by_key(|candidate| (!candidate.name.contains("nightly"), candidate.name.clone()));
    found
}

fn debian() -> Option<Candidate> {
    Path::new("/usr/bin/rustc").exists().then(|| Candidate { name: "Debian packages".into(), sysroot: "/usr".into() })
}

fn field<'a>(version: &'a str, name: &str) -> Option<&'a str> {
    version.lines().find_map(|line| line.strip_prefix(name))
}

fn llvm_major(version: &str) -> Option<u32> {
    field(version, "LLVM version: ")?.split('.').next()?.parse().ok()
}

fn major_minor(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(['.', '-']).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_a_compiler_says_of_itself() {
        let version = "rustc 1.97.0-nightly (e50aa6fba 2026-05-19)\nrelease: 1.97.0-nightly\nLLVM version: 22.1.4\n";
        assert_eq!(field(version, "release: "), Some("1.97.0-nightly"));
        assert_eq!(llvm_major(version), Some(22));
    }

    #[test]
    fn compares_releases_as_numbers() {
        assert!(major_minor("1.100.0") > major_minor("1.95"));
        assert_eq!(major_minor("1.97.0-nightly"), Some((1, 97)));
        assert!(major_minor("1.94.1") < major_minor("1.95"));
    }
}

//! The compiler and linker of the XDP program, by either of two ways: a rustup toolchain with the source of `core`, or
//! Debian's packages of Rust. bpf-linker is the one in PATH, or is built against Debian's LLVM.

use std::process::Command;

use anyhow::{Context as _, Result};

use super::{
    Item,
    apt::{Apt, apt_command},
};
use crate::{
    bpf::{linker, toolchain},
    process,
};

const COMPILER_PACKAGES: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];
const LLVM_PACKAGES: [&str; 3] = ["llvm-22-dev", "libpolly-22-dev", "libzstd-dev"];

#[derive(Debug)]
pub(super) struct BpfToolchain;

impl Item for BpfToolchain {
    fn name(&self) -> String {
        "BPF toolchain".into()
    }

    fn check(&self) -> Result<String> {
        Ok(toolchain::find()?.to_string())
    }

    fn install(&self, apt: &mut Apt) -> Result<()> {
        if !toolchain::has_compiler_for_kept_linker()
            && let Err(no_package) = apt.install(&COMPILER_PACKAGES)
        {
            println!("no compiler from Debian's packages ({no_package:#}); trying rustup");
            add_rustup_nightly()?;
        }
        // A linker in PATH may fit the compiler that has just come.
        if toolchain::find().is_ok() {
            return Ok(());
        }
        apt.install(&LLVM_PACKAGES)?;
        let linker = linker::install()?;
        println!("built {} and kept it for all clones", linker.display());
        Ok(())
    }

    fn remedy(&self) -> Vec<String> {
        vec![
            "# Debian:".into(),
            format!("sudo {}", apt_command(&[COMPILER_PACKAGES, LLVM_PACKAGES].concat())),
            linker::install_command(),
            "# or, with rustup, and a bpf-linker whose LLVM is as new as the toolchain's:".into(),
            format!("rustup {}", NIGHTLY.join(" ")),
            "cargo binstall bpf-linker".into(),
        ]
    }
}

const NIGHTLY: [&str; 7] = ["toolchain", "install", "nightly", "--profile", "minimal", "--component", "rust-src"];

fn add_rustup_nightly() -> Result<()> {
    let rustup = process::find_program("rustup").context("rustup is not in PATH either")?;
    process::run(Command::new(rustup).args(NIGHTLY), "add the source of `core` to a rustup nightly toolchain")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llvm_packages_are_of_the_llvm_that_the_linker_is_built_with() {
        assert_eq!(LLVM_PACKAGES[0], format!("llvm-{}-dev", linker::LLVM_MAJOR));
        assert_eq!(LLVM_PACKAGES[1], format!("libpolly-{}-dev", linker::LLVM_MAJOR));
    }
}

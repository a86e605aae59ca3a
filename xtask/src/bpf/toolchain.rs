//! The pair of compiler and linker that builds the XDP program.

use std::{env, ffi::OsString, fmt, path::Path, process::Command};

use anyhow::{Result, bail};

use crate::bpf::{
    compiler::{self, Compiler},
    linker::{self, Linker},
};

#[derive(Debug)]
pub(crate) struct BpfToolchain {
    compiler: Compiler,
    linker: Linker,
}

impl BpfToolchain {
    pub(crate) fn linker(&self) -> &Path {
        &self.linker.path
    }

    /// cargo of this toolchain, free of what the cargo that runs `xtask` has put into the environment: each of these
    /// variables would select the host's compiler or pass the host's flags.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = Command::new(self.compiler.cargo());
        for variable in [
            "CARGO",
            "CARGO_BUILD_TARGET",
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_TARGET_DIR",
            "LD_LIBRARY_PATH",
            "RUSTC_WORKSPACE_WRAPPER",
            "RUSTDOC",
            "RUSTFLAGS",
            "RUSTUP_TOOLCHAIN",
        ] {
            command.env_remove(variable);
        }
        command
            // The toolchain's own folder comes first, for `cargo clippy` to find the driver of the same release.
            .env("PATH", path_after(self.compiler.cargo().parent()))
            .env("RUSTC", self.compiler.rustc())
            // Empty, not unset: this also overrules a wrapper that a configuration file names.
            .env("RUSTC_WRAPPER", "")
            // `-Zbuild-std` and the atomic intrinsics, on a toolchain that is not a nightly.
            .env("RUSTC_BOOTSTRAP", "1");
        command
    }

    pub(crate) fn has_clippy(&self) -> bool {
        let bin = self.compiler.cargo().parent();
        bin.is_some_and(|bin| bin.join("cargo-clippy").is_file() && bin.join("clippy-driver").is_file())
    }
}

impl fmt::Display for BpfToolchain {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} and {}", self.compiler, self.linker.path.display())
    }
}

fn path_after(first: Option<&Path>) -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = first.map(Path::to_path_buf).into_iter().chain(env::split_paths(&path));
    env::join_paths(folders).unwrap_or(path)
}

/// The first compiler with a linker that reads its bitcode; otherwise, what is missing.
pub(crate) fn find() -> Result<BpfToolchain> {
    let linkers: Vec<Linker> = linker::installed().collect();
    let mut compilers = Vec::new();
    for compiler in compiler::installed() {
        if let Some(linker) = linkers.iter().find(|linker| linker.reads(compiler.llvm_major())) {
            return Ok(BpfToolchain { compiler, linker: linker.clone() });
        }
        compilers.push(compiler);
    }
    match (compilers.first(), linkers.first()) {
        (None, None) => bail!("no compiler with the source of `core`, and no bpf-linker"),
        (None, Some(_)) => bail!("no compiler with the source of `core`"),
        (Some(compiler), None) => bail!("{compiler} is there, but no bpf-linker that starts"),
        (Some(compiler), Some(linker)) => {
            bail!("{} is older than the bitcode of {compiler}", linker.path.display())
        }
    }
}

/// Whether a compiler is there that a linker built by `setup` would fit.
pub(crate) fn has_compiler_for_kept_linker() -> bool {
    compiler::installed().any(|compiler| compiler.llvm_major() <= linker::LLVM_MAJOR)
}

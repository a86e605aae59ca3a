//! Where things are in this clone, and the cargo that builds them for the host.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

#[derive(Debug)]
pub(crate) struct Workspace {
    root: PathBuf,
    target: PathBuf,
}

impl Workspace {
    pub(crate) fn find() -> Result<Self> {
        // The value at run time comes first: with a shared CARGO_TARGET_DIR, the binary of one clone may be run in another.
        let manifest =
            env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
        let root = manifest
            .parent()
            .with_context(|| format!("find the workspace: {} has no parent folder", manifest.display()))?
            .to_path_buf();
        let target = match env::var_os("CARGO_TARGET_DIR") {
            Some(target) => std::path::absolute(target).context("make CARGO_TARGET_DIR absolute")?,
            None => root.join("target"),
        };
        Ok(Self { root, target })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// The agent that `build` leaves behind.
    pub(crate) fn limiter(&self) -> PathBuf {
        self.target.join("release/limiter")
    }

    /// The XDP object that `build` leaves behind.
    pub(crate) fn bpf_object(&self) -> PathBuf {
        self.target.join("bpf/limiter.bpf.o")
    }

    /// The host's cargo, in the root of the workspace.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = Command::new(host_cargo());
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", &self.target);
        command
    }
}

/// The cargo that runs this xtask, so that one toolchain builds both.
pub(crate) fn host_cargo() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| "cargo".into(), PathBuf::from)
}

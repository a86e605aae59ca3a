//! Commands that load XDP programs and make network namespaces need root; this says so before they start.

use std::{fs, os::unix::fs::MetadataExt as _};

use anyhow::{Result, bail};

pub(crate) fn is_root() -> bool {
    // The kernel gives /proc/self the effective user of the process.
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

pub(crate) fn require_root(subcommand: &str) -> Result<()> {
    if is_root() {
        return Ok(());
    }
    bail!(
        "`cargo xtask {subcommand}` needs root, to make network namespaces and to load the XDP program; \
         run: sudo -E env \"PATH=$PATH\" cargo xtask {subcommand}"
    );
}

//! The Redis module redis-cell, built from its crate: what `cargo xtask bench store` measures scripts beside.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::{process, workspace, workspace::Workspace};

const VERSION: &str = "0.2.2";

/// Where the module is, built once for each version.
pub(crate) fn build(workspace: &Workspace) -> Result<PathBuf> {
    let folder = workspace.target().join(format!("bench/redis-cell-{VERSION}"));
    let module = folder.join("build/release/libredis_cell.so");
    if module.exists() {
        return Ok(module);
    }
    // Cargo builds a dependency as a library of Rust, which needs that of the toolchain beside it. Built as a package of its own
    // it is a library of C, as Redis loads them; so its source is fetched first.
    let project = folder.join("project");
    fs::create_dir_all(project.join("src")).with_context(|| format!("make {}", project.display()))?;
    let manifest = format!(
        "[package]\nname = \"fetch\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[dependencies]\nredis-cell = \"={VERSION}\"\n\n[workspace]\n"
    );
    write(&project.join("Cargo.toml"), &manifest)?;
    write(&project.join("src/lib.rs"), "")?;
    let sources = folder.join("sources");
    let mut vendor = cargo(&project);
    process::captured(vendor.args(["vendor", "--quiet"]).arg(&sources), "fetch redis-cell")?;
    let source = sources.join("redis-cell");
    let manifest = source.join("Cargo.toml");
    let text = fs::read_to_string(&manifest).with_context(|| format!("read {}", manifest.display()))?;
    if !text.contains("[workspace]") {
        write(&manifest, &(text + "\n[workspace]\n"))?;
    }
    let mut build = cargo(&source);
    build.args(["rustc", "--quiet", "--release", "--lib", "--crate-type", "cdylib", "--target-dir"]);
    // Its warnings are its authors' affair.
    build.arg(folder.join("build")).env("RUSTFLAGS", "--cap-lints=allow");
    process::run(&mut build, "build redis-cell")?;
    Ok(module)
}

fn cargo(folder: &Path) -> Command {
    let mut cargo = Command::new(workspace::host_cargo());
    cargo.current_dir(folder).env_remove("CARGO_TARGET_DIR");
    cargo
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

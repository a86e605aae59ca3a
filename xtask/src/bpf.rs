//! Building the XDP program. Which compiler and linker do it is decided here and in the two files below, and nowhere else.

mod compiler;
pub(crate) mod linker;
pub(crate) mod toolchain;

use std::{env, ffi::OsString, fs, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, bail};

use crate::{bpf::toolchain::BpfToolchain, process, workspace::Workspace};

const PACKAGE: &str = "limiter-ebpf";
/// The binary of that package that benchmarks use.
const BENCH: &str = "limiter-bench";
const TARGET: &str = "bpfel-unknown-none";

/// Builds the XDP object and puts it at `Workspace::bpf_object`.
pub(crate) fn build(workspace: &Workspace) -> Result<()> {
    let toolchain = toolchain::find()?;
    let operation = format!("build the XDP program with {toolchain}");
    process::run(cargo(workspace, &toolchain, "build")?.args(["--bin", PACKAGE]), &operation)?;
    keep_object(workspace)
}

/// Builds the programs that benchmarks measure with, and tells where they are.
pub(crate) fn build_bench(workspace: &Workspace) -> Result<PathBuf> {
    let toolchain = toolchain::find()?;
    let operation = format!("build the programs of the benchmarks with {toolchain}");
    process::run(cargo(workspace, &toolchain, "build")?.args(["--bin", BENCH]), &operation)?;
    Ok(built(workspace, BENCH))
}

/// The same build with every warning of the XDP crate an error: with clippy where the toolchain has it (Debian's has not).
pub(crate) fn lint(workspace: &Workspace) -> Result<()> {
    let toolchain = toolchain::find()?;
    // `cargo rustc` gives the flag to the last crate only. In RUSTFLAGS it would rebuild `core` each time lint and
    // build take turns.
    let subcommand = if toolchain.has_clippy() { "clippy" } else { "rustc" };
    for binary in [PACKAGE, BENCH] {
        let mut command = cargo(workspace, &toolchain, subcommand)?;
        let operation = format!("check {binary} with {toolchain}");
        process::run(command.args(["--bin", binary, "--", "-Dwarnings"]), &operation)?;
    }
    Ok(())
}

fn cargo(workspace: &Workspace, toolchain: &BpfToolchain, subcommand: &str) -> Result<Command> {
    let mut command = toolchain.cargo();
    command
        .current_dir(workspace.root())
        .arg(subcommand)
        .args(["--release", "--package", PACKAGE, "--target", TARGET, "-Zbuild-std=core"])
        // Its own target folder, so that it never waits for the lock of a host build, nor makes one wait.
        .arg("--target-dir")
        .arg(workspace.target().join("bpf"))
        .env("CARGO_ENCODED_RUSTFLAGS", rustflags(toolchain, env::consts::ARCH)?)
        // bpf-linker does the link-time optimisation.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        // An incremental build cuts the program in pieces, from which the linker makes another one than without.
        .env("CARGO_INCREMENTAL", "0");
    Ok(command)
}

/// Encoded, and not RUSTFLAGS, since a path may hold spaces.
fn rustflags(toolchain: &BpfToolchain, host_arch: &str) -> Result<OsString> {
    if !matches!(host_arch, "x86_64" | "aarch64") {
        bail!("build the XDP program: this host is {host_arch}; x86_64 and aarch64 are supported");
    }
    let mut linker = OsString::from("-Clinker=");
    linker.push(toolchain.linker());
    let flags = [
        "--cfg".into(),
        format!("bpf_target_arch=\"{host_arch}\"").into(),
        linker,
        // BTF is made from full debug information, that of dependencies included.
        "-Cdebuginfo=2".into(),
        "-Clink-arg=--btf".into(),
        // v3 has the compare-and-swap that the buckets need; kernel 5.12 and later run it.
        "-Ctarget-cpu=v3".into(),
    ];
    Ok(flags.join(&OsString::from("\x1f")))
}

fn built(workspace: &Workspace, binary: &str) -> PathBuf {
    workspace.target().join("bpf").join(TARGET).join("release").join(binary)
}

fn keep_object(workspace: &Workspace) -> Result<()> {
    let built = built(workspace, PACKAGE);
    let kept = workspace.bpf_object();
    let object = fs::read(&built).with_context(|| format!("read the XDP object {}", built.display()))?;
    // An unchanged file keeps its time stamp, so that the agent is not built again for nothing.
    if fs::read(&kept).is_ok_and(|before| before == object) {
        return Ok(());
    }
    fs::write(&kept, object).with_context(|| format!("write the XDP object {}", kept.display()))
}

//! `cargo xtask run`: the limiter at work, in namespaces of its own or with a configuration of this host.

use std::{ffi::OsString, os::unix::process::CommandExt as _, path::Path, process::Command};

use anyhow::{Context as _, Result};

use crate::{
    build, privilege,
    setup::{self, Requirement},
    test,
    workspace::Workspace,
};

pub(crate) fn run(workspace: &Workspace, config: Option<&Path>, arguments: &[OsString]) -> Result<()> {
    match config {
        Some(config) => run_agent(workspace, config, arguments),
        None => run_demo(workspace, arguments),
    }
}

fn run_demo(workspace: &Workspace, arguments: &[OsString]) -> Result<()> {
    privilege::require_root("run")?;
    setup::ensure(&[Requirement::BpfToolchain, Requirement::Bpffs, Requirement::Ip])?;
    build::build_with(workspace, &["--package", "limiter-tests", "--bin", "demo"])?;
    let mut demo = Command::new(workspace.target().join("release/demo"));
    replace_this_process(test::with_environment(workspace, &mut demo).args(arguments), "start the demonstration")
}

/// Not root-only: the request layer works alone, without root. The agent itself says what it may not do.
fn run_agent(workspace: &Workspace, config: &Path, arguments: &[OsString]) -> Result<()> {
    setup::ensure(&[Requirement::BpfToolchain])?;
    build::build(workspace)?;
    let mut agent = Command::new(workspace.limiter());
    replace_this_process(agent.arg("run").arg("--config").arg(config).args(arguments), "start the agent")
}

/// Signals and the exit code then are those of the program, with nothing between it and the terminal.
fn replace_this_process(command: &mut Command, operation: &str) -> Result<()> {
    let program = Path::new(command.get_program()).display().to_string();
    Err(command.exec()).with_context(|| format!("{operation}: {program}"))
}

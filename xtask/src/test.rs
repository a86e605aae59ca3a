//! `cargo xtask test`: every test of the workspace, those that need root and real programs included.

use std::{env, ffi::OsString, process::Command};

use anyhow::Result;

use crate::{
    build, privilege, process,
    setup::{self, Requirement},
    workspace::Workspace,
};

pub(crate) fn run(workspace: &Workspace, arguments: &[OsString]) -> Result<()> {
    privilege::require_root("test")?;
    setup::ensure(&Requirement::TESTS)?;
    build::build(workspace)?;
    if arguments.is_empty() {
        // The arithmetic once more where an overflow panics; a release build lets it wrap.
        process::run(runner(workspace).args(["--package", "limiter-common"]), "run the tests with overflow checks")?;
    }
    // Release: the dependencies are those that `build` has compiled, and tests under load drive the agent at its
    // real speed instead of waiting for their own client.
    let mut everything = runner(workspace);
    everything.args(["--release", "--workspace", "--exclude", "limiter-ebpf"]).args(arguments);
    process::run(&mut everything, "run the tests")?;
    if arguments.is_empty() {
        let mut doctests = workspace.cargo();
        doctests.args(["test", "--release", "--doc", "--workspace", "--exclude", "limiter-ebpf", "--exclude", "xtask"]);
        process::run(with_environment(workspace, &mut doctests), "run the documentation tests")?;
    }
    Ok(())
}

fn runner(workspace: &Workspace) -> Command {
    let mut cargo = workspace.cargo();
    if setup::is_met(Requirement::Nextest) {
        cargo.args(["nextest", "run"]);
    } else {
        cargo.arg("test");
    }
    with_environment(workspace, &mut cargo);
    cargo
}

/// Tests and benchmarks find the agent and the XDP object by these.
pub(crate) fn with_environment<'a>(workspace: &Workspace, command: &'a mut Command) -> &'a mut Command {
    command.env("LIMITER_BIN", workspace.limiter()).env(build::OBJECT_VARIABLE, workspace.bpf_object());
    if env::var_os("CI").is_some_and(|value| value == "true") {
        // A test that skips itself there would be a test that nobody runs.
        command.env("LIMITER_TEST_NO_SKIP", "1");
    }
    command
}

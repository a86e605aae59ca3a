//! `cargo xtask build`: the XDP object, then the agent with the object inside.

use anyhow::Result;

use crate::{
    bpf, process,
    setup::{self, Requirement},
    workspace::Workspace,
};

/// The build script of limiter-user embeds the object that this variable names.
pub(crate) const OBJECT_VARIABLE: &str = "LIMITER_BPF_OBJECT";

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    setup::ensure(&[Requirement::BpfToolchain])?;
    build(workspace)?;
    println!("built {}", workspace.limiter().display());
    Ok(())
}

/// For commands that have ensured their requirements.
pub(crate) fn build(workspace: &Workspace) -> Result<()> {
    build_with(workspace, &[])
}

/// Builds more in the same run of cargo, which then compiles what is common to all of it once.
pub(crate) fn build_with(workspace: &Workspace, more: &[&str]) -> Result<()> {
    bpf::build(workspace)?;
    let mut cargo = workspace.cargo();
    cargo.args(["build", "--release", "--package", "limiter-user", "--bin", "limiter"]).args(more);
    process::run(cargo.env(OBJECT_VARIABLE, workspace.bpf_object()), "build the agent")
}

//! `cargo xtask lint`: what can be judged without running anything.

use anyhow::Result;

use crate::{
    bpf, process, rules, schema,
    setup::{self, Requirement},
    steps::{self, Step, step},
    workspace::Workspace,
};

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    setup::ensure(&[Requirement::BpfToolchain])?;
    steps::run(list(workspace))
}

pub(crate) fn list(workspace: &Workspace) -> Vec<Step<'_>> {
    vec![
        step("format", || process::run(workspace.cargo().args(["fmt", "--all", "--check"]), "check the format")),
        // limiter-ebpf compiles for the host too, so this covers it wherever the BPF toolchain has no clippy.
        step("clippy", || {
            let mut cargo = workspace.cargo();
            cargo.args(["clippy", "--workspace", "--all-targets", "--", "-Dwarnings"]);
            process::run(&mut cargo, "run clippy")
        }),
        step("clippy for BPF", || bpf::lint(workspace)),
        step("map schema", || schema::check(workspace)),
        step("repository rules", || rules::check(workspace)),
    ]
}

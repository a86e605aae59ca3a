//! `cargo xtask ci`: the gate, one list of steps.

use anyhow::Result;

use crate::{
    lint, privilege, process,
    setup::{self, Requirement},
    steps::{self, step},
    test,
    workspace::Workspace,
};

pub(crate) fn run(workspace: &Workspace, advisories: bool) -> Result<()> {
    privilege::require_root("ci")?;
    setup::ensure(&Requirement::TESTS)?;
    setup::ensure(&[Requirement::Deny])?;
    let mut list = lint::list(workspace);
    list.push(step("documentation", || {
        let mut cargo = workspace.cargo();
        cargo.args(["doc", "--workspace", "--no-deps", "--document-private-items"]).env("RUSTDOCFLAGS", "-Dwarnings");
        process::run(&mut cargo, "build the documentation")
    }));
    list.push(step("licences and sources of dependencies", || {
        let mut cargo = workspace.cargo();
        cargo.args(["deny", "--workspace", "check", "bans", "licenses", "sources"]);
        process::run(&mut cargo, "check the dependencies")
    }));
    if advisories {
        list.push(step("advisories", || {
            process::run(
                workspace.cargo().args(["deny", "check", "advisories"]),
                "check the dependencies for advisories",
            )
        }));
    }
    list.push(step("benchmarks compile", || {
        let mut cargo = workspace.cargo();
        cargo.args(["check", "--release", "--package", "limiter-tests", "--benches"]);
        process::run(test::with_environment(workspace, &mut cargo), "compile the benchmarks")
    }));
    list.push(step("tests", || test::run(workspace, &[])));
    steps::run(list)
}

//! `cargo xtask chaos`: the tests of random faults, for as long as one likes.

use std::{
    hash::{BuildHasher as _, RandomState},
    process::Command,
};

use anyhow::Result;

use crate::{
    build, privilege, process,
    setup::{self, Requirement},
    steps::{self, step},
    test,
    workspace::Workspace,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How long faults go on in each test
    #[arg(long, value_name = "N", default_value_t = 3)]
    minutes: u64,
    /// The same seed makes the same choices; which one it was is printed
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    privilege::require_root("chaos")?;
    setup::ensure(&[Requirement::BpfToolchain, Requirement::RedisServer])?;
    build::build(workspace)?;
    let seed = options.seed.unwrap_or_else(|| RandomState::new().hash_one("chaos"));
    println!("seed {seed}, {} minutes a test", options.minutes);
    let tests = |name: &str| -> Command {
        let mut cargo = workspace.cargo();
        cargo.args([
            "test",
            "--release",
            "--package",
            "limiter-tests",
            "--test",
            name,
            "--",
            "--nocapture",
            "::chaos::",
        ]);
        cargo.env("LIMITER_CHAOS_SEED", seed.to_string());
        cargo.env("LIMITER_CHAOS_SECONDS", options.minutes.saturating_mul(60).to_string());
        test::with_environment(workspace, &mut cargo);
        cargo
    };
    let run = |name, what| process::run(&mut tests(name), what);
    steps::run(vec![
        step("the way to Redis", || run("store", "let messages be lost")),
        step("agents and Redis", || run("outages", "kill agents and Redis")),
    ])
}

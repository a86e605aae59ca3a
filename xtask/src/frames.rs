//! `cargo xtask frames`: the comparison of tests/suite/frames.rs, with as many frames as one likes.

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
    /// How many frames
    #[arg(long, value_name = "N", default_value_t = 10_000_000)]
    count: u64,
    /// The same seed makes the same frames
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Compare this frame alone, in hexadecimal digits, and say what it must get
    #[arg(long, value_name = "HEX", conflicts_with_all = ["count", "seed"])]
    frame: Option<String>,
}

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    privilege::require_root("frames")?;
    setup::ensure(&[Requirement::BpfToolchain, Requirement::Bpffs])?;
    build::build(workspace)?;
    let mut cargo = workspace.cargo();
    cargo.args(["test", "--release", "--workspace", "--exclude", "limiter-ebpf", "--test", "frames"]);
    cargo.args(["--", "--nocapture", "--exact", "frames_get_the_verdict_that_the_parser_says"]);
    match &options.frame {
        Some(frame) => cargo.env("LIMITER_FRAME", frame),
        None => {
            cargo.env("LIMITER_FRAMES", options.count.to_string()).env("LIMITER_FRAMES_SEED", options.seed.to_string())
        }
    };
    let compare = || process::run(test::with_environment(workspace, &mut cargo), "compare frames");
    steps::run(vec![step("frames", compare)])
}

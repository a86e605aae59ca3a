//! `cargo xtask fuzz`: libFuzzer on the targets of fuzz/, through cargo-fuzz.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, bail};

use crate::{
    process,
    setup::{self, Requirement},
    workspace::Workspace,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Name of the target; without one, the targets are listed
    target: Option<String>,
    /// How long to look
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// Afterwards keep only inputs of the corpus that reach something which no smaller one reaches
    #[arg(long)]
    minimize: bool,
}

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let targets = targets(&workspace.root().join("fuzz/fuzz_targets"))?;
    let Some(target) = &options.target else {
        for target in targets {
            println!("{target}");
        }
        return Ok(());
    };
    if !targets.contains(target) {
        bail!("there is no fuzz target {target:?}; fuzz/fuzz_targets has: {}", targets.join(", "));
    }
    setup::ensure(&[Requirement::Fuzz])?;
    let seconds = format!("-max_total_time={}", options.seconds);
    cargo_fuzz(workspace, &["run", target, "--", &seconds, "-max_len=1024"], &format!("fuzz {target}"))?;
    if options.minimize {
        cargo_fuzz(workspace, &["cmin", target], &format!("minimize the corpus of {target}"))?;
    }
    Ok(())
}

fn cargo_fuzz(workspace: &Workspace, arguments: &[&str], operation: &str) -> Result<()> {
    let [subcommand, rest @ ..] = arguments else { bail!("{operation}: no subcommand") };
    let mut cargo = workspace.cargo();
    // cargo-fuzz wants the flags of a nightly compiler; a stable one has them too.
    cargo.args(["fuzz", subcommand]).args(rest).env("RUSTC_BOOTSTRAP", "1");
    // A profile of its own: the sanitizer's runtime and code coverage.
    cargo.env("CARGO_TARGET_DIR", workspace.target().join("fuzz"));
    process::run(&mut cargo, operation)
}

fn targets(folder: &Path) -> Result<Vec<String>> {
    let mut targets = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("list the fuzz targets in {}", folder.display()))? {
        let path = entry?.path();
        targets.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
    }
    targets.sort();
    Ok(targets)
}

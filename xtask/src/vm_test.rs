//! `cargo xtask vm-test`: tests of the XDP program on the kernel of Debian 12, in a virtual machine that has nothing but
//! an initramfs. Nothing of it is installed on the host; target/vm keeps what was downloaded.

mod debian;
mod guest;
mod initramfs;
mod machine;

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, bail};

use crate::{
    bpf, process,
    setup::{self, Requirement},
    test,
    workspace::Workspace,
};

/// Binaries of the package limiter-tests, and what they do not run there.
const BINARIES: &[Binary] = &[
    Binary {
        name: "xdp",
        // An emulated CPU says nothing about time.
        skip: &["nanoseconds_a_packet"],
    },
    Binary { name: "frames", skip: &[] },
    Binary { name: "lifecycle", skip: &[] },
];
const PACKAGE: &str = "limiter-tests";
/// What `tests/suite/xdp.rs` prints before the number.
const INSTRUCTIONS: &str = "verified instructions:";
/// A kernel accepts a million. A tenth of that leaves room for verifiers that walk through more than this one.
const MAX_INSTRUCTIONS: u32 = 100_000;

struct Binary {
    name: &'static str,
    skip: &'static [&'static str],
}

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// End the machine after this time
    #[arg(long, value_name = "N", default_value_t = 1200)]
    seconds: u64,
    /// How many random frames the machine compares
    #[arg(long, value_name = "N", default_value_t = 30_000)]
    frames: u32,
    /// Run only tests whose name holds one of these words; for the number of instructions alone, `instructions`
    filters: Vec<String>,
}

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    setup::ensure(&[Requirement::BpfToolchain, Requirement::Ip, Requirement::Qemu])?;
    let kernel = debian::kernel(workspace)?;
    bpf::build(workspace)?;
    let executables = build_tests(workspace)?;
    let guest = guest::Guest { workspace, kernel: &kernel, executables: &executables, options };
    let archive = guest.archive()?;
    let image = workspace.target().join("vm/initramfs.cpio");
    std::fs::write(&image, archive).with_context(|| format!("write {}", image.display()))?;
    let time = Duration::from_secs(options.seconds);
    let lines = machine::run(&kernel.image, &image, time)?;
    judge(&lines, options)
}

fn build_tests(workspace: &Workspace) -> Result<Vec<(&'static Binary, PathBuf)>> {
    let mut cargo = workspace.cargo();
    // Everything that `cargo xtask test` builds with, so that one build serves both.
    cargo.args(["test", "--release", "--no-run", "--workspace", "--exclude", "limiter-ebpf"]);
    cargo.args(BINARIES.iter().flat_map(|binary| ["--test", binary.name]));
    cargo.args(["--message-format", "json-render-diagnostics"]);
    let messages = process::captured(test::with_environment(workspace, &mut cargo), "build the tests")?;
    BINARIES
        .iter()
        .map(|binary| {
            let path = executable(&messages, binary.name);
            Ok((binary, path.with_context(|| format!("cargo built no test named {} in {PACKAGE}", binary.name))?))
        })
        .collect()
}

/// Where cargo's messages say that a test is.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    messages.lines().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_it = message["target"]["name"] == name && message["target"]["kind"][0] == "test";
        message["executable"].as_str().filter(|_| is_it).map(PathBuf::from)
    })
}

/// What the machine has printed, as a verdict.
fn judge(lines: &[String], options: &Options) -> Result<()> {
    let ends: BTreeMap<&str, &str> =
        lines.iter().filter_map(|line| line.strip_prefix(guest::ENDED)?.trim().split_once(' ')).collect();
    for Binary { name, .. } in BINARIES {
        match ends.get(name) {
            Some(&"0") => {}
            Some(code) => bail!("the tests of {name} failed there with exit code {code}; what they said is above"),
            None => bail!("the machine ended before the tests of {name} did; what it said last is above"),
        }
    }
    let counts: Vec<u32> = lines.iter().filter_map(|line| instructions(line)).collect();
    let Some(most) = counts.iter().max() else {
        if options.filters.is_empty() {
            bail!("no test printed {INSTRUCTIONS:?}");
        }
        println!("passed; the number of instructions was not asked for");
        return Ok(());
    };
    if *most >= MAX_INSTRUCTIONS {
        bail!("the verifier of that kernel walks through {most} instructions; the bound is {MAX_INSTRUCTIONS}");
    }
    println!("passed; the verifier of that kernel walks through {most} instructions at most, of {MAX_INSTRUCTIONS}");
    Ok(())
}

fn instructions(line: &str) -> Option<u32> {
    let (_, rest) = line.split_once(INSTRUCTIONS)?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: Options = Options { seconds: 1, frames: 1, filters: Vec::new() };

    fn lines(instructions: u32, code: u8) -> Vec<String> {
        let ended = |name: &str, code| format!("{}{name} {code}", guest::ENDED);
        let first = format!("test everything ... verified instructions:  {instructions}  everything");
        let mut lines = vec![first, "verified instructions:    12  nothing".to_owned()];
        lines.extend(BINARIES.iter().map(|binary| ended(binary.name, if binary.name == "xdp" { code } else { 0 })));
        lines
    }

    #[test]
    fn passes_when_every_binary_has_passed_and_the_count_is_small() {
        judge(&lines(99_999, 0), &OPTIONS).expect("it passes");
        for (lines, complaint) in [
            (lines(100_000, 0), "100000"),
            (lines(50_000, 101), "101"),
            (lines(50_000, 0)[..3].to_vec(), "frames"),
            (lines(50_000, 0)[2..].to_vec(), "no test"),
        ] {
            let error = judge(&lines, &OPTIONS).expect_err(complaint).to_string();
            assert!(error.contains(complaint), "{error}");
        }
    }

    #[test]
    fn finds_executables_in_the_messages_of_cargo() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"kind":["bench"],"name":"xdp"},"executable":"/t/bench"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"kind":["test"],"name":"xdp"},"executable":"/t/xdp-1"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"lib"},"executable":null}"#,
        );
        assert_eq!(executable(messages, "xdp"), Some("/t/xdp-1".into()));
        assert_eq!(executable(messages, "lib"), None);
    }
}

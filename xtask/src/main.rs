//! `cargo xtask …`: every command that a developer, CI or a packager types. One file a subcommand.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line program; the terminal is its interface")]

mod bench;
mod bpf;
mod build;
mod chaos;
mod ci;
mod frames;
mod fuzz;
mod lint;
mod package;
mod privilege;
mod process;
mod redis_cell;
mod rules;
mod run;
mod schema;
mod setup;
mod source_text;
mod steps;
mod test;
mod vm_test;
mod workspace;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// Commands for building, testing and packaging edge-limiter.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Find what building and testing need, install what is missing, say what was done
    Setup,
    /// Build target/release/limiter with the XDP object inside
    Build,
    /// Show the limiter at work in network namespaces of its own, or run a configuration on this host (root)
    Run {
        /// Run the agent with this configuration instead of the demonstration
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Passed on to the demonstration (--seconds N), or to the agent
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Build everything and run all tests, those with network namespaces and real programs included (root)
    Test {
        /// Passed on to the test runner, for instance a filter
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Run random and mutated frames in the kernel, and compare each with what the parser says (root)
    Frames(frames::Options),
    /// Let agents share counters while messages are lost, late and cut and everybody is killed at random, and compare the counts
    /// (root)
    Chaos(chaos::Options),
    /// Fuzz a target of fuzz/fuzz_targets; what is found is kept in fuzz/corpus and fuzz/artifacts
    Fuzz(fuzz::Options),
    /// Run the tests of the XDP program on the kernel of Debian 12, in a virtual machine
    VmTest(vm_test::Options),
    /// Run a benchmark of tests/benches; it prints a table and writes target/bench/NAME.json
    Bench {
        /// Name of the benchmark; without one, the benchmarks are listed
        name: Option<String>,
        /// Passed on to the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Check format, clippy, the map schema and the repository rules
    Lint,
    /// Run the whole gate: lint, docs, licences and sources of dependencies, tests (root)
    Ci {
        /// Also ask the advisory database about the dependencies (needs network)
        #[arg(long)]
        advisories: bool,
    },
    /// Hold the map schema of limiter-common against tests/golden/map_schema.txt
    Schema {
        #[command(flatten)]
        action: schema::Action,
    },
    /// Build target/package/edge-limiter-VERSION-ARCH.tar.gz
    Package,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without the backtrace that RUST_BACKTRACE would add: the chain of causes says what to do.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    match command {
        Command::Setup => setup::run(),
        Command::Build => build::run(&workspace),
        Command::Run { config, arguments } => run::run(&workspace, config.as_deref(), &arguments),
        Command::Test { arguments } => test::run(&workspace, &arguments),
        Command::Frames(options) => frames::run(&workspace, &options),
        Command::Chaos(options) => chaos::run(&workspace, &options),
        Command::Fuzz(options) => fuzz::run(&workspace, &options),
        Command::VmTest(options) => vm_test::run(&workspace, &options),
        Command::Bench { name, arguments } => bench::run(&workspace, name.as_deref(), &arguments),
        Command::Lint => lint::run(&workspace),
        Command::Ci { advisories } => ci::run(&workspace, advisories),
        Command::Schema { action } => schema::run(&workspace, &action),
        Command::Package => package::run(&workspace),
    }
}

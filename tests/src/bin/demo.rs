//! What `cargo xtask run` starts: the limiter at work on real traffic, in network namespaces of its own.
#![forbid(unsafe_code)]
#![expect(clippy::print_stderr, reason = "a command-line program; the terminal is its interface")]

use std::{process::ExitCode, time::Duration};

use clap::Parser;
use limiter_tests::demo::{self, Ending};

/// Shows the rate limiter at work: a real agent and XDP program, and real clients, in network namespaces of their own.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask run")]
struct Arguments {
    /// How long the clients send
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u64).range(demo::SECONDS))]
    seconds: u64,
}

/// What a shell reports of a program that was interrupted.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match demo::run(Duration::from_secs(arguments.seconds)) {
        Ok(Ending::AsExpected) => ExitCode::SUCCESS,
        Ok(Ending::NotAsExpected) => ExitCode::FAILURE,
        Ok(Ending::Interrupted) => {
            eprintln!("\ninterrupted; what was made is removed");
            ExitCode::from(INTERRUPTED)
        }
        Err(error) => {
            // Without the backtrace that RUST_BACKTRACE would add: the chain of causes says what to do.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

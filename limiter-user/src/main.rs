//! Wiring: what was typed, to the command that does it, to an exit code.
#![forbid(unsafe_code)]

use limiter_user::{cli::Cli, exit::Exit};

fn main() -> Exit {
    match Cli::from_arguments(std::env::args_os()) {
        Ok(cli) => cli.run(),
        Err(exit) => exit,
    }
}

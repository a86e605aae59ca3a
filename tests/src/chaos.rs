//! How long tests of random faults last, and by which numbers: a few seconds and others in each run, unless
//! `cargo xtask chaos` says otherwise.

use std::{
    env,
    hash::{BuildHasher as _, RandomState},
    str::FromStr,
    time::Duration,
};

const SECONDS: &str = "LIMITER_CHAOS_SECONDS";

/// Of the test's choices: what it does and when, and what becomes of each message. When a message arrives the machine decides.
pub fn seed() -> u64 {
    number("LIMITER_CHAOS_SEED").unwrap_or_else(|| RandomState::new().hash_one("chaos"))
}

/// How long faults go on.
pub fn duration(usually: Duration) -> Duration {
    number(SECONDS).map_or(usually, Duration::from_secs)
}

/// Whether there is time for what takes some.
pub fn is_long() -> bool {
    number::<u64>(SECONDS).is_some()
}

/// What a test found out, where somebody looks: `cargo xtask chaos` shows what passing tests print.
#[expect(clippy::print_stdout, reason = "the table of numbers is what a long run is made for")]
pub fn tell(what: &str) {
    println!("{what}");
}

fn number<N: FromStr>(variable: &str) -> Option<N> {
    let text = env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, and not a number")))
}

//! Waiting for a condition, never for a time.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Asks until the answer is `Some`, or panics with `what` after `within`.
#[expect(clippy::disallowed_methods, reason = "tests run by the real clock")]
pub fn eventually<T>(what: &str, within: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + within;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {within:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

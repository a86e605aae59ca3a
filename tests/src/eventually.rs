//! Waiting for a condition.

use std::{thread, time::Duration};

use limiter_user::clock::Stopwatch;

const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(2);

/// Asks until there is an answer.
///
/// # Panics
///
/// When there is none within ten seconds.
#[track_caller]
pub fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let waiting = Stopwatch::start();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(waiting.elapsed() < PATIENCE, "still not true after {PATIENCE:?}: {what}");
        thread::park_timeout(PAUSE);
    }
}

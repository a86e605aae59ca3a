//! Waiting for a condition, never for a time.

use std::{fmt::Debug, thread, time::Duration};

use limiter_user::clock::Stopwatch;

/// Asks until the answer is `Some`, or panics with `what` after `within`.
pub fn until<T>(what: &str, within: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let waiting = Stopwatch::start();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(waiting.elapsed() < within, "not within {within:?}: {what}");
        thread::park_timeout(Duration::from_millis(5));
    }
}

/// Asks every few milliseconds until `condition` holds. Panics with what it last said.
pub async fn eventually<T, E: Debug>(deadline: Duration, mut condition: impl AsyncFnMut() -> Result<T, E>) -> T {
    let mut last = None;
    let asked = async {
        loop {
            match condition().await {
                Ok(value) => return value,
                Err(error) => last = Some(error),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    match tokio::time::timeout(deadline, asked).await {
        Ok(value) => value,
        Err(_elapsed) => panic!("not within {deadline:?}: {last:?}"),
    }
}

//! Windows begin at multiples of their length since 1970, on every node: a test that lasts from one into the next counts in two.

use std::{thread, time::Duration};

use limiter_user::clock::{Clock as _, SharedClock, Stopwatch};

pub const HOUR: Duration = Duration::from_secs(3_600);
pub const DAY: Duration = Duration::from_secs(24 * 3_600);
/// As long as a test may take, on a machine that is busy.
const ROOM: Duration = Duration::from_secs(60);

/// Waits for the next window of this length, if the one of now is about to end.
pub fn await_room(window: Duration) {
    let left = left_of(window);
    if left >= ROOM {
        return;
    }
    let waiting = Stopwatch::start();
    while let Some(wait) = left.checked_sub(waiting.elapsed()).filter(|wait| !wait.is_zero()) {
        thread::park_timeout(wait);
    }
}

fn left_of(window: Duration) -> Duration {
    let (now_us, window_us) = (u128::from(SharedClock::new().now().get()), window.as_micros());
    let left_us = window_us - now_us % window_us;
    Duration::from_micros(u64::try_from(left_us).unwrap_or(u64::MAX))
}

//! That Redis has lost what it was told: it was flushed, restarted without its data, or replaced.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use crate::clock::Stopwatch;

/// For so long after a loss was noticed, counters are made what this node heard of them. By then all nodes have noticed: each
/// looks at the marks of its servers with every heartbeat.
const LATELY: Duration = Duration::from_secs(3);

/// Of one node. Cheap to clone; all clones know the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Losses(Arc<Noticed>);

#[derive(Debug, Default)]
struct Noticed {
    count: AtomicU64,
    last: Mutex<Option<Stopwatch>>,
}

impl Losses {
    /// Returns whether this is news. If it is not, the time goes on that began before: what counters are made meanwhile may look
    /// like a loss itself, and would never end it.
    pub(super) fn notice(&self) -> bool {
        let mut last = self.0.last.lock();
        let is_news = last.is_none_or(|last| last.elapsed() >= LATELY);
        if is_news {
            *last = Some(Stopwatch::start());
            self.0.count.fetch_add(1, Ordering::Relaxed);
        }
        is_news
    }

    /// How many have been noticed.
    pub(super) fn count(&self) -> u64 {
        self.0.count.load(Ordering::Relaxed)
    }

    /// Whether one was noticed lately.
    pub(super) fn are_recent(&self) -> bool {
        self.count() > 0 && self.0.last.lock().is_some_and(|last| last.elapsed() < LATELY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noticed_again_and_again_is_one_loss() {
        let losses = Losses::default();
        assert!(!losses.are_recent());
        assert_eq!([losses.notice(), losses.clone().notice(), losses.notice()], [true, false, false]);
        assert!(losses.are_recent() && losses.count() == 1);
        let begun = losses.0.last.lock().unwrap();
        losses.notice();
        assert!(!losses.0.last.lock().unwrap().is_after(&begun), "it ends when it would have ended");
    }
}

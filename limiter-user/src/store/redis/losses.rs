//! That Redis has lost what it was told: it was flushed, restarted without its data, or replaced.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::clock::Stopwatch;

/// For so long after a loss was noticed, counters are made what this node heard of them. By then all nodes have noticed: each
/// looks at the marks of its servers with every heartbeat.
const LATELY: Duration = Duration::from_secs(3);

/// Of one node. Cheap to clone; all clones know the same.
#[derive(Clone, Debug)]
pub(super) struct Losses(Arc<Noticed>);

#[derive(Debug)]
struct Noticed {
    count: AtomicU64,
    /// What `until_us` counts from.
    clock: Stopwatch,
    /// How long the last loss is a recent one; 0 where none is.
    until_us: AtomicU64,
}

impl Default for Losses {
    fn default() -> Self {
        Self(Arc::new(Noticed { count: AtomicU64::new(0), clock: Stopwatch::start(), until_us: AtomicU64::new(0) }))
    }
}

impl Losses {
    /// A server was found to have lost what it had: by its mark, or as another run of it.
    pub(super) fn notice(&self) {
        self.0.until_us.store(self.end_us(), Ordering::Relaxed);
        self.0.count.fetch_add(1, Ordering::Relaxed);
    }

    /// A counter was found to be less than what this node had heard of it. Returns whether this is news. If it is not, the time
    /// goes on that began before: what counters are made meanwhile may look like a loss itself, and would never end it.
    pub(super) fn suspect(&self) -> bool {
        // Of several at once, one is news.
        let is_news = !self.are_recent()
            && self.0.until_us.compare_exchange(0, self.end_us(), Ordering::Relaxed, Ordering::Relaxed).is_ok();
        self.0.count.fetch_add(u64::from(is_news), Ordering::Relaxed);
        is_news
    }

    /// How many have been noticed.
    pub(super) fn count(&self) -> u64 {
        self.0.count.load(Ordering::Relaxed)
    }

    /// Whether one was noticed lately. Reads no clock where none was.
    pub(super) fn are_recent(&self) -> bool {
        let until_us = self.0.until_us.load(Ordering::Relaxed);
        if until_us == 0 {
            return false;
        }
        let is_recent = self.elapsed_us() < until_us;
        if !is_recent {
            // Unless another one was noticed meanwhile.
            match self.0.until_us.compare_exchange(until_us, 0, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) | Err(_) => {}
            }
        }
        is_recent
    }

    fn elapsed_us(&self) -> u64 {
        u64::try_from(self.0.clock.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn end_us(&self) -> u64 {
        self.elapsed_us().saturating_add(u64::try_from(LATELY.as_micros()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn until(losses: &Losses) -> u64 {
        losses.0.until_us.load(Ordering::Relaxed)
    }

    /// As if so much time had passed.
    fn end(losses: &Losses) {
        losses.0.until_us.store(losses.elapsed_us().max(1), Ordering::Relaxed);
        while losses.are_recent() {}
    }

    #[test]
    fn what_is_suspected_again_and_again_is_one_loss() {
        let losses = Losses::default();
        assert!(!losses.are_recent());
        assert_eq!([losses.suspect(), losses.clone().suspect(), losses.suspect()], [true, false, false]);
        assert!(losses.are_recent() && losses.count() == 1);
        let begun = until(&losses);
        losses.suspect();
        assert_eq!(until(&losses), begun, "it ends when it would have ended");
        end(&losses);
        assert_eq!([losses.suspect(), losses.suspect()], [true, false], "another one");
        assert_eq!(losses.count(), 2);
    }

    #[test]
    fn what_is_lost_again_at_once_is_another_loss() {
        let losses = Losses::default();
        losses.notice();
        let begun = until(&losses);
        assert!(!losses.suspect(), "what counters are made after it is no news");
        while losses.elapsed_us() == 0 || until(&losses) == begun {
            losses.notice();
        }
        assert!(losses.count() > 1 && losses.are_recent(), "its time begins anew");
        end(&losses);
        assert!(!losses.are_recent());
    }
}

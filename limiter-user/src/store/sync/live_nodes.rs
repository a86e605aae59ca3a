//! How many nodes share the counters, from what heartbeats are answered.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use crate::clock::Stopwatch;

/// A node counts as alive for so many heartbeats.
const LASTS: u32 = 3;

#[derive(Debug)]
pub(super) struct LiveNodes {
    /// Of this run of this node: two agents that are called alike are two.
    name: String,
    interval: Duration,
    clock: Stopwatch,
    last_beat: Option<Duration>,
    count: u32,
    /// When it was last heard that they are so many.
    confirmed: Duration,
}

impl LiveNodes {
    pub(super) fn new(node: &str, interval: Duration) -> Self {
        let name = format!("{node}/{:016x}", RandomState::new().hash_one(node));
        let clock = Stopwatch::start();
        Self { name, interval, clock, last_beat: None, count: 1, confirmed: Duration::ZERO }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn lasts(&self) -> Duration {
        self.interval * LASTS
    }

    pub(super) fn is_due(&self) -> bool {
        self.last_beat.is_none_or(|last| self.clock.elapsed().saturating_sub(last) >= self.interval)
    }

    /// A heartbeat was answered. Returns how many nodes to reckon with.
    pub(super) fn heard(&mut self, count: u32) -> u32 {
        let now = self.clock.elapsed();
        self.last_beat = Some(now);
        self.reckon(count, now)
    }

    /// Fewer than before are believed when nobody has been missed for a short time only: a Redis that came back empty knows
    /// nobody until everybody has spoken.
    fn reckon(&mut self, count: u32, now: Duration) -> u32 {
        let count = count.max(1);
        if count >= self.count || now.saturating_sub(self.confirmed) >= self.lasts() {
            (self.count, self.confirmed) = (count, now);
        }
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_nodes_count_at_once_and_fewer_when_it_has_lasted() {
        let mut nodes = LiveNodes::new("a", Duration::from_secs(1));
        let at = Duration::from_millis;
        for (now, heard, expected) in [
            (0, 0, 1),
            (100, 4, 4),
            (1000, 4, 4),
            // Redis came back empty, and the others speak again.
            (2000, 1, 4),
            (3000, 4, 4),
            // One has gone.
            (4000, 3, 4),
            (5000, 3, 4),
            (6000, 3, 3),
            (6500, 5, 5),
        ] {
            assert_eq!(nodes.reckon(heard, at(now)), expected, "{now}");
        }
        assert_ne!(nodes.name(), LiveNodes::new("a", Duration::from_secs(1)).name());
    }
}

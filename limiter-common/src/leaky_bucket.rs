//! The leaky bucket: requests leave one after the other, at a constant rate, and wait for their turn.
//!
//! The state is that of a token bucket ([`Bucket`]): the instant of the next free turn. A request that comes before it
//! waits until then. What would be one too many in the queue, or would wait too long, is denied.

use crate::{
    bucket::{Bucket, BucketError},
    sliding_window::Outcome,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeakyBucket {
    /// One unit leaves at once, and the queue waits: the burst of the bucket is the queue's length and one.
    bucket: Bucket,
    max_delay_us: u64,
}

impl LeakyBucket {
    /// `limit` units leave every `window_us`, `queue` of them may wait, each for at most `max_delay_us`.
    pub fn new(limit: u64, window_us: u64, queue: u64, max_delay_us: u64) -> Result<Self, BucketError> {
        let burst = queue.checked_add(1).ok_or(BucketError::TooSlow)?;
        Ok(Self { bucket: Bucket::new(limit, window_us, burst)?, max_delay_us })
    }

    /// The same queue, of which one unit leaves every `interval_ns`.
    pub fn with_interval(&self, interval_ns: u64) -> Result<Self, BucketError> {
        let bucket = Bucket::from_interval(interval_ns, self.bucket.burst())?;
        Ok(Self { bucket, max_delay_us: self.max_delay_us })
    }

    #[inline]
    pub const fn bucket(&self) -> &Bucket {
        &self.bucket
    }

    pub const fn max_delay_us(&self) -> u64 {
        self.max_delay_us
    }

    /// Whether `cost` units can be queued at `now_ns`. Changes nothing.
    #[inline]
    pub fn check(&self, tat_ns: u64, now_ns: u64, cost: u64) -> Outcome {
        if cost > self.bucket.burst() {
            return Outcome::Never;
        }
        let place = self.bucket.fill_ns() - self.bucket.increment_ns(cost);
        let most = place.min(self.max_delay_us.saturating_mul(1000));
        match self.bucket.ahead_ns(tat_ns, now_ns).saturating_sub(most) {
            0 => Outcome::Allowed,
            // A question of cost 0 needs no place and no turn.
            _ if cost == 0 => Outcome::Allowed,
            too_much_ns => Outcome::Denied { retry_after_us: too_much_ns.div_ceil(1000) },
        }
    }

    /// How long a request that comes at `now_ns` waits for its turn, rounded up to a microsecond.
    #[inline]
    pub const fn delay_us(&self, tat_ns: u64, now_ns: u64) -> u64 {
        self.bucket.ahead_ns(tat_ns, now_ns).div_ceil(1000)
    }

    /// Units that could be queued at once and would be allowed, each in its turn.
    #[inline]
    pub fn remaining(&self, tat_ns: u64, now_ns: u64) -> u64 {
        let ahead = self.bucket.ahead_ns(tat_ns, now_ns);
        let by_delay = match self.max_delay_us.saturating_mul(1000).checked_sub(ahead) {
            // The one that waits longest still has the whole of its turn after that.
            Some(left_ns) => left_ns / self.bucket.interval_ns() + 1,
            None => 0,
        };
        self.bucket.remaining(tat_ns, now_ns).min(by_delay)
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_leaves_at_once_and_the_queue_waits_its_turn() {
        let bucket = LeakyBucket::new(10, 1_000_000, 3, 10_000_000).unwrap();
        let (mut tat, now) = (0, 5_000_000_000);
        for turn in 0..4 {
            assert_eq!(bucket.remaining(tat, now), 4 - turn);
            assert_eq!((bucket.check(tat, now, 1), bucket.delay_us(tat, now)), (Outcome::Allowed, turn * 100_000));
            tat = bucket.bucket().taken(tat, now, 1);
        }
        assert_eq!(bucket.check(tat, now, 1), Outcome::Denied { retry_after_us: 100_000 });
        assert_eq!(bucket.check(tat, now, 5), Outcome::Never);
    }

    #[test]
    fn a_delay_above_the_bound_is_denied_though_the_queue_has_room() {
        let bucket = LeakyBucket::new(10, 1_000_000, 100, 150_000).unwrap();
        let (mut tat, now) = (0, 5_000_000_000);
        for remaining in [2, 1] {
            assert_eq!((bucket.check(tat, now, 1), bucket.remaining(tat, now)), (Outcome::Allowed, remaining));
            tat = bucket.bucket().taken(tat, now, 1);
        }
        assert_eq!(bucket.check(tat, now, 1), Outcome::Denied { retry_after_us: 50_000 });
    }

    proptest! {
        /// The model is the queue itself: a list of turns.
        #[test]
        fn queues_as_a_list_of_turns_does(
            interval_us in 1u64..2_000, queue in 0u64..20, max_delay_us in 0u64..30_000,
            pauses in prop::collection::vec(0u64..3_000, 1..200),
        ) {
            let bucket = LeakyBucket::new(1, interval_us, queue, max_delay_us).unwrap();
            let (mut tat, mut now_us) = (0, 1 << 40);
            let mut turns: Vec<u64> = Vec::new();
            for pause in pauses {
                now_us += pause;
                let turn_at = |now_us: u64, turns: &[u64]| turns.last().map_or(now_us, |last| now_us.max(last + interval_us));
                let fits = |now_us: u64, turns: &[u64]| {
                    let turn = turn_at(now_us, turns);
                    turn - now_us <= queue * interval_us && turn - now_us <= max_delay_us
                };
                let now = now_us * 1000;
                match bucket.check(tat, now, 1) {
                    Outcome::Allowed => {
                        prop_assert!(fits(now_us, &turns));
                        let turn = turn_at(now_us, &turns);
                        prop_assert_eq!(bucket.delay_us(tat, now), turn - now_us);
                        prop_assert!(bucket.remaining(tat, now) >= 1);
                        turns.push(turn);
                        tat = bucket.bucket().taken(tat, now, 1);
                    }
                    Outcome::Denied { retry_after_us } => {
                        prop_assert!(!fits(now_us + retry_after_us - 1, &turns) && fits(now_us + retry_after_us, &turns));
                        prop_assert_eq!(bucket.remaining(tat, now), 0);
                    }
                    Outcome::Never => prop_assert!(false),
                }
            }
        }
    }
}

//! The algorithm of a rule, and which fields belong to which.

use std::time::Duration;

use limiter_common::{
    bucket::{Bucket, BucketError},
    leaky_bucket::LeakyBucket,
    sliding_log,
    sliding_window::{BurstFactor, Window},
};

use super::{MAX_CEILING, burst_factor};
use crate::{
    config::{Value, units},
    policy::raw::RawRule,
    store::Algorithm,
};

/// Gateways do not wait longer for an answer than this.
const MAX_DELAY: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    SlidingWindow,
    FixedWindow,
    TokenBucket,
    LeakyBucket,
    SlidingLog,
}

impl Word {
    const ALL: &[(&'static str, Self)] = &[
        ("sliding_window", Self::SlidingWindow),
        ("token_bucket", Self::TokenBucket),
        ("fixed_window", Self::FixedWindow),
        ("sliding_log", Self::SlidingLog),
        ("leaky_bucket", Self::LeakyBucket),
    ];
}

/// What makes an algorithm of a limit.
#[derive(Debug)]
pub(super) struct Shape {
    word: Word,
    /// `None` when it is missing or wrong.
    pub(super) window_us: Option<u64>,
    pub(super) burst_factor: BurstFactor,
    /// How many may wait, and for how long at most.
    queue: u64,
    max_delay_us: Option<u64>,
}

impl Shape {
    pub(super) fn read(raw: &RawRule<'_>, window_us: Option<u64>) -> Self {
        let word = match &raw.algorithm {
            None => Some(Word::SlidingWindow),
            Some(value) => value.one_of(Word::ALL),
        };
        // A word that is none says nothing about other fields.
        let refuse = |value: &Option<Value<'_>>, reason: &str| {
            if let (Some(value), Some(_)) = (value, word) {
                value.error(reason);
            }
        };
        let is_leaky = word == Some(Word::LeakyBucket);
        if is_leaky {
            refuse(&raw.burst_factor, "has no meaning for leaky_bucket: burst says how many requests may wait");
            if raw.burst.is_none() {
                raw.place.error_in("burst", "is missing: leaky_bucket needs to know how many requests may wait");
            }
        } else {
            refuse(&raw.burst, "is a field of leaky_bucket: other algorithms have burst_factor");
            refuse(&raw.max_delay, "is a field of leaky_bucket: other algorithms hold no answer");
        }
        let burst = raw.burst.as_ref().filter(|_| is_leaky);
        let max_delay = raw.max_delay.as_ref().filter(|_| is_leaky);
        Self {
            word: word.unwrap_or(Word::SlidingWindow),
            window_us,
            burst_factor: raw.burst_factor.as_ref().and_then(burst_factor).unwrap_or(BurstFactor::ONE),
            queue: burst.and_then(|value| value.within(1..=MAX_CEILING)).unwrap_or(1),
            max_delay_us: max_delay.and_then(max_delay_us),
        }
    }

    /// The name of the algorithm, if what it counts cannot be taken ahead of its use: buckets and logs weigh a unit by the time
    /// at which it was taken.
    pub(super) fn without_leases(&self) -> Option<&'static str> {
        let is_window = matches!(self.word, Word::SlidingWindow | Word::FixedWindow);
        let name = Word::ALL.iter().find(|(_, word)| *word == self.word).map(|(name, _)| *name);
        name.filter(|_| !is_window)
    }

    /// `most` is the limit times the burst factor.
    pub(super) fn algorithm(&self, limit: u64, window_us: u64, most: u64) -> Result<Algorithm, String> {
        let refused = |error: BucketError| error.to_string();
        let window = Window { window_us, ceiling: most };
        Ok(match self.word {
            Word::SlidingWindow => Algorithm::SlidingWindow(window),
            Word::FixedWindow => Algorithm::FixedWindow(window),
            Word::SlidingLog if most > sliding_log::MAX_CEILING => {
                let bound = sliding_log::MAX_CEILING;
                return Err(format!("sliding_log remembers each admission, {bound} at most: use sliding_window"));
            }
            Word::SlidingLog => Algorithm::SlidingLog(window),
            Word::TokenBucket => {
                Algorithm::TokenBucket { bucket: Bucket::new(limit, window_us, most).map_err(refused)?, window_us }
            }
            Word::LeakyBucket => {
                // Without a bound of its own, a request waits as long as the queue is.
                let longest_us = u64::try_from(MAX_DELAY.as_micros()).unwrap_or(u64::MAX);
                let max_delay_us = self.max_delay_us.unwrap_or(longest_us);
                let bucket = LeakyBucket::new(limit, window_us, self.queue, max_delay_us).map_err(refused)?;
                Algorithm::LeakyBucket { bucket, window_us }
            }
        })
    }
}

fn max_delay_us(value: &Value<'_>) -> Option<u64> {
    let delay = value.parsed("a duration such as \"2s\"", units::duration)?;
    if !(Duration::from_millis(1)..=MAX_DELAY).contains(&delay) {
        value.error("a delay is at least 1 ms and at most 60 s: gateways do not wait longer for an answer");
        return None;
    }
    u64::try_from(delay.as_micros()).ok()
}

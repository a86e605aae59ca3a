//! How far Redis' clock is ahead of this host's, from answers that hold Redis' time.

use limiter_common::time::UnixMicros;

/// Every answer was given between sending and receiving, so it bounds the offset from both sides. Answers narrow the
/// bounds; an offset that is inside them is left alone, so that a slow network does not shake the clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct OffsetBounds {
    least_us: i64,
    most_us: i64,
    answers: u64,
}

impl Default for OffsetBounds {
    fn default() -> Self {
        Self { least_us: i64::MIN, most_us: i64::MAX, answers: 0 }
    }
}

impl OffsetBounds {
    /// `start` and `end` are this host's time when the question left and when the answer was there.
    pub(super) fn narrow(&mut self, redis_us: u64, start: UnixMicros, end: UnixMicros) {
        self.least_us = self.least_us.max(ahead(redis_us, end));
        self.most_us = self.most_us.min(ahead(redis_us, start));
        self.answers += 1;
    }

    /// The offset to set, if `current` cannot be right. `None` also when the answers contradict each other: a clock
    /// moved between them, and the next ones will agree.
    pub(super) fn correct(&self, current: Option<i64>) -> Option<i64> {
        if self.answers == 0 || self.least_us > self.most_us {
            return None;
        }
        let inside = |offset: &i64| (self.least_us..=self.most_us).contains(offset);
        if current.as_ref().is_some_and(inside) {
            return None;
        }
        Some(self.least_us.midpoint(self.most_us))
    }
}

fn ahead(redis_us: u64, local: UnixMicros) -> i64 {
    let signed = |us: u64| i64::try_from(us).unwrap_or(i64::MAX);
    signed(redis_us).saturating_sub(signed(local.get()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bounds(answers: &[(u64, u64, u64)]) -> OffsetBounds {
        let mut bounds = OffsetBounds::default();
        for &(redis_us, start, end) in answers {
            bounds.narrow(redis_us, UnixMicros::new(start), UnixMicros::new(end));
        }
        bounds
    }

    #[test]
    fn the_first_answer_sets_the_middle_of_the_round_trip() {
        assert_eq!(bounds(&[(5_000, 1_000, 1_200)]).correct(None), Some(3_900));
        assert_eq!(bounds(&[(1_000, 5_000, 5_200)]).correct(None), Some(-4_100));
        assert_eq!(bounds(&[]).correct(None), None);
    }

    #[test]
    fn an_offset_that_the_answers_allow_stays() {
        assert_eq!(bounds(&[(5_000, 1_000, 1_200)]).correct(Some(3_801)), None);
        assert_eq!(bounds(&[(5_000, 1_000, 1_200)]).correct(Some(3_799)), Some(3_900));
        assert_eq!(bounds(&[(5_000, 1_000, 1_200)]).correct(Some(4_001)), Some(3_900));
    }

    #[test]
    fn several_answers_of_a_batch_narrow_the_bounds() {
        assert_eq!(bounds(&[(5_050, 1_000, 1_200), (5_150, 1_000, 1_200)]).correct(None), Some(4_000));
    }

    #[test]
    fn answers_that_contradict_each_other_change_nothing() {
        assert_eq!(bounds(&[(5_000, 1_000, 1_200), (9_000, 1_000, 1_200)]).correct(Some(0)), None);
    }
}

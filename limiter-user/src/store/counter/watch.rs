//! Who drew a conclusion from what a counter says, and what ends it.

use limiter_common::{sliding_log::Admission, sliding_window::Counts};

/// What may happen to a counter before somebody's conclusion does not hold any more, for the strictest of them: nothing
/// at all, or so much more being taken. Time that goes by ends none.
///
/// As small as it is, it fills what would be padding of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Watch(u16);

/// Of a bucket's time, 17 ms: what it may still take is counted in these, and what is taken is rounded up.
const GRAIN_NS_LOG2: u32 = 24;

impl Watch {
    pub(super) const NOBODY: Self = Self(0);
    const NOTHING: u16 = 1;

    pub(super) const fn is_kept(self) -> bool {
        self.0 != Self::NOBODY.0
    }

    /// `room` is in units, or for a bucket in nanoseconds; `None` where nothing may change.
    pub(super) fn keep(&mut self, room: Option<u64>, is_bucket: bool) {
        let grains = room.map_or(0, |room| if is_bucket { room >> GRAIN_NS_LOG2 } else { room });
        let watch = u16::try_from(grains).unwrap_or(u16::MAX).saturating_add(Self::NOTHING);
        if self.0 == Self::NOBODY.0 || watch < self.0 {
            self.0 = watch;
        }
    }

    /// Takes what is charged from what is left open, in the same units; `false` where that is too much, or all of it.
    pub(super) fn take(&mut self, cost: u64, is_bucket: bool) -> bool {
        let grains = if is_bucket { cost.div_ceil(1 << GRAIN_NS_LOG2) } else { cost };
        let left = u16::try_from(grains).ok().and_then(|grains| self.0.checked_sub(grains));
        match left {
            Some(left) if left > Self::NOTHING => {
                self.0 = left;
                true
            }
            Some(_) | None => false,
        }
    }
}

/// Equal for a counter to which nothing happened but that time went by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store) struct Print([u64; 4]);

impl Print {
    pub(super) const fn of_counts(counts: &Counts, window_us: u64) -> Self {
        Self([counts.index, counts.previous, counts.current, window_us])
    }

    /// With what the bucket was when somebody looked last: what becomes of a debt depends on it.
    pub(super) const fn of_bucket(tat_ns: u64, interval_ns: u64, fill_ns: u64, owed_ns: u64) -> Self {
        Self([tat_ns, interval_ns, fill_ns, owed_ns])
    }

    pub(super) fn of_log(admissions: impl Iterator<Item = Admission>) -> Self {
        let of_one = |[count, cost, first, last]: [u64; 4], admission: Admission| {
            let first = if count == 0 { admission.at_us } else { first };
            [count + 1, cost.wrapping_add(admission.cost), first, last.wrapping_mul(31).wrapping_add(admission.at_us)]
        };
        Self(admissions.fold([0; 4], of_one))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_strictest_of_those_who_watch_is_told_in_time() {
        let mut watch = Watch::NOBODY;
        watch.keep(Some(10), false);
        watch.keep(Some(5), false);
        watch.keep(Some(u64::MAX), false);
        for (cost, holds) in [(2, true), (2, true), (2, false)] {
            assert_eq!(watch.take(cost, false), holds, "{cost} of {watch:?}");
        }
        watch.keep(None, false);
        assert!(watch.is_kept() && !watch.take(1, false));
    }

    #[test]
    fn of_a_bucket_grains_are_counted_and_never_too_few() {
        let mut watch = Watch::NOBODY;
        watch.keep(Some((10 << GRAIN_NS_LOG2) - 1), true);
        // Nine whole grains, of which the last must not be used up.
        for taken in 1..=9 {
            assert_eq!(watch.take(1, true), taken < 9, "{taken}");
        }
    }
}

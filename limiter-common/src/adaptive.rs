//! How far limits give way to pressure: additive increase, multiplicative decrease (AIMD), in integers.
//!
//! The state is one number, the share of its limit that a rule grants. While the origin is above its target the share
//! shrinks by a factor, step by step; while it is below, or says nothing any more, it grows by the same amount each step,
//! so that the whole way back takes a time that is known beforehand.

/// The whole limit: shares are in millionths.
pub const FULL: u32 = 1_000_000;

/// How the origin is, beside its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pressure {
    Above,
    /// Exactly there.
    On,
    Below,
    /// Nobody has reported for so long that what was said holds no more.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aimd {
    /// The least share.
    floor: u32,
    /// What of the share is left after a step down; below [`FULL`].
    decrease: u32,
    /// What a step up adds; at least 1.
    increase: u32,
    interval_us: u64,
}

/// A share, and when it last changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    pub share: u32,
    pub stepped_at_us: u64,
}

impl Aimd {
    /// A step every `interval_us`, and the whole way back within `recover_us`, rounded up to steps. `None` where the numbers
    /// make no steps: an interval of 0, or a decrease that takes nothing away.
    pub fn new(floor: u32, decrease: u32, interval_us: u64, recover_us: u64) -> Option<Self> {
        if interval_us == 0 || decrease >= FULL || floor > FULL {
            return None;
        }
        let steps = recover_us.div_ceil(interval_us).max(1);
        let increase = u64::from(FULL).div_ceil(steps);
        // At most FULL.
        Some(Self { floor, decrease, increase: u32::try_from(increase).unwrap_or(FULL), interval_us })
    }

    pub const fn floor(&self) -> u32 {
        self.floor
    }

    /// At most one step an interval. A clock that steps back delays a step by one interval at most.
    #[must_use]
    pub fn step(&self, state: State, pressure: Pressure, now_us: u64) -> State {
        let elapsed = now_us.checked_sub(state.stepped_at_us);
        if elapsed.is_some_and(|elapsed| elapsed < self.interval_us) {
            return state;
        }
        let share = match pressure {
            Pressure::Above => {
                let left = u64::from(state.share) * u64::from(self.decrease) / u64::from(FULL);
                u32::try_from(left).unwrap_or(FULL)
            }
            Pressure::On => state.share,
            Pressure::Below | Pressure::Unknown => state.share.saturating_add(self.increase),
        };
        State { share: share.clamp(self.floor, FULL), stepped_at_us: now_us }
    }
}

/// What is left of `limit` at a share of it: never below `floor`, unless the limit itself is, and never above the limit.
#[inline]
pub const fn effective(limit: u64, floor: u64, share: u32) -> u64 {
    let share = if share > FULL { FULL } else { share };
    // A part of a u64, so it fits.
    #[expect(clippy::cast_possible_truncation, reason = "limit times a share of at most one is at most limit")]
    let left = (limit as u128 * share as u128 / FULL as u128) as u64;
    let floor = if floor < limit { floor } else { limit };
    if left > floor { left } else { floor }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND_US: u64 = 1_000_000;

    #[test]
    fn halves_each_second_and_comes_back_in_ten() {
        let aimd = Aimd::new(200_000, 500_000, SECOND_US, 10 * SECOND_US).unwrap();
        let mut state = State { share: FULL, stepped_at_us: 0 };
        for (second, pressure, share) in [
            (1, Pressure::Above, 500_000),
            (2, Pressure::On, 500_000),
            (3, Pressure::Above, 250_000),
            (4, Pressure::Above, 200_000),
            (5, Pressure::Above, 200_000),
            (6, Pressure::Below, 300_000),
            (7, Pressure::Unknown, 400_000),
        ] {
            state = aimd.step(state, pressure, second * SECOND_US);
            assert_eq!(state.share, share, "{second}");
            assert_eq!(aimd.step(state, Pressure::Above, (second + 1) * SECOND_US - 1), state, "one step an interval");
        }
        // The clock went back.
        assert_eq!(aimd.step(state, Pressure::Below, 0), State { share: 500_000, stepped_at_us: 0 });
    }

    #[test]
    fn numbers_that_make_no_steps_are_refused() {
        for (floor, decrease, interval_us) in [(0, FULL, 1), (0, 0, 0), (FULL + 1, 0, 1)] {
            assert_eq!(Aimd::new(floor, decrease, interval_us, SECOND_US), None);
        }
        let at_once = Aimd::new(0, 0, SECOND_US, 0).unwrap();
        assert_eq!(at_once.step(State { share: 0, stepped_at_us: 0 }, Pressure::Below, SECOND_US).share, FULL);
    }

    fn pressure() -> impl Strategy<Value = Pressure> {
        prop_oneof![Just(Pressure::Above), Just(Pressure::On), Just(Pressure::Below), Just(Pressure::Unknown)]
    }

    fn aimd() -> impl Strategy<Value = (Aimd, u64, u64)> {
        (0..=FULL, 0..FULL, 1u64..=60 * SECOND_US, 0u64..=3600 * SECOND_US).prop_map(
            |(floor, decrease, interval_us, recover_us)| {
                (Aimd::new(floor, decrease, interval_us, recover_us).unwrap(), interval_us, recover_us)
            },
        )
    }

    proptest! {
        #[test]
        fn stays_between_floor_and_limit_and_steps_once_an_interval(
            (aimd, interval_us, _) in aimd(), share in 0..=u32::MAX, limit: u64, floor: u64,
            steps in prop::collection::vec((pressure(), 0u64..120 * SECOND_US), 1..100),
        ) {
            let (mut state, mut now_us) = (State { share, stepped_at_us: 0 }, 0);
            for (pressure, pause_us) in steps {
                now_us += pause_us;
                let next = aimd.step(state, pressure, now_us);
                if next != state {
                    prop_assert!(now_us - state.stepped_at_us >= interval_us);
                    prop_assert!((aimd.floor()..=FULL).contains(&next.share));
                }
                state = next;
                let left = effective(limit, floor, state.share);
                prop_assert!(left <= limit && left >= floor.min(limit));
            }
        }

        #[test]
        fn recovers_from_anywhere_within_the_stated_time(
            (aimd, interval_us, recover_us) in aimd(), share in 0..=FULL, unknown: bool,
        ) {
            let pressure = if unknown { Pressure::Unknown } else { Pressure::Below };
            let steps = recover_us.div_ceil(interval_us).max(1);
            // Few steps are large, and many of them are not walked one by one.
            prop_assume!(steps <= 20_000);
            let mut state = State { share, stepped_at_us: 0 };
            for step in 1..=steps {
                state = aimd.step(state, pressure, step * interval_us);
            }
            prop_assert_eq!(state.share, FULL);
        }

        #[test]
        fn goes_one_way_under_constant_pressure_and_ends_at_its_bound((aimd, interval_us, _) in aimd(), share in 0..=FULL) {
            let mut state = State { share: share.max(aimd.floor()), stepped_at_us: 0 };
            let mut step = 0;
            loop {
                step += 1;
                let next = aimd.step(state, Pressure::Above, step * interval_us);
                prop_assert!(next.share <= state.share);
                if next.share == state.share {
                    break;
                }
                state = next;
            }
            prop_assert_eq!(state.share, aimd.floor());
        }

        #[test]
        fn what_is_left_grows_with_the_share_and_the_limit(
            limit: u64, more: u64, floor: u64, a in 0..=FULL, b in 0..=FULL,
        ) {
            let (less, greater) = (a.min(b), a.max(b));
            prop_assert!(effective(limit, floor, less) <= effective(limit, floor, greater));
            prop_assert!(effective(limit, floor, a) <= effective(limit.saturating_add(more), floor, a));
            prop_assert_eq!(effective(limit, floor, FULL), limit);
        }
    }
}

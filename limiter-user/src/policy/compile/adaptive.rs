//! How a rule gives way to pressure.

use std::time::Duration;

use limiter_common::{adaptive::FULL, sliding_window::BurstFactor};

use super::{MAX_CEILING, required};
use crate::{
    config::{Value, units},
    policy::{Adaptive, Limit, raw::RawAdaptive},
    pressure,
};

/// A level that leaves room for what the answers of the last interval still bring.
const TARGET: u32 = FULL / 10 * 8;
const DECREASE: u32 = FULL / 10 * 7;
const RECOVER: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 3600);

pub(super) fn read(value: &Value<'_>, burst_factor: BurstFactor) -> Option<Adaptive> {
    let raw = RawAdaptive::read(value.table()?);
    let floor = required(raw.floor.as_ref(), &raw.place, "floor");
    let floor = floor.and_then(|floor| {
        let units: u64 = floor.within(1..=MAX_CEILING)?;
        let ceiling = burst_factor.ceiling(units).filter(|ceiling| *ceiling <= MAX_CEILING);
        if ceiling.is_none() {
            floor.error("times the burst factor it is above 2^53");
        }
        Some((units, ceiling?))
    });
    let share = |value: &Option<Value<'_>>, default| value.as_ref().map_or(Some(default), between_0_and_1);
    let target = share(&raw.target, TARGET);
    let decrease = share(&raw.decrease, DECREASE);
    let within = |value: &Value<'_>, least: Duration, most: Duration| {
        let duration = value.parsed("a duration such as \"1m\"", units::duration)?;
        if !(least..=most).contains(&duration) {
            value.error(format_args!("{duration:?} is outside {least:?} to {most:?}"));
            return None;
        }
        u64::try_from(duration.as_micros()).ok()
    };
    let target_latency = raw.target_latency.as_ref();
    let target_latency_us =
        target_latency.map(|value| within(value, Duration::from_millis(1), Duration::from_secs(3600)));
    let recover_us = match &raw.recover {
        Some(value) => within(value, Duration::from_secs(1), DAY),
        None => u64::try_from(RECOVER.as_micros()).ok(),
    };
    let (floor, floor_ceiling) = floor?;
    Some(Adaptive {
        floor,
        floor_ceiling,
        target: target?,
        target_latency_us: match target_latency_us {
            Some(given) => Some(given?),
            None => None,
        },
        decrease: decrease?,
        recover_us: recover_us?,
    })
}

fn between_0_and_1(value: &Value<'_>) -> Option<u32> {
    let share = value.as_number().or_else(|| value.as_str()).and_then(pressure::level);
    let share = share.filter(|share| (1..FULL).contains(share));
    if share.is_none() {
        value.error("is not a number between 0 and 1");
    }
    share
}

/// A floor has to be one: below a limit, above the cost of a request, and no slower than a bucket can be.
pub(super) fn check<'l>(value: &Value<'_>, adaptive: &Adaptive, limits: impl Iterator<Item = &'l Limit>, cost: u64) {
    let mut tightens = false;
    for limit in limits {
        let Limit::Limited(algorithm) = limit else { continue };
        match algorithm.tightened(adaptive.floor, adaptive.floor_ceiling, 0) {
            Ok(lowest) => {
                tightens |= lowest != *algorithm;
                if lowest.ceiling() < cost {
                    let (floor, least) = (adaptive.floor, lowest.ceiling());
                    value.error(format_args!(
                        "at the floor of {floor} no request could pass: each costs {cost}, and the most is {least}"
                    ));
                    return;
                }
            }
            Err(error) => {
                value.error(format_args!("at the floor of {}: {error}", adaptive.floor));
                return;
            }
        }
    }
    if !tightens {
        value.error(format_args!("tightens nothing: the floor of {} is not below any limit", adaptive.floor));
    }
}

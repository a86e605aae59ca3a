//! What sources without a bucket of their own share: two aggregate buckets for each neighbourhood (/24 or /48), one in
//! each row of a fixed array, found by a keyed hash. Sources under different rules share none: a bucket that is charged by
//! the parameters of two rules keeps to neither.
//!
//! A packet passes when either of its two buckets has room, and is charged to each that has. A neighbourhood by itself
//! therefore has exactly one quota, and one that shares a bucket with a flooded neighbourhood loses nothing while its
//! other bucket is its own. It loses when both are flooded: with n flooded neighbourhoods the chance is
//! (1 - e^(-n / row))^2. Who does not know the seed cannot choose which.

use crate::{
    gcra::{GcraParams, TICKS_PER_NS},
    rule::Bucket,
    schema::{AGGREGATE_ROW, AGGREGATES},
};

/// Rows of the array, and so the number of buckets that a neighbourhood has.
pub const ROWS: usize = 2;

const _: () = assert!(ROWS * AGGREGATE_ROW as usize == AGGREGATES as usize);

/// An aggregate bucket. Map value, updated in place by compare-and-swap on each number.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aggregate {
    pub bucket: Bucket,
    /// State of [`creation_reserve`] for this neighbourhood.
    pub creation_tat: u64,
}

const _: () = assert!(size_of::<Aggregate>() == size_of::<Bucket>() + 8);

/// What a neighbourhood may take from the reserve of the budget for new buckets: one bucket a minute. Its first new
/// client gets a bucket of its own while a flood from elsewhere spends all that is not reserved.
///
/// Even when the whole address space is spoofed this takes at most a row's length of buckets a minute, which is less
/// than what the default budget gains in that time.
pub const fn creation_reserve() -> GcraParams {
    const MINUTE_NS: u64 = 60_000_000_000;
    match GcraParams::from_interval(MINUTE_NS * TICKS_PER_NS, 1) {
        Some(params) => params,
        None => unreachable!(),
    }
}

/// The two places of the neighbourhood of an address under a rule, one in each row.
pub mod index {
    use super::{AGGREGATE_ROW, ROWS};
    use crate::stats::RULE_SLOTS;

    const _: () = assert!(AGGREGATE_ROW.is_power_of_two());

    /// Above the bits of a neighbourhood, and below the one that tells the families apart.
    #[inline(always)]
    const fn of_rule(slot: u32) -> u64 {
        const { assert!(RULE_SLOTS == 1 << 15) };
        ((slot & (RULE_SLOTS - 1)) as u64) << 48
    }

    /// By /24.
    #[inline(always)]
    pub const fn v4(address: [u8; 4], slot: u32, seed: u64) -> [u32; ROWS] {
        places(mix((u32::from_be_bytes(address) >> 8) as u64 | of_rule(slot) | 1 << 63, seed))
    }

    /// By /48.
    #[inline(always)]
    pub const fn v6(address: [u8; 16], slot: u32, seed: u64) -> [u32; ROWS] {
        let [a, b, c, d, e, f, ..] = address;
        places(mix(u64::from_be_bytes([0, 0, a, b, c, d, e, f]) | of_rule(slot), seed))
    }

    /// The finalizer of SplitMix64, with the seed mixed in twice.
    #[inline(always)]
    const fn mix(prefix: u64, seed: u64) -> u64 {
        let mut hash = prefix ^ seed;
        hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash ^= seed.rotate_left(32);
        hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        hash ^ hash >> 31
    }

    /// Different bits of one hash are as good as two hashes.
    #[inline(always)]
    const fn places(hash: u64) -> [u32; ROWS] {
        let [a, b, c, d, e, f, g, h] = hash.to_be_bytes();
        let first = u32::from_be_bytes([a, b, c, d]) & (AGGREGATE_ROW - 1);
        let second = u32::from_be_bytes([e, f, g, h]) & (AGGREGATE_ROW - 1);
        [first, AGGREGATE_ROW + second]
    }
}

#[cfg(test)]
mod tests {
    use std::{vec, vec::Vec};

    use super::*;

    /// The n-th /24 from 11.0.0.0 on.
    fn neighbourhood(n: u32) -> [u8; 4] {
        (0x0b00_0000 + (n << 8)).to_be_bytes()
    }

    #[test]
    fn a_neighbourhood_has_one_place_in_each_row() {
        let mut used = vec![0u32; 2 * AGGREGATE_ROW as usize];
        for n in 0..AGGREGATE_ROW {
            let [a, b, c, _] = neighbourhood(n);
            let places = index::v4([a, b, c, 1], 1, 7);
            assert_eq!(places, index::v4([a, b, c, 200], 1, 7));
            assert!(places[0] < AGGREGATE_ROW && (AGGREGATE_ROW..2 * AGGREGATE_ROW).contains(&places[1]));
            for place in places {
                used[place as usize] += 1;
            }
        }
        // As many throws as places leave one in e empty, and put at most about nine in one.
        for row in used.chunks(AGGREGATE_ROW as usize) {
            let empty = row.iter().filter(|count| **count == 0).count();
            assert!((46_000..51_000).contains(&empty), "{empty}");
            assert!(row.iter().max().unwrap() < &14);
        }
    }

    /// A quiet neighbourhood whose both places are those of flooded ones; in each thousand.
    #[expect(clippy::float_arithmetic, reason = "a share")]
    fn unlucky(flooded: &[[u32; ROWS]], quiet: impl Iterator<Item = [u32; ROWS]>) -> f64 {
        let mut taken = vec![false; 2 * AGGREGATE_ROW as usize];
        for place in flooded.iter().flatten() {
            taken[*place as usize] = true;
        }
        let quiet: Vec<_> = quiet.collect();
        let lost = quiet.iter().filter(|places| places.iter().all(|place| taken[*place as usize])).count();
        lost as f64 * 1000.0 / quiet.len() as f64
    }

    /// The numbers that the README states.
    #[test]
    fn chance_that_a_flood_takes_both_places_of_a_quiet_neighbourhood() {
        for (flood, flooded, from, to) in
            [("/16", 256, 0.0, 0.02), ("/12", 4096, 0.6, 1.3), ("/8", 65_536, 150.0, 160.0)]
        {
            let mut worst: f64 = 0.0;
            let mut sum = 0.0;
            for seed in 1..=8u64 {
                let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let places: Vec<_> = (0..flooded).map(|n| index::v4(neighbourhood(n), 1, seed)).collect();
                let quiet = (0..200_000).map(|n| index::v4(neighbourhood((1 << 20) + n), 1, seed));
                let share = unlucky(&places, quiet);
                worst = worst.max(share);
                sum += share;
            }
            let mean = sum / 8.0;
            assert!((from..to).contains(&mean), "{flood}: {mean} of a thousand, worst {worst}");
        }
    }

    /// As if each rule were a neighbourhood of its own.
    #[test]
    fn each_rule_has_its_places() {
        let of_rules: Vec<_> = (0..4096).map(|slot| index::v4([192, 0, 2, 1], slot, 7)).collect();
        let mut different = of_rules.clone();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), of_rules.len());
        let quiet = (4096..32_768).map(|slot| index::v4([192, 0, 2, 1], slot, 7));
        let share = unlucky(&of_rules, quiet);
        assert!((0.4..1.6).contains(&share), "{share} of a thousand");
    }

    #[test]
    fn neighbourhoods_of_ipv6_spread_alike() {
        let site = |n: u32| {
            let [a, b, c, d] = n.to_be_bytes();
            [0x20, 0x01, a, b, c, d, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]
        };
        let flooded: Vec<_> = (0..4096).map(|n| index::v6(site(n), 1, 7)).collect();
        let share = unlucky(&flooded, (1 << 20..(1 << 20) + 200_000).map(|n| index::v6(site(n), 1, 7)));
        assert!((0.6..1.4).contains(&share), "{share} of a thousand");
        let mut other_subnet = site(5);
        other_subnet[7] = 9;
        assert_eq!(index::v6(site(5), 1, 7), index::v6(other_subnet, 1, 7));
    }
}

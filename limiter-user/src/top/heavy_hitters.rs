//! The heaviest of more keys than anybody could count: space-saving (Metwally, Agrawal, El Abbadi 2005), with decay.
//!
//! Whoever has more than one part in `capacity` of the recent weight has an entry. A flood of keys that occur once
//! keeps pushing out one another, and not what is heavy.

use std::{collections::HashMap, hash::Hash};

/// What is kept about a key, and grows smaller with time.
pub(super) trait Decay: Default {
    /// Leaves seven eighths.
    fn decay(&mut self);
}

#[derive(Debug)]
pub(super) struct HeavyHitters<K, D> {
    capacity: usize,
    entries: HashMap<K, Entry<D>, foldhash::fast::RandomState>,
    /// Keys that had the least weight when somebody looked last, and that weight: as long as one of them still has it, nobody
    /// looks again, for no weight falls but by decay.
    lightest: Vec<K>,
    least: u64,
}

#[derive(Debug)]
struct Entry<D> {
    /// At least what the key has, and at most that and what the key had that it pushed out.
    weight: u64,
    detail: D,
}

impl<K: Clone + Eq + Hash, D: Decay> HeavyHitters<K, D> {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, entries: HashMap::default(), lightest: Vec::new(), least: 0 }
    }

    /// Adds to the weight of `key`, and gives what is kept about it: that of this key alone, from when it got its entry.
    pub(super) fn add(&mut self, key: K, weight: u64) -> &mut D {
        let mut inherited = 0;
        if self.entries.len() >= self.capacity && !self.entries.contains_key(&key) {
            inherited = self.push_out();
        }
        let entry = self.entries.entry(key).or_insert_with(|| Entry { weight: inherited, detail: D::default() });
        entry.weight = entry.weight.saturating_add(weight);
        &mut entry.detail
    }

    /// Removes one of the lightest, and gives its weight.
    fn push_out(&mut self) -> u64 {
        loop {
            while let Some(key) = self.lightest.pop() {
                if self.entries.get(&key).is_some_and(|entry| entry.weight == self.least) {
                    self.entries.remove(&key);
                    return self.least;
                }
            }
            let Some(least) = self.entries.values().map(|entry| entry.weight).min() else { return 0 };
            self.least = least;
            let lightest = self.entries.iter().filter(|(_, entry)| entry.weight == least);
            self.lightest.extend(lightest.map(|(key, _)| key.clone()));
        }
    }

    pub(super) fn decay(&mut self) {
        self.lightest.clear();
        self.entries.retain(|_, entry| {
            entry.weight = seven_eighths(entry.weight);
            entry.detail.decay();
            entry.weight > 0
        });
    }

    /// The `count` entries for which `rank` is the highest, but for those where it is 0.
    pub(super) fn heaviest(&self, count: usize, rank: impl Fn(&D) -> u64) -> Vec<(&K, &D)> {
        let mut ranked: Vec<_> = self.entries.iter().map(|(key, entry)| (key, &entry.detail)).collect();
        ranked.retain(|(_, detail)| rank(detail) > 0);
        ranked.sort_unstable_by_key(|(_, detail)| std::cmp::Reverse(rank(detail)));
        ranked.truncate(count);
        ranked
    }
}

/// Never the same number again, so that everything ends.
pub(super) fn seven_eighths(number: u64) -> u64 {
    number - number.div_ceil(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Sum(u64);

    impl Decay for Sum {
        fn decay(&mut self) {
            self.0 = seven_eighths(self.0);
        }
    }

    fn add(hitters: &mut HeavyHitters<u32, Sum>, key: u32, weight: u64) {
        hitters.add(key, weight).0 += weight;
    }

    #[test]
    fn heavy_keys_outlast_a_flood_of_keys_that_occur_once() {
        let mut hitters = HeavyHitters::new(64);
        for round in 0..100_000 {
            add(&mut hitters, 1_000_000 + round, 1);
            if round % 10 == 0 {
                add(&mut hitters, 7, 1);
            }
            if round % 20 == 0 {
                add(&mut hitters, 8, 1);
            }
        }
        let heaviest: Vec<_> = hitters.heaviest(2, |sum| sum.0).into_iter().map(|(key, sum)| (*key, sum.0)).collect();
        assert_eq!(heaviest.iter().map(|(key, _)| *key).collect::<Vec<_>>(), [7, 8]);
        assert!((9_000..=10_000).contains(&heaviest[0].1), "{heaviest:?}");
        assert_eq!(hitters.entries.len(), 64);
    }

    #[test]
    fn who_is_pushed_out_is_one_of_the_lightest() {
        let mut hitters = HeavyHitters::new(8);
        for round in 0..10_000u32 {
            let key = round.wrapping_mul(2_654_435_761) >> 27;
            let least = hitters.entries.values().map(|entry| entry.weight).min().unwrap_or(0);
            let is_full = hitters.entries.len() == 8 && !hitters.entries.contains_key(&key);
            let before: HashMap<u32, u64> = hitters.entries.iter().map(|(key, entry)| (*key, entry.weight)).collect();
            add(&mut hitters, key, u64::from(round % 3 + 1));
            let gone: Vec<u64> = before
                .iter()
                .filter(|(key, _)| !hitters.entries.contains_key(key))
                .map(|(_, weight)| *weight)
                .collect();
            assert_eq!(gone, if is_full { vec![least] } else { vec![] });
            if is_full {
                assert_eq!(hitters.entries[&key].weight, least + u64::from(round % 3 + 1));
            }
            if round % 1000 == 0 {
                hitters.decay();
            }
        }
    }

    #[test]
    fn what_is_no_more_is_forgotten() {
        let mut hitters = HeavyHitters::new(4);
        add(&mut hitters, 1, 1 << 40);
        add(&mut hitters, 2, 10);
        hitters.decay();
        assert_eq!(hitters.heaviest(1, |sum| sum.0)[0].1.0, (1 << 40) / 8 * 7);
        for _ in 0..300 {
            hitters.decay();
        }
        assert!(hitters.heaviest(9, |sum| sum.0).is_empty() && hitters.entries.is_empty());
    }
}

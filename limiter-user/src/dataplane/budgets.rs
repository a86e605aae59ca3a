//! The budgets that the agent has pushed, and the bits that tell the program for which sources it has to look.

use std::{collections::HashMap, net::IpAddr};

use limiter_common::{
    addr::{SrcKeyV4, SrcKeyV6, SrcMaskV4, SrcMaskV6},
    budget::{Budget, BudgetEntry},
    budget_filter::{BITS, Place, WORDS},
    time::KtimeNs,
};

use super::{DataplaneError, maps::Maps};

/// By source, which is cut to the configured prefix.
#[derive(Debug)]
pub(super) struct Budgets {
    of_source: HashMap<IpAddr, Budget>,
    /// How many of them are of IPv6, so that nobody has to count them for each that is pushed.
    of_v6: usize,
    filter: Filter,
}

impl Budgets {
    /// Of what an earlier agent has left.
    pub(super) fn new(of_source: HashMap<IpAddr, Budget>) -> Self {
        let mut filter = Filter::default();
        for source in of_source.keys() {
            filter.add(place(*source));
        }
        let of_v6 = of_source.keys().filter(|source| source.is_ipv6()).count();
        Self { of_source, of_v6, filter }
    }

    pub(super) fn get(&self, source: &IpAddr) -> Option<&Budget> {
        self.of_source.get(source)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&IpAddr, &Budget)> {
        self.of_source.iter()
    }

    /// How many there are of a family.
    pub(super) fn count(&self, is_ipv4: bool) -> usize {
        if is_ipv4 { self.of_source.len() - self.of_v6 } else { self.of_v6 }
    }

    pub(super) fn expired(&self, now: KtimeNs) -> Vec<IpAddr> {
        self.of_source.iter().filter(|(_, budget)| budget.expired(now)).map(|(source, _)| *source).collect()
    }

    /// Tells a program that is not in force yet.
    pub(super) fn fill_filter(&self, maps: &mut Maps) -> Result<(), DataplaneError> {
        for (word, bits) in self.filter.set() {
            maps.write_budget_filter(word, bits)?;
        }
        Ok(())
    }

    /// The bit is there before the budget: a program that does not look must not miss one.
    pub(super) fn insert(&mut self, maps: &mut Maps, source: IpAddr, entry: BudgetEntry) -> Result<(), DataplaneError> {
        let place = place(source);
        let bits = self.filter.word(place);
        if bits & place.mask() == 0 {
            maps.write_budget_filter(place.word(), bits | place.mask())?;
        }
        // Where this fails, a bit too many does no harm.
        maps.insert_budget(source, entry)?;
        if self.of_source.insert(source, entry.budget).is_none() {
            self.of_v6 += usize::from(source.is_ipv6());
            self.filter.add(place);
        }
        Ok(())
    }

    /// Whether there was one. The bit stays as long as the budget.
    pub(super) fn remove(&mut self, maps: &mut Maps, source: IpAddr) -> Result<bool, DataplaneError> {
        let was_there = maps.remove_budget(source)?;
        if self.of_source.remove(&source).is_some() {
            let place = place(source);
            self.of_v6 -= usize::from(source.is_ipv6());
            self.filter.remove(place);
            maps.write_budget_filter(place.word(), self.filter.word(place))?;
        }
        Ok(was_there)
    }
}

/// As the program finds it from a key.
fn place(source: IpAddr) -> Place {
    Place::of(match source {
        IpAddr::V4(v4) => SrcKeyV4::new(v4.octets(), SrcMaskV4::new(32)).digest(),
        IpAddr::V6(v6) => SrcKeyV6::new(v6.octets(), SrcMaskV6::new(128)).digest(),
    })
}

/// The bits, and for how many sources each is set.
#[derive(Debug)]
struct Filter {
    words: Vec<u64>,
    sources: Vec<u32>,
}

impl Default for Filter {
    fn default() -> Self {
        Self { words: vec![0; WORDS as usize], sources: vec![0; BITS as usize] }
    }
}

impl Filter {
    fn add(&mut self, place: Place) {
        self.words[place.word() as usize] |= place.mask();
        self.sources[bit(place)] += 1;
    }

    fn remove(&mut self, place: Place) {
        let sources = &mut self.sources[bit(place)];
        *sources -= 1;
        if *sources == 0 {
            self.words[place.word() as usize] &= !place.mask();
        }
    }

    fn word(&self, place: Place) -> u64 {
        self.words[place.word() as usize]
    }

    /// Words with any bit set, by index.
    fn set(&self) -> impl Iterator<Item = (u32, u64)> {
        (0..).zip(&self.words).filter(|(_, bits)| **bits != 0).map(|(word, bits)| (word, *bits))
    }
}

fn bit(place: Place) -> usize {
    (place.word() * u64::BITS + place.mask().trailing_zeros()) as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few places, so that many sources share one.
        #[test]
        fn a_bit_is_set_exactly_while_any_of_its_sources_is_there(
            steps in prop::collection::vec((any::<bool>(), 0u64..40), 1..200),
        ) {
            let place = |source: u64| Place::of(source % 8);
            let (mut filter, mut there) = (Filter::default(), std::collections::BTreeSet::new());
            for (adds, source) in steps {
                if adds && there.insert(source) {
                    filter.add(place(source));
                } else if !adds && there.remove(&source) {
                    filter.remove(place(source));
                }
                let mut expected = std::collections::BTreeMap::new();
                for source in &there {
                    *expected.entry(place(*source).word()).or_insert(0) |= place(*source).mask();
                }
                prop_assert_eq!(filter.set().collect::<Vec<_>>(), expected.into_iter().collect::<Vec<_>>());
            }
        }
    }
}

//! Which slot of the counters belongs to which rule. Kept in a pinned map, so that counters stay with their rule.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ops::Range,
    sync::Arc,
};

use limiter_common::stats::{NO_RULE, PER_CPU_SLOTS, RULE_SLOTS};

const FIRST: Range<u32> = NO_RULE + 1..PER_CPU_SLOTS;
const ALL: Range<u32> = NO_RULE + 1..RULE_SLOTS;

#[derive(Clone, Debug)]
pub(super) struct Slots {
    by_rule: HashMap<Arc<str>, u32>,
    by_slot: BTreeMap<u32, Arc<str>>,
    free: BTreeSet<u32>,
}

impl Default for Slots {
    fn default() -> Self {
        Self { by_rule: HashMap::new(), by_slot: BTreeMap::new(), free: ALL.collect() }
    }
}

impl Slots {
    pub(super) fn new(taken: impl IntoIterator<Item = (u32, Arc<str>)>) -> Self {
        let mut slots = Self::default();
        for (slot, rule) in taken {
            slots.insert(slot, rule);
        }
        slots
    }

    fn insert(&mut self, slot: u32, rule: Arc<str>) {
        if let Some(before) = self.by_slot.insert(slot, Arc::clone(&rule)) {
            self.by_rule.remove(&before);
        }
        self.free.remove(&slot);
        self.by_rule.insert(rule, slot);
    }

    pub(super) fn slot(&self, rule: &str) -> Option<u32> {
        self.by_rule.get(rule).copied()
    }

    pub(super) fn rule(&self, slot: u32) -> Option<&Arc<str>> {
        self.by_slot.get(&slot)
    }

    pub(super) fn taken(&self) -> impl Iterator<Item = (u32, &Arc<str>)> {
        self.by_slot.iter().map(|(slot, rule)| (*slot, rule))
    }

    /// Whether any rule has a slot that counts in `MORE_STATS`.
    pub(super) fn need_more(&self) -> bool {
        self.by_slot.last_key_value().is_some_and(|(slot, _)| *slot >= PER_CPU_SLOTS)
    }

    /// Takes a slot for each of `rules` that has none, the first slots for the first rules: those of forgotten rules
    /// rather than the slower ones behind them. Slots of rules that are `in_use` stay theirs. An error is how many
    /// slots are missing.
    pub(super) fn take_all<'a>(
        &mut self,
        rules: impl IntoIterator<Item = &'a Arc<str>>,
        in_use: &HashSet<&str>,
    ) -> Result<Vec<Taken>, usize> {
        let wanting: Vec<_> = rules.into_iter().filter(|rule| self.slot(rule).is_none()).collect();
        let mut places = self.places(FIRST, in_use);
        if places.len() < wanting.len() {
            places.extend(self.places(PER_CPU_SLOTS..RULE_SLOTS, in_use));
        }
        if places.len() < wanting.len() {
            return Err(wanting.len() - places.len());
        }
        let mut taken = Vec::new();
        for (place, rule) in places.into_iter().zip(wanting) {
            self.insert(place.slot, Arc::clone(rule));
            taken.push(place);
        }
        Ok(taken)
    }

    /// Slots of this range that may be taken, free ones first.
    fn places(&self, range: Range<u32>, in_use: &HashSet<&str>) -> Vec<Taken> {
        let free = self.free.range(range.clone()).map(|slot| Taken { slot: *slot, was_used: false });
        let forgotten = self.by_slot.range(range).filter(|(_, rule)| !in_use.contains(&***rule));
        free.chain(forgotten.map(|(slot, _)| Taken { slot: *slot, was_used: true })).collect()
    }

    /// A slot for one more rule, which a program that counts in the first slots only can use. `None` when all are in use.
    pub(super) fn take(&mut self, rule: &Arc<str>, in_use: impl FnOnce() -> HashSet<Arc<str>>) -> Option<Taken> {
        let free = self.free.range(FIRST).next().map(|slot| Taken { slot: *slot, was_used: false });
        let taken = free.or_else(|| {
            let in_use = in_use();
            let (slot, _) = self.by_slot.range(FIRST).find(|(_, rule)| !in_use.contains(*rule))?;
            Some(Taken { slot: *slot, was_used: true })
        })?;
        self.insert(taken.slot, Arc::clone(rule));
        Some(taken)
    }
}

/// A slot that a rule has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) slot: u32,
    /// Its counters are another rule's, and begin anew.
    pub(super) was_used: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(range: Range<u32>) -> Vec<Arc<str>> {
        range.map(|n| format!("rule-{n}").into()).collect()
    }

    fn set(ids: &[Arc<str>]) -> HashSet<&str> {
        ids.iter().map(|id| &**id).collect()
    }

    #[test]
    fn slots_are_stable_and_those_of_forgotten_rules_are_used_again() {
        let rules = ids(0..RULE_SLOTS - 1);
        let mut slots = Slots::new([(7, Arc::clone(&rules[0]))]);
        let few = &rules[..PER_CPU_SLOTS as usize - 1];
        let taken = slots.take_all(few, &set(few)).unwrap();
        assert!(
            taken.len() == few.len() - 1 && taken.iter().all(|taken| !taken.was_used && taken.slot < PER_CPU_SLOTS)
        );
        assert_eq!(slots.slot("rule-0"), Some(7));
        assert!(!slots.need_more());

        // A policy that shares one rule with that: forgotten rules give up their slots before slower ones are taken.
        let other = [&rules[5..6], &rules[few.len()..2 * few.len() - 1]].concat();
        let before = slots.slot("rule-5");
        let taken = slots.take_all(&other, &set(&other)).unwrap();
        assert!(taken.len() == few.len() - 1 && taken.iter().all(|taken| taken.was_used));
        assert_eq!((slots.slot("rule-5"), slots.slot("rule-0")), (before, None));
        assert!(!slots.need_more());

        assert!(!slots.take_all(&rules, &set(&rules)).unwrap().is_empty());
        assert!(slots.need_more());
        let more = ids(RULE_SLOTS..RULE_SLOTS + 3);
        assert_eq!(slots.take_all(&more, &set(&rules)), Err(3));
        assert_eq!(slots.slot("rule-32768"), None, "an error takes nothing");
    }

    #[test]
    fn the_first_rules_get_the_first_slots() {
        let rules = ids(0..2000);
        let mut slots = Slots::default();
        slots.take_all(&rules, &set(&rules)).unwrap();
        for (rule, slot) in rules.iter().zip(1..) {
            assert_eq!(slots.slot(rule), Some(slot));
        }
    }

    #[test]
    fn one_more_rule_gets_a_first_slot_or_none() {
        let few = ids(0..PER_CPU_SLOTS - 1);
        let mut slots = Slots::default();
        slots.take_all(&few, &set(&few)).unwrap();
        let all = || few.iter().cloned().collect::<HashSet<_>>();
        assert_eq!(slots.take(&"request".into(), all), None);
        let but_one = || few.iter().filter(|id| ***id != *"rule-5").cloned().collect();
        let taken = slots.take(&"request".into(), but_one).unwrap();
        assert!(taken.was_used);
        assert_eq!((slots.slot("rule-5"), slots.slot("request")), (None, Some(taken.slot)));
    }
}

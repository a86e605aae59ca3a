//! Which slot of the counters belongs to which rule. Kept in a pinned map, so that counters stay with their rule.

use std::{collections::BTreeMap, sync::Arc};

use limiter_common::stats::{NO_RULE, RULE_SLOTS};

#[derive(Clone, Debug, Default)]
pub(super) struct Slots {
    by_rule: BTreeMap<Arc<str>, u32>,
    by_slot: BTreeMap<u32, Arc<str>>,
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

    /// Takes a slot for `rule`: a free one, or else that of a rule which is not `in_use`. `None` when all are in use.
    pub(super) fn take(&mut self, rule: &Arc<str>, in_use: impl Fn(&str) -> bool) -> Option<Taken> {
        let free = (NO_RULE + 1..RULE_SLOTS).find(|slot| !self.by_slot.contains_key(slot));
        let taken = match free {
            Some(slot) => Taken { slot, was_used: false },
            None => {
                let (slot, _) = self.by_slot.iter().find(|(_, rule)| !in_use(rule))?;
                Taken { slot: *slot, was_used: true }
            }
        };
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

    #[test]
    fn slots_are_stable_and_those_of_forgotten_rules_are_used_again() {
        let id = |n: u32| Arc::<str>::from(format!("rule-{n}"));
        let mut slots = Slots::new([(7, id(0))]);
        assert_eq!(slots.slot("rule-0"), Some(7));
        for n in 1..RULE_SLOTS - 1 {
            assert!(!slots.take(&id(n), |_| true).unwrap().was_used);
        }
        assert_eq!(slots.take(&id(9999), |_| true), None);
        let taken = slots.take(&id(9999), |rule| rule != "rule-5").unwrap();
        assert!(taken.was_used);
        assert_eq!(slots.slot("rule-5"), None);
        assert_eq!(slots.rule(taken.slot), Some(&id(9999)));
    }
}

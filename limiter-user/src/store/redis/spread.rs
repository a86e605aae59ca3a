//! Requests over counters that several slots of a cluster have.
//!
//! No script can judge them together. They are looked at first, all at once, so that a request that is denied costs
//! nobody anything. Then each slot is charged; where another request was quicker meanwhile, what was charged is given back.

use std::collections::BTreeMap;

use futures_util::future::try_join_all;
use limiter_common::sliding_window::Outcome;

use super::{RedisStore, slot::slot};
use crate::store::{At, Cell, CellOutcome, Charge, StoreError, passes};

/// The cells of one slot, by their places in the request.
struct Group {
    slot: u16,
    places: Vec<usize>,
    cells: Vec<Cell>,
    keys: Vec<Vec<u8>>,
}

fn groups(cells: &[Cell], keys: &[Vec<u8>]) -> Vec<Group> {
    let mut groups: BTreeMap<u16, Group> = BTreeMap::new();
    for (place, (cell, key)) in cells.iter().zip(keys).enumerate() {
        let slot = slot(key);
        let empty = || Group { slot, places: Vec::new(), cells: Vec::new(), keys: Vec::new() };
        let group = groups.entry(slot).or_insert_with(empty);
        group.places.push(place);
        group.cells.push(cell.clone());
        group.keys.push(key.clone());
    }
    groups.into_values().collect()
}

impl RedisStore {
    pub(super) async fn check_spread(
        &self,
        at: At,
        charge: Charge,
        cells: &[Cell],
        keys: &[Vec<u8>],
    ) -> Result<Vec<CellOutcome>, StoreError> {
        let groups = groups(cells, keys);
        match (&groups[..], charge) {
            ([], _) => Ok(Vec::new()),
            ([group], _) => self.decide(at, charge, &group.cells, &group.keys, group.slot).await,
            (_, Charge::Peek | Charge::Refund) => self.each(at, charge, &groups, cells.len()).await,
            (_, Charge::Commit) => {
                let seen = self.each(at, Charge::Peek, &groups, cells.len()).await?;
                if passes(cells, &seen) { self.charge(at, &groups, seen).await } else { Ok(seen) }
            }
        }
    }

    async fn each(
        &self,
        at: At,
        charge: Charge,
        groups: &[Group],
        count: usize,
    ) -> Result<Vec<CellOutcome>, StoreError> {
        let calls = groups.iter().map(|group| self.decide(at, charge, &group.cells, &group.keys, group.slot));
        let mut outcomes = vec![CellOutcome::new(Outcome::Allowed, 0); count];
        for (group, answers) in groups.iter().zip(try_join_all(calls).await?) {
            put(&mut outcomes, group, answers);
        }
        Ok(outcomes)
    }

    /// Charges one slot after the other, or none.
    async fn charge(&self, at: At, groups: &[Group], seen: Vec<CellOutcome>) -> Result<Vec<CellOutcome>, StoreError> {
        let mut outcomes = seen.clone();
        for (number, group) in groups.iter().enumerate() {
            let decided = self.decide(at, Charge::Commit, &group.cells, &group.keys, group.slot).await;
            let answers = match decided {
                Ok(answers) if passes(&group.cells, &answers) => answers,
                refused => {
                    for charged in &groups[..number] {
                        self.give_back(at, charged, &outcomes).await;
                    }
                    let mut left = seen;
                    put(&mut left, group, refused?);
                    return Ok(left);
                }
            };
            put(&mut outcomes, group, answers);
        }
        Ok(outcomes)
    }

    /// What cannot be given back stays charged, which lets through less and never more.
    async fn give_back(&self, at: At, group: &Group, outcomes: &[CellOutcome]) {
        let all = group.places.iter().zip(group.cells.iter().zip(&group.keys));
        let charged = all.filter(|(place, _)| outcomes[**place].outcome == Outcome::Allowed);
        let (cells, keys): (Vec<Cell>, Vec<Vec<u8>>) =
            charged.map(|(_, (cell, key))| (cell.clone(), key.clone())).unzip();
        if cells.is_empty() {
            return;
        }
        if let Err(error) = self.decide(at, Charge::Refund, &cells, &keys, group.slot).await {
            tracing::debug!(target: "limiter::store", %error, "a request that was denied stays charged");
        }
    }
}

fn put(outcomes: &mut [CellOutcome], group: &Group, answers: Vec<CellOutcome>) {
    for (place, answer) in group.places.iter().zip(answers) {
        outcomes[*place] = answer;
    }
}

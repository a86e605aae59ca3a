//! Requests over counters that several slots of a cluster have.
//!
//! No script can judge them together. They are looked at first, all at once, so that a request that is denied costs
//! nobody anything. Then each slot is charged; where another request was quicker meanwhile, what was charged is given back.

use std::collections::BTreeMap;

use futures_util::future::try_join_all;
use limiter_common::{sliding_window::Outcome, time::UnixMicros};

use super::{GIVE_BACK_WITHIN, Judged, Question, RedisStore, slot::slot};
use crate::{
    clock::Stopwatch,
    store::{At, Cell, CellOutcome, Charge, StoreError, algorithm::View, passes},
};

/// The cells of one slot, by their places in the request.
struct Group {
    slot: u16,
    places: Vec<usize>,
    cells: Vec<Cell>,
    keys: Vec<Vec<u8>>,
    heard: Vec<Option<View>>,
}

fn groups(cells: &[Cell], keys: &[Vec<u8>], heard: &[Option<View>]) -> Vec<Group> {
    let mut groups: BTreeMap<u16, Group> = BTreeMap::new();
    for (place, (cell, key)) in cells.iter().zip(keys).enumerate() {
        let slot = slot(key);
        let empty = || Group { slot, places: Vec::new(), cells: Vec::new(), keys: Vec::new(), heard: Vec::new() };
        let group = groups.entry(slot).or_insert_with(empty);
        group.places.push(place);
        group.cells.push(cell.clone());
        group.keys.push(key.clone());
        group.heard.extend(heard.get(place));
    }
    groups.into_values().collect()
}

impl RedisStore {
    pub(super) async fn check_spread(
        &self,
        question: Question<'_>,
        cells: &[Cell],
        keys: &[Vec<u8>],
    ) -> Result<Vec<Judged>, StoreError> {
        let groups = groups(cells, keys, question.heard);
        match (&groups[..], question.charge) {
            ([], _) => Ok(Vec::new()),
            ([group], _) => self.decide(question, &group.cells, &group.keys, group.slot).await,
            (_, Charge::Peek | Charge::Refund) => self.each(question, &groups, cells.len()).await,
            (_, Charge::Commit) => {
                let watch = Stopwatch::start();
                let seen = self.each(Question { charge: Charge::Peek, ..question }, &groups, cells.len()).await?;
                if passes(cells, &outcomes(&seen)) {
                    self.charge(question, &watch, &groups, seen).await
                } else {
                    Ok(seen)
                }
            }
        }
    }

    async fn each(&self, question: Question<'_>, groups: &[Group], count: usize) -> Result<Vec<Judged>, StoreError> {
        let calls = groups.iter().map(|group| self.decide(question, &group.cells, &group.keys, group.slot));
        let nothing = CellOutcome::new(Outcome::Allowed, 0);
        let mut judged = vec![Judged { outcome: nothing, view: View::default(), at: UnixMicros::new(0) }; count];
        for (group, answers) in groups.iter().zip(try_join_all(calls).await?) {
            put(&mut judged, group, answers);
        }
        Ok(judged)
    }

    /// Charges one slot after the other, or none, all within the deadline that began with `watch`.
    async fn charge(
        &self,
        question: Question<'_>,
        watch: &Stopwatch,
        groups: &[Group],
        seen: Vec<Judged>,
    ) -> Result<Vec<Judged>, StoreError> {
        let mut judged = seen.clone();
        for (number, group) in groups.iter().enumerate() {
            let deadline = question.deadline.saturating_sub(watch.elapsed());
            let question = Question { deadline, heard: &group.heard, ..question };
            let decided = self.decide(question, &group.cells, &group.keys, group.slot).await;
            let answers = match decided {
                Ok(answers) if passes(&group.cells, &outcomes(&answers)) => answers,
                refused => {
                    self.give_back(question.at, &groups[..number], &judged);
                    let mut left = seen;
                    put(&mut left, group, refused?);
                    return Ok(left);
                }
            };
            put(&mut judged, group, answers);
        }
        Ok(judged)
    }

    /// Behind the request's back, which has its answer. What cannot be given back stays charged, which lets through less and
    /// never more.
    fn give_back(&self, at: At, groups: &[Group], judged: &[Judged]) {
        let mut calls = Vec::new();
        for group in groups {
            let all = group.places.iter().zip(group.cells.iter().zip(&group.keys));
            for (place, (cell, key)) in all {
                let Judged { outcome, at: charged, .. } = judged[*place];
                if outcome.outcome == Outcome::Allowed {
                    let charged_us = Some(charged.get());
                    let question =
                        Question { at, charge: Charge::Refund, charged_us, heard: &[], deadline: GIVE_BACK_WITHIN };
                    calls.push((question, cell.clone(), key.clone(), group.slot));
                }
            }
        }
        if calls.is_empty() {
            return;
        }
        let store = self.clone();
        tokio::spawn(async move {
            for (question, cell, key, slot) in calls {
                if let Err(error) = store.decide(question, &[cell], &[key], slot).await {
                    tracing::debug!(target: "limiter::store", %error, "a request that was denied stays charged");
                }
            }
        });
    }
}

fn outcomes(judged: &[Judged]) -> Vec<CellOutcome> {
    judged.iter().map(|judged| judged.outcome).collect()
}

fn put(judged: &mut [Judged], group: &Group, answers: Vec<Judged>) {
    for (place, answer) in group.places.iter().zip(answers) {
        judged[*place] = answer;
    }
}

//! Charges that came too late: the request was answered without them, and counted by whoever decided it.

use std::{sync::Arc, time::Duration};

use limiter_common::sliding_window::Outcome;
use redis::Value;
use tokio::sync::Semaphore;

use super::{GIVE_BACK_WITHIN, Question, RedisStore, connection::LateAnswer, script};
use crate::store::{At, Cell, Charge, StoreError, passes};

/// How long such an answer is waited for.
const WAITS: Duration = Duration::from_secs(10);
/// Answers that are waited for at a time.
const MOST: usize = 1024;

/// Room for those who wait.
#[derive(Debug)]
pub(super) struct Late(Arc<Semaphore>);

impl Default for Late {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MOST)))
    }
}

impl RedisStore {
    /// Gives back what is charged by a call whose answer nobody waits for any more, once that is known: else the request would
    /// count twice. What cannot be given back stays charged, which lets through less and never more.
    pub(super) fn undo(&self, answer: LateAnswer, cells: &[Cell], keys: &[Vec<u8>], slot: u16) {
        let Ok(room) = Arc::clone(&self.0.late.0).try_acquire_owned() else { return };
        let (store, cells, keys) = (self.clone(), cells.to_vec(), keys.to_vec());
        tokio::spawn(async move {
            if let Err(error) = store.undo_now(answer, cells, keys, slot).await {
                tracing::debug!(target: "limiter::store", %error, "a request that was answered without it may stay charged");
            }
            drop(room);
        });
    }

    async fn undo_now(
        &self,
        answer: LateAnswer,
        cells: Vec<Cell>,
        keys: Vec<Vec<u8>>,
        slot: u16,
    ) -> Result<(), StoreError> {
        let no_answer = || self.bad_reply("decide", "no answer at all".to_owned());
        let replies = tokio::time::timeout(WAITS, answer).await.map_err(|_elapsed| no_answer())??;
        // What comes before the call itself is no decision. A server that refused it has charged nothing.
        let Some(Ok(reply @ Value::Array(_))) = replies.into_iter().next_back() else { return Ok(()) };
        let decided =
            script::decided(reply, Charge::Commit, &cells).map_err(|misfit| self.bad_reply("decide", misfit))?;
        let outcomes: Vec<_> = decided.cells.iter().map(|judged| judged.outcome).collect();
        if !passes(&cells, &outcomes) {
            return Ok(());
        }
        for ((cell, key), judged) in cells.into_iter().zip(keys).zip(decided.cells) {
            if judged.outcome.outcome == Outcome::Allowed {
                let (at, charge, charged_us) = (At::StoreClock, Charge::Refund, Some(judged.at.get()));
                let question = Question { at, charge, charged_us, heard: &[], deadline: GIVE_BACK_WITHIN };
                self.decide(question, &[cell], &[key], slot).await?;
            }
        }
        Ok(())
    }
}

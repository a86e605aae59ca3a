//! Answers that are ready and wait for their turn.
//!
//! A handler returns its response at once, with the turns that it has to wait for. The connection waits for them, outside the
//! time that a request may take; when its peer goes away it is dropped, and the turns with it, which gives their places
//! back.

use std::sync::Arc;

use axum::response::Response;
use parking_lot::Mutex;

use crate::{
    limiter::Turn,
    metrics::{HeldAnswers, Metrics},
};

/// What a response waits for.
#[derive(Debug)]
pub struct Hold {
    turns: Vec<Turn>,
    _counted: HeldAnswers,
}

impl Hold {
    pub async fn wait(self) {
        Turn::wait_for_all(self.turns).await;
    }
}

/// Extensions of a response have to be `Clone`; what is held is taken once.
#[derive(Clone, Debug)]
struct Extension(Arc<Mutex<Option<Hold>>>);

/// Has `response` wait for `turns`.
pub fn until(turns: impl IntoIterator<Item = Turn>, metrics: &Metrics, response: &mut Response) {
    let turns: Vec<Turn> = turns.into_iter().collect();
    if !turns.is_empty() {
        let hold = Hold { _counted: metrics.held(turns.len()), turns };
        response.extensions_mut().insert(Extension(Arc::new(Mutex::new(Some(hold)))));
    }
}

/// What a response has to wait for.
pub fn take(response: &mut Response) -> Option<Hold> {
    response.extensions_mut().remove::<Extension>()?.0.lock().take()
}

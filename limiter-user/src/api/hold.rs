//! Answers that are ready and wait for their turn.
//!
//! A handler returns its response at once, with the turns that it has to wait for. The connection waits for them, outside the
//! time that a request may take; when its peer goes away it is dropped, and the turns with it, which gives their places
//! back.

use std::sync::Arc;

use axum::response::Response;
use parking_lot::Mutex;

use crate::limiter::Turn;

/// Extensions of a response have to be `Clone`; the turns are taken once.
#[derive(Clone, Debug)]
struct Held(Arc<Mutex<Vec<Turn>>>);

/// Has `response` wait for `turns`.
pub fn until(turns: impl IntoIterator<Item = Turn>, response: &mut Response) {
    let turns: Vec<Turn> = turns.into_iter().collect();
    if !turns.is_empty() {
        response.extensions_mut().insert(Held(Arc::new(Mutex::new(turns))));
    }
}

/// The turns that a response has to wait for.
pub fn take(response: &mut Response) -> Vec<Turn> {
    response.extensions_mut().remove::<Held>().map(|held| std::mem::take(&mut *held.0.lock())).unwrap_or_default()
}

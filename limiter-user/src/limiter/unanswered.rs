//! What holds for a request while Redis does not answer.

use limiter_common::sliding_window::Outcome;

use crate::{
    policy::Precision,
    store::{Algorithm, CellOutcome, CellRef, lease::Leases, memory::MemoryStore},
};

/// A client that is refused for want of an answer should not wait long: the next answer helps it.
const RETRY_AFTER_US: u64 = 100_000;

/// What takes the place of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Instead {
    /// Memory decides: by what Redis said last, and what this node has admitted since.
    Memory,
    Outcome(CellOutcome),
}

/// The one place that decides it.
///
/// - `strict`: what this node knows.
/// - `leased`: only what was lent may be used, so that an answer which is lost or late lets nobody through. When Redis has not
///   answered for a while it is what this node knows, as for the others.
pub(super) fn instead_of_redis(
    precision: Precision,
    cell: &CellRef<'_>,
    counters: &MemoryStore,
    leases: &Leases,
) -> Instead {
    match precision {
        Precision::Leased if !leases.is_away() => {
            let now_us = counters.clock().now().get();
            let outcome = Outcome::Denied { retry_after_us: RETRY_AFTER_US };
            Instead::Outcome(CellOutcome { outcome, ..CellOutcome::allowed(reset_us(&cell.algorithm, now_us)) })
        }
        Precision::Leased => {
            // What was said of it last is with the leases.
            if let Some((view, at)) = leases.known(cell) {
                counters.inform(cell, view, at);
            }
            Instead::Memory
        }
        Precision::Async | Precision::Strict | Precision::Local => Instead::Memory,
    }
}

fn reset_us(algorithm: &Algorithm, now_us: u64) -> u64 {
    algorithm.reset_us(algorithm.unused(now_us), now_us)
}

//! Where counters live.
//!
//! A request is decided by one call with all its counters: either each enforced one allows and all are charged, or
//! nobody is charged. [`memory::MemoryStore`] decides requests; [`redis`] shares its counts with other nodes in the
//! background, and decides alone only where a rule wants that.

use std::{future::Future, net::IpAddr, sync::Arc};

use limiter_common::{sliding_window::Outcome, time::UnixMicros};
use smallvec::SmallVec;

pub use self::algorithm::Algorithm;
use crate::policy::Scope;

pub mod algorithm;
pub mod counter;
pub mod memory;
pub mod redis;
pub mod sync;

/// Whose counter it is. Never an API key itself: only its keyed hash.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Identity {
    User(Arc<str>),
    Key(ApiKeyId),
    Session(SessionId),
    /// Cut to the configured prefix.
    Ip(IpAddr),
    Global,
    /// `NAME:VALUE` of an attribute; its name has no colon.
    Attribute(Arc<str>),
}

impl Identity {
    /// As in [`Scope::as_str`].
    pub const fn scope_name(&self) -> &'static str {
        match self {
            Self::User(_) => Scope::User.as_str(),
            Self::Key(_) => Scope::Key.as_str(),
            Self::Session(_) => Scope::Session.as_str(),
            Self::Ip(_) => Scope::Ip.as_str(),
            Self::Global => Scope::Global.as_str(),
            Self::Attribute(_) => "attribute",
        }
    }
}

/// Keyed hash of an API key: what logs, counters and Redis see of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ApiKeyId(pub [u8; 16]);

/// Keyed hash of a session cookie's value, or of an address with its User-Agent: what counters and Redis see of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 16]);

/// One counter: a rule and an identity. Cloning costs two reference counts at most.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CounterKey {
    pub identity: Identity,
    pub rule: Arc<str>,
}

/// One counter that a request touches.
#[derive(Clone, Debug)]
pub struct Cell {
    pub key: CounterKey,
    pub algorithm: Algorithm,
    /// At least 1.
    pub cost: u64,
    /// A shadow cell is charged like an enforced one when it allows and the request as a whole passes; its denial
    /// changes nothing.
    pub enforced: bool,
}

/// What one counter says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellOutcome {
    pub outcome: Outcome,
    /// After the decision.
    pub remaining: u64,
    pub reset_us: u64,
    /// How long the answer is to be held when the request passes: its turn in a leaky bucket.
    pub delay_us: u64,
}

impl CellOutcome {
    const fn new(outcome: Outcome, reset_us: u64) -> Self {
        Self { outcome, remaining: 0, reset_us, delay_us: 0 }
    }
}

/// Outcomes of a request, in the order of its cells.
pub type Outcomes = SmallVec<[CellOutcome; memory::INLINE_CELLS]>;

/// Whether a request with these outcomes passes: every enforced cell allows.
pub fn passes(cells: &[Cell], outcomes: &[CellOutcome]) -> bool {
    cells.iter().zip(outcomes).all(|(cell, outcome)| !cell.enforced || outcome.outcome == Outcome::Allowed)
}

/// What earlier cells of the same request take from the counter of cell `number`. A shadow cell takes nothing from an
/// enforced one.
fn taken_before(cells: &[Cell], outcomes: &[CellOutcome], number: usize) -> u64 {
    let cell = &cells[number];
    let earlier = cells[..number].iter().zip(outcomes).filter(|(other, outcome)| {
        outcome.outcome == Outcome::Allowed && (other.enforced || !cell.enforced) && other.key == cell.key
    });
    earlier.fold(0, |sum, (other, _)| sum.saturating_add(other.cost))
}

/// Whether an allowed request is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Charge {
    Commit,
    /// Decides and writes nothing.
    Peek,
    /// Gives the cost back, and is always answered as allowed. A counter never goes below what nobody has used, and a node
    /// that shares its counters gives back what it has admitted itself.
    Refund,
}

/// Which clock a decision is made by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// The store's own.
    StoreClock,
    Given(UnixMicros),
}

/// Why a store could not answer. The three differ in what a failure policy does.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    #[error("{operation}: no answer from {store} within {after_ms} ms")]
    Timeout { operation: &'static str, store: String, after_ms: u64 },
    #[error("{operation}: {store} is unavailable: {reason}")]
    Unavailable { operation: &'static str, store: String, reason: String },
    #[error("{operation}: {store} answered what cannot be understood: {reason}")]
    BadReply { operation: &'static str, store: String, reason: String },
}

/// Decides requests over counters. One test suite runs over every implementation.
pub trait Store: Send + Sync {
    /// Decides all cells at once, and charges all of them or none; outcomes are in the order of `cells`.
    fn check(
        &self,
        at: At,
        charge: Charge,
        cells: &[Cell],
    ) -> impl Future<Output = Result<Vec<CellOutcome>, StoreError>> + Send;
}

//! Where counters live.
//!
//! A request is decided by one call with all its counters: either each enforced one allows and all are charged, or
//! nobody is charged. [`memory::MemoryStore`] decides requests; [`redis`] shares its counts with other nodes in the
//! background, and decides alone only where a rule wants that.

use std::{future::Future, net::IpAddr};

use limiter_common::{sliding_window::Outcome, time::UnixMicros};
use smallvec::SmallVec;

pub use self::{algorithm::Algorithm, name::Name};
use crate::policy::Scope;

pub mod algorithm;
pub mod breaker;
pub mod counter;
pub mod fleet;
pub mod lease;
pub mod memory;
mod name;
pub mod recovery;
pub mod redis;
pub mod sync;

/// Whose counter it is. Never an API key itself: only its keyed hash.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Identity {
    User(Name),
    Key(ApiKeyId),
    Session(SessionId),
    /// Cut to the configured prefix.
    Ip(IpAddr),
    Global,
    /// `NAME:VALUE` of an attribute; its name has no colon.
    Attribute(Name),
}

/// The same, of what others own: made for a request without counting a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityRef<'a> {
    User(&'a Name),
    Key(ApiKeyId),
    Session(SessionId),
    Ip(IpAddr),
    Global,
    Attribute(&'a Name),
}

impl Identity {
    /// As in [`Scope::as_str`].
    pub const fn scope_name(&self) -> &'static str {
        self.borrowed().scope_name()
    }

    #[inline]
    pub const fn borrowed(&self) -> IdentityRef<'_> {
        match self {
            Self::User(name) => IdentityRef::User(name),
            Self::Key(id) => IdentityRef::Key(*id),
            Self::Session(id) => IdentityRef::Session(*id),
            Self::Ip(address) => IdentityRef::Ip(*address),
            Self::Global => IdentityRef::Global,
            Self::Attribute(name) => IdentityRef::Attribute(name),
        }
    }
}

impl IdentityRef<'_> {
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

    fn to_owned(self) -> Identity {
        match self {
            Self::User(name) => Identity::User(name.clone()),
            Self::Key(id) => Identity::Key(id),
            Self::Session(id) => Identity::Session(id),
            Self::Ip(address) => Identity::Ip(address),
            Self::Global => Identity::Global,
            Self::Attribute(name) => Identity::Attribute(name.clone()),
        }
    }

    /// The same for all counters of an identity.
    #[inline]
    pub(crate) fn hash(&self) -> u64 {
        // The hashes of keys and sessions are random to whoever does not have the secret.
        let of_secret = |id: &[u8; 16]| u64::from_le_bytes([id[0], id[1], id[2], id[3], id[4], id[5], id[6], id[7]]);
        match self {
            Self::User(name) => name.hash_of_text(),
            // A user may be called as an attribute is.
            Self::Attribute(name) => !name.hash_of_text(),
            Self::Key(ApiKeyId(id)) | Self::Session(SessionId(id)) => of_secret(id),
            Self::Ip(address) => name::hash(address),
            Self::Global => 0,
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
    pub rule: Name,
}

impl CounterKey {
    /// Where the hash of a counter leads.
    pub(crate) fn hash(&self) -> u64 {
        hash_of(&self.identity.borrowed(), &self.rule)
    }
}

fn hash_of(identity: &IdentityRef<'_>, rule: &Name) -> u64 {
    identity.hash() ^ rule.hash_of_text().rotate_left(17)
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

/// The same, of what others own: made for a request without counting a reference.
#[derive(Clone, Copy, Debug)]
pub struct CellRef<'a> {
    pub identity: IdentityRef<'a>,
    pub rule: &'a Name,
    pub algorithm: Algorithm,
    /// At least 1.
    pub cost: u64,
    pub enforced: bool,
}

/// A [`Cell`], whoever owns what is in it.
pub trait AsCell {
    fn as_cell(&self) -> CellRef<'_>;
}

impl AsCell for Cell {
    #[inline]
    fn as_cell(&self) -> CellRef<'_> {
        let Self { key: CounterKey { identity, rule }, algorithm, cost, enforced } = self;
        let (identity, algorithm, cost, enforced) = (identity.borrowed(), *algorithm, *cost, *enforced);
        CellRef { identity, rule, algorithm, cost, enforced }
    }
}

impl AsCell for CellRef<'_> {
    #[inline]
    fn as_cell(&self) -> CellRef<'_> {
        *self
    }
}

impl CellRef<'_> {
    pub fn to_owned(&self) -> Cell {
        let key = self.key();
        Cell { key, algorithm: self.algorithm, cost: self.cost, enforced: self.enforced }
    }

    pub(crate) fn key(&self) -> CounterKey {
        CounterKey { identity: self.identity.to_owned(), rule: self.rule.clone() }
    }

    fn is_same_counter(&self, other: &CellRef<'_>) -> bool {
        self.rule == other.rule && self.identity == other.identity
    }

    /// As that of its key.
    pub(crate) fn hash(&self) -> u64 {
        hash_of(&self.identity, self.rule)
    }

    #[inline]
    pub(crate) fn is_of(&self, key: &CounterKey) -> bool {
        *self.rule == key.rule && self.identity == key.identity.borrowed()
    }
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
    /// Of a denial by memory: by how much the counter is above the ceiling, since other nodes had admitted more than was known.
    pub over: u64,
}

impl CellOutcome {
    /// Of a cell that nobody has decided yet.
    pub const fn allowed(reset_us: u64) -> Self {
        Self::new(Outcome::Allowed, reset_us)
    }

    const fn new(outcome: Outcome, reset_us: u64) -> Self {
        Self { outcome, remaining: 0, reset_us, delay_us: 0, over: 0 }
    }
}

/// Outcomes of a request, in the order of its cells.
pub type Outcomes = SmallVec<[CellOutcome; memory::INLINE_CELLS]>;

/// Whether a request with these outcomes passes: every enforced cell allows.
pub fn passes<C: AsCell>(cells: &[C], outcomes: &[CellOutcome]) -> bool {
    cells.iter().zip(outcomes).all(|(cell, outcome)| !cell.as_cell().enforced || outcome.outcome == Outcome::Allowed)
}

/// What earlier cells of the same request take from the counter of cell `number`. A shadow cell takes nothing from an
/// enforced one.
fn taken_before<C: AsCell>(cells: &[C], outcomes: &[CellOutcome], number: usize) -> u64 {
    let cell = cells[number].as_cell();
    let earlier = cells[..number].iter().map(AsCell::as_cell).zip(outcomes).filter(|(other, outcome)| {
        outcome.outcome == Outcome::Allowed && (other.enforced || !cell.enforced) && other.is_same_counter(&cell)
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

impl StoreError {
    /// Without operation and store.
    pub fn reason(&self) -> &str {
        match self {
            Self::Timeout { .. } => "no answer in time",
            Self::Unavailable { reason, .. } | Self::BadReply { reason, .. } => reason,
        }
    }
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

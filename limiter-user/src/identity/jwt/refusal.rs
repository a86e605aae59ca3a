//! Why tokens are refused: for operators, in metrics and at DEBUG, and never for whoever presents one.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a token is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It is too long, or no token.
    Malformed,
    /// Its `kid` is that of no key.
    UnknownKey,
    /// No key that it may be of has signed it, by the algorithm of that key.
    Signature,
    Expired,
    /// `nbf` is yet to come.
    NotYetValid,
    Audience,
    Issuer,
    /// `exp` or `sub` is missing, or a claim is of the wrong type.
    Claims,
}

impl Refusal {
    pub const ALL: &[Self] = &[
        Self::Malformed,
        Self::UnknownKey,
        Self::Signature,
        Self::Expired,
        Self::NotYetValid,
        Self::Audience,
        Self::Issuer,
        Self::Claims,
    ];

    /// The name in logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::UnknownKey => "unknown_key",
            Self::Signature => "signature",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::Audience => "audience",
            Self::Issuer => "issuer",
            Self::Claims => "claims",
        }
    }
}

/// How many there were, by [`Refusal`].
#[derive(Debug, Default)]
pub struct Refusals([AtomicU64; Refusal::ALL.len()]);

impl Refusals {
    pub(super) fn count(&self, refusal: Refusal) {
        self.0[refusal as usize].fetch_add(1, Ordering::Relaxed);
        tracing::debug!(target: "limiter::api", reason = refusal.as_str(), "a token is not valid");
    }

    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Refusal::ALL.iter().map(|refusal| (refusal.as_str(), self.0[*refusal as usize].load(Ordering::Relaxed)))
    }
}

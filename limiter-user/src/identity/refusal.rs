//! Why API keys and tokens are refused: for operators, in metrics and at DEBUG, and never for whoever presents one.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why an API key or a token is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No key that `limiter keys` makes has this form: a credential of another kind, perhaps.
    KeyMalformed,
    KeyUnknown,
    KeyDisabled,
    KeyExpired,
    /// Two in the same place that differ.
    KeySeveral,
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
    /// Two that differ.
    Several,
}

impl Refusal {
    pub const ALL: &[Self] = &[
        Self::KeyMalformed,
        Self::KeyUnknown,
        Self::KeyDisabled,
        Self::KeyExpired,
        Self::KeySeveral,
        Self::Malformed,
        Self::UnknownKey,
        Self::Signature,
        Self::Expired,
        Self::NotYetValid,
        Self::Audience,
        Self::Issuer,
        Self::Claims,
        Self::Several,
    ];

    /// Of what, and why, as logs and metrics name it.
    pub const fn labels(self) -> [&'static str; 2] {
        match self {
            Self::KeyMalformed => ["api_key", "malformed"],
            Self::KeyUnknown => ["api_key", "unknown"],
            Self::KeyDisabled => ["api_key", "disabled"],
            Self::KeyExpired => ["api_key", "expired"],
            Self::KeySeveral => ["api_key", "several"],
            Self::Malformed => ["token", "malformed"],
            Self::UnknownKey => ["token", "unknown_key"],
            Self::Signature => ["token", "signature"],
            Self::Expired => ["token", "expired"],
            Self::NotYetValid => ["token", "not_yet_valid"],
            Self::Audience => ["token", "audience"],
            Self::Issuer => ["token", "issuer"],
            Self::Claims => ["token", "claims"],
            Self::Several => ["token", "several"],
        }
    }
}

/// How many there were, by [`Refusal`].
#[derive(Debug, Default)]
pub struct Refusals([AtomicU64; Refusal::ALL.len()]);

impl Refusals {
    pub fn count(&self, refusal: Refusal) {
        self.0[refusal as usize].fetch_add(1, Ordering::Relaxed);
        let [credential, reason] = refusal.labels();
        tracing::debug!(target: "limiter::api", credential, reason, "a credential is not valid");
    }

    /// By the labels of the refusal.
    pub fn counts(&self) -> impl Iterator<Item = ([&'static str; 2], u64)> {
        Refusal::ALL.iter().map(|refusal| (refusal.labels(), self.0[*refusal as usize].load(Ordering::Relaxed)))
    }
}

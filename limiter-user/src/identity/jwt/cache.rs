//! Tokens that were verified lately, by a hash of the whole token: a signature costs ten times as much.
//!
//! Only valid tokens get in, so that nobody pushes them out with invalid ones.

use std::{collections::HashMap, mem};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::Verified;

/// Tokens in each of the two generations.
const GENERATION: usize = 8192;

pub(super) type TokenHash = [u8; 32];

#[derive(Clone, Debug)]
pub(super) struct Cached {
    pub(super) verified: Verified,
    /// In epoch seconds, with the leeway.
    pub(super) expires_s: i64,
}

/// When the young generation is full it is the old one, and what was old is gone.
#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<Generations>);

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<TokenHash, Cached>,
    old: HashMap<TokenHash, Cached>,
}

impl Cache {
    pub(super) fn hash(token: &str) -> TokenHash {
        Sha256::digest(token).into()
    }

    pub(super) fn get(&self, hash: &TokenHash) -> Option<Cached> {
        let mut generations = self.0.lock();
        if let Some(cached) = generations.young.get(hash) {
            return Some(cached.clone());
        }
        let cached = generations.old.remove(hash)?;
        generations.insert(*hash, cached.clone());
        Some(cached)
    }

    pub(super) fn insert(&self, hash: TokenHash, cached: Cached) {
        self.0.lock().insert(hash, cached);
    }
}

impl Generations {
    fn insert(&mut self, hash: TokenHash, cached: Cached) {
        if self.young.len() >= GENERATION {
            self.old = mem::take(&mut self.young);
        }
        self.young.insert(hash, cached);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_bounded_and_keeps_what_is_asked_for() {
        let cache = Cache::default();
        let cached = Cached { verified: Verified { user: "u".into(), plan: None }, expires_s: 1 };
        let kept = Cache::hash("kept");
        cache.insert(kept, cached.clone());
        for number in 0..5 * GENERATION {
            cache.insert(Cache::hash(&number.to_string()), cached.clone());
            assert!(cache.get(&kept).is_some(), "{number}");
        }
        assert!(cache.get(&Cache::hash("0")).is_none());
        let generations = cache.0.lock();
        assert!(generations.young.len() + generations.old.len() <= 2 * GENERATION);
    }
}

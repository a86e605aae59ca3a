//! A name with its hash: what counters are found by, hashed once for all the requests that it is in.

use std::{
    fmt,
    hash::{BuildHasher, Hash, Hasher, RandomState},
    ops::Deref,
    sync::{Arc, OnceLock},
};

use foldhash::{SharedSeed, quality::SeedableRandomState};

/// Compared by its text, and hashed already.
#[derive(Clone)]
pub struct Name {
    hash: u64,
    text: Arc<str>,
}

impl Name {
    #[inline]
    pub const fn hash_of_text(&self) -> u64 {
        self.hash
    }

    #[inline]
    pub const fn as_arc(&self) -> &Arc<str> {
        &self.text
    }
}

/// Keyed by the operating system's random numbers: nobody outside can choose names, or addresses, that collide.
pub(super) fn hash<T: Hash + ?Sized>(value: &T) -> u64 {
    static HASHER: OnceLock<SeedableRandomState> = OnceLock::new();
    static SHARED: OnceLock<SharedSeed> = OnceLock::new();
    let hasher = HASHER.get_or_init(|| {
        let random = |purpose: &str| RandomState::new().hash_one(purpose);
        // foldhash's second seed is one for the process.
        let shared = SHARED.get_or_init(|| SharedSeed::from_u64(random("shared")));
        SeedableRandomState::with_seed(random("of this hasher"), shared)
    });
    hasher.hash_one(value)
}

impl From<Arc<str>> for Name {
    fn from(text: Arc<str>) -> Self {
        Self { hash: hash(&*text), text }
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        Arc::<str>::from(text).into()
    }
}

impl From<String> for Name {
    fn from(text: String) -> Self {
        Arc::<str>::from(text).into()
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl PartialEq for Name {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        // Most of what is equal is the same, and then the text is not touched.
        self.hash == other.hash && (Arc::ptr_eq(&self.text, &other.text) || self.text == other.text)
    }
}

impl Eq for Name {}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_are_equal_names() {
        let (one, other) = (Name::from("client"), Name::from("client".to_owned()));
        assert_eq!((&one, one.hash_of_text()), (&other, other.hash_of_text()));
        assert_ne!(one, Name::from("client2"));
    }
}

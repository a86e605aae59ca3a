//! An API key that a request presents, and that the key store has.

use std::{fmt, ops::Deref, sync::Arc};

use arc_swap::{ArcSwap, Guard};

use super::{
    api_key::{RandomError, has_form_of_key},
    entries::{KeyOwner, KeyPlace},
    key_file::KeyStore,
    recent::{RecentKeys, Sought},
    refusal::Refusal,
};

/// The key store in force, which can be replaced, and which of its keys were presented lately. Shared by whoever puts keys
/// in force, asks for one and tells of them.
#[derive(Clone)]
pub struct KnownKeys(Arc<ArcSwap<Keys>>);

struct Keys {
    store: KeyStore,
    recent: Arc<RecentKeys>,
}

/// Whose a key is. The key store stays as long as this is kept, and no references to the owner itself are counted: the
/// count would be in memory that a request has to wait for.
pub struct KnownKey {
    keys: Guard<Arc<Keys>>,
    place: KeyPlace,
}

/// A key that is being fetched from memory; see [`KnownKeys::seek`].
pub struct Foreseen<'h> {
    text: &'h [u8],
    sought: Sought,
    keys: Guard<Arc<Keys>>,
}

impl fmt::Debug for Foreseen<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Foreseen")
    }
}

impl fmt::Debug for KnownKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KnownKeys").field("keys", &self.0.load().store.len()).finish_non_exhaustive()
    }
}

impl KnownKeys {
    pub fn new(store: KeyStore) -> Result<Self, RandomError> {
        let recent = Arc::new(RecentKeys::new(store.len())?);
        Ok(Self(Arc::new(ArcSwap::from_pointee(Keys { store, recent }))))
    }

    /// Makes changed keys effective.
    pub fn replace(&self, store: KeyStore) {
        let recent = Arc::clone(&self.0.load().recent);
        let recent = if recent.has_room_for(store.len()) { recent } else { Arc::new(recent.resized(store.len())) };
        self.0.store(Arc::new(Keys { store, recent }));
    }

    /// Looks at the key store.
    pub fn with_store<T>(&self, look: impl FnOnce(&KeyStore) -> T) -> T {
        look(&self.0.load().store)
    }

    /// Begins to look for a key, for a request that has something else to do before it needs to know.
    #[inline]
    pub fn seek<'h>(&self, text: &'h [u8]) -> Option<Foreseen<'h>> {
        let keys = self.0.load();
        let sought = keys.recent.seek(text)?;
        Some(Foreseen { text, sought, keys })
    }

    /// Whose key this is, if it is valid at the time that `is_over` compares with the end of one that has an end.
    #[inline]
    pub fn find(
        &self,
        presented: &str,
        foreseen: Option<Foreseen<'_>>,
        is_over: impl FnOnce(&KeyOwner) -> bool,
    ) -> Result<KnownKey, Refusal> {
        // The key of a request may turn out to be another than what it looked like.
        let foreseen = foreseen.filter(|foreseen| std::ptr::eq(foreseen.text, presented.as_bytes()));
        let Foreseen { sought, keys, .. } =
            foreseen.or_else(|| self.seek(presented.as_bytes())).ok_or(Refusal::KeyMalformed)?;
        let unknown = || if has_form_of_key(presented) { Refusal::KeyUnknown } else { Refusal::KeyMalformed };
        let place = keys.recent.place_of(&keys.store, presented, sought).ok_or_else(unknown)?;
        keys.store.prefetch_owner(place);
        if place.may_end() && is_over(keys.store.owner(place)) {
            let is_disabled = keys.store.owner(place).is_disabled();
            return Err(if is_disabled { Refusal::KeyDisabled } else { Refusal::KeyExpired });
        }
        Ok(KnownKey { keys, place })
    }
}

impl Deref for KnownKey {
    type Target = KeyOwner;

    #[inline]
    fn deref(&self) -> &KeyOwner {
        self.keys.store.owner(self.place)
    }
}

impl Clone for KnownKey {
    fn clone(&self) -> Self {
        Self { keys: Guard::from_inner(Arc::clone(&self.keys)), place: self.place }
    }
}

impl fmt::Debug for KnownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

/// A key that is in no key store.
#[cfg(test)]
impl From<KeyOwner> for KnownKey {
    fn from(owner: KeyOwner) -> Self {
        let (store, place) = KeyStore::of(owner);
        let recent = Arc::new(RecentKeys::new(0).expect("random numbers"));
        Self { keys: Guard::from_inner(Arc::new(Keys { store, recent })), place }
    }
}

#[cfg(test)]
mod tests {
    use limiter_common::time::UnixMicros;

    use super::*;
    use crate::{
        config::Origin,
        identity::{KeySecret, key_file::KeyEntry},
    };

    #[test]
    fn why_a_key_is_refused() {
        const NOW: UnixMicros = UnixMicros::new(1_000_000);
        let secret = KeySecret::random().unwrap();
        let key = |digit: &str| format!("lk_{}", digit.repeat(43));
        let entry = |digit: &str, disabled, expires: Option<u64>| KeyEntry {
            id: secret.id_of(&key(digit)),
            client: "c".into(),
            plan: None,
            disabled,
            created: None,
            expires: expires.map(UnixMicros::new),
            origin: Origin::Redis("redis".into()),
            id_origin: Origin::Redis("redis".into()),
        };
        let entries = [
            entry("a", false, None),
            entry("b", false, Some(NOW.get() + 1)),
            entry("c", false, Some(NOW.get())),
            entry("d", true, None),
            entry("e", true, Some(NOW.get() + 1)),
        ];
        let keys = KnownKeys::new(KeyStore::new(Some(secret.clone()), entries.into_iter().collect())).unwrap();
        for (presented, refused) in [
            (key("a"), None),
            (key("b"), None),
            (key("c"), Some(Refusal::KeyExpired)),
            (key("d"), Some(Refusal::KeyDisabled)),
            (key("e"), Some(Refusal::KeyDisabled)),
            (key("f"), Some(Refusal::KeyUnknown)),
            (key("_"), Some(Refusal::KeyMalformed)),
            (key("a") + "a", Some(Refusal::KeyMalformed)),
            (key("a").replace("lk_", ""), Some(Refusal::KeyMalformed)),
            (String::new(), Some(Refusal::KeyMalformed)),
            ("x".repeat(10_000), Some(Refusal::KeyMalformed)),
        ] {
            // Presented once more, it may be known from before.
            for _ in 0..2 {
                let found = keys.find(&presented, None, |owner| owner.has_ended(NOW));
                assert_eq!(found.err(), refused, "{presented}");
            }
        }
    }
}

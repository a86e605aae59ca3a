//! API keys that were presented lately: to know them again costs no HMAC.
//!
//! A key is found by SipHash-2-4 with 128 bits, under a random key of this process. That is a pseudo-random function, so
//! whoever does not know its key can but guess, and each guess is a request: that another text than the one that was
//! looked up is taken for it has a chance of 2^-96, by the bits that are kept. Neither the text nor its hash is told to
//! anybody, and the hash of none is worth anything to another process. What is found is whose the key was in one key store;
//! in the next it is looked up again.

use std::{fmt, hash::Hasher as _};

use parking_lot::Mutex;
use prefetch_index::prefetch_index;
use siphasher::sip128::{Hasher128 as _, SipHasher24};

use super::{
    api_key::{MAX_KEY_LEN, RandomError},
    entries::KeyPlace,
    key_file::KeyStore,
};

/// Keys that have the same group.
const WAYS: usize = 3;
const LEAST: usize = 1024;

/// Bounded: two to four times as many places as there are keys, and at least some; only keys that exist get one.
pub(super) struct RecentKeys {
    secret: SipHasher24,
    /// A power of two of them.
    groups: Box<[Group]>,
}

/// One cache line.
#[derive(Default)]
#[repr(align(64))]
struct Group(Mutex<Places>);

const _: () = assert!(size_of::<Group>() == 64);

#[derive(Default)]
struct Places {
    /// The key store that said whose keys these are.
    store: u64,
    lower: [u64; WAYS],
    upper: [u32; WAYS],
    /// Of those that are.
    at: [Option<KeyPlace>; WAYS],
}

/// What a key is looked for by: 96 bits of its hash.
#[derive(Clone, Copy)]
pub(super) struct Sought {
    lower: u64,
    upper: u32,
}

impl fmt::Debug for RecentKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecentKeys").field("groups", &self.groups.len()).finish_non_exhaustive()
    }
}

impl RecentKeys {
    /// For so many keys.
    pub(super) fn new(keys: usize) -> Result<Self, RandomError> {
        let secret = SipHasher24::new_with_keys(getrandom::u64()?, getrandom::u64()?);
        Ok(Self::with_secret(secret, keys))
    }

    /// An empty one for another number of keys.
    #[must_use]
    pub(super) fn resized(&self, keys: usize) -> Self {
        Self::with_secret(self.secret, keys)
    }

    fn with_secret(secret: SipHasher24, keys: usize) -> Self {
        let groups = (keys * 2 / WAYS).max(LEAST).next_power_of_two();
        Self { secret, groups: (0..groups).map(|_| Group::default()).collect() }
    }

    /// Whether it is as large as it should be for so many keys.
    pub(super) fn has_room_for(&self, keys: usize) -> bool {
        self.groups.len() >= keys * 2 / WAYS
    }

    fn group_of(&self, sought: Sought) -> usize {
        usize::try_from(sought.lower).unwrap_or(0) & (self.groups.len() - 1)
    }

    /// Hashes a key, and begins to fetch from memory what is known of it. `None` of what no key is.
    pub(super) fn seek(&self, presented: &[u8]) -> Option<Sought> {
        if presented.len() > MAX_KEY_LEN {
            return None;
        }
        let mut hasher = self.secret;
        hasher.write(presented);
        let hash = hasher.finish128();
        let sought = Sought { lower: hash.h1, upper: (hash.h2 >> u32::BITS) as u32 };
        prefetch_index(&self.groups, self.group_of(sought));
        Some(sought)
    }

    /// Where the owner of a key is in `store`, whatever has ended. `sought` must be of the same key.
    pub(super) fn place_of(&self, store: &KeyStore, presented: &str, sought: Sought) -> Option<KeyPlace> {
        let Group(group) = &self.groups[self.group_of(sought)];
        let known = group.lock().get(store, sought);
        if known.is_some() {
            return known;
        }
        let place = store.place_of(presented)?;
        group.lock().put(store, sought, place);
        Some(place)
    }
}

impl Places {
    #[inline]
    fn way_of(&self, sought: Sought) -> Option<usize> {
        (0..WAYS).find(|way| self.lower[*way] == sought.lower && self.upper[*way] == sought.upper)
    }

    #[inline]
    fn get(&self, store: &KeyStore, sought: Sought) -> Option<KeyPlace> {
        self.way_of(sought).filter(|_| self.store == store.generation()).and_then(|way| self.at[way])
    }

    fn put(&mut self, store: &KeyStore, sought: Sought, place: KeyPlace) {
        if self.store != store.generation() {
            *self = Self { store: store.generation(), ..Self::default() };
        }
        let free = self.at.iter().position(Option::is_none);
        let way = self.way_of(sought).or(free);
        // By a part of the hash that says nothing of the group.
        let way = way.unwrap_or_else(|| usize::from((sought.lower >> 48) as u16) % WAYS);
        self.lower[way] = sought.lower;
        self.upper[way] = sought.upper;
        self.at[way] = Some(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::Origin,
        identity::{Entries, KeySecret, api_key::id_to_hex, key_record::KeyRecord},
    };

    fn store(keys: &[&str]) -> KeyStore {
        let secret = KeySecret::new(&[7; KeySecret::LEN]);
        let entry = |key: &&str| {
            let record = KeyRecord { client: Some("c_1".to_owned()), ..KeyRecord::default() };
            record.entry(&id_to_hex(secret.id_of(key)), &Origin::Redis("r".into())).unwrap()
        };
        let entries = keys.iter().map(entry).collect::<Entries>();
        KeyStore::new(Some(secret), entries)
    }

    #[test]
    fn knows_what_the_key_store_knows_whatever_was_presented_before() {
        let keys: Vec<String> = (0..10_000).map(|key| format!("lk_{key}")).collect();
        let texts: Vec<&str> = keys.iter().map(String::as_str).collect();
        let (all, half) = (store(&texts), store(&texts[..5000]));
        // Far too small, so that keys push out one another.
        let recent = RecentKeys::new(10).expect("random numbers");
        let id = |store: &KeyStore, key: &str| {
            let place = recent.place_of(store, key, recent.seek(key.as_bytes())?)?;
            Some(store.owner(place).id)
        };
        for round in 0..3 {
            for (number, key) in texts.iter().enumerate() {
                let expected = KeySecret::new(&[7; KeySecret::LEN]).id_of(key);
                assert_eq!(id(&all, key), Some(expected), "{key}, {round}");
                assert_eq!(id(&all, key), Some(expected), "{key}, {round}, again");
                assert_eq!(id(&half, key), (number < 5000).then_some(expected), "{key}, {round}, half");
            }
            assert_eq!(id(&all, "lk_x"), None);
            assert_eq!(id(&all, &"x".repeat(MAX_KEY_LEN + 1)), None);
        }
    }
}

//! API keys that were presented lately: to know them again costs no HMAC.
//!
//! A key is found by SipHash-2-4 with 128 bits, under a random key of this process. That is a pseudo-random function, so
//! whoever does not know its key can but guess, and each guess is a request: that another text than the one that was
//! looked up is taken for it has a chance of 2^-128. Neither the text nor its hash is told to anybody, and the hash of none
//! is worth anything to another process. What is found is whose the key was in one key store; in the next it is looked up
//! again.

use std::{fmt, hash::Hasher as _, sync::Arc};

use parking_lot::Mutex;
use siphasher::sip128::{Hasher128 as _, SipHasher24};

use super::{
    api_key::{MAX_KEY_LEN, RandomError},
    entries::KeyOwner,
    key_file::KeyStore,
};

/// Keys that have the same place.
const WAYS: usize = 3;
const LEAST: usize = 1024;

/// Bounded: about twice as many places as there are keys, and only keys that exist get one.
pub struct RecentKeys {
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
    /// Half of the hash of each. The other half is kept by its owner, whom a request looks at anyway.
    halves: [u64; WAYS],
    owners: [Option<Arc<KeyOwner>>; WAYS],
}

impl fmt::Debug for RecentKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecentKeys").field("groups", &self.groups.len()).finish_non_exhaustive()
    }
}

impl RecentKeys {
    /// For so many keys.
    pub fn new(keys: usize) -> Result<Self, RandomError> {
        let secret = SipHasher24::new_with_keys(getrandom::u64()?, getrandom::u64()?);
        Ok(Self::with_secret(secret, keys))
    }

    /// An empty one for another number of keys.
    #[must_use]
    pub fn resized(&self, keys: usize) -> Self {
        Self::with_secret(self.secret, keys)
    }

    fn with_secret(secret: SipHasher24, keys: usize) -> Self {
        let groups = (keys * 2 / WAYS).max(LEAST).next_power_of_two();
        Self { secret, groups: (0..groups).map(|_| Group::default()).collect() }
    }

    /// Whether it is as large as it should be for so many keys.
    pub fn has_room_for(&self, keys: usize) -> bool {
        self.groups.len() >= keys * 2 / WAYS
    }

    /// Whose key this is by `store`, whatever has ended.
    pub fn owner(&self, store: &KeyStore, presented: &str) -> Option<Arc<KeyOwner>> {
        if presented.len() > MAX_KEY_LEN {
            return None;
        }
        let mut hasher = self.secret;
        hasher.write(presented.as_bytes());
        let hash = hasher.finish128();
        let Group(group) = &self.groups[usize::try_from(hash.h1).unwrap_or(0) & (self.groups.len() - 1)];
        if let Some(owner) = group.lock().get(store, hash.h1).filter(|owner| owner.is_presented_as(hash.h2)) {
            return Some(Arc::clone(owner));
        }
        let owner = store.owner(presented)?;
        owner.present_as(hash.h2);
        group.lock().put(store, hash.h1, owner);
        Some(Arc::clone(owner))
    }
}

impl Places {
    fn get(&self, store: &KeyStore, half: u64) -> Option<&Arc<KeyOwner>> {
        let way = self.halves.iter().position(|other| *other == half)?;
        self.owners[way].as_ref().filter(|_| self.store == store.generation())
    }

    fn put(&mut self, store: &KeyStore, half: u64, owner: &Arc<KeyOwner>) {
        if self.store != store.generation() {
            *self = Self { store: store.generation(), ..Self::default() };
        }
        let free = self.owners.iter().position(Option::is_none);
        let way = self.halves.iter().position(|other| *other == half).or(free);
        // By a part of the hash that says nothing of the group.
        let way = way.unwrap_or_else(|| usize::from((half >> 48) as u16) % WAYS);
        self.halves[way] = half;
        self.owners[way] = Some(Arc::clone(owner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::Origin,
        identity::{Entries, KeySecret, api_key::id_to_hex, key_record::KeyRecord},
        store::ApiKeyId,
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
        for round in 0..3 {
            for (number, key) in texts.iter().enumerate() {
                let id = |owner: Option<Arc<KeyOwner>>| owner.map(|owner| owner.id);
                let expected: ApiKeyId = all.owner(key).expect("it is there").id;
                assert_eq!(id(recent.owner(&all, key)), Some(expected), "{key}, {round}");
                assert_eq!(id(recent.owner(&all, key)), Some(expected), "{key}, {round}, again");
                assert_eq!(id(recent.owner(&half, key)), (number < 5000).then_some(expected), "{key}, {round}, half");
            }
            assert_eq!(recent.owner(&all, "lk_x"), None);
            assert_eq!(recent.owner(&all, &"x".repeat(MAX_KEY_LEN + 1)), None);
        }
    }
}

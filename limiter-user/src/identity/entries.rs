//! The entries of a key store in memory.
//!
//! Shards are shared between a store and the next one: a change of one key among a hundred thousand copies a few hundred
//! entries, and requests go on with the old ones meanwhile.

use std::{collections::HashMap, sync::Arc};

use super::key_file::KeyEntry;
use crate::store::ApiKeyId;

/// One for each first byte of an id. Ids are keyed hashes, so shards are alike.
const SHARDS: usize = 256;

type Shard = HashMap<ApiKeyId, KeyEntry>;

#[derive(Clone, Debug)]
pub struct Entries {
    shards: Vec<Arc<Shard>>,
    len: usize,
}

impl Default for Entries {
    fn default() -> Self {
        Self { shards: vec![Arc::default(); SHARDS], len: 0 }
    }
}

impl Entries {
    pub fn get(&self, id: ApiKeyId) -> Option<&KeyEntry> {
        self.shards[usize::from(id.0[0])].get(&id)
    }

    /// Puts an entry in the place of what is there of its key.
    pub fn insert(&mut self, entry: KeyEntry) {
        let shard = Arc::make_mut(&mut self.shards[usize::from(entry.id.0[0])]);
        if shard.insert(entry.id, entry).is_none() {
            self.len += 1;
        }
    }

    pub fn remove(&mut self, id: ApiKeyId) {
        let shard = &mut self.shards[usize::from(id.0[0])];
        if shard.contains_key(&id) {
            Arc::make_mut(shard).remove(&id);
            self.len -= 1;
        }
    }

    pub const fn len(&self) -> usize {
        self.len
    }

    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = &KeyEntry> {
        self.shards.iter().flat_map(|shard| shard.values())
    }
}

impl FromIterator<KeyEntry> for Entries {
    fn from_iter<I: IntoIterator<Item = KeyEntry>>(entries: I) -> Self {
        let mut all = Self::default();
        for entry in entries {
            all.insert(entry);
        }
        all
    }
}

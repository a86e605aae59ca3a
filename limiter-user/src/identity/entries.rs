//! The entries of a key store in memory.
//!
//! Shards are shared between a store and the next one: a change of one key among a hundred thousand copies a few hundred
//! entries, and requests go on with the old ones meanwhile.

use std::{
    borrow::Borrow,
    collections::{HashMap, HashSet},
    fmt,
    hash::{Hash, Hasher},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use foldhash::fast::RandomState;
use limiter_common::time::UnixMicros;

use super::key_file::KeyEntry;
use crate::store::{ApiKeyId, Name};

/// One for each first byte of an id. Ids are keyed hashes, so shards are alike.
const SHARDS: usize = 256;

/// Whose a key is.
#[derive(Debug)]
pub struct KeyOwner {
    pub id: ApiKeyId,
    /// Hashed once, and not for each request.
    pub client: Name,
    pub plan: Option<Arc<str>>,
    /// When the key ends, which is no part of whose it is; the beginning of time for one that is disabled.
    ends: Option<UnixMicros>,
    /// Half of a hash of the key as it was presented last, with a secret of this process; see `recent.rs`.
    presented: Presented,
}

/// Never printed.
#[derive(Default)]
struct Presented(AtomicU64);

impl fmt::Debug for Presented {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Presented")
    }
}

impl KeyOwner {
    pub fn new(id: ApiKeyId, client: impl Into<Name>, plan: Option<Arc<str>>) -> Self {
        Self { id, client: client.into(), plan, ends: None, presented: Presented::default() }
    }

    #[inline]
    pub(super) fn is_presented_as(&self, hash: u64) -> bool {
        self.presented.0.load(Ordering::Relaxed) == hash
    }

    pub(super) fn present_as(&self, hash: u64) {
        self.presented.0.store(hash, Ordering::Relaxed);
    }

    /// Most keys do not end, and then nobody needs to know what time it is.
    #[inline]
    pub fn has_ended(&self, now: impl FnOnce() -> UnixMicros) -> bool {
        self.ends.is_some_and(|ends| now() >= ends)
    }
}

impl PartialEq for KeyOwner {
    fn eq(&self, other: &Self) -> bool {
        (self.id, &self.client, &self.plan) == (other.id, &other.client, &other.plan)
    }
}

impl Eq for KeyOwner {}

/// Found by the id of the key.
#[derive(Clone, Debug)]
struct ById(Arc<KeyOwner>);

impl Borrow<ApiKeyId> for ById {
    fn borrow(&self) -> &ApiKeyId {
        &self.0.id
    }
}

impl Hash for ById {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.id.hash(state);
    }
}

impl PartialEq for ById {
    fn eq(&self, other: &Self) -> bool {
        self.0.id == other.0.id
    }
}

impl Eq for ById {}

#[derive(Clone, Debug, Default)]
struct Shard {
    entries: HashMap<ApiKeyId, KeyEntry>,
    /// The same for requests, whose way to what they need is short: so few bytes a key stay in the cache. Ids are hashes
    /// with a secret already, so that this hash need not withstand an adversary.
    owners: HashSet<ById, RandomState>,
}

#[derive(Clone, Debug)]
pub struct Entries {
    shards: Vec<Arc<Shard>>,
    len: usize,
    /// One text for all keys of a plan, which so stays in the cache.
    plans: HashSet<Arc<str>>,
}

impl Default for Entries {
    fn default() -> Self {
        Self { shards: vec![Arc::default(); SHARDS], len: 0, plans: HashSet::new() }
    }
}

impl Entries {
    pub fn get(&self, id: ApiKeyId) -> Option<&KeyEntry> {
        self.shards[usize::from(id.0[0])].entries.get(&id)
    }

    pub(super) fn owner(&self, id: ApiKeyId) -> Option<&Arc<KeyOwner>> {
        self.shards[usize::from(id.0[0])].owners.get(&id).map(|ById(owner)| owner)
    }

    /// Puts an entry in the place of what is there of its key.
    pub fn insert(&mut self, entry: KeyEntry) {
        let KeyEntry { id, client, plan, disabled, expires, .. } = &entry;
        let plan = plan.as_ref().map(|plan| {
            self.plans.insert(Arc::clone(plan));
            self.plans.get(plan).map_or_else(|| Arc::clone(plan), Arc::clone)
        });
        let ends = if *disabled { Some(UnixMicros::new(0)) } else { *expires };
        let owner = KeyOwner { ends, ..KeyOwner::new(*id, Arc::clone(client), plan) };
        let shard = Arc::make_mut(&mut self.shards[usize::from(id.0[0])]);
        shard.owners.replace(ById(Arc::new(owner)));
        if shard.entries.insert(entry.id, entry).is_none() {
            self.len += 1;
        }
    }

    pub fn remove(&mut self, id: ApiKeyId) {
        let shard = &mut self.shards[usize::from(id.0[0])];
        if shard.entries.contains_key(&id) {
            let shard = Arc::make_mut(shard);
            shard.entries.remove(&id);
            shard.owners.remove(&id);
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
        self.shards.iter().flat_map(|shard| shard.entries.values())
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

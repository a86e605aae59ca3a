//! The entries of a key store in memory.
//!
//! Shards are shared between a store and the next one: a change of one key among a hundred thousand copies a few hundred
//! entries, and requests go on with the old ones meanwhile.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    num::NonZeroU32,
    sync::Arc,
};

use foldhash::fast::RandomState;
use limiter_common::time::UnixMicros;
use prefetch_index::prefetch_index;

use super::key_file::KeyEntry;
use crate::store::{ApiKeyId, Name};

/// One for each first byte of an id. Ids are keyed hashes, so shards are alike.
const SHARDS: usize = 256;

/// Whose a key is: one cache line, which is all that a request has to read of it.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub struct KeyOwner {
    pub id: ApiKeyId,
    /// Hashed once, and not for each request.
    pub client: Name,
    pub plan: Option<Arc<str>>,
    /// When the key ends, which is no part of whose it is; the beginning of time for one that is disabled.
    ends: UnixMicros,
}

const _: () = assert!(size_of::<KeyOwner>() == 64);

const NEVER: UnixMicros = UnixMicros::new(u64::MAX);
const DISABLED: UnixMicros = UnixMicros::new(0);

impl KeyOwner {
    pub fn new(id: ApiKeyId, client: impl Into<Name>, plan: Option<Arc<str>>) -> Self {
        Self { id, client: client.into(), plan, ends: NEVER }
    }

    #[inline]
    pub fn has_ended(&self, now: UnixMicros) -> bool {
        self.may_end() && now >= self.ends
    }

    fn may_end(&self) -> bool {
        self.ends != NEVER
    }

    /// Rather than that its time came.
    pub(super) fn is_disabled(&self) -> bool {
        self.ends == DISABLED
    }
}

impl PartialEq for KeyOwner {
    fn eq(&self, other: &Self) -> bool {
        (self.id, &self.client, &self.plan) == (other.id, &other.client, &other.plan)
    }
}

impl Eq for KeyOwner {}

/// Where the owner of a key is, in one key store and no other: the shard in the lowest byte, then the place in it from 1,
/// and in the highest bit whether the key may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyPlace(NonZeroU32);

/// Shards have fewer keys than that.
const MAX_PLACE: usize = (1 << 23) - 2;

impl KeyPlace {
    const ENDS: u32 = 1 << 31;

    fn new(shard: u8, at: usize, may_end: bool) -> Option<Self> {
        let at = u32::try_from(at).ok().filter(|_| at <= MAX_PLACE)? + 1;
        NonZeroU32::new(u32::from(shard) | at << u8::BITS | if may_end { Self::ENDS } else { 0 }).map(Self)
    }

    /// Most keys do not end, and then nobody needs to know what time it is, nor to wait for the owner.
    #[inline]
    pub(super) const fn may_end(self) -> bool {
        self.0.get() & Self::ENDS != 0
    }

    #[inline]
    fn of(self) -> (usize, usize) {
        let bits = self.0.get();
        let at = ((bits & !Self::ENDS) >> u8::BITS) - 1;
        (usize::from(bits.to_le_bytes()[0]), usize::try_from(at).unwrap_or(usize::MAX))
    }
}

/// The owners of keys side by side.
#[derive(Clone, Debug, Default)]
struct Owners {
    owners: Vec<KeyOwner>,
    /// Ids are hashes with a secret already, so that this hash need not withstand an adversary.
    places: HashMap<ApiKeyId, usize, RandomState>,
}

impl Owners {
    fn put(&mut self, owner: KeyOwner) {
        match self.places.entry(owner.id) {
            Entry::Occupied(place) => self.owners[*place.get()] = owner,
            Entry::Vacant(place) => {
                place.insert(self.owners.len());
                self.owners.push(owner);
            }
        }
    }

    /// The last one takes the place that becomes free.
    fn remove(&mut self, id: ApiKeyId) {
        let Some(place) = self.places.remove(&id) else { return };
        self.owners.swap_remove(place);
        if let Some(moved) = self.owners.get(place) {
            self.places.insert(moved.id, place);
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Shard {
    entries: HashMap<ApiKeyId, KeyEntry>,
    /// The same for requests, whose way to what they need is short: so few bytes a key stay in the cache.
    owners: Owners,
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

    pub(super) fn place_of(&self, id: ApiKeyId) -> Option<KeyPlace> {
        let Owners { owners, places } = &self.shards[usize::from(id.0[0])].owners;
        places.get(&id).and_then(|at| KeyPlace::new(id.0[0], *at, owners[*at].may_end()))
    }

    /// Of a place that these entries have given out.
    #[inline]
    pub(super) fn owner(&self, place: KeyPlace) -> &KeyOwner {
        let (shard, at) = place.of();
        &self.shards[shard].owners.owners[at]
    }

    /// Begins to fetch the owner from memory.
    #[inline]
    pub(super) fn prefetch_owner(&self, place: KeyPlace) {
        let (shard, at) = place.of();
        prefetch_index(&self.shards[shard].owners.owners, at);
    }

    /// Puts an entry in the place of what is there of its key.
    pub fn insert(&mut self, entry: KeyEntry) {
        let KeyEntry { id, client, plan, disabled, expires, .. } = &entry;
        let plan = plan.as_ref().map(|plan| {
            self.plans.insert(Arc::clone(plan));
            self.plans.get(plan).map_or_else(|| Arc::clone(plan), Arc::clone)
        });
        let ends = if *disabled { DISABLED } else { expires.unwrap_or(NEVER) };
        let owner = KeyOwner { ends, ..KeyOwner::new(*id, Arc::clone(client), plan) };
        let shard = Arc::make_mut(&mut self.shards[usize::from(id.0[0])]);
        shard.owners.put(owner);
        if shard.entries.insert(entry.id, entry).is_none() {
            self.len += 1;
        }
    }

    #[cfg(test)]
    pub(super) fn put_owner(&mut self, owner: KeyOwner) {
        Arc::make_mut(&mut self.shards[usize::from(owner.id.0[0])]).owners.put(owner);
    }

    pub fn remove(&mut self, id: ApiKeyId) {
        let shard = &mut self.shards[usize::from(id.0[0])];
        if shard.entries.contains_key(&id) {
            let shard = Arc::make_mut(shard);
            shard.entries.remove(&id);
            shard.owners.remove(id);
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

//! Counters that others have used before this node began.

use limiter_common::time::UnixMicros;

use super::{MemoryStore, index::KeyHash};
use crate::store::{Algorithm, CounterKey, counter::SharedCounts};

impl MemoryStore {
    /// Takes a counter over as others have used it, unless this node knows it already or there is nothing left of it. Returns
    /// whether it was taken over. Nothing is given up for it.
    pub fn adopt(&self, key: CounterKey, algorithm: &Algorithm, shared: &SharedCounts, now: UnixMicros) -> bool {
        let hash = KeyHash::of_key(&key);
        self.shard_of(hash).adopt(hash, key, algorithm, shared, now.get())
    }

    /// Whether a counter can be added without giving up another one.
    pub fn has_room_for(&self, key: &CounterKey) -> bool {
        self.shard_of(KeyHash::of_key(key)).has_room()
    }

    pub fn is_full(&self) -> bool {
        self.shards.iter().all(|shard| !shard.lock().has_room())
    }
}

//! What of a counter is this node's own: what it may still admit by itself follows from that.

use limiter_common::time::UnixMicros;

use super::{MemoryStore, index::KeyHash};
use crate::store::{CellRef, algorithm::View};

/// A counter, and this node's own admissions alone, as views of the same algorithm. Of buckets, which do not tell, both are
/// the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnPart {
    pub all: View,
    pub own: View,
}

impl MemoryStore {
    /// What the shared store said last of a counter, as far as it is known apart from what this node has admitted by itself.
    pub fn heard(&self, now: UnixMicros, cell: &CellRef<'_>) -> Option<View> {
        let hash = KeyHash::of(cell);
        let shard = self.shard_of(hash);
        let slot = shard.find(hash, cell);
        shard.heard(slot, &cell.algorithm, now.get())
    }

    /// Looks at a counter without changing it. `most` is the ceiling that the own part is held to, for the wait of a log.
    pub fn own_part(&self, now: UnixMicros, cell: &CellRef<'_>, most: u64) -> OwnPart {
        let hash = KeyHash::of(cell);
        let shard = self.shard_of(hash);
        let slot = shard.find(hash, cell);
        shard.own_part(slot, &cell.algorithm, now.get(), cell.cost, most)
    }
}

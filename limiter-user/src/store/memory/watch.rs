//! Whether counters that somebody drew a conclusion from are still what they were.
//!
//! Who draws a conclusion from counters marks each of them, under their locks, and notes how often counters of their
//! identities have changed while they were marked. Whoever changes a marked counter counts that. So what costs nothing where
//! nobody watches is a bit beside what is read anyway, and whether a conclusion holds is seen without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use super::{INLINE_CELLS, MemoryStore, index::KeyHash};
use crate::store::algorithm::View;

/// 8 kB, which stay in the cache. Identities that share a place cost each other a needless check.
const PLACES: usize = 1024;
/// In the lowest bit: somebody drew a conclusion from a counter that does not exist.
const NEW_IS_WATCHED: u64 = 1;
/// Identities of one request.
const MAX_IDENTITIES: usize = 6;

/// By identity, how often a counter changed that was watched.
#[derive(Debug)]
pub(super) struct Changes(Box<[AtomicU64]>);

impl Changes {
    pub(super) fn new() -> Self {
        Self((0..PLACES).map(|_| AtomicU64::new(0)).collect())
    }

    fn of(&self, hash: KeyHash) -> &AtomicU64 {
        &self.0[hash.of_identity(PLACES)]
    }

    /// A watched counter of this identity changed.
    pub(super) fn count(&self, hash: KeyHash) {
        let next = |count: u64| Some((count | NEW_IS_WATCHED).wrapping_add(1));
        // Released for who asks whether anything changed, and hears of this request otherwise.
        match self.of(hash).fetch_update(Ordering::AcqRel, Ordering::Relaxed, next) {
            Ok(_) | Err(_) => {}
        }
    }

    /// Somebody relies on that a counter of this identity does not exist.
    pub(super) fn watch_for_new(&self, hash: KeyHash) {
        self.of(hash).fetch_or(NEW_IS_WATCHED, Ordering::AcqRel);
    }

    /// A counter of this identity exists that did not before.
    #[inline]
    pub(super) fn came(&self, hash: KeyHash) {
        // Who sets the bit for this identity holds the same lock.
        if self.of(hash).load(Ordering::Relaxed) & NEW_IS_WATCHED != 0 {
            self.count(hash);
        }
    }
}

/// A moment of some counters, to be compared with what they are later.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moment {
    places: [u16; MAX_IDENTITIES],
    len: u8,
    /// Of counts that only grow: equal when each of them is.
    sum: u64,
}

/// What was seen of the counters of a denied request, in the order of its cells.
#[derive(Debug, Default)]
pub struct Watched {
    /// `None` where they are of too many identities.
    pub moment: Option<Moment>,
    pub views: SmallVec<[View; INLINE_CELLS]>,
    /// Until then their answers are what time makes of these views.
    pub changes_us: u64,
}

impl Moment {
    /// To be called under the locks of all the counters, once they are marked.
    pub(super) fn of(changes: &Changes, hashes: &[KeyHash]) -> Option<Self> {
        let mut moment = Self::default();
        for hash in hashes {
            let place = u16::try_from(hash.of_identity(PLACES)).ok()?;
            let len = usize::from(moment.len);
            if moment.places[..len].contains(&place) {
                continue;
            }
            *moment.places.get_mut(len)? = place;
            moment.len += 1;
        }
        moment.sum = moment.sum_now(changes);
        Some(moment)
    }

    fn sum_now(&self, changes: &Changes) -> u64 {
        let places = &self.places[..usize::from(self.len)];
        let count = |place: &u16| changes.0[usize::from(*place)].load(Ordering::Acquire) & !NEW_IS_WATCHED;
        places.iter().map(count).fold(0, u64::wrapping_add)
    }
}

impl MemoryStore {
    /// Whether nothing has happened to the counters of a moment since, but that time went by.
    pub fn is_as_at(&self, moment: &Moment) -> bool {
        moment.sum_now(&self.changes) == moment.sum
    }
}

//! How many nodes share counters, as far as one of them has heard.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// Of one node. Cheap to clone; all clones know the same.
#[derive(Clone, Debug, Default)]
pub struct Fleet(Arc<AtomicU32>);

impl Fleet {
    /// Reckoned with until one has heard, where it is better to reckon with too many.
    pub(super) const UNHEARD: u64 = 4;

    /// By which limits are divided; 1 before it has heard of others.
    #[inline]
    pub fn live_nodes(&self) -> u32 {
        self.0.load(Ordering::Relaxed).max(1)
    }

    /// By which it is decided how large a lease may be while little is left, how soon counters near their ceilings are shared,
    /// and what is said of the most that `async` may let through. No limit depends on it.
    #[inline]
    pub fn reckoned(&self) -> u64 {
        match self.0.load(Ordering::Relaxed) {
            0 => Self::UNHEARD,
            nodes => nodes.into(),
        }
    }

    /// There are so many, until it hears otherwise.
    pub fn heard(&self, live_nodes: u32) {
        self.0.store(live_nodes.max(1), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_knows_what_it_has_heard() {
        let (one, other) = (Fleet::default(), Fleet::default());
        assert_eq!((one.live_nodes(), one.reckoned()), (1, Fleet::UNHEARD));
        one.clone().heard(7);
        assert_eq!((one.live_nodes(), one.reckoned()), (7, 7));
        assert_eq!((other.live_nodes(), other.reckoned()), (1, Fleet::UNHEARD));
        one.heard(0);
        assert_eq!((one.live_nodes(), one.reckoned()), (1, 1));
    }
}

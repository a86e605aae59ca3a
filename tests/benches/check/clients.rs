//! Who asks: the same clients in the same order for everybody.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use limiter_tests::random::Random;
use limiter_user::store::Name;

pub(crate) const CLIENTS: u32 = 100_000;

pub(crate) struct Clients {
    /// Twelve characters each, hashed when they became known.
    pub(crate) ids: Vec<Name>,
    /// Every client once, in an order that no cache can foresee.
    order: Vec<u32>,
}

impl Clients {
    pub(crate) fn new() -> Self {
        let ids = (0..CLIENTS).map(|client| format!("client{client:06}").into()).collect();
        let mut order: Vec<u32> = (0..CLIENTS).collect();
        let mut random = Random::new(1);
        for end in (1..order.len()).rev() {
            order.swap(end, random.below(end + 1));
        }
        Self { ids, order }
    }

    /// Whose turn it is.
    pub(crate) fn at(&self, turn: usize) -> usize {
        self.order[turn] as usize
    }

    /// Goes through the order again and again, so many turns at a time.
    pub(crate) fn turns(&self) -> Turns {
        Turns { of: self.order.len(), at: AtomicUsize::new(0) }
    }
}

pub(crate) struct Turns {
    of: usize,
    at: AtomicUsize,
}

impl Turns {
    /// `count` must divide the number of clients.
    pub(crate) fn next(&self, count: u32) -> Range<usize> {
        let from = self.at.fetch_add(count as usize, Ordering::Relaxed) % self.of;
        from..from + count as usize
    }
}

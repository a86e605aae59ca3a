//! Who asks: the same clients in the same order for everybody.

use std::{cell::Cell, sync::Arc};

use limiter_tests::random::Random;

pub(crate) const CLIENTS: u32 = 100_000;

pub(crate) struct Clients {
    /// Twelve characters each.
    pub(crate) ids: Vec<Arc<str>>,
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

    /// Goes through the order again and again, so many clients at a time.
    pub(crate) fn turns(&self) -> Turns<'_> {
        Turns { order: &self.order, at: Cell::new(0) }
    }
}

pub(crate) struct Turns<'a> {
    order: &'a [u32],
    at: Cell<usize>,
}

impl<'a> Turns<'a> {
    /// `count` must divide the number of clients.
    pub(crate) fn next(&self, count: u32) -> &'a [u32] {
        let (from, to) = (self.at.get(), self.at.get() + count as usize);
        self.at.set(to % self.order.len());
        &self.order[from..to]
    }
}

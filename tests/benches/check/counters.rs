//! The counter step alone: whose counter it is, and its limit, are known.

use std::{num::NonZeroU32, sync::Arc};

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use limiter_common::{bucket::Bucket, sliding_window::Outcome};
use limiter_tests::bench::Case;
use limiter_user::{
    clock::{Clock, SharedClock},
    store::{Algorithm, CellRef, Charge, IdentityRef, Name, memory::MemoryStore},
};

use crate::{
    clients::{CLIENTS, Clients},
    threads,
};

/// A round of a few milliseconds, in many of which nothing else wants the CPU.
const REPEAT: u32 = CLIENTS / 20;
const WINDOW_US: u64 = 60_000_000;
/// No request of the benchmark is one too many.
const LIMIT: u32 = 1_000_000;

/// One with the state of the default, and one with that of governor's.
pub(crate) const ALGORITHMS: [&str; 2] = ["sliding_window", "token_bucket"];

pub(crate) struct Counters<'a> {
    clients: &'a Clients,
    /// By the very texts of the clients' names.
    governor: DefaultKeyedRateLimiter<Arc<str>>,
    keys: Vec<Arc<str>>,
    clock: SharedClock,
    /// By algorithm.
    stores: [MemoryStore; 2],
    rule: Name,
}

fn algorithm(name: &str) -> Algorithm {
    match name {
        "sliding_window" => Algorithm::sliding_window(WINDOW_US, LIMIT.into()),
        _ => {
            let bucket = Bucket::new(LIMIT.into(), WINDOW_US, LIMIT.into()).expect("a bucket");
            Algorithm::TokenBucket { bucket, window_us: WINDOW_US }
        }
    }
}

impl<'a> Counters<'a> {
    pub(crate) fn new(clients: &'a Clients) -> Self {
        let quota = Quota::per_minute(NonZeroU32::new(LIMIT).expect("not 0"));
        let store = || MemoryStore::new(Arc::new(SharedClock::new()), 1_000_000);
        let counters = Self {
            clients,
            governor: RateLimiter::keyed(quota),
            keys: clients.ids.iter().map(|id| Arc::clone(id.as_arc())).collect(),
            clock: SharedClock::new(),
            stores: [store(), store()],
            rule: "requests".into(),
        };
        for client in 0..clients.ids.len() {
            counters.ask_governor(client);
            ALGORITHMS.iter().for_each(|name| counters.decide(counters.store(name), &algorithm(name), client));
        }
        counters
    }

    fn store(&self, algorithm: &str) -> &MemoryStore {
        &self.stores[usize::from(algorithm == ALGORITHMS[1])]
    }

    fn ask_governor(&self, client: usize) {
        assert!(self.governor.check_key(&self.keys[client]).is_ok());
    }

    /// Reads the clock, as governor does.
    fn decide(&self, store: &MemoryStore, algorithm: &Algorithm, client: usize) {
        let identity = IdentityRef::User(&self.clients.ids[client]);
        let cell = CellRef { identity, rule: &self.rule, algorithm: *algorithm, cost: 1, enforced: true };
        let outcome = store.decide_one(self.clock.now(), Charge::Commit, &cell);
        assert_eq!(outcome.outcome, Outcome::Allowed);
    }

    pub(crate) fn governor(&self, threads: usize) -> Case<'_> {
        let turns = self.clients.turns();
        Case::new(format!("governor, {}", count(threads)), REPEAT, move |repeat| {
            threads::over(threads, turns.next(repeat), || (), |(), turn| self.ask_governor(self.clients.at(turn)))
        })
    }

    pub(crate) fn step(&self, name: &'static str, threads: usize) -> Case<'_> {
        let turns = self.clients.turns();
        let (store, algorithm) = (self.store(name), algorithm(name));
        Case::new(format!("counter step, {name}, {}", count(threads)), REPEAT, move |repeat| {
            threads::over(
                threads,
                turns.next(repeat),
                || (),
                |(), turn| {
                    self.decide(store, &algorithm, self.clients.at(turn));
                },
            )
        })
    }
}

pub(crate) fn count(threads: usize) -> &'static str {
    if threads == 1 { "one thread" } else { "two threads" }
}

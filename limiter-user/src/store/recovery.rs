//! A node that starts takes over the counts that are in Redis, before it decides anything.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use limiter_common::sliding_window::Window;

use super::{
    Algorithm, CounterKey, Identity, StoreError,
    counter::SharedCounts,
    memory::MemoryStore,
    redis::{RedisStore, StoredCounter},
};
use crate::{
    clock::{Clock, Stopwatch},
    policy::{Limit, Policy, Rule, Scope},
};

/// What was taken over.
#[derive(Debug)]
#[non_exhaustive]
pub struct Recovery {
    pub counters: u64,
    pub took: Duration,
    /// Why it is not everything. What is missing is learnt when it is first used.
    pub incomplete: Option<Incomplete>,
}

#[derive(Debug, thiserror::Error)]
pub enum Incomplete {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("no more than store.max_counters fit")]
    Full,
}

/// Reads the counters of the policy's rules into `memory`, for as long as `within`.
pub async fn recover(
    redis: &RedisStore,
    memory: &MemoryStore,
    policy: &Policy,
    clock: &dyn Clock,
    within: Duration,
) -> Recovery {
    let watch = Stopwatch::start();
    let rules: HashMap<&str, &Rule> = policy.rules.iter().map(|rule| (&*rule.id, rule)).collect();
    let (counters, is_full) = (AtomicU64::new(0), AtomicBool::new(false));
    let take = |key: CounterKey, stored: &StoredCounter| {
        let Some(algorithm) = algorithm(&rules, policy, &key, stored) else { return true };
        if memory.has_room_for(&key) {
            let is_new = memory.adopt(key, &algorithm, &stored.counts, clock.now());
            counters.fetch_add(u64::from(is_new), Ordering::Relaxed);
            return true;
        }
        is_full.store(true, Ordering::Relaxed);
        // Of several parts of the memory, the others may have room.
        !memory.is_full()
    };
    let read = redis.read_counters(within, take).await;
    let incomplete = match (read, is_full.into_inner()) {
        (Err(error), _) => Some(Incomplete::Store(error)),
        (Ok(()), true) => Some(Incomplete::Full),
        (Ok(()), false) => None,
    };
    Recovery { counters: counters.into_inner(), took: watch.elapsed(), incomplete }
}

/// By what a stored counter is read: what its rule has by now, with the window that it was stored with. `None` of a counter that
/// no rule has, or that is of another kind by now: that is converted when it is used.
fn algorithm(
    rules: &HashMap<&str, &Rule>,
    policy: &Policy,
    key: &CounterKey,
    stored: &StoredCounter,
) -> Option<Algorithm> {
    let rule = *rules.get(&*key.rule)?;
    if !is_of_scope(rule.scope, policy, &key.identity) {
        return None;
    }
    // Limits of plans and clients differ in what does not matter here.
    let limits = std::iter::once(&rule.limit).chain(rule.plans.values()).chain(rule.overrides.values());
    let algorithm = limits.filter_map(|limit| match limit {
        Limit::Limited(algorithm) => Some(*algorithm),
        Limit::Unlimited => None,
    });
    let window_us = stored.window_us;
    let of_window = |window: Window| Window { window_us, ..window };
    Some(match (algorithm.into_iter().next()?, &stored.counts) {
        (Algorithm::SlidingWindow(window), SharedCounts::Windows { .. }) => Algorithm::SlidingWindow(of_window(window)),
        (Algorithm::FixedWindow(window), SharedCounts::Windows { .. }) => Algorithm::FixedWindow(of_window(window)),
        (Algorithm::SlidingLog(window), SharedCounts::Log { .. }) => Algorithm::SlidingLog(of_window(window)),
        (Algorithm::TokenBucket { bucket, .. }, SharedCounts::Bucket { .. }) => {
            Algorithm::TokenBucket { bucket, window_us }
        }
        (Algorithm::LeakyBucket { bucket, .. }, SharedCounts::Bucket { .. }) => {
            Algorithm::LeakyBucket { bucket, window_us }
        }
        (_, SharedCounts::Windows { .. } | SharedCounts::Bucket { .. } | SharedCounts::Log { .. }) => return None,
    })
}

fn is_of_scope(scope: Scope, policy: &Policy, identity: &Identity) -> bool {
    match (scope, identity) {
        (Scope::User, Identity::User(_))
        | (Scope::Key, Identity::Key(_))
        | (Scope::Session, Identity::Session(_))
        | (Scope::Ip, Identity::Ip(_))
        | (Scope::Global, Identity::Global) => true,
        (Scope::Attribute(index), Identity::Attribute(text)) => {
            let name = policy.attributes.get(usize::from(index));
            name.is_some_and(|name| text.split_once(':').is_some_and(|(of, _)| *of == **name))
        }
        (Scope::User | Scope::Key | Scope::Session | Scope::Ip | Scope::Global | Scope::Attribute(_), _) => false,
    }
}

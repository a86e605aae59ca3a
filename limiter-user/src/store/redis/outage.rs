//! Which counters cannot be shared at present: what the request path asks.
//!
//! Architecture invariant: while every server is asked, a request costs one relaxed load here. Nothing allocates.

use std::{cell::RefCell, sync::Arc, time::Duration};

use super::{BreakerCounts, RedisStore, Servers, connection::Connection, key::push_tag, slot::slot};
use crate::store::{IdentityRef, breaker::BreakerState};

/// A server, as its breaker sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shard {
    /// Address without credentials.
    pub name: String,
    pub state: BreakerState,
}

thread_local! {
    static TAG: RefCell<String> = RefCell::new(String::with_capacity(64));
}

/// Of all counters of an identity.
fn slot_of(identity: &IdentityRef<'_>) -> u16 {
    TAG.with_borrow_mut(|tag| {
        tag.clear();
        push_tag(tag, identity);
        slot(tag.as_bytes())
    })
}

impl RedisStore {
    /// Whether every server is asked that has counters.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.0.breakers.are_closed()
    }

    /// How long until the server is asked again that has this identity's counters; `None` while it is asked.
    pub fn outage(&self, identity: &IdentityRef<'_>) -> Option<Duration> {
        if self.is_whole() {
            return None;
        }
        match &self.0.servers {
            Servers::One(server) => server.breaker().until_probe(),
            Servers::Cluster(cluster) => match cluster.known_node(slot_of(identity)) {
                Some(node) => node.and_then(|node| node.breaker().until_probe()),
                None => cluster.breaker().until_probe(),
            },
        }
    }

    /// A request has waited for the server of this identity as long as it may, and in vain. That is as bad as a call that
    /// failed, even if the answer comes.
    pub(in crate::store) fn was_late(&self, identity: &IdentityRef<'_>) {
        let timeout = self.timeout();
        let late = |connection: &Connection| connection.breaker().failed(|| format!("no answer in {timeout:?}"));
        match &self.0.servers {
            Servers::One(server) => late(server),
            Servers::Cluster(cluster) => {
                if let Some(node) = cluster.known_node(slot_of(identity)).flatten() {
                    late(&node);
                }
            }
        }
    }

    /// Which server has this identity's counters, as far as is known.
    pub(in crate::store) fn server_of(&self, identity: &IdentityRef<'_>) -> Option<String> {
        self.server_at(slot_of(identity))
    }

    /// Which server has a slot, as far as is known.
    pub(super) fn server_at(&self, slot: u16) -> Option<String> {
        match &self.0.servers {
            Servers::One(server) => Some(server.name().to_owned()),
            Servers::Cluster(cluster) => cluster.known_node(slot).flatten().map(|node| node.name().to_owned()),
        }
    }

    /// The servers that have counters, as far as they are known.
    pub fn shards(&self) -> Vec<Shard> {
        let shard = |node: &Arc<Connection>| Shard { name: node.name().to_owned(), state: node.breaker().state() };
        match &self.0.servers {
            Servers::One(server) => vec![shard(server)],
            Servers::Cluster(cluster) => {
                let mut shards: Vec<Shard> = cluster.known().iter().map(|(node, _)| shard(node)).collect();
                if shards.is_empty() {
                    shards.push(Shard { name: cluster.name(), state: cluster.breaker().state() });
                }
                shards.sort_unstable_by(|one, other| one.name.cmp(&other.name));
                shards.dedup_by(|one, other| one.name == other.name);
                shards
            }
        }
    }

    pub fn breaker_counts(&self) -> BreakerCounts {
        self.0.breakers.counts()
    }
}

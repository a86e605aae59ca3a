//! Reading all counters that are in Redis, page by page, as far as time allows.

use std::{ops::RangeInclusive, sync::Arc, time::Duration};

use futures_util::future::join_all;
use redis::{ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, Value};

use super::{
    PlainCalls, RedisStore, Servers,
    cluster::Call,
    connection::Connection,
    key::counter_of,
    slot::slot,
    value::{StoredCounter, decode},
};
use crate::{
    clock::Stopwatch,
    store::{CounterKey, StoreError},
};

/// Keys that a server looks at between two answers to others.
const PAGE: usize = 1000;
/// Names of counters: no other tag has a colon.
const COUNTERS: &str = "rl:{*:*}:*";
const OPERATION: &str = "read the counters";

/// How often those are read to whom slots have moved meanwhile. Nodes do not agree about that at once.
const MOST_PASSES: usize = 8;

/// A server, and slots that it has.
type Owner = (Arc<Connection>, RangeInclusive<u16>);

impl RedisStore {
    /// Gives all counters to `take`, until it wants no more; from all servers at once, and from those to which slots have moved
    /// meanwhile. Some may be given more than once. The error is that of the first server that did not tell everything.
    pub(in crate::store) async fn read_counters(
        &self,
        within: Duration,
        take: impl Fn(CounterKey, &StoredCounter) -> bool + Sync,
    ) -> Result<(), StoreError> {
        let watch = Stopwatch::start();
        let left = || within.saturating_sub(watch.elapsed());
        let mut due = self.nodes(OPERATION, within).await?;
        let mut read: Vec<Owner> = Vec::new();
        for pass in 1.. {
            let owners = self.owners();
            let results = join_all(due.iter().map(async |node| self.read_node(node, left, &take).await)).await;
            let mut error = None;
            for (node, result) in due.iter().zip(results) {
                match result {
                    Ok(()) => read.extend(owners.iter().filter(|(owner, _)| is_same(owner, node)).cloned()),
                    Err(failed) => error = error.or(Some(failed)),
                }
            }
            let Servers::Cluster(cluster) = &self.0.servers else { return error.map_or(Ok(()), Err) };
            cluster.look_now(left()).await;
            let asked = due;
            due = unread(self.owners(), &read);
            let is_news = |node: &Arc<Connection>| {
                !asked.iter().any(|other| is_same(other, node)) || read.iter().any(|(owner, _)| is_same(owner, node))
            };
            if due.is_empty() {
                return Ok(());
            }
            if pass >= MOST_PASSES || left().is_zero() || !due.iter().any(is_news) {
                let moved = || self.bad_reply(OPERATION, "slots moved faster than they could be read".to_owned());
                return Err(error.unwrap_or_else(moved));
            }
        }
        Ok(())
    }

    /// Of a cluster: who has which slots, as far as is known.
    fn owners(&self) -> Vec<Owner> {
        match &self.0.servers {
            Servers::One(_) => Vec::new(),
            Servers::Cluster(cluster) => cluster.known(),
        }
    }

    async fn read_node(
        &self,
        node: &Arc<Connection>,
        left: impl Fn() -> Duration,
        take: &(impl Fn(CounterKey, &StoredCounter) -> bool + Sync),
    ) -> Result<(), StoreError> {
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut cursor = Some(0u64);
        // What a page names is asked for together with the next page.
        while cursor.is_some() || !names.is_empty() {
            let mut pipeline = Pipeline::with_capacity(names.len() + 1);
            pipeline.ignore_errors();
            for name in &names {
                pipeline.cmd("GET").arg(name);
            }
            if let Some(cursor) = cursor {
                pipeline.cmd("SCAN").arg(cursor).arg("MATCH").arg(COUNTERS).arg("COUNT").arg(PAGE);
            }
            let watch = Stopwatch::start();
            let result = node.send(OPERATION, &pipeline, left()).await;
            self.0.calls.record(&result, watch.elapsed());
            let mut replies = result?.into_iter();
            let mut elsewhere = Vec::new();
            for (name, value) in names.drain(..).zip(&mut replies) {
                match value {
                    Err(error) if self.is_cluster() && is_elsewhere(&error) => elsewhere.push(name),
                    // One that went away meanwhile, or that is something else, is none to take over.
                    Err(_) => {}
                    Ok(value) if is_enough(&name, &value, take) => return Ok(()),
                    Ok(_) => {}
                }
            }
            if self.follow(elsewhere, left(), take).await? {
                return Ok(());
            }
            if cursor.is_some() {
                let page = replies.next().unwrap_or(Ok(Value::Nil));
                (cursor, names) = self.page(node, page)?;
            }
        }
        Ok(())
    }

    /// Reads counters that have moved since they were named. Returns whether that was enough.
    async fn follow(
        &self,
        names: Vec<Vec<u8>>,
        deadline: Duration,
        take: &(impl Fn(CounterKey, &StoredCounter) -> bool + Sync),
    ) -> Result<bool, StoreError> {
        let Servers::Cluster(cluster) = &self.0.servers else { return Ok(false) };
        if names.is_empty() {
            return Ok(false);
        }
        let get = |name: &Vec<u8>| {
            let mut command = redis::cmd("GET");
            command.arg(name.as_slice());
            Call { slot: slot(name), command }
        };
        let calls: Vec<Call> = names.iter().map(get).collect();
        let watch = Stopwatch::start();
        let exchange = PlainCalls { operation: OPERATION, deadline, watch };
        let result = cluster.send(OPERATION, &calls, deadline, &exchange).await;
        self.0.calls.record(&result, watch.elapsed());
        for (name, value) in names.iter().zip(result?) {
            if is_enough(name, &value?, take) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn page(&self, node: &Connection, page: RedisResult<Value>) -> Result<(Option<u64>, Vec<Vec<u8>>), StoreError> {
        let page = page.map_err(|error| node.error(OPERATION, &error))?;
        let (cursor, names): (u64, Vec<Vec<u8>>) =
            redis::from_redis_value(page).map_err(|misfit| node.bad_reply(OPERATION, misfit.to_string()))?;
        Ok(((cursor != 0).then_some(cursor), names))
    }
}

/// Takes a counter, if that is one. Returns whether no more are wanted.
fn is_enough(name: &[u8], value: &Value, take: &impl Fn(CounterKey, &StoredCounter) -> bool) -> bool {
    let Value::BulkString(value) = value else { return false };
    match (counter_of(name), decode(value)) {
        (Some(key), Some(counter)) => !take(key, &counter),
        _ => false,
    }
}

/// Whether another node has the key by now, or somebody has it for whom it has to be asked otherwise.
fn is_elsewhere(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, ClusterDown, Moved, TryAgain};
    [Moved, Ask, TryAgain, ClusterDown].iter().any(|kind| error.kind() == ErrorKind::Server(*kind))
}

/// By address: connections come and go with what nodes say of who has which slot.
fn is_same(one: &Connection, other: &Connection) -> bool {
    one.name() == other.name()
}

/// Those who have slots that were not read of them.
fn unread(owners: Vec<Owner>, read: &[Owner]) -> Vec<Arc<Connection>> {
    let mut unread: Vec<Arc<Connection>> = Vec::new();
    for (owner, slots) in owners {
        let is_read = |slot: u16| read.iter().any(|(node, slots)| is_same(node, &owner) && slots.contains(&slot));
        if !slots.clone().all(is_read) && !unread.iter().any(|node| is_same(node, &owner)) {
            unread.push(owner);
        }
    }
    unread
}

//! Reading all counters that are in Redis, page by page, as far as time allows.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use redis::{Pipeline, RedisResult, Value};

use super::{
    RedisStore,
    connection::Connection,
    key::counter_of,
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

impl RedisStore {
    /// Gives all counters to `take`, one after the other, until it wants no more; from all servers at once. The error is that
    /// of the first server that did not tell everything.
    pub(in crate::store) async fn read_counters(
        &self,
        within: Duration,
        take: impl Fn(CounterKey, &StoredCounter) -> bool + Sync,
    ) -> Result<(), StoreError> {
        let watch = Stopwatch::start();
        let nodes = self.nodes(OPERATION, within).await?;
        let left = || within.saturating_sub(watch.elapsed());
        let reads = nodes.iter().map(async |node| self.read_node(node, left, &take).await);
        join_all(reads).await.into_iter().collect()
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
            for (name, value) in names.drain(..).zip(&mut replies) {
                // One that went away meanwhile, or that is something else, is none to take over.
                let Ok(Value::BulkString(value)) = value else { continue };
                if let (Some(key), Some(counter)) = (counter_of(&name), decode(&value))
                    && !take(key, &counter)
                {
                    return Ok(());
                }
            }
            if cursor.is_some() {
                let page = replies.next().unwrap_or(Ok(Value::Nil));
                (cursor, names) = self.page(node, page)?;
            }
        }
        Ok(())
    }

    fn page(&self, node: &Connection, page: RedisResult<Value>) -> Result<(Option<u64>, Vec<Vec<u8>>), StoreError> {
        let page = page.map_err(|error| node.error(OPERATION, &error))?;
        let (cursor, names): (u64, Vec<Vec<u8>>) =
            redis::from_redis_value(page).map_err(|misfit| node.bad_reply(OPERATION, misfit.to_string()))?;
        Ok(((cursor != 0).then_some(cursor), names))
    }
}

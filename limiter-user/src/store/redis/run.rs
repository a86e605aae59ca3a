//! Which run of a server this is, and what it does when its memory ends.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use redis::{Pipeline, from_redis_value};

use super::{RedisStore, connection::Connection, examine::field};
use crate::clock::Stopwatch;

/// From a start of a server to its end.
#[derive(Debug)]
pub(in crate::store) struct Run {
    /// Name of the server.
    pub(in crate::store) server: String,
    pub(in crate::store) id: String,
    /// `None` of servers that do not tell.
    pub(in crate::store) maxmemory_policy: Option<String>,
}

impl RedisStore {
    /// Of every server; none of one that does not tell (`INFO` may be forbidden).
    pub(in crate::store) async fn runs(&self, deadline: Duration) -> Vec<Run> {
        const OPERATION: &str = "ask who it is";
        let nodes = self.nodes(OPERATION, deadline).await.unwrap_or_default();
        let runs = nodes.iter().map(async |node| self.run_of(OPERATION, node, deadline).await);
        join_all(runs).await.into_iter().flatten().collect()
    }

    async fn run_of(&self, operation: &'static str, node: &Arc<Connection>, deadline: Duration) -> Option<Run> {
        let mut questions = Pipeline::with_capacity(2);
        questions.ignore_errors();
        for section in ["server", "memory"] {
            questions.cmd("INFO").arg(section);
        }
        let watch = Stopwatch::start();
        let sent = node.send(operation, &questions, deadline).await;
        self.0.calls.record(&sent, watch.elapsed());
        let info: String =
            sent.ok()?.into_iter().filter_map(|reply| from_redis_value::<String>(reply.ok()?).ok()).collect();
        let server = node.name().to_owned();
        Some(Run { server, id: field(&info, "run_id")?, maxmemory_policy: field(&info, "maxmemory_policy") })
    }
}

//! Counters in one Redis server, version 6 or later.
//!
//! Architecture invariant: nothing outside this module and its children names the `redis` crate, and every call ends
//! within the deadline that it was given.

use std::{sync::Arc, time::Duration};

use redis::{
    Client, Cmd, ConnectionInfo, ErrorKind, IntoConnectionInfo, Pipeline, RedisResult, ServerErrorKind, Value,
};

use self::{calls::Calls, connection::Connection, script::Script};
pub use self::{
    calls::{CallStats, DURATION_BOUNDS_US},
    examine::{Examination, ServerFacts, examine_now},
    key::redis_key,
    keys::{KeyChange, KeyCondition, KeyPage, KeyRefusal, MergedKey, RedisKeys, StoredKey},
    script::SyncReply,
};
use super::{At, Cell, CellOutcome, Charge, Store, StoreError, counter::OwnTotals};
use crate::{clock::Stopwatch, config::Secret};

mod calls;
mod connection;
mod examine;
mod key;
mod keys;
mod script;

/// How to reach Redis.
#[derive(Clone)]
#[non_exhaustive]
pub struct RedisConfig {
    /// `redis://host:port/db`, or `unix:///path?db=0`.
    pub url: String,
    /// Beats what the URL says.
    pub username: Option<String>,
    pub password: Option<Secret>,
    /// How long a call may take, waiting for a connection included.
    pub timeout: Duration,
    /// How long an attempt to connect may take. No call waits for it longer than its own time.
    pub connect_timeout: Duration,
}

impl RedisConfig {
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            username: None,
            password: None,
            timeout: Duration::from_millis(5),
            connect_timeout: Duration::from_secs(1),
        }
    }

    fn connection_info(&self) -> Result<ConnectionInfo, RedisConfigError> {
        let refused = |error: redis::RedisError| RedisConfigError { reason: error.to_string() };
        let info = self.url.as_str().into_connection_info().map_err(refused)?;
        let mut settings = info.redis_settings().clone();
        if let Some(username) = &self.username {
            settings = settings.set_username(username);
        }
        if let Some(password) = &self.password {
            settings = settings.set_password(password.expose());
        }
        Ok(info.set_redis_settings(settings))
    }
}

impl std::fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may hold a password.
        let address = self.connection_info().map(|info| info.addr().to_string());
        f.debug_struct("RedisConfig")
            .field("address", &address.as_deref().unwrap_or("invalid"))
            .field("username", &self.username)
            .field("password", &self.password)
            .field("timeout", &self.timeout)
            .field("connect_timeout", &self.connect_timeout)
            .finish()
    }
}

/// An address that cannot be one. It is not shown: it may hold a password.
#[derive(Debug, thiserror::Error)]
#[error("not the address of a Redis server: {reason}")]
pub struct RedisConfigError {
    reason: String,
}

/// Cheap to clone; all clones share one connection.
#[derive(Clone, Debug)]
pub struct RedisStore(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    connection: Arc<Connection>,
    timeout: Duration,
    decide: Script,
    sync: Script,
    calls: Calls,
}

impl RedisStore {
    /// Fails on an address that cannot be one, never because Redis is away: the first call connects.
    pub fn connect(config: &RedisConfig) -> Result<Self, RedisConfigError> {
        let refused = |error: redis::RedisError| RedisConfigError { reason: error.to_string() };
        let client = Client::open(config.connection_info()?).map_err(refused)?;
        Ok(Self(Arc::new(Shared {
            connection: Connection::new(client, config.connect_timeout),
            timeout: config.timeout,
            decide: Script::decide(),
            sync: Script::sync(),
            calls: Calls::default(),
        })))
    }

    /// Address without credentials.
    pub fn name(&self) -> &str {
        self.0.connection.name()
    }

    pub fn calls(&self) -> CallStats {
        self.0.calls.snapshot()
    }

    /// Changes with every new connection.
    pub(super) fn generation(&self) -> u64 {
        self.0.connection.generation()
    }

    /// Shares totals, in one pipeline; a reply each, in order. `number` is higher than that of all messages whose totals
    /// were read before.
    pub async fn exchange(
        &self,
        number: u64,
        totals: &[OwnTotals],
        deadline: Duration,
    ) -> Result<Vec<Result<SyncReply, StoreError>>, StoreError> {
        const OPERATION: &str = "share counters";
        let calls = totals
            .iter()
            .map(|totals| script::sync(&self.0.sync, number, totals, redis_key(&totals.key).as_bytes()))
            .collect();
        let replies = self.run(OPERATION, &self.0.sync, calls, deadline).await?;
        let parse = |(reply, sent): (RedisResult<Value>, &OwnTotals)| {
            let connection = &self.0.connection;
            let reply = reply.map_err(|error| connection.error(OPERATION, &error))?;
            let reply = script::synced(reply, &sent.state).map_err(|misfit| connection.bad_reply(OPERATION, misfit))?;
            self.0.calls.values_replaced(u64::from(reply.replaced));
            Ok(reply)
        };
        Ok(replies.into_iter().zip(totals).map(parse).collect())
    }

    /// Redis' clock, in microseconds since 1970.
    pub async fn time_us(&self, deadline: Duration) -> Result<u64, StoreError> {
        const OPERATION: &str = "ask the time";
        let reply = self.single(OPERATION, redis::cmd("TIME"), deadline).await?;
        let misfit = |reason: String| self.0.connection.bad_reply(OPERATION, reason);
        let (seconds, micros): (u64, u64) =
            redis::from_redis_value(reply).map_err(|error| misfit(error.to_string()))?;
        let us = seconds.checked_mul(1_000_000).and_then(|us| us.checked_add(micros));
        us.ok_or_else(|| misfit(format!("{seconds} seconds")))
    }

    /// Which run of the server this is; `None` when it does not tell (`INFO` may be forbidden).
    pub(super) async fn run_id(&self, deadline: Duration) -> Option<String> {
        let mut info = redis::cmd("INFO");
        info.arg("server");
        let reply = self.single("ask who it is", info, deadline).await.ok()?;
        let text: String = redis::from_redis_value(reply).ok()?;
        text.lines().find_map(|line| line.strip_prefix("run_id:")).map(|id| id.trim().to_owned())
    }

    async fn single(&self, operation: &'static str, call: Cmd, deadline: Duration) -> Result<Value, StoreError> {
        let mut pipeline = Pipeline::with_capacity(1);
        pipeline.ignore_errors().add_command(call);
        let watch = Stopwatch::start();
        let sent = self.0.connection.send(operation, &pipeline, deadline).await;
        let result = sent.and_then(|replies| self.only(operation, replies));
        self.0.calls.record(&result, watch.elapsed());
        result
    }

    fn only(&self, operation: &'static str, replies: Vec<RedisResult<Value>>) -> Result<Value, StoreError> {
        let connection = &self.0.connection;
        let count = replies.len();
        match <[RedisResult<Value>; 1]>::try_from(replies) {
            Ok([reply]) => reply.map_err(|error| connection.error(operation, &error)),
            Err(_) => Err(connection.bad_reply(operation, format!("{count} replies to one call"))),
        }
    }

    /// Sends script calls in one pipeline. When Redis does not know the script, loads it and sends them once more:
    /// none of the calls has done anything then.
    async fn run(
        &self,
        operation: &'static str,
        script: &Script,
        calls: Vec<Cmd>,
        deadline: Duration,
    ) -> Result<Vec<RedisResult<Value>>, StoreError> {
        let watch = Stopwatch::start();
        let result = self.run_uncounted(operation, script, calls, deadline).await;
        self.0.calls.record(&result, watch.elapsed());
        result
    }

    async fn run_uncounted(
        &self,
        operation: &'static str,
        script: &Script,
        calls: Vec<Cmd>,
        deadline: Duration,
    ) -> Result<Vec<RedisResult<Value>>, StoreError> {
        let watch = Stopwatch::start();
        let count = calls.len();
        let mut pipeline = Pipeline::with_capacity(count);
        pipeline.ignore_errors();
        for call in calls {
            pipeline.add_command(call);
        }
        let connection = &self.0.connection;
        let mut replies = connection.send(operation, &pipeline, deadline).await?;
        if replies.iter().any(is_noscript) {
            self.0.calls.script_loaded();
            tracing::debug!(target: "limiter::store", script = script.name, "redis does not know the script, loading it");
            let mut load = Pipeline::with_capacity(1);
            load.ignore_errors().add_command(script.load());
            let left = deadline.saturating_sub(watch.elapsed());
            let loaded = connection.send(operation, &load, left).await?;
            self.only(operation, loaded)?;
            let left = deadline.saturating_sub(watch.elapsed());
            replies = connection.send(operation, &pipeline, left).await?;
        }
        if replies.len() == count {
            Ok(replies)
        } else {
            Err(connection.bad_reply(operation, format!("{} replies to {count} calls", replies.len())))
        }
    }
}

fn is_noscript(reply: &RedisResult<Value>) -> bool {
    reply.as_ref().is_err_and(|error| error.kind() == ErrorKind::Server(ServerErrorKind::NoScript))
}

impl Store for RedisStore {
    /// One call with all counters, whoever's they are: a standalone server has no slots.
    async fn check(&self, at: At, charge: Charge, cells: &[Cell]) -> Result<Vec<CellOutcome>, StoreError> {
        const OPERATION: &str = "decide";
        let now_us = match at {
            At::StoreClock => 0,
            At::Given(now) => now.get(),
        };
        let keys: Vec<Vec<u8>> = cells.iter().map(|cell| redis_key(&cell.key).into_bytes()).collect();
        let call = script::decide(&self.0.decide, now_us, charge, cells, &keys);
        let replies = self.run(OPERATION, &self.0.decide, vec![call], self.0.timeout).await?;
        let reply = self.only(OPERATION, replies)?;
        let decided =
            script::decided(reply, charge, cells).map_err(|misfit| self.0.connection.bad_reply(OPERATION, misfit))?;
        self.0.calls.values_replaced(decided.replaced);
        Ok(decided.outcomes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_printed() {
        let mut config = RedisConfig::new("redis://anna:hunter2@localhost:6380/1");
        config.password = Some(Secret::new("hunter3".into()));
        let store = RedisStore::connect(&config).unwrap();
        let printed = format!("{config:?} {store:?} {}", store.name());
        assert!(printed.contains("localhost:6380"), "{printed}");
        assert!(!printed.contains("hunter"), "{printed}");
        let error = RedisStore::connect(&RedisConfig::new("http://anna:hunter2@localhost")).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter"), "{error}");
    }
}

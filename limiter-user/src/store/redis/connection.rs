//! One multiplexed connection to one server, which comes back by itself.
//!
//! Nobody waits for a connection longer than their own deadline: attempts run in the background, one at a time, and
//! between failed ones calls are refused at once.

use std::{
    hash::{BuildHasher, RandomState},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use redis::{
    AsyncConnectionConfig, Client, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, Value,
    aio::MultiplexedConnection,
};
use tokio::sync::watch;

use super::{
    access::Access,
    breakers::{Breakers, ServerBreaker},
    sentinel::Sentinels,
};
use crate::{
    clock::Stopwatch,
    store::{StoreError, breaker::BreakerState},
};

/// Between attempts: doubled after each failure in a row, with up to half of it taken off at random.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const LONGEST_BACKOFF: Duration = Duration::from_secs(1);
/// Calls in a row without an answer after which the connection is taken for dead, if it has also been silent for as long
/// as an attempt to connect may take: a slow network must not look like a dead server.
const TIMEOUTS_UNTIL_DEAD: u32 = 5;

/// Between two looks whether a primary that is left alone has a successor; less in a cluster where it is tried more often.
pub(super) const BETWEEN_LOOKS_FOR_SUCCESSORS: Duration = Duration::from_secs(1);

/// Counts connections, so that a caller can tell that it speaks through another one than before.
pub(super) type Generation = u64;

/// A reply to each call of a pipeline.
pub(super) type Replies = Vec<RedisResult<Value>>;

/// The answer to what was sent, for which nobody waits any more.
pub(super) type LateAnswer = Pin<Box<dyn Future<Output = Result<Replies, StoreError>> + Send>>;

enum State {
    Connecting,
    Ready(MultiplexedConnection),
    /// Not before `wait` has passed.
    Waiting {
        since: Stopwatch,
        wait: Duration,
        reason: String,
    },
}

/// Where a connection leads.
pub(super) enum Route {
    Server(Box<Client>),
    /// Whoever is the primary when it is made.
    Primary(Box<Sentinels>),
}

impl Route {
    /// To the server that the address names.
    pub(super) fn to(access: &Access) -> RedisResult<Self> {
        Ok(Self::Server(Box::new(access.first()?)))
    }

    fn name(&self) -> String {
        match self {
            Self::Server(client) => client.get_connection_info().addr().to_string(),
            Self::Primary(sentinels) => sentinels.name(),
        }
    }
}

pub(super) struct Connection {
    route: Route,
    /// Of all connections of a store, how many were made.
    generations: Arc<AtomicU64>,
    /// Address without credentials, for errors and logs.
    name: String,
    connect_timeout: Duration,
    inner: Mutex<Inner>,
    changed: watch::Sender<()>,
    timeouts: AtomicU32,
    breaker: ServerBreaker,
    looked_for_successor: Mutex<Option<Stopwatch>>,
}

struct Inner {
    state: State,
    generation: Generation,
    /// Failures since the last answer, of attempts and of connections that never answered.
    failures: u32,
    /// Since the last answer, or since the connection was made.
    silent: Stopwatch,
}

impl Connection {
    pub(super) fn new(
        route: Route,
        connect_timeout: Duration,
        generations: Arc<AtomicU64>,
        breakers: &Arc<Breakers>,
    ) -> Arc<Self> {
        let name = route.name();
        let breaker = ServerBreaker::new(name.clone(), breakers);
        let waiting =
            State::Waiting { since: Stopwatch::start(), wait: Duration::ZERO, reason: "not connected yet".to_owned() };
        Arc::new(Self {
            route,
            generations,
            name,
            connect_timeout,
            inner: Mutex::new(Inner { state: waiting, generation: 0, failures: 0, silent: Stopwatch::start() }),
            changed: watch::Sender::new(()),
            timeouts: AtomicU32::new(0),
            breaker,
            looked_for_successor: Mutex::new(None),
        })
    }

    pub(super) fn breaker(&self) -> &ServerBreaker {
        &self.breaker
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Sends a pipeline and waits for all of its replies, at most for `deadline`, connecting included. A server that fails
    /// is left alone.
    pub(super) async fn send(
        self: &Arc<Self>,
        operation: &'static str,
        pipeline: &Pipeline,
        deadline: Duration,
    ) -> Result<Replies, StoreError> {
        self.breaker.admit(operation)?;
        let result = self.send_anyway(operation, pipeline, deadline).await;
        self.tell_breaker(&result);
        result
    }

    /// The same. Whatever was sent, and is not answered in time, goes to `late`, which can wait for it.
    pub(super) async fn send_and_hear(
        self: &Arc<Self>,
        operation: &'static str,
        pipeline: &Pipeline,
        deadline: Duration,
        late: &(dyn Fn(LateAnswer) + Sync),
    ) -> Result<Replies, StoreError> {
        self.breaker.admit(operation)?;
        let result = self.exchange_and_hear(operation, pipeline, deadline, late).await;
        self.tell_breaker(&result);
        result
    }

    async fn exchange_and_hear(
        self: &Arc<Self>,
        operation: &'static str,
        pipeline: &Pipeline,
        deadline: Duration,
        late: &(dyn Fn(LateAnswer) + Sync),
    ) -> Result<Replies, StoreError> {
        let watch = Stopwatch::start();
        let Ok(ready) = tokio::time::timeout(deadline, self.ready(operation)).await else {
            return Err(self.timed_out(operation, deadline));
        };
        let ready = ready?;
        let (connection, pipeline) = (Arc::clone(self), pipeline.clone());
        let mut answer: LateAnswer = Box::pin(async move { connection.exchange(operation, &pipeline, ready).await });
        match tokio::time::timeout(deadline.saturating_sub(watch.elapsed()), &mut answer).await {
            Ok(result) => result,
            Err(_elapsed) => {
                late(answer);
                Err(self.timed_out(operation, deadline))
            }
        }
    }

    fn tell_breaker(&self, result: &Result<Replies, StoreError>) {
        match result {
            Err(error) => self.breaker.failed(|| error.reason().to_owned()),
            Ok(replies) => {
                let is_failure = |reply: &RedisResult<Value>| reply.as_ref().is_err_and(is_unable);
                if let Some(Err(error)) = replies.first()
                    && replies.iter().all(is_failure)
                {
                    self.breaker.failed(|| error.to_string());
                }
            }
        }
    }

    /// The same, whatever became of the calls before.
    pub(super) async fn send_anyway(
        self: &Arc<Self>,
        operation: &'static str,
        pipeline: &Pipeline,
        deadline: Duration,
    ) -> Result<Replies, StoreError> {
        let exchange = async {
            let ready = self.ready(operation).await?;
            self.exchange(operation, pipeline, ready).await
        };
        match tokio::time::timeout(deadline, exchange).await {
            Ok(result) => result,
            Err(_elapsed) => Err(self.timed_out(operation, deadline)),
        }
    }

    async fn exchange(
        &self,
        operation: &'static str,
        pipeline: &Pipeline,
        (mut connection, generation): (MultiplexedConnection, Generation),
    ) -> Result<Replies, StoreError> {
        let replies: RedisResult<Replies> = pipeline.query_async(&mut connection).await;
        match replies {
            Ok(replies) => {
                self.answered(generation, &replies);
                Ok(replies)
            }
            Err(error) => {
                self.lost(generation, &error.to_string());
                Err(self.error(operation, &error))
            }
        }
    }

    /// The connection, or why there is none. Waits only while an attempt is being made.
    async fn ready(
        self: &Arc<Self>,
        operation: &'static str,
    ) -> Result<(MultiplexedConnection, Generation), StoreError> {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            {
                let mut inner = self.inner.lock();
                match &inner.state {
                    State::Ready(connection) => return Ok((connection.clone(), inner.generation)),
                    State::Waiting { since, wait, reason } if since.elapsed() < *wait => {
                        return Err(self.unavailable(operation, reason.clone()));
                    }
                    State::Waiting { .. } => {
                        inner.state = State::Connecting;
                        let connection = Arc::clone(self);
                        tokio::spawn(async move { connection.attempt().await });
                    }
                    State::Connecting => {}
                }
            }
            if changed.changed().await.is_err() {
                return Err(self.unavailable(operation, "shutting down".to_owned()));
            }
        }
    }

    /// The next call finds out anew how the server is: it waits for no attempt that is due later, and does not rely on a
    /// connection that has been silent for long.
    pub(super) fn renew(&self) {
        let mut inner = self.inner.lock();
        let is_silent = inner.silent.elapsed() >= self.connect_timeout;
        match &mut inner.state {
            State::Waiting { wait, .. } => *wait = Duration::ZERO,
            State::Ready(_) if is_silent => {
                let reason = "no answers".to_owned();
                inner.state = State::Waiting { since: Stopwatch::start(), wait: Duration::ZERO, reason };
            }
            State::Ready(_) | State::Connecting => {}
        }
    }

    /// To be called now and then while the server is left alone: where sentinels name another primary by now, the next probe
    /// goes there, and need not wait.
    pub(super) fn look_for_successor(self: &Arc<Self>) {
        if !matches!(self.route, Route::Primary(_)) || self.breaker.state() == BreakerState::Closed {
            return;
        }
        {
            let mut looked = self.looked_for_successor.lock();
            if looked.is_some_and(|looked| looked.elapsed() < BETWEEN_LOOKS_FOR_SUCCESSORS) {
                return;
            }
            *looked = Some(Stopwatch::start());
        }
        let connection = Arc::clone(self);
        tokio::spawn(async move {
            let Route::Primary(sentinels) = &connection.route else { return };
            if sentinels.has_successor(&connection.settings(), connection.connect_timeout).await {
                let mut inner = connection.inner.lock();
                if !matches!(inner.state, State::Connecting) {
                    let reason = "it has a successor".to_owned();
                    inner.state = State::Waiting { since: Stopwatch::start(), wait: Duration::ZERO, reason };
                }
                drop(inner);
                connection.breaker.hasten();
            }
        });
    }

    fn settings(&self) -> AsyncConnectionConfig {
        AsyncConnectionConfig::new().set_connection_timeout(Some(self.connect_timeout)).set_response_timeout(None)
    }

    async fn attempt(&self) {
        // A task that is dropped in the middle must not leave `Connecting` behind for ever.
        let mut unfinished = Unfinished { connection: self, done: false };
        let config = self.settings();
        let result = match &self.route {
            Route::Server(client) => {
                let connect = client.get_multiplexed_async_connection_with_config(&config);
                match tokio::time::timeout(self.connect_timeout, connect).await {
                    Ok(connected) => connected.map_err(|error| error.to_string()),
                    Err(elapsed) => Err(format!("connecting: {elapsed}")),
                }
            }
            Route::Primary(sentinels) => sentinels.connect(&config, self.connect_timeout).await,
        };
        unfinished.done = true;
        self.timeouts.store(0, Ordering::Relaxed);
        {
            let mut inner = self.inner.lock();
            match result {
                Ok(connection) => {
                    inner.generation = self.generations.fetch_add(1, Ordering::Relaxed) + 1;
                    inner.silent = Stopwatch::start();
                    inner.state = State::Ready(connection);
                    drop(inner);
                    // The call that wanted it may not have waited so long.
                    self.breaker.hasten();
                }
                Err(reason) => inner.wait(reason),
            }
        }
        self.changed.send_replace(());
    }

    fn answered(&self, generation: Generation, replies: &[RedisResult<Value>]) {
        self.timeouts.store(0, Ordering::Relaxed);
        // A server that was demoted, restarts, or forgot who we are: there may be a better one at the same address.
        let elsewhere = replies.iter().find_map(|reply| reply.as_ref().err().filter(|error| is_of_server(error)));
        if let Some(error) = elsewhere {
            self.lost(generation, &error.to_string());
        } else {
            let mut inner = self.inner.lock();
            inner.failures = 0;
            inner.silent = Stopwatch::start();
        }
    }

    /// Gives up the connection of `generation`, if it is still in use.
    fn lost(&self, generation: Generation, reason: &str) {
        let mut inner = self.inner.lock();
        if inner.generation == generation && matches!(inner.state, State::Ready(_)) {
            inner.wait(reason.to_owned());
        }
    }

    fn timed_out(&self, operation: &'static str, deadline: Duration) -> StoreError {
        let timeouts = self.timeouts.fetch_add(1, Ordering::Relaxed) + 1;
        let mut inner = self.inner.lock();
        if timeouts >= TIMEOUTS_UNTIL_DEAD
            && inner.silent.elapsed() >= self.connect_timeout
            && matches!(inner.state, State::Ready(_))
        {
            inner.wait("no answers".to_owned());
        }
        drop(inner);
        let after_ms = u64::try_from(deadline.as_micros().div_ceil(1000)).unwrap_or(u64::MAX);
        StoreError::Timeout { operation, store: self.name.clone(), after_ms }
    }

    pub(super) fn error(&self, operation: &'static str, error: &RedisError) -> StoreError {
        let store = self.name.clone();
        let reason = error.to_string();
        if is_misunderstanding(error) && !is_unauthenticated(&reason) {
            StoreError::BadReply { operation, store, reason }
        } else {
            StoreError::Unavailable { operation, store, reason }
        }
    }

    fn unavailable(&self, operation: &'static str, reason: String) -> StoreError {
        StoreError::Unavailable { operation, store: self.name.clone(), reason }
    }

    pub(super) fn bad_reply(&self, operation: &'static str, reason: String) -> StoreError {
        StoreError::BadReply { operation, store: self.name.clone(), reason }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The client's own `Debug` may show credentials.
        f.debug_struct("Connection").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Inner {
    fn wait(&mut self, reason: String) {
        // At once after a connection that worked.
        let longest = match self.failures.min(10) {
            0 => Duration::ZERO,
            failures => (FIRST_BACKOFF * (1 << (failures - 1))).min(LONGEST_BACKOFF),
        };
        // `RandomState` is randomly keyed: enough to keep a fleet from reconnecting in step.
        let random = RandomState::new().hash_one(self.failures);
        let half_us = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX) / 2;
        let wait = Duration::from_micros(half_us + random % (half_us + 1));
        self.failures = self.failures.saturating_add(1);
        self.state = State::Waiting { since: Stopwatch::start(), wait, reason };
    }
}

struct Unfinished<'a> {
    connection: &'a Connection,
    done: bool,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.connection.inner.lock().wait("the attempt was cancelled".to_owned());
            self.connection.changed.send_replace(());
        }
    }
}

/// Whether it is the server that is the wrong one, or not able now.
fn is_of_server(error: &RedisError) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown) | ErrorKind::AuthenticationFailed
    ) || error.code() == Some("NOAUTH")
        // As a script of Redis 6 says it.
        || error.to_string().contains("-READONLY ")
}

/// Whether the server can do nothing for anybody, whatever the call was.
fn is_unable(error: &RedisError) -> bool {
    const CODES: &[&str] = &[
        "LOADING",
        "MASTERDOWN",
        "READONLY",
        "CLUSTERDOWN",
        "NOAUTH",
        "WRONGPASS",
        "NOPERM",
        "OOM",
        "BUSY",
        "NOREPLICAS",
        "MISCONF",
    ];
    let is_known = error.code().is_some_and(|code| CODES.contains(&code));
    is_known || error.kind() == ErrorKind::AuthenticationFailed || is_unable_by_text(&error.to_string())
}

/// Before version 7, Redis hides in a script's error what hindered a command of it.
fn is_unable_by_text(reason: &str) -> bool {
    is_unauthenticated(reason)
        || ["-OOM ", "-READONLY ", "-NOREPLICAS ", "-MISCONF "].iter().any(|code| reason.contains(code))
}

/// What Redis says to a call of more than ten words before it knows who calls; to a shorter one it says NOAUTH.
fn is_unauthenticated(reason: &str) -> bool {
    reason.contains("unauthenticated multibulk length")
}

/// Whether asking again, or another server, would not help: the call or the reply is wrong.
fn is_misunderstanding(error: &RedisError) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Server(ServerErrorKind::ResponseError | ServerErrorKind::CrossSlot | ServerErrorKind::NoScript)
            | ErrorKind::Parse
            | ErrorKind::UnexpectedReturnType
    )
}

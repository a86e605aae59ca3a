//! Counters in one Redis server, version 6 or later.
//!
//! Architecture invariant: nothing outside this module and its children names the `redis` crate, and every call ends
//! within the deadline that it was given.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use limiter_common::time::UnixMicros;
use redis::{Cmd, ErrorKind, Pipeline, RedisResult, ServerErrorKind, Value};

pub(super) use self::run::Run;
pub use self::{
    access::{Certificates, RedisConfig, RedisConfigError, Topology},
    breakers::BreakerCounts,
    calls::{CallStats, DURATION_BOUNDS_US},
    examine::{Examination, ServerFacts, examine_now},
    heartbeat::Heard,
    key::redis_key,
    keys::{KeyChange, KeyCondition, KeyPage, KeyRefusal, MergedKey, RedisKeys, StoredKey},
    outage::Shard,
    script::{Judged, SyncReply},
    value::StoredCounter,
};
use self::{
    breakers::Breakers,
    calls::Calls,
    cluster::{Call, Cluster, Exchange},
    connection::{Connection, LateAnswer, Replies, Route},
    late::Late,
    losses::Losses,
    mark::Marks,
    script::{Beside, Script},
    sentinel::Sentinels,
    slot::slot,
};
use super::{
    At, Cell, CellOutcome, Charge, CounterKey, Store, StoreError,
    algorithm::View,
    counter::{Heard as HeardCounter, OwnState, OwnTotals},
    fleet::Fleet,
    lease::{Lent, Statement},
};
use crate::clock::Stopwatch;

mod access;
mod breakers;
mod calls;
mod cluster;
mod connection;
mod examine;
mod heartbeat;
mod key;
mod keys;
mod late;
mod losses;
mod mark;
mod outage;
mod run;
mod scan;
mod script;
mod sentinel;
mod slot;
mod spread;
mod value;

/// What a user needs who shares counters, in the words of `ACL SETUSER`.
pub const ACL_RULES: &str = "~rl:* +evalsha +script|load +get +set +pttl +pexpire +del +time +info +ping +scan";

/// What a user needs in addition in a cluster.
pub const CLUSTER_ACL_RULES: &str = "+cluster|slots";

/// What a user needs in addition behind sentinels, to notice a primary that is cut off.
pub const SENTINEL_ACL_RULES: &str = "+role";

/// What a user needs in addition where API keys are in Redis.
pub const KEY_STORE_ACL_RULES: &str = "+@hash +@sortedset";

/// Whose clock a cluster goes by: that of the node that has this slot, in which heartbeats are.
const CLOCK_SLOT: u16 = 9928;
/// Counters that one call of a script shares: enough that what a call costs by itself is little beside them.
const COUNTERS_OF_CALL: usize = 16;

/// How long giving back may take. Nobody waits for it.
const GIVE_BACK_WITHIN: Duration = Duration::from_secs(1);

/// Cheap to clone; all clones share their connections.
#[derive(Clone, Debug)]
pub struct RedisStore(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    servers: Servers,
    name: String,
    generations: Arc<AtomicU64>,
    timeout: Duration,
    decide: Script,
    sync: Script,
    lease: Script,
    restore: Script,
    heartbeat: Script,
    probe: Script,
    mark: Script,
    marks: Marks,
    calls: Arc<Calls>,
    breakers: Arc<Breakers>,
    fleet: Fleet,
    losses: Losses,
    late: Late,
}

/// What a node knows of its servers, by whichever connections.
#[derive(Debug, Default)]
struct Common {
    fleet: Fleet,
    losses: Losses,
}

#[derive(Debug)]
enum Servers {
    One(Arc<Connection>),
    Cluster(Arc<Cluster>),
}

impl RedisStore {
    /// Fails on an address that cannot be one, never because Redis is away: the first call connects.
    pub fn connect(config: &RedisConfig) -> Result<Self, RedisConfigError> {
        Self::connect_knowing(config, Arc::default(), Breakers::new(config.breaker), Common::default())
    }

    /// The same servers by connections of its own, so that a request does not stand behind a batch, and with breakers of
    /// their own: a server that is too slow for a request may do for a batch. Calls are counted together.
    pub fn connect_beside(&self, config: &RedisConfig) -> Result<Self, RedisConfigError> {
        let (calls, breakers) = (Arc::clone(&self.0.calls), Breakers::beside(&self.0.breakers, config.breaker));
        let common = Common { fleet: self.0.fleet.clone(), losses: self.0.losses.clone() };
        Self::connect_knowing(config, calls, breakers, common)
    }

    fn connect_knowing(
        config: &RedisConfig,
        calls: Arc<Calls>,
        breakers: Arc<Breakers>,
        Common { fleet, losses }: Common,
    ) -> Result<Self, RedisConfigError> {
        let refused = |error: redis::RedisError| RedisConfigError { reason: error.to_string() };
        let access = config.access()?;
        let generations = Arc::new(AtomicU64::new(0));
        let one = |route| Connection::new(route, config.connect_timeout, Arc::clone(&generations), &breakers);
        let servers = match &config.topology {
            Topology::Standalone => Servers::One(one(Route::to(&access).map_err(refused)?)),
            Topology::Sentinel { service } => {
                let sentinels = Sentinels::new(config.access_to_each()?, service.clone(), access);
                Servers::One(one(Route::Primary(Box::new(sentinels))))
            }
            Topology::Cluster => {
                let seeds = config.access_to_each()?;
                Servers::Cluster(Cluster::new(
                    access,
                    &seeds,
                    config.connect_timeout,
                    Arc::clone(&generations),
                    &breakers,
                ))
            }
        };
        let name = match &servers {
            Servers::One(connection) => connection.name().to_owned(),
            Servers::Cluster(cluster) => cluster.name(),
        };
        Ok(Self(Arc::new(Shared {
            servers,
            name,
            generations,
            timeout: config.timeout,
            decide: Script::decide(),
            sync: Script::sync(),
            lease: Script::lease(),
            restore: Script::restore(),
            heartbeat: Script::heartbeat(),
            probe: Script::probe(),
            mark: Script::mark(),
            marks: Marks::default(),
            calls,
            breakers,
            fleet,
            losses,
            late: Late::default(),
        })))
    }

    /// Address without credentials.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub fn calls(&self) -> CallStats {
        self.0.calls.snapshot()
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.0.servers, Servers::Cluster(_))
    }

    /// Changes with every new connection.
    pub(super) fn generation(&self) -> u64 {
        self.0.generations.load(Ordering::Relaxed)
    }

    /// Times that Redis was found to have lost what it was told, by whichever connections.
    pub(super) fn losses(&self) -> u64 {
        self.0.losses.count()
    }

    /// Redis was found to have lost what it was told.
    pub(super) fn has_lost(&self) {
        self.0.losses.notice();
    }

    /// Shares totals, in one pipeline for each server; a reply each, in order. `number` is higher than that of all
    /// messages whose totals were read before. The error is for when no server has answered.
    pub async fn exchange(
        &self,
        number: u64,
        totals: &[OwnTotals],
        deadline: Duration,
    ) -> Result<Vec<Result<SyncReply, StoreError>>, StoreError> {
        const OPERATION: &str = "share counters";
        let most = match &self.0.servers {
            Servers::One(_) => COUNTERS_OF_CALL,
            // In a cluster, a script may have keys of one slot.
            Servers::Cluster(_) => 1,
        };
        let is_log = |totals: &OwnTotals| matches!(totals.state, OwnState::Log { .. });
        // Of logs each has its own: one may keep Redis busy for as long as many others.
        let chunks =
            || totals.chunk_by(move |one, next| !is_log(one) && !is_log(next)).flat_map(move |of| of.chunks(most));
        let mut calls = Vec::with_capacity(totals.len().div_ceil(most));
        let mut slots = Vec::with_capacity(totals.len());
        for chunk in chunks() {
            let counters: Vec<_> = chunk.iter().map(|totals| (redis_key(&totals.key).into_bytes(), totals)).collect();
            slots.extend(counters.iter().map(|(key, _)| slot(key)));
            let command = script::sync(&self.0.sync, number, &counters);
            calls.push(Call { slot: slots[slots.len() - chunk.len()], command });
        }
        let replies = self.run(OPERATION, &self.0.sync, calls, deadline).await?;
        let mut of_counters = Vec::with_capacity(totals.len());
        for (reply, chunk) in replies.into_iter().zip(chunks()) {
            let replies = reply.and_then(|reply| {
                script::by_counter(reply, chunk.len()).map_err(|misfit| self.bad_reply(OPERATION, misfit))
            });
            match replies {
                Ok(replies) => of_counters.extend(replies.into_iter().map(Ok)),
                Err(error) => of_counters.extend(chunk.iter().map(|_| Err(error.clone()))),
            }
        }
        let parse = |((reply, sent), slot): ((Result<Value, StoreError>, &OwnTotals), u16)| {
            let mut reply = script::synced(reply?, &sent.state).map_err(|misfit| self.bad_reply(OPERATION, misfit))?;
            reply.is_of_clock = match &self.0.servers {
                Servers::One(_) => true,
                Servers::Cluster(cluster) => cluster.are_together(slot, CLOCK_SLOT),
            };
            self.0.calls.values_replaced(u64::from(reply.replaced));
            Ok(reply)
        };
        Ok(of_counters.into_iter().zip(totals).zip(slots).map(parse).collect())
    }

    /// Makes counters what this node has heard of them, where that is more; says how many were less. The error is for when no
    /// server has answered.
    pub(super) async fn restore(&self, heard: &[HeardCounter], deadline: Duration) -> Result<u64, StoreError> {
        const OPERATION: &str = "restore counters";
        let call = |counter: &HeardCounter| {
            let key = redis_key(&counter.key);
            let command = script::restore(&self.0.restore, counter, key.as_bytes());
            Call { slot: slot(key.as_bytes()), command }
        };
        let mut all = 0;
        for reply in self.run(OPERATION, &self.0.restore, heard.iter().map(call).collect(), deadline).await? {
            let parsed =
                reply.and_then(|reply| script::restored(reply).map_err(|misfit| self.bad_reply(OPERATION, misfit)));
            match parsed {
                Ok((replaced, restored)) => {
                    self.0.calls.values_replaced(u64::from(replaced));
                    all += u64::from(restored);
                }
                Err(error) => tracing::debug!(target: "limiter::store", %error, "a counter was not restored"),
            }
        }
        self.0.calls.counters_restored(all);
        Ok(all)
    }

    /// Lends what statements ask for, in one pipeline for each server; a reply each, in order. `number` is higher than that of
    /// all earlier statements about the same counters. The error is for when no server has answered.
    pub(super) async fn lend(
        &self,
        number: u64,
        parts: u64,
        statements: &[(CounterKey, Statement)],
        deadline: Duration,
    ) -> Result<Vec<Result<Lent, StoreError>>, StoreError> {
        const OPERATION: &str = "lend";
        let call = |(key, statement): &(CounterKey, Statement)| {
            let key = redis_key(key);
            let command = script::lease(&self.0.lease, number, parts, statement, key.as_bytes());
            Call { slot: slot(key.as_bytes()), command }
        };
        let replies = self.run(OPERATION, &self.0.lease, statements.iter().map(call).collect(), deadline).await?;
        let parse = |reply: Result<Value, StoreError>| {
            let (lent, replaced) = script::lent(reply?).map_err(|misfit| self.bad_reply(OPERATION, misfit))?;
            self.0.calls.values_replaced(u64::from(replaced));
            Ok(lent)
        };
        Ok(replies.into_iter().map(parse).collect())
    }

    /// Redis' clock, in microseconds since 1970. Of a cluster, that of one node.
    pub async fn time_us(&self, deadline: Duration) -> Result<u64, StoreError> {
        const OPERATION: &str = "ask the time";
        let reply = self.single(OPERATION, redis::cmd("TIME"), deadline).await?;
        self.time_of(OPERATION, reply)
    }

    fn time_of(&self, operation: &'static str, reply: Value) -> Result<u64, StoreError> {
        let misfit = |reason: String| self.bad_reply(operation, reason);
        let (seconds, micros): (u64, u64) =
            redis::from_redis_value(reply).map_err(|error| misfit(error.to_string()))?;
        let us = seconds.checked_mul(1_000_000).and_then(|us| us.checked_add(micros));
        us.ok_or_else(|| misfit(format!("{seconds} seconds")))
    }

    /// The clock of any node of a cluster, while the one that counts does not answer.
    pub(super) async fn any_time_us(&self, deadline: Duration) -> Result<u64, StoreError> {
        const OPERATION: &str = "ask the time";
        let mut result = Err(self.bad_reply(OPERATION, "there are no nodes".to_owned()));
        for node in self.nodes(OPERATION, deadline).await? {
            result = self.single_to(OPERATION, &node, redis::cmd("TIME"), deadline).await;
            if result.is_ok() {
                break;
            }
        }
        self.time_of(OPERATION, result?)
    }

    /// All servers that hold counters.
    async fn nodes(&self, operation: &'static str, deadline: Duration) -> Result<Vec<Arc<Connection>>, StoreError> {
        match &self.0.servers {
            Servers::One(connection) => Ok(vec![Arc::clone(connection)]),
            Servers::Cluster(cluster) => cluster.nodes(operation, deadline).await,
        }
    }

    /// One call; of a cluster, to the node whose clock counts.
    async fn single(&self, operation: &'static str, call: Cmd, deadline: Duration) -> Result<Value, StoreError> {
        match &self.0.servers {
            Servers::One(node) => self.single_to(operation, node, call, deadline).await,
            // A node that is asked for its time or its name sends nobody elsewhere.
            Servers::Cluster(cluster) => {
                let watch = Stopwatch::start();
                let node = cluster.node(operation, CLOCK_SLOT, deadline).await?;
                self.single_to(operation, &node, call, deadline.saturating_sub(watch.elapsed())).await
            }
        }
    }

    /// One call about keys of a slot.
    async fn single_at(
        &self,
        operation: &'static str,
        slot: u16,
        call: Cmd,
        deadline: Duration,
    ) -> Result<Value, StoreError> {
        let Servers::Cluster(cluster) = &self.0.servers else { return self.single(operation, call, deadline).await };
        let watch = Stopwatch::start();
        let calls = [Call { slot, command: call }];
        let answers = cluster.send(operation, &calls, deadline, &PlainCalls { operation, deadline, watch }).await;
        let no_reply = || Err(self.bad_reply(operation, "no reply".to_owned()));
        let result = answers.and_then(|mut answers| answers.pop().unwrap_or_else(no_reply));
        self.0.calls.record(&result, watch.elapsed());
        result
    }

    async fn single_to(
        &self,
        operation: &'static str,
        node: &Arc<Connection>,
        call: Cmd,
        deadline: Duration,
    ) -> Result<Value, StoreError> {
        let mut pipeline = Pipeline::with_capacity(1);
        pipeline.ignore_errors().add_command(call);
        let watch = Stopwatch::start();
        let sent = node.send(operation, &pipeline, deadline).await;
        let result = sent.and_then(|replies| only(operation, node, replies));
        self.0.calls.record(&result, watch.elapsed());
        result
    }

    /// Sends script calls, each to the server that has its keys. When a server does not know the script, loads it and
    /// sends them once more: none of the calls has done anything then.
    async fn run(
        &self,
        operation: &'static str,
        script: &Script,
        calls: Vec<Call>,
        deadline: Duration,
    ) -> Result<Vec<Result<Value, StoreError>>, StoreError> {
        let watch = Stopwatch::start();
        let exchange = ScriptCalls { operation, script, deadline, watch, calls: &self.0.calls, manner: Manner::Usual };
        self.run_by(exchange, calls).await
    }

    async fn run_by(
        &self,
        exchange: ScriptCalls<'_>,
        calls: Vec<Call>,
    ) -> Result<Vec<Result<Value, StoreError>>, StoreError> {
        let ScriptCalls { operation, deadline, .. } = exchange;
        let result = match &self.0.servers {
            Servers::One(connection) => {
                let mut pipeline = Pipeline::with_capacity(calls.len());
                pipeline.ignore_errors();
                for call in calls {
                    pipeline.add_command(call.command);
                }
                let replies = exchange.exchange(connection, &pipeline).await;
                let of = |reply: RedisResult<Value>| reply.map_err(|error| connection.error(operation, &error));
                replies.map(|replies| replies.into_iter().map(of).collect())
            }
            Servers::Cluster(cluster) => cluster.send(operation, &calls, deadline, &exchange).await,
        };
        self.0.calls.record(&result, exchange.watch.elapsed());
        result
    }

    fn bad_reply(&self, operation: &'static str, reason: String) -> StoreError {
        StoreError::BadReply { operation, store: self.0.name.clone(), reason }
    }
}

/// Calls of commands.
struct PlainCalls {
    operation: &'static str,
    deadline: Duration,
    /// Since the deadline began.
    watch: Stopwatch,
}

impl Exchange for PlainCalls {
    async fn exchange(&self, node: &Arc<Connection>, pipeline: &Pipeline) -> Result<Replies, StoreError> {
        node.send(self.operation, pipeline, self.deadline.saturating_sub(self.watch.elapsed())).await
    }
}

/// Calls of one script.
struct ScriptCalls<'a> {
    operation: &'static str,
    script: &'a Script,
    deadline: Duration,
    /// Since the deadline began.
    watch: Stopwatch,
    calls: &'a Calls,
    manner: Manner<'a>,
}

/// How calls of a script are made.
enum Manner<'a> {
    /// A server that fails is left alone.
    Usual,
    /// The same, and whoever is named here gets what is not answered in time.
    Heard(&'a (dyn Fn(LateAnswer) + Sync)),
    /// Even though it fails.
    Probe,
}

impl ScriptCalls<'_> {
    async fn send(&self, node: &Arc<Connection>, pipeline: &Pipeline) -> Result<Replies, StoreError> {
        let left = self.deadline.saturating_sub(self.watch.elapsed());
        match self.manner {
            Manner::Usual => node.send(self.operation, pipeline, left).await,
            Manner::Heard(late) => node.send_and_hear(self.operation, pipeline, left, late).await,
            Manner::Probe => node.send_anyway(self.operation, pipeline, left).await,
        }
    }
}

impl Exchange for ScriptCalls<'_> {
    async fn exchange(&self, node: &Arc<Connection>, pipeline: &Pipeline) -> Result<Replies, StoreError> {
        let count = pipeline.len();
        let mut replies = self.send(node, pipeline).await?;
        if replies.iter().any(is_noscript) {
            self.calls.script_loaded();
            let script = self.script.name;
            tracing::debug!(target: "limiter::store", script, "redis does not know the script, loading it");
            let mut load = Pipeline::with_capacity(1);
            load.ignore_errors().add_command(self.script.load());
            let loaded = self.send(node, &load).await?;
            only(self.operation, node, loaded)?;
            replies = self.send(node, pipeline).await?;
        }
        if replies.len() == count {
            Ok(replies)
        } else {
            Err(node.bad_reply(self.operation, format!("{} replies to {count} calls", replies.len())))
        }
    }
}

/// The reply to a pipeline of one call.
fn only(operation: &'static str, node: &Connection, replies: Vec<RedisResult<Value>>) -> Result<Value, StoreError> {
    let count = replies.len();
    match <[RedisResult<Value>; 1]>::try_from(replies) {
        Ok([reply]) => reply.map_err(|error| node.error(operation, &error)),
        Err(_) => Err(node.bad_reply(operation, format!("{count} replies to one call"))),
    }
}

fn is_noscript(reply: &RedisResult<Value>) -> bool {
    reply.as_ref().is_err_and(|error| error.kind() == ErrorKind::Server(ServerErrorKind::NoScript))
}

impl Store for RedisStore {
    /// One call with all counters, if one server has them; see `spread` for those that several have.
    async fn check(&self, at: At, charge: Charge, cells: &[Cell]) -> Result<Vec<CellOutcome>, StoreError> {
        let judged = self.judge(at, charge, cells, self.0.timeout).await?;
        Ok(judged.into_iter().map(|judged| judged.outcome).collect())
    }
}

/// What is asked of one call of `decide.lua`.
#[derive(Clone, Copy)]
struct Question<'a> {
    at: At,
    charge: Charge,
    /// Of a refund: when the cost was charged.
    charged_us: Option<u64>,
    /// Of a charge: what was last heard of each counter. Empty where nobody says.
    heard: &'a [Option<View>],
    deadline: Duration,
}

impl RedisStore {
    /// How long a request waits for Redis.
    pub fn timeout(&self) -> Duration {
        self.0.timeout
    }

    /// Decides all cells at once, within the deadline.
    pub async fn judge(
        &self,
        at: At,
        charge: Charge,
        cells: &[Cell],
        deadline: Duration,
    ) -> Result<Vec<Judged>, StoreError> {
        self.ask(Question { at, charge, charged_us: None, heard: &[], deadline }, cells).await
    }

    /// Charges all cells or none, within the deadline. `heard` is what was last heard of each counter: one that Redis has lost
    /// is that much from then on.
    pub async fn charge_knowing(
        &self,
        cells: &[Cell],
        heard: &[Option<View>],
        deadline: Duration,
    ) -> Result<Vec<Judged>, StoreError> {
        let question = Question { at: At::StoreClock, charge: Charge::Commit, charged_us: None, heard, deadline };
        self.ask(question, cells).await
    }

    /// Gives back what was charged at these instants by the server's clock, and nothing that anybody else was charged since.
    pub async fn take_back(&self, cells: &[(Cell, UnixMicros)], deadline: Duration) -> Result<(), StoreError> {
        for (cell, charged) in cells {
            let charged_us = Some(charged.get());
            let question = Question { at: At::StoreClock, charge: Charge::Refund, charged_us, heard: &[], deadline };
            self.ask(question, std::slice::from_ref(cell)).await?;
        }
        Ok(())
    }

    async fn ask(&self, question: Question<'_>, cells: &[Cell]) -> Result<Vec<Judged>, StoreError> {
        let keys: Vec<Vec<u8>> = cells.iter().map(|cell| redis_key(&cell.key).into_bytes()).collect();
        match &self.0.servers {
            Servers::One(_) => self.decide(question, cells, &keys, CLOCK_SLOT).await,
            Servers::Cluster(_) => self.check_spread(question, cells, &keys).await,
        }
    }

    /// One call of `decide.lua`, whose keys are all in one slot.
    async fn decide(
        &self,
        question: Question<'_>,
        cells: &[Cell],
        keys: &[Vec<u8>],
        slot: u16,
    ) -> Result<Vec<Judged>, StoreError> {
        const OPERATION: &str = "decide";
        let Question { at, charge, charged_us, heard, deadline } = question;
        let now_us = match at {
            At::StoreClock => 0,
            At::Given(now) => now.get(),
        };
        let after_loss = self.0.losses.are_recent();
        let beside = match charged_us {
            Some(charged_us) => Beside::ChargedAt(charged_us),
            None if heard.len() == cells.len() => Beside::Heard { views: heard, after_loss },
            None => Beside::Nothing,
        };
        let command = script::decide(&self.0.decide, now_us, charge, cells, keys, &beside);
        let late = |answer| self.undo(answer, cells, keys, slot);
        let manner = if charge == Charge::Commit { Manner::Heard(&late) } else { Manner::Usual };
        let (operation, script, watch) = (OPERATION, &self.0.decide, Stopwatch::start());
        let exchange = ScriptCalls { operation, script, deadline, watch, calls: &self.0.calls, manner };
        let mut replies = self.run_by(exchange, vec![Call { slot, command }]).await?;
        let Some(reply) = replies.pop() else { return Err(self.bad_reply(OPERATION, "no reply".to_owned())) };
        let decided = script::decided(reply?, charge, cells).map_err(|misfit| self.bad_reply(OPERATION, misfit))?;
        self.0.calls.values_replaced(decided.replaced);
        self.0.calls.counters_restored(decided.restored);
        if decided.restored > 0 && self.0.losses.suspect() {
            tracing::warn!(
                target: "limiter::store",
                redis = self.0.name,
                "redis has lost counters: they go on from what this node last heard of them"
            );
        }
        Ok(decided.cells)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Secret;

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

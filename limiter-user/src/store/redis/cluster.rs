//! The nodes of a cluster: which has which slot, and what becomes of calls while slots move.

use std::{
    collections::HashMap,
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use parking_lot::Mutex;
use redis::{Cmd, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::sync::watch;

use super::{
    access::Access,
    breakers::{Breakers, ServerBreaker},
    connection::{BETWEEN_LOOKS_FOR_SUCCESSORS, Connection, Route},
    slot::SLOTS,
};
use crate::{
    clock::Stopwatch,
    store::{StoreError, breaker::BreakerState},
};

/// Between two looks at who has which slot, whatever goes wrong.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);
/// So long after slots have moved all nodes know of it.
const SETTLES_WITHIN: Duration = Duration::from_secs(5);
/// How often one call follows slots that move.
const MAX_REDIRECTIONS: usize = 4;
/// Before a call is repeated whose keys are on their way.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(1);

/// What a node says that has the slots no longer, or not for now.
const NOT_HERE: &[ServerErrorKind] =
    &[ServerErrorKind::Moved, ServerErrorKind::ReadOnly, ServerErrorKind::ClusterDown, ServerErrorKind::MasterDown];

type Address = (String, u16);

pub(super) struct Cluster {
    access: Access,
    seeds: Vec<Address>,
    connect_timeout: Duration,
    generations: Arc<AtomicU64>,
    inner: Mutex<Inner>,
    looking: AtomicBool,
    changed: watch::Sender<()>,
    breakers: Arc<Breakers>,
    /// Of the cluster as a whole, as long as nobody is known who has slots.
    breaker: ServerBreaker,
}

#[derive(Default)]
struct Inner {
    /// Primaries by their slots.
    ranges: Arc<[Range]>,
    /// Of primaries, and of what slots moved to since the last look.
    connections: HashMap<Address, Arc<Connection>>,
    looked: Option<Stopwatch>,
    /// When a look last saw slots elsewhere than the one before.
    moved: Option<Stopwatch>,
    /// Why the last look saw nothing.
    reason: Option<String>,
}

#[derive(Clone)]
struct Range {
    first: u16,
    last: u16,
    connection: Arc<Connection>,
}

/// A call, and the slot that its keys are in.
pub(super) struct Call {
    pub(super) slot: u16,
    pub(super) command: Cmd,
}

/// How calls are sent to one node.
pub(super) trait Exchange: Sync {
    fn exchange(
        &self,
        node: &Arc<Connection>,
        pipeline: &Pipeline,
    ) -> impl Future<Output = Result<Vec<RedisResult<Value>>, StoreError>> + Send;
}

/// Where a call goes next.
struct Target {
    call: usize,
    connection: Arc<Connection>,
    /// The slot is moving there, and is not all there yet.
    asking: bool,
}

impl Cluster {
    pub(super) fn new(
        access: Access,
        seeds: &[Access],
        connect_timeout: Duration,
        generations: Arc<AtomicU64>,
        breakers: &Arc<Breakers>,
    ) -> Arc<Self> {
        let seeds: Vec<Address> = seeds.iter().filter_map(Access::host_and_port).collect();
        Arc::new(Self {
            access,
            breaker: ServerBreaker::new(name_of(&seeds), breakers),
            seeds,
            connect_timeout,
            generations,
            inner: Mutex::default(),
            looking: AtomicBool::new(false),
            changed: watch::Sender::new(()),
            breakers: Arc::clone(breakers),
        })
    }

    pub(super) fn name(&self) -> String {
        name_of(&self.seeds)
    }

    pub(super) fn breaker(&self) -> &ServerBreaker {
        &self.breaker
    }

    /// The slots of each node, as far as is known now. Nobody is asked.
    pub(super) fn known(&self) -> Vec<(Arc<Connection>, RangeInclusive<u16>)> {
        let ranges = Arc::clone(&self.inner.lock().ranges);
        ranges.iter().map(|range| (Arc::clone(&range.connection), range.first..=range.last)).collect()
    }

    /// Each node that has slots once, with its first one, as far as is known now.
    pub(super) fn first_slots(&self) -> Vec<(Arc<Connection>, u16)> {
        let mut nodes: Vec<(Arc<Connection>, u16)> = Vec::new();
        for (node, slots) in self.known() {
            if !nodes.iter().any(|(other, _)| Arc::ptr_eq(other, &node)) {
                nodes.push((node, *slots.start()));
            }
        }
        nodes
    }

    /// The node that has the slot, as far as is known now; `None` in `Some` if that is nobody, and `None` if nothing is known.
    pub(super) fn known_node(&self, slot: u16) -> Option<Option<Arc<Connection>>> {
        let ranges = Arc::clone(&self.inner.lock().ranges);
        (!ranges.is_empty()).then(|| find(&ranges, slot))
    }

    /// Whether one node has both slots, as far as is known.
    pub(super) fn are_together(&self, one: u16, other: u16) -> bool {
        let ranges = Arc::clone(&self.inner.lock().ranges);
        let (one, other) = (find(&ranges, one), find(&ranges, other));
        one.zip(other).is_some_and(|(one, other)| Arc::ptr_eq(&one, &other))
    }

    /// The node that has the slot.
    pub(super) async fn node(
        self: &Arc<Self>,
        operation: &'static str,
        slot: u16,
        deadline: Duration,
    ) -> Result<Arc<Connection>, StoreError> {
        let ranges = self.ranges(operation, deadline).await?;
        find(&ranges, slot).ok_or_else(|| {
            self.look_again();
            self.nobody_has(operation, slot)
        })
    }

    /// All nodes that have slots.
    pub(super) async fn nodes(
        self: &Arc<Self>,
        operation: &'static str,
        deadline: Duration,
    ) -> Result<Vec<Arc<Connection>>, StoreError> {
        self.ranges(operation, deadline).await?;
        Ok(self.first_slots().into_iter().map(|(node, _)| node).collect())
    }

    /// Sends each call to the node that has its slot, all nodes at once, and goes after slots that have moved. An answer
    /// each, in order; the error is for when there is no answer at all.
    pub(super) async fn send(
        self: &Arc<Self>,
        operation: &'static str,
        calls: &[Call],
        deadline: Duration,
        exchange: &impl Exchange,
    ) -> Result<Vec<Result<Value, StoreError>>, StoreError> {
        let ranges = self.ranges(operation, deadline).await?;
        let mut answers: Vec<Option<Result<Value, StoreError>>> = calls.iter().map(|_| None).collect();
        let mut targets = Vec::with_capacity(calls.len());
        for (number, call) in calls.iter().enumerate() {
            match find(&ranges, call.slot) {
                Some(connection) => targets.push(Target { call: number, connection, asking: false }),
                None => {
                    self.look_again();
                    answers[number] = Some(Err(self.nobody_has(operation, call.slot)));
                }
            }
        }
        for hop in 0..=MAX_REDIRECTIONS {
            if targets.is_empty() {
                break;
            }
            let groups = groups(std::mem::take(&mut targets));
            let sent = join_all(groups.iter().map(|group| send_group(group, calls, exchange))).await;
            let mut wait = false;
            for (group, replies) in groups.into_iter().zip(sent) {
                let replies = match replies {
                    Ok(replies) => replies,
                    Err(error) => {
                        // It may have a successor.
                        self.look_for_successor(&group[0].connection);
                        for target in group {
                            answers[target.call] = Some(Err(error.clone()));
                        }
                        continue;
                    }
                };
                for (target, reply) in group.into_iter().zip(replies) {
                    let error = match reply {
                        Ok(value) => {
                            answers[target.call] = Some(Ok(value));
                            continue;
                        }
                        Err(error) => error,
                    };
                    let next = if hop < MAX_REDIRECTIONS { self.next(&target, &error) } else { None };
                    wait |= is_try_again(&error);
                    match next {
                        Some(next) => targets.push(next),
                        None => answers[target.call] = Some(Err(target.connection.error(operation, &error))),
                    }
                }
            }
            if wait && !targets.is_empty() {
                tokio::time::sleep(TRY_AGAIN_AFTER).await;
            }
        }
        let missing = || self.unavailable(operation, "an answer is missing".to_owned());
        let answers: Vec<_> = answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(missing()))).collect();
        if answers.iter().all(Result::is_err)
            && let Some(Err(error)) = answers.first()
        {
            return Err(error.clone());
        }
        Ok(answers)
    }

    /// Where a call goes that a node has sent away.
    fn next(self: &Arc<Self>, target: &Target, error: &RedisError) -> Option<Target> {
        let is = |kind| error.kind() == ErrorKind::Server(kind);
        if is(ServerErrorKind::TryAgain) {
            return Some(Target { connection: Arc::clone(&target.connection), ..*target });
        }
        if NOT_HERE.iter().any(|kind| is(*kind)) {
            self.look_again();
        }
        let asking = is(ServerErrorKind::Ask);
        // Of no other error.
        let (address, _) = error.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        // Nothing before the colon: the node does not know its own name, so it is where it was.
        let host = if host.is_empty() { target.connection.name().rsplit_once(':')?.0 } else { host };
        let connection = self.connection((host.to_owned(), port.parse().ok()?)).ok()?;
        Some(Target { call: target.call, connection, asking })
    }

    fn connection(&self, address: Address) -> RedisResult<Arc<Connection>> {
        if let Some(connection) = self.inner.lock().connections.get(&address) {
            return Ok(Arc::clone(connection));
        }
        let route = Route::Server(Box::new(self.access.client(&address.0, address.1)?));
        let connection = Connection::new(route, self.connect_timeout, Arc::clone(&self.generations), &self.breakers);
        Ok(Arc::clone(self.inner.lock().connections.entry(address).or_insert(connection)))
    }

    /// Who has which slot; waits while nothing is known yet, unless nothing has been found for long.
    async fn ranges(self: &Arc<Self>, operation: &'static str, deadline: Duration) -> Result<Arc<[Range]>, StoreError> {
        {
            let inner = self.inner.lock();
            if !inner.ranges.is_empty() {
                return Ok(Arc::clone(&inner.ranges));
            }
        }
        self.breaker.admit(operation)?;
        let result = self.find_ranges(operation, deadline).await;
        if let Err(error) = &result {
            self.breaker.failed(|| error.reason().to_owned());
        }
        result
    }

    /// Asks for the slots of a cluster that is left alone, if it is time for that.
    pub(super) async fn probe(self: &Arc<Self>, operation: &'static str, deadline: Duration) {
        if let Some(probe) = self.breaker.begin_probe() {
            probe.ended(&self.find_ranges(operation, deadline).await);
        }
    }

    async fn find_ranges(
        self: &Arc<Self>,
        operation: &'static str,
        deadline: Duration,
    ) -> Result<Arc<[Range]>, StoreError> {
        let mut changed = self.changed.subscribe();
        let known = async {
            loop {
                changed.borrow_and_update();
                {
                    let inner = self.inner.lock();
                    if !inner.ranges.is_empty() {
                        return Ok(Arc::clone(&inner.ranges));
                    }
                }
                if !self.look_again()
                    && !self.looking.load(Ordering::Acquire)
                    && let Some(reason) = self.inner.lock().reason.clone()
                {
                    return Err(self.unavailable(operation, reason));
                }
                if changed.changed().await.is_err() {
                    return Err(self.unavailable(operation, "shutting down".to_owned()));
                }
            }
        };
        match tokio::time::timeout(deadline, known).await {
            Ok(ranges) => ranges,
            Err(_elapsed) => {
                let after_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
                Err(StoreError::Timeout { operation, store: self.name(), after_ms })
            }
        }
    }

    /// A node that is left alone may stay away for long.
    fn look_for_successor(self: &Arc<Self>, of: &Connection) {
        let between = match self.breakers.probe() {
            Some(probe) if is_left_alone(of) => probe.clamp(BETWEEN_LOOKS, BETWEEN_LOOKS_FOR_SUCCESSORS),
            Some(_) | None => BETWEEN_LOOKS,
        };
        self.look_unless_within(between);
    }

    /// To be called now and then while some are left alone: nobody sends them anything who would find out that they have
    /// successors.
    pub(super) fn look_for_successors(self: &Arc<Self>) {
        let ranges = Arc::clone(&self.inner.lock().ranges);
        if let Some(range) = ranges.iter().find(|range| is_left_alone(&range.connection)) {
            self.look_for_successor(&range.connection);
        }
    }

    /// Returns whether that begins now.
    pub(super) fn look_again(self: &Arc<Self>) -> bool {
        self.look_unless_within(BETWEEN_LOOKS)
    }

    /// Looks who has which slot, and waits until that is known, for `deadline` at most.
    pub(super) async fn look_now(self: &Arc<Self>, deadline: Duration) {
        let mut changed = self.changed.subscribe();
        let looked = async {
            loop {
                changed.borrow_and_update();
                // One that is under way may have asked too early.
                let begins = self.look_unless_within(Duration::ZERO);
                if changed.changed().await.is_err() || begins {
                    break;
                }
            }
        };
        // If it takes longer, what was known before is known.
        drop(tokio::time::timeout(deadline, looked).await);
    }

    /// Starts a look at who has which slot, unless there is one or was one just now. Nobody waits for it who knows where
    /// to go.
    fn look_unless_within(self: &Arc<Self>, since_last: Duration) -> bool {
        {
            let inner = self.inner.lock();
            if inner.looked.is_some_and(|looked| looked.elapsed() < since_last) {
                return false;
            }
        }
        if self.looking.swap(true, Ordering::AcqRel) {
            return false;
        }
        let cluster = Arc::clone(self);
        tokio::spawn(async move {
            let looking = Looking(&cluster);
            let seen = cluster.look().await;
            {
                let mut inner = cluster.inner.lock();
                inner.looked = Some(Stopwatch::start());
                match seen {
                    Ok(ranges) => {
                        cluster.breaker.hasten();
                        inner.reason = None;
                        if !are_alike(&ranges, &inner.ranges) {
                            inner.moved = Some(Stopwatch::start());
                        }
                        // Nodes that said that the cluster is down are of another opinion soon.
                        if inner.moved.is_some_and(|moved| moved.elapsed() < SETTLES_WITHIN) {
                            ranges.iter().for_each(|range| range.connection.breaker().hasten());
                        }
                        // A connection that leads to no primary ends with the last call on it.
                        inner.connections.retain(|_, connection| {
                            ranges.iter().any(|range| Arc::ptr_eq(&range.connection, connection))
                        });
                        inner.ranges = ranges.into();
                    }
                    Err(reason) => inner.reason = Some(reason),
                }
            }
            drop(looking);
        });
        true
    }

    /// Asks one node after the other: those that are known, and then those of the configuration.
    async fn look(&self) -> Result<Vec<Range>, String> {
        const OPERATION: &str = "ask who has which slot";
        // Those that are left alone come last: the others know their successors.
        let known: Vec<(Address, bool)> = {
            let inner = self.inner.lock();
            inner.connections.iter().map(|(address, node)| (address.clone(), is_left_alone(node))).collect()
        };
        let (failing, known): (Vec<_>, Vec<_>) = known.iter().partition(|(_, is_left_alone)| *is_left_alone);
        let known = known.into_iter().chain(failing).map(|(address, _)| address);
        let mut reasons = Vec::new();
        for address in known.chain(&self.seeds) {
            let node = self.connection(address.clone()).map_err(|error| error.to_string())?;
            let mut question = Pipeline::with_capacity(1);
            let mut slots = redis::cmd("CLUSTER");
            slots.arg("SLOTS");
            question.ignore_errors().add_command(slots);
            let answer = match node.send_anyway(OPERATION, &question, self.connect_timeout).await {
                Ok(answers) => answers.into_iter().next().unwrap_or(Ok(Value::Nil)),
                Err(error) => {
                    reasons.push(error.to_string());
                    continue;
                }
            };
            match answer.map_err(|error| error.to_string()).and_then(|answer| self.read(&answer, &address.0)) {
                Ok(ranges) if !ranges.is_empty() => return Ok(ranges),
                Ok(_) => reasons.push(format!("{} knows no slots", node.name())),
                Err(reason) => reasons.push(format!("{}: {reason}", node.name())),
            }
        }
        reasons.dedup();
        Err(reasons.join("; "))
    }

    /// An answer to `CLUSTER SLOTS`: first slot, last slot, the primary, its replicas.
    fn read(&self, answer: &Value, asked: &str) -> Result<Vec<Range>, String> {
        let Value::Array(rows) = answer else { return Err(format!("{answer:?} instead of slots")) };
        let mut ranges = Vec::with_capacity(rows.len());
        for row in rows {
            let misfit = || format!("slots that cannot be read: {row:?}");
            let Value::Array(fields) = row else { return Err(misfit()) };
            let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = &fields[..] else {
                return Err(misfit());
            };
            let [host, Value::Int(port), ..] = &primary[..] else { return Err(misfit()) };
            let host: Option<String> = redis::from_redis_value_ref(host).map_err(|_other| misfit())?;
            // A node that does not know its own name is where the question went.
            let host = host.as_deref().filter(|host| !host.is_empty() && *host != "?").unwrap_or(asked);
            let slot = |number: &i64| u16::try_from(*number).ok().filter(|slot| *slot < SLOTS).ok_or_else(misfit);
            let port = u16::try_from(*port).map_err(|_range| misfit())?;
            let connection = self.connection((host.to_owned(), port)).map_err(|error| error.to_string())?;
            ranges.push(Range { first: slot(first)?, last: slot(last)?, connection });
        }
        ranges.sort_unstable_by_key(|range| range.first);
        Ok(ranges)
    }

    fn nobody_has(&self, operation: &'static str, slot: u16) -> StoreError {
        self.unavailable(operation, format!("no node has slot {slot}"))
    }

    fn unavailable(&self, operation: &'static str, reason: String) -> StoreError {
        StoreError::Unavailable { operation, store: self.name(), reason }
    }
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Clients may show credentials.
        f.debug_struct("Cluster").field("seeds", &self.seeds).finish_non_exhaustive()
    }
}

/// A look that is under way, also if its task is dropped.
struct Looking<'a>(&'a Cluster);

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.looking.store(false, Ordering::Release);
        self.0.changed.send_replace(());
    }
}

fn name_of(seeds: &[Address]) -> String {
    let seeds: Vec<_> = seeds.iter().map(|(host, port)| format!("{host}:{port}")).collect();
    format!("the cluster of {}", seeds.join(", "))
}

fn are_alike(ranges: &[Range], others: &[Range]) -> bool {
    let is_alike = |(range, other): (&Range, &Range)| {
        (range.first, range.last) == (other.first, other.last) && Arc::ptr_eq(&range.connection, &other.connection)
    };
    ranges.len() == others.len() && ranges.iter().zip(others).all(is_alike)
}

fn find(ranges: &[Range], slot: u16) -> Option<Arc<Connection>> {
    let range = &ranges[ranges.partition_point(|range| range.last < slot)..].first()?;
    (range.first <= slot).then(|| Arc::clone(&range.connection))
}

/// One for each node and way to ask it.
fn groups(targets: Vec<Target>) -> Vec<Vec<Target>> {
    let mut groups: Vec<Vec<Target>> = Vec::new();
    for target in targets {
        let same = |group: &&mut Vec<Target>| {
            group[0].asking == target.asking && Arc::ptr_eq(&group[0].connection, &target.connection)
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.push(target),
            None => groups.push(vec![target]),
        }
    }
    groups
}

async fn send_group(
    group: &[Target],
    calls: &[Call],
    exchange: &impl Exchange,
) -> Result<Vec<RedisResult<Value>>, StoreError> {
    let asking = group[0].asking;
    let mut pipeline = Pipeline::with_capacity(group.len() * 2);
    pipeline.ignore_errors();
    for target in group {
        if asking {
            pipeline.cmd("ASKING");
        }
        pipeline.add_command(calls[target.call].command.clone());
    }
    let replies = exchange.exchange(&group[0].connection, &pipeline).await?;
    let of_calls = usize::from(asking);
    Ok(replies.into_iter().skip(of_calls).step_by(of_calls + 1).collect())
}

fn is_left_alone(node: &Connection) -> bool {
    node.breaker().state() != BreakerState::Closed
}

fn is_try_again(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(ServerErrorKind::TryAgain))
}

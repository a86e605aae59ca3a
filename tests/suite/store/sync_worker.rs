//! Nodes that share counters through one real Redis.

use std::{sync::Arc, time::Duration};

use limiter_common::sliding_window::Outcome;
use limiter_tests::{
    eventually::eventually,
    redis_server::RedisServer,
    window::{DAY, await_room},
};
use limiter_user::{
    clock::{Clock, SharedClock, Stopwatch},
    config::Secret,
    store::{
        Algorithm, Cell, Charge,
        memory::MemoryStore,
        redis::{ACL_RULES, RedisConfig, RedisStore},
        sync::{SyncConfig, SyncState, SyncStatus, SyncWorker},
    },
};
use nix::sys::resource::{UsageWho, getrusage};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::behaviour::{MINUTE, cell, every, is_denied, user};

const WAIT: Duration = Duration::from_secs(30);
const HOUR: u64 = 60 * MINUTE;

/// What one agent has of the store layer.
pub(crate) struct Node {
    pub(crate) clock: Arc<SharedClock>,
    pub(crate) memory: Arc<MemoryStore>,
    pub(crate) status: SyncStatus,
    redis: RedisStore,
    shutdown: CancellationToken,
    worker: JoinHandle<()>,
}

impl Node {
    fn start(server: &RedisServer) -> Self {
        Self::start_ahead(server, 0)
    }

    /// With a wall clock that is wrong.
    fn start_ahead(server: &RedisServer, ahead_us: i64) -> Self {
        Self::start_with(&RedisConfig::new(server.url()), ahead_us)
    }

    pub(crate) fn start_with(redis: &RedisConfig, ahead_us: i64) -> Self {
        let clock = Arc::new(SharedClock::new());
        clock.set_offset_us(ahead_us);
        let memory = Arc::new(MemoryStore::shared(clock.clone(), 100_000));
        let redis = RedisStore::connect(redis).unwrap();
        let mut config = SyncConfig::default();
        // The machine may be busy; a round that fails for that is not what is tested.
        config.batch_deadline = Duration::from_millis(500);
        let worker = SyncWorker::new(memory.clone(), redis.clone(), clock.clone(), config);
        let status = worker.status();
        let shutdown = CancellationToken::new();
        let worker = tokio::spawn(worker.run(shutdown.clone()));
        Self { clock, memory, status, redis, shutdown, worker }
    }

    /// Decides one request; panics when that waits for anything long enough to be Redis. A thread that is only preempted, on a
    /// machine that is busy, has not waited.
    pub(crate) fn decide(&self, cells: &[Cell]) -> (Outcome, u64) {
        let waits = || getrusage(UsageWho::RUSAGE_THREAD).unwrap().voluntary_context_switches();
        let (watch, before) = (Stopwatch::start(), waits());
        let answer = self.memory.decide(self.clock.now(), Charge::Commit, cells)[0];
        let is_quick = watch.elapsed() < Duration::from_millis(50);
        assert!(is_quick || waits() == before, "{:?}", watch.elapsed());
        (answer.outcome, answer.remaining)
    }

    pub(crate) fn remaining(&self, cells: &[Cell]) -> u64 {
        self.memory.decide(self.clock.now(), Charge::Peek, cells)[0].remaining
    }

    pub(crate) async fn until_connected(&self) {
        self.until(SyncState::Connected).await;
    }

    async fn until(&self, state: SyncState) {
        eventually(WAIT, async || {
            let stats = self.status.get();
            if stats.state == state { Ok(()) } else { Err(stats) }
        })
        .await;
    }

    /// A node hears of a counter when it sends its own part of it, so each look asks for that.
    pub(crate) async fn until_remaining(&self, cells: &[Cell], remaining: u64) {
        eventually(WAIT, async || {
            self.memory.requeue(&cells[0].key);
            match self.remaining(cells) {
                now if now == remaining => Ok(()),
                now => Err((now, self.status.get())),
            }
        })
        .await;
    }

    pub(crate) async fn until_sent(&self) {
        // What is under way is in no queue.
        eventually(WAIT, async || {
            let stats = self.status.get();
            if self.memory.stats().queued == 0 && stats.lag.is_zero() { Ok(()) } else { Err(stats) }
        })
        .await;
    }

    pub(crate) fn refund(&self, cells: &[Cell], cost: u64) {
        let cells = [Cell { cost, ..cells[0].clone() }];
        assert_eq!(self.memory.decide(self.clock.now(), Charge::Refund, &cells)[0].outcome, Outcome::Allowed);
    }

    /// The outcome does not matter.
    pub(crate) fn hit(&self, cells: &[Cell]) {
        let (_, _) = self.decide(cells);
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.worker.await.unwrap();
    }
}

/// A day's window: what a test does is all in one.
pub(crate) fn daily(name: &str, ceiling: u64) -> [Cell; 1] {
    await_room(DAY);
    [Cell { algorithm: Algorithm::sliding_window(24 * HOUR, ceiling), ..cell(user(name, "daily"), 0) }]
}

#[tokio::test]
async fn a_node_that_sees_a_spent_key_for_the_first_time_denies_within_two_intervals() {
    let server = RedisServer::start().await;
    let (a, b) = (Node::start(&server), Node::start(&server));
    a.until_connected().await;
    b.until_connected().await;
    let cells = daily("u", 50);
    while a.decide(&cells).0 == Outcome::Allowed {}
    a.until_sent().await;
    assert_eq!(b.decide(&cells).0, Outcome::Allowed, "it cannot know yet");
    let before = b.status.get().batches;
    eventually(WAIT, async || if is_denied(b.decide(&cells).0) { Ok(()) } else { Err("allowed") }).await;
    // Of each interval one.
    let batches = b.status.get().batches - before;
    assert!(batches <= 2, "{batches}");
}

#[tokio::test]
async fn counts_recover_after_redis_was_killed_and_came_back_empty() {
    let mut server = RedisServer::start().await;
    let (a, b) = (Node::start(&server), Node::start(&server));
    a.until_connected().await;
    b.until_connected().await;
    let (cells, idle) = (daily("u", 1000), daily("idle", 1000));
    for _ in 0..100 {
        a.hit(&cells);
        b.hit(&cells);
        a.hit(&idle);
    }
    a.until_remaining(&cells, 800).await;
    b.until_remaining(&cells, 800).await;
    a.until_sent().await;

    server.kill();
    // Decisions go on, and no node grants what it knows the others have had.
    for _ in 0..50 {
        assert_eq!(a.decide(&cells).0, Outcome::Allowed);
        assert_eq!(b.decide(&cells).0, Outcome::Allowed);
        tokio::task::yield_now().await;
    }
    assert_eq!((a.remaining(&cells), b.remaining(&cells)), (750, 750));
    a.until(SyncState::Degraded).await;
    b.until(SyncState::Degraded).await;
    assert!(a.status.get().lag > Duration::ZERO);

    server.restart().await;
    a.until_remaining(&cells, 700).await;
    b.until_remaining(&cells, 700).await;
    a.until_connected().await;
    assert_eq!(a.status.get().refills, 1, "{:?}", a.status.get());
    // A third node learns of what was counted before the restart, of the counter that nobody has used since as well.
    let c = Node::start(&server);
    c.hit(&cells);
    c.hit(&idle);
    c.until_remaining(&cells, 699).await;
    c.until_remaining(&idle, 899).await;
}

#[tokio::test]
async fn a_flushed_database_is_noticed_and_filled_again() {
    let server = RedisServer::start().await;
    let node = Node::start(&server);
    let (busy, idle) = (daily("busy", 1000), daily("idle", 1000));
    node.hit(&busy);
    node.hit(&idle);
    let size = async || server.counters().await.len();
    eventually(WAIT, async || if size().await == 2 { Ok(()) } else { Err("not sent") }).await;
    node.until_sent().await;
    node.hit(&busy);
    node.until_sent().await;
    let () = server.run(&["FLUSHALL"]).await;
    node.hit(&busy);
    eventually(WAIT, async || if size().await == 2 { Ok(()) } else { Err(node.status.get()) }).await;
    let stats = node.status.get();
    assert!(stats.lost_counters >= 1 && stats.refills == 1, "{stats:?}");
}

#[tokio::test]
async fn an_evicted_counter_is_told_again_and_the_others_are_not() {
    let server = RedisServer::start().await;
    let node = Node::start(&server);
    node.until_connected().await;
    let (evicted, other) = (daily("evicted", 1000), daily("other", 1000));
    for _ in 0..5 {
        node.hit(&evicted);
    }
    node.hit(&other);
    node.until_sent().await;
    let sent = node.status.get().counters_sent;
    let () = server.run(&["DEL", "rl:{user:evicted}:daily"]).await;
    node.hit(&evicted);
    eventually(WAIT, async || {
        let stats = node.status.get();
        if stats.lost_counters == 1 { Ok(()) } else { Err(stats) }
    })
    .await;
    let (another, watch) = (Node::start(&server), Stopwatch::start());
    another.hit(&evicted);
    another.until_remaining(&evicted, 993).await;
    // Longer than it takes to look at the server's mark.
    while watch.elapsed() < Duration::from_millis(300) {
        tokio::task::yield_now().await;
    }
    let stats = node.status.get();
    assert_eq!((stats.refills, stats.lost_counters), (0, 1), "{stats:?}");
    assert!(stats.counters_sent <= sent + 2, "{stats:?} after {sent}");
}

#[tokio::test]
async fn a_reconnection_is_looked_at_once() {
    let server = RedisServer::start().await;
    let node = Node::start(&server);
    node.until_connected().await;
    node.hit(&daily("u", 1000));
    node.until_sent().await;
    let infos = async || {
        let stats: String = server.run(&["INFO", "commandstats"]).await;
        let line = stats.lines().find(|line| line.starts_with("cmdstat_info:")).map(str::to_owned);
        line.and_then(|line| line.split(['=', ',']).nth(1)?.parse::<u64>().ok()).unwrap_or(0)
    };
    for refills in 1..=2 {
        let before = infos().await;
        // It loses what it had, and its clients.
        let () = server.run(&["FLUSHALL"]).await;
        let _: u64 = server.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
        eventually(WAIT, async || {
            let stats = node.status.get();
            if stats.refills == refills && stats.state == SyncState::Connected { Ok(()) } else { Err(stats) }
        })
        .await;
        node.until_sent().await;
        let (batches, watch) = (node.status.get(), Stopwatch::start());
        while watch.elapsed() < Duration::from_millis(300) {
            tokio::task::yield_now().await;
        }
        // Two sections in one question, and two questions of this test.
        assert_eq!(infos().await - before, 2 + 1, "{batches:?}");
        assert_eq!(node.status.get().refills, refills);
    }
}

/// Which run of it this is, nobody may ask: any connection may lead to another one, and is one.
#[tokio::test]
async fn a_server_that_does_not_tell_who_it_is_is_told_everything_once_for_each_connection() {
    let server = RedisServer::start().await;
    let rights = ACL_RULES.replace(" +info", "");
    let rights: Vec<&str> = rights.split(' ').collect();
    let () = server.run(&[&["ACL", "SETUSER", "node", "on", ">secret"], &rights[..]].concat()).await;
    let mut config = RedisConfig::new(server.url());
    (config.username, config.password) = (Some("node".to_owned()), Some(Secret::new("secret".to_owned())));
    let node = Node::start_with(&config, 0);
    node.until_connected().await;
    node.hit(&daily("u", 1000));
    node.until_sent().await;
    for refills in 1..=2 {
        let killed: u64 = server.run(&["CLIENT", "KILL", "USER", "node"]).await;
        assert_eq!(killed, 1);
        eventually(WAIT, async || {
            let stats = node.status.get();
            if stats.refills == refills { Ok(()) } else { Err(stats) }
        })
        .await;
        let batches = node.status.get().batches;
        node.hit(&daily("u", 1000));
        eventually(WAIT, async || if node.status.get().batches > batches { Ok(()) } else { Err(batches) }).await;
        node.until_sent().await;
        assert_eq!(node.status.get().refills, refills);
    }
}

#[tokio::test]
async fn a_redis_that_takes_no_counts_is_never_called_connected() {
    let server = RedisServer::start().await;
    let node = Node::start(&server);
    node.until_connected().await;
    let () = server.run(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let cells = daily("u", 1000);
    node.hit(&cells);
    node.until(SyncState::Degraded).await;
    let failed = node.status.get().failed_rounds;
    // Looks as often as it can, through several rounds.
    let watch = Stopwatch::start();
    while node.status.get().failed_rounds < failed + 5 {
        assert_eq!(node.status.get().state, SyncState::Degraded);
        assert!(watch.elapsed() < WAIT);
        tokio::task::yield_now().await;
    }
    let () = server.run(&["CONFIG", "SET", "maxmemory", "0"]).await;
    node.until_connected().await;
    node.until_sent().await;
}

#[tokio::test]
async fn decisions_never_wait_for_a_redis_that_stands_still() {
    let server = RedisServer::start().await;
    let node = Node::start(&server);
    node.until_connected().await;
    server.freeze();
    let cells = daily("u", 1_000_000);
    eventually(WAIT, async || {
        node.hit(&cells);
        if node.status.get().state == SyncState::Degraded { Ok(()) } else { Err(node.status.get()) }
    })
    .await;
    let here = node.remaining(&cells);
    server.thaw();
    node.until_connected().await;
    node.until_sent().await;
    // Batches whose answers were lost may have been applied meanwhile, and count once all the same.
    let other = Node::start(&server);
    other.hit(&cells);
    other.until_remaining(&cells, here - 1).await;
}

#[tokio::test]
async fn a_node_without_redis_starts_and_shares_when_it_comes() {
    let mut server = RedisServer::start().await;
    server.kill();
    let node = Node::start(&server);
    let cells = daily("u", 10);
    assert_eq!(node.decide(&cells), (Outcome::Allowed, 9));
    node.until(SyncState::Degraded).await;
    server.restart().await;
    node.until_connected().await;
    let other = Node::start(&server);
    other.hit(&cells);
    other.until_remaining(&cells, 8).await;
}

#[tokio::test]
async fn windows_follow_redis_clock_not_the_hosts() {
    let server = RedisServer::start().await;
    let cells = daily("u", 100);
    let nodes = [Node::start_ahead(&server, 5_000_000), Node::start_ahead(&server, -26 * 3_600_000_000)];
    for node in &nodes {
        node.until_connected().await;
        // However long the answer takes, it says a time between these two.
        eventually(WAIT, async || {
            let earliest = node.clock.now().get();
            let now: (u64, u64) = server.run(&["TIME"]).await;
            let (now, latest) = (now.0 * 1_000_000 + now.1, node.clock.now().get());
            let is_right = earliest < now + 100_000 && now < latest + 100_000;
            if is_right { Ok(()) } else { Err((earliest, now, latest)) }
        })
        .await;
        node.hit(&cells);
    }
    for node in &nodes {
        node.until_remaining(&cells, 98).await;
        // Whoever is alive is so by Redis' clock as well.
        let heard = async || if node.redis.live_nodes() == 2 { Ok(()) } else { Err(node.redis.live_nodes()) };
        eventually(WAIT, heard).await;
    }
}

#[tokio::test]
async fn counts_from_before_the_clock_was_right_are_kept() {
    let mut server = RedisServer::start().await;
    server.kill();
    let node = Node::start_ahead(&server, 50 * 3_600_000_000);
    let cells = daily("u", 10);
    for _ in 0..10 {
        node.hit(&cells);
    }
    server.restart().await;
    node.until_connected().await;
    assert!(is_denied(node.decide(&cells).0));
    node.until_sent().await;
    let other = Node::start(&server);
    other.until_connected().await;
    other.hit(&cells);
    other.until_remaining(&cells, 0).await;
}

#[tokio::test]
async fn a_stopped_node_hands_over_what_it_had() {
    let server = RedisServer::start().await;
    let node = Node::start(&server);
    node.until_connected().await;
    let cells: Vec<Cell> = (0..1500).map(|client| daily(&client.to_string(), 10)[0].clone()).collect();
    for cell in &cells {
        node.hit(std::slice::from_ref(cell));
    }
    node.stop().await;
    assert_eq!(server.counters().await.len(), cells.len());
}

#[tokio::test]
async fn an_idle_node_asks_redis_once_a_second_at_most() {
    let server = RedisServer::start().await;
    let node = Node::start(&server);
    node.until_connected().await;
    let calls = async || server.commands("time").await.calls;
    let (watch, before) = (Stopwatch::start(), calls().await);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (after, seconds) = (calls().await, watch.elapsed().as_secs());
    assert!(after - before <= seconds + 1, "{before} {after}");
}

#[tokio::test]
async fn every_algorithm_is_shared() {
    let server = RedisServer::start().await;
    let (a, b) = (Node::start(&server), Node::start(&server));
    a.until_connected().await;
    b.until_connected().await;
    await_room(DAY);
    for (name, algorithm) in every(1000, 24 * HOUR) {
        let cells = [Cell { algorithm, ..cell(user("u", name), 0) }];
        for _ in 0..300 {
            a.hit(&cells);
        }
        for _ in 0..200 {
            b.hit(&cells);
        }
        // A unit of a bucket comes back in 86 s.
        a.until_remaining(&cells, 500).await;
        b.until_remaining(&cells, 500).await;
        // A node that comes later learns of it with its first request.
        let c = Node::start(&server);
        c.until_connected().await;
        c.hit(&cells);
        c.until_remaining(&cells, 499).await;
        // What was given back here is given back for nodes that ask from now on.
        a.refund(&cells, 100);
        a.until_sent().await;
        let d = Node::start(&server);
        d.until_connected().await;
        d.hit(&cells);
        d.until_remaining(&cells, 598).await;
    }
}

#[tokio::test]
async fn buckets_recover_after_redis_was_killed_and_came_back_empty() {
    let mut server = RedisServer::start().await;
    let (a, b) = (Node::start(&server), Node::start(&server));
    a.until_connected().await;
    b.until_connected().await;
    let (_, algorithm) = every(1000, 24 * HOUR)[2];
    let cells = [Cell { algorithm, ..cell(user("u", "bucket"), 0) }];
    for _ in 0..100 {
        a.hit(&cells);
        b.hit(&cells);
    }
    a.until_remaining(&cells, 800).await;
    b.until_remaining(&cells, 800).await;
    server.kill();
    for _ in 0..50 {
        a.hit(&cells);
        b.hit(&cells);
    }
    assert_eq!((a.remaining(&cells), b.remaining(&cells)), (750, 750));
    a.until(SyncState::Degraded).await;
    b.until(SyncState::Degraded).await;
    server.restart().await;
    a.until_remaining(&cells, 700).await;
    b.until_remaining(&cells, 700).await;
}

/// How far nodes get above a limit is a matter of time.
mod alone {
    use super::*;

    #[tokio::test]
    async fn a_key_used_on_both_nodes_is_limited_as_one() {
        let server = RedisServer::start().await;
        let nodes = [Node::start(&server), Node::start(&server)];
        for node in &nodes {
            node.until_connected().await;
        }
        let cells = daily("u", 100);
        let mut allowed = 0;
        eventually(WAIT, async || {
            let answers = [nodes[0].decide(&cells).0, nodes[1].decide(&cells).0];
            allowed += answers.iter().filter(|&&answer| answer == Outcome::Allowed).count();
            if answers.into_iter().all(is_denied) { Ok(()) } else { Err(answers) }
        })
        .await;
        // One request every 2 ms on each node. The bound of `async`: what each may have admitted since it last heard, which
        // is one interval and a round trip. Twice the limit would be no sharing at all.
        assert!((100..=160).contains(&allowed), "{allowed}");
    }
}

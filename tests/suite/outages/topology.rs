//! What requests are answered, how soon, and what is counted, while slots move and replicas take over under load.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use limiter_tests::{
    chaos,
    eventually::eventually,
    fleet_node::{FleetNode, user},
    policy::rule_of_path,
    random::Random,
    redis_cluster::RedisCluster,
    redis_sentinel::{RedisSentinels, SERVICE},
};
use limiter_user::{
    clock::Stopwatch,
    config::BreakerConfig,
    limiter::Kind,
    policy::FailurePolicy,
    store::{
        Algorithm, At, Cell, Charge, CounterKey, Identity, Store as _,
        redis::{RedisConfig, RedisStore, Topology, redis_key},
    },
};
use tokio::task::JoinHandle;

use crate::{DAY_US, PROBE, WAIT};

const PRECISIONS: [&str; 3] = ["async", "leased", "strict"];
/// So much that none is denied.
const PLENTY: u64 = 1_000_000;
const FEW: u64 = 5;
const USERS: usize = 24;
/// How long a request waits for Redis.
const DEADLINE: Duration = Duration::from_millis(20);
/// An answer that took so much longer has waited for something: two cores, and other tests beside this one.
const SLACK: Duration = Duration::from_millis(250);

/// A rule of each precision and policy: one that allows whatever comes, and one that is used up soon.
fn policy() -> String {
    let mut text = String::new();
    for (precision, on_failure) in kinds() {
        let on_failure = on_failure.as_str();
        for (name, limit) in [("plenty", PLENTY), ("few", FEW)] {
            let id = format!("{name}-{precision}-{on_failure}");
            let more = format!(
                "scope = \"user\"\nprecision = \"{precision}\"\non_store_failure = \"{on_failure}\"\nlimit = {limit}\nwindow = \"30d\""
            );
            text.push_str(&rule_of_path(&id, &more));
        }
    }
    text
}

fn kinds() -> impl Iterator<Item = (&'static str, FailurePolicy)> {
    PRECISIONS.into_iter().flat_map(|precision| FailurePolicy::ALL.iter().map(move |policy| (precision, *policy)))
}

/// Name of a user of a load.
fn client(load: &str, number: usize) -> String {
    format!("{load} {number}")
}

fn cell(client: &str, rule: &str, limit: u64) -> Cell {
    let identity = Identity::User(client.into());
    let algorithm = Algorithm::sliding_window(30 * DAY_US, limit);
    Cell { key: CounterKey { identity, rule: rule.into() }, algorithm, cost: 1, enforced: true }
}

/// What became of the requests of one kind.
#[derive(Debug)]
struct Answers {
    /// By user.
    allowed: [u64; USERS],
    /// In which order, by user: what comes first of all, and by which node.
    turns: Vec<Vec<(u64, usize)>>,
    /// Denied or unavailable, though the limit had room.
    refused: u64,
    /// Allowed, though the limit was used up.
    too_much: u64,
    took: Vec<Duration>,
}

impl Default for Answers {
    fn default() -> Self {
        let turns = vec![Vec::new(); USERS];
        Self { allowed: [0; USERS], turns, refused: 0, too_much: 0, took: Vec::new() }
    }
}

impl Answers {
    /// The most that one node admitted of this user without the other in between, who so had not heard of it.
    fn longest_turn(&mut self, number: usize) -> u64 {
        let turns = &mut self.turns[number];
        turns.sort_unstable();
        let runs = turns.chunk_by(|one, next| one.1 == next.1);
        runs.map(|run| run.len() as u64).max().unwrap_or(0)
    }
}

type ByKind = BTreeMap<(&'static str, FailurePolicyName), Answers>;
type FailurePolicyName = &'static str;

/// Nodes under load, until somebody wants to know what they have answered.
struct Load {
    nodes: Vec<Arc<FleetNode>>,
    /// So that each load has counters of its own.
    name: &'static str,
    is_over: Arc<AtomicBool>,
    /// How often all kinds of rules were asked.
    rounds: Arc<AtomicU64>,
    clients: Vec<JoinHandle<ByKind>>,
}

impl Load {
    /// Of two nodes.
    async fn start(name: &'static str, config: &RedisConfig) -> Self {
        let mut config = config.clone();
        config.timeout = DEADLINE;
        config.breaker = Some(BreakerConfig::new(3, Duration::from_secs(10), PROBE));
        let mut nodes = Vec::new();
        for _ in 0..2 {
            nodes.push(Arc::new(FleetNode::start(&policy(), &config, Duration::from_millis(50)).await));
        }
        // What is used up is known to both.
        for (precision, on_failure) in kinds() {
            let path = format!("/few-{precision}-{}", on_failure.as_str());
            for number in 0..USERS {
                for node in &nodes {
                    eventually(WAIT, async || {
                        let decision = node.decide(&user(&client(name, number)), &path, 1, Charge::Commit).await;
                        // For want of a lease, a request is refused for a moment.
                        let wait_us = decision.answer.and_then(|answer| answer.retry_after_us).unwrap_or(0);
                        let is_used_up = decision.kind == Kind::Denied && wait_us > 1_000_000;
                        if is_used_up { Ok(()) } else { Err((path.clone(), decision.kind)) }
                    })
                    .await;
                }
            }
        }
        let (is_over, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let turn = Arc::new(AtomicU64::new(0));
        let client = |(number, node): (usize, &Arc<FleetNode>)| {
            let progress =
                Progress { is_over: Arc::clone(&is_over), rounds: Arc::clone(&rounds), turn: Arc::clone(&turn) };
            tokio::spawn(ask(Arc::clone(node), number, name, progress))
        };
        let clients = nodes.iter().enumerate().map(client).collect();
        let load = Self { nodes, name, is_over, rounds, clients };
        load.goes_on().await;
        load
    }

    /// Waits until the nodes have answered some more: what was done was done under load.
    async fn goes_on(&self) {
        let enough = self.rounds.load(Ordering::Relaxed) + 60;
        eventually(WAIT, async || match self.rounds.load(Ordering::Relaxed) {
            rounds if rounds >= enough => Ok(()),
            rounds => Err((rounds, enough)),
        })
        .await;
    }

    /// Waits until every server is asked again.
    async fn until_whole(&self) {
        eventually(WAIT, async || {
            if self.nodes.iter().all(|node| node.is_whole()) { Ok(()) } else { Err("some are left alone") }
        })
        .await;
    }

    /// Waits until some are not.
    async fn until_left_alone(&self) {
        eventually(
            WAIT,
            async || {
                if self.nodes.iter().any(|node| node.is_whole()) { Err("all are asked") } else { Ok(()) }
            },
        )
        .await;
    }

    async fn end(self) -> (Vec<Arc<FleetNode>>, ByKind) {
        self.is_over.store(true, Ordering::Relaxed);
        let mut all = ByKind::new();
        for client in self.clients {
            for (kind, answers) in client.await.expect("a client") {
                let sums = all.entry(kind).or_default();
                sums.allowed.iter_mut().zip(answers.allowed).for_each(|(sum, more)| *sum += more);
                sums.turns.iter_mut().zip(answers.turns).for_each(|(sum, more)| sum.extend(more));
                sums.refused += answers.refused;
                sums.too_much += answers.too_much;
                sums.took.extend(answers.took);
            }
        }
        (self.nodes, all)
    }
}

/// What the clients of a load have in common.
struct Progress {
    is_over: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    /// Counts what is admitted, by all.
    turn: Arc<AtomicU64>,
}

async fn ask(node: Arc<FleetNode>, node_number: usize, name: &'static str, progress: Progress) -> ByKind {
    let Progress { is_over, rounds, turn } = progress;
    let mut random = Random::new(node_number as u64 + 1);
    let mut all = ByKind::new();
    let kinds: Vec<_> = kinds().collect();
    while !is_over.load(Ordering::Relaxed) {
        for (precision, on_failure) in &kinds {
            let on_failure = on_failure.as_str();
            let number = random.below(USERS);
            let limit = if random.below(8u32) == 0 { "few" } else { "plenty" };
            let path = format!("/{limit}-{precision}-{on_failure}");
            let watch = Stopwatch::start();
            let kind = node.decide(&user(&client(name, number)), &path, 1, Charge::Commit).await.kind;
            let took = watch.elapsed();
            let answers = all.entry((*precision, on_failure)).or_default();
            answers.took.push(took);
            match (limit, kind) {
                ("plenty", Kind::Allowed) => {
                    answers.allowed[number] += 1;
                    answers.turns[number].push((turn.fetch_add(1, Ordering::Relaxed), node_number));
                }
                ("plenty", _) => answers.refused += 1,
                (_, Kind::Allowed) => answers.too_much += 1,
                _ => {}
            }
        }
        rounds.fetch_add(1, Ordering::Relaxed);
        // A client that never waits leaves nothing of two cores to anybody else.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    all
}

/// What may be missing in Redis, or be there twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loses {
    Nothing,
    /// What a primary confirmed last and did not tell its replica: of what `strict` rules counted.
    WhatOneServerKnew,
    /// All that `strict` rules counted.
    WhatRedisAloneKnew,
}

/// Holds what nodes answered against what each kind of rule promises, and what is in Redis against what was admitted.
async fn judge(load: Load, config: &RedisConfig, loses: Loses) {
    let what = load.name;
    let watch = Stopwatch::start();
    load.until_whole().await;
    assert!(watch.elapsed() < PROBE + Duration::from_secs(2), "{what}: the next probe is the end of it");
    load.goes_on().await;
    let (nodes, answers) = load.end().await;
    // Whoever comes now meets with no failure.
    let newcomer = user(&client(what, USERS));
    for (node, (precision, on_failure)) in nodes.iter().flat_map(|node| kinds().map(move |kind| (node, kind))) {
        let path = format!("/plenty-{precision}-{}", on_failure.as_str());
        eventually(WAIT, async || {
            let decision = node.decide(&newcomer, &path, 1, Charge::Commit).await;
            if decision.kind == Kind::Allowed { Ok(()) } else { Err(format!("{what}: {decision:?}")) }
        })
        .await;
    }
    for node in &nodes {
        node.until_sent().await;
    }
    let mut patient = config.clone();
    patient.timeout = Duration::from_secs(5);
    let store = RedisStore::connect(&patient).expect("an address");
    for ((precision, on_failure), mut answers) in answers {
        let kind = format!("{what}: {precision}, {on_failure}");
        let rule = format!("plenty-{precision}-{on_failure}");
        let unanswered: u64 = nodes.iter().map(|node| node.unanswered(&rule)).sum();
        let asked = answers.took.len();
        let quick = percentile(&mut answers.took, 99);
        let slowest = percentile(&mut answers.took, 100);
        chaos::tell(&format!(
            "{kind}: {asked} requests, {unanswered} without Redis, {} refused; p99 {quick:?}, all {slowest:?}",
            answers.refused,
        ));
        assert!(asked > 100, "{kind}: {asked}");
        assert!(quick <= DEADLINE + SLACK, "{kind}: {quick:?}");
        match (precision, on_failure) {
            // What a limit allows is refused only where the rule says so: by `closed`, and for want of a lease.
            ("async" | "strict", "open" | "local") | ("leased", "open") => {
                assert_eq!(answers.refused, 0, "{kind}");
            }
            ("leased", "local") => {}
            _ => assert!(answers.refused <= unanswered, "{kind}: {} of {unanswered}", answers.refused),
        }
        // What is used up stays so: but for `open`, whatever happens.
        if on_failure != "open" {
            // Until all have told an empty Redis what they had of it, one may be lent what another has used.
            let is_known = precision != "leased" || loses != Loses::WhatRedisAloneKnew;
            let most = if is_known { 0 } else { FEW * USERS as u64 };
            assert!(answers.too_much <= most, "{kind}: {} too much", answers.too_much);
        }
        let mut twice = 0;
        for (number, allowed) in answers.allowed.into_iter().enumerate() {
            let cell = [cell(&client(what, number), &rule, PLENTY)];
            let least = match (precision, loses) {
                ("strict", Loses::WhatOneServerKnew) => 0,
                // The first to ask has not heard of what the other admitted since; nor of what was under way.
                ("strict", Loses::WhatRedisAloneKnew) => {
                    allowed.saturating_sub(answers.longest_turn(number) + nodes.len() as u64)
                }
                _ => allowed,
            };
            // A call that was carried out and whose answer was lost is counted once more by the node, or was refused.
            let most = if precision == "strict" { allowed + unanswered } else { allowed };
            let counted = eventually(WAIT, async || {
                for node in &nodes {
                    node.memory.requeue(&cell[0].key);
                }
                let seen = store.check(At::StoreClock, Charge::Peek, &cell).await.map_err(|error| error.to_string())?;
                let counted = PLENTY - seen[0].remaining;
                if (least..=most).contains(&counted) {
                    Ok(counted)
                } else {
                    Err(format!("{kind}: of {number} {counted}, and not {least} to {most}"))
                }
            })
            .await;
            twice += counted.saturating_sub(allowed);
        }
        assert!(twice <= unanswered, "{kind}: {twice} units twice");
    }
}

fn percentile(took: &mut [Duration], percent: usize) -> Duration {
    took.sort_unstable();
    took[(took.len() * percent / 100).min(took.len() - 1)]
}

/// Names of all counters of a user, which are in one slot.
fn slot_of(load: &Load, number: usize) -> String {
    redis_key(&cell(&client(load.name, number), "plenty-strict-open", PLENTY).key)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_that_move_under_load_cost_nothing_and_nobody_time() {
    let servers = RedisCluster::start_with_replicas(3).await;
    let config = RedisConfig::of(servers.urls(), Topology::Cluster);

    // All keys of a slot are elsewhere at once.
    let load = Load::start("MOVED", &config).await;
    for number in 0..4 {
        let key = slot_of(&load, number);
        let to = (servers.owner(&key).await + 1) % 3;
        servers.migrate(&key, to, async || {}).await;
        load.goes_on().await;
    }
    judge(load, &config, Loses::Nothing).await;

    // Some are, and what is new is where the slot goes.
    let load = Load::start("ASK", &config).await;
    for number in 0..4 {
        let key = slot_of(&load, number);
        let to = (servers.owner(&key).await + 2) % 3;
        servers.migrate(&key, to, async || load.goes_on().await).await;
    }
    judge(load, &config, Loses::Nothing).await;

    // Every slot that has counters, one after the other.
    let load = Load::start("slots migrate", &config).await;
    for number in 0..USERS {
        let key = slot_of(&load, number);
        let to = (servers.owner(&key).await + 1) % 3;
        servers.migrate(&key, to, async || {}).await;
    }
    judge(load, &config, Loses::Nothing).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_of_a_cluster_that_takes_over_under_load_costs_what_is_said() {
    let mut servers = RedisCluster::start_with_replicas(3).await;
    let config = RedisConfig::of(servers.urls(), Topology::Cluster);

    let load = Load::start("replica promoted", &config).await;
    servers.promote(0).await;
    judge(load, &config, Loses::Nothing).await;

    let load = Load::start("primary killed", &config).await;
    servers.fail_over(1).await;
    judge(load, &config, Loses::WhatOneServerKnew).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_is_down_and_comes_back_under_load_costs_what_is_said() {
    let mut servers = RedisCluster::start(3).await;
    let config = RedisConfig::of(servers.urls(), Topology::Cluster);
    let load = Load::start("CLUSTERDOWN", &config).await;
    // One that stands still is enough for the others to say so, if they want every slot.
    for primary in &servers.primaries {
        let () = primary.run(&["CONFIG", "SET", "cluster-require-full-coverage", "yes"]).await;
    }
    servers.primaries[0].freeze();
    load.until_left_alone().await;
    load.goes_on().await;
    servers.primaries[0].thaw();
    servers.until_well().await;
    judge(load, &config, Loses::Nothing).await;

    let load = Load::start("everything restarted empty", &config).await;
    servers.restart().await;
    judge(load, &config, Loses::WhatRedisAloneKnew).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_by_sentinel_under_load_costs_what_is_said() {
    for (name, is_killed) in [("handover by sentinel", false), ("failover by sentinel", true)] {
        let mut servers = RedisSentinels::start().await;
        let config = RedisConfig::of(servers.urls(), Topology::Sentinel { service: SERVICE.to_owned() });
        let load = Load::start(name, &config).await;
        if is_killed {
            servers.fail_over().await;
        } else {
            servers.hand_over().await;
        }
        judge(load, &config, Loses::WhatOneServerKnew).await;
    }
}

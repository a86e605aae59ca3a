//! `strict`: each request is decided in Redis, over as many nodes as there are.

use std::{sync::Arc, time::Duration};

use limiter_common::{
    sliding_window::{Outcome, Window},
    time::UnixMicros,
};
use limiter_tests::{
    delay_proxy::DelayProxy,
    eventually::eventually,
    fleet_node::{FleetNode, user},
    redis_cluster::RedisCluster,
    redis_server::RedisServer,
    window::{HOUR, await_room},
};
use limiter_user::{
    limiter::{Kind, Subject},
    store::{
        Algorithm, At, Cell, Charge, CounterKey,
        algorithm::View,
        redis::{RedisConfig, RedisStore, Topology},
    },
};

use super::behaviour::{MINUTE, every};

const WAIT: Duration = Duration::from_secs(20);
pub(crate) const SYNC: Duration = Duration::from_millis(50);

/// A machine that is busy must not look like a Redis that does not answer.
pub(crate) fn patient(mut config: RedisConfig) -> RedisConfig {
    config.timeout = Duration::from_secs(5);
    config
}

/// Of a window of an hour, which is not about to end.
pub(crate) fn rule(id: &str, scope: &str, precision: &str, limit: u64, more: &str) -> String {
    await_room(HOUR);
    format!(
        "[[rules]]\nid = \"{id}\"\nscope = \"{scope}\"\nprecision = \"{precision}\"\nlimit = {limit}\nwindow = \"1h\"\n{more}\n"
    )
}

pub(crate) async fn fleet(policy: &str, config: &RedisConfig, nodes: usize) -> Vec<Arc<FleetNode>> {
    let mut fleet = Vec::new();
    for _ in 0..nodes {
        fleet.push(Arc::new(FleetNode::start(policy, config, SYNC).await));
    }
    fleet
}

/// Asks every node as often from as many tasks at once; how many were allowed.
pub(crate) async fn hammer(fleet: &[Arc<FleetNode>], tasks: usize, times: usize, subject: &Subject) -> usize {
    let mut hammers = Vec::new();
    for node in fleet {
        for _ in 0..tasks {
            let (node, subject) = (Arc::clone(node), subject.clone());
            hammers.push(tokio::spawn(async move {
                let mut allowed = 0;
                for _ in 0..times {
                    allowed += usize::from(node.allows(&subject).await);
                }
                allowed
            }));
        }
    }
    let mut allowed = 0;
    for hammer in hammers {
        allowed += hammer.await.unwrap();
    }
    allowed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_node_admits_more_than_all_together_may() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    for (algorithm, more) in [
        ("sliding_window", ""),
        ("fixed_window", ""),
        ("token_bucket", ""),
        ("sliding_log", ""),
        ("leaky_bucket", "burst = 99\nmax_delay = \"60s\""),
    ] {
        let policy = rule(algorithm, "user", "strict", 100, &format!("algorithm = \"{algorithm}\"\n{more}"));
        let fleet = fleet(&policy, &config, 4).await;
        // One leaves a queue every 36 s: of those that come at once the third would wait for more than a minute.
        let expected = if algorithm == "leaky_bucket" { 2 } else { 100 };
        let allowed = hammer(&fleet, 16, 10, &user("u")).await;
        assert_eq!(allowed, expected, "{algorithm}");
        // One node's answers tell what the others have admitted.
        assert_eq!(fleet[2].remaining(&user("u")).await, 0, "{algorithm}");
    }
}

/// Memory has heard that the strict rule was used up; when another rule denies before Redis is asked, it must not name that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_given_back_is_not_the_reason_of_a_later_denial() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    for algorithm in ["sliding_window", "fixed_window", "token_bucket", "sliding_log"] {
        let long = rule(&format!("long-{algorithm}"), "user", "strict", 6, &format!("algorithm = \"{algorithm}\""));
        let short = format!("short-{algorithm}");
        let policy = format!(
            "{long}[[endpoints]]\nname = \"x\"\nmatch = [\"/x\"]\n[[rules]]\nid = \"{short}\"\nscope = \"user\"\n\
             precision = \"local\"\nendpoint = \"x\"\nlimit = 2\nwindow = \"10m\"\n"
        );
        let node = &fleet(&policy, &config, 1).await[0];
        let ask = async |path, cost, charge| node.decide(&user("u"), path, cost, charge).await;
        for (path, cost) in [("/x", 2), ("/", 4)] {
            assert_eq!(ask(path, cost, Charge::Commit).await.kind, Kind::Allowed, "{algorithm}");
        }
        assert_eq!(ask("/", 1, Charge::Commit).await.kind, Kind::Denied, "{algorithm}");
        assert_eq!(ask("/", 3, Charge::Refund).await.kind, Kind::Allowed, "{algorithm}");
        let denied = ask("/x", 1, Charge::Commit).await;
        let rule = denied.answer.expect("a rule denies").rule;
        assert_eq!((denied.kind, &*rule), (Kind::Denied, &*short), "{algorithm}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denied_request_of_several_precisions_costs_nobody_anything() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    // Whichever rule denies: each has its turn to be the narrow one.
    let precisions = ["async", "local", "leased", "strict"];
    for narrow in precisions {
        let policy: String = precisions
            .iter()
            .map(|precision| {
                let limit = if *precision == narrow { 5 } else { 1000 };
                rule(&format!("{narrow}-{precision}"), "user", precision, limit, "")
            })
            .collect();
        let fleet = fleet(&policy, &config, 1).await;
        let node = &fleet[0];
        assert_eq!(hammer(&fleet, 1, 5, &user("u")).await, 5, "{narrow}");
        assert_eq!(hammer(&fleet, 8, 20, &user("u")).await, 0, "{narrow}");
        let denied = node.decide(&user("u"), "/", 1, Charge::Commit).await;
        assert_eq!(denied.answer.map(|answer| answer.rule.to_string()), Some(format!("{narrow}-{narrow}")));
        let dear = node.decide(&user("u"), "/", 1001, Charge::Commit).await;
        assert_eq!(dear.kind, Kind::Unsatisfiable, "{narrow}");
        // What every counter says afterwards, to a node that has seen nothing of it.
        let nobody = user("somebody else");
        assert!(node.allows(&nobody).await, "{narrow}");
        eventually(WAIT, async || {
            let mut taken = Vec::new();
            for precision in precisions {
                let key = format!("rl:{{user:u}}:{narrow}-{precision}");
                let value: Option<Vec<u8>> = server.run(&["GET", &key]).await;
                taken.push((precision, value.map(|value| current(&value))));
            }
            if taken.iter().all(|(_, current)| *current == Some(5)) { Ok(()) } else { Err((narrow, taken)) }
        })
        .await;
    }
}

/// The current count of a counter of windows, out of its value: the short form, or an array in MessagePack, where five numbers
/// come before those of nodes.
pub(crate) fn current(value: &[u8]) -> u64 {
    let Some(head) = value[0].checked_sub(0xa0).filter(|head| *head < 0x20) else { return current_of_array(value) };
    let has = |bit: u8| usize::from(head & bit != 0);
    let pair_bytes = usize::from(head >> 2 & 3) + 2;
    let current = |pair: &[u8]| {
        let both = pair.iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        both & ((1 << (4 * pair_bytes)) - 1)
    };
    let (rest, nodes) = value[6 + has(2)..].split_at(has(16) * pair_bytes);
    let nodes = nodes.chunks_exact(7 + has(1) + pair_bytes).map(|node| current(&node[7 + has(1)..]));
    current(rest) + nodes.sum::<u64>()
}

fn current_of_array(value: &[u8]) -> u64 {
    let mut rest = match value[0] {
        0x90..=0x9f => &value[1..],
        0xdc => &value[3..],
        other => panic!("no array: {other:x}"),
    };
    let mut numbers = Vec::new();
    while numbers.len() < 5 {
        let (length, skip) = match rest[0] {
            0x00..=0x7f => (0, 0),
            0xcc => (1, 1),
            0xcd => (2, 1),
            0xce => (4, 1),
            0xcf => (8, 1),
            other => panic!("no number: {other:x}"),
        };
        let bytes = if skip == 0 { &rest[..1] } else { &rest[1..=length] };
        numbers.push(bytes.iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte)));
        rest = &rest[skip.max(1) + length..];
    }
    numbers[4]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_in_several_slots_of_a_cluster_are_charged_together() {
    let servers = RedisCluster::start(3).await;
    let config = patient(RedisConfig::of(servers.urls(), Topology::Cluster));
    let policy = rule("mine", "user", "strict", 1000, "") + &rule("everybody's", "global", "strict", 30, "");
    let policy = policy.replace("everybody's", "everybody");
    let fleet = fleet(&policy, &config, 2).await;
    // Warm: every node of the cluster is known.
    assert!(fleet[0].allows(&user("first")).await && fleet[1].allows(&user("first")).await);
    let mut allowed = 0;
    for name in ["a", "b", "c", "d"] {
        allowed += hammer(&fleet, 2, 5, &user(name)).await;
    }
    // Requests at the same time may each have seen what the other was charged before that was given back.
    assert!((20..=28).contains(&allowed), "{allowed}");
    let key = "rl:{global:all}:everybody";
    eventually(WAIT, async || {
        let value: Vec<u8> = servers.primaries[servers.owner(key).await].run(&["GET", key]).await;
        let taken = current(&value);
        if taken == 2 + u64::try_from(allowed).unwrap() { Ok(()) } else { Err((taken, allowed)) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_redis_a_node_goes_on_from_what_it_was_told() {
    let mut server = RedisServer::start().await;
    let config = RedisConfig::new(server.url());
    for algorithm in ["sliding_window", "fixed_window", "token_bucket", "sliding_log"] {
        let policy = rule(algorithm, "user", "strict", 100, &format!("algorithm = \"{algorithm}\""));
        let fleet = fleet(&policy, &patient(config.clone()), 2).await;
        assert_eq!(hammer(&fleet[..1], 1, 80, &user("u")).await, 80);
        // The second hears of it with its own first request.
        assert_eq!(hammer(&fleet[1..], 1, 1, &user("u")).await, 1);
        server.kill();
        let allowed = hammer(&fleet[1..], 1, 30, &user("u")).await;
        // Of a bucket, each node has its part of what is left, as many as there are by now.
        let expected = if algorithm == "token_bucket" { 1..=9 } else { 19..=19 };
        assert!(expected.contains(&allowed), "{algorithm}: {allowed}");
        server.restart().await;
        // What was admitted meanwhile is shared when it is back.
        eventually(WAIT, async || {
            let key = format!("rl:{{user:u}}:{algorithm}");
            let there: u64 = server.run(&["EXISTS", &key]).await;
            if there == 1 { Ok(()) } else { Err(fleet[1].status.get()) }
        })
        .await;
    }
}

/// Requests that Redis has charged, and said so when they had been answered without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_redis_charged_too_late_counts_once() {
    let server = RedisServer::start().await;
    let proxy = DelayProxy::start(server.port(), Duration::from_millis(150)).await;
    let near = patient(RedisConfig::new(server.url()));
    let mut far = RedisConfig::new(proxy.url());
    far.timeout = Duration::from_millis(50);
    for (algorithm, failure, expected) in
        [("sliding_window", "local", 20), ("fixed_window", "closed", 0), ("sliding_log", "open", 20)]
    {
        let more = format!("algorithm = \"{algorithm}\"\non_store_failure = \"{failure}\"");
        let policy = rule(algorithm, "user", "strict", 1000, &more);
        // It knows the script by now.
        let other = &fleet(&policy, &near, 1).await[0];
        assert!(other.allows(&user("other")).await);
        let nodes = fleet(&policy, &far, 1).await;
        let charged = async || {
            let stats: String = server.run(&["INFO", "commandstats"]).await;
            let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).map(str::to_owned);
            line.and_then(|line| line.split(['=', ',']).nth(1)?.parse::<u64>().ok()).unwrap_or(0)
        };
        let before = charged().await;
        assert_eq!(hammer(&nodes, 1, 20, &user("u")).await, expected, "{algorithm}");
        assert_eq!(nodes[0].unanswered(algorithm), 20, "{algorithm}");
        eventually(WAIT, async || {
            let charged = charged().await - before;
            let remaining = other.remaining(&user("u")).await;
            // Each was charged, and was given back.
            let is_settled = charged >= 40 && nodes[0].memory.stats().queued == 0;
            if is_settled && remaining == 1000 - expected as u64 {
                Ok(())
            } else {
                Err((algorithm, charged, remaining))
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_taken_back_is_taken_out_of_its_own_window() {
    let server = RedisServer::start().await;
    let store = RedisStore::connect(&patient(RedisConfig::new(server.url()))).unwrap();
    let deadline = Duration::from_secs(5);
    let charge = async |cell: &Cell| {
        let judged = store.judge(At::StoreClock, Charge::Commit, std::slice::from_ref(cell), deadline).await.unwrap();
        assert_eq!(judged[0].outcome.outcome, Outcome::Allowed);
        judged[0]
    };
    for (name, algorithm) in [
        ("sliding", Algorithm::sliding_window(500_000, 100_000)),
        ("fixed", Algorithm::FixedWindow(Window { window_us: 500_000, ceiling: 100_000 })),
    ] {
        let cell = Cell { key: key(name), algorithm, cost: 30, enforced: true };
        let View::Windows(before) = charge(&cell).await.view else { panic!() };
        let first = charge(&cell).await;
        let others = Cell { cost: 7, ..cell.clone() };
        // Until the next window has begun, and somebody else has used it.
        eventually(WAIT, async || match charge(&Cell { cost: 1, ..others.clone() }).await.view {
            View::Windows(now) if now.index > before.index => Ok(()),
            other @ (View::Windows(_) | View::Bucket { .. } | View::Log { .. }) => Err(other),
        })
        .await;
        let seen = charge(&others).await;
        store.take_back(&[(cell.clone(), first.at)], deadline).await.unwrap();
        let cells = std::slice::from_ref(&cell);
        let left = store.judge(At::StoreClock, Charge::Peek, cells, deadline).await.unwrap()[0];
        let (View::Windows(seen), View::Windows(left)) = (seen.view, left.view) else { panic!() };
        if left.index == seen.index {
            assert_eq!((left.previous, left.current), (seen.previous - 30, seen.current), "{name}");
        }
        // Of a window that is over for good, nothing is left to take.
        let counted: Vec<u8> = server.run(&["GET", &format!("rl:{{user:u}}:{name}")]).await;
        let gone = UnixMicros::new(first.at.get() - 10_000_000);
        store.take_back(&[(cell.clone(), gone)], deadline).await.unwrap();
        assert!(current(&server.run::<Vec<u8>>(&["GET", &format!("rl:{{user:u}}:{name}")]).await) == current(&counted));
    }
    // Of a log, that admission; of a bucket, what did not come back by itself.
    let cell = Cell { key: key("log"), algorithm: every(100, MINUTE)[4].1, cost: 30, enforced: true };
    let first = charge(&cell).await;
    charge(&Cell { cost: 7, ..cell.clone() }).await;
    store.take_back(&[(cell.clone(), first.at)], deadline).await.unwrap();
    store.take_back(&[(cell.clone(), first.at)], deadline).await.unwrap();
    let left = store.judge(At::StoreClock, Charge::Peek, &[cell], deadline).await.unwrap()[0];
    assert_eq!(left.outcome.remaining, 93);
    let cell = Cell { key: key("bucket"), algorithm: every(100, 60 * MINUTE)[2].1, cost: 30, enforced: true };
    let first = charge(&cell).await;
    store.take_back(&[(cell.clone(), first.at)], deadline).await.unwrap();
    let left = store.judge(At::StoreClock, Charge::Peek, &[cell], deadline).await.unwrap()[0];
    assert!((99..=100).contains(&left.outcome.remaining), "{left:?}");
}

fn key(rule: &str) -> CounterKey {
    super::behaviour::user("u", rule)
}

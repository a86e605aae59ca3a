//! `leased`: what requests use was counted in Redis before, whatever becomes of messages and of nodes.

use std::{sync::Arc, time::Duration};

use limiter_tests::{
    chaos_proxy::ChaosProxy,
    delay_proxy::DelayProxy,
    eventually::eventually,
    fleet_node::{FleetNode, user},
    redis_cluster::RedisCluster,
    redis_server::RedisServer,
};
use limiter_user::{
    clock::Stopwatch,
    limiter::Subject,
    store::{
        Charge,
        breaker::BreakerConfig,
        redis::{RedisConfig, Topology},
    },
};

use super::strict::{current, fleet, hammer, patient, rule};

const WAIT: Duration = Duration::from_secs(20);
const KEY: &str = "rl:{user:u}:leased";

fn leased(limit: u64) -> String {
    rule("leased", "user", "leased", limit, "")
}

/// Asks every node about once a millisecond for so long; how many were allowed.
async fn steady(fleet: &[Arc<FleetNode>], time: Duration, subject: &Subject) -> u64 {
    let mut clients = Vec::new();
    for node in fleet {
        let (node, subject) = (Arc::clone(node), subject.clone());
        clients.push(tokio::spawn(async move {
            let (mut allowed, watch) = (0, Stopwatch::start());
            while watch.elapsed() < time {
                allowed += u64::from(node.allows(&subject).await);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            allowed
        }));
    }
    let mut allowed = 0;
    for client in clients {
        allowed += client.await.unwrap();
    }
    allowed
}

async fn counted(server: &RedisServer, key: &str) -> u64 {
    server.run::<Option<Vec<u8>>>(&["GET", key]).await.map_or(0, |value| current(&value))
}

async fn until_counted(server: &RedisServer, expected: u64) {
    eventually(WAIT, async || match counted(server, KEY).await {
        counted if counted == expected => Ok(()),
        counted => Err((counted, expected)),
    })
    .await;
}

pub(crate) async fn script_calls(server: &RedisServer) -> u64 {
    let stats: String = server.run(&["INFO", "commandstats"]).await;
    let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).map(str::to_owned);
    line.and_then(|line| line.split(['=', ',']).nth(1)?.parse().ok()).unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_nodes_far_from_redis_use_the_limit_up_and_never_more() {
    let server = RedisServer::start().await;
    let proxy = DelayProxy::start(server.port(), Duration::from_millis(20)).await;
    let config = patient(RedisConfig::new(proxy.url()));
    for limit in [10, 100, 1000] {
        let fleet = fleet(&leased(limit), &config, 4).await;
        let name = format!("u-{limit}");
        let allowed = steady(&fleet, Duration::from_secs(2), &user(&name)).await;
        assert!((limit * 97 / 100..=limit).contains(&allowed), "{allowed} of {limit}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_come_together_ask_once() {
    let server = RedisServer::start().await;
    let proxy = DelayProxy::start(server.port(), Duration::from_millis(50)).await;
    let config = patient(RedisConfig::new(proxy.url()));
    let fleet = fleet(&leased(100_000), &config, 1).await;
    // The script is known, and nothing is held of this user.
    assert!(fleet[0].allows(&user("other")).await);
    let before = script_calls(&server).await;
    assert_eq!(hammer(&fleet, 200, 1, &user("u")).await, 200);
    let made = script_calls(&server).await - before;
    // One for the first, and another with what all the others want.
    assert!((2..=3).contains(&made), "{made} calls for 200 requests");
    let stats = fleet[0].leases.stats();
    assert!(stats.misses >= 199 && stats.lent >= 200, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_warm_key_does_not_wait_for_a_redis_that_is_far_away() {
    let server = RedisServer::start().await;
    let proxy = DelayProxy::start(server.port(), Duration::from_millis(100)).await;
    let config = patient(RedisConfig::new(proxy.url()));
    let fleet = fleet(&leased(1_000_000), &config, 1).await;
    steady(&fleet, Duration::from_secs(2), &user("u")).await;
    let before = fleet[0].leases.stats();
    let allowed = steady(&fleet, Duration::from_secs(2), &user("u")).await;
    let after = fleet[0].leases.stats();
    let (hits, misses) = (after.hits - before.hits, after.misses - before.misses);
    assert!(hits >= 500 && hits == allowed, "{hits} {allowed}");
    assert!(misses * 100 <= hits, "{misses} of {hits} waited");
}

/// A Redis that answers, and later than a request waits: its clients come seldom, or once, and go by the rule's
/// `on_store_failure` as soon as that shows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_is_too_slow_for_requests_locks_nobody_out() {
    let server = RedisServer::start().await;
    let proxy = DelayProxy::start(server.port(), Duration::from_millis(60)).await;
    let mut config = RedisConfig::new(proxy.url());
    config.timeout = Duration::from_millis(5);
    config.breaker = Some(BreakerConfig::default());
    let fleet = fleet(&leased(1000), &config, 1).await;
    let mut allowed = [0, 0];
    for client in 0..100 {
        let names = ["regular".to_owned(), format!("new-{client}")];
        for (allowed, name) in allowed.iter_mut().zip(names) {
            *allowed += u64::from(fleet[0].allows(&user(&name)).await);
        }
    }
    assert!(allowed.iter().all(|allowed| *allowed >= 90), "{allowed:?} of 100");
    assert!(!fleet[0].is_whole(), "it shows");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_used_goes_back() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    let mut nodes = fleet(&leased(1000), &config, 3).await;
    let used = steady(&nodes[..1], Duration::from_millis(300), &user("u")).await;
    assert!(used > 0 && nodes[0].leases.stats().lent > used, "{used}: {:?}", nodes[0].leases.stats());
    // When the key is idle.
    until_counted(&server, used).await;
    // When the node stops, at once: what it held can be used by another one.
    let more = steady(&nodes[..1], Duration::from_millis(300), &user("u")).await;
    Arc::into_inner(nodes.remove(0)).unwrap().stop().await;
    assert_eq!(counted(&server, KEY).await, used + more);
    let mut rest = 0;
    eventually(WAIT, async || {
        rest += steady(&nodes, Duration::from_millis(500), &user("u")).await;
        if used + more + rest == 1000 { Ok(()) } else { Err((used, more, rest)) }
    })
    .await;
    // When a client pays back.
    let refunded = nodes[0].decide(&user("u"), "/", 5, Charge::Refund).await;
    assert_eq!(refunded.answer.unwrap().remaining, 5);
    assert_eq!(hammer(&nodes[..1], 1, 10, &user("u")).await, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_dies_takes_no_more_with_it_than_it_held() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    let mut nodes = fleet(&leased(1000), &config, 2).await;
    let used = steady(&nodes[..1], Duration::from_millis(300), &user("u")).await;
    let lent = counted(&server, KEY).await;
    assert!(lent > used, "{lent} {used}");
    Arc::into_inner(nodes.remove(0)).unwrap().kill();
    let mut rest = 0;
    eventually(WAIT, async || {
        rest += steady(&nodes, Duration::from_millis(500), &user("u")).await;
        if counted(&server, KEY).await == 1000 { Ok(()) } else { Err(rest) }
    })
    .await;
    // What is still held here can be used.
    rest += steady(&nodes, Duration::from_millis(500), &user("u")).await;
    assert_eq!(rest, 1000 - lent);
}

/// What four nodes allow of 2000, each behind messages that are lost, late and cut, and after that; `lent` is how much of it
/// leases let through.
struct Allowed {
    all: u64,
    lent: u64,
    by_themselves: u64,
}

async fn through_lost_late_and_cut_messages(on_store_failure: &str) -> Allowed {
    let server = RedisServer::start().await;
    let policy = rule("leased", "user", "leased", 2000, &format!("on_store_failure = \"{on_store_failure}\""));
    let mut nodes = Vec::new();
    let mut proxies = Vec::new();
    for seed in 0..4 {
        let proxy = ChaosProxy::start(server.port(), seed * 1000).await;
        nodes.extend(fleet(&policy, &RedisConfig::new(proxy.url()), 1).await);
        proxies.push(proxy);
    }
    let mut all = steady(&nodes, Duration::from_secs(4), &user("u")).await;
    assert!(proxies.iter().map(ChaosProxy::faults).sum::<u64>() > 20);
    assert!(all > 200, "{all}");
    proxies.iter().for_each(ChaosProxy::calm_down);
    all += steady(&nodes, Duration::from_secs(4), &user("u")).await;
    // What answers were lost about was given back: all of it could be used.
    nodes.extend(fleet(&policy, &patient(RedisConfig::new(server.url())), 1).await);
    eventually(WAIT, async || {
        all += steady(&nodes[4..], Duration::from_millis(500), &user("u")).await;
        let counted = counted(&server, KEY).await;
        // What nodes allow by themselves is told as well.
        let is_all = counted == 2000 || on_store_failure == "local" && counted > 2000;
        if is_all { Ok(()) } else { Err(counted) }
    })
    .await;
    let lent = nodes.iter().map(|node| node.leases.stats().hits).sum();
    Allowed { all, lent, by_themselves: nodes.iter().map(|node| node.unanswered("leased")).sum() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_late_and_cut_messages_let_nobody_through() {
    let Allowed { all, lent, .. } = through_lost_late_and_cut_messages("closed").await;
    assert!(all <= 2000 && all == lent, "{all} {lent}");
}

/// Unless a node has heard nothing for seconds, as on a busy machine: it goes on by its share, which is counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_late_and_cut_messages_let_nobody_through_where_nodes_go_on_by_themselves() {
    let Allowed { all, lent, by_themselves } = through_lost_late_and_cut_messages("local").await;
    assert!(lent <= 2000, "{lent}");
    assert!(all - lent <= by_themselves, "{all} {lent} {by_themselves}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_lost_everything_is_told_what_was_lent() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    let nodes = fleet(&leased(400), &config, 2).await;
    let used = steady(&nodes, Duration::from_millis(100), &user("u")).await;
    let () = server.run(&["FLUSHALL"]).await;
    let rest = steady(&nodes, Duration::from_secs(2), &user("u")).await;
    // Until both have spoken, one may be lent what the other has used.
    assert!((400..=400 + used).contains(&(used + rest)), "{used} {rest}");
    assert!(used + rest <= 400 + used / 2 + 20, "{used} {rest}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_taken_from_all_slots_of_a_cluster() {
    let servers = RedisCluster::start(3).await;
    let config = patient(RedisConfig::of(servers.urls(), Topology::Cluster));
    let nodes = fleet(&leased(50), &config, 2).await;
    for number in 0..12 {
        let allowed = hammer(&nodes, 2, 30, &user(&format!("u{number}"))).await;
        assert_eq!(allowed, 50, "{number}");
    }
    let mut owners = std::collections::BTreeSet::new();
    for key in servers.keys().await {
        owners.insert(servers.owner(&key).await);
    }
    assert_eq!(owners.len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_window_admits_more_than_its_ceiling() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    for algorithm in ["sliding_window", "fixed_window"] {
        let policy = rule("leased", "user", "leased", 300, &format!("algorithm = \"{algorithm}\"")).replace("1h", "1s");
        let nodes = fleet(&policy, &config, 4).await;
        let watch = Stopwatch::start();
        let allowed = steady(&nodes, Duration::from_secs(4), &user(algorithm)).await;
        let windows = watch.elapsed().as_secs() + 2;
        assert!(allowed <= 300 * windows, "{algorithm}: {allowed} in parts of {windows} windows");
        assert!(allowed >= 300 * 3, "{algorithm}: {allowed} in 4 s");
    }
}

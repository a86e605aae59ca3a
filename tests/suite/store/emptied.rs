//! A Redis that has lost everything in the middle of a window: what nodes have heard of it holds.

use std::{sync::Arc, time::Duration};

use limiter_tests::{
    eventually::eventually,
    fleet_node::{FleetNode, user},
    redis_server::RedisServer,
};
use limiter_user::{
    clock::Stopwatch,
    limiter::{Kind, Subject},
    store::{Charge, redis::RedisConfig},
};

use super::strict::{current, fleet, hammer, patient, rule};

const WAIT: Duration = Duration::from_secs(20);
const LIMIT: u64 = 1000;

/// Asks each node about once a millisecond, until so many were allowed in all or `time` is over; how many were.
async fn until_allowed(nodes: &[Arc<FleetNode>], wanted: u64, time: Duration, subject: &Subject) -> u64 {
    let (mut allowed, watch) = (0, Stopwatch::start());
    while allowed < wanted && watch.elapsed() < time {
        let asking = nodes.iter().map(|node| node.allows(subject));
        let answers = futures_util::future::join_all(asking).await;
        allowed += answers.into_iter().filter(|allowed| *allowed).count() as u64;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    allowed
}

/// Asks as long as nodes make good what was lost, and until nothing is left; how many were allowed.
async fn until_used_up(nodes: &[Arc<FleetNode>], subject: &Subject) -> u64 {
    let mut allowed = until_allowed(nodes, u64::MAX, Duration::from_secs(3), subject).await;
    eventually(WAIT, async || match until_allowed(nodes, u64::MAX, Duration::from_millis(500), subject).await {
        0 => Ok(()),
        more => {
            allowed += more;
            Err(allowed)
        }
    })
    .await;
    allowed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_nodes_keep_the_limit_through_a_flush() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    // Of a strict counter, the first to ask knows of all but what the others admitted since it asked before. Of a leased one,
    // what one node knows of is what it used and holds itself: until the others have spoken, it may be lent a part of theirs.
    for (precision, algorithm, most_above) in [
        ("strict", "sliding_window", 20),
        ("strict", "fixed_window", 20),
        ("strict", "sliding_log", 20),
        ("strict", "token_bucket", 20),
        ("leased", "sliding_window", LIMIT / 4),
    ] {
        let policy = rule("r", "user", precision, LIMIT, &format!("algorithm = \"{algorithm}\""));
        let nodes = fleet(&policy, &config, 4).await;
        let subject = user(&format!("{precision} {algorithm}"));
        let used = until_allowed(&nodes, LIMIT * 6 / 10, WAIT, &subject).await;
        let () = server.run(&["FLUSHALL"]).await;
        let rest = until_used_up(&nodes, &subject).await;
        let all = used + rest;
        assert!((LIMIT..=LIMIT + most_above).contains(&all), "{precision} {algorithm}: {used} and {rest}");
        if precision == "strict" {
            let restored: u64 = nodes.iter().map(|node| node.leases.store().calls().restored_counters).sum();
            assert!(restored > 0, "{algorithm}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_heard_nothing_of_a_counter_does_not_begin_it_anew() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    let nodes = fleet(&rule("r", "user", "strict", LIMIT, ""), &config, 2).await;
    let subject = user("u");
    assert_eq!(hammer(&nodes[..1], 1, 600, &subject).await, 600);
    // Both have been heard of.
    eventually(WAIT, async || {
        let known: Vec<u32> = nodes.iter().map(|node| node.leases.store().live_nodes()).collect();
        if known == [2, 2] { Ok(()) } else { Err(known) }
    })
    .await;
    let () = server.run(&["FLUSHALL"]).await;
    assert_eq!(hammer(&nodes[1..], 1, 10, &subject).await, 10);
    // Its next heartbeat shows the first that it is forgotten.
    eventually(WAIT, async || {
        let stats = nodes[0].status.get();
        if stats.refills > 0 { Ok(()) } else { Err(stats) }
    })
    .await;
    assert!(nodes[0].allows(&subject).await);
    let value: Vec<u8> = server.run(&["GET", "rl:{user:u}:r"]).await;
    assert_eq!(current(&value), 601, "what it has heard, and one more");
    assert_eq!(hammer(&nodes, 1, 500, &subject).await, 399);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_heard_is_there_again_whether_anybody_asks_or_not() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    for algorithm in ["sliding_window", "fixed_window", "token_bucket", "sliding_log"] {
        let policy = rule("r", "user", "strict", LIMIT, &format!("algorithm = \"{algorithm}\"")).replace("1h", "1d");
        let nodes = fleet(&policy, &config, 2).await;
        let name = format!("u-{algorithm}");
        assert_eq!(hammer(&nodes[..1], 1, 600, &user(&name)).await, 600);
        // The second time within the time that the first is remembered.
        for refills in 1..=2 {
            let () = server.run(&["FLUSHALL"]).await;
            eventually(WAIT, async || {
                let there: u64 = server.run(&["EXISTS", &format!("rl:{{user:{name}}}:r")]).await;
                let stats = nodes[0].status.get();
                if there == 1 && stats.refills == refills { Ok(()) } else { Err((algorithm, there, stats)) }
            })
            .await;
        }
        // Who has never heard of it. A unit of the bucket comes back in 86 s.
        let rest = hammer(&nodes[1..], 1, 500, &user(&name)).await;
        assert!((400..=402).contains(&rest), "{algorithm}: {rest}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quiet_leased_counter_is_told_again() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    let nodes = fleet(&rule("r", "user", "leased", LIMIT, ""), &config, 2).await;
    assert_eq!(hammer(&nodes[..1], 1, 600, &user("u")).await, 600);
    let counted = async || {
        let value: Option<Vec<u8>> = server.run(&["GET", "rl:{user:u}:r"]).await;
        value.map(|value| current(&value))
    };
    // What was lent and not used is back.
    eventually(WAIT, async || if counted().await == Some(600) { Ok(()) } else { Err(counted().await) }).await;
    for _ in 0..2 {
        let () = server.run(&["FLUSHALL"]).await;
        eventually(WAIT, async || if counted().await == Some(600) { Ok(()) } else { Err(counted().await) }).await;
    }
    assert_eq!(hammer(&nodes[1..], 1, 500, &user("u")).await, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_evicted_counter_goes_on_where_it_was_and_a_refund_is_no_loss() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    let nodes = fleet(&rule("r", "user", "strict", 100_000, ""), &config, 2).await;
    let subject = user("u");
    assert_eq!(hammer(&nodes[..1], 1, 60, &subject).await, 60);
    let () = server.run(&["DEL", "rl:{user:u}:r"]).await;
    assert!(nodes[0].allows(&subject).await);
    let counted = async || current(&server.run::<Vec<u8>>(&["GET", "rl:{user:u}:r"]).await);
    assert_eq!(counted().await, 61);
    // The first heard of more than there is when the second gives something back. Shortly after a loss, it cannot be told from
    // one.
    eventually(WAIT, async || {
        let before = counted().await;
        assert_eq!(nodes[1].decide(&subject, "/", 1, Charge::Refund).await.kind, Kind::Allowed);
        assert!(nodes[0].allows(&subject).await);
        let after = counted().await;
        if after == before { Ok(()) } else { Err((before, after)) }
    })
    .await;
}

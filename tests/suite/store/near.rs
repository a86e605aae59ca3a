//! Counters near their ceilings are shared before the interval is over, and how far above it they get is known.

use std::time::Duration;

use limiter_tests::{
    eventually::eventually,
    fleet_node::{FleetNode, user},
    redis_server::RedisServer,
};
use limiter_user::{clock::Stopwatch, limiter::Kind, store::Charge, store::redis::RedisConfig};

use super::strict::{patient, rule};

const WAIT: Duration = Duration::from_secs(20);
const INTERVAL: Duration = Duration::from_millis(100);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_counter_near_its_ceiling_is_shared_early_and_no_more_often_than_said() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    let node = FleetNode::start(&rule("async", "user", "async", 10_000, ""), &config, INTERVAL).await;
    // Far below: only each interval.
    for _ in 0..50 {
        assert!(node.allows(&user("u")).await);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(node.status.get().early_rounds, 0);
    let dear = node.decide(&user("u"), "/", 9_850, Charge::Commit).await;
    assert_eq!(dear.kind, Kind::Allowed);
    let (watch, before) = (Stopwatch::start(), node.status.get());
    for _ in 0..100 {
        assert!(node.allows(&user("u")).await);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(node.remaining(&user("u")).await, 0);
    let after = node.status.get();
    let batches = after.batches - before.batches;
    let most = 4 * u64::try_from(watch.elapsed().as_millis()).unwrap() / 100 + 2;
    assert!(after.early_rounds > before.early_rounds, "{after:?}");
    assert!(batches <= most, "{batches} exchanges where at most {most} are due");
    // Spent: nobody admits more by hearing of it sooner.
    let spent = node.status.get().early_rounds;
    for _ in 0..50 {
        assert!(!node.allows(&user("u")).await);
    }
    tokio::time::sleep(INTERVAL).await;
    assert!(node.status.get().early_rounds <= spent + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nodes_admit_above_a_ceiling_is_within_the_bound_that_is_told() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    let mut nodes = Vec::new();
    for _ in 0..4 {
        nodes.push(FleetNode::start(&rule("async", "user", "async", 2_000, ""), &config, INTERVAL).await);
    }
    let mut allowed = 0;
    eventually(WAIT, async || {
        let mut more = 0;
        for node in &nodes {
            more += u64::from(node.allows(&user("u")).await);
        }
        allowed += more;
        if more == 0 { Ok(()) } else { Err(allowed) }
    })
    .await;
    let over = allowed.saturating_sub(2_000);
    let bounds: Vec<u64> =
        nodes.iter().flat_map(|node| node.status.overshoot_bounds()).map(|(_, bound)| bound).collect();
    assert_eq!(bounds.len(), 4, "each has told of its own");
    assert!(bounds.iter().all(|bound| over <= *bound), "{over} {bounds:?}");
    let seen = |node: &FleetNode| node.active.load().metrics[0].overshoot();
    assert!(nodes.iter().all(|node| seen(node) <= over), "{over} {:?}", nodes.iter().map(seen).collect::<Vec<_>>());

    // Two that cannot have heard of each other.
    for node in &nodes[..2] {
        let dear = node.decide(&user("both"), "/", 1_500, Charge::Commit).await;
        assert_eq!(dear.kind, Kind::Allowed);
    }
    eventually(WAIT, async || {
        let both = [nodes[0].allows(&user("both")).await, nodes[1].allows(&user("both")).await];
        let seen = nodes[..2].iter().map(seen).max();
        // Until they have, each may have allowed some more.
        if both == [false; 2] && seen >= Some(1_000) { Ok(()) } else { Err((both, seen)) }
    })
    .await;
    let bound = nodes[0].status.overshoot_bounds()[0].1;
    assert!(bound >= 4 * 1_500, "{bound}");
}

/// However long it goes on: a limit of so much a second is one, and not one for each node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nodes_admit_above_a_bucket_is_owed_and_paid_with_time() {
    const RATE: u64 = 200;
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    let policy = rule("bucket", "user", "async", RATE, "algorithm = \"token_bucket\"").replace("\"1h\"", "\"1s\"");
    let mut nodes = Vec::new();
    for _ in 0..4 {
        nodes.push(FleetNode::start(&policy, &config, INTERVAL).await);
    }
    let (watch, mut admitted) = (Stopwatch::start(), 0);
    while watch.elapsed() < Duration::from_secs(4) {
        for node in &nodes {
            for _ in 0..4 {
                admitted += u64::from(node.allows(&user("u")).await);
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let by_rate = RATE * u64::try_from(watch.elapsed().as_millis()).unwrap() / 1000;
    let bounds = nodes.iter().flat_map(|node| node.status.overshoot_bounds()).map(|(_, bound)| bound);
    let bound = bounds.max().unwrap();
    let what = format!("{admitted} of {RATE} and {by_rate}, bound {bound}");
    assert!(admitted <= RATE + by_rate + bound, "{what}");
    assert!(admitted >= by_rate * 8 / 10, "{what}");
    let seen = nodes.iter().map(|node| node.active.load().metrics[0].overshoot()).max().unwrap();
    assert!((1..=bound).contains(&seen), "{what}, seen {seen}");
    for node in &nodes {
        eventually(WAIT, async || match node.remaining(&user("u")).await {
            RATE => Ok(()),
            remaining => Err(remaining),
        })
        .await;
    }
}

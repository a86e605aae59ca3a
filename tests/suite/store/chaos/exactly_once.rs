//! Nodes whose way to Redis loses, delays and cuts what it carries: what they admit is counted once.

use std::time::Duration;

use limiter_common::sliding_window::Outcome;
use limiter_tests::{
    chaos, chaos_proxy::ChaosProxy, eventually::eventually, random::Random, redis_server::RedisServer,
    window::await_room,
};
use limiter_user::{
    clock::{Clock as _, Stopwatch},
    store::{
        Algorithm, At, Cell, Charge, Store as _,
        redis::{RedisConfig, RedisStore},
    },
};

use super::super::{
    behaviour::{MINUTE, every, user},
    sync_worker::Node,
};

const DAY: u64 = 24 * 60 * MINUTE;
/// So long that nothing comes back while the test runs.
const WINDOW_US: u64 = 30 * DAY;
const CEILING: u64 = 3000;
/// Of a counter, so that none is denied and logs stay short.
const MOST: u64 = 400;
const USERS: usize = 12;
const WAIT: Duration = Duration::from_secs(30);

struct Counter {
    cell: Cell,
    /// What each node has admitted and not given back.
    taken: [u64; 3],
    given_back: [u64; 3],
}

fn counters() -> Vec<Counter> {
    let of = |number: usize| {
        every(CEILING, WINDOW_US).map(|(name, algorithm)| {
            let key = user(&format!("u{number}"), name);
            Counter { cell: Cell { key, algorithm, cost: 1, enforced: true }, taken: [0; 3], given_back: [0; 3] }
        })
    };
    (0..USERS).flat_map(of).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_admitted_is_counted_once_whatever_the_network_does() {
    let seed = chaos::seed();
    await_room(Duration::from_micros(WINDOW_US));
    let server = RedisServer::start().await;
    let proxy = ChaosProxy::start(server.port(), seed).await;
    let nodes = [(); 3].map(|()| Node::start_with(&RedisConfig::new(proxy.url()), 0));
    let mut counters = counters();
    let mut random = Random::new(seed);
    let (watch, duration) = (Stopwatch::start(), chaos::duration(Duration::from_secs(8)));
    // Evenly, however long it lasts.
    let total = counters.len() as u64 * MOST / 4;
    let mut done = 0;
    while watch.elapsed() < duration {
        let due = total * u64::try_from(watch.elapsed().as_millis() * 1000 / duration.as_millis()).unwrap() / 1000;
        while done < due {
            done += 1;
            let of_node = random.below(3usize);
            let counter = &mut counters[random.below(USERS * 5)];
            let (node, cost) = (&nodes[of_node], random.below(3u64) + 1);
            let taken = counter.taken.iter().sum::<u64>();
            if random.below(8u64) == 0 && counter.taken[of_node] >= cost {
                node.refund(std::slice::from_ref(&counter.cell), cost);
                counter.taken[of_node] -= cost;
                counter.given_back[of_node] += cost;
            } else if taken + cost <= MOST {
                let cell = Cell { cost, ..counter.cell.clone() };
                let (outcome, _) = node.decide(std::slice::from_ref(&cell));
                assert_eq!(outcome, Outcome::Allowed, "seed {seed}: {:?} after {taken}", cell.key);
                counter.taken[of_node] += cost;
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let faults = proxy.faults();
    assert!(faults > 20, "seed {seed}: only {faults} faults");
    chaos::tell(&format!("seed {seed}: {done} requests of three nodes, {faults} faults"));
    proxy.calm_down();
    for node in &nodes {
        node.until_sent().await;
    }
    // Redis, and each node that has used the counter, knows of all that was admitted and of nothing else.
    let mut config = RedisConfig::new(server.url());
    config.timeout = Duration::from_secs(5);
    let store = RedisStore::connect(&config).unwrap();
    for counter in &counters {
        let left = CEILING - counter.taken.iter().sum::<u64>();
        let cells = std::slice::from_ref(&counter.cell);
        let seen = store.check(At::Given(nodes[0].clock.now()), Charge::Peek, cells).await.unwrap();
        let Counter { cell, taken, given_back } = counter;
        assert_eq!(seen[0].remaining, left, "seed {seed}, {faults} faults: {:?} {taken:?}", cell.key);
        for (number, node) in nodes.iter().enumerate().filter(|(number, _)| taken[*number] > 0) {
            // What others give back of a window a node does not hear of: it may as well be a Redis that came back empty.
            let is_window = matches!(cell.algorithm, Algorithm::SlidingWindow(_) | Algorithm::FixedWindow(_));
            let by_others = given_back.iter().sum::<u64>() - given_back[number];
            let least = if is_window { left - by_others } else { left };
            eventually(WAIT, async || {
                node.memory.requeue(&cell.key);
                let seen = node.remaining(cells);
                if (least..=left).contains(&seen) {
                    return Ok(());
                }
                Err(format!("seed {seed}: {:?} {taken:?} {given_back:?}: {seen}, node {number}", cell.key))
            })
            .await;
        }
    }
    eventually(WAIT, async || {
        let keys: Vec<String> = server.try_run(&["KEYS", "*"]).await?;
        for key in &keys {
            let ttl_ms: i64 = server.try_run(&["PTTL", key]).await?;
            anyhow::ensure!(ttl_ms > 0, "{key}: {ttl_ms}");
        }
        anyhow::Ok(())
    })
    .await;
}

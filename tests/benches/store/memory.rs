//! Growth of `used_memory`, for counters whose previous and present windows have both seen requests.

use std::time::Duration;

use limiter_common::sliding_window::Counts;
use limiter_tests::{
    bench::{Goal, Row},
    random::Random,
    redis_server::RedisServer,
};
use limiter_user::store::{
    CounterKey, Identity,
    counter::{OwnState, OwnTotals},
    redis::{RedisConfig, RedisStore, redis_key},
};
use redis::Pipeline;

/// Nearly as many as a hash table of Redis has places for, before it is doubled.
const COUNTERS: usize = 1_000_000;
const BATCH: usize = 512;
const DAY_US: u64 = 86_400_000_000;
const WAIT: Duration = Duration::from_secs(30);
/// Counts of one node in one window are below this; of both nodes, below twice that.
const COUNT_BELOW: u64 = 300;
/// Of messages: a node has sent as many after twelve days at twenty a second.
const NUMBER: u64 = 20_000_000;

const MOST_BYTES: f64 = 200.0;
const OF_CLASSIC: Goal = Goal::AtMost(0.75);

pub(crate) async fn measure() -> Vec<Row> {
    let keys: Vec<CounterKey> = super::ids(COUNTERS).iter().map(|id| key(id)).collect();
    let classic = Row::new("memory: two string keys, one a window", "B/counter", classic(&keys).await);
    let shared = Row::new("memory: one key, written by two nodes", "B/counter", written_by_nodes(&keys, 2).await);
    let four = Row::new("memory: one key, written by four nodes", "B/counter", written_by_nodes(&keys, 4).await);
    let most = Row::new("memory: the most it may be", "B/counter", MOST_BYTES);
    vec![
        shared.clone().beside(&classic).goal(OF_CLASSIC),
        shared.beside(&most).goal(Goal::AtMost(1.0)),
        four.beside(&classic),
        classic,
        most,
    ]
}

fn key(id: &str) -> CounterKey {
    CounterKey { identity: Identity::User(id.into()), rule: "requests".into() }
}

#[expect(clippy::float_arithmetic, reason = "a mean")]
fn a_counter(before: u64, after: u64) -> f64 {
    (after - before) as f64 / COUNTERS as f64
}

async fn written_by_nodes(keys: &[CounterKey], nodes: u64) -> f64 {
    let server = RedisServer::start().await;
    let mut config = RedisConfig::new(server.url());
    config.timeout = WAIT;
    let store = RedisStore::connect(&config).expect("an address");
    let index = store.time_us(WAIT).await.expect("the time") / DAY_US;
    let (mut random, mut number, before) = (Random::new(3), NUMBER, server.settled_memory().await);
    for _ in 0..nodes {
        for keys in keys.chunks(BATCH) {
            let totals = keys.iter().map(|key| {
                let counts =
                    Counts { index, previous: random.below(COUNT_BELOW), current: 1 + random.below(COUNT_BELOW - 1) };
                let state = OwnState::Windows { counts, acknowledged_current: 0 };
                OwnTotals { key: key.clone(), tag: random.below(u32::MAX), window_us: DAY_US, state }
            });
            let totals: Vec<OwnTotals> = totals.collect();
            number += 1;
            for reply in store.exchange(number, &totals, WAIT).await.expect("a reply") {
                reply.expect("it was taken");
            }
        }
    }
    let keys: usize = server.run(&["DBSIZE"]).await;
    assert_eq!(keys, COUNTERS);
    a_counter(before, server.settled_memory().await)
}

/// The sums of two nodes as other limiters keep them: a key that is counted up for each window, with a time to live.
async fn classic(keys: &[CounterKey]) -> f64 {
    let server = RedisServer::start().await;
    let mut connection = server.connection().await;
    connection.set_response_timeout(WAIT);
    let (mut random, before) = (Random::new(3), server.settled_memory().await);
    for keys in keys.chunks(BATCH) {
        let mut pipeline = Pipeline::new();
        for key in keys {
            for window in ["20787", "20788"] {
                let name = format!("{}:{window}", redis_key(key));
                pipeline.cmd("INCRBY").arg(&name).arg(1 + random.below(2 * COUNT_BELOW)).ignore();
                pipeline.cmd("PEXPIRE").arg(&name).arg(2 * DAY_US / 1000).ignore();
            }
        }
        let () = pipeline.query_async(&mut connection).await.expect("a reply");
    }
    let keys: usize = server.run(&["DBSIZE"]).await;
    assert_eq!(keys, 2 * COUNTERS);
    a_counter(before, server.settled_memory().await)
}

//! Time that Redis takes for a call, as it measures it itself, beside the command of a module that does the same in C and Rust.

use std::{env, time::Duration};

use futures_util::future::join_all;
use limiter_common::sliding_window::Counts;
use limiter_tests::{
    bench::{Row, rounds},
    redis_server::RedisServer,
};
use limiter_user::store::{
    Algorithm, At, Cell, Charge, CounterKey, Identity, Store as _,
    counter::{OwnState, OwnTotals},
    redis::{RedisConfig, RedisStore},
};
use redis::Pipeline;

const KEYS: usize = 5_120;
const BATCH: usize = 512;
const HOUR_US: u64 = 3_600_000_000;
/// Nothing is one too many.
const LIMIT: u64 = 1_000_000_000;
const WAIT: Duration = Duration::from_secs(10);

/// The best of its rounds: what else the machine does only adds.
struct Best {
    name: &'static str,
    us: f64,
}

impl Best {
    fn new(name: &'static str) -> Self {
        Self { name, us: f64::INFINITY }
    }

    /// Runs `load`, which calls `command` and works on so many counters.
    #[expect(clippy::float_arithmetic, reason = "a mean")]
    async fn take(&mut self, server: &RedisServer, command: &str, counters: usize, load: impl Future<Output = ()>) {
        server.reset_commands().await;
        load.await;
        let stats = server.commands(command).await;
        assert!(stats.calls > 0, "{}", self.name);
        self.us = self.us.min(stats.usec as f64 / counters as f64);
    }

    fn row(&self) -> Row {
        Row::new(self.name, "us", self.us)
    }
}

pub(crate) async fn measure() -> Vec<Row> {
    let module = env::var("LIMITER_BENCH_REDIS_CELL").expect("LIMITER_BENCH_REDIS_CELL: run by `cargo xtask bench`");
    let server = RedisServer::start_with(&["--loadmodule", &module]).await;
    let mut config = RedisConfig::new(server.url());
    config.timeout = WAIT;
    let store = RedisStore::connect(&config).expect("an address");
    let ids = super::ids(KEYS);

    let mut throttle = Best::new("script time: CL.THROTTLE of redis-cell, a call");
    let mut sync = Best::new("script time: sync.lua in batches, a counter");
    let mut one = Best::new("script time: decide.lua with one counter");
    let mut three = Best::new("script time: decide.lua with three counters, a counter");
    for round in 0..u64::from(rounds(20)) {
        throttle.take(&server, "cl.throttle", KEYS, throttled(&server, &ids)).await;
        sync.take(&server, "evalsha", KEYS, shared(&store, &ids, round)).await;
        one.take(&server, "evalsha", KEYS, decided(&store, &ids, 1)).await;
        three.take(&server, "evalsha", KEYS * 3, decided(&store, &ids, 3)).await;
    }
    let throttle = throttle.row();
    let rows = [sync, one, three].map(|best| best.row().beside(&throttle));
    rows.into_iter().chain([throttle.clone()]).collect()
}

async fn throttled(server: &RedisServer, ids: &[String]) {
    let mut connection = server.connection().await;
    connection.set_response_timeout(WAIT);
    for ids in ids.chunks(BATCH) {
        let mut pipeline = Pipeline::new();
        for id in ids {
            // Most at once, units, in seconds, and the cost.
            pipeline.cmd("CL.THROTTLE").arg(id).arg(LIMIT).arg(LIMIT).arg(3600).arg(1).ignore();
        }
        let () = pipeline.query_async(&mut connection).await.expect("a reply");
    }
}

/// What two nodes send in turns, with more each time.
async fn shared(store: &RedisStore, ids: &[String], round: u64) {
    let index = store.time_us(WAIT).await.expect("the time") / HOUR_US;
    let node = u32::try_from(round % 2).expect("0 or 1");
    for (number, ids) in ids.chunks(BATCH).enumerate() {
        let totals = ids.iter().zip(0..).map(|(id, place): (_, u32)| {
            let counts = Counts { index, previous: 200, current: 100 + round };
            let state = OwnState::Windows { counts, acknowledged_current: 0 };
            let tag = place.wrapping_mul(0x9e37_79b1) + node;
            OwnTotals { key: key(id, "shared"), tag, window_us: HOUR_US, state }
        });
        let number = 2_000_000 + 100 * round + number as u64;
        let replies = store.exchange(number, &totals.collect::<Vec<_>>(), WAIT).await.expect("a reply");
        assert!(replies.iter().all(Result::is_ok));
    }
}

async fn decided(store: &RedisStore, ids: &[String], counters: usize) {
    for ids in ids.chunks(BATCH) {
        let cells: Vec<Vec<Cell>> = ids.iter().map(|id| cells(id, counters)).collect();
        let answers = join_all(cells.iter().map(|cells| store.check(At::StoreClock, Charge::Commit, cells))).await;
        assert!(answers.iter().all(Result::is_ok));
    }
}

fn cells(id: &str, counters: usize) -> Vec<Cell> {
    let algorithm = Algorithm::sliding_window(HOUR_US, LIMIT);
    let rules = ["strict", "strict-2", "strict-3"].into_iter().take(counters);
    rules.map(|rule| Cell { key: key(id, rule), algorithm, cost: 1, enforced: true }).collect()
}

fn key(id: &str, rule: &str) -> CounterKey {
    CounterKey { identity: Identity::User(id.into()), rule: rule.into() }
}

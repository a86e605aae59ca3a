//! Ten minutes without Redis and with ever new keys, by a clock that the test moves: memory stays within its bound, and what
//! Redis never hears of is counted. 20,000 keys a second where there is time for that, else 2,000.

use std::{fs, sync::Arc, time::Duration};

use limiter_common::sliding_window::Outcome;
use limiter_tests::{chaos, eventually::eventually, redis_server::RedisServer};
use limiter_user::{
    clock::{Clock as _, SharedClock},
    store::{
        Algorithm, Cell, Charge, CounterKey, Identity,
        memory::MemoryStore,
        redis::{RedisConfig, RedisStore},
        sync::{SyncConfig, SyncState, SyncWorker},
    },
};

const SECOND_US: u64 = 1_000_000;
const WAIT: Duration = Duration::from_secs(60);
/// What a counter may cost, as the documentation says, and what a process needs besides.
const BYTES_PER_COUNTER: usize = 256;
const BESIDES: usize = 48 << 20;

struct Partition {
    seconds: u64,
    keys_per_second: u64,
    window_us: u64,
    max_counters: usize,
}

/// Memory of this process that is there.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

/// How many counters Redis has ever had: each is made once. All is asked at once, since counters expire meanwhile.
async fn ever_in(server: &RedisServer) -> u64 {
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let mut questions = redis::pipe();
    questions.atomic().cmd("INFO").arg("stats").cmd("DBSIZE").cmd("EXISTS").arg("rl:{nodes}:live");
    questions.cmd("KEYS").arg("rl:*:mark");
    let (stats, keys, of_nodes, marks): (String, u64, u64, Vec<String>) =
        questions.query_async(&mut connection).await.unwrap();
    let expired = stats.lines().find_map(|line| line.strip_prefix("expired_keys:")?.trim().parse().ok());
    expired.unwrap_or(0u64) + keys - of_nodes - marks.len() as u64
}

/// What was admitted, what was dropped because its window was over, and what for want of room.
async fn pass_through(partition: &Partition) -> (u64, u64, u64) {
    let Partition { seconds, keys_per_second, window_us, max_counters } = *partition;
    let mut server = RedisServer::start().await;
    server.kill();
    let clock = Arc::new(SharedClock::new());
    let memory = Arc::new(MemoryStore::shared(clock.clone(), max_counters));
    let redis = RedisStore::connect(&RedisConfig::new(server.url())).unwrap();
    let mut config = SyncConfig::default();
    // The machine may be busy: a message that is repeated would make counters anew that are over.
    config.batch_deadline = Duration::from_secs(10);
    // So that of all keys only counters expire.
    config.heartbeat = Duration::from_secs(600);
    let mut worker = SyncWorker::new(memory.clone(), redis, clock.clone(), config);
    let before = resident();
    let mut admitted = 0;
    // It ends now, by Redis' clock.
    let begin_us = -(seconds * SECOND_US).cast_signed();
    let algorithm = Algorithm::sliding_window(window_us, 100);
    for tick in 0..seconds * 10 {
        clock.set_offset_us(begin_us + (tick * SECOND_US / 10).cast_signed());
        let now = clock.now();
        for number in 0..keys_per_second / 10 {
            let name = tick * keys_per_second / 10 + number;
            let key = CounterKey { identity: Identity::User(format!("{name:012}").as_str().into()), rule: "r".into() };
            let outcome =
                memory.decide(now, Charge::Commit, &[Cell { key, algorithm, cost: 1, enforced: true }])[0].outcome;
            assert_eq!(outcome, Outcome::Allowed);
            admitted += 1;
        }
        if tick % 10 == 0 {
            memory.sweep(now);
            worker.round().await;
            assert_eq!(worker.status().get().state, SyncState::Degraded);
        }
        let stats = memory.stats();
        assert!(stats.counters <= max_counters && stats.queued <= max_counters, "{stats:?}");
    }
    let grown = resident().saturating_sub(before);
    assert!(grown <= max_counters * BYTES_PER_COUNTER + BESIDES, "{grown} bytes for {max_counters} counters");

    // What Redis has and what was dropped is everything.
    clock.set_offset_us(0);
    server.restart().await;
    eventually(WAIT, async || {
        worker.round().await;
        let stats = worker.status().get();
        let is_done = stats.state == SyncState::Connected && memory.stats().queued == 0;
        if is_done { Ok(()) } else { Err((stats, memory.stats())) }
    })
    .await;
    let stats = memory.stats();
    let (over, evicted) = (stats.late_units, stats.evicted_unconfirmed_units);
    let there = ever_in(&server).await;
    chaos::tell(&format!(
        "{admitted} counters, room for {max_counters}: {grown} bytes, {there} in Redis, {over} too late, {evicted} evicted"
    ));
    assert_eq!(there + over + evicted, admitted, "{there} in Redis, {over} too late, {evicted} for want of room");
    assert!(there > 0);
    (admitted, over, evicted)
}

fn keys_per_second() -> u64 {
    if chaos::is_long() { 20_000 } else { 2_000 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_minutes_without_redis_cost_what_belongs_to_windows_that_are_over() {
    let (seconds, keys_per_second, window_us) = (600, keys_per_second(), 5 * SECOND_US);
    // Those of two windows, which is as long as a counter matters, and half as many again.
    let of_two_windows = 10 * keys_per_second;
    let max_counters = usize::try_from(of_two_windows).unwrap() * 3 / 2;
    let (admitted, over, evicted) =
        pass_through(&Partition { seconds, keys_per_second, window_us, max_counters }).await;
    assert_eq!((admitted, evicted), (seconds * keys_per_second, 0));
    // Those of the last two windows are sent, as far as they are not over meanwhile.
    assert!(over >= admitted - of_two_windows, "{over}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_counters_than_there_is_room_for_are_given_up_and_counted() {
    let (seconds, keys_per_second, window_us) = (60, keys_per_second(), 3600 * SECOND_US);
    let max_counters = usize::try_from(5 * keys_per_second).unwrap();
    let (admitted, over, evicted) =
        pass_through(&Partition { seconds, keys_per_second, window_us, max_counters }).await;
    assert_eq!((admitted, over), (seconds * keys_per_second, 0));
    assert!(evicted >= admitted - max_counters as u64, "{evicted}");
}

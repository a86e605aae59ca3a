//! What only a store behind a network can get wrong.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use limiter_common::sliding_window::{Counts, Outcome, Window};
use limiter_tests::{eventually::eventually, redis_server::RedisServer, vectors};
use limiter_user::{
    clock::Stopwatch,
    config::Secret,
    store::{
        Algorithm, At, Cell, Charge, Store, StoreError,
        algorithm::View,
        counter::{LoggedAdmission, OwnState, OwnTotals, SharedCounts},
        redis::{RedisConfig, RedisStore, redis_key},
    },
};

use super::behaviour::{MINUTE, T0, cell, check, every, is_denied, peek, refund, user};

const SECOND: u64 = 1_000_000;
const WAIT: Duration = Duration::from_secs(30);

/// A store with more patience than a request has: what is tested is answers, on a machine that may be busy.
fn store(server: &RedisServer) -> RedisStore {
    let mut config = RedisConfig::new(server.url());
    config.timeout = WAIT;
    RedisStore::connect(&config).unwrap()
}

async fn keys(server: &RedisServer) -> Vec<String> {
    server.run(&["KEYS", "*"]).await
}

async fn ttl_ms(server: &RedisServer, key: &str) -> i64 {
    server.run(&["PTTL", key]).await
}

fn script(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../lua");
    let read = |file: &str| std::fs::read_to_string(format!("{folder}/{file}")).unwrap();
    format!("{}\n{}", read("lib/counter.lua"), read(name))
}

/// Runs calls of `decide.lua` inside one call: within a script nothing expires, and the windows go down to a microsecond.
async fn run_inside(server: &RedisServer, key: &str, calls: impl Iterator<Item = [u64; 7]>) -> Vec<Vec<i64>> {
    let mut harness = String::from("local replies = {}\nlocal function step(KEYS, ARGV)\n");
    harness.push_str(&script("decide.lua"));
    harness.push_str("\nend\n");
    for [now_us, now_ns, algorithm, window_us, most, interval_ns, cost] in calls {
        writeln!(
            harness,
            "replies[#replies + 1] = step(KEYS, {{'{now_us}', '{now_ns}', '1', '{algorithm}', '{window_us}', '{most}', \
             '{interval_ns}', '0', '{cost}', '1'}})"
        )
        .unwrap();
    }
    harness.push_str("return replies\n");
    server.run(&["EVAL", &harness, "1", key]).await
}

/// The text of the script itself against every vector.
#[tokio::test]
async fn the_script_gives_the_answers_of_all_vectors() {
    let server = RedisServer::start().await;
    for case in vectors::sliding_window() {
        let calls = case.steps.iter().map(|step| [step.now_us, 0, 1, case.window_us, case.ceiling, 0, step.cost]);
        let replies = run_inside(&server, &case.name, calls).await;
        assert_eq!(replies.len(), case.steps.len());
        for (number, (step, reply)) in case.steps.iter().zip(replies).enumerate() {
            let outcome = outcome(step.allowed, step.never);
            let index = step.now_us / case.window_us;
            let expected = [step.now_us, 0, 0, outcome, index, step.previous, step.current].map(u64::cast_signed);
            assert_eq!(reply, expected, "{} step {number}", case.name);
        }
    }
}

const fn outcome(allowed: bool, never: bool) -> u64 {
    match (allowed, never) {
        (true, _) => 1,
        (false, true) => (-1i64).cast_unsigned(),
        (false, false) => 0,
    }
}

/// To the nanosecond, at times that no double holds.
#[tokio::test]
async fn the_script_gives_the_answers_of_all_gcra_vectors() {
    let server = RedisServer::start().await;
    for case in vectors::gcra() {
        let interval_ns = case.emission_interval_ns;
        let calls = case.steps.iter().map(|step| {
            // What costs nothing is asked as a peek, which has no step of its own here.
            [step.now_ns / 1000, step.now_ns % 1000, 3, MINUTE, case.burst, interval_ns, step.cost]
        });
        let replies = run_inside(&server, &case.name, calls).await;
        assert_eq!(replies.len(), case.steps.len());
        for (number, (step, reply)) in case.steps.iter().zip(replies).enumerate() {
            let [_, 0, 0, outcome_of, tat_us, tat_ns, lacked_ns] = reply[..] else { panic!("{reply:?}") };
            assert_eq!(outcome_of, outcome(step.conforming, step.never).cast_signed(), "{} step {number}", case.name);
            let tat_ns = tat_us.cast_unsigned() * 1000 + tat_ns.cast_unsigned();
            // A bucket that is full is full, however long ago it was filled.
            assert_eq!(
                tat_ns.saturating_sub(step.now_ns),
                step.tat_ns.saturating_sub(step.now_ns),
                "{} step {number}",
                case.name
            );
            if let Some(retry_after_ns) = step.retry_after_ns {
                let most = interval_ns * case.burst - interval_ns * step.cost;
                assert_eq!(lacked_ns.cast_unsigned() - most, retry_after_ns, "{} step {number}", case.name);
            }
        }
    }
}

#[tokio::test]
async fn scripts_come_back_after_script_flush() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let cells = [cell(user("u", "r"), 10)];
    assert_eq!(check(&store, T0, &cells).await[0].remaining, 9);
    let () = server.run(&["SCRIPT", "FLUSH"]).await;
    assert_eq!(check(&store, T0, &cells).await[0].remaining, 8);
    assert_eq!(store.calls().scripts_loaded, 2);
}

#[tokio::test]
async fn a_restarted_server_is_used_again() {
    let mut server = RedisServer::start().await;
    let store = store(&server);
    let cells = [cell(user("u", "r"), 10)];
    check(&store, T0, &cells).await;
    server.kill();
    let refused = eventually(WAIT, async || match store.check(At::StoreClock, Charge::Commit, &cells).await {
        Err(error @ StoreError::Unavailable { .. }) => Ok(error),
        other => Err(other),
    })
    .await;
    assert!(refused.to_string().contains(&server.port().to_string()), "{refused}");
    server.restart().await;
    eventually(WAIT, async || store.check(At::StoreClock, Charge::Commit, &cells).await).await;
    let calls = store.calls();
    assert!(calls.ok >= 2 && calls.unavailable >= 1, "{calls:?}");
    assert_eq!(
        calls.buckets.iter().sum::<u64>(),
        calls.ok + calls.timeout + calls.unavailable + calls.bad_reply,
        "{calls:?}"
    );
}

#[tokio::test]
async fn a_store_made_before_redis_runs_finds_it_later() {
    let mut server = RedisServer::start().await;
    server.kill();
    let store = store(&server);
    let cells = [cell(user("u", "r"), 10)];
    let error = store.check(At::StoreClock, Charge::Commit, &cells).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    server.restart().await;
    eventually(WAIT, async || store.check(At::StoreClock, Charge::Commit, &cells).await).await;
}

#[tokio::test]
async fn a_wrong_password_is_unavailable_and_not_shown() {
    let server = RedisServer::start_with(&["--requirepass", "hunter2"]).await;
    let cells = [cell(user("u", "r"), 10)];
    let with_password = |password: Option<&str>| {
        let mut config = RedisConfig::new(server.url());
        config.password = password.map(|password| Secret::new(password.into()));
        config.timeout = WAIT;
        RedisStore::connect(&config).unwrap()
    };
    for password in [Some("hunter3"), None] {
        let error = with_password(password).check(At::StoreClock, Charge::Commit, &cells).await.unwrap_err();
        assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
        assert!(!error.to_string().contains("hunter"), "{error}");
    }
    with_password(Some("hunter2")).check(At::StoreClock, Charge::Commit, &cells).await.unwrap();
}

#[tokio::test]
async fn errors_of_the_server_are_told_apart() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let cells = [cell(user("u", "r"), 10)];
    check(&store, T0, &cells).await;
    let () = server.run(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let error = store.check(At::StoreClock, Charge::Commit, &cells).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("OOM"), "{error}");
    let () = server.run(&["CONFIG", "SET", "maxmemory", "0"]).await;
    let () = server.run(&["REPLICAOF", "127.0.0.1", "1"]).await;
    let error = store.check(At::StoreClock, Charge::Commit, &cells).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    let () = server.run(&["REPLICAOF", "NO", "ONE"]).await;
    eventually(WAIT, async || store.check(At::StoreClock, Charge::Commit, &cells).await).await;
}

#[tokio::test]
async fn every_key_has_a_ttl_of_at_most_two_windows() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let mut seen = BTreeSet::new();
    for (name, window_us) in
        [("2s", 2 * SECOND), ("10s", 10 * SECOND), ("1m", MINUTE), ("1h", 60 * MINUTE), ("30d", 30 * 24 * 60 * MINUTE)]
    {
        let key = user(name, "ttl");
        let cells = [Cell { algorithm: Algorithm::sliding_window(window_us, 10), ..cell(key.clone(), 10) }];
        store.check(At::StoreClock, Charge::Commit, &cells).await.unwrap();
        let longest_ms = i64::try_from(window_us / 500).unwrap();
        let ttl = ttl_ms(&server, &redis_key(&key)).await;
        assert!((longest_ms - 1_500..=longest_ms).contains(&ttl), "{name}: {ttl} ms");
        // Redis' own unit of seconds, seen from outside.
        let seconds: u64 = server.run(&["TTL", &redis_key(&key)]).await;
        assert!(seconds <= 2 * window_us / SECOND, "{name}: {seconds} s");
        seen.insert(redis_key(&key));
    }
    assert_eq!(keys(&server).await.into_iter().collect::<BTreeSet<_>>(), seen);
}

/// A window shorter than Redis' clock ticks still gets a TTL, and the key goes.
#[tokio::test]
async fn the_shortest_windows_expire() {
    let server = RedisServer::start().await;
    let store = store(&server);
    for window_us in [1, 7, 400, 1_000, 20_000] {
        let key = user(&window_us.to_string(), "short");
        let cells = [Cell { algorithm: Algorithm::sliding_window(window_us, 10), ..cell(key.clone(), 10) }];
        let outcome = store.check(At::StoreClock, Charge::Commit, &cells).await.unwrap()[0].outcome;
        assert_eq!(outcome, Outcome::Allowed);
        let ttl = ttl_ms(&server, &redis_key(&key)).await;
        assert!(ttl == -2 || (0..=40).contains(&ttl), "{window_us} us: {ttl} ms");
    }
    eventually(WAIT, async || match keys(&server).await {
        keys if keys.is_empty() => Ok(()),
        keys => Err(keys),
    })
    .await;
}

#[tokio::test]
async fn a_lost_ttl_comes_back_whatever_touches_the_key() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let key = redis_key(&user("u", "persist"));
    let cells = [cell(user("u", "persist"), 2)];
    let longest = 2 * 60_000;
    let lose = async || {
        let persisted: u32 = server.run(&["PERSIST", &key]).await;
        assert_eq!((persisted, ttl_ms(&server, &key).await), (1, -1));
    };
    let restored = async |by: &str| {
        let ttl = ttl_ms(&server, &key).await;
        assert!((1..=longest).contains(&ttl), "{by}: {ttl}");
    };
    check(&store, T0, &cells).await;
    lose().await;
    check(&store, T0, &cells).await;
    restored("a charge").await;
    lose().await;
    assert!(is_denied(check(&store, T0, &cells).await[0].outcome));
    restored("a denial").await;
    lose().await;
    peek(&store, T0, &cells).await;
    restored("a peek").await;
    let () = server.run(&["PEXPIRE", &key, "999999999"]).await;
    peek(&store, T0, &cells).await;
    restored("a TTL that is too long").await;
    lose().await;
    exchange(&store, 7, OwnTotals { window_us: MINUTE, ..totals("u", "persist", 0, 0, 0) }).await;
    restored("sync without anything new").await;
    lose().await;
    refund(&store, T0, &cells).await;
    restored("a refund").await;
}

#[tokio::test]
async fn what_is_no_counter_is_replaced_and_counted() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let key = redis_key(&user("u", "foreign"));
    let cells = [cell(user("u", "foreign"), 2)];
    let empty_table = "\u{90}";
    for (replaced, words) in [
        ["RPUSH", &key, "a"],
        ["SADD", &key, "a"],
        ["SET", &key, "not a counter"],
        ["SET", &key, ""],
        ["SET", &key, empty_table],
        // As long as a counter, and as a text a number or none.
        ["SET", &key, "1234567"],
        ["SET", &key, "\u{a0}12345"],
    ]
    .iter()
    .enumerate()
    {
        let () = server.run(&["DEL", &key]).await;
        let () = server.run(words).await;
        let answers = [check(&store, T0, &cells).await[0], check(&store, T0, &cells).await[0]];
        assert_eq!(answers.map(|answer| answer.remaining), [1, 0], "{words:?}");
        assert!(is_denied(check(&store, T0, &cells).await[0].outcome), "{words:?}");
        assert!(ttl_ms(&server, &key).await > 0, "{words:?}");
        assert_eq!(store.calls().replaced_values, replaced as u64 + 1, "{words:?}");
    }
    let () = server.run(&["DEL", &key]).await;
    let () = server.run(&["LPUSH", &key, "a"]).await;
    let reply = exchange(&store, 7, totals("u", "foreign", 0, 0, 3)).await;
    assert!(reply.replaced);
    assert_eq!(own(&reply), (0, 0), "an index of 1970 is over");
}

#[tokio::test]
async fn redis_clock_decides_when_no_time_is_given() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let cells = [cell(user("u", "clock"), 10)];
    let reset_us = store.check(At::StoreClock, Charge::Commit, &cells).await.unwrap()[0].reset_us;
    let now_us = store.time_us(WAIT).await.unwrap();
    assert!(reset_us > now_us - 1 && reset_us <= now_us + MINUTE, "{now_us} {reset_us}");
}

fn totals(name: &str, rule: &str, index: u64, previous: u64, current: u64) -> OwnTotals {
    let state = OwnState::Windows { counts: Counts { index, previous, current }, acknowledged_current: 0 };
    OwnTotals { key: user(name, rule), tag: 0, window_us: 60 * MINUTE, state }
}

type Reply = limiter_user::store::redis::SyncReply;

fn sums(reply: &Reply) -> Counts {
    match reply.shared {
        SharedCounts::Windows { counts, .. } => counts,
        SharedCounts::Bucket { .. } | SharedCounts::Log { .. } => panic!("{reply:?}"),
    }
}

fn own(reply: &Reply) -> (u64, u64) {
    match reply.shared {
        SharedCounts::Windows { own_previous, own_current, .. } => (own_previous, own_current),
        SharedCounts::Bucket { .. } | SharedCounts::Log { .. } => panic!("{reply:?}"),
    }
}

/// The index of an hour's window by Redis' clock. A test that runs into the next hour meets it as `previous`, so it
/// waits for the hour to end first when only seconds are left.
async fn this_hour(store: &RedisStore) -> u64 {
    let hour = 60 * MINUTE;
    eventually(Duration::from_secs(20), async || {
        let now = store.time_us(WAIT).await.unwrap();
        if hour - now % hour > 10 * SECOND { Ok(now / hour) } else { Err("the hour is about to end") }
    })
    .await
}

/// With a number above all before it.
async fn exchange(store: &RedisStore, tag: u32, sent: OwnTotals) -> Reply {
    static NUMBER: AtomicU64 = AtomicU64::new(1000);
    exchange_numbered(store, tag, NUMBER.fetch_add(1, Ordering::Relaxed), sent).await
}

async fn exchange_numbered(store: &RedisStore, tag: u32, number: u64, sent: OwnTotals) -> Reply {
    store.exchange(number, &[OwnTotals { tag, ..sent }], WAIT).await.unwrap().remove(0).unwrap()
}

#[tokio::test]
async fn totals_sent_twice_count_once() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let hour = this_hour(&store).await;
    let send = async |node, number, previous, current| {
        let reply = exchange_numbered(&store, node, number, totals("u", "sync", hour, previous, current)).await;
        let (sums, own) = (sums(&reply), own(&reply));
        (sums.previous, sums.current, own.0, own.1)
    };
    assert_eq!(send(1, 1, 5, 10).await, (5, 10, 5, 10));
    assert_eq!(send(1, 1, 5, 10).await, (5, 10, 5, 10), "the same again");
    assert_eq!(send(1, 2, 5, 10).await, (5, 10, 5, 10), "the same in another message");
    assert_eq!(send(2, 1, 0, 7).await, (5, 17, 0, 7));
    assert_eq!(send(2, 1, 0, 7).await, (5, 17, 0, 7));
    assert_eq!(send(1, 3, 5, 12).await, (5, 19, 5, 12), "only what is new");
    assert_eq!(send(1, 2, 5, 10).await, (5, 19, 5, 12), "an old batch that was under way for long");
    assert_eq!(send(1, 4, 5, 9).await, (5, 16, 5, 9), "three were given back");
    assert_eq!(send(1, 3, 5, 12).await, (5, 16, 5, 9), "and are not taken again by what was said before");
    assert_eq!(send(1, 5, 4, 0).await, (4, 7, 4, 0));
    assert_eq!(send(1, 6, 5, 12).await, (5, 19, 5, 12));
    assert_eq!(send(3, 2, 0, 0).await, (5, 19, 0, 0), "all of it was given back before anything arrived");
    assert_eq!(send(3, 1, 0, 3).await, (5, 19, 0, 0), "and what was said before that is late");
    assert!(ttl_ms(&server, &redis_key(&user("u", "sync"))).await > 0);
    // And the script that decides sees the sums.
    let algorithm = Algorithm::sliding_window(60 * MINUTE, 1000);
    let at = At::Given(limiter_common::time::UnixMicros::new(hour * 60 * MINUTE));
    let cells = [Cell { algorithm, ..cell(user("u", "sync"), 0) }];
    assert_eq!(store.check(at, Charge::Peek, &cells).await.unwrap()[0].remaining, 1000 - 19 - 5);
}

#[tokio::test]
async fn a_question_that_is_late_lends_nothing() {
    let server = RedisServer::start().await;
    let lease = script("lease.lua");
    let say = async |number: u64, has: u64, want: u64| {
        let [number, has, want] = [number, has, want].map(|number| number.to_string());
        let (hour, now): (String, (u64, u64)) = ((60 * MINUTE).to_string(), server.run(&["TIME"]).await);
        let index = (now.0 / 3600).to_string();
        let words = [
            "EVAL",
            &lease,
            "1",
            "rl:{user:u}:l",
            "7",
            &number,
            "2",
            &hour,
            "10",
            &index,
            "0",
            &has,
            &want,
            &want,
            "1",
        ];
        let reply: [u64; 7] = server.run::<Vec<u64>>(&words).await.try_into().unwrap();
        // What was lent, what all have, what this node has.
        (reply[2], reply[5], reply[6])
    };
    // The node has given up waiting for the first, and says that it has nothing.
    assert_eq!(say(2, 0, 0).await, (0, 0, 0));
    assert_eq!(say(1, 0, 4).await, (0, 0, 0), "it is late");
    assert_eq!(say(3, 0, 4).await, (4, 4, 4));
    assert_eq!(say(5, 1, 0).await, (0, 1, 1), "the rest goes back");
    assert_eq!(say(4, 4, 4).await, (0, 1, 1), "also late");
    assert_eq!(say(6, 1, 0).await, (0, 1, 1), "nothing new");
    assert_eq!(say(5, 4, 4).await, (0, 1, 1));
    assert!((1..=2 * 3_600_000).contains(&ttl_ms(&server, "rl:{user:u}:l").await));
}

/// One unit an hour: what a test does takes no time by that.
const HOURLY_NS: u64 = 3_600_000_000_000;

/// What a node says that has taken `total` of a bucket of 100 and believes it to lack `lacks` units.
fn bucket_totals(name: &str, now_us: u64, total: u64, acknowledged: u64, lacks: u64) -> OwnTotals {
    let (interval_ns, fill_ns) = (HOURLY_NS, 100 * HOURLY_NS);
    let state =
        OwnState::Bucket { interval_ns, fill_ns, total, acknowledged, tat_ns: now_us * 1000 + lacks * HOURLY_NS };
    OwnTotals { key: user(name, "bucket"), tag: 0, window_us: 60 * MINUTE, state }
}

/// Units that the bucket of all nodes lacks, and this node's part.
fn lacks(reply: &Reply) -> (u64, u64) {
    let SharedCounts::Bucket { tat_ns, own_total } = reply.shared else { panic!("{reply:?}") };
    // Rounded to the nearest: a test takes less than half an hour.
    (tat_ns.saturating_sub(reply.now_us * 1000).saturating_add(HOURLY_NS / 2) / HOURLY_NS, own_total)
}

#[tokio::test]
async fn totals_of_buckets_sent_twice_count_once() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let now_us = store.time_us(WAIT).await.unwrap();
    let send = async |node, number, total, acknowledged, believes| {
        let sent = bucket_totals("u", now_us, total, acknowledged, believes);
        lacks(&exchange_numbered(&store, node, number, sent).await)
    };
    assert_eq!(send(1, 1, 10, 0, 10).await, (10, 10));
    assert_eq!(send(1, 1, 10, 0, 10).await, (10, 10), "the same again");
    assert_eq!(send(1, 2, 10, 0, 10).await, (10, 10), "the same in another message");
    assert_eq!(send(2, 1, 7, 0, 7).await, (17, 7), "both together");
    assert_eq!(send(1, 3, 12, 10, 12).await, (19, 12), "only what is new");
    assert_eq!(send(1, 2, 10, 0, 10).await, (19, 12), "an old batch that was under way for long");
    assert_eq!(send(1, 4, 8, 12, 15).await, (15, 8), "four were given back");
    assert_eq!(send(1, 3, 12, 10, 12).await, (15, 8));
    // Taken long ago and come back since: what the node still misses is what counts.
    assert_eq!(send(3, 1, 1_000_000, 0, 5).await, (20, 1_000_000));
    // Never more than the whole bucket from one node at a time, which is owed where it was not there, and never more than full.
    assert_eq!(send(3, 2, 2_000_000, 1_000_000, 500).await, (120, 2_000_000));
    assert_eq!(send(2, 2, 57, 7, 150).await, (170, 57));
    assert_eq!(send(1, 5, 0, 8, 150).await, (162, 0));
    assert!((1..=163 * 3_600_000).contains(&ttl_ms(&server, &redis_key(&user("u", "bucket"))).await));
    assert_eq!(send(3, 3, 0, 2_000_000, 0).await, (0, 0));
    assert!((1..=100 * 3_600_000).contains(&ttl_ms(&server, &redis_key(&user("u", "bucket"))).await));
}

#[tokio::test]
async fn a_bucket_that_redis_has_lost_is_filled_by_what_nodes_see() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let now_us = store.time_us(WAIT).await.unwrap();
    let send = async |node, total, acknowledged, believes| {
        lacks(&exchange(&store, node, bucket_totals("lost", now_us, total, acknowledged, believes)).await)
    };
    assert_eq!(send(1, 10, 0, 10).await, (10, 10));
    assert_eq!(send(2, 7, 0, 7).await, (17, 7));
    let () = server.run(&["FLUSHALL"]).await;
    // Each saw the other's part, so they are not added up; what is new is.
    assert_eq!(send(1, 11, 10, 18).await, (18, 11));
    assert_eq!(send(2, 9, 7, 19).await, (20, 9));
}

#[tokio::test]
async fn admissions_sent_twice_count_once() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let now_us = store.time_us(WAIT).await.unwrap();
    // Number, seconds ago, cost.
    let send = async |tag, admissions: &[(u32, u64, u64)]| {
        let admission = |&(number, ago, cost): &(u32, u64, u64)| LoggedAdmission {
            tag,
            number,
            at_us: now_us - ago * SECOND,
            cost,
        };
        let state = OwnState::Log { admissions: admissions.iter().map(admission).collect() };
        let sent = OwnTotals { key: user("u", "log"), tag, window_us: 60 * MINUTE, state };
        match exchange(&store, tag, sent).await.shared {
            SharedCounts::Log { admissions } => {
                admissions.iter().map(|a| (a.tag, (now_us - a.at_us) / SECOND, a.cost)).collect::<Vec<_>>()
            }
            other @ (SharedCounts::Windows { .. } | SharedCounts::Bucket { .. }) => panic!("{other:?}"),
        }
    };
    assert_eq!(send(1, &[(0, 100, 2), (1, 50, 1)]).await, [(1, 100, 2), (1, 50, 1)]);
    assert_eq!(send(1, &[(0, 100, 2), (1, 50, 1)]).await, [(1, 100, 2), (1, 50, 1)], "the same again");
    // Those of another node have their places by time.
    assert_eq!(send(2, &[(0, 200, 5), (1, 70, 3)]).await, [(2, 200, 5), (1, 100, 2), (2, 70, 3), (1, 50, 1)]);
    // Given back, and then told by an old message.
    assert_eq!(send(1, &[(0, 100, 0)]).await, [(2, 200, 5), (1, 100, 0), (2, 70, 3), (1, 50, 1)]);
    assert_eq!(send(1, &[(0, 100, 2)]).await, [(2, 200, 5), (1, 100, 0), (2, 70, 3), (1, 50, 1)]);
    // What is over does not count.
    assert_eq!(send(2, &[(2, 3601, 9)]).await.len(), 4);
    let cells = [Cell { algorithm: every(10, 60 * MINUTE)[4].1, ..cell(user("u", "log"), 0) }];
    assert_eq!(store.check(At::StoreClock, Charge::Peek, &cells).await.unwrap()[0].remaining, 1);
}

#[tokio::test]
async fn a_value_has_room_for_so_many_nodes() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let hour = this_hour(&store).await;
    for node in 1..=300 {
        let reply = exchange(&store, node, totals("u", "many", hour, 0, 2)).await;
        assert_eq!((sums(&reply).current, own(&reply)), (2 * u64::from(node), (0, 2)));
    }
    let size: usize = server.run(&["STRLEN", &redis_key(&user("u", "many"))]).await;
    assert!(size < 256 * 16, "{size}");
}

#[tokio::test]
async fn every_algorithm_leaves_a_key_with_a_ttl() {
    let server = RedisServer::start().await;
    let store = store(&server);
    for (name, algorithm) in every(10, MINUTE) {
        let key = redis_key(&user("u", name));
        let cells = [Cell { algorithm, ..cell(user("u", name), 0) }];
        store.check(At::StoreClock, Charge::Commit, &cells).await.unwrap();
        for by in ["a charge", "a refund", "a peek"] {
            let charge = match by {
                "a charge" => Charge::Commit,
                "a refund" => Charge::Refund,
                _ => Charge::Peek,
            };
            let persisted: u32 = server.run(&["PERSIST", &key]).await;
            assert_eq!(persisted, 1, "{name}");
            store.check(At::StoreClock, charge, &cells).await.unwrap();
            assert!((1..=120_000).contains(&ttl_ms(&server, &key).await), "{name} {by}");
        }
    }
}

#[tokio::test]
async fn an_empty_server_is_filled_again_by_what_nodes_know() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let hour = this_hour(&store).await;
    exchange(&store, 1, totals("u", "sync", hour, 5, 10)).await;
    exchange(&store, 2, totals("u", "sync", hour, 0, 7)).await;
    let () = server.run(&["FLUSHALL"]).await;
    let reply = exchange(&store, 1, totals("u", "sync", hour, 5, 11)).await;
    assert_eq!((reply.known, sums(&reply).current), (Some(0), 11));
    let reply = exchange(&store, 2, totals("u", "sync", hour, 0, 7)).await;
    assert_eq!((sums(&reply).previous, sums(&reply).current), (5, 18));
}

#[tokio::test]
async fn totals_of_other_windows_go_where_they_belong() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let hour = this_hour(&store).await;
    let reply = exchange(&store, 1, totals("late", "sync", hour - 1, 3, 10)).await;
    assert_eq!((reply.ahead, sums(&reply)), (false, Counts { index: hour, previous: 10, current: 0 }));
    let reply = exchange(&store, 1, totals("over", "sync", hour - 2, 3, 10)).await;
    assert_eq!((reply.known, sums(&reply)), (None, Counts { index: hour, previous: 0, current: 0 }));
    let reply = exchange(&store, 1, totals("early", "sync", hour + 1, 3, 10)).await;
    assert_eq!((reply.ahead, sums(&reply)), (false, Counts { index: hour + 1, previous: 3, current: 10 }));
    let reply = exchange(&store, 2, totals("early", "sync", hour, 0, 4)).await;
    assert_eq!(sums(&reply), Counts { index: hour + 1, previous: 7, current: 10 });
    assert_eq!(own(&reply).0, 4);
    let reply = exchange(&store, 1, totals("ahead", "sync", hour + 2, 3, 10)).await;
    assert_eq!((reply.ahead, sums(&reply)), (true, Counts { index: hour, previous: 0, current: 0 }));
    assert_eq!(keys(&server).await.len(), 2, "nothing was written for totals that were not taken");
}

#[tokio::test]
async fn sums_stop_at_what_lua_can_count() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let hour = this_hour(&store).await;
    let most = (1 << 53) - 1;
    for node in 1..=3 {
        let reply = exchange(&store, node, totals("u", "large", hour, u64::MAX, 1 << 53)).await;
        assert_eq!((sums(&reply).previous, sums(&reply).current), (most, most));
        assert_eq!(own(&reply), (most, most));
    }
}

/// What counters are written as, and that they are read as what was written, in the short form and beyond it.
#[tokio::test]
async fn counters_are_read_as_they_were_written() {
    let server = RedisServer::start().await;
    let library = script("sync.lua");
    let library = library.split_once("-- sync.lua").unwrap().0;
    let golden = include_str!("../../golden/counter_values.txt").lines().filter(|line| !line.starts_with('#'));
    let mut counters: Vec<(Vec<u64>, Option<String>)> = golden
        .map(|line| {
            let (numbers, value) = line.split_once(" = ").unwrap();
            (numbers.split(' ').map(|number| number.parse().unwrap()).collect(), Some(value.replace(' ', "")))
        })
        .collect();
    let goldens = counters.len();
    // At every edge of what the short form has room for, alone and beside one node or more.
    let edges = |bits: &[u32]| -> Vec<u64> { bits.iter().flat_map(|bit| [(1 << bit) - 1, 1 << bit]).collect() };
    let windows = [1, 999_999, SECOND, 3 * SECOND / 2, 16_383 * SECOND, 16_384 * SECOND, MINUTE, 60 * MINUTE];
    let days = [1, 30, 16_383, 16_384].map(|days| days * 24 * 60 * MINUTE);
    for (place, value) in (windows.into_iter().chain(days).map(|window| (1, window)))
        .chain(edges(&[24, 32]).into_iter().map(|index| (2, index)))
        .chain(edges(&[8, 12, 16, 20, 52]).into_iter().flat_map(|count| [3, 4, 7, 8, 11, 12].map(|at| (at, count))))
        .chain(edges(&[24, 32]).into_iter().flat_map(|number| [6, 10].map(|at| (at, number))))
    {
        for nodes in 0..=3 {
            let mut numbers = vec![1, 60 * MINUTE, 491_304, 0, 0];
            numbers.extend((0..nodes).flat_map(|node| [u32::MAX.into(), node, 2, 3]));
            if place < 5 || place < numbers.len() {
                numbers[place] = value;
            }
            // The sums as they are of these nodes, more than that, and, after units were given back by nobody, less.
            for (more, less) in [(0, 0), (200, 0), (0, 1)] {
                let mut numbers = numbers.clone();
                for sum in [3, 4] {
                    let parts: u64 = numbers[5..].iter().skip(sum - 1).step_by(4).sum();
                    numbers[sum] = (numbers[sum] + parts + more).saturating_sub(less);
                }
                counters.push((numbers, None));
            }
        }
    }
    let mut harness = format!("{library}\nlocal replies = {{}}\nlocal function try(counter)\n");
    harness.push_str(
        "local short = pack_short(counter)
         local read = unpack_counter(short or cmsgpack.pack(counter))
         local same = read and #read == #counter
         for field = 1, #counter do same = same and read[field] == counter[field] end
         replies[#replies + 1] = same and 1 or 0
         replies[#replies + 1] = (string.gsub(short or '', '.', function(byte)
           return string.format('%02x', string.byte(byte))
         end))
         end\n",
    );
    for (numbers, _) in &counters {
        let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
        writeln!(harness, "try({{ {} }})", numbers.join(", ")).unwrap();
    }
    harness.push_str("return replies");
    let replies: Vec<(u8, String)> = server.run(&["EVAL", &harness, "0"]).await;
    assert_eq!(replies.len(), counters.len());
    let mut forms = [0, 0];
    for ((numbers, golden), (same, short)) in counters.iter().zip(replies) {
        assert_eq!(same, 1, "{numbers:?} {short}");
        forms[usize::from(short.is_empty())] += 1;
        if let Some(golden) = golden {
            assert_eq!(&short, golden, "{numbers:?}");
        }
    }
    assert!(forms[0] > goldens + 100 && forms[1] > 100, "short and long: {forms:?}");
}

/// Numbers of every size up to 2^53 - 1, the same ones each time.
struct Sizes(u64);

impl Sizes {
    fn random(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Of up to `bits` bits, and at least 1.
    fn next(&mut self, bits: u64) -> u64 {
        let shift = 64 - (1 + self.random() % bits);
        (self.random() >> shift).max(1)
    }
}

#[tokio::test]
async fn lua_divides_products_of_any_size_exactly() {
    let server = RedisServer::start().await;
    let mut sizes = Sizes(0x9e37_79b9_7f4a_7c15);
    let most = (1 << 53) - 1;
    let mut triples = vec![(most, most, most), (most, most - 1, most), (most, 1, most), (1, most, most), (0, 5, 7)];
    for _ in 0..5_000 {
        let c = sizes.next(53);
        let b = match sizes.random() % 4 {
            0 => c,
            1 => c - c.min(sizes.next(8)),
            _ => sizes.next(53) % (c + 1),
        };
        triples.push((sizes.next(53), b, c));
    }
    let mut large = 0;
    for chunk in triples.chunks(500) {
        let mut harness =
            format!("{}\nlocal replies = {{}}\n", script("sync.lua").split_once("-- sync.lua").unwrap().0);
        for (a, b, c) in chunk {
            writeln!(harness, "do local q, r = muldiv({a}, {b}, {c}) replies[#replies + 1] = {{ q, r }} end").unwrap();
        }
        harness.push_str("return replies");
        let replies: Vec<(u64, u64)> = server.run(&["EVAL", &harness, "0"]).await;
        for (&(a, b, c), (quotient, rest)) in chunk.iter().zip(replies) {
            let product = u128::from(a) * u128::from(b);
            large += u64::from(product > u128::from(most));
            let expected = (product / u128::from(c), product % u128::from(c));
            assert_eq!((u128::from(quotient), u128::from(rest)), expected, "{a} * {b} / {c}");
        }
    }
    assert!(large > 1_000, "{large}");
}

/// The script allows a cost that fits to the unit, and denies it under a ceiling that is one less.
#[tokio::test]
async fn lua_decides_to_the_unit_whatever_the_size() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let mut sizes = Sizes(0xd1b5_4a32_d192_ed03);
    for round in 0..300 {
        let window_us = 5 * SECOND + sizes.next(42);
        let (previous, current, cost) = (sizes.next(50), sizes.next(50), sizes.next(50));
        let index = T0 / window_us;
        let with = |cost, ceiling| {
            let algorithm = Algorithm::sliding_window(window_us, ceiling);
            [Cell { algorithm, cost, ..cell(user(&round.to_string(), "unit"), 0) }]
        };
        let most = (1 << 53) - 1;
        let earlier = check(&store, (index - 1) * window_us, &with(previous, most)).await;
        let now_us = index * window_us + sizes.random() % window_us;
        let window = Window { window_us, ceiling: most };
        let estimate = window.estimate(&Counts { index, previous, current: 0 }, now_us);
        let present = check(&store, now_us, &with(current, estimate + current)).await;
        assert_eq!((earlier[0].outcome, present[0].outcome), (Outcome::Allowed, Outcome::Allowed), "round {round}");
        let fits = estimate + current + cost;
        assert!(is_denied(check(&store, now_us, &with(cost, fits - 1)).await[0].outcome), "round {round}");
        let last = check(&store, now_us, &with(cost, fits)).await[0];
        assert_eq!((last.outcome, last.remaining), (Outcome::Allowed, 0), "round {round}");
    }
}

/// Two nodes have each taken a whole bucket: that is owed, whatever somebody has heard of it.
#[tokio::test]
async fn what_was_heard_of_a_bucket_never_lowers_what_it_owes() {
    let server = RedisServer::start().await;
    let store = store(&server);
    let Algorithm::TokenBucket { bucket, window_us } = every(10, 60 * MINUTE)[2].1 else { panic!("a bucket") };
    let cells = [Cell { algorithm: Algorithm::TokenBucket { bucket, window_us }, ..cell(user("u", "r"), 0) }];
    let now_us = store.time_us(WAIT).await.unwrap();
    let (interval_ns, fill_ns) = (bucket.interval_ns(), bucket.fill_ns());
    let state = OwnState::Bucket { interval_ns, fill_ns, total: 10, acknowledged: 0, tat_ns: now_us * 1000 + fill_ns };
    let totals = [1, 2].map(|tag| OwnTotals { key: cells[0].key.clone(), tag, window_us, state: state.clone() });
    let owed_ns = |shared: &SharedCounts| match shared {
        SharedCounts::Bucket { tat_ns, .. } => (tat_ns - now_us * 1000).saturating_sub(fill_ns),
        SharedCounts::Windows { .. } | SharedCounts::Log { .. } => panic!("{shared:?}"),
    };
    let replies = store.exchange(1, &totals, WAIT).await.unwrap();
    let owed = owed_ns(&replies[1].as_ref().unwrap().shared);
    assert!(owed > fill_ns * 9 / 10, "{owed}");
    // From here on there is a loss, and counters are made what was heard of them.
    let lost = [cell(user("lost", "r"), 100)];
    let heard = [Some(View::Windows(Counts { index: now_us / MINUTE, previous: 0, current: 50 }))];
    store.charge_knowing(&lost, &heard, WAIT).await.unwrap();
    assert_eq!(store.calls().restored_counters, 1);
    let heard = [Some(View::Bucket { tat_ns: now_us * 1000 + 5 * fill_ns })];
    let judged = store.charge_knowing(&cells, &heard, WAIT).await.unwrap()[0];
    let View::Bucket { tat_ns } = judged.view else { panic!("{judged:?}") };
    assert!(is_denied(judged.outcome.outcome));
    assert!(owed_ns(&SharedCounts::Bucket { tat_ns, own_total: 0 }) >= owed, "{judged:?} owed {owed}");
}

/// Deadlines of a few milliseconds.
mod alone {
    use super::*;

    #[tokio::test]
    async fn a_call_ends_at_its_deadline_when_redis_stands_still() {
        let server = RedisServer::start().await;
        let mut config = RedisConfig::new(server.url());
        config.timeout = Duration::from_millis(5);
        config.connect_timeout = Duration::from_millis(200);
        let store = RedisStore::connect(&config).unwrap();
        let cells = [cell(user("u", "r"), 1000)];
        eventually(WAIT, async || store.check(At::StoreClock, Charge::Commit, &cells).await).await;
        server.freeze();
        let watch = Stopwatch::start();
        let mut timeouts = 0;
        for _ in 0..50 {
            match store.check(At::StoreClock, Charge::Commit, &cells).await {
                Err(StoreError::Timeout { after_ms: 5, .. }) => timeouts += 1,
                Err(StoreError::Unavailable { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        let mean = watch.elapsed() / 50;
        assert!(timeouts >= 5, "{timeouts}");
        assert!(mean < Duration::from_millis(15), "{mean:?} a call");
        server.thaw();
        eventually(WAIT, async || store.check(At::StoreClock, Charge::Commit, &cells).await).await;
    }
}

//! Times to live, as somebody sees them who looks at Redis from outside: of every precision, algorithm and window.

use std::{sync::Arc, time::Duration};

use limiter_tests::{
    eventually::eventually,
    fleet_node::{FleetNode, user},
    redis_server::RedisServer,
};
use limiter_user::{clock::Stopwatch, limiter::Kind, store::Charge, store::redis::RedisConfig};

use super::strict::patient;

const WINDOWS: &[(&str, u64)] = &[
    ("1s", 1),
    ("2s", 2),
    ("59s", 59),
    ("61s", 61),
    ("1h", 3_600),
    ("1d", 24 * 3_600),
    ("7d", 7 * 24 * 3_600),
    ("30d", 30 * 24 * 3_600),
];
const OF_WINDOWS: &[&str] = &["sliding_window", "fixed_window"];
const ALL: &[&str] = &["sliding_window", "fixed_window", "token_bucket", "leaky_bucket", "sliding_log"];
const WAIT: Duration = Duration::from_secs(20);

fn ids() -> Vec<(String, &'static str, &'static str)> {
    [("async", ALL), ("local", ALL), ("leased", OF_WINDOWS), ("strict", ALL)]
        .into_iter()
        .flat_map(|(precision, algorithms)| {
            algorithms.iter().map(move |algorithm| (format!("{precision}-{algorithm}"), precision, *algorithm))
        })
        .collect()
}

/// All rules hold for each request, so that one request has a key of each.
fn policy(window: &str) -> String {
    let rule = |(id, precision, algorithm): &(String, &str, &str)| {
        let more = if *algorithm == "leaky_bucket" { "burst = 9\nmax_delay = \"60s\"\n" } else { "" };
        format!(
            "[[rules]]\nid = \"{id}\"\nscope = \"user\"\nprecision = \"{precision}\"\nalgorithm = \"{algorithm}\"\n\
             limit = 10\nwindow = \"{window}\"\n{more}"
        )
    };
    ids().iter().map(rule).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_key_lives_for_two_windows_whatever_made_it() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    for (window, seconds) in WINDOWS {
        let node = Arc::new(FleetNode::start(&policy(window), &config, Duration::from_millis(20)).await);
        for charge in [Charge::Commit, Charge::Refund] {
            let watch = Stopwatch::start();
            let kind = node.decide(&user(window), "/", 1, charge).await.kind;
            assert_eq!(kind, Kind::Allowed, "{window} {charge:?}");
            node.until_sent().await;
            for (id, _, _) in ids() {
                let (what, key) = (format!("{id}, {window}, {charge:?}"), format!("rl:{{user:{window}}}:{id}"));
                let longest_ms = 2000 * seconds;
                // Of the shortest windows, a key may be gone before somebody looks on a busy machine.
                let least = |watch: &Stopwatch| i128::from(longest_ms) - watch.elapsed().as_millis().cast_signed() - 1;
                let ttl_ms = eventually(WAIT, async || {
                    let ttl_ms: i64 = server.run(&["PTTL", &key]).await;
                    let is_gone = ttl_ms == -2 && least(&watch) <= 0;
                    if is_gone || ttl_ms > 0 { Ok(ttl_ms) } else { Err((what.clone(), ttl_ms)) }
                })
                .await;
                if ttl_ms == -2 {
                    continue;
                }
                // A holding that goes back later, and a message that is repeated, may have written it once more.
                let at_least = if charge == Charge::Commit { least(&watch) } else { 1 };
                let range = at_least..=i128::from(longest_ms);
                assert!(range.contains(&ttl_ms.into()), "{what}: {ttl_ms} ms and not {range:?}");
                // The same in Redis' other units: seconds, and an instant by its clock.
                let (ttl_s, end_ms, now): (i64, i64, (i64, i64)) = (
                    server.run(&["TTL", &key]).await,
                    server.run(&["PEXPIRETIME", &key]).await,
                    server.run(&["TIME"]).await,
                );
                if ttl_s != -2 && end_ms != -2 {
                    assert!((0..=2 * seconds.cast_signed()).contains(&ttl_s), "{what}: {ttl_s} s");
                    let left_ms = end_ms - (now.0 * 1000 + now.1 / 1000);
                    assert!(left_ms <= ttl_ms + 1, "{what}: until {end_ms}, at {now:?}");
                }
            }
        }
    }
}

//! A key that everybody asks for costs Redis no more than one that is asked for now and then.

use std::time::Duration;

use limiter_tests::{eventually::eventually, fleet_node::user, rate::ask_at_rate, redis_server::RedisServer};
use limiter_user::store::redis::RedisConfig;

use super::strict::{SYNC, current, fleet, patient, rule};

const AGENTS: usize = 4;
const RATE: u64 = 20_000;
const WAIT: Duration = Duration::from_secs(20);
const TIME: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_key_costs_one_call_an_agent_and_interval() {
    for precision in ["async", "leased"] {
        let server = RedisServer::start().await;
        let policy = rule(precision, "user", precision, 100_000_000, "");
        let fleet = fleet(&policy, &patient(RedisConfig::new(server.url())), AGENTS).await;
        // The first request of a lease asks; how much is lent then grows with what is asked for.
        let warm = ask_at_rate(&fleet, &[user("hot")], RATE, TIME / 4).await;
        server.record_calls().await;
        let asked = ask_at_rate(&fleet, &[user("hot")], RATE, TIME).await;
        let key = format!("rl:{{user:hot}}:{precision}");
        let calls = server.script_calls_about(&key).await;
        assert_eq!((asked.requests, asked.allowed), (40_000, 40_000), "{precision}");
        // Intervals that have begun, and those that the records took: fewer calls where the machine is busy, never more.
        let intervals = usize::try_from(asked.took.as_millis() / SYNC.as_millis()).unwrap() + 3;
        assert!(calls <= AGENTS * intervals, "{precision}: {calls} calls in {intervals} intervals of {AGENTS} agents");
        assert!(calls >= AGENTS, "{precision}: {calls} calls say nothing about a key that all agents were asked for");
        for node in fleet {
            std::sync::Arc::into_inner(node).unwrap().stop().await;
        }
        // And what was shared so rarely is all that was admitted.
        let admitted = warm.allowed + asked.allowed;
        eventually(WAIT, async || {
            let value: Vec<u8> = server.run(&["GET", &key]).await;
            if current(&value) == admitted { Ok(()) } else { Err((precision, current(&value), admitted)) }
        })
        .await;
    }
}

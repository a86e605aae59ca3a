//! `local`: one node at a time counts a key; who comes after it takes over what it had.

use std::time::Duration;

use limiter_tests::{eventually::eventually, fleet_node::user, redis_server::RedisServer};
use limiter_user::store::redis::RedisConfig;

use super::strict::{fleet, hammer, patient, rule};

const WAIT: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_moves_is_taken_over_once() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    for algorithm in ["sliding_window", "fixed_window", "token_bucket", "sliding_log"] {
        let policy = rule(algorithm, "user", "local", 100, &format!("algorithm = \"{algorithm}\""));
        let nodes = fleet(&policy, &config, 3).await;
        let (a, b, c) = (&nodes[..1], &nodes[1..2], &nodes[2..]);
        assert_eq!(hammer(a, 1, 60, &user("u")).await, 60);
        eventually(WAIT, async || if nodes[0].memory.stats().queued == 0 { Ok(()) } else { Err("queued") }).await;
        // The next one knows with the answer to its first count.
        assert!(nodes[1].allows(&user("u")).await);
        eventually(WAIT, async || match nodes[1].remaining(&user("u")).await {
            39 => Ok(()),
            remaining => Err((algorithm, remaining)),
        })
        .await;
        assert_eq!(hammer(b, 1, 20, &user("u")).await, 20);
        eventually(WAIT, async || if nodes[1].memory.stats().queued == 0 { Ok(()) } else { Err("queued") }).await;
        // What others count afterwards is not added, though this node goes on telling its own.
        assert_eq!(hammer(a, 1, 5, &user("u")).await, 5);
        eventually(WAIT, async || if nodes[0].memory.stats().queued == 0 { Ok(()) } else { Err("queued") }).await;
        assert_eq!(nodes[0].remaining(&user("u")).await, 35, "{algorithm}");
        // A node that comes last takes over what all had.
        assert!(nodes[2].allows(&user("u")).await);
        eventually(WAIT, async || match nodes[2].remaining(&user("u")).await {
            13 => Ok(()),
            remaining => Err((algorithm, remaining)),
        })
        .await;
        assert_eq!(hammer(c, 1, 20, &user("u")).await, 13, "{algorithm}");
    }
}

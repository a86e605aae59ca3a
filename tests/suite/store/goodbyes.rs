//! A node that stops while Redis hangs: it does not wait for it.

use std::{sync::Arc, time::Duration};

use limiter_tests::{eventually::eventually, fleet_node::user, redis_server::RedisServer};
use limiter_user::{clock::Stopwatch, store::redis::RedisConfig};

use super::strict::{fleet, rule};

const WAIT: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_does_not_wait_for_a_redis_that_hangs() {
    let server = RedisServer::start().await;
    let mut config = RedisConfig::new(server.url());
    config.timeout = Duration::from_millis(50);
    let mut nodes = fleet(&rule("r", "user", "leased", 1000, ""), &config, 1).await;
    server.freeze();
    // Each asks for a lease, and hears nothing: what was lent is to be given back, in several batches.
    let users: Vec<_> = (0..3000).map(|number| user(&format!("u{number}"))).collect();
    futures_util::future::join_all(users.iter().map(|user| nodes[0].allows(user))).await;
    // Until then they are under way, and nothing is told beside them.
    eventually(WAIT, async || {
        let calls = nodes[0].leases.store().calls();
        if calls.timeout + calls.unavailable >= users.len() as u64 { Ok(()) } else { Err(calls) }
    })
    .await;
    let watch = Stopwatch::start();
    Arc::into_inner(nodes.remove(0)).unwrap().stop().await;
    // Two seconds for leases, and one beside them for counts.
    assert!(watch.elapsed() < Duration::from_secs(4), "{:?}", watch.elapsed());
    server.thaw();
}

//! What Redis may say instead of an answer: nobody waits for it, it is noticed, and afterwards all nodes know everything.

use std::time::Duration;

use limiter_tests::{
    eventually::eventually,
    redis_cluster::RedisCluster,
    redis_failure::{FAILURES, FailingRedis},
};
use limiter_user::{
    config::Secret,
    store::{
        Cell,
        redis::{RedisConfig, Topology},
        sync::SyncState,
    },
};

use super::sync_worker::{Node, daily};

const WAIT: Duration = Duration::from_secs(30);
const LIMIT: u64 = 100_000;

fn hit_all(nodes: &[Node], counters: &[[Cell; 1]]) {
    for node in nodes {
        for counter in counters {
            node.hit(counter);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_failure_is_noticed_costs_nobody_time_and_loses_nothing() {
    for failure in FAILURES {
        let mut server = FailingRedis::start().await;
        let mut config = RedisConfig::new(server.url(failure));
        if let Some((name, password)) = failure.user() {
            config.username = Some(name.to_owned());
            config.password = Some(Secret::new(password.to_owned()));
        }
        let nodes = [(); 2].map(|()| Node::start_with(&config, 0));
        let counters: Vec<[Cell; 1]> = (0..10).map(|number| daily(&format!("u{number}"), LIMIT)).collect();
        for node in &nodes {
            node.until_connected().await;
        }
        hit_all(&nodes, &counters);
        for node in &nodes {
            node.until_sent().await;
        }
        server.begin(failure).await;
        // Of the first counter.
        let mut extra = 0;
        if failure.says.is_some() {
            for node in &nodes {
                // Deciding goes on; each decision that takes long enough to have waited for anything fails the test.
                eventually(WAIT, async || {
                    node.hit(&counters[0]);
                    let stats = node.status.get();
                    extra += 1;
                    if stats.state == SyncState::Degraded { Ok(()) } else { Err((failure.name, stats)) }
                })
                .await;
            }
        }
        hit_all(&nodes, &counters);
        if let Some(says) = failure.says {
            eventually(WAIT, async || {
                let said = nodes[0].status.get().last_error.unwrap_or_default();
                if said.contains(says) { Ok(()) } else { Err((failure.name, said)) }
            })
            .await;
        }
        server.end(failure).await;
        for node in &nodes {
            eventually(WAIT, async || {
                let stats = node.status.get();
                if stats.state == SyncState::Connected { Ok(()) } else { Err((failure.name, stats)) }
            })
            .await;
        }
        hit_all(&nodes, &counters);
        for (number, counter) in counters.iter().enumerate() {
            let taken = 6 + if number == 0 { extra } else { 0 };
            for node in &nodes {
                node.until_remaining(counter, LIMIT - taken).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_is_down_is_noticed_and_loses_nothing() {
    let servers = RedisCluster::start(3).await;
    let nodes = [(); 2].map(|()| Node::start_with(&RedisConfig::of(servers.urls(), Topology::Cluster), 0));
    let counters: Vec<[Cell; 1]> = (0..10).map(|number| daily(&format!("u{number}"), LIMIT)).collect();
    for node in &nodes {
        node.until_connected().await;
    }
    hit_all(&nodes, &counters);
    for node in &nodes {
        node.until_sent().await;
    }
    // One that stands still is enough for the others to say CLUSTERDOWN, if they want every slot.
    for primary in &servers.primaries {
        let () = primary.run(&["CONFIG", "SET", "cluster-require-full-coverage", "yes"]).await;
    }
    servers.primaries[0].freeze();
    for node in &nodes {
        eventually(WAIT, async || {
            node.memory.requeue(&counters[0][0].key);
            node.memory.requeue(&counters[5][0].key);
            let stats = node.status.get();
            if stats.state == SyncState::Degraded { Ok(()) } else { Err(stats) }
        })
        .await;
    }
    hit_all(&nodes, &counters);
    servers.primaries[0].thaw();
    for counter in &counters {
        for node in &nodes {
            node.until_remaining(counter, LIMIT - 4).await;
        }
    }
}

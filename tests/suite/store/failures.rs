//! What Redis may say instead of an answer: nobody waits for it, it is noticed, and afterwards all nodes know everything.

use std::time::Duration;

use limiter_tests::{eventually::eventually, redis_cluster::RedisCluster, redis_server::RedisServer};
use limiter_user::{
    config::Secret,
    store::{
        Cell,
        redis::{ACL_RULES, RedisConfig, Topology},
        sync::SyncState,
    },
};

use super::sync_worker::{Node, daily};

const WAIT: Duration = Duration::from_secs(30);
const LIMIT: u64 = 100_000;

/// What is done to the server by somebody else.
#[derive(Clone, Copy)]
enum Act {
    Run(&'static [&'static str]),
    /// Keeps the server busy until it is told to stop.
    LoopFor(&'static str),
    Kill,
    RestartEmpty,
    Freeze,
    Thaw,
}

struct Failure {
    name: &'static str,
    begin: &'static [Act],
    end: &'static [Act],
    /// Whether the nodes say that they share nothing, and in which words.
    says: Option<&'static str>,
}

const FAILURES: &[Failure] = &[
    Failure { name: "NOSCRIPT", begin: &[Act::Run(&["SCRIPT", "FLUSH"])], end: &[], says: None },
    Failure { name: "cut off", begin: &[Act::Run(&["CLIENT", "KILL", "USER", "limiter"])], end: &[], says: None },
    Failure { name: "flushed", begin: &[Act::Run(&["FLUSHALL"])], end: &[], says: None },
    Failure {
        name: "WRONGPASS",
        begin: &[
            Act::Run(&["ACL", "SETUSER", "limiter", "resetpass", ">other"]),
            Act::Run(&["CLIENT", "KILL", "USER", "limiter"]),
        ],
        end: &[Act::Run(&["ACL", "SETUSER", "limiter", "resetpass", ">pw"])],
        says: Some("authentication failed"),
    },
    Failure {
        name: "NOPERM",
        begin: &[Act::Run(&["ACL", "SETUSER", "limiter", "-evalsha"])],
        end: &[Act::Run(&["ACL", "SETUSER", "limiter", "+evalsha"])],
        says: Some("permission"),
    },
    Failure {
        name: "OOM",
        begin: &[Act::Run(&["CONFIG", "SET", "maxmemory", "1"])],
        end: &[Act::Run(&["CONFIG", "SET", "maxmemory", "0"])],
        says: Some("OOM"),
    },
    Failure {
        name: "READONLY",
        begin: &[Act::Run(&["REPLICAOF", "127.0.0.1", "1"])],
        end: &[Act::Run(&["REPLICAOF", "NO", "ONE"])],
        says: Some("read only replica"),
    },
    Failure {
        name: "NOREPLICAS",
        begin: &[Act::Run(&["CONFIG", "SET", "min-replicas-to-write", "1"])],
        end: &[Act::Run(&["CONFIG", "SET", "min-replicas-to-write", "0"])],
        says: Some("NOREPLICAS"),
    },
    Failure {
        name: "BUSY",
        begin: &[Act::Run(&["CONFIG", "SET", "busy-reply-threshold", "1"]), Act::LoopFor("while true do end")],
        end: &[Act::Run(&["SCRIPT", "KILL"])],
        says: Some("BUSY"),
    },
    Failure {
        name: "LOADING",
        begin: &[
            Act::Run(&["DEBUG", "POPULATE", "3000"]),
            Act::Run(&["CONFIG", "SET", "loading-process-events-interval-bytes", "1024"]),
            Act::Run(&["CONFIG", "SET", "key-load-delay", "1000"]),
            Act::LoopFor("DEBUG RELOAD"),
        ],
        end: &[],
        says: Some("loading the dataset"),
    },
    Failure { name: "timeout", begin: &[Act::Freeze], end: &[Act::Thaw], says: Some("no answer") },
    Failure { name: "refused", begin: &[Act::Kill], end: &[Act::RestartEmpty], says: Some("refused") },
];

async fn act(server: &mut RedisServer, act: Act) {
    match act {
        Act::Run(words) => {
            // While it loads or is busy, it takes few commands, and says so.
            let () = server.try_run(words).await.unwrap_or_default();
        }
        Act::LoopFor(what) => {
            let client = redis::Client::open(server.url()).unwrap();
            tokio::spawn(async move {
                let mut connection = client.get_multiplexed_async_connection().await.unwrap();
                let mut command = match what.split_once(' ') {
                    Some(("DEBUG", rest)) => redis::cmd("DEBUG").arg(rest).to_owned(),
                    _ => redis::cmd("EVAL").arg(what).arg(0).to_owned(),
                };
                let result: redis::RedisResult<redis::Value> = command.query_async(&mut connection).await;
                drop((result, &mut command));
            });
        }
        Act::Kill => server.kill(),
        Act::RestartEmpty => {
            server.restart().await;
            add_user(server).await;
        }
        Act::Freeze => server.freeze(),
        Act::Thaw => server.thaw(),
    }
}

async fn add_user(server: &RedisServer) {
    let rights: Vec<&str> = ACL_RULES.split(' ').collect();
    let () = server.run(&[&["ACL", "SETUSER", "limiter", "reset", "on", ">pw"], &rights[..]].concat()).await;
}

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
        let mut server = RedisServer::start().await;
        add_user(&server).await;
        let mut config = RedisConfig::new(server.url());
        config.username = Some("limiter".to_owned());
        config.password = Some(Secret::new("pw".to_owned()));
        let nodes = [(); 2].map(|()| Node::start_with(&config, 0));
        let counters: Vec<[Cell; 1]> = (0..10).map(|number| daily(&format!("u{number}"), LIMIT)).collect();
        for node in &nodes {
            node.until_connected().await;
        }
        hit_all(&nodes, &counters);
        for node in &nodes {
            node.until_sent().await;
        }
        for step in failure.begin {
            act(&mut server, *step).await;
        }
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
        for step in failure.end {
            act(&mut server, *step).await;
        }
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

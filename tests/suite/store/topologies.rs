//! What is behind the addresses of Redis: a cluster, sentinels, TLS, a socket, a user with few rights.

use std::{collections::BTreeSet, fs, path::Path, sync::Arc, time::Duration};

use limiter_common::{sliding_window::Outcome, time::UnixMicros};
use limiter_tests::{
    eventually::eventually,
    redis_cluster::RedisCluster,
    redis_sentinel::{RedisSentinels, SERVICE},
    redis_server::{RedisServer, free_port},
    redis_tls::Authority,
};
use limiter_user::{
    clock::SharedClock,
    config::Secret,
    policy::Policy,
    store::{
        At, Cell, Charge, Store as _,
        memory::MemoryStore,
        recovery::recover,
        redis::{ACL_RULES, Certificates, RedisConfig, RedisStore, Topology, redis_key},
    },
};

use super::{
    behaviour::{T0, cell, user},
    sync_worker::{Node, daily},
};

const WAIT: Duration = Duration::from_secs(30);

fn cluster(servers: &RedisCluster) -> RedisConfig {
    RedisConfig::of(servers.urls(), Topology::Cluster)
}

async fn two_nodes(redis: &RedisConfig) -> [Node; 2] {
    let nodes = [(); 2].map(|()| Node::start_with(redis, 0));
    for node in &nodes {
        node.until_connected().await;
    }
    nodes
}

fn counters(count: usize) -> Vec<[Cell; 1]> {
    (0..count).map(|number| daily(&format!("u{number}"), 1000)).collect()
}

/// What has been taken from a counter, as a node sees it that has used it as well.
async fn until_taken(node: &Node, counter: &[Cell], taken: u64) {
    node.until_remaining(counter, 1000 - taken).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_of_all_slots_are_shared_through_a_cluster() {
    let servers = RedisCluster::start(3).await;
    let nodes = two_nodes(&cluster(&servers)).await;
    let counters = counters(60);
    for (number, counter) in counters.iter().enumerate() {
        for _ in 0..=number % 5 {
            nodes[number % 2].hit(counter);
        }
        nodes[(number + 1) % 2].hit(counter);
    }
    for (number, counter) in counters.iter().enumerate() {
        let taken = u64::try_from(number % 5 + 2).unwrap();
        for node in &nodes {
            until_taken(node, counter, taken).await;
        }
    }
    let mut owners = BTreeSet::new();
    for key in servers.keys().await {
        let owner = servers.owner(&key).await;
        owners.insert(owner);
        let ttl_ms: i64 = servers.primaries[owner].run(&["PTTL", &key]).await;
        assert!(ttl_ms > 0, "{key}: {ttl_ms}");
    }
    assert_eq!(owners.len(), 3, "each primary has some");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_under_load_loses_nothing_and_counts_nothing_twice() {
    let servers = RedisCluster::start(3).await;
    let nodes = two_nodes(&cluster(&servers)).await;
    let counter = daily("mover", 1000);
    let key = redis_key(&counter[0].key);
    let mut taken = 0;
    let mut hit_both = || {
        for node in &nodes {
            node.hit(&counter);
            taken += 1;
        }
    };
    hit_both();
    for node in &nodes {
        node.until_sent().await;
    }
    let from = servers.owner(&key).await;
    let to = (from + 1) % 3;
    servers
        .migrate(&key, to, async || {
            // The key is gone from its old place, and the slot is not yet the new one's.
            hit_both();
            for node in &nodes {
                node.until_sent().await;
            }
        })
        .await;
    hit_both();
    for node in &nodes {
        until_taken(node, &counter, taken).await;
    }
    let there = servers.primaries[to].counters().await;
    assert_eq!(there, [key]);
    assert!(nodes.iter().all(|node| node.status.get().refused_counters == 0), "redirections are followed");
    assert!(nodes.iter().all(|node| node.status.get().refills == 0), "nothing was lost");
}

/// Reads all counters into an empty memory; how many those were.
async fn recovered(redis: &RedisStore) -> u64 {
    let policy = "[[rules]]\nid = \"daily\"\nscope = \"user\"\nlimit = 1000\nwindow = \"1d\"\n";
    let policy = Policy::parse(Path::new("/policy.toml"), policy).unwrap();
    let clock = Arc::new(SharedClock::new());
    let memory = MemoryStore::shared(clock.clone(), 100_000);
    let recovery = recover(redis, &memory, &policy, &*clock, WAIT).await;
    assert!(recovery.incomplete.is_none(), "{recovery:?}");
    recovery.counters
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_finds_what_has_moved_and_what_is_on_its_way() {
    let servers = RedisCluster::start_with_replicas(3).await;
    let config = cluster(&servers);
    let [node, _] = two_nodes(&config).await;
    let counters = counters(60);
    for counter in &counters {
        node.hit(counter);
    }
    node.until_sent().await;
    // It knows who has what, until the end.
    let stale = RedisStore::connect(&config).unwrap();
    assert_eq!(recovered(&stale).await, 60);
    let key = redis_key(&counters[0][0].key);
    let to = (servers.owner(&key).await + 1) % 3;
    servers
        .migrate(&key, to, async || {
            assert_eq!(recovered(&RedisStore::connect(&config).unwrap()).await, 60, "on its way");
            assert_eq!(recovered(&stale).await, 60, "on its way");
        })
        .await;
    assert_eq!(recovered(&stale).await, 60, "it has moved");
    // Who is a replica by now has everything, and sends whoever asks elsewhere.
    for number in 0..3 {
        servers.promote(number).await;
    }
    assert_eq!(recovered(&stale).await, 60, "replicas have taken over");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_takes_over_knows_what_the_nodes_know() {
    let mut servers = RedisCluster::start_with_replicas(3).await;
    let nodes = two_nodes(&cluster(&servers)).await;
    let counters = counters(30);
    for counter in &counters {
        nodes[0].hit(counter);
    }
    nodes[0].until_sent().await;
    servers.primaries[1].kill();
    // Nobody waits, and what belongs to the other primaries is shared meanwhile.
    for counter in &counters {
        nodes[1].hit(counter);
    }
    servers.fail_over(1).await;
    for counter in &counters {
        for node in &nodes {
            until_taken(node, counter, 2).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_primary_that_stands_still_does_not_stop_the_others() {
    let servers = RedisCluster::start(3).await;
    let nodes = two_nodes(&cluster(&servers)).await;
    let counters = counters(30);
    // Every primary has been spoken to.
    for counter in &counters {
        for node in &nodes {
            node.hit(counter);
        }
    }
    for node in &nodes {
        node.until_sent().await;
    }
    servers.primaries[2].freeze();
    for counter in &counters {
        nodes[0].hit(counter);
    }
    let mut owners = Vec::new();
    for counter in &counters {
        owners.push(
            servers.primaries[0].run::<usize>(&["CLUSTER", "KEYSLOT", &redis_key(&counter[0].key)]).await * 3 / 16384,
        );
    }
    let of =
        |owner: usize| counters.iter().zip(&owners).filter(move |(_, of)| **of == owner).map(|(counter, _)| counter);
    assert!((0..3).all(|owner| of(owner).count() > 0));
    for counter in of(0).chain(of(1)) {
        until_taken(&nodes[1], counter, 3).await;
    }
    servers.primaries[2].thaw();
    for counter in of(2) {
        until_taken(&nodes[1], counter, 3).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_over_several_slots_is_charged_everywhere_or_nowhere() {
    let servers = RedisCluster::start(3).await;
    let mut config = cluster(&servers);
    config.timeout = Duration::from_secs(5);
    let store = RedisStore::connect(&config).unwrap();
    let at = At::Given(UnixMicros::new(T0));
    let wide: Vec<Cell> = (0..12).map(|number| cell(user(&format!("u{number}"), "r"), 10)).collect();
    let narrow = cell(user("narrow", "r"), 3);
    let both = [wide.clone(), vec![narrow]].concat();
    // Tasks at the same time: exactly three pass, whichever.
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (store, both) = (store.clone(), both.clone());
            tokio::spawn(async move { store.check(at, Charge::Commit, &both).await.unwrap() })
        })
        .collect();
    let mut passed = 0;
    for task in tasks {
        let outcomes = task.await.unwrap();
        passed += u64::from(outcomes.iter().all(|outcome| outcome.outcome == Outcome::Allowed));
    }
    // Each may have seen the others' charges before these were given back: fewer pass then, and never more.
    assert!((1..=3).contains(&passed), "{passed}");
    // A request that was denied costs nobody anything, once what it was charged is given back, which it does not wait for.
    eventually(WAIT, async || {
        let left = store.check(at, Charge::Peek, &both).await.unwrap();
        if left[..12].iter().all(|outcome| outcome.remaining == 10 - passed) { Ok(()) } else { Err(left) }
    })
    .await;
    let refunded = store.check(at, Charge::Refund, &wide).await.unwrap();
    assert!(refunded.iter().all(|outcome| outcome.outcome == Outcome::Allowed));
    let left = store.check(at, Charge::Peek, &wide).await.unwrap();
    assert!(left.iter().all(|outcome| outcome.remaining == 11 - passed), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_lead_to_the_primary_and_to_its_successor() {
    let mut servers = RedisSentinels::start().await;
    let config = RedisConfig::of(servers.urls(), Topology::Sentinel { service: SERVICE.to_owned() });
    let nodes = two_nodes(&config).await;
    let counter = daily("u", 1000);
    for node in &nodes {
        node.hit(&counter);
    }
    for node in &nodes {
        until_taken(node, &counter, 2).await;
    }
    servers.lose_a_sentinel();
    servers.primary.kill();
    for node in &nodes {
        node.hit(&counter);
    }
    for node in &nodes {
        until_taken(node, &counter, 4).await;
    }
    let keys = servers.replica.counters().await;
    assert_eq!(keys, [redis_key(&counter[0].key)]);

    let other = RedisConfig::of(servers.urls(), Topology::Sentinel { service: "other".to_owned() });
    let store = RedisStore::connect(&other).unwrap();
    eventually(WAIT, async || {
        let error = store.time_us(Duration::from_secs(5)).await.unwrap_err().to_string();
        if error.contains("knows no service \"other\"") { Ok(()) } else { Err(error) }
    })
    .await;
}

async fn uses(config: &RedisConfig) -> Result<(), String> {
    let store = RedisStore::connect(config).map_err(|error| error.to_string())?;
    let cells = [cell(user("u", "r"), 10)];
    store.check(At::StoreClock, Charge::Commit, &cells).await.map(drop).map_err(|error| error.to_string())
}

#[tokio::test]
async fn servers_and_nodes_know_each_other_by_certificate() {
    let authority = Authority::new();
    let port = free_port();
    let server = authority.start_redis(port).await;
    let read = |path| fs::read(path).unwrap();
    let key = String::from_utf8(read(authority.key("client"))).unwrap();
    let mut config = RedisConfig::new(format!("rediss://localhost:{port}"));
    config.timeout = Duration::from_secs(5);
    config.certificates = Certificates {
        authorities: Some(read(authority.ca())),
        client: Some((read(authority.certificate("client")), Secret::new(key))),
    };
    assert_eq!(uses(&config).await, Ok(()));
    let keys: Vec<String> = server.run(&["KEYS", "*"]).await;
    assert_eq!(keys, ["rl:{user:u}:r"]);
    assert!(!format!("{config:?}").contains("PRIVATE KEY"));

    let mut nameless = config.clone();
    nameless.certificates.client = None;
    let mut of_others = config.clone();
    of_others.certificates.authorities = Some(read(Authority::new().ca()));
    let mut elsewhere = config.clone();
    elsewhere.urls = vec![format!("rediss://127.0.0.2:{port}")];
    let mut plain = config.clone();
    plain.urls = vec![format!("redis://localhost:{port}")];
    for (what, config) in
        [("no certificate", nameless), ("other authority", of_others), ("name", elsewhere), ("plain", plain)]
    {
        assert!(uses(&config).await.is_err(), "{what}");
    }
}

#[tokio::test]
async fn a_user_with_the_rights_of_the_documentation_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("redis.sock");
    let server = RedisServer::start_with(&["--unixsocket", socket.to_str().unwrap()]).await;
    let rights: Vec<&str> = ACL_RULES.split(' ').collect();
    server.set_user("limiter", "pw", ACL_RULES).await;
    let mut config = RedisConfig::new(server.url());
    config.timeout = Duration::from_secs(5);
    config.username = Some("limiter".to_owned());
    config.password = Some(Secret::new("pw".to_owned()));
    assert_eq!(uses(&config).await, Ok(()));
    let node = Node::start_with(&config, 0);
    node.until_connected().await;
    let counter = daily("u", 1000);
    node.hit(&counter);
    node.until_sent().await;
    assert_eq!(node.status.get().refills, 0);

    // Each right is needed: without it something is refused.
    for right in &rights {
        let without: Vec<&str> = rights.iter().copied().filter(|other| other != right).collect();
        server.set_user("less", "pw", &without.join(" ")).await;
        let mut less = config.clone();
        less.username = Some("less".to_owned());
        let () = server.run(&["SCRIPT", "FLUSH"]).await;
        let store = RedisStore::connect(&less).unwrap();
        let examined = store.examine(Duration::from_secs(5), || 0).await;
        let is_complete = examined.round_trip.is_ok() && examined.facts.is_some() && examined.refused.is_empty();
        assert!(uses(&less).await.is_err() || !is_complete, "{right} is not needed");
    }

    // Through the file system, and into another database, which is one right more.
    let () = server.run(&["ACL", "SETUSER", "limiter", "+select"]).await;
    let mut by_socket = config.clone();
    by_socket.urls = vec![format!("unix://{}?db=3", socket.display())];
    assert_eq!(uses(&by_socket).await, Ok(()));
    let mut by_number = config;
    by_number.urls = vec![format!("{}/4", server.url())];
    assert_eq!(uses(&by_number).await, Ok(()));
    let keyspace: String = server.run(&["INFO", "keyspace"]).await;
    assert!(keyspace.contains("db3:keys=1") && keyspace.contains("db4:keys=1"), "{keyspace}");
}

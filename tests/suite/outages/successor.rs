//! A primary that is away has a successor. Nothing is sent to a server that is left alone, so nobody is told of that by an
//! answer; and a quiet node sends nothing at all.

use std::time::Duration;

use limiter_tests::{
    agent::{Agent, Setup},
    eventually::{eventually, until},
    redis_cluster::RedisCluster,
    redis_sentinel::{RedisSentinels, SERVICE},
    redis_server::RedisServer,
};
use limiter_user::clock::Stopwatch;
use serde_json::json;

use crate::{WAIT, ask, breakers, runtime, until_sent, until_whole};

/// So long that waiting for the next probe would be seen.
const PROBE: Duration = Duration::from_secs(10);
const PRECISIONS: [&str; 3] = ["async", "leased", "strict"];
const POLICIES: [&str; 3] = ["open", "closed", "local"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Dies,
    StandsStill,
    /// The others say that the cluster is down as long as nobody has its slots.
    DiesForAll,
    /// Without a failure: it becomes the replica of its successor.
    HandsOver,
}

/// A rule for each precision and policy, of a path of its own.
fn rules() -> Vec<String> {
    PRECISIONS.iter().flat_map(|precision| POLICIES.map(|policy| format!("{precision}-{policy}"))).collect()
}

fn policy() -> String {
    let mut text = String::new();
    for rule in rules() {
        let (precision, policy) = rule.split_once('-').expect("both");
        text.push_str(&format!(
            "[[endpoints]]\nname = \"{rule}\"\nmatch = [\"/{rule}\"]\n\
             [[rules]]\nid = \"{rule}\"\nendpoint = \"{rule}\"\nprecision = \"{precision}\"\n\
             on_store_failure = \"{policy}\"\nscope = \"user\"\nlimit = 5\nwindow = \"1d\"\n"
        ));
    }
    text
}

fn node(name: &str, redis: &str) -> Setup {
    let configuration = format!(
        "[node]\nid = \"{name}\"\n[store]\nkind = \"redis\"\n\
         [store.breaker]\nfailures = 3\nwithin = \"10s\"\nprobe = \"{}s\"\n\
         [store.redis]\nheartbeat = \"100ms\"\ntimeout = \"300ms\"\n{redis}",
        PROBE.as_secs()
    );
    Setup::new(&configuration, &policy())
}

enum Servers {
    Cluster { servers: RedisCluster, lost: usize },
    Sentinel(RedisSentinels),
}

impl Servers {
    fn urls(&self) -> String {
        match self {
            Self::Cluster { servers, .. } => format!("urls = {:?}\nmode = \"cluster\"\n", servers.urls()),
            Self::Sentinel(servers) => {
                format!("urls = {:?}\nmode = \"sentinel\"\nservice = \"{SERVICE}\"\n", servers.urls())
            }
        }
    }

    fn predecessor(&self) -> &RedisServer {
        match self {
            Self::Cluster { servers, lost } => &servers.primaries[*lost],
            Self::Sentinel(servers) => &servers.primary,
        }
    }

    fn predecessor_mut(&mut self) -> &mut RedisServer {
        match self {
            Self::Cluster { servers, lost } => &mut servers.primaries[*lost],
            Self::Sentinel(servers) => &mut servers.primary,
        }
    }

    fn successor(&self) -> &RedisServer {
        match self {
            Self::Cluster { servers, lost } => &servers.replicas[*lost],
            Self::Sentinel(servers) => &servers.replica,
        }
    }

    /// Whether the successor may take over as soon as it can.
    async fn allow_successor(&self, is_allowed: bool) {
        match self {
            Self::Cluster { .. } => {
                let is_forbidden = if is_allowed { "no" } else { "yes" };
                let () = self.successor().run(&["CONFIG", "SET", "cluster-replica-no-failover", is_forbidden]).await;
            }
            Self::Sentinel(servers) => servers.take_down_after(if is_allowed { 2_000 } else { 600_000 }).await,
        }
    }

    async fn want_every_slot(&self) {
        let Self::Cluster { servers, .. } = self else { panic!("a case of clusters") };
        for primary in &servers.primaries {
            let () = primary.run(&["CONFIG", "SET", "cluster-require-full-coverage", "yes"]).await;
        }
    }

    async fn hand_over(&self) {
        let Self::Cluster { .. } = self else { panic!("a case of clusters") };
        let () = self.successor().run(&["CLUSTER", "FAILOVER"]).await;
    }

    /// Users whose counters are where a server is lost.
    async fn users(&self) -> Vec<String> {
        let mut users = Vec::new();
        for name in (0..200).map(|number| format!("u{number}")) {
            let is_there = match self {
                Self::Cluster { servers, lost } => servers.owner(&format!("rl:{{user:{name}}}:r")).await == *lost,
                Self::Sentinel(_) => true,
            };
            if is_there {
                users.push(name);
            }
        }
        users
    }
}

fn opened(agent: &Agent<'_>) -> f64 {
    agent.metric("limiter_breaker_transitions_total{to=\"open\"}")
}

async fn until_role(server: &RedisServer, role: &str) {
    eventually(WAIT, async || {
        let info: String = server.try_run(&["INFO", "replication"]).await?;
        if info.contains(role) { Ok(()) } else { Err(anyhow::anyhow!("{info}")) }
    })
    .await;
}

/// Each rule counts at this server, and `strict` to the unit over both nodes.
fn are_shared(runtime: &tokio::runtime::Runtime, what: &str, server: &RedisServer, nodes: &[Agent<'_>; 2], user: &str) {
    for rule in rules() {
        let path = format!("/{rule}");
        let answers: Vec<String> = (0..6).map(|number| ask(&nodes[number % 2], user, &path).0).collect();
        if rule.starts_with("strict") {
            let expected = ["allowed", "allowed", "allowed", "allowed", "allowed", "rate_limit_exceeded"];
            assert_eq!(answers, expected, "{what}: {rule}");
        }
        assert!(!answers.iter().any(|answer| answer == "limit_unavailable"), "{what}: {rule}: {answers:?}");
    }
    nodes.iter().for_each(until_sent);
    let counters = runtime.block_on(server.counters());
    for rule in rules() {
        let counter = format!("rl:{{user:{user}}}:{rule}");
        assert!(counters.contains(&counter), "{what}: {counter} is not in {counters:?}");
    }
}

fn is_followed(runtime: &tokio::runtime::Runtime, end: End, mut servers: Servers) {
    let kind = match &servers {
        Servers::Cluster { lost, .. } => format!("{lost} of a cluster"),
        Servers::Sentinel(_) => "the primary of sentinels".to_owned(),
    };
    let what = format!("{kind}: {end:?}");
    let setups = ["a", "b"].map(|name| node(name, &servers.urls()));
    let nodes = setups.each_ref().map(Setup::start);
    nodes.iter().for_each(until_whole);
    let users = runtime.block_on(servers.users());
    are_shared(runtime, &what, servers.predecessor(), &nodes, &users[0]);

    if end == End::HandsOver {
        runtime.block_on(servers.hand_over());
    } else {
        runtime.block_on(servers.allow_successor(false));
        if end == End::DiesForAll {
            runtime.block_on(servers.want_every_slot());
        }
        match end {
            End::Dies | End::DiesForAll => servers.predecessor_mut().kill(),
            End::StandsStill | End::HandsOver => servers.predecessor().freeze(),
        }
        for agent in &nodes {
            until(&format!("{what}: who shares and who decides leave it alone"), WAIT, || {
                for rule in rules() {
                    ask(agent, &users[1], &format!("/{rule}"));
                }
                match end {
                    End::DiesForAll => !breakers(agent).contains(&"closed".to_owned()),
                    End::Dies | End::StandsStill | End::HandsOver => opened(agent) == 2.0,
                }
                .then_some(())
            });
        }
        runtime.block_on(servers.allow_successor(true));
    }
    // Nobody asks anything meanwhile.
    runtime.block_on(until_role(servers.successor(), "role:master"));
    let watch = Stopwatch::start();
    let old = format!(":{}", servers.predecessor().port());
    for agent in &nodes {
        until(&format!("{what}: the successor is known"), WAIT, || {
            let status = agent.status();
            let shards = status["store"]["shards"].as_array().expect("shards");
            let knows_old = shards.iter().any(|shard| shard["name"].as_str().expect("a name").ends_with(&old));
            (status["degraded"] == json!(false) && !knows_old).then_some(())
        });
    }
    assert!(watch.elapsed() < PROBE / 2, "{what}: after {:?}", watch.elapsed());
    are_shared(runtime, &what, servers.successor(), &nodes, &users[2]);
    let opened_before = nodes.each_ref().map(opened);

    // It comes back, and has nothing to say any more.
    match end {
        End::Dies | End::DiesForAll => runtime.block_on(servers.predecessor_mut().restart()),
        End::StandsStill => servers.predecessor().thaw(),
        End::HandsOver => {}
    }
    runtime.block_on(until_role(servers.predecessor(), "role:slave"));
    are_shared(runtime, &what, servers.successor(), &nodes, &users[3]);
    for agent in &nodes {
        assert_eq!(agent.status()["degraded"], json!(false), "{what}: {}", agent.status());
    }
    assert_eq!(nodes.each_ref().map(opened), opened_before, "{what}");
}

#[test]
fn the_successor_of_a_primary_of_a_cluster_is_found_whoever_is_quiet() {
    let runtime = runtime();
    // The second has the heartbeats.
    for (lost, end) in [
        (0, End::Dies),
        (1, End::Dies),
        (2, End::DiesForAll),
        (2, End::StandsStill),
        (0, End::HandsOver),
        (1, End::HandsOver),
    ] {
        let servers = runtime.block_on(RedisCluster::start_with_replicas(3));
        is_followed(&runtime, end, Servers::Cluster { servers, lost });
    }
}

#[test]
fn the_successor_that_sentinels_name_is_found_whoever_is_quiet() {
    let runtime = runtime();
    for end in [End::Dies, End::StandsStill] {
        let servers = runtime.block_on(RedisSentinels::start());
        is_followed(&runtime, end, Servers::Sentinel(servers));
    }
}

//! A primary that is away has a successor. Nothing is sent to a server that is left alone, so nobody is told of that by an
//! answer; and a quiet node sends nothing at all.

use std::time::Duration;

use limiter_tests::{
    agent::{Agent, Setup},
    eventually::until,
    policy::rule_of_path,
    redis_cluster::RedisCluster,
    redis_sentinel::RedisSentinels,
    redis_server::RedisServer,
};
use serde_json::json;

use crate::{TIMEOUT, WAIT, ask, ask_patiently, breakers, runtime, until_sent, until_whole};

/// Twice as long as anything is waited for, and more: half of it may be taken off, and a successor that only a probe finds is
/// found too late.
const PROBE: Duration = Duration::from_secs(600);
const _: () = assert!(PROBE.as_secs() / 2 > 2 * WAIT.as_secs());
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
        let more = format!(
            "precision = \"{precision}\"\non_store_failure = \"{policy}\"\nscope = \"user\"\nlimit = 5\nwindow = \"1d\""
        );
        text.push_str(&rule_of_path(&rule, &more));
    }
    text
}

fn node(name: &str, redis: &str) -> Setup {
    let configuration = format!(
        "[node]\nid = \"{name}\"\n[store]\nkind = \"redis\"\n\
         [store.breaker]\nfailures = 3\nwithin = \"10s\"\nprobe = \"{}s\"\n\
         [store.redis]\nheartbeat = \"100ms\"\ntimeout = \"{}ms\"\n{redis}",
        PROBE.as_secs(),
        TIMEOUT.as_millis()
    );
    Setup::new(&configuration, &policy())
}

enum Servers {
    Cluster { servers: RedisCluster, lost: usize },
    Sentinel(RedisSentinels),
}

impl Servers {
    fn access(&self) -> String {
        match self {
            Self::Cluster { servers, .. } => servers.access(),
            Self::Sentinel(servers) => servers.access(),
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

    /// A user whose counters are where a server is lost, and who has used nothing.
    async fn newcomer(&self, users: &mut impl Iterator<Item = u32>) -> String {
        for number in users {
            let name = format!("u{number}");
            let is_there = match self {
                Self::Cluster { servers, lost } => servers.owner(&format!("rl:{{user:{name}}}:r")).await == *lost,
                Self::Sentinel(_) => true,
            };
            if is_there {
                return name;
            }
        }
        panic!("there are numbers enough")
    }

    /// The successor is what the predecessor was.
    async fn rename(&mut self) {
        match self {
            Self::Cluster { servers, lost } => servers.rename(*lost).await,
            Self::Sentinel(_) => panic!("a case of clusters"),
        }
    }
}

fn opened(agent: &Agent<'_>) -> f64 {
    agent.metric("limiter_breaker_transitions_total{to=\"open\"}")
}

/// Each rule counts at this server, and `strict` to the unit over both nodes. Right after servers have changed places, a call may
/// still be on a way that has ended: then the next newcomer is asked for.
fn are_shared(
    runtime: &tokio::runtime::Runtime,
    what: &str,
    server: &RedisServer,
    nodes: &[Agent<'_>; 2],
    mut newcomer: impl FnMut() -> String,
) {
    const EXACT: [&str; 6] = ["allowed", "allowed", "allowed", "allowed", "allowed", "rate_limit_exceeded"];
    let user = until(&format!("{what}: all that both nodes count is shared"), WAIT, || {
        let user = newcomer();
        let is_right = |rule: String| {
            let answers: Vec<String> =
                (0..6).map(|number| ask(&nodes[number % 2], &user, &format!("/{rule}")).0).collect();
            let is_exact = answers == EXACT || !rule.starts_with("strict");
            is_exact && !answers.iter().any(|answer| answer == "limit_unavailable")
        };
        rules().into_iter().all(is_right).then_some(user)
    });
    nodes.iter().for_each(until_sent);
    let counters = runtime.block_on(server.counters());
    for rule in rules() {
        let counter = format!("rl:{{user:{user}}}:{rule}");
        assert!(counters.contains(&counter), "{what}: {counter} is not in {counters:?}");
    }
}

fn is_followed(
    runtime: &tokio::runtime::Runtime,
    end: End,
    servers: &mut Servers,
    users: &mut impl Iterator<Item = u32>,
) {
    let kind = match &servers {
        Servers::Cluster { lost, .. } => format!("{lost} of a cluster"),
        Servers::Sentinel(_) => "the primary of sentinels".to_owned(),
    };
    let what = format!("{kind}: {end:?}");
    let setups = ["a", "b"].map(|name| node(name, &servers.access()));
    let nodes = setups.each_ref().map(Setup::start);
    nodes.iter().for_each(until_whole);
    let mut newcomer = |servers: &Servers| runtime.block_on(servers.newcomer(users));
    are_shared(runtime, &what, servers.predecessor(), &nodes, || newcomer(servers));

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
        let user = newcomer(servers);
        for agent in &nodes {
            until(&format!("{what}: who shares and who decides leave it alone"), WAIT, || {
                for rule in rules() {
                    ask_patiently(agent, &user, &format!("/{rule}"));
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
    runtime.block_on(servers.successor().until_info("replication", "role:master"));
    let old = format!(":{}", servers.predecessor().port());
    for agent in &nodes {
        until(&format!("{what}: the successor is known"), WAIT, || {
            let status = agent.status();
            let shards = status["store"]["shards"].as_array().expect("shards");
            let knows_old = shards.iter().any(|shard| shard["name"].as_str().expect("a name").ends_with(&old));
            (status["degraded"] == json!(false) && !knows_old).then_some(())
        });
    }
    are_shared(runtime, &what, servers.successor(), &nodes, || newcomer(servers));
    let opened_before = nodes.each_ref().map(opened);

    // It comes back, and has nothing to say any more.
    match end {
        End::Dies | End::DiesForAll => runtime.block_on(servers.predecessor_mut().restart()),
        End::StandsStill => servers.predecessor().thaw(),
        End::HandsOver => {}
    }
    runtime.block_on(servers.predecessor().until_info("replication", "role:slave"));
    are_shared(runtime, &what, servers.successor(), &nodes, || newcomer(servers));
    for agent in &nodes {
        assert_eq!(agent.status()["degraded"], json!(false), "{what}: {}", agent.status());
    }
    assert_eq!(nodes.each_ref().map(opened), opened_before, "{what}");
}

#[test]
fn the_successor_of_a_primary_of_a_cluster_is_found_whoever_is_quiet() {
    let runtime = runtime();
    let mut users = 0..;
    let mut servers = Servers::Cluster { servers: runtime.block_on(RedisCluster::start_with_replicas(3)), lost: 0 };
    // The second has the heartbeats.
    for (number, end) in [
        (0, End::HandsOver),
        (1, End::HandsOver),
        (0, End::Dies),
        (1, End::Dies),
        (2, End::StandsStill),
        (2, End::DiesForAll),
    ] {
        if let Servers::Cluster { lost, .. } = &mut servers {
            *lost = number;
        }
        is_followed(&runtime, end, &mut servers, &mut users);
        runtime.block_on(servers.rename());
    }
}

#[test]
fn the_successor_that_sentinels_name_is_found_whoever_is_quiet() {
    let runtime = runtime();
    for end in [End::Dies, End::StandsStill] {
        let servers = runtime.block_on(RedisSentinels::start());
        is_followed(&runtime, end, &mut Servers::Sentinel(servers), &mut (0..));
    }
}

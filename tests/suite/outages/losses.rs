//! What servers lose while clients are quiet: it is noticed all the same, and no client gets a fresh limit by it.

use limiter_tests::{
    agent::{Agent, Setup},
    eventually::until,
    policy::rule_of_path,
    redis_cluster::RedisCluster,
    redis_server::RedisServer,
    window::{DAY, await_room},
};
use serde_json::json;

use crate::{WAIT, ask, node, runtime, until_sent, until_whole};

const LIMIT: usize = 5;
const PER_DAY: &str = "scope = \"user\"\nlimit = 5\nwindow = \"1d\"";

#[derive(Clone, Copy, Debug)]
enum Loss {
    Flushed,
    RestartedEmpty,
}

/// Kinds of counters that nodes have an account of, each of a path of its own.
fn rules() -> Vec<String> {
    let algorithms = ["sliding_window", "fixed_window", "token_bucket", "sliding_log"];
    ["async", "local"]
        .iter()
        .flat_map(|precision| algorithms.map(|algorithm| format!("{precision}-{algorithm}")))
        .collect()
}

fn policy() -> String {
    let mut text = String::new();
    for rule in rules() {
        let (precision, algorithm) = rule.split_once('-').expect("both");
        let more = format!("precision = \"{precision}\"\nalgorithm = \"{algorithm}\"\n{PER_DAY}");
        text.push_str(&rule_of_path(&rule, &more));
    }
    text
}

/// One server, or the primaries of a cluster.
enum Servers {
    One(RedisServer),
    Cluster(RedisCluster),
}

impl Servers {
    fn access(&self) -> String {
        match self {
            Self::One(server) => server.access(),
            Self::Cluster(servers) => servers.access(),
        }
    }

    fn all(&mut self) -> &mut [RedisServer] {
        match self {
            Self::One(server) => std::slice::from_mut(server),
            Self::Cluster(servers) => &mut servers.primaries,
        }
    }

    /// Names of the counters of each.
    async fn counters(&mut self) -> Vec<Vec<String>> {
        let mut all = Vec::new();
        for server in self.all() {
            let mut counters = server.counters().await;
            counters.sort_unstable();
            all.push(counters);
        }
        all
    }
}

fn refills(agent: &Agent<'_>) -> f64 {
    agent.metric("limiter_sync_refills_total")
}

#[test]
fn what_a_server_loses_is_noticed_while_clients_are_quiet() {
    let runtime = runtime();
    for (primaries, server, loss) in [
        (1, 0, Loss::Flushed),
        (1, 0, Loss::RestartedEmpty),
        (3, 0, Loss::Flushed),
        // The one with the heartbeats.
        (3, 1, Loss::Flushed),
        (3, 2, Loss::RestartedEmpty),
    ] {
        let what = format!("{server} of {primaries}, {loss:?}");
        await_room(DAY);
        let mut servers = match primaries {
            1 => Servers::One(runtime.block_on(RedisServer::start())),
            count => Servers::Cluster(runtime.block_on(RedisCluster::start(count))),
        };
        let setups = ["a", "b"].map(|name| node(name, &servers.access(), &policy()));
        let [a, b] = setups.each_ref().map(Setup::start);
        for agent in [&a, &b] {
            until_whole(agent);
        }
        let users: Vec<String> = (0..12).map(|number| format!("u{number}")).collect();
        for user in &users {
            for rule in rules() {
                let path = format!("/{rule}");
                // Buckets count to the nanosecond, and the clock of the fleet is still being set by less than that takes.
                let mut used = 0;
                until(&format!("{what}: {rule}: {LIMIT} are used"), WAIT, || {
                    used += usize::from(ask(&a, user, &path).0 == "allowed");
                    (used == LIMIT).then_some(())
                });
                assert_eq!(ask(&a, user, &path).0, "rate_limit_exceeded", "{what}: {rule}");
            }
        }
        until_sent(&a);
        let before = runtime.block_on(servers.counters());
        assert!(before.iter().all(|counters| !counters.is_empty()), "{what}: {before:?}");

        let lost = &mut servers.all()[server];
        match loss {
            Loss::Flushed => runtime.block_on(lost.run::<()>(&["FLUSHALL"])),
            Loss::RestartedEmpty => runtime.block_on(lost.restart()),
        }
        let port = lost.port().to_string();
        // Nobody asks anything meanwhile.
        until(&format!("{what}: it has everything again"), WAIT, || {
            (runtime.block_on(servers.counters()) == before).then_some(())
        });
        until_sent(&a);
        for agent in [&a, &b] {
            until(&format!("{what}: both have noticed"), WAIT, || (refills(agent) > 0.0).then_some(()));
        }
        for user in &users {
            for rule in rules() {
                // Who has never heard of a client cannot know it yet.
                ask(&b, user, &format!("/{rule}"));
            }
        }
        until_sent(&b);
        for user in &users {
            for rule in rules() {
                assert_eq!(ask(&b, user, &format!("/{rule}")).0, "rate_limit_exceeded", "{what}: {user}, {rule}");
            }
        }
        for (agent, setup) in [&a, &b].into_iter().zip(&setups) {
            until_whole(agent);
            assert_eq!(refills(agent), 1.0, "{what}: {}", setup.log());
            let log = setup.log();
            let lines: Vec<&str> =
                log.lines().filter(|line| line.contains("sending its live counters again")).collect();
            assert!(lines.len() == 1 && lines[0].contains(&port), "{what}: {log}");
        }
        assert_eq!(a.status()["ready"], json!(true));
    }
}

//! What an agent learns from Redis when it starts, and what Redis learns again from agents.

use std::time::Duration;

use limiter_tests::{
    agent::Agent,
    eventually::until,
    redis_cluster::RedisCluster,
    redis_server::RedisServer,
    window::{HOUR, await_room},
};
use limiter_user::{clock::Stopwatch, store::redis::ACL_RULES};
use serde_json::json;

use crate::{WAIT, node, runtime, until_sent, until_whole};

const RULES: &str = "\
[plans.free]
[[rules]]
id = \"sliding\"
scope = \"user\"
limit = 5
window = \"1h\"
[[rules]]
id = \"by-address\"
scope = \"ip\"
limit = 7
window = \"1d\"
algorithm = \"fixed_window\"
[[rules]]
id = \"bucket\"
scope = \"attribute:tenant\"
limit = 6
window = \"1d\"
algorithm = \"token_bucket\"
[[rules]]
id = \"log\"
scope = \"user\"
endpoint = \"other\"
limit = 4
window = \"1h\"
algorithm = \"sliding_log\"
[[endpoints]]
name = \"other\"
match = [\"/other\"]
";

/// Everybody who asks: what the question has, and how often it is allowed.
fn askers() -> Vec<(serde_json::Value, usize)> {
    let mut askers = vec![
        (json!({ "ip": "203.0.113.9" }), 7),
        (json!({ "ip": "2001:db8:0:7::1" }), 7),
        (json!({ "attributes": { "tenant": "a:b}c" } }), 6),
        (json!({ "user": "other", "path": "/other" }), 4),
        (json!({ "session": "s 1" }), 3),
    ];
    askers.extend((0..20).map(|number| (json!({ "user": format!("u{number}:}}{{") }), 5)));
    askers
}

fn is_allowed(agent: &Agent<'_>, question: &serde_json::Value) -> bool {
    agent.decide(question.clone())["allowed"] == json!(true)
}

#[test]
fn a_restarted_agent_knows_what_was_used_with_its_first_answer() {
    let runtime = runtime();
    // The windows of an hour begin when that of the day does, or later.
    await_room(HOUR);
    for is_cluster in [false, true] {
        let (cluster, server) = match is_cluster {
            true => (Some(runtime.block_on(RedisCluster::start(3))), None),
            false => (None, Some(runtime.block_on(RedisServer::start()))),
        };
        let access = match (&cluster, &server) {
            (Some(cluster), _) => cluster.access(),
            (None, Some(server)) => server.access(),
            (None, None) => unreachable!("one of them is there"),
        };
        let secret =
            "[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"keys.secret\"\nsession_cookie = \"sid\"\n";
        let rules = format!("{RULES}[[rules]]\nid = \"session\"\nscope = \"session\"\nlimit = 3\nwindow = \"1h\"\n");
        let setup = node("a", &format!("{access}{secret}"), &rules);
        // Makes the secret, by which sessions are hashed.
        setup.add_key("c_1", "free");
        let agent = setup.start();
        until_whole(&agent);
        for (question, limit) in askers() {
            let allowed = (0..limit + 2).filter(|_| is_allowed(&agent, &question)).count();
            assert_eq!(allowed, limit, "{question}");
        }
        until_sent(&agent);
        agent.kill();
        let agent = setup.start();
        for (question, _) in askers() {
            assert!(!is_allowed(&agent, &question), "{question} in a cluster: {is_cluster}");
        }
        let log = setup.log();
        let line = log.lines().rfind(|line| line.contains("took over the counters")).unwrap_or_else(|| panic!("{log}"));
        assert!(line.contains("counters=26"), "{line}");
        assert!(agent.stop().success());

        // Rules that are gone, or that count others by now, take nothing over.
        setup.write("policy.toml", &rules.replace("\"sliding\"", "\"new\"").replace("\"ip\"", "\"global\""));
        let agent = setup.start();
        let log = setup.log();
        let line = log.lines().rfind(|line| line.contains("took over the counters")).unwrap_or_else(|| panic!("{log}"));
        assert!(line.contains("counters=3"), "{line}");
        assert!(is_allowed(&agent, &json!({ "user": "u0:}{" })));
    }
}

#[test]
fn a_start_takes_over_no_more_than_it_may() {
    let runtime = runtime();
    let server = runtime.block_on(RedisServer::start());
    let access = server.access();
    let setup = node("a", &access, RULES);
    let agent = setup.start();
    for number in 0..3000 {
        assert!(is_allowed(&agent, &json!({ "user": format!("u{number}") })));
    }
    until_sent(&agent);
    // What is no counter of this agent's harms nobody.
    for (name, value) in
        [("rl:{user:x}:sliding", "nonsense"), ("rl:{user:%2}:sliding", ""), ("rl:{ip:1}:by-address", "")]
    {
        let () = runtime.block_on(server.run(&["SET", name, value]));
    }
    let () = runtime.block_on(server.run(&["LPUSH", "rl:{user:y}:sliding", "1"]));
    agent.kill();
    let few = |recover: &str| {
        format!("[node]\nid = \"a\"\n[store]\nkind = \"redis\"\nmax_counters = 1000\n[store.redis]\n{recover}{access}")
    };
    setup.configure(&few(""));
    let agent = setup.start();
    let status = agent.status();
    assert_eq!(status["store"]["counters"], json!(1000), "{status}");
    assert!(setup.log().contains("no more than store.max_counters fit"), "{}", setup.log());
    agent.kill();

    // Without the right to, and with too little time, it starts all the same.
    let rights = ACL_RULES.replace(" +scan", "");
    let rights: Vec<&str> = rights.split(' ').collect();
    let () =
        runtime.block_on(server.run(&[&["ACL", "SETUSER", "default", "resetkeys", "-@all"], &rights[..]].concat()));
    let agent = setup.start();
    until("the reason is told", WAIT, || setup.log().contains("permission").then_some(()));
    until_whole(&agent);
    agent.kill();
    server.freeze();
    let watch = Stopwatch::start();
    let agent = setup.start();
    assert!(watch.elapsed() < Duration::from_secs(10), "{:?}", watch.elapsed());
    assert_eq!(agent.status()["degraded"], json!(true));
    server.thaw();
}

#[test]
fn of_a_cluster_the_shard_that_came_back_empty_is_filled_again() {
    let runtime = runtime();
    let servers = runtime.block_on(RedisCluster::start(3));
    let setup = node("a", &servers.access(), RULES);
    let agent = setup.start();
    until_whole(&agent);
    let users: Vec<String> = (0..60).map(|number| format!("u{number}")).collect();
    for user in &users {
        assert!(is_allowed(&agent, &json!({ "user": user })));
    }
    until_sent(&agent);
    let counters = |servers: &RedisCluster| -> Vec<usize> {
        servers.primaries.iter().map(|primary| runtime.block_on(primary.counters()).len()).collect()
    };
    let before = counters(&servers);
    assert!(before.iter().all(|count| *count > 5), "{before:?}");
    let sent = agent.metric("limiter_sync_counters_total");
    // Flushed: noticed by the first counter that is sent again.
    let () = runtime.block_on(servers.primaries[1].run(&["FLUSHALL"]));
    until("the shard is filled again", WAIT, || {
        for user in &users[..20] {
            is_allowed(&agent, &json!({ "user": user }));
        }
        (counters(&servers) == before).then_some(())
    });
    until_sent(&agent);
    assert_eq!(agent.metric("limiter_sync_refills_total"), 1.0);
    let again = agent.metric("limiter_sync_counters_total") - sent;
    let log = setup.log();
    let line =
        log.lines().find(|line| line.contains("sending its live counters again")).unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains(&servers.primaries[1].port().to_string()), "{line}");
    assert!(again < 20.0 * 8.0 + before[1] as f64 + 20.0, "{again} of {before:?}: the others are left alone");
}

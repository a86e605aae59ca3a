//! Several agents and one real redis-server.

use std::time::Duration;

use limiter_tests::{
    agent::{Agent, Setup},
    eventually::until,
    http,
    redis_cluster::RedisCluster,
    redis_sentinel::{RedisSentinels, SERVICE},
    redis_server::{RedisServer, free_port},
    redis_tls::Authority,
};
use limiter_user::{clock::Stopwatch, store::redis::ACL_RULES};
use serde_json::json;

const WAIT: Duration = Duration::from_secs(20);

const POLICY: &str = "[[rules]]\nid = \"per-user\"\nscope = \"user\"\nlimit = 20\nwindow = \"1h\"\n";

fn node(name: &str, redis: &RedisServer) -> Setup {
    node_at(name, &format!("urls = [\"{}\"]\n", redis.url()))
}

fn node_at(name: &str, redis: &str) -> Setup {
    Setup::new(
        &format!(
            "[node]\nid = \"{name}\"\n[store]\nkind = \"redis\"\n[store.breaker]\nprobe = \"200ms\"\n[store.redis]\n{redis}"
        ),
        POLICY,
    )
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn remaining(agent: &Agent<'_>, user: &str) -> u64 {
    agent.decide(json!({ "user": user, "peek": true }))["remaining"].as_u64().expect("a rule applies")
}

fn use_one(agent: &Agent<'_>, user: &str) -> bool {
    agent.decide(json!({ "user": user }))["allowed"] == json!(true)
}

/// Waits until Redis has everything that the agents have admitted.
fn shared(agents: [&Agent<'_>; 2]) {
    until("everything is shared", WAIT, || {
        let pending: f64 = agents.iter().map(|agent| agent.metric("limiter_sync_pending")).sum();
        let lag: f64 = agents.iter().map(|agent| agent.metric("limiter_sync_lag_seconds")).sum();
        let degraded = agents.iter().any(|agent| agent.status()["degraded"] == json!(true));
        (pending == 0.0 && lag == 0.0 && !degraded).then_some(())
    });
}

#[test]
fn metrics_say_what_decisions_were_made_from() {
    let redis = runtime().block_on(RedisServer::start());
    let policy: String = ["async", "local", "leased", "strict"]
        .iter()
        .map(|precision| {
            format!(
                "[[endpoints]]\nname = \"{precision}\"\nmatch = [\"/{precision}\"]\n[[rules]]\nid = \"{precision}\"\n\
                 endpoint = \"{precision}\"\nscope = \"user\"\nlimit = 5\nwindow = \"1h\"\nprecision = \"{precision}\"\n"
            )
        })
        .collect();
    let configuration =
        format!("[store]\nkind = \"redis\"\n[store.redis]\ntimeout = \"1s\"\nurls = [\"{}\"]\n", redis.url());
    let setup = Setup::new(&configuration, &policy);
    let agent = setup.start();
    let counted = |rule: &str, decision: &str, source: &str| {
        let labels = format!("rule=\"{rule}\",decision=\"{decision}\",source=\"{source}\"");
        agent.metric(&format!("limiter_checks_total{{{labels}}}"))
    };
    for (rule, allows, denies) in [
        ("async", "memory", &["memory"][..]),
        ("local", "memory", &["memory"]),
        ("leased", "lease", &["lease"]),
        ("strict", "redis", &["redis", "remembered"]),
    ] {
        let ask = || agent.decide(json!({ "user": "u", "path": format!("/{rule}") }))["allowed"] == json!(true);
        assert_eq!((0..5).map(|_| ask()).filter(|allowed| *allowed).count(), 5, "{rule}");
        let mut denied = 0.0;
        // A machine that is busy may forget a denial before the next request.
        until("each source has denied", WAIT, || {
            assert!(!ask(), "{rule}");
            denied += 1.0;
            denies.iter().all(|source| counted(rule, "denied", source) > 0.0).then_some(())
        });
        assert_eq!(counted(rule, "allowed", allows), 5.0, "{rule}");
        assert_eq!(denies.iter().map(|source| counted(rule, "denied", source)).sum::<f64>(), denied, "{rule}");
    }
}

#[test]
fn a_key_used_on_two_agents_is_limited_as_one() {
    let runtime = runtime();
    let redis = runtime.block_on(RedisServer::start());
    let (a, b) = (node("a", &redis), node("b", &redis));
    let (a, b) = (a.start(), b.start());
    for _ in 0..8 {
        assert!(use_one(&a, "u_1"));
    }
    shared([&a, &b]);
    // The exchange that a node's own count causes brings what the others have.
    assert!(use_one(&b, "u_1"));
    let mut used = 9;
    until("b knows what a has admitted", WAIT, || {
        if remaining(&b, "u_1") == 20 - used {
            return Some(());
        }
        None
    });
    while use_one(&b, "u_1") {
        used += 1;
    }
    assert_eq!(used, 20, "together they admit the limit");
    until("a knows what b has admitted", WAIT, || {
        if use_one(&a, "u_1") {
            used += 1;
            None
        } else {
            Some(())
        }
    });
    // What a admitted before it heard of b is within one interval.
    assert!(used <= 40, "{used}");
    assert!(use_one(&a, "u_2"), "another user is another counter");

    let (keys, ttls) = runtime.block_on(async {
        let keys = redis.counters().await;
        let mut ttls = Vec::new();
        for key in &keys {
            ttls.push(redis.run::<i64>(&["PTTL", key]).await);
        }
        (keys, ttls)
    });
    assert!(keys.contains(&"rl:{user:u_1}:per-user".to_owned()), "{keys:?}");
    assert!(ttls.iter().all(|ttl| (1..=2 * 3_600_000).contains(ttl)), "{keys:?} {ttls:?}");
}

/// Two agents admit what one limit allows, wherever the counters are.
fn limited_as_one(name: &str, redis: &str) {
    let (a, b) = (node_at("a", redis), node_at("b", redis));
    let (a, b) = (a.start(), b.start());
    for _ in 0..8 {
        assert!(use_one(&a, "u_1"), "{name}");
    }
    shared([&a, &b]);
    assert!(use_one(&b, "u_1"), "{name}");
    until("b knows what a has admitted", WAIT, || (remaining(&b, "u_1") == 11).then_some(()));
}

#[test]
fn counters_are_where_the_configuration_says() {
    // As the documentation says, of a user with no more rights than these.
    async fn allow(server: &RedisServer, more: &str) {
        server.set_user("limiter", "pw", &format!("{ACL_RULES}{more}")).await;
    }
    let quoted = |urls: &[String]| format!("urls = {urls:?}\nusername = \"limiter\"\npassword_file = \"password\"\n");
    let folder = tempfile::tempdir().expect("a folder");
    let password = folder.path().join("password");
    std::fs::write(&password, "pw\n").expect("write the password");
    let with_password = |text: String| text.replace("\"password\"", &format!("{password:?}"));
    let runtime = runtime();

    let cluster = runtime.block_on(RedisCluster::start(3));
    for primary in &cluster.primaries {
        runtime.block_on(allow(primary, " +cluster|slots"));
    }
    limited_as_one("cluster", &with_password(quoted(&cluster.urls()) + "mode = \"cluster\"\n"));
    drop(cluster);

    let sentinels = runtime.block_on(RedisSentinels::start());
    runtime.block_on(allow(&sentinels.primary, " +role"));
    let mode = format!("mode = \"sentinel\"\nservice = \"{SERVICE}\"\n");
    limited_as_one("sentinel", &with_password(quoted(&sentinels.urls()) + &mode));
    drop(sentinels);

    let (authority, port) = (Authority::new(), free_port());
    let server = runtime.block_on(authority.start_redis(port));
    runtime.block_on(allow(&server, ""));
    let tls = format!(
        "[store.redis.tls]\nca_file = {:?}\ncert_file = {:?}\nkey_file = {:?}\n",
        authority.ca(),
        authority.certificate("client"),
        authority.key("client")
    );
    limited_as_one("tls", &with_password(quoted(&[format!("rediss://localhost:{port}")]) + &tls));
}

#[test]
fn an_agent_starts_without_redis_and_says_so() {
    let runtime = runtime();
    let mut redis = runtime.block_on(RedisServer::start());
    redis.kill();
    let setup = node("a", &redis);
    let agent = setup.start();
    assert_eq!(agent.status()["degraded"], json!(true));
    let allowed = (0..30).filter(|_| use_one(&agent, "u_1")).count();
    assert_eq!(allowed, 20, "limits hold from what the node itself knows");
    runtime.block_on(redis.restart());
    until("the agent has found Redis", WAIT, || (agent.status()["degraded"] == json!(false)).then_some(()));
    let found = until("the counts are shared", WAIT, || {
        let keys = runtime.block_on(redis.counters());
        (!keys.is_empty()).then_some(keys)
    });
    assert_eq!(found, ["rl:{user:u_1}:per-user"]);
}

#[test]
fn a_graceful_stop_hands_over_what_redis_does_not_have() {
    let runtime = runtime();
    let redis = runtime.block_on(RedisServer::start());
    let (a, b) = (node("a", &redis), node("b", &redis));
    let agent = a.start();
    for _ in 0..20 {
        assert!(use_one(&agent, "u_1"));
    }
    assert!(agent.stop().success());
    let agent = b.start();
    until("the counts of the first are known", WAIT, || if use_one(&agent, "u_1") { None } else { Some(()) });
}

#[test]
fn calls_to_redis_do_not_grow_with_requests() {
    let runtime = runtime();
    let redis = runtime.block_on(RedisServer::start());
    let setup = node("a", &redis);
    let agent = setup.start();
    shared([&agent, &agent]);
    let calls = || agent.metric("limiter_store_calls_total{result=\"ok\"}");
    let (started, before) = (Stopwatch::start(), calls());
    let mut asked = 0;
    while asked < 2000 {
        let questions: Vec<_> = (0..100).map(|user| json!({ "user": format!("u_{user}") })).collect();
        let answers = http::post(&setup.http(), "/v1/decide", &json!(questions)).expect("an answer");
        assert_eq!(answers.json().as_array().map(Vec::len), Some(100));
        asked += 100;
    }
    shared([&agent, &agent]);
    // One pipelined batch an interval, however many requests and counters.
    let most = started.elapsed().as_secs_f64() / 0.05 + 3.0;
    let made = calls() - before;
    assert!(made >= 1.0 && made <= most, "{made} calls where at most {most} are due");
    let keys = runtime.block_on(redis.counters());
    assert_eq!(keys.len(), 100);
}

#[test]
fn each_rule_is_as_exact_as_it_says() {
    let runtime = runtime();
    let redis = runtime.block_on(RedisServer::start());
    let rule = |precision: &str| {
        format!(
            "[[rules]]\nid = \"{precision}\"\nscope = \"attribute:p-{precision}\"\nprecision = \"{precision}\"\nlimit = 60\nwindow = \"1h\"\n"
        )
    };
    let policy = rule("strict") + &rule("leased");
    let node = |name: &str| {
        let store =
            format!("[store]\nkind = \"redis\"\n[store.redis]\nurls = [\"{}\"]\ntimeout = \"1s\"\n", redis.url());
        Setup::new(&format!("[node]\nid = \"{name}\"\n{store}"), &policy)
    };
    let (a, b) = (node("a"), node("b"));
    let (a, b) = (a.start(), b.start());
    let ask = |agent: &Agent<'_>, precision: &str| {
        let attributes = json!({ format!("p-{precision}"): "x" });
        agent.decide(json!({ "attributes": attributes }))["allowed"] == json!(true)
    };
    // In turns, and in batches whose questions wait together.
    let batch = |agent: &Agent<'_>, precision: &str| {
        let attributes = json!({ format!("p-{precision}"): "x" });
        let questions = json!(vec![json!({ "attributes": attributes }); 20]);
        let answers = http::post(&agent.setup().http(), "/v1/decide", &questions).expect("an answer").json();
        let answers = answers.as_array().expect("a batch").clone();
        answers.iter().filter(|answer| answer["allowed"] == json!(true)).count()
    };
    for precision in ["strict", "leased"] {
        let mut allowed = 0;
        for _ in 0..5 {
            allowed += usize::from(ask(&a, precision)) + usize::from(ask(&b, precision));
        }
        assert_eq!(allowed, 10, "{precision}");
        allowed += batch(&a, precision) + batch(&b, precision);
        assert!(allowed <= 50, "{precision}: {allowed}");
        // What one was lent and does not use is the other's again.
        until("the limit is used up", WAIT, || {
            allowed += usize::from(ask(&b, precision));
            (allowed == 60).then_some(())
        });
        assert!(!ask(&a, precision) && !ask(&b, precision), "{precision}");
        assert_eq!(batch(&a, precision) + batch(&b, precision), 0, "{precision}");
    }
    assert!(a.metric("limiter_lease_requests_total{result=\"hit\"}") > 0.0);
    assert!(a.metric("limiter_lease_requests_total{result=\"miss\"}") > 0.0);
    assert!(a.metric("limiter_lease_units_total{fate=\"lent\"}") > 0.0);
    assert_eq!(a.metric("limiter_overshoot_units{rule=\"strict\"}"), 0.0);
    assert!(a.stop().success() && b.stop().success());
}

/// Answers in time.
mod alone {
    use super::*;

    #[test]
    fn redis_dies_and_comes_back_empty_and_every_request_is_answered_in_time() {
        let runtime = runtime();
        let mut redis = runtime.block_on(RedisServer::start());
        let [a, b, c] = ["a", "b", "c"].map(|name| node(name, &redis));
        let (a, b) = (a.start(), b.start());
        for _ in 0..3 {
            assert!(use_one(&a, "u_1"));
        }
        shared([&a, &b]);
        for _ in 0..3 {
            assert!(use_one(&b, "u_1"));
        }
        until("b knows what a has admitted", WAIT, || (remaining(&b, "u_1") == 14).then_some(()));

        redis.kill();
        let mut slowest = Duration::ZERO;
        for request in 0..400 {
            let started = Stopwatch::start();
            let allowed = a.decide(json!({ "user": format!("away-{}", request % 100) }))["allowed"].clone();
            slowest = slowest.max(started.elapsed());
            assert_eq!(allowed, json!(true));
        }
        // A request that waited for Redis would take seconds.
        assert!(slowest < Duration::from_millis(500), "{slowest:?}");
        until("the agent says that it is degraded", WAIT, || (a.status()["degraded"] == json!(true)).then_some(()));
        assert!(use_one(&b, "u_1"));
        assert_eq!(remaining(&b, "u_1"), 13, "what was known stays known");

        runtime.block_on(redis.restart());
        shared([&a, &b]);
        // Who knew nothing before learns from Redis what both have admitted.
        let c = c.start();
        assert!(use_one(&c, "u_1"));
        until("a third agent knows of all", WAIT, || (remaining(&c, "u_1") == 12).then_some(()));
        let kept = runtime.block_on(async { redis.run::<Vec<String>>(&["KEYS", "rl:{user:away-*"]).await });
        assert_eq!(kept.len(), 100, "what was admitted meanwhile is shared afterwards");
    }
}

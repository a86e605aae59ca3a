//! What the metrics of sharing say after a load of which everything is known.

use std::time::Duration;

use limiter_tests::{
    agent::{Agent, Setup},
    counted::counted,
    delay_proxy::DelayProxy,
    eventually::until,
    policy::rule_of_path,
    redis_server::RedisServer,
    window::{DAY, await_room},
};
use limiter_user::store::redis::RedisConfig;
use serde_json::json;

use crate::{DAY_US, WAIT, ask, runtime, until_sent, until_whole};

const LIMIT: u32 = 5;

fn policy() -> String {
    let rule = |id: &str, limit: u32, window: &str| {
        let precision = if id == "short" { "async" } else { id };
        let more = format!("scope = \"user\"\nprecision = \"{precision}\"\nlimit = {limit}\nwindow = \"{window}\"");
        rule_of_path(id, &more)
    };
    rule("async", LIMIT, "1d") + &rule("short", 1000, "1s") + &rule("leased", 1000, "1d") + &rule("strict", 1000, "1d")
}

/// A node that never leaves its server alone, so that nothing is decided by shares.
fn node(name: &str, access: &str, more: &str) -> Setup {
    let configuration = format!(
        "[node]\nid = \"{name}\"\n[store]\nkind = \"redis\"\n{more}\
         [store.breaker]\nfailures = 1000\nwithin = \"1s\"\n[store.redis]\ntimeout = \"1s\"\n{access}"
    );
    Setup::new(&configuration, &policy())
}

fn until_metric(agent: &Agent<'_>, series: &str, expected: f64) {
    let mut last = 0.0;
    until(&format!("{series} is {expected}"), WAIT, || {
        last = agent.metric(series);
        (last == expected).then_some(())
    });
}

fn use_cost(agent: &Agent<'_>, user: &str, path: &str, cost: u32) {
    let answer = agent.decide(json!({ "user": user, "path": path, "cost": cost }));
    assert_eq!(answer["reason"], json!("allowed"), "{answer}");
}

#[test]
fn batches_and_what_never_comes_into_one_are_counted_to_the_unit() {
    let runtime = runtime();
    await_room(DAY);
    let mut server = runtime.block_on(RedisServer::start());
    server.kill();
    let setup = node("a", &server.access(), "");
    let agent = setup.start();
    for number in 0..40 {
        use_cost(&agent, &format!("u{number}"), "/async", 2);
    }
    assert_eq!(agent.metric("limiter_sync_pending"), 40.0);
    for series in ["limiter_sync_batches_total", "limiter_sync_counters_total", "limiter_sync_last_batch"] {
        assert_eq!(agent.metric(series), 0.0, "{series}");
    }
    runtime.block_on(server.restart());
    until_sent(&agent);
    for (series, expected) in [
        ("limiter_sync_batches_total", 1.0),
        ("limiter_sync_counters_total", 40.0),
        ("limiter_sync_last_batch", 40.0),
        ("limiter_sync_lost_counters_total", 0.0),
        ("limiter_sync_dropped_units_total{reason=\"window_over\"}", 0.0),
        ("limiter_sync_dropped_units_total{reason=\"evicted\"}", 0.0),
    ] {
        assert_eq!(agent.metric(series), expected, "{series}");
    }
    // Of windows that are over before Redis is back, it will not hear.
    server.kill();
    for user in ["x", "y", "z"] {
        use_cost(&agent, user, "/short", 7);
    }
    until_metric(&agent, "limiter_sync_dropped_units_total{reason=\"window_over\"}", 21.0);
    runtime.block_on(server.restart());
    until_sent(&agent);
    assert_eq!(agent.metric("limiter_sync_dropped_units_total{reason=\"evicted\"}"), 0.0);
}

#[test]
fn what_is_given_up_for_want_of_room_is_counted_to_the_unit() {
    let runtime = runtime();
    let mut server = runtime.block_on(RedisServer::start());
    server.kill();
    let setup = node("a", &server.access(), "max_counters = 1000\n");
    let agent = setup.start();
    for number in 0..1200 {
        use_cost(&agent, &format!("u{number}"), "/async", 3);
    }
    let evicted = agent.metric("limiter_counters_evicted_total");
    let dropped = agent.metric("limiter_sync_dropped_units_total{reason=\"evicted\"}");
    assert!(evicted >= 200.0 && dropped == 3.0 * evicted, "{evicted} {dropped}");
    runtime.block_on(server.restart());
    until_sent(&agent);
    assert_eq!(agent.metric("limiter_sync_counters_total"), 1200.0 - evicted);
}

#[test]
fn calls_are_timed_and_no_call_is_missing() {
    let runtime = runtime();
    let server = runtime.block_on(RedisServer::start());
    let proxy = runtime.block_on(DelayProxy::start(server.port(), Duration::from_millis(30)));
    let setup = node("a", &format!("urls = [\"{}\"]\n", proxy.url()), "");
    let agent = setup.start();
    until_whole(&agent);
    for number in 0..20 {
        assert_eq!(ask(&agent, &format!("u{number}"), "/strict").0, "allowed");
    }
    // Between the parts of one answer another call may end.
    let text = limiter_tests::http::get(&setup.admin(), "/metrics", &[]).expect("an answer").body;
    let number = |series: &str| -> f64 {
        let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or_else(|| panic!("no {series} in {text}"))
    };
    let calls: f64 = ["ok", "timeout", "unavailable", "bad_reply"]
        .map(|result| number(&format!("limiter_store_calls_total{{result=\"{result}\"}}")))
        .iter()
        .sum();
    let duration = "limiter_store_call_duration_seconds";
    assert_eq!(number(&format!("{duration}_count")), calls);
    assert_eq!(number(&format!("{duration}_bucket{{le=\"+Inf\"}}")), calls);
    assert!(calls >= 20.0, "{calls}");
    // None is quicker than the way to Redis.
    assert_eq!(number(&format!("{duration}_bucket{{le=\"0.025\"}}")), 0.0);
    assert!(number(&format!("{duration}_sum")) >= 0.03 * calls, "{text}");
}

#[test]
fn a_counter_that_is_evicted_is_noticed_counted_and_goes_on() {
    let runtime = runtime();
    await_room(DAY);
    let server = runtime.block_on(RedisServer::start());
    let setup = node("a", &server.access(), "");
    let agent = setup.start();
    until_whole(&agent);
    for (path, rule) in [("/async", "async"), ("/leased", "leased"), ("/strict", "strict")] {
        let in_redis = || {
            let config = RedisConfig::new(server.url());
            runtime.block_on(counted(&config, "u", rule, DAY_US)).expect("Redis answers")
        };
        use_cost(&agent, "u", path, 2);
        until_sent(&agent);
        until(&format!("{path}: it is counted, and nothing else"), WAIT, || (in_redis() == 2).then_some(()));
        let before = agent.metric("limiter_sync_lost_counters_total");
        let there: u32 = runtime.block_on(server.run(&["DEL", &format!("rl:{{user:u}}:{rule}")]));
        assert_eq!(there, 1, "{path}");
        use_cost(&agent, "u", path, 1);
        until(&format!("{path}: it goes on where it was"), WAIT, || (in_redis() == 3).then_some(()));
        // A lease that is told again says itself what is in it.
        let noticed = if rule == "leased" { 0.0 } else { 1.0 };
        until_metric(&agent, "limiter_sync_lost_counters_total", before + noticed);
    }
}

#[test]
fn leases_say_who_waited_and_what_became_of_them() {
    let runtime = runtime();
    await_room(DAY);
    let server = runtime.block_on(RedisServer::start());
    let setup = node("a", &server.access(), "");
    let agent = setup.start();
    until_whole(&agent);
    for _ in 0..50 {
        assert_eq!(ask(&agent, "u", "/leased").0, "allowed");
    }
    let requests = |result: &str| agent.metric(&format!("limiter_lease_requests_total{{result=\"{result}\"}}"));
    let units = |fate: &str| agent.metric(&format!("limiter_lease_units_total{{fate=\"{fate}\"}}"));
    until("what is not used goes back", WAIT, || (units("lent") - units("returned") == 50.0).then_some(()));
    assert_eq!((requests("refused"), units("expired")), (0.0, 0.0));
}

#[test]
fn what_two_nodes_admit_above_a_limit_is_told_to_the_unit() {
    let runtime = runtime();
    await_room(DAY);
    let mut server = runtime.block_on(RedisServer::start());
    let setups = ["a", "b"].map(|name| node(name, &server.access(), ""));
    let nodes = setups.each_ref().map(Setup::start);
    nodes.iter().for_each(until_whole);
    for agent in &nodes {
        until_metric(agent, "limiter_live_nodes", 2.0);
    }
    // Two nodes may each have admitted as much before they hear of each other.
    use_cost(&nodes[0], "first", "/async", 4);
    until_metric(&nodes[0], "limiter_overshoot_bound_units{rule=\"async\"}", 8.0);
    server.kill();
    for agent in &nodes {
        use_cost(agent, "u", "/async", LIMIT);
    }
    runtime.block_on(server.restart());
    nodes.iter().for_each(until_sent);
    let told = |metric: &str| nodes.each_ref().map(|agent| agent.metric(&format!("{metric}{{rule=\"async\"}}")));
    // Who shares first hears of itself alone; the other one sees when it decides.
    until("one tells what is above", WAIT, || {
        for agent in &nodes {
            assert_eq!(ask(agent, "u", "/async").0, "rate_limit_exceeded");
        }
        let above = told("limiter_overshoot_units");
        assert!(above.iter().all(|above| *above <= f64::from(LIMIT)), "{above:?}");
        above.contains(&f64::from(LIMIT)).then_some(())
    });
}

//! Calls that agents make: a batch each interval, however many requests there are.

use std::{sync::Arc, time::Duration};

use limiter_tests::{
    bench::{Goal, Row},
    fleet_node::{FleetNode, user},
    rate::ask_at_rate,
    redis_server::RedisServer,
};
use limiter_user::{limiter::Subject, store::redis::RedisConfig};

const INTERVAL: Duration = Duration::from_millis(50);
const TIME: Duration = Duration::from_secs(5);
const KEYS: usize = 100;
const RATE: u64 = 10_000;
const HOT_RATE: u64 = 20_000;
const AT_MOST: Goal = Goal::AtMost(1.0);

pub(crate) async fn measure() -> Vec<Row> {
    let most = Row::new("calls: the most for a thousand requests", "calls", 20.0);
    let interval = Row::new("calls: the most by an agent in an interval", "calls", 1.0);
    let mut rows = Vec::new();
    for precision in ["async", "leased"] {
        for agents in [1, 4] {
            let name = format!("{precision}, agents: {agents}, {KEYS} keys, {RATE} requests/s");
            let cost = of_hundred_keys(precision, agents).await;
            let row = Row::new(format!("calls: {name}, for a thousand"), "calls", cost.calls).beside(&most);
            rows.push(row.goal(AT_MOST));
            rows.push(Row::new(format!("scripts: {name}, for a thousand"), "scripts", cost.scripts));
        }
    }
    for precision in ["async", "leased"] {
        let name =
            format!("calls: {precision}, four agents, one key, {HOT_RATE} requests/s, by an agent in an interval");
        rows.push(Row::new(name, "calls", of_a_hot_key(precision).await).beside(&interval).goal(AT_MOST));
    }
    rows.extend([most, interval]);
    rows
}

struct Cost {
    calls: f64,
    scripts: f64,
}

/// Of a thousand requests, from the outside: how often Redis read something, and how many scripts it ran.
#[expect(clippy::float_arithmetic, reason = "a mean")]
async fn of_hundred_keys(precision: &str, agents: usize) -> Cost {
    let server = RedisServer::start().await;
    let nodes = fleet(&server, precision, agents).await;
    let subjects: Vec<Subject> = super::ids(KEYS).iter().map(|id| user(id)).collect();
    // Leases adapt to the rate of a key.
    ask_at_rate(&nodes, &subjects, RATE, TIME / 5).await;
    let (reads, scripts) = (server.reads().await, server.commands("evalsha").await.calls);
    let asked = ask_at_rate(&nodes, &subjects, RATE, TIME).await;
    let (reads, scripts) = (server.reads().await - reads, server.commands("evalsha").await.calls - scripts);
    assert_eq!(asked.allowed, asked.requests);
    stop(nodes).await;
    let thousands = asked.requests as f64 / 1000.0;
    Cost { calls: reads as f64 / thousands, scripts: scripts as f64 / thousands }
}

#[expect(clippy::float_arithmetic, reason = "a mean")]
async fn of_a_hot_key(precision: &str) -> f64 {
    let server = RedisServer::start().await;
    let nodes = fleet(&server, precision, 4).await;
    let subjects = [user("hot")];
    ask_at_rate(&nodes, &subjects, HOT_RATE, TIME / 5).await;
    server.record_calls().await;
    let asked = ask_at_rate(&nodes, &subjects, HOT_RATE, TIME).await;
    let calls = server.script_calls_about("rl:{user:hot}:r").await;
    assert_eq!(asked.allowed, asked.requests);
    stop(nodes).await;
    calls as f64 * INTERVAL.as_secs_f64() / asked.took.as_secs_f64() / 4.0
}

async fn fleet(server: &RedisServer, precision: &str, agents: usize) -> Vec<Arc<FleetNode>> {
    let policy = format!(
        "[[rules]]\nid = \"r\"\nscope = \"user\"\nprecision = \"{precision}\"\nlimit = 100000000\nwindow = \"1h\"\n"
    );
    let mut config = RedisConfig::new(server.url());
    // A machine that is busy with all of them must not look like a Redis that does not answer.
    config.timeout = Duration::from_secs(2);
    let mut nodes = Vec::new();
    for _ in 0..agents {
        nodes.push(Arc::new(FleetNode::start(&policy, &config, INTERVAL).await));
    }
    nodes
}

async fn stop(nodes: Vec<Arc<FleetNode>>) {
    for node in nodes {
        Arc::into_inner(node).expect("nobody asks it any more").stop().await;
    }
}

//! Clocks that jump back by two seconds: nobody is granted a window twice, and nobody waits for a time that was never true.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use limiter_common::sliding_window::Outcome;
use limiter_tests::{
    clock_proxy::ClockProxy,
    eventually::eventually,
    fleet_node::{FleetNode, user},
    redis_server::RedisServer,
};
use limiter_user::{
    clock::{Clock as _, ManualClock, Stopwatch},
    store::{Cell, Charge, memory::MemoryStore, redis::RedisConfig},
};

use super::{
    behaviour::{T0, every, user as counter_of},
    strict::{patient, rule},
};

const SECOND: u64 = 1_000_000;
const JUMP: Duration = Duration::from_secs(2);
const JUMP_US: u64 = 2 * SECOND;
const TIME: u64 = 8 * SECOND;
const LIMIT: u64 = 40;
const WAIT: Duration = Duration::from_secs(20);
/// Windows shorter than the jump, about as long, and longer.
const WINDOWS: [u64; 5] = [SECOND / 2, SECOND, 2 * SECOND, 3 * SECOND, 60 * SECOND];

#[test]
fn one_node_admits_no_more_when_its_clock_jumps_back() {
    for window_us in WINDOWS {
        for (name, algorithm) in every(LIMIT, window_us) {
            // The jump is at another place of a window each time.
            for phase in 0..10 {
                let what = format!("{name}, {window_us} us, phase {phase}");
                let begin_us = T0 / window_us * window_us + phase * window_us / 10;
                let clock = Arc::new(ManualClock::at(begin_us));
                let memory = MemoryStore::new(clock.clone(), 1000);
                let cells = [Cell { key: counter_of("u", name), algorithm, cost: 1, enforced: true }];
                let step_us = (window_us / LIMIT / 2).min(SECOND / 20);
                let (steps, jump_at) = (TIME / step_us, 3 * SECOND / step_us);
                let (mut admitted, mut since_recovery) = (0u64, 0u64);
                for step in 0..steps {
                    clock.advance(step_us);
                    if step == jump_at {
                        clock.set(clock.now().get() - JUMP_US);
                    }
                    let outcome = memory.decide(clock.now(), Charge::Commit, &cells)[0].outcome;
                    admitted += u64::from(outcome == Outcome::Allowed);
                    // By then everybody who waited has waited for long enough.
                    let recovered = jump_at + (JUMP_US + SECOND / 2) / step_us;
                    since_recovery += u64::from(step >= recovered && outcome == Outcome::Allowed);
                }
                // By true time, and not by what the clock says: what is granted at once, and what comes back.
                let most = LIMIT + LIMIT * TIME / window_us + LIMIT;
                assert!(admitted <= most, "{what}: {admitted} in eight seconds, and not {most} at most");
                if window_us <= SECOND {
                    assert!(since_recovery > 0, "{what}: nobody is let in any more");
                }
            }
        }
    }
}

/// What two nodes admit of one counter while they ask for as long.
async fn ask(nodes: &[FleetNode], name: &str, time: Duration) -> u64 {
    let (mut allowed, watch) = (0, Stopwatch::start());
    while watch.elapsed() < time {
        for node in nodes {
            allowed += u64::from(node.allows(&user(name)).await);
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    allowed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_admit_no_more_when_redis_clock_jumps_back() {
    let both = &["sliding_window", "fixed_window"][..];
    let all = &["sliding_window", "fixed_window", "token_bucket", "sliding_log"][..];
    let rounds = [("async", all), ("leased", both), ("strict", all)]
        .into_iter()
        .flat_map(|(precision, algorithms)| algorithms.iter().map(move |algorithm| jump_back(precision, algorithm)));
    join_all(rounds).await;
}

async fn jump_back(precision: &'static str, algorithm: &'static str) {
    let what = format!("{precision}, {algorithm}");
    let server = RedisServer::start().await;
    let proxy = ClockProxy::start(&server).await;
    let config = patient(RedisConfig::new(proxy.url()));
    let of_window = |id: &str, window: &str| {
        let text = rule(id, "user", precision, LIMIT, &format!("algorithm = \"{algorithm}\""));
        text.replace("1h", window).replace("scope", &format!("endpoint = \"{id}\"\nscope"))
            + &format!("[[endpoints]]\nname = \"{id}\"\nmatch = [\"/{id}\"]\n")
    };
    let policy = of_window("long", "1h")
        + &rule("short", "user", precision, LIMIT, &format!("algorithm = \"{algorithm}\"")).replace("1h", "1s");
    let mut nodes = Vec::new();
    for _ in 0..2 {
        nodes.push(FleetNode::start(&policy, &config, Duration::from_millis(20)).await);
    }
    // Used up for an hour, as both know.
    let denies = async |node: &FleetNode| {
        let decision = node.decide(&user("spent"), "/long", 1, Charge::Commit).await;
        decision.answer.is_some_and(|answer| answer.rule.as_ref() == "long" && answer.retry_after_us.is_some())
    };
    for node in &nodes {
        eventually(WAIT, async || if denies(node).await { Ok(()) } else { Err(what.clone()) }).await;
    }
    let watch = Stopwatch::start();
    let before = ask(&nodes, "u", Duration::from_millis(1500)).await;
    let offset = |node: &FleetNode| node.clock.offset_us();
    let offsets: Vec<i64> = nodes.iter().map(offset).collect();
    proxy.step_back(&server, JUMP).await;
    let mut during = ask(&nodes, "u", Duration::from_millis(2500)).await;
    for (node, before_us) in nodes.iter().zip(offsets) {
        // It is noticed: else nothing is tested.
        eventually(WAIT, async || {
            during += ask(&nodes, "u", Duration::from_millis(1)).await;
            let now_us = offset(node);
            if before_us - now_us > JUMP_US.cast_signed() / 2 { Ok(()) } else { Err((what.clone(), before_us, now_us)) }
        })
        .await;
        assert!(denies(node).await, "{what}: what is used up is granted again");
    }
    let elapsed = watch.elapsed();
    let after = ask(&nodes, "u", Duration::from_millis(1500)).await;
    let allowed = before + during;
    // By true time. What nodes of `async` admit before they hear of each other comes on top, a window at a time.
    let windows = u64::try_from(elapsed.as_millis()).unwrap().div_ceil(1000) + 1;
    let over = if precision == "async" { 2 * LIMIT } else { 0 };
    assert!(allowed <= LIMIT * windows + over, "{what}: {before} and {during} in {elapsed:?}");
    assert!(after > 0, "{what}: nobody is let in any more");
}

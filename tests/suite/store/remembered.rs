//! Denials of `strict` rules are remembered for a moment: who goes on asking does not reach Redis, and nobody is denied whom
//! Redis would allow.

use std::{sync::Arc, time::Duration};

use limiter_tests::{
    eventually::eventually,
    fleet_node::{FleetNode, user},
    random::Random,
    redis_server::RedisServer,
};
use limiter_user::{
    clock::Stopwatch,
    limiter::{Decision, Kind, Subject},
    store::{Charge, redis::RedisConfig},
};

use super::strict::{fleet, hammer, patient, rule};

const WAIT: Duration = Duration::from_secs(20);
/// As long a denial may outlast what others give back.
const REMEMBERED: Duration = Duration::from_millis(250);

async fn ask(node: &FleetNode, subject: &Subject, cost: u64, charge: Charge) -> Decision {
    node.decide(subject, "/", cost, charge).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abusive_client_does_not_reach_redis_each_time() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    for precision in ["strict", "leased"] {
        let nodes = fleet(&rule(precision, "user", precision, 10, ""), &config, 2).await;
        let subject = user(precision);
        eventually(WAIT, async || {
            hammer(&nodes, 1, 20, &subject).await;
            let denied = ask(&nodes[0], &subject, 1, Charge::Peek).await;
            if denied.kind == Kind::Denied { Ok(()) } else { Err(denied.kind) }
        })
        .await;
        let (before, watch) = (server.script_calls().await, Stopwatch::start());
        let mut asked = 0_u64;
        while watch.elapsed() < Duration::from_secs(1) {
            assert_eq!(hammer(&nodes, 4, 100, &subject).await, 0, "{precision}");
            asked += 800;
        }
        let (elapsed, made) = (watch.elapsed(), server.script_calls().await - before);
        // One of each node in that time, of each of the tasks that ask at once when it is over, and its heartbeats.
        let rounds = u64::try_from(elapsed.as_millis() / REMEMBERED.as_millis()).unwrap() + 2;
        assert!(made <= 2 * (rounds * 4 + elapsed.as_secs() + 2), "{precision}: {made} calls for {asked} requests");
        assert!(asked > 20 * made, "{precision}: {made} calls for {asked} requests");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_given_back_can_be_used_here_at_once_and_elsewhere_soon() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    let nodes = fleet(&rule("r", "user", "strict", 10, ""), &config, 2).await;
    let subject = user("u");
    for (payer, other) in [(0, 1), (1, 0)] {
        hammer(&nodes, 1, 12, &subject).await;
        for node in &nodes {
            assert_eq!(ask(node, &subject, 1, Charge::Commit).await.kind, Kind::Denied);
        }
        let watch = Stopwatch::start();
        assert_eq!(ask(&nodes[payer], &subject, 2, Charge::Refund).await.kind, Kind::Allowed);
        assert_eq!(ask(&nodes[payer], &subject, 1, Charge::Commit).await.kind, Kind::Allowed);
        // The other one goes on denying for as long as it remembers, at most.
        loop {
            let begun = watch.elapsed();
            if ask(&nodes[other], &subject, 1, Charge::Commit).await.kind == Kind::Allowed {
                break;
            }
            assert!(begun < REMEMBERED, "denied {begun:?} after it was given back");
            tokio::task::yield_now().await;
        }
    }
}

/// Asks at random, and after each denial asks Redis whether it is true: what is denied for a while may not be allowed before
/// that is over.
async fn nobody_is_denied_wrongly(node: Arc<FleetNode>, subject: Subject, seed: u64) -> (u64, u64) {
    let (mut random, watch, mut allowed, mut denied) = (Random::new(seed), Stopwatch::start(), 0, 0);
    // On a machine that is busy, until there is enough to tell by.
    while watch.elapsed() < Duration::from_secs(4) || (denied <= 50 && watch.elapsed() < WAIT) {
        let cost = random.below(3_u64) + 1;
        let begin = Stopwatch::start();
        let decision = ask(&node, &subject, cost, Charge::Commit).await;
        if decision.kind == Kind::Allowed {
            allowed += cost;
        } else {
            denied += 1;
            let wait = decision.answer.and_then(|answer| answer.retry_after_us).expect("a wait");
            let truth = ask(&node, &subject, cost, Charge::Peek).await;
            assert!(
                truth.kind == Kind::Denied || begin.elapsed() >= Duration::from_micros(wait),
                "seed {seed}: {cost} was denied for {wait} us, and allowed within {:?}",
                begin.elapsed()
            );
        }
        if random.below(3_u32) == 0 {
            tokio::time::sleep(Duration::from_millis(random.below(60))).await;
        }
    }
    (allowed, denied)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_denied_whom_redis_would_allow() {
    let server = RedisServer::start().await;
    let config = patient(RedisConfig::new(server.url()));
    for (number, algorithm) in ["sliding_window", "fixed_window", "token_bucket", "sliding_log"].into_iter().enumerate()
    {
        let policy = rule("r", "user", "strict", 20, &format!("algorithm = \"{algorithm}\"")).replace("1h", "1s");
        let nodes = fleet(&policy, &config, 2).await;
        // Each is alone with its user, or shares one with the other.
        let asking = [("alone", 0), ("shared", 0), ("shared", 1)].map(|(name, node)| {
            let subject = user(&format!("{algorithm} {name}"));
            let seed = 10 * number as u64 + node as u64;
            tokio::spawn(nobody_is_denied_wrongly(Arc::clone(&nodes[node]), subject, seed))
        });
        for (place, asking) in asking.into_iter().enumerate() {
            let (allowed, denied) = asking.await.unwrap();
            assert!(denied > 50, "{algorithm}: {denied} denied");
            assert!(place > 0 || allowed >= 50, "{algorithm}: {allowed} allowed in four windows of twenty");
        }
    }
}

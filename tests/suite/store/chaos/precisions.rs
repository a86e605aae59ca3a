//! Four nodes with rules of all precisions, each with a way to Redis of its own that loses, delays and cuts what it carries:
//! what they admit is in Redis afterwards.

use std::{ops::RangeInclusive, sync::Arc, time::Duration};

use limiter_common::{bucket::Bucket, sliding_window::Window};
use limiter_tests::{
    chaos,
    chaos_proxy::ChaosProxy,
    eventually::eventually,
    fleet_node::{FleetNode, user},
    random::Random,
    redis_server::RedisServer,
    window::await_room,
};
use limiter_user::{
    clock::Stopwatch,
    limiter::Kind,
    store::{
        Algorithm, At, Cell, Charge, Store as _,
        redis::{RedisConfig, RedisStore},
    },
};

use super::super::behaviour::{MINUTE, user as counter_of};

/// So long that nothing comes back while the test runs.
const WINDOW_US: u64 = 30 * 24 * 60 * MINUTE;
/// So much that none is denied.
const CEILING: u64 = 10_000;
/// Requests of a rule and user, so that logs stay short.
const MOST: u64 = 250;
const USERS: usize = 5;
const WAIT: Duration = Duration::from_secs(20);
/// Shorter than some of the delays on the way.
const TIMEOUT: Duration = Duration::from_millis(60);

const WINDOWS: &[&str] = &["sliding_window", "fixed_window"];
const ALL: &[&str] = &["sliding_window", "fixed_window", "token_bucket", "sliding_log"];
/// Of requests to `/all`: a rule of each precision, charged together.
const TOGETHER: [(&str, &str); 3] =
    [("async", "fixed_window"), ("leased", "sliding_window"), ("strict", "token_bucket")];

struct Rule {
    id: String,
    path: String,
    precision: &'static str,
    algorithm: &'static str,
}

fn rules() -> Vec<Rule> {
    let apart =
        [("async", ALL), ("leased", WINDOWS), ("strict", ALL)].into_iter().flat_map(|(precision, algorithms)| {
            algorithms.iter().map(move |algorithm| {
                let id = format!("{precision}-{algorithm}");
                Rule { path: format!("/{id}"), id, precision, algorithm }
            })
        });
    let together = TOGETHER.into_iter().map(|(precision, algorithm)| Rule {
        id: format!("all-{precision}"),
        path: "/all".to_owned(),
        precision,
        algorithm,
    });
    apart.chain(together).collect()
}

fn policy(rules: &[Rule]) -> String {
    let mut paths: Vec<&str> = rules.iter().map(|rule| &*rule.path).collect();
    paths.dedup();
    let endpoints =
        paths.iter().map(|path| format!("[[endpoints]]\nname = \"{}\"\nmatch = [\"{path}\"]\n", &path[1..]));
    let rules = rules.iter().map(|Rule { id, path, precision, algorithm }| {
        format!(
            "[[rules]]\nid = \"{id}\"\nendpoint = \"{}\"\nscope = \"user\"\nprecision = \"{precision}\"\n\
             algorithm = \"{algorithm}\"\nlimit = {CEILING}\nwindow = \"30d\"\n",
            &path[1..]
        )
    });
    endpoints.chain(rules).collect()
}

fn algorithm(name: &str) -> Algorithm {
    let window = Window { window_us: WINDOW_US, ceiling: CEILING };
    match name {
        "sliding_window" => Algorithm::SlidingWindow(window),
        "fixed_window" => Algorithm::FixedWindow(window),
        "sliding_log" => Algorithm::SlidingLog(window),
        "token_bucket" => {
            Algorithm::TokenBucket { bucket: Bucket::new(CEILING, WINDOW_US, CEILING).unwrap(), window_us: WINDOW_US }
        }
        other => panic!("{other}"),
    }
}

/// By path and user: what one node's requests were allowed to take, and have given back.
type Taken = Vec<[u64; USERS]>;

/// Asks one node for `share` requests, evenly in this time.
async fn drive(node: Arc<FleetNode>, paths: Vec<String>, mut random: Random, share: u64, time: Duration) -> Taken {
    let mut taken: Taken = vec![[0; USERS]; paths.len()];
    let (watch, mut done) = (Stopwatch::start(), 0);
    while done < share {
        let due = u128::from(share) * watch.elapsed().as_millis() / time.as_millis();
        if u128::from(done) >= due.min(share.into()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
        done += 1;
        let (path, client) = (random.below(paths.len()), random.below(USERS));
        let cost = 1 + random.below(3u64);
        let (taken, subject) = (&mut taken[path][client], user(&format!("u{client}")));
        // What a client pays back while Redis does not answer may be paid back twice: by Redis, and by the node.
        let is_shared = !paths[path].starts_with("/strict") && paths[path] != "/all";
        if is_shared && random.below(8u64) == 0 && *taken >= cost {
            let decision = node.decide(&subject, &paths[path], cost, Charge::Refund).await;
            assert_eq!(decision.kind, Kind::Allowed, "{}", paths[path]);
            *taken -= cost;
        } else {
            let decision = node.decide(&subject, &paths[path], cost, Charge::Commit).await;
            match decision.kind {
                Kind::Allowed => *taken += cost,
                // Of leases nothing is used that Redis did not count, for as long as it is not away.
                Kind::Denied => assert!(paths[path].starts_with("/leased") || paths[path] == "/all", "{decision:?}"),
                Kind::Unsatisfiable | Kind::Unavailable | Kind::Unauthenticated => panic!("{decision:?}"),
            }
        }
    }
    taken
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_of_all_precisions_count_what_they_admit_whatever_the_network_does() {
    let seed = chaos::seed();
    await_room(Duration::from_micros(WINDOW_US));
    let duration = chaos::duration(Duration::from_secs(8));
    let server = RedisServer::start().await;
    let rules = rules();
    let policy = policy(&rules);
    let mut paths: Vec<String> = rules.iter().map(|rule| rule.path.clone()).collect();
    paths.dedup();
    let (mut proxies, mut nodes) = (Vec::new(), Vec::new());
    for number in 0..4 {
        let proxy = ChaosProxy::start(server.port(), seed.wrapping_add(number << 32)).await;
        let mut config = RedisConfig::new(proxy.url());
        config.timeout = TIMEOUT;
        nodes.push(Arc::new(FleetNode::start(&policy, &config, Duration::from_millis(50)).await));
        proxies.push(proxy);
    }
    let share = MOST * (paths.len() * USERS) as u64 / 4;
    let drivers: Vec<_> = nodes
        .iter()
        .zip(1..)
        .map(|(node, number)| {
            let random = Random::new(seed.wrapping_mul(31).wrapping_add(number));
            tokio::spawn(drive(Arc::clone(node), paths.clone(), random, share, duration))
        })
        .collect();
    let mut taken: Taken = vec![[0; USERS]; paths.len()];
    for driver in drivers {
        for (sums, of_node) in taken.iter_mut().zip(driver.await.unwrap()) {
            sums.iter_mut().zip(of_node).for_each(|(sum, of_node)| *sum += of_node);
        }
    }
    let faults: u64 = proxies.iter().map(ChaosProxy::faults).sum();
    let unanswered = |rule: &str| nodes.iter().map(|node| node.unanswered(rule)).sum::<u64>();
    chaos::tell(&format!("seed {seed}: {} requests of four nodes, {faults} faults", share * 4));
    assert!(faults > 50, "seed {seed}: only {faults} faults");
    proxies.iter().for_each(ChaosProxy::calm_down);
    for node in &nodes {
        node.until_sent().await;
    }

    let mut config = RedisConfig::new(server.url());
    config.timeout = Duration::from_secs(5);
    let store = RedisStore::connect(&config).unwrap();
    let mut twice = 0;
    for rule in &rules {
        let path = paths.iter().position(|path| *path == rule.path).unwrap();
        // A call that Redis has carried out, and whose answer was lost, is counted by the node as well: never too little.
        assert!(
            taken[path].iter().sum::<u64>() > 0,
            "seed {seed}: {} admitted nothing, and so counted nothing",
            rule.id
        );
        let most_twice = if rule.precision == "strict" { 3 * unanswered(&rule.id) } else { 0 };
        for (client, taken) in taken[path].iter().enumerate() {
            let key = counter_of(&format!("u{client}"), &rule.id);
            let cell = [Cell { key, algorithm: algorithm(rule.algorithm), cost: 1, enforced: true }];
            let expected: RangeInclusive<u64> = *taken..=taken + most_twice;
            let counted = eventually(WAIT, async || {
                let seen = store.check(At::StoreClock, Charge::Peek, &cell).await.unwrap()[0];
                let counted = CEILING - seen.remaining;
                if expected.contains(&counted) {
                    Ok(counted)
                } else {
                    let (id, known) = (&rule.id, unanswered(&rule.id));
                    Err(format!("seed {seed}: {id} of u{client}: {counted}, not {expected:?}; {known} without Redis"))
                }
            })
            .await;
            twice += counted - taken;
        }
    }
    let of_strict =
        rules.iter().filter(|rule| rule.precision == "strict").map(|rule| unanswered(&rule.id)).sum::<u64>();
    chaos::tell(&format!("seed {seed}: {of_strict} strict requests without an answer, {twice} units counted twice"));
}

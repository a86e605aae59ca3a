//! Agents and Redis are killed at any time, and Redis comes back with its data or without: whatever is in it has a time to
//! live, and no longer one than the documentation says.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use limiter_tests::{
    agent::{Agent, Setup},
    chaos,
    eventually::until,
    http::{Address, Connection},
    random::Random,
    redis_server::{KEEPS_DATA, RedisServer},
};
use limiter_user::clock::Stopwatch;
use serde_json::json;

use crate::{WAIT, node, runtime, until_whole};

/// Window and its milliseconds.
const WINDOWS: &[(&str, i64)] =
    &[("1s", 1_000), ("7s", 7_000), ("1m", 60_000), ("1h", 3_600_000), ("30d", 30 * 24 * 3_600_000)];
const KINDS: &[(&str, &str)] = &[
    ("async", "sliding_window"),
    ("async", "fixed_window"),
    ("async", "token_bucket"),
    ("async", "sliding_log"),
    ("leased", "sliding_window"),
    ("leased", "fixed_window"),
    ("local", "sliding_window"),
    ("strict", "sliding_window"),
    ("strict", "fixed_window"),
    ("strict", "token_bucket"),
    ("strict", "sliding_log"),
];
/// Three heartbeats of the configuration.
const LONGEST_OF_NODES_MS: i64 = 300;
/// Much longer than nodes are silent; see `lua/mark.lua`.
const LONGEST_OF_MARKS_MS: i64 = 600_000;
const AGENTS: usize = 3;
const USERS: usize = 30;

/// A rule of each kind and window, each with an endpoint of its own; by rule, the longest time that a key of it may live.
fn policy() -> (String, Vec<String>, HashMap<String, i64>) {
    let (mut policy, mut paths, mut longest) = (String::new(), Vec::new(), HashMap::new());
    for (precision, algorithm) in KINDS {
        for (window, window_ms) in WINDOWS {
            let id = format!("{precision}-{algorithm}-{window}");
            policy.push_str(&format!(
                "[[endpoints]]\nname = \"{id}\"\nmatch = [\"/{id}\"]\n\
                 [[rules]]\nid = \"{id}\"\nendpoint = \"{id}\"\nscope = \"user\"\nprecision = \"{precision}\"\n\
                 algorithm = \"{algorithm}\"\nlimit = 40\nwindow = \"{window}\"\n"
            ));
            paths.push(format!("/{id}"));
            longest.insert(id, 2 * window_ms);
        }
    }
    (policy, paths, longest)
}

/// Asks an agent at this address as fast as it answers, until it is told to stop; what is answered is counted.
fn ask(address: &Address, paths: &[String], mut random: Random, answered: &AtomicU64, is_over: &AtomicBool) {
    let mut connection = None;
    while !is_over.load(Ordering::Relaxed) {
        let open = connection.take().map_or_else(|| Connection::open(address), Ok);
        // Killed agents answer nobody.
        let Ok(mut open) = open else {
            thread::yield_now();
            continue;
        };
        let cost = if random.below(6u32) == 0 { -1 } else { 1 };
        let (user, path) = (format!("u{}", random.below(USERS)), &paths[random.below(paths.len())]);
        let question = json!({ "user": user, "path": path, "cost": cost }).to_string();
        let answer = open.request("POST", "/v1/decide", &[("Content-Type", "application/json")], &question);
        if answer.is_ok_and(|answer| answer.status == 200) {
            answered.fetch_add(1, Ordering::Relaxed);
            connection = Some(open);
        }
    }
}

/// Looks at every key, and says how many there are and which of them lives for too long.
async fn look(server: &RedisServer, longest: &HashMap<String, i64>) -> anyhow::Result<(usize, Vec<(String, i64)>)> {
    let client = redis::Client::open(server.url())?;
    let mut connection = client.get_multiplexed_async_connection().await?;
    let (mut cursor, mut names) = (0u64, Vec::new());
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("COUNT").arg(1000);
        let (next, of_page): (u64, Vec<String>) = scan.query_async(&mut connection).await?;
        names.extend(of_page);
        cursor = next;
        if cursor == 0 {
            break;
        }
    }
    let mut ttls = redis::Pipeline::with_capacity(names.len());
    for name in &names {
        ttls.cmd("PTTL").arg(name);
    }
    let ttls: Vec<i64> = ttls.query_async(&mut connection).await?;
    let count = names.len();
    let is_wrong = |(name, ttl_ms): &(String, i64)| {
        let longest_ms = match name.as_str() {
            "rl:{nodes}:live" => LONGEST_OF_NODES_MS,
            mark if mark.ends_with(":mark") => LONGEST_OF_MARKS_MS,
            counter => {
                let rule = counter.split('}').nth(1).and_then(|rest| rest.split(':').nth(1)).unwrap_or_default();
                longest.get(rule).copied().unwrap_or(0)
            }
        };
        // Gone meanwhile, or about to.
        *ttl_ms != -2 && !(0..=longest_ms).contains(ttl_ms)
    };
    Ok((count, names.into_iter().zip(ttls).filter(is_wrong).collect()))
}

#[test]
fn no_key_lives_for_ever_whoever_is_killed() {
    let (seed, duration) = (chaos::seed(), chaos::duration(Duration::from_secs(8)));
    let mut random = Random::new(seed);
    let runtime = runtime();
    let mut server = runtime.block_on(RedisServer::start_with(KEEPS_DATA));
    let (policy, paths, longest) = policy();
    // Longer than Redis is kept waiting by a busy machine.
    let access = format!("timeout = \"200ms\"\nurls = [\"{}\"]\n", server.url());
    let setups: Vec<Setup> = (0..AGENTS).map(|number| node(&format!("n{number}"), &access, &policy)).collect();
    let mut agents: Vec<Agent<'_>> = setups.iter().map(Setup::start).collect();
    let (answered, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut done: HashMap<&str, u32> = HashMap::new();
    let mut most = 0;
    thread::scope(|scope| {
        // Whoever panics below must not wait for those that ask.
        let over = Over(&is_over);
        for (number, setup) in setups.iter().enumerate() {
            let (address, paths, random) = (setup.http(), &paths, Random::new(seed.wrapping_add(number as u64 + 1)));
            let (answered, is_over) = (&answered, &is_over);
            scope.spawn(move || ask(&address, paths, random, answered, is_over));
        }
        let watch = Stopwatch::start();
        while watch.elapsed() < duration {
            // Between two deaths there is something to lose.
            let (before, enough) = (answered.load(Ordering::Relaxed), 100 + random.below(2_000u64));
            until("requests are answered", WAIT, || {
                (answered.load(Ordering::Relaxed) >= before + enough).then_some(())
            });
            let what = match random.below(10u32) {
                0..=4 => {
                    let number = random.below(AGENTS);
                    agents.remove(number).kill();
                    agents.insert(number, setups[number].spawn());
                    "an agent was killed"
                }
                5 => {
                    let number = random.below(AGENTS);
                    // What is graceful about a stop begins with the agent.
                    until("an agent is ready", WAIT, || agents[number].is_ready().then_some(()));
                    assert!(agents.remove(number).stop().success(), "seed {seed}: {}", setups[number].log());
                    agents.insert(number, setups[number].spawn());
                    "an agent was stopped"
                }
                6..=7 => {
                    runtime.block_on(server.restart());
                    "Redis was killed and came back with its data"
                }
                8 => {
                    runtime.block_on(server.restart_empty());
                    "Redis was killed and came back empty"
                }
                _ => {
                    let () = runtime.block_on(server.try_run(&["SCRIPT", "FLUSH"])).unwrap_or_default();
                    "scripts were forgotten"
                }
            };
            *done.entry(what).or_default() += 1;
            // Also while it loads: what is there has its time.
            if let Ok((count, wrong)) = runtime.block_on(look(&server, &longest)) {
                assert!(wrong.is_empty(), "seed {seed}, {what}: {wrong:?}");
                most = most.max(count);
            }
        }
        drop(over);
    });
    for agent in &agents {
        until("an agent is ready", WAIT, || agent.is_ready().then_some(()));
        until_whole(agent);
    }
    let (count, wrong) = runtime.block_on(look(&server, &longest)).expect("Redis answers");
    let answered = answered.load(Ordering::Relaxed);
    chaos::tell(&format!("seed {seed}: {answered} requests, {count} keys at the end and {most} at most; {done:?}"));
    assert!(wrong.is_empty(), "seed {seed}: {wrong:?}");
    assert!(most > 100, "seed {seed}: {most} keys at most");
    // The key of the nodes goes with the last of them.
    for agent in agents {
        assert!(agent.stop().success());
    }
    let left = until("only counters are left", WAIT, || {
        let (count, wrong) = runtime.block_on(look(&server, &longest)).ok()?;
        assert!(wrong.is_empty(), "seed {seed}: {wrong:?}");
        let there: u32 = runtime.block_on(server.run(&["EXISTS", "rl:{nodes}:live"]));
        (there == 0).then_some(count)
    });
    assert!(left > 0, "seed {seed}");
}

/// Ends the asking, also when the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

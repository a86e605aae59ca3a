//! What requests are answered while Redis cannot be asked, how it is asked then, and which nodes are alive.

use std::{
    io::Read as _,
    net::TcpListener,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use limiter_tests::{
    agent::{Agent, Setup},
    counted::counted,
    eventually::until,
    redis_cluster::RedisCluster,
    redis_failure::{FAILURES, FailingRedis, Failure},
    redis_server::{RedisServer, free_port},
};
use limiter_user::{clock::Stopwatch, store::redis::RedisConfig};
use serde_json::json;

mod outages {
    mod chaos;
    mod eviction;
    mod losses;
    mod measured;
    mod recovery;
    mod share;
    mod successor;
    mod topology;
}

const DAY_US: u64 = 24 * 3_600_000_000;
const WAIT: Duration = Duration::from_secs(30);
/// How long a request waits for Redis: longer than a busy machine takes, so that none is answered without it by chance, and
/// so that an answer which took as long has waited for it.
const TIMEOUT: Duration = Duration::from_secs(1);
const PROBE: Duration = Duration::from_millis(200);
/// What is lent is looked at as often, and goes back when it is not used.
const LEASES_STAY: Duration = Duration::from_millis(250);

/// A rule for each policy, and one whose endpoint says otherwise.
const POLICY: &str = "\
[[endpoints]]
name = \"open\"
match = [\"/open\"]
[[endpoints]]
name = \"closed\"
match = [\"/closed\"]
[[endpoints]]
name = \"local\"
match = [\"/local\"]
[[endpoints]]
name = \"pay\"
match = [\"/pay\"]
on_store_failure = \"closed\"
[[rules]]
id = \"open\"
endpoint = \"open\"
on_store_failure = \"open\"
scope = \"user\"
limit = 5
window = \"1d\"
[[rules]]
id = \"closed\"
endpoint = \"closed\"
on_store_failure = \"closed\"
scope = \"user\"
limit = 5
window = \"1d\"
[[rules]]
id = \"local\"
endpoint = \"local\"
scope = \"user\"
limit = 5
window = \"1d\"
[[rules]]
id = \"pay\"
endpoint = \"pay\"
on_store_failure = \"open\"
scope = \"user\"
limit = 5
window = \"1d\"
";

fn node(name: &str, redis: &str, policy: &str) -> Setup {
    let probe = PROBE.as_millis();
    let configuration = format!(
        "[node]\nid = \"{name}\"\n[store]\nkind = \"redis\"\n\
         [store.breaker]\nfailures = 3\nwithin = \"10s\"\nprobe = \"{probe}ms\"\n\
         [store.redis]\nheartbeat = \"100ms\"\n{redis}"
    );
    Setup::new(&configuration, policy)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

/// Reason and wait of the answer, which has to come without waiting for a Redis that does not answer.
fn ask(agent: &Agent<'_>, user: &str, path: &str) -> (String, u64) {
    let watch = Stopwatch::start();
    let answer = ask_patiently(agent, user, path);
    assert!(watch.elapsed() < TIMEOUT, "{path}: {:?}", watch.elapsed());
    answer
}

/// The same, of a request that may find out that Redis does not answer.
fn ask_patiently(agent: &Agent<'_>, user: &str, path: &str) -> (String, u64) {
    let answer = agent.decide(json!({ "user": user, "path": path }));
    (answer["reason"].as_str().expect("a reason").to_owned(), answer["retry_after_ms"].as_u64().unwrap_or_default())
}

fn reasons(agent: &Agent<'_>, path: &str, count: usize) -> Vec<String> {
    (0..count).map(|_| ask(agent, "u", path).0).collect()
}

/// Waits until so many more requests are allowed.
fn allowed_in_time(agent: &Agent<'_>, path: &str, count: usize) {
    let mut allowed = 0;
    until(&format!("{count} of {path} are allowed"), WAIT, || {
        allowed += usize::from(ask(agent, "u", path).0 == "allowed");
        (allowed == count).then_some(())
    });
}

fn breakers(agent: &Agent<'_>) -> Vec<String> {
    let status = agent.status();
    let shards = status["store"]["shards"].as_array().expect("shards");
    shards.iter().map(|shard| shard["breaker"].as_str().expect("a state").to_owned()).collect()
}

fn until_whole(agent: &Agent<'_>) {
    until("Redis is asked", WAIT, || (agent.status()["degraded"] == json!(false)).then_some(()));
}

fn until_sent(agent: &Agent<'_>) {
    until("Redis has everything", WAIT, || {
        let pending = ["limiter_sync_pending", "limiter_sync_lag_seconds"].map(|metric| agent.metric(metric));
        (pending == [0.0; 2]).then_some(())
    });
}

/// A node with rules of one precision, whose password is in this folder.
fn node_of(redis: &FailingRedis, failure: &Failure, precision: &str, folder: &Path) -> Setup {
    let mut access = format!("timeout = \"{}s\"\nurls = [\"{}\"]\n", TIMEOUT.as_secs(), redis.url(failure));
    if let Some((user, password)) = failure.user() {
        let file = folder.join("password");
        std::fs::write(&file, password).expect("write the password");
        access.push_str(&format!("username = \"{user}\"\npassword_file = {file:?}\n"));
    }
    node("a", &access, &POLICY.replace("\nscope", &format!("\nprecision = \"{precision}\"\nscope")))
}

/// What is known before holds during a failure, each policy does what it says, and a probe is the end of it.
#[expect(clippy::float_arithmetic, reason = "a difference of counts")]
fn holds_in(runtime: &tokio::runtime::Runtime, failure: &Failure, precision: &str) {
    let what = format!("{}, {precision}", failure.name);
    let mut redis = runtime.block_on(FailingRedis::start());
    let folder = tempfile::tempdir().expect("a folder");
    let setup = node_of(&redis, failure, precision, folder.path());
    let agent = setup.start();
    until_whole(&agent);
    for path in ["/open", "/closed", "/local", "/pay"] {
        assert_eq!(reasons(&agent, path, 2), ["allowed"; 2], "{what} {path}");
    }
    until_sent(&agent);
    runtime.block_on(redis.begin(failure));
    let watch = Stopwatch::start();
    until(&format!("{what}: Redis is left alone"), WAIT, || {
        // Until it is, who needs its word may wait for it; whatever else is answered meanwhile is answered at once.
        if precision == "async" {
            ask(&agent, "other", "/local")
        } else {
            ask_patiently(&agent, "other", "/local")
        };
        (breakers(&agent) == ["open"]).then_some(())
    });
    let may_be_back = precision == "leased" && watch.elapsed() >= LEASES_STAY;

    assert_eq!(reasons(&agent, "/open", 8), ["allowed"; 8], "{what}");
    for path in ["/closed", "/pay"] {
        let (reason, wait_ms) = ask(&agent, "u", path);
        assert_eq!(reason, "limit_unavailable", "{what} {path}");
        assert!((1000..=1000 + u64::try_from(PROBE.as_millis()).expect("short")).contains(&wait_ms), "{wait_ms}");
    }
    let known = reasons(&agent, "/local", 4);
    let expected = ["allowed", "allowed", "allowed", "rate_limit_exceeded"];
    // While requests waited, what was lent and not used may have gone back.
    let is_back = may_be_back && known == ["rate_limit_exceeded"; 4];
    assert!(known == expected || is_back, "{what}: the limit holds from what is known: {known:?}");
    let status = agent.status();
    assert!(status["degraded"] == json!(true) && status["ready"] == json!(true), "{status}");
    for (rule, policy, count) in [("open", "open", 8.0), ("closed", "closed", 1.0), ("pay", "closed", 1.0)] {
        let series = format!("limiter_store_failures_total{{rule=\"{rule}\",policy=\"{policy}\"}}");
        assert_eq!(agent.metric(&series), count, "{what} {series}");
    }
    let denied = "limiter_checks_total{rule=\"closed\",decision=\"unavailable\",source=\"memory\"}";
    assert_eq!(agent.metric(denied), 1.0, "{what}");

    runtime.block_on(redis.end(failure));
    let failed_probes = || agent.metric("limiter_breaker_failed_probes_total");
    let before = failed_probes();
    until(&format!("{what}: Redis is asked again"), WAIT, || (breakers(&agent) == ["closed"]).then_some(()));
    until_whole(&agent);
    // It loads for some seconds; of all other failures the next probe is the end, of requests and of the background. One of each may
    // have been under way.
    let failed = failed_probes() - before;
    assert!(failed <= 2.0 || failure.name == "LOADING", "{what}: {failed} probes failed afterwards");
    until_sent(&agent);
    for (path, count) in [("/closed", 3), ("/pay", 1)] {
        if precision == "leased" {
            // What was lent by answers that were lost has to come back first.
            allowed_in_time(&agent, path, count);
        } else {
            assert_eq!(
                reasons(&agent, path, count),
                vec!["allowed"; count],
                "{what} {path}: what was denied cost nothing"
            );
        }
    }
    // What was lent before is used first, if it has not gone back. What Redis alone has decided and then lost, it alone knew.
    let most = match precision {
        "leased" => 3,
        "strict" if failure.loses_data() => 2,
        _ => 0,
    };
    let after = reasons(&agent, "/open", most + 1);
    let allowed = after.iter().filter(|reason| *reason == "allowed").count();
    assert_eq!(after[most], "rate_limit_exceeded", "{what}: the limit holds again, {after:?}");
    // As far as the limit went, what passed was counted; leases besides what they had lent.
    let expected = if precision == "leased" { 7 + allowed } else { 5 };
    let config = RedisConfig::new(redis.server.url());
    until(&format!("{what}: {expected} are counted, {after:?}"), WAIT, || {
        let in_redis = runtime.block_on(counted(&config, "u", "open", DAY_US)).ok()?;
        (in_redis == expected as u64).then_some(())
    });
    let text = setup.log();
    let transitions = ["left alone but for probes", "answers again"].map(|line| text.matches(line).count());
    assert!(transitions[0] == transitions[1] && transitions[0] <= 4, "{what}: {transitions:?}\n{text}");
}

#[test]
fn each_policy_holds_in_each_failure_of_background_sharing() {
    let runtime = runtime();
    FAILURES.iter().filter(|failure| failure.says.is_some()).for_each(|failure| holds_in(&runtime, failure, "async"));
}

#[test]
fn each_policy_holds_in_each_failure_of_strict_decisions() {
    let runtime = runtime();
    FAILURES.iter().filter(|failure| failure.says.is_some()).for_each(|failure| holds_in(&runtime, failure, "strict"));
}

#[test]
fn each_policy_holds_in_each_failure_of_leases() {
    let runtime = runtime();
    FAILURES.iter().filter(|failure| failure.says.is_some()).for_each(|failure| holds_in(&runtime, failure, "leased"));
}

/// Requests that a rule has answered without Redis, as its policy says.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a metric that counts")]
fn unanswered(agent: &Agent<'_>, rule: &str) -> u32 {
    let of_policy =
        |policy| agent.metric(&format!("limiter_store_failures_total{{rule=\"{rule}\",policy=\"{policy}\"}}"));
    ["open", "closed", "local"].map(of_policy).iter().sum::<f64>() as u32
}

/// A failure that is over with the next attempt: what was used before it is used.
fn passes_by(runtime: &tokio::runtime::Runtime, failure: &Failure, precision: &str) {
    let mut redis = runtime.block_on(FailingRedis::start());
    let folder = tempfile::tempdir().expect("a folder");
    let setup = node_of(&redis, failure, precision, folder.path());
    let agent = setup.start();
    until_whole(&agent);
    for path in ["/open", "/closed", "/local", "/pay"] {
        assert_eq!(reasons(&agent, path, 2), ["allowed"; 2], "{} {precision} {path}", failure.name);
    }
    until_sent(&agent);
    runtime.block_on(redis.begin(failure));
    runtime.block_on(redis.end(failure));
    for path in ["/open", "/closed", "/local", "/pay"] {
        let (mut allowed, mut unavailable) = (0, 0);
        until("the limit is used up", WAIT, || {
            let (reason, wait_ms) = ask(&agent, "u", path);
            allowed += u32::from(reason == "allowed");
            unavailable += u32::from(reason == "limit_unavailable");
            // For want of a lease, a request is refused for a moment.
            (reason == "rate_limit_exceeded" && wait_ms > 1000).then_some(())
        });
        // Only a call that was under way, or was sent on a connection that had ended, has no answer.
        let unanswered = unanswered(&agent, &path[1..]);
        let most = if failure.name == "cut off" && precision != "async" { 2 } else { 0 };
        let what = format!(
            "{}, {precision} {path}: {allowed} allowed, {unavailable} unavailable, {unanswered} unanswered",
            failure.name
        );
        assert!(unanswered <= most, "{what}");
        let is_closed = ["/closed", "/pay"].contains(&path);
        assert_eq!(unavailable, if is_closed { unanswered } else { 0 }, "{what}");
        // What the node has admitted by itself, Redis hears of with the next exchange.
        let most_allowed = if precision == "strict" && !is_closed { 3 + unanswered } else { 3 };
        assert!((3..=most_allowed).contains(&allowed), "{what}");
    }
    assert_eq!(agent.metric("limiter_breaker_transitions_total{to=\"open\"}"), 0.0, "{}", failure.name);
}

#[test]
fn failures_that_pass_change_no_answer() {
    let runtime = runtime();
    for failure in FAILURES.iter().filter(|failure| failure.says.is_none()) {
        ["async", "leased", "strict"].iter().for_each(|precision| passes_by(&runtime, failure, precision));
    }
}

#[test]
fn a_gateway_is_told_that_a_limit_cannot_be_checked() {
    let setup = node("a", &format!("urls = [\"redis://127.0.0.1:{}\"]\n", free_port()), POLICY);
    let agent = setup.start();
    until("Redis is left alone", WAIT, || (breakers(&agent) == ["open"]).then_some(()));
    let policy = "[[rules]]\nid = \"all\"\nscope = \"ip\"\nlimit = 5\nwindow = \"1m\"\non_store_failure = \"closed\"\n";
    agent.reload(policy);
    let response = agent.check(&[("X-Forwarded-For", "203.0.113.9")]);
    assert_eq!(response.status, 429, "{response:?}");
    assert_eq!(response.json()["error"], "limit_unavailable");
    let wait: u64 = response.header("retry-after").expect("a wait").parse().expect("seconds");
    assert!((1..=2).contains(&wait), "{wait}");
    agent.reload(&policy.replace("enforce", "shadow").replace("limit = 5", "mode = \"shadow\"\nlimit = 5"));
    assert_eq!(agent.check(&[("X-Forwarded-For", "203.0.113.9")]).status, 200, "a shadow denies nothing");
}

/// Ends each connection at once, and counts them.
fn useless_server() -> (u16, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            counted.fetch_add(1, Ordering::Relaxed);
            // What is not read is answered with a reset, which is fine too.
            drop(stream.read(&mut [0; 16]));
        }
    });
    (port, count)
}

#[test]
fn a_server_that_fails_is_tried_once_in_a_while() {
    let (port, connections) = useless_server();
    let setup = node("a", &format!("urls = [\"redis://127.0.0.1:{port}\"]\n"), POLICY);
    let agent = setup.start();
    until("it is left alone", WAIT, || (breakers(&agent) == ["open"]).then_some(()));
    let failed_probes = || agent.metric("limiter_breaker_failed_probes_total");
    let (watch, before, probes) = (Stopwatch::start(), connections.load(Ordering::Relaxed), failed_probes());
    until("some probes", WAIT, || {
        ask(&agent, "u", "/local");
        (failed_probes() >= probes + 10.0).then_some(())
    });
    // Half of the time may be taken off.
    let (made, most) =
        (connections.load(Ordering::Relaxed) - before, watch.elapsed().as_secs_f64() * 2.0 / PROBE.as_secs_f64());
    assert!(made as f64 <= most + 2.0, "{made} connections, {most} probes are due");
    assert!(watch.elapsed() >= PROBE / 2 * 9, "{:?}", watch.elapsed());
    assert_eq!(agent.metric("limiter_breaker_transitions_total{to=\"open\"}"), 1.0);
    assert!(agent.metric("limiter_breaker_refused_total") > 10.0);
    let series = format!("limiter_breaker_state{{shard=\"127.0.0.1:{port}\"}}");
    assert!(agent.metric(&series) >= 1.0);
    let lines = setup.log().lines().filter(|line| line.contains("limiter::store")).count();
    assert!(lines <= 4, "only what changes is told:\n{}", setup.log());
}

#[test]
fn of_a_cluster_only_the_shard_that_fails_is_left_alone() {
    let runtime = runtime();
    for frozen in 0..3 {
        let servers = runtime.block_on(RedisCluster::start(3));
        let setup = node("a", &servers.access(), POLICY);
        let agent = setup.start();
        until_whole(&agent);
        // Every primary has been spoken to.
        let users: Vec<String> = (0..30).map(|number| format!("u{number}")).collect();
        for user in &users {
            assert_eq!(ask(&agent, user, "/closed").0, "allowed");
        }
        until_sent(&agent);
        servers.primaries[frozen].freeze();
        let port = servers.primaries[frozen].port().to_string();
        let is_open = |shard: &serde_json::Value| shard["breaker"] != json!("closed");
        let open = until("it is left alone", WAIT, || {
            for user in &users {
                ask(&agent, user, "/local");
            }
            let status = agent.status();
            let shards = status["store"]["shards"].as_array().expect("shards").clone();
            assert_eq!(shards.len(), 3);
            let open: Vec<_> = shards.into_iter().filter(is_open).collect();
            (!open.is_empty()).then_some(open)
        });
        assert!(open.len() == 1 && open[0]["name"].as_str().expect("a name").ends_with(&port), "{open:?} {port}");
        let tags: Vec<String> = users.iter().map(|user| format!("rl:{{user:{user}}}:closed")).collect();
        let other = &servers.primaries[(frozen + 1) % 3];
        for (user, tag) in users.iter().zip(&tags) {
            let slot: usize = runtime.block_on(other.run(&["CLUSTER", "KEYSLOT", tag]));
            let expected = if slot * 3 / 16384 == frozen { "limit_unavailable" } else { "allowed" };
            assert_eq!(ask(&agent, user, "/closed").0, expected, "{user} in {slot}, {frozen} is away");
        }
        // What the others have is shared meanwhile, whoever has the clock.
        until("the others have their counts", WAIT, || {
            let counters = runtime.block_on(other.counters());
            counters.iter().any(|name| name.ends_with(":local")).then_some(())
        });
        servers.primaries[frozen].thaw();
        until_whole(&agent);
        for user in &users {
            assert_eq!(ask(&agent, user, "/closed").0, "allowed", "{user}");
        }
        assert_eq!(agent.metric("limiter_breaker_transitions_total{to=\"open\"}"), 1.0);
    }
}

fn live_nodes(agent: &Agent<'_>) -> u64 {
    agent.status()["store"]["live_nodes"].as_u64().expect("a number")
}

#[test]
fn nodes_know_how_many_are_alive() {
    let runtime = runtime();
    for is_cluster in [false, true] {
        let (cluster, mut server) = match is_cluster {
            true => (Some(runtime.block_on(RedisCluster::start(3))), None),
            false => (None, Some(runtime.block_on(RedisServer::start()))),
        };
        let access = match (&cluster, &server) {
            (Some(cluster), _) => cluster.access(),
            (None, Some(server)) => server.access(),
            (None, None) => unreachable!("one of them is there"),
        };
        // Two are called alike, and are two.
        let setups = ["a", "b", "b"].map(|name| node(name, &access, POLICY));
        let [a, b, c] = setups.each_ref().map(Setup::start);
        let all_say = |agents: &[&Agent<'_>], count: u64| {
            until(&format!("they are {count}"), WAIT, || {
                agents.iter().all(|agent| live_nodes(agent) == count).then_some(())
            });
        };
        all_say(&[&a, &b, &c], 3);
        c.kill();
        all_say(&[&a, &b], 2);
        assert!(b.stop().success());
        all_say(&[&a], 1);
        let b = setups[1].start();
        all_say(&[&a, &b], 2);
        if let Some(server) = &mut server {
            let ttl_ms: i64 = runtime.block_on(server.run(&["PTTL", "rl:{nodes}:live"]));
            assert!((1..=300).contains(&ttl_ms), "{ttl_ms}");
            let () = runtime.block_on(server.run(&["SET", "rl:{nodes}:live", "nonsense"]));
            all_say(&[&a, &b], 2);
            // Without Redis they are as many as they were.
            server.kill();
            until("Redis is left alone", WAIT, || (breakers(&a) == ["open"]).then_some(()));
            all_say(&[&a, &b], 2);
            runtime.block_on(server.restart());
            until_whole(&a);
            all_say(&[&a, &b], 2);
            assert_eq!(a.metric("limiter_live_nodes"), 2.0);
        }
    }
}

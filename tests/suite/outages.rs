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

use limiter_common::addr::SrcPrefixes;
use limiter_tests::{
    agent::{Agent, Setup},
    eventually::until,
    redis_cluster::RedisCluster,
    redis_failure::{FAILURES, FailingRedis},
    redis_server::{RedisServer, free_port},
};
use limiter_user::{
    active::Active,
    clock::{Clock, ManualClock, Stopwatch},
    config::{BreakerConfig, PressureConfig},
    identity::ClientAddress,
    limiter::{Caller, Decision, Kind, Limiter, Request, Subject},
    metrics::Metrics,
    policy::{Policy, Scratch},
    pressure::Pressure,
    store::{
        Algorithm, At, Cell, Charge, CounterKey, Identity, Store as _,
        breaker::BreakerState,
        memory::MemoryStore,
        redis::{RedisConfig, RedisStore},
    },
};
use serde_json::json;

const WAIT: Duration = Duration::from_secs(30);
/// An answer that took as long waited for something: two cores, and other tests beside this one.
const AT_ONCE: Duration = Duration::from_millis(500);
const PROBE: Duration = Duration::from_millis(200);

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

/// Reason and wait of the answer, which has to come at once.
fn ask(agent: &Agent<'_>, user: &str, path: &str) -> (String, u64) {
    let watch = Stopwatch::start();
    let answer = agent.decide(json!({ "user": user, "path": path }));
    assert!(watch.elapsed() < AT_ONCE, "{path}: {:?}", watch.elapsed());
    (answer["reason"].as_str().expect("a reason").to_owned(), answer["retry_after_ms"].as_u64().unwrap_or_default())
}

fn reasons(agent: &Agent<'_>, path: &str, count: usize) -> Vec<String> {
    (0..count).map(|_| ask(agent, "u", path).0).collect()
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
        let pending = agent.metric("limiter_sync_pending") + agent.metric("limiter_sync_lag_seconds");
        (pending == 0.0).then_some(())
    });
}

#[test]
fn each_policy_holds_in_each_failure_at_once_and_ends_with_a_probe() {
    let runtime = runtime();
    for failure in FAILURES.iter().filter(|failure| failure.says.is_some()) {
        let name = failure.name;
        let mut redis = runtime.block_on(FailingRedis::start());
        let mut access = format!("urls = [\"{}\"]\n", redis.url(failure));
        let folder = tempfile::tempdir().expect("a folder");
        if let Some((user, password)) = failure.user() {
            let file = folder.path().join("password");
            std::fs::write(&file, password).expect("write the password");
            access.push_str(&format!("username = \"{user}\"\npassword_file = {file:?}\n"));
        }
        let setup = node("a", &access, POLICY);
        let agent = setup.start();
        until_whole(&agent);
        for path in ["/open", "/closed", "/local", "/pay"] {
            assert_eq!(reasons(&agent, path, 2), ["allowed"; 2], "{name} {path}");
        }
        until_sent(&agent);
        runtime.block_on(redis.begin(failure));
        until("Redis is left alone", WAIT, || {
            // Whatever is answered meanwhile is answered at once.
            ask(&agent, "other", "/local");
            (breakers(&agent) == ["open"]).then_some(())
        });

        assert_eq!(reasons(&agent, "/open", 8), ["allowed"; 8], "{name}");
        for path in ["/closed", "/pay"] {
            let (reason, wait_ms) = ask(&agent, "u", path);
            assert_eq!(reason, "limit_unavailable", "{name} {path}");
            assert!((1000..=1000 + u64::try_from(PROBE.as_millis()).expect("short")).contains(&wait_ms), "{wait_ms}");
        }
        let expected = ["allowed", "allowed", "allowed", "rate_limit_exceeded"];
        assert_eq!(reasons(&agent, "/local", 4), expected, "{name}: the limit holds from what is known");
        let status = agent.status();
        assert!(status["degraded"] == json!(true) && status["ready"] == json!(true), "{status}");
        for (rule, policy, count) in [("open", "open", 8.0), ("closed", "closed", 1.0), ("pay", "closed", 1.0)] {
            let series = format!("limiter_store_failures_total{{rule=\"{rule}\",policy=\"{policy}\"}}");
            assert_eq!(agent.metric(&series), count, "{name} {series}");
        }
        let denied = "limiter_checks_total{rule=\"closed\",decision=\"unavailable\",source=\"memory\"}";
        assert_eq!(agent.metric(denied), 1.0, "{name}");

        runtime.block_on(redis.end(failure));
        let watch = Stopwatch::start();
        until("Redis is asked again", WAIT, || (breakers(&agent) == ["closed"]).then_some(()));
        // It loads for some seconds; of all other failures the next probe is the end.
        let slack = if name == "LOADING" { WAIT } else { PROBE + Duration::from_secs(2) };
        assert!(watch.elapsed() < slack, "{name}: {:?}", watch.elapsed());
        until_whole(&agent);
        assert_eq!(reasons(&agent, "/closed", 4)[..3], ["allowed"; 3], "{name}: what was denied cost nothing");
        assert_eq!(reasons(&agent, "/pay", 1), ["allowed"], "{name}");
        assert_eq!(reasons(&agent, "/open", 1), ["rate_limit_exceeded"], "{name}: what passed was counted");
        let text = setup.log();
        let transitions = ["left alone but for probes", "answers again"].map(|line| text.matches(line).count());
        assert!(transitions[0] == transitions[1] && transitions[0] <= 3, "{name}: {transitions:?}\n{text}");
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
        let access = format!("urls = {:?}\nmode = \"cluster\"\n", servers.urls());
        let setup = node("a", &access, POLICY);
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
            (Some(cluster), _) => format!("urls = {:?}\nmode = \"cluster\"\n", cluster.urls()),
            (None, Some(server)) => format!("urls = [\"{}\"]\n", server.url()),
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

/// A store whose server is left alone.
fn store_left_alone(runtime: &tokio::runtime::Runtime) -> RedisStore {
    let mut config = RedisConfig::new(format!("redis://127.0.0.1:{}", free_port()));
    config.breaker = Some(BreakerConfig::new(1, Duration::from_secs(10), Duration::from_secs(3600)));
    let store = RedisStore::connect(&config).expect("an address");
    let key = CounterKey { identity: Identity::Global, rule: "r".into() };
    let cell = Cell { key, algorithm: Algorithm::sliding_window(1000, 1), cost: 1, enforced: true };
    let answer = runtime.block_on(store.check(At::StoreClock, Charge::Commit, &[cell]));
    assert!(answer.is_err() && store.shards()[0].state == BreakerState::Open, "{answer:?}");
    store
}

fn unreported() -> Pressure {
    Pressure::new(PressureConfig { header: false, interval: Duration::from_secs(1), expires: Duration::from_secs(10) })
}

struct InProcess {
    limiter: Limiter,
    counters: Arc<MemoryStore>,
    clock: Arc<ManualClock>,
}

impl InProcess {
    fn new(policy: &str, store: RedisStore) -> Self {
        let clock = Arc::new(ManualClock::at(1_800_000_000_000_000));
        let counters = Arc::new(MemoryStore::shared(Arc::clone(&clock) as Arc<dyn Clock>, 10_000));
        let policy = Policy::parse(Path::new("/policy.toml"), policy).expect("a policy");
        let active = Active::derive(policy, &[], &Metrics::new(), &unreported(), clock.now()).share();
        let window_clock = Arc::clone(&clock) as Arc<dyn Clock>;
        let limiter = Limiter::new(active, Arc::clone(&counters), window_clock, SrcPrefixes::default());
        Self { limiter: limiter.sharing_through(store), counters, clock }
    }

    fn decide(&self, cost: u64, charge: Charge) -> Decision {
        let address = ClientAddress { address: "203.0.113.9".parse().expect("an address"), packet_source: true };
        let subject = Subject { caller: Caller::Anonymous, address: Some(address) };
        let request = Request { subject: &subject, method: "GET", path: "/", also: &[], attributes: &[], cost, charge };
        self.limiter.decide(&request, &mut Scratch::default())
    }

    /// How many of as many requests pass.
    fn admitted(&self, requests: u64) -> u64 {
        (0..requests).map(|_| u64::from(self.decide(1, Charge::Commit).kind == Kind::Allowed)).sum()
    }
}

fn rule(algorithm: &str, limit: u64, more: &str) -> String {
    let burst = if algorithm == "leaky_bucket" { "burst = 7\n" } else { "" };
    format!(
        "[[rules]]\nid = \"r\"\nscope = \"ip\"\nalgorithm = \"{algorithm}\"\nlimit = {limit}\nwindow = \"100s\"\n{burst}{more}"
    )
}

#[test]
fn a_node_by_itself_admits_its_share_of_each_window_and_at_least_one() {
    let runtime = runtime();
    for algorithm in ["sliding_window", "fixed_window", "sliding_log", "token_bucket"] {
        for (limit, nodes, share) in [(40, 4, 10), (40, 1, 40), (7, 4, 1), (3, 100, 1), (1, 1, 1)] {
            let what = format!("{algorithm}, {limit} over {nodes}");
            let store = store_left_alone(&runtime);
            store.set_live_nodes(nodes);
            let node = InProcess::new(&rule(algorithm, limit, ""), store);
            assert_eq!(node.admitted(100), share, "{what}");
            let denied = node.decide(1, Charge::Commit);
            let answer = denied.answer.as_ref().expect("an answer");
            assert_eq!((denied.kind, answer.remaining, answer.ceiling), (Kind::Denied, 0, limit), "{what}");
            // Not before the wait is over, and then.
            let wait_us = answer.retry_after_us.expect("a wait");
            node.clock.advance(wait_us - 1);
            assert_eq!(node.decide(1, Charge::Peek).kind, Kind::Denied, "{what}");
            node.clock.advance(1);
            assert_eq!(node.decide(1, Charge::Peek).kind, Kind::Allowed, "{what}");
            // Over three windows, three shares and no more than what one window's burst adds.
            let mut admitted = 0;
            for _ in 0..300 {
                node.clock.advance(1_000_000);
                admitted += node.admitted(1);
            }
            assert!(admitted <= share * 4 && admitted >= share * 2, "{what}: {admitted}");
        }
    }
}

#[test]
fn what_a_node_admitted_before_counts_in_its_share() {
    let runtime = runtime();
    for algorithm in ["sliding_window", "fixed_window", "sliding_log"] {
        let whole = RedisStore::connect(&RedisConfig::new("redis://127.0.0.1:1")).expect("an address");
        let policy = rule(algorithm, 40, "");
        let before = InProcess::new(&policy, whole);
        assert_eq!(before.admitted(8), 8);
        let store = store_left_alone(&runtime);
        store.set_live_nodes(4);
        let active = Policy::parse(Path::new("/policy.toml"), &policy).expect("a policy");
        let active = Active::derive(active, &[], &Metrics::new(), &unreported(), before.clock.now()).share();
        let clock = Arc::clone(&before.clock) as Arc<dyn Clock>;
        let limiter = Limiter::new(active, Arc::clone(&before.counters), clock, SrcPrefixes::default());
        let node = InProcess { limiter: limiter.sharing_through(store), ..before };
        assert_eq!(node.admitted(20), 2, "{algorithm}");
    }
}

#[test]
fn nobody_is_dropped_in_the_kernel_for_what_redis_lacks() {
    let runtime = runtime();
    for (policy, nodes, limit, is_pushed) in
        [("closed", 1, 3, false), ("open", 1, 3, false), ("local", 4, 40, false), ("local", 1, 3, true)]
    {
        let store = store_left_alone(&runtime);
        store.set_live_nodes(nodes);
        let more = format!("on_store_failure = \"{policy}\"\n");
        for algorithm in ["sliding_window", "sliding_log"] {
            let node = InProcess::new(&rule(algorithm, limit, &more), store.clone());
            node.admitted(50);
            let decision = node.decide(1, Charge::Commit);
            assert_eq!(decision.address_denial.is_some(), is_pushed, "{policy} over {nodes}: {decision:?}");
        }
    }
}

#[test]
fn a_denied_request_costs_nobody_anything_and_what_costs_too_much_waits() {
    let runtime = runtime();
    let store = store_left_alone(&runtime);
    store.set_live_nodes(4);
    let both = rule("sliding_window", 40, "")
        + &rule("sliding_window", 40, "on_store_failure = \"closed\"\n").replace("\"r\"", "\"c\"");
    let node = InProcess::new(&both, store.clone());
    assert_eq!((node.admitted(5), node.counters.stats().counters), (0, 0));
    assert_eq!(node.decide(1, Charge::Peek).kind, Kind::Unavailable);

    let node = InProcess::new(&rule("sliding_window", 40, ""), store.clone());
    let wide = node.decide(11, Charge::Commit);
    let wait_us = wide.answer.as_ref().and_then(|answer| answer.retry_after_us).expect("it fits the limit");
    assert!(wide.kind == Kind::Denied && wait_us >= 1_000_000, "{wide:?}");
    assert_eq!(node.decide(41, Charge::Commit).kind, Kind::Unsatisfiable);
    // What was taken can be given back.
    assert_eq!(node.admitted(20), 10);
    assert_eq!(node.decide(10, Charge::Refund).kind, Kind::Allowed);
    assert_eq!(node.admitted(20), 10);
    // A request that always costs more than the share is one request.
    let node = InProcess::new(&rule("sliding_window", 40, "cost = 20\n"), store);
    assert_eq!(node.admitted(5), 1);
}

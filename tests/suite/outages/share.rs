//! What a node admits by itself, in this process: no sockets, and a clock of the test's own.

use std::{path::Path, sync::Arc, time::Duration};

use limiter_common::addr::SrcPrefixes;
use limiter_tests::redis_server::free_port;
use limiter_user::{
    active::Active,
    clock::{Clock, ManualClock},
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

use crate::runtime;

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
        self.limiter.decide(&request, &mut Scratch::default()).expect("decided from memory")
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
            let most = (limit * 4).div_ceil(nodes.into()).max(share * 4);
            assert!(admitted <= most && admitted >= (limit / u64::from(nodes)) * 2, "{what}: {admitted}");
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

//! What every store does. Times are given, so that nothing depends on how fast a test runs.

use std::{collections::BTreeMap, net::IpAddr, path::Path, sync::Arc};

use limiter_common::{
    bucket::Bucket,
    leaky_bucket::LeakyBucket,
    sliding_window::{Outcome, Window},
    time::UnixMicros,
};
use limiter_tests::{redis_cluster::RedisCluster, redis_server::RedisServer, vectors};
use limiter_user::{
    clock::ManualClock,
    policy::{Limit, Policy},
    store::{
        Algorithm, At, Cell, CellOutcome, Charge, CounterKey, Identity, Store,
        memory::MemoryStore,
        redis::{RedisConfig, RedisStore, Topology},
    },
};

/// 1 January 2024; a multiple of every window used here.
pub(crate) const T0: u64 = 1_704_067_200_000_000;
pub(crate) const MINUTE: u64 = 60_000_000;

/// A fresh store and whatever it needs.
trait Fixture {
    type Store: Store + Clone + 'static;
    async fn start() -> Self;
    fn store(&self) -> &Self::Store;
    /// Keys in Redis have a TTL by its own clock, so a counter with a short window cannot be looked at slowly.
    const SHORTEST_WINDOW_US: u64;
}

/// `MemoryStore` behind an `Arc`, to be shared by tasks.
#[derive(Clone)]
struct SharedMemory(Arc<MemoryStore>);

impl Store for SharedMemory {
    async fn check(
        &self,
        at: At,
        charge: Charge,
        cells: &[Cell],
    ) -> Result<Vec<CellOutcome>, limiter_user::store::StoreError> {
        self.0.check(at, charge, cells).await
    }
}

struct Memory(SharedMemory);

impl Fixture for Memory {
    type Store = SharedMemory;
    const SHORTEST_WINDOW_US: u64 = 1;

    async fn start() -> Self {
        Self(SharedMemory(Arc::new(MemoryStore::new(Arc::new(ManualClock::at(T0)), 100_000))))
    }

    fn store(&self) -> &SharedMemory {
        &self.0
    }
}

struct Redis {
    _server: RedisServer,
    store: RedisStore,
}

impl Fixture for Redis {
    type Store = RedisStore;
    const SHORTEST_WINDOW_US: u64 = 5_000_000;

    async fn start() -> Self {
        let server = RedisServer::start().await;
        let mut config = RedisConfig::new(server.url());
        // What is tested is answers, on a machine that may be busy.
        config.timeout = std::time::Duration::from_secs(5);
        let store = RedisStore::connect(&config).unwrap();
        Self { _server: server, store }
    }

    fn store(&self) -> &RedisStore {
        &self.store
    }
}

struct Cluster {
    _servers: RedisCluster,
    store: RedisStore,
}

impl Fixture for Cluster {
    type Store = RedisStore;
    const SHORTEST_WINDOW_US: u64 = Redis::SHORTEST_WINDOW_US;

    async fn start() -> Self {
        let servers = RedisCluster::start(3).await;
        let mut config = RedisConfig::of(servers.urls(), Topology::Cluster);
        config.timeout = std::time::Duration::from_secs(5);
        let store = RedisStore::connect(&config).unwrap();
        Self { _servers: servers, store }
    }

    fn store(&self) -> &RedisStore {
        &self.store
    }
}

pub(crate) fn user(name: &str, rule: &str) -> CounterKey {
    CounterKey { identity: Identity::User(name.into()), rule: rule.into() }
}

/// One enforced cell of cost 1 in a window of a minute.
pub(crate) fn cell(key: CounterKey, ceiling: u64) -> Cell {
    Cell { key, algorithm: Algorithm::sliding_window(MINUTE, ceiling), cost: 1, enforced: true }
}

/// `limit` in a window, all of it at once.
pub(crate) fn token_bucket(limit: u64, window_us: u64) -> Algorithm {
    Algorithm::TokenBucket { bucket: Bucket::new(limit, window_us, limit).unwrap(), window_us }
}

pub(crate) fn fixed_window(ceiling: u64, window_us: u64) -> Algorithm {
    Algorithm::FixedWindow(Window { window_us, ceiling })
}

/// `limit` in a window, of which all but one wait.
pub(crate) fn leaky_bucket(limit: u64, window_us: u64) -> Algorithm {
    let bucket = LeakyBucket::new(limit, window_us, limit - 1, 1 << 50).unwrap();
    Algorithm::LeakyBucket { bucket, window_us }
}

/// Every algorithm with a ceiling and a window: what is the same for all of them is asked of all of them.
pub(crate) fn every(ceiling: u64, window_us: u64) -> [(&'static str, Algorithm); 5] {
    [
        ("sliding_window", Algorithm::sliding_window(window_us, ceiling)),
        ("fixed_window", fixed_window(ceiling, window_us)),
        ("token_bucket", token_bucket(ceiling, window_us)),
        ("leaky_bucket", leaky_bucket(ceiling, window_us)),
        ("sliding_log", Algorithm::SlidingLog(Window { window_us, ceiling })),
    ]
}

pub(crate) async fn refund(store: &impl Store, now_us: u64, cells: &[Cell]) -> Vec<CellOutcome> {
    store.check(At::Given(UnixMicros::new(now_us)), Charge::Refund, cells).await.unwrap()
}

pub(crate) async fn check(store: &impl Store, now_us: u64, cells: &[Cell]) -> Vec<CellOutcome> {
    store.check(At::Given(UnixMicros::new(now_us)), Charge::Commit, cells).await.unwrap()
}

pub(crate) async fn peek(store: &impl Store, now_us: u64, cells: &[Cell]) -> Vec<CellOutcome> {
    store.check(At::Given(UnixMicros::new(now_us)), Charge::Peek, cells).await.unwrap()
}

pub(crate) fn is_denied(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Denied { .. })
}

async fn gives_the_answers_of_the_vectors<F: Fixture>() {
    let fixture = F::start().await;
    let mut tried = 0;
    for case in vectors::sliding_window() {
        if case.window_us < F::SHORTEST_WINDOW_US {
            continue;
        }
        tried += 1;
        for (number, step) in case.steps.iter().enumerate() {
            let algorithm = Algorithm::sliding_window(case.window_us, case.ceiling);
            let cell = Cell { key: user(&case.name, "vectors"), algorithm, cost: step.cost, enforced: true };
            let answer = check(fixture.store(), step.now_us, &[cell]).await[0];
            let (allowed, never, retry_after_us) = match answer.outcome {
                Outcome::Allowed => (true, false, None),
                Outcome::Denied { retry_after_us } => (false, false, Some(retry_after_us)),
                Outcome::Never => (false, true, None),
            };
            assert_eq!(
                (allowed, never, retry_after_us, answer.remaining, answer.reset_us),
                (step.allowed, step.never, step.retry_after_us, step.remaining, step.reset_us),
                "{} step {number}",
                case.name
            );
        }
    }
    assert!(tried >= 5, "only {tried} cases");
}

async fn a_spent_window_allows_again_exactly_at_retry_after<F: Fixture>() {
    let fixture = F::start().await;
    let cells = [cell(user("u", "burst"), 3)];
    for left in [2, 1, 0] {
        let answer = check(fixture.store(), T0 + 10, &cells).await[0];
        assert_eq!((answer.outcome, answer.remaining, answer.reset_us), (Outcome::Allowed, left, T0 + MINUTE));
    }
    let Outcome::Denied { retry_after_us } = check(fixture.store(), T0 + 20, &cells).await[0].outcome else {
        panic!("allowed a fourth");
    };
    let retry_at = T0 + 20 + retry_after_us;
    assert!(is_denied(check(fixture.store(), retry_at - 1, &cells).await[0].outcome));
    assert_eq!(check(fixture.store(), retry_at, &cells).await[0].outcome, Outcome::Allowed);
}

async fn a_cost_above_the_ceiling_can_never_pass<F: Fixture>() {
    let fixture = F::start().await;
    let dear = Cell { cost: 4, ..cell(user("u", "dear"), 3) };
    let answer = check(fixture.store(), T0, &[dear]).await[0];
    assert_eq!((answer.outcome, answer.remaining), (Outcome::Never, 3));
    let all = Cell { cost: 3, ..cell(user("u", "dear"), 3) };
    let answer = check(fixture.store(), T0, &[all]).await[0];
    assert_eq!((answer.outcome, answer.remaining), (Outcome::Allowed, 0));
}

async fn a_denied_request_costs_nobody_anything<F: Fixture>() {
    let fixture = F::start().await;
    let ip = CounterKey { identity: Identity::Ip("203.0.113.7".parse::<IpAddr>().unwrap()), rule: "ip".into() };
    let wide = cell(ip.clone(), 100);
    let narrow = cell(user("u", "narrow"), 1);
    let cells = [wide.clone(), narrow.clone()];
    assert!(check(fixture.store(), T0, &cells).await.iter().all(|answer| answer.outcome == Outcome::Allowed));
    for _ in 0..5 {
        let answers = check(fixture.store(), T0, &cells).await;
        assert_eq!((answers[0].outcome, answers[0].remaining), (Outcome::Allowed, 99));
        assert!(is_denied(answers[1].outcome));
    }
    // In the other order too, and for a counter that did not exist.
    let fresh = cell(user("fresh", "wide"), 10);
    let answers = check(fixture.store(), T0, &[narrow, fresh.clone()]).await;
    assert_eq!((answers[1].outcome, answers[1].remaining), (Outcome::Allowed, 10));
    assert_eq!(check(fixture.store(), T0, &[fresh]).await[0].remaining, 9);
    assert_eq!(check(fixture.store(), T0, &[wide]).await[0].remaining, 98);
}

async fn a_shadow_cell_changes_nothing_and_counts_like_its_twin<F: Fixture>() {
    let fixture = F::start().await;
    let shadow = Cell { enforced: false, ..cell(user("u", "shadow"), 2) };
    let twin = cell(user("u", "twin"), 2);
    let wide = cell(user("u", "wide"), 100);
    for request in 0..5u64 {
        let answers = check(fixture.store(), T0, &[wide.clone(), shadow.clone()]).await;
        assert_eq!((answers[0].outcome, answers[0].remaining), (Outcome::Allowed, 99 - request));
        let twins = check(fixture.store(), T0, std::slice::from_ref(&twin)).await;
        assert_eq!(answers[1], twins[0], "request {request}");
    }
    // A shadow cell is not charged when an enforced one denies.
    let other = Cell { enforced: false, ..cell(user("u", "other"), 5) };
    let never = Cell { cost: 2, ..cell(user("u", "never"), 1) };
    let answers = check(fixture.store(), T0, &[other, never]).await;
    assert_eq!((answers[0].outcome, answers[0].remaining), (Outcome::Allowed, 5));
}

async fn a_peek_writes_nothing<F: Fixture>() {
    let fixture = F::start().await;
    let cells = [cell(user("u", "peek"), 2)];
    for _ in 0..5 {
        let answer = peek(fixture.store(), T0, &cells).await[0];
        assert_eq!((answer.outcome, answer.remaining), (Outcome::Allowed, 2));
    }
    assert_eq!(check(fixture.store(), T0, &cells).await[0].remaining, 1);
    // Nor does one of the future move the counter.
    assert_eq!(peek(fixture.store(), T0 + 5 * MINUTE, &cells).await[0].remaining, 2);
    assert_eq!(check(fixture.store(), T0, &cells).await[0].remaining, 0);
    assert!(is_denied(peek(fixture.store(), T0, &cells).await[0].outcome));
}

async fn sixty_four_tasks_get_exactly_the_limit<F: Fixture>() {
    let fixture = F::start().await;
    let tasks: Vec<_> = (0..64)
        .map(|task| {
            let store = fixture.store().clone();
            tokio::spawn(async move {
                let mut allowed = 0;
                for _ in 0..4 {
                    // Two counters in both orders, so that locks taken carelessly would deadlock.
                    let mut cells = [cell(user("u", "shared"), 100), cell(user("u", "wide"), 1_000_000)];
                    if task % 2 == 0 {
                        cells.reverse();
                    }
                    let answers = check(&store, T0, &cells).await;
                    allowed += u64::from(answers.iter().all(|answer| answer.outcome == Outcome::Allowed));
                }
                allowed
            })
        })
        .collect();
    let mut allowed = 0;
    for task in tasks {
        allowed += task.await.unwrap();
    }
    assert_eq!(allowed, 100);
    assert_eq!(peek(fixture.store(), T0, &[cell(user("u", "wide"), 1_000_000)]).await[0].remaining, 1_000_000 - 100);
}

async fn counters_of_other_rules_and_identities_are_apart<F: Fixture>() {
    let fixture = F::start().await;
    let ip = |ip: &str| CounterKey { identity: Identity::Ip(ip.parse().unwrap()), rule: "r".into() };
    let keys = [
        user("u", "r"),
        user("u", "r2"),
        user("u:r", "r"),
        user("u}:r", "r"),
        user("u%7d:r", "r"),
        user("", "r"),
        user("all", "r"),
        ip("203.0.113.7"),
        ip("2001:db8::"),
        ip("::203.0.113.7"),
        CounterKey { identity: Identity::Global, rule: "r".into() },
        CounterKey { identity: Identity::Key(limiter_user::store::ApiKeyId([0; 16])), rule: "r".into() },
        user("00000000000000000000000000000000", "r"),
    ];
    for key in &keys {
        assert_eq!(check(fixture.store(), T0, &[cell(key.clone(), 1)]).await[0].outcome, Outcome::Allowed, "{key:?}");
    }
    for key in &keys {
        assert!(is_denied(check(fixture.store(), T0, &[cell(key.clone(), 1)]).await[0].outcome), "{key:?}");
    }
}

async fn counts_near_powers_of_two_neither_wrap_nor_blur<F: Fixture>() {
    let fixture = F::start().await;
    for ceiling in [(1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 53) - 1] {
        let name = ceiling.to_string();
        let with_cost = |cost| [Cell { cost, ..cell(user(&name, "large"), ceiling) }];
        assert_eq!(check(fixture.store(), T0, &with_cost(ceiling - 2)).await[0].remaining, 2, "{ceiling}");
        assert_eq!(check(fixture.store(), T0, &with_cost(1)).await[0].remaining, 1, "{ceiling}");
        assert!(is_denied(check(fixture.store(), T0, &with_cost(2)).await[0].outcome), "{ceiling}");
        assert_eq!(check(fixture.store(), T0, &with_cost(1)).await[0].remaining, 0, "{ceiling}");
        assert!(is_denied(check(fixture.store(), T0, &with_cost(1)).await[0].outcome), "{ceiling}");
        // One microsecond into the next window a large count has lost its share, to the unit.
        let share = u128::from(ceiling) * u128::from(MINUTE - 1) / u128::from(MINUTE);
        let left = ceiling - u64::try_from(share).unwrap();
        assert_eq!(peek(fixture.store(), T0 + MINUTE + 1, &with_cost(1)).await[0].remaining, left, "{ceiling}");
    }
}

async fn no_parameter_means_unlimited<F: Fixture>() {
    let fixture = F::start().await;
    let extremes = [0, 1, (1 << 31) - 1, (1 << 32) + 1, 1 << 53, (1 << 53) + 1, 1 << 63, u64::MAX];
    for window_us in extremes.into_iter().filter(|&window| window >= F::SHORTEST_WINDOW_US) {
        for ceiling in extremes {
            let token_bucket = Bucket::new(ceiling, window_us, ceiling)
                .map(|bucket| ("token_bucket", Algorithm::TokenBucket { bucket, window_us }));
            let algorithms = [
                Some(("sliding_window", Algorithm::sliding_window(window_us, ceiling))),
                Some(("fixed_window", fixed_window(ceiling, window_us))),
                // What cannot be a bucket is an error where the policy is read.
                token_bucket.ok(),
            ];
            let costs = extremes.into_iter().filter(|&cost| cost >= 1);
            let all = algorithms.into_iter().flatten().flat_map(|named| costs.clone().map(move |cost| (named, cost)));
            for ((name, algorithm), cost) in all {
                let key = user(&format!("{name} {window_us} {ceiling} {cost}"), "extremes");
                let cells = [Cell { key, algorithm, cost, enforced: true }];
                let mut left = ceiling;
                for _ in 0..3 {
                    let answer = check(fixture.store(), T0, &cells).await[0];
                    match answer.outcome {
                        Outcome::Allowed => {
                            assert!(cost <= left, "{cells:?}");
                            left -= cost;
                            assert!(answer.remaining <= left, "{cells:?}");
                        }
                        Outcome::Denied { retry_after_us } => assert!(retry_after_us > 0, "{cells:?}"),
                        Outcome::Never => assert!(cost > ceiling.min((1 << 53) - 1), "{cells:?}"),
                    }
                    assert!(answer.remaining <= ceiling, "{cells:?}");
                }
            }
        }
    }
}

async fn a_counter_that_appears_twice_holds_the_sum<F: Fixture>() {
    let fixture = F::start().await;
    let twice = |cost| [cell(user("u", "twice"), 10), Cell { cost, ..cell(user("u", "twice"), 10) }];
    let answers = check(fixture.store(), T0, &twice(10)).await;
    assert_eq!(answers[0].outcome, Outcome::Allowed);
    assert!(is_denied(answers[1].outcome));
    assert_eq!(answers[1].remaining, 10);
    let answers = check(fixture.store(), T0, &twice(5)).await;
    assert!(answers.iter().all(|answer| answer.outcome == Outcome::Allowed && answer.remaining == 4), "{answers:?}");
    let answers = check(fixture.store(), T0, &twice(3)).await;
    assert!(answers.iter().all(|answer| answer.outcome == Outcome::Allowed && answer.remaining == 0), "{answers:?}");
}

async fn a_lowered_limit_denies_with_nothing_remaining<F: Fixture>() {
    let fixture = F::start().await;
    check(fixture.store(), T0, &[Cell { cost: 90, ..cell(user("u", "lowered"), 100) }]).await;
    let answer = check(fixture.store(), T0, &[cell(user("u", "lowered"), 10)]).await[0];
    assert!(is_denied(answer.outcome));
    assert_eq!(answer.remaining, 0);
    // Raised again, the counts are still there.
    assert_eq!(check(fixture.store(), T0, &[cell(user("u", "lowered"), 100)]).await[0].remaining, 9);
}

async fn a_counter_is_fresh_after_two_windows<F: Fixture>() {
    let fixture = F::start().await;
    let cells = [cell(user("u", "expiry"), 10)];
    for _ in 0..10 {
        check(fixture.store(), T0, &cells).await;
    }
    assert_eq!(peek(fixture.store(), T0 + MINUTE, &cells).await[0].remaining, 0);
    assert_eq!(peek(fixture.store(), T0 + MINUTE + MINUTE / 2, &cells).await[0].remaining, 5);
    assert_eq!(check(fixture.store(), T0 + 2 * MINUTE, &cells).await[0].remaining, 9);
}

async fn a_steady_client_below_the_limit_is_never_denied<F: Fixture>() {
    let fixture = F::start().await;
    let algorithm = Algorithm::sliding_window(10_000_000, 10);
    let cells = [Cell { key: user("u", "steady"), algorithm, cost: 1, enforced: true }];
    for second in 0..200 {
        let answer = check(fixture.store(), T0 + second * 1_000_000 + 1, &cells).await[0];
        assert_eq!(answer.outcome, Outcome::Allowed, "second {second}");
    }
}

async fn a_clock_that_steps_back_resets_nothing<F: Fixture>() {
    let fixture = F::start().await;
    let cells = [cell(user("u", "clock"), 3)];
    let later = T0 + 100 * MINUTE;
    for _ in 0..3 {
        check(fixture.store(), later, &cells).await;
    }
    for back in [1, MINUTE, 2 * MINUTE, 50 * MINUTE] {
        let answer = check(fixture.store(), later - back, &cells).await[0];
        assert!(is_denied(answer.outcome), "back by {back}");
        assert!(answer.reset_us <= later + MINUTE, "back by {back}");
    }
    // And nobody waits for a time that was never true.
    assert_eq!(check(fixture.store(), later - 47 * MINUTE, &cells).await[0].outcome, Outcome::Allowed);
}

async fn another_window_by_a_new_policy_is_no_fresh_one<F: Fixture>() {
    let fixture = F::start().await;
    let with_window = |window_us, ceiling| {
        [Cell { algorithm: Algorithm::sliding_window(window_us, ceiling), ..cell(user("u", "window"), 0) }]
    };
    for _ in 0..10 {
        check(fixture.store(), T0 + 10, &with_window(MINUTE, 10)).await;
    }
    // Longer: the counts stay as they are.
    let answer = check(fixture.store(), T0 + 20, &with_window(60 * MINUTE, 12)).await[0];
    assert_eq!((answer.outcome, answer.remaining), (Outcome::Allowed, 1));
    // Shorter: in proportion, rounded up.
    let answer = check(fixture.store(), T0 + 30, &with_window(6 * MINUTE, 10)).await[0];
    assert_eq!((answer.outcome, answer.remaining), (Outcome::Allowed, 7));
}

/// A vector's nanoseconds are taken for microseconds, the store's unit, so that its steps are exact.
async fn gives_the_answers_of_the_gcra_vectors<F: Fixture>() {
    let fixture = F::start().await;
    let mut tried = 0;
    for case in vectors::gcra() {
        // What is not larger than the longest that a bucket may take to fill, and not shorter than can be looked at.
        let interval_ns = case.emission_interval_ns * 1000;
        let Ok(bucket) = Bucket::from_interval(interval_ns, case.burst) else { continue };
        let window_us = F::SHORTEST_WINDOW_US.max(MINUTE);
        tried += 1;
        let begin = case.steps[0].now_ns;
        for (number, step) in case.steps.iter().enumerate() {
            let algorithm = Algorithm::TokenBucket { bucket, window_us };
            let cell = Cell { key: user(&case.name, "gcra"), algorithm, cost: step.cost.max(1), enforced: true };
            let now_us = T0 + (step.now_ns - begin);
            let answer = if step.cost == 0 {
                peek(fixture.store(), now_us, &[cell]).await[0]
            } else {
                check(fixture.store(), now_us, &[cell]).await[0]
            };
            let (conforming, never, retry_after) = match answer.outcome {
                Outcome::Allowed => (true, false, None),
                Outcome::Denied { retry_after_us } => (false, false, Some(retry_after_us)),
                Outcome::Never => (false, true, None),
            };
            if step.cost > 0 {
                assert_eq!(
                    (conforming, never, retry_after),
                    (step.conforming, step.never, step.retry_after_ns),
                    "{} step {number}",
                    case.name
                );
            }
            let reset_us = now_us + step.tat_ns.saturating_sub(step.now_ns);
            assert_eq!((answer.remaining, answer.reset_us), (step.remaining, reset_us), "{} step {number}", case.name);
        }
    }
    assert!(tried >= 100, "only {tried} cases");
}

async fn every_algorithm_allows_its_ceiling_and_again_exactly_at_retry_after<F: Fixture>() {
    let fixture = F::start().await;
    for (name, algorithm) in every(7, MINUTE) {
        let cells = [Cell { algorithm, ..cell(user("u", name), 0) }];
        let now = T0 + 10;
        for left in (0..7).rev() {
            let answer = check(fixture.store(), now, &cells).await[0];
            assert_eq!((answer.outcome, answer.remaining), (Outcome::Allowed, left), "{name}");
            assert!(answer.reset_us > now && answer.reset_us <= now + 2 * MINUTE, "{name}");
        }
        for cost in [1, 3, 7] {
            let cells = [Cell { cost, ..cells[0].clone() }];
            let Outcome::Denied { retry_after_us } = check(fixture.store(), now, &cells).await[0].outcome else {
                panic!("{name} allows too many");
            };
            assert!(retry_after_us > 0, "{name}");
            let at = |wait| peek(fixture.store(), now + wait, &cells);
            assert!(is_denied(at(retry_after_us - 1).await[0].outcome), "{name} {cost}");
            assert_eq!(at(retry_after_us).await[0].outcome, Outcome::Allowed, "{name} {cost}");
        }
        // A cost above the ceiling can never pass, and says so.
        let dear = [Cell { cost: 8, ..cells[0].clone() }];
        assert_eq!(check(fixture.store(), now, &dear).await[0].outcome, Outcome::Never, "{name}");
        // Nobody has used it for long enough.
        let later = check(fixture.store(), now + 2 * MINUTE, &cells).await[0];
        assert_eq!((later.outcome, later.remaining), (Outcome::Allowed, 6), "{name}");
    }
}

async fn each_algorithm_refills_in_its_own_way<F: Fixture>() {
    let fixture = F::start().await;
    // The minute begins at T0; all ten are taken half a minute into it.
    let half = MINUTE / 2;
    for ((name, algorithm), expected) in every(10, MINUTE).into_iter().zip([
        // After: 6 s, just before the end of the minute, at it, half a minute later.
        [0, 0, 0, 5],
        [0, 0, 10, 10],
        [1, 4, 5, 10],
        [1, 4, 5, 10],
        [0, 0, 0, 10],
    ]) {
        let cells = [Cell { algorithm, ..cell(user("u", name), 0) }];
        let all = [Cell { cost: 10, ..cells[0].clone() }];
        assert_eq!(check(fixture.store(), T0 + half, &all).await[0].outcome, Outcome::Allowed, "{name}");
        for (at, remaining) in [half + 6_000_000, MINUTE - 1, MINUTE, MINUTE + half].into_iter().zip(expected) {
            assert_eq!(peek(fixture.store(), T0 + at, &cells).await[0].remaining, remaining, "{name} at {at}");
        }
    }
}

async fn a_leaky_bucket_gives_each_request_its_turn<F: Fixture>() {
    let fixture = F::start().await;
    let bucket = LeakyBucket::new(10, MINUTE, 100, 15_000_000).unwrap();
    let algorithm = Algorithm::LeakyBucket { bucket, window_us: MINUTE };
    let cells = [Cell { algorithm, ..cell(user("u", "turns"), 0) }];
    for turn in 0..3 {
        let answer = check(fixture.store(), T0, &cells).await[0];
        assert_eq!((answer.outcome, answer.delay_us), (Outcome::Allowed, turn * 6_000_000));
    }
    // The queue has room, and the fourth would wait for longer than 15 s.
    assert_eq!(check(fixture.store(), T0, &cells).await[0].outcome, Outcome::Denied { retry_after_us: 3_000_000 });
    assert!(is_denied(check(fixture.store(), T0 + 2_999_999, &cells).await[0].outcome));
    let answer = check(fixture.store(), T0 + 3_000_000, &cells).await[0];
    assert_eq!((answer.outcome, answer.delay_us), (Outcome::Allowed, 15_000_000));
    // Nobody waits when the one before has had its time.
    let answer = check(fixture.store(), T0 + 5 * MINUTE, &cells).await[0];
    assert_eq!((answer.outcome, answer.delay_us), (Outcome::Allowed, 0));
    // And no other algorithm holds an answer.
    for (name, algorithm) in every(10, MINUTE).into_iter().take(3) {
        let cells = [Cell { cost: 5, algorithm, ..cell(user("u", name), 0) }];
        for _ in 0..2 {
            assert_eq!(check(fixture.store(), T0, &cells).await[0].delay_us, 0, "{name}");
        }
    }
}

async fn a_refund_gives_back_what_was_taken_and_no_more<F: Fixture>() {
    let fixture = F::start().await;
    for (name, algorithm) in every(10, MINUTE) {
        let with_cost = |cost| [Cell { cost, algorithm, ..cell(user("u", name), 0) }];
        // Of a counter that nobody has used, there is nothing to give back.
        let answer = refund(fixture.store(), T0, &with_cost(5)).await[0];
        assert_eq!((answer.outcome, answer.remaining), (Outcome::Allowed, 10), "{name}");
        check(fixture.store(), T0, &with_cost(10)).await;
        assert!(is_denied(check(fixture.store(), T0, &with_cost(1)).await[0].outcome), "{name}");
        let answer = refund(fixture.store(), T0, &with_cost(4)).await[0];
        assert_eq!((answer.outcome, answer.remaining, answer.delay_us), (Outcome::Allowed, 4, 0), "{name}");
        assert_eq!(check(fixture.store(), T0, &with_cost(1)).await[0].remaining, 3, "{name}");
        // More than was taken, and more than the ceiling.
        for cost in [8, 11, 1 << 31, 1 << 53, u64::MAX] {
            let answer = refund(fixture.store(), T0, &with_cost(cost)).await[0];
            assert_eq!((answer.outcome, answer.remaining), (Outcome::Allowed, 10), "{name} {cost}");
        }
        assert_eq!(check(fixture.store(), T0, &with_cost(10)).await[0].remaining, 0, "{name}");
        assert!(is_denied(check(fixture.store(), T0, &with_cost(1)).await[0].outcome), "{name}");
        // The same counter twice.
        let twice = [with_cost(1)[0].clone(), with_cost(2)[0].clone()];
        let answers = refund(fixture.store(), T0, &twice).await;
        assert_eq!(answers[1].remaining, 3, "{name}");
    }
}

async fn requests_over_counters_of_all_algorithms_are_charged_together_or_not_at_all<F: Fixture>() {
    let fixture = F::start().await;
    let all = every(10, MINUTE).map(|(name, algorithm)| Cell { algorithm, ..cell(user("u", name), 0) });
    let answers = check(fixture.store(), T0, &all).await;
    assert!(answers.iter().all(|answer| (answer.outcome, answer.remaining) == (Outcome::Allowed, 9)), "{answers:?}");
    for denied in 0..all.len() {
        let mut cells = all.clone();
        cells[denied].cost = 10;
        let answers = check(fixture.store(), T0, &cells).await;
        for (number, answer) in answers.iter().enumerate() {
            assert_eq!(is_denied(answer.outcome), number == denied, "{answers:?}");
            assert_eq!(answer.remaining, 9, "{answers:?}");
        }
        // In shadow mode it changes nothing, and is not charged itself.
        cells[denied].enforced = false;
        let answers = peek(fixture.store(), T0, &cells).await;
        assert!(is_denied(answers[denied].outcome), "{answers:?}");
    }
    // Twice in a request, a counter holds the sum.
    for cell in all {
        let twice = [cell.clone(), Cell { cost: 9, ..cell.clone() }];
        let answers = check(fixture.store(), T0, &twice).await;
        assert!(answers[0].outcome == Outcome::Allowed && is_denied(answers[1].outcome), "{answers:?}");
        let twice = [cell.clone(), Cell { cost: 8, ..cell }];
        let answers = check(fixture.store(), T0, &twice).await;
        assert!(
            answers.iter().all(|answer| (answer.outcome, answer.remaining) == (Outcome::Allowed, 0)),
            "{answers:?}"
        );
    }
}

async fn tasks_get_exactly_the_ceiling_of_every_algorithm<F: Fixture>() {
    let fixture = F::start().await;
    let tasks: Vec<_> = (0..16)
        .map(|_| {
            let store = fixture.store().clone();
            tokio::spawn(async move {
                let mut allowed = [0; 5];
                for _ in 0..10 {
                    for (number, (name, algorithm)) in every(50, MINUTE).into_iter().enumerate() {
                        let cells = [Cell { algorithm, ..cell(user("u", name), 0) }];
                        allowed[number] += u32::from(check(&store, T0, &cells).await[0].outcome == Outcome::Allowed);
                    }
                }
                allowed
            })
        })
        .collect();
    let mut sums = [0; 5];
    for task in tasks {
        for (sum, allowed) in sums.iter_mut().zip(task.await.unwrap()) {
            *sum += allowed;
        }
    }
    assert_eq!(sums, [50; 5]);
}

/// From each algorithm to each other, with what was taken: nobody gets a fresh counter, and nobody is locked out.
async fn another_algorithm_by_a_new_policy_is_no_fresh_counter<F: Fixture>() {
    let fixture = F::start().await;
    for (from_name, from) in every(10, MINUTE) {
        for (to_name, to) in every(10, MINUTE) {
            let rule = format!("{from_name}-{to_name}");
            let with = |algorithm, cost| [Cell { cost, algorithm, ..cell(user("u", &rule), 0) }];
            check(fixture.store(), T0, &with(from, 7)).await;
            // A question changes nothing.
            assert_eq!(peek(fixture.store(), T0, &with(to, 1)).await[0].remaining, 3, "{rule}");
            assert_eq!(peek(fixture.store(), T0, &with(from, 1)).await[0].remaining, 3, "{rule}");
            let answer = check(fixture.store(), T0, &with(to, 1)).await[0];
            assert_eq!((answer.outcome, answer.remaining), (Outcome::Allowed, 2), "{rule}");
            // And back, with what came meanwhile: nodes of a fleet read a new policy one after the other.
            let answer = check(fixture.store(), T0, &with(from, 1)).await[0];
            assert_eq!((answer.outcome, answer.remaining), (Outcome::Allowed, 1), "{rule}");
            assert_eq!(check(fixture.store(), T0, &with(to, 1)).await[0].remaining, 0, "{rule}");
            assert!(is_denied(check(fixture.store(), T0, &with(to, 1)).await[0].outcome), "{rule}");
            assert_eq!(peek(fixture.store(), T0 + 2 * MINUTE, &with(to, 1)).await[0].remaining, 10, "{rule}");
        }
    }
}

/// Limits and windows around the powers of two at which numbers of other programs end: the policy refuses them, or the
/// counter is right to the unit.
async fn every_limit_and_window_is_refused_or_counted_to_the_unit<F: Fixture>() {
    const LARGEST: u64 = 1 << 53;
    const EXTREMES: [u64; 10] =
        [0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 1, (1 << 32) + 1, LARGEST, LARGEST + 1, u64::MAX];
    let fixture = F::start().await;
    let (mut counted, mut refused) = (BTreeMap::new(), BTreeMap::new());
    for name in ["sliding_window", "fixed_window", "token_bucket", "leaky_bucket", "sliding_log"] {
        for (limit, window_us) in EXTREMES.into_iter().flat_map(|limit| EXTREMES.map(|window_us| (limit, window_us))) {
            let what = format!("{name} {limit} {window_us}");
            let queue = limit.saturating_sub(1).clamp(1, LARGEST);
            let burst = if name == "leaky_bucket" { format!("burst = {queue}\n") } else { String::new() };
            let text = format!(
                "[[rules]]\nid = \"r\"\nscope = \"user\"\nalgorithm = \"{name}\"\nlimit = {limit}\nwindow = \"{window_us}us\"\n{burst}"
            );
            let is_possible = (1..=LARGEST).contains(&limit)
                && (1000..=366 * 24 * 60 * MINUTE).contains(&window_us)
                && match name {
                    "token_bucket" => Bucket::new(limit, window_us, limit).is_ok(),
                    "leaky_bucket" => Bucket::new(limit, window_us, queue + 1).is_ok(),
                    "sliding_log" => limit <= 10_000,
                    _ => true,
                };
            let policy = match Policy::parse(Path::new("/policy.toml"), &text) {
                Ok(policy) => policy,
                Err(error) => {
                    assert!(!is_possible, "{what}: {error}");
                    *refused.entry(name).or_insert(0) += 1;
                    continue;
                }
            };
            assert!(is_possible, "{what}");
            if window_us < F::SHORTEST_WINDOW_US {
                continue;
            }
            let Limit::Limited(algorithm) = policy.rules[0].limit else { panic!("{what}: no limit") };
            assert_eq!(algorithm.ceiling(), if name == "leaky_bucket" { queue + 1 } else { limit }, "{what}");
            counts_to_the_unit(fixture.store(), algorithm, &what).await;
            *counted.entry(name).or_insert(0) += 1;
        }
    }
    assert_eq!((counted.len(), refused.len()), (5, 5), "{counted:?} {refused:?}");
}

async fn counts_to_the_unit(store: &impl Store, algorithm: Algorithm, what: &str) {
    // Redis counts in doubles, and so what comes next to the largest number is exact, and no more than that.
    let ceiling = algorithm.ceiling().min((1 << 53) - 1);
    let with = |cost| [Cell { algorithm, cost, ..cell(user(what, "extremes"), 0) }];
    assert_eq!(check(store, T0, &with(ceiling.saturating_add(2))).await[0].outcome, Outcome::Never, "{what}");
    let is_leaky = matches!(algorithm, Algorithm::LeakyBucket { .. });
    let mut left = ceiling;
    // Of a slow queue the second would wait longer than anybody may.
    for cost in if is_leaky { [ceiling, 0, 0, 0] } else { [ceiling.saturating_sub(3), 1, 1, 1] } {
        if cost == 0 || cost > left {
            continue;
        }
        let answer = check(store, T0, &with(cost)).await[0];
        left -= cost;
        assert_eq!(answer.outcome, Outcome::Allowed, "{what} {cost}");
        // The largest limit of all is one more than Redis counts to.
        if !is_leaky {
            assert!(answer.remaining - left <= algorithm.ceiling() - ceiling, "{what} {answer:?}");
        }
        let dear = check(store, T0, &with(left + 2)).await[0].outcome;
        assert!(is_denied(dear) || dear == Outcome::Never, "{what} {left}");
    }
    assert_eq!(left, 0, "{what}");
    let cost = 1 + algorithm.ceiling() - ceiling;
    let Outcome::Denied { retry_after_us } = check(store, T0, &with(cost)).await[0].outcome else {
        // Two at a time out of one.
        assert!(cost > algorithm.ceiling(), "{what}");
        return;
    };
    assert!(is_denied(peek(store, T0 + retry_after_us - 1, &with(cost)).await[0].outcome), "{what} {retry_after_us}");
    let then = peek(store, T0 + retry_after_us, &with(cost)).await[0].outcome;
    assert_eq!(then, Outcome::Allowed, "{what} {retry_after_us}");
}

async fn a_bucket_of_another_size_keeps_the_share_that_is_taken<F: Fixture>() {
    let fixture = F::start().await;
    for (name, from, taken, to, remaining) in [
        ("lowered", token_bucket(100, MINUTE), 40, token_bucket(10, MINUTE), 6),
        ("raised", token_bucket(10, MINUTE), 4, token_bucket(100, MINUTE), 60),
        ("longer", token_bucket(10, MINUTE), 10, token_bucket(10, 60 * MINUTE), 0),
        ("shorter", token_bucket(60, 60 * MINUTE), 30, token_bucket(10, MINUTE), 5),
    ] {
        let with = |algorithm, cost| [Cell { cost, algorithm, ..cell(user("u", name), 0) }];
        check(fixture.store(), T0, &with(from, taken)).await;
        // A denial keeps what was made of it, so that its wait is true.
        let answer = check(fixture.store(), T0, &with(to, remaining + 1)).await[0];
        assert_eq!(answer.remaining, remaining, "{name}");
        let Outcome::Denied { retry_after_us } = answer.outcome else { panic!("{name}: {answer:?}") };
        let dear = with(to, remaining + 1);
        let at = |wait| peek(fixture.store(), T0 + wait, &dear);
        assert!(is_denied(at(retry_after_us - 1).await[0].outcome), "{name}");
        assert_eq!(at(retry_after_us).await[0].outcome, Outcome::Allowed, "{name}");
        assert!(retry_after_us <= to.window_us(), "{name}");
    }
}

async fn a_sliding_log_is_exact<F: Fixture>() {
    let fixture = F::start().await;
    let with_cost = |cost| {
        let algorithm = Algorithm::SlidingLog(Window { window_us: MINUTE, ceiling: 10 });
        [Cell { algorithm, cost, ..cell(user("u", "log"), 0) }]
    };
    let second = 1_000_000;
    for (at, cost) in [(50, 4), (55, 3), (58, 3)] {
        assert_eq!(check(fixture.store(), T0 + at * second, &with_cost(cost)).await[0].outcome, Outcome::Allowed);
    }
    // The end of the minute means nothing; each admission leaves a minute after it came.
    for (at, cost, wait) in [(60, 1, 50), (60, 4, 50), (60, 5, 55), (60, 7, 55), (60, 8, 58), (109, 1, 1)] {
        let answer = check(fixture.store(), T0 + at * second, &with_cost(cost)).await[0];
        assert_eq!(answer.outcome, Outcome::Denied { retry_after_us: wait * second }, "{at} {cost}");
        assert_eq!(answer.reset_us, T0 + 118 * second);
    }
    let answer = check(fixture.store(), T0 + 110 * second, &with_cost(4)).await[0];
    assert_eq!((answer.outcome, answer.remaining, answer.reset_us), (Outcome::Allowed, 0, T0 + 170 * second));
    assert!(is_denied(check(fixture.store(), T0 + 115 * second - 1, &with_cost(1)).await[0].outcome));
    assert_eq!(peek(fixture.store(), T0 + 115 * second, &with_cost(3)).await[0].remaining, 3);
}

async fn large_buckets_are_exact<F: Fixture>() {
    let fixture = F::start().await;
    // As slow, as large and as fast as can be.
    for (limit, window_us) in [
        ((1 << 31) - 1, 60 * MINUTE),
        (1 << 31, 60 * MINUTE),
        ((1 << 32) + 1, 24 * 60 * MINUTE),
        (1 << 33, 100 * 24 * 60 * MINUTE),
        (3, 100 * 24 * 60 * MINUTE),
    ] {
        for (name, algorithm) in [("token", token_bucket(limit, window_us)), ("leaky", leaky_bucket(limit, window_us))]
        {
            let with_cost = |cost| [Cell { cost, algorithm, ..cell(user(&format!("{limit} {name}"), "large"), 0) }];
            let now = T0 + 1;
            assert_eq!(check(fixture.store(), now, &with_cost(limit - 2)).await[0].remaining, 2, "{name} {limit}");
            assert!(is_denied(check(fixture.store(), now, &with_cost(3)).await[0].outcome), "{name} {limit}");
            assert_eq!(check(fixture.store(), now, &with_cost(2)).await[0].remaining, 0, "{name} {limit}");
            let Outcome::Denied { retry_after_us } = check(fixture.store(), now, &with_cost(1)).await[0].outcome else {
                panic!("{name} {limit}");
            };
            let interval_ns = algorithm.bucket().unwrap().interval_ns();
            assert_eq!(retry_after_us, interval_ns.div_ceil(1000), "{name} {limit}");
            let answer = check(fixture.store(), now + retry_after_us, &with_cost(1)).await[0];
            assert_eq!(answer.outcome, Outcome::Allowed, "{name} {limit}");
        }
    }
}

async fn no_cells_are_no_reason_to_deny<F: Fixture>() {
    let fixture = F::start().await;
    assert_eq!(check(fixture.store(), T0, &[]).await, []);
}

macro_rules! store_suite {
    ($name:ident, $fixture:ty; $($case:ident),* $(,)?) => {
        mod $name {
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    super::$case::<$fixture>().await;
                }
            )*
        }
    };
    ($name:ident, $fixture:ty) => {
        store_suite! { $name, $fixture;
            gives_the_answers_of_the_vectors,
            a_spent_window_allows_again_exactly_at_retry_after,
            a_cost_above_the_ceiling_can_never_pass,
            a_denied_request_costs_nobody_anything,
            a_shadow_cell_changes_nothing_and_counts_like_its_twin,
            a_peek_writes_nothing,
            sixty_four_tasks_get_exactly_the_limit,
            counters_of_other_rules_and_identities_are_apart,
            counts_near_powers_of_two_neither_wrap_nor_blur,
            no_parameter_means_unlimited,
            every_limit_and_window_is_refused_or_counted_to_the_unit,
            a_counter_that_appears_twice_holds_the_sum,
            a_lowered_limit_denies_with_nothing_remaining,
            a_counter_is_fresh_after_two_windows,
            a_steady_client_below_the_limit_is_never_denied,
            a_clock_that_steps_back_resets_nothing,
            another_window_by_a_new_policy_is_no_fresh_one,
            gives_the_answers_of_the_gcra_vectors,
            every_algorithm_allows_its_ceiling_and_again_exactly_at_retry_after,
            each_algorithm_refills_in_its_own_way,
            a_leaky_bucket_gives_each_request_its_turn,
            a_refund_gives_back_what_was_taken_and_no_more,
            requests_over_counters_of_all_algorithms_are_charged_together_or_not_at_all,
            tasks_get_exactly_the_ceiling_of_every_algorithm,
            another_algorithm_by_a_new_policy_is_no_fresh_counter,
            a_bucket_of_another_size_keeps_the_share_that_is_taken,
            a_sliding_log_is_exact,
            large_buckets_are_exact,
            no_cells_are_no_reason_to_deny,
        }
    };
}

store_suite!(memory, Memory);
store_suite!(redis, Redis);
store_suite!(cluster, Cluster);

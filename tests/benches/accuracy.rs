//! `cargo xtask bench accuracy [-- --only PART]`: what four nodes admit together against what they may, by precision.
//!
//! Each has its own connections to one real redis-server, and all ask for one key: evenly, or one of them most of the time.
//! First a limit that is used up once, which says exactly how much too much or too little was admitted; then windows of a
//! second under a load of twice the limit, which say what is left unused while it lasts, and how many calls of Redis that took.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use limiter_tests::{
    bench::{Goal, Row, Table, only},
    fleet_node::{FleetNode, user},
    redis_server::RedisServer,
};
use limiter_user::{
    clock::{Clock as _, Stopwatch},
    limiter::Subject,
    store::redis::RedisConfig,
};

const LIMITS: [u64; 5] = [10, 100, 1_000, 10_000, 100_000];
const INTERVALS: [u64; 3] = [20, 50, 100];
const EVEN: [u64; 4] = [25, 25, 25, 25];
const SKEWED: [u64; 4] = [70, 20, 8, 2];
/// All together ask as fast as uses the limit up in this time, and for twice as long.
const USED_UP_IN: Duration = Duration::from_millis(1500);
const TICK: Duration = Duration::from_millis(2);
/// More would measure how many round trips a second this machine makes.
const MOST_STRICT: u64 = 10_000;
const STEADY: [u64; 3] = [100, 1_000, 10_000];
const STEADY_WINDOWS: u64 = 5;

/// What every run of a precision has to reach, of what it may admit and of the bound of what may be too much.
const NEVER_ABOVE: Goal = Goal::AtMost(1.0);
const USABLE: Goal = Goal::AtLeast(0.97);

/// What was asked, and what was admitted of it.
#[derive(Clone, Copy, Default)]
struct Driven {
    asked: u64,
    admitted: u64,
}

struct Run {
    precision: &'static str,
    load: &'static str,
    shares: [u64; 4],
    limit: u64,
    interval: u64,
}

impl Run {
    fn name(&self) -> String {
        format!("{} {} {} of {} sync {} ms", self.precision, self.load, "admitted", self.limit, self.interval)
    }
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(measure()).finish();
}

async fn measure() -> Table {
    let server = RedisServer::start().await;
    let mut config = RedisConfig::new(server.url());
    // A machine that is busy with four nodes must not look like a Redis that does not answer.
    config.timeout = Duration::from_secs(2);
    let only = only();
    let wanted = |name: &str| only.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let mut rows = Table::new("accuracy");
    let limits = LIMITS.map(|limit| Row::new(format!("limit {limit}"), "units", limit as f64));
    limits.iter().for_each(|limit| rows.push(limit.clone()));
    for run in runs().filter(|run| wanted(&run.name())) {
        let limit = &limits[LIMITS.iter().position(|limit| *limit == run.limit).expect("one of them")];
        let (admitted, bound) = used_up_once(&run, &config).await;
        let name = run.name();
        let row = Row::new(&name, "units", admitted as f64).beside(limit);
        match run.precision {
            "async" => {
                rows.push(row);
                let over = admitted.saturating_sub(run.limit);
                let most = Row::new(format!("{name}: bound of what is too much"), "units", bound as f64);
                rows.push(Row::new(format!("{name}: too much"), "units", over as f64).beside(&most).goal(NEVER_ABOVE));
                rows.push(most);
            }
            "leased" => {
                rows.push(row.clone().goal(NEVER_ABOVE));
                let used = Row::new(format!("{name}: used"), "units", admitted as f64);
                rows.push(used.beside(limit).goal(USABLE));
            }
            _ => rows.push(row.goal(NEVER_ABOVE)),
        }
    }
    for limit in STEADY {
        for (load, shares) in [("even", EVEN), ("skewed", SKEWED)] {
            for precision in ["async", "leased", "strict"] {
                let name = format!("{precision} {load} steady {limit} a second");
                if !wanted(&name) || (precision == "strict" && limit == MOST_STRICT) {
                    continue;
                }
                let run = Run { precision, load, shares, limit, interval: 50 };
                let (Driven { asked, admitted }, calls) = windows(&run, &config).await;
                let whole = Row::new(format!("{name}: limit"), "units", (limit * STEADY_WINDOWS) as f64);
                let row = Row::new(&name, "units", admitted as f64).beside(&whole);
                rows.push(if precision == "leased" { row.goal(USABLE) } else { row });
                rows.push(whole);
                let asked = Row::new(format!("{name}: asked"), "requests", asked as f64);
                rows.push(Row::new(format!("{name}: calls of redis"), "calls", calls as f64).beside(&asked));
                rows.push(asked);
            }
        }
    }
    rows
}

fn runs() -> impl Iterator<Item = Run> {
    let loads = [("even", EVEN), ("skewed", SKEWED)];
    ["async", "leased", "strict", "local"].into_iter().flat_map(move |precision| {
        loads.into_iter().flat_map(move |(load, shares)| {
            LIMITS.into_iter().flat_map(move |limit| {
                let run = move |interval| Run { precision, load, shares, limit, interval };
                INTERVALS.into_iter().map(run).filter(|run| match run.precision {
                    // Nothing is shared while they decide.
                    "strict" => run.interval == 50 && run.limit <= MOST_STRICT,
                    // Given sticky routing: one of the nodes has the key.
                    "local" => run.interval == 50 && run.load == "skewed",
                    _ => true,
                })
            })
        })
    })
}

async fn fleet(run: &Run, window: &str, config: &RedisConfig) -> Vec<Arc<FleetNode>> {
    let Run { precision, limit, interval, .. } = run;
    let policy = format!(
        "[[rules]]\nid = \"r\"\nscope = \"user\"\nprecision = \"{precision}\"\nlimit = {limit}\nwindow = \"{window}\"\n"
    );
    let mut nodes = Vec::new();
    for _ in 0..4 {
        nodes.push(Arc::new(FleetNode::start(&policy, config, Duration::from_millis(*interval)).await));
    }
    nodes
}

async fn stop(nodes: Vec<Arc<FleetNode>>) {
    for node in nodes {
        Arc::into_inner(node).expect("nobody asks it any more").stop().await;
    }
}

/// Asks `rate` times a second in all, by these shares, and counts what is admitted while `counts` says so.
async fn drive(
    run: &Run,
    nodes: &[Arc<FleetNode>],
    subject: &Subject,
    rate: u64,
    time: Duration,
    counts: impl Fn(&FleetNode) -> bool + Clone + Send + Sync + 'static,
) -> Driven {
    let is_local = run.precision == "local";
    let clients = nodes.iter().zip(run.shares).enumerate().map(|(number, (node, share))| {
        let share = if is_local { if number == 0 { 100 } else { 0 } } else { share };
        let (node, subject, counts) = (Arc::clone(node), subject.clone(), counts.clone());
        tokio::spawn(async move {
            let (watch, mut due_before, mut driven) = (Stopwatch::start(), 0, Driven::default());
            while watch.elapsed() < time {
                let due = u64::try_from(watch.elapsed().as_micros()).unwrap_or(u64::MAX) * rate * share / 100_000_000;
                // A node that does not keep up asks as fast as it can.
                let now = due.saturating_sub(due_before).min(2_000);
                due_before = due;
                // Each when it is answered: others that were asked with it may have to wait.
                let answers = (0..now).map(async |_| u64::from(node.allows(&subject).await && counts(&node)));
                driven.admitted += join_all(answers).await.into_iter().sum::<u64>();
                driven.asked += now;
                tokio::time::sleep(TICK).await;
            }
            driven
        })
    });
    let mut all = Driven::default();
    for client in clients.collect::<Vec<_>>() {
        let Driven { asked, admitted } = client.await.expect("a client");
        all = Driven { asked: all.asked + asked, admitted: all.admitted + admitted };
    }
    all
}

/// What is admitted of a limit that is used up once, and the most that may be too much.
async fn used_up_once(run: &Run, config: &RedisConfig) -> (u64, u64) {
    let nodes = fleet(run, "1h", config).await;
    let subject = user(&run.name());
    let rate = (run.limit * 1000 / u64::try_from(USED_UP_IN.as_millis()).unwrap_or(u64::MAX)).max(20);
    let mut admitted = drive(run, &nodes, &subject, rate, USED_UP_IN * 2, |_| true).await.admitted;
    // What a busy machine could not ask in time.
    for _ in 0..20 {
        if admitted >= run.limit {
            break;
        }
        admitted += drive(run, &nodes, &subject, rate, USED_UP_IN / 3, |_| true).await.admitted;
    }
    let bounds = nodes.iter().flat_map(|node| node.status.overshoot_bounds()).map(|(_, bound)| bound);
    let bound = bounds.max().unwrap_or(0);
    stop(nodes).await;
    (admitted, bound)
}

/// What is admitted in whole windows of a second, of what is asked in them and around them, and how many calls of Redis all of
/// that takes.
async fn windows(run: &Run, config: &RedisConfig) -> (Driven, u64) {
    let nodes = fleet(run, "1s", config).await;
    let first = nodes[0].clock.now().get() / 1_000_000 + 2;
    let is_counted =
        move |node: &FleetNode| (first..first + STEADY_WINDOWS).contains(&(node.clock.now().get() / 1_000_000));
    let subject = user(&format!("steady {} {} {}", run.precision, run.load, run.limit));
    let time = Duration::from_secs(STEADY_WINDOWS + 3);
    let calls = || nodes.iter().map(|node| node.leases.store().calls().ok).sum::<u64>();
    let before = calls();
    let driven = drive(run, &nodes, &subject, run.limit * 2, time, is_counted).await;
    let calls = calls() - before;
    stop(nodes).await;
    (driven, calls)
}

//! `cargo xtask bench latency [-- --rounds N] [--only PART]`: how long `/v1/check` of the real agent takes where Redis is far away
//! or hangs.
//!
//! Two agents run side by side, one beside its Redis and one with 100 ms to it, and are asked in turns, so that both measure
//! the same machine. Then Redis stands still, and each request of a `strict` rule waits for it as long as the agent lets it.
//! Requests come at a modest rate and not after each other, so that neither a CPU nor the answer before makes them wait: an
//! answer that is late makes the next one late as well, and that counts.
//!
//! Each round has percentiles of its own; the rows are their medians, so that a round in which something else wants the CPU
//! says little.

use std::{net::SocketAddr, thread, time::Duration};

use limiter_tests::{
    agent::Setup,
    bench::{Goal, Row, Table, only, rounds},
    delay_proxy::DelayProxy,
    http::{Address, Connection},
    policy::rule_of_path,
    redis_server::{RedisServer, free_port},
};
use limiter_user::clock::Stopwatch;

/// To Redis and back.
const FAR: Duration = Duration::from_millis(100);
const MODEST: Load = Load { interval: Duration::from_millis(5), requests: 600 };
/// One that leaves the time for an answer from far away.
const PATIENT: Load = Load { interval: Duration::from_millis(150), requests: 40 };
/// One that leaves the time for an answer that does not come.
const HANGING: Load = Load { interval: Duration::from_millis(10), requests: 100 };
const ROUNDS: u32 = 9;
/// Addresses that each client asks for, in turns.
const USERS: u32 = 20;
/// How long a request may wait for Redis, where it hangs.
const DEADLINE: Duration = Duration::from_millis(5);
/// What may come on top of that.
const ON_TOP: Duration = Duration::from_millis(1);

const CLOSE: Goal = Goal::AtMost(1.2);
const IN_TIME: Goal = Goal::AtMost(1.0);

/// Of one client in one round.
#[derive(Clone, Copy)]
struct Load {
    interval: Duration,
    requests: u32,
}

/// What one client saw in one round.
struct Seen {
    p50: Duration,
    p99: Duration,
    /// Requests that were not allowed.
    refused: u32,
}

type Percentile = fn(&Seen) -> Duration;

/// Asks about one kind of rule of one agent.
struct Client {
    connection: Connection,
    path: &'static str,
    asked: u32,
    /// From one request to the next: 0 of one that asks for the same user always.
    step: u32,
}

impl Client {
    fn new(at: SocketAddr, path: &'static str) -> Self {
        let connection = Connection::open(&Address::Tcp(at)).expect("the agent");
        Self { connection, path, asked: 0, step: 1 }
    }

    /// Asks for one user alone.
    fn of(at: SocketAddr, path: &'static str, user: u32) -> Self {
        Self { asked: user, step: 0, ..Self::new(at, path) }
    }

    /// Returns whether it was allowed.
    fn ask(&mut self) -> bool {
        self.asked += self.step;
        let client = format!("198.51.100.{}", self.asked % USERS);
        let headers =
            [("X-Forwarded-For", client.as_str()), ("X-Forwarded-Uri", self.path), ("X-Forwarded-Method", "GET")];
        let answer = self.connection.request("GET", "/v1/check", &headers, "").expect("an answer");
        assert!([200, 429].contains(&answer.status), "{}: {answer:?}", self.path);
        answer.status == 200
    }

    /// Asks so often, and measures each from when it was due where the answer before was late.
    fn round(&mut self, Load { interval, requests }: Load) -> Seen {
        let watch = Stopwatch::start();
        let (mut took, mut free, mut refused) = (Vec::with_capacity(requests as usize), Duration::ZERO, 0);
        for number in 0..requests {
            let due = interval * number;
            // Up to that instant, also when somebody wakes this thread before.
            while let Some(wait) = due.checked_sub(watch.elapsed()).filter(|wait| !wait.is_zero()) {
                thread::park_timeout(wait);
            }
            // Not the time by which the client itself woke up too late.
            let begin = if free > due { due } else { watch.elapsed() };
            refused += u32::from(!self.ask());
            free = watch.elapsed();
            took.push(free - begin);
        }
        took.sort_unstable();
        let at = |percent: usize| took[(took.len() * percent / 100).min(took.len() - 1)];
        Seen { p50: at(50), p99: at(99), refused }
    }
}

/// Rounds of several clients, all at the same time, by client.
fn measure(clients: &mut [Client], rounds: u32, load: Load) -> Vec<Vec<Seen>> {
    let mut seen: Vec<Vec<Seen>> = clients.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        thread::scope(|scope| {
            let running: Vec<_> = clients.iter_mut().map(|client| scope.spawn(|| client.round(load))).collect();
            for (seen, round) in seen.iter_mut().zip(running) {
                seen.push(round.join().expect("a client"));
            }
        });
    }
    seen
}

fn median(seen: &[Seen], of: Percentile) -> Duration {
    let mut all: Vec<Duration> = seen.iter().map(of).collect();
    all.sort_unstable();
    all[all.len() / 2]
}

#[expect(clippy::float_arithmetic, reason = "a unit of measurements")]
fn row(name: String, took: Duration) -> Row {
    Row::new(name, "ms", took.as_secs_f64() * 1000.0)
}

/// A rule for each of these, and a path for each rule: precision and what holds without Redis.
fn policy(rules: &[(&str, &str, &str)]) -> String {
    rules.iter().fold(String::new(), |policy, (name, precision, on_store_failure)| {
        let more = format!(
            "scope = \"ip\"\nlimit = 1000000\nwindow = \"1h\"\nprecision = \"{precision}\"\n\
             on_store_failure = \"{on_store_failure}\""
        );
        policy + &rule_of_path(name, &more)
    })
}

/// An agent on a port of its own.
fn setup(redis: &str, more: &str, policy: &str) -> (Setup, SocketAddr) {
    let at = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let configuration = format!("[store]\nkind = \"redis\"\n{more}[store.redis]\nurls = [\"{redis}\"]\n");
    let setup = Setup::new(&configuration, policy);
    let text = std::fs::read_to_string(setup.path("limiter.toml")).expect("the configuration");
    let http = format!("unix:{}", setup.path("http.sock").display());
    setup.write("limiter.toml", &text.replace(&http, &at.to_string()));
    (setup, at)
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let server = runtime.block_on(RedisServer::start());
    let proxy = runtime.block_on(DelayProxy::start(server.port(), FAR));
    let (only, mut table) = (only(), Table::new("latency"));
    let is_wanted = |name: &str| only.as_ref().is_none_or(|part| name.contains(part.as_str()));
    for (precision, path) in [("async", "/async"), ("leased", "/leased"), ("strict", "/strict")] {
        if is_wanted(precision) {
            far_away(&mut table, (precision, path), &server.url(), &proxy.url());
        }
    }
    if is_wanted("hangs") {
        hanging(&mut table, &server);
    }
    table.finish();
}

fn far_away(table: &mut Table, (precision, path): (&str, &'static str), near: &str, far: &str) {
    let policy = policy(&[(precision, precision, "local")]);
    // Whoever wants requests decided there, or lent, has to let them wait for so long; see "How long `timeout` should be" in the
    // README.
    let patience = if precision != "async" { "timeout = \"500ms\"\n" } else { "" };
    let start = |redis: &str| setup(redis, "", &policy);
    let ((near, near_at), (far, far_at)) = (start(near), start(far));
    for setup in [&near, &far] {
        let text = std::fs::read_to_string(setup.path("limiter.toml")).expect("the configuration");
        setup.write("limiter.toml", &(text + patience));
    }
    let (near, far) = (near.start(), far.start());
    let is_sharing = |agent: &limiter_tests::agent::Agent<'_>| agent.status()["degraded"] == false;
    limiter_tests::eventually::until("both share", Duration::from_secs(20), || {
        (is_sharing(&near) && is_sharing(&far)).then_some(())
    });
    // What was never asked for is asked about once; so is whose rate is not known yet. One client that waits for each answer
    // would be a slow one for as long as it waits.
    if precision != "strict" {
        let mut users: Vec<Client> =
            (0..USERS).flat_map(|user| [near_at, far_at].map(|at| Client::of(at, path, user))).collect();
        measure(&mut users, 1, Load { interval: MODEST.interval * USERS, requests: MODEST.requests / USERS });
    }
    let mut clients = [near_at, far_at].map(|at| Client::new(at, path));
    let load = if precision == "strict" { PATIENT } else { MODEST };
    measure(&mut clients, 1, load);
    let seen = measure(&mut clients, rounds(ROUNDS), load);
    assert!(is_sharing(&near) && is_sharing(&far), "an agent went on by itself");
    let of: [(&str, Percentile); 2] = [("p50", |seen| seen.p50), ("p99", |seen| seen.p99)];
    for (what, of) in of {
        let [near, far] = [("beside redis", 0), ("100 ms from redis", 1)]
            .map(|(place, client)| row(format!("{precision}, {place}: {what}"), median(&seen[client], of)));
        let far = far.beside(&near);
        table.push(near);
        table.push(if precision != "strict" && what == "p99" { far.goal(CLOSE) } else { far });
    }
    // Of a lease that is not there, a client that is far from Redis is refused when the deadline is over.
    for (client, place) in [(0, "beside redis"), (1, "100 ms from redis")] {
        let refused = seen[client].iter().map(|seen| seen.refused).sum::<u32>();
        let asked =
            Row::new(format!("{precision}, {place}: asked"), "requests", f64::from(load.requests * rounds(ROUNDS)));
        let refused = Row::new(format!("{precision}, {place}: refused"), "requests", refused.into());
        table.push(refused.beside(&asked));
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a metric that counts")]
fn hanging(table: &mut Table, server: &RedisServer) {
    let policies = [("open", "/open"), ("closed", "/closed"), ("local", "/local")];
    let policy = policy(&policies.map(|(name, _)| (name, "strict", name)));
    // So that Redis is asked each time, and not left alone after a few.
    let breaker = "[store.breaker]\nfailures = 1000\nwithin = \"1s\"\n";
    let (setup, at) = setup(&server.url(), breaker, &policy);
    let agent = setup.start();
    let most = row("deadline + 1 ms".to_owned(), DEADLINE + ON_TOP);
    table.push(most.clone());
    for (name, path) in policies {
        let mut client = [Client::new(at, path)];
        measure(&mut client, 1, HANGING);
        server.freeze();
        let timeouts = || agent.metric("limiter_store_calls_total{result=\"timeout\"}") as u32;
        let before = timeouts();
        let seen = measure(&mut client, rounds(ROUNDS), HANGING);
        let waited = timeouts() - before;
        server.thaw();
        // While a new connection is being made, nobody waits for it longer than that.
        let all = rounds(ROUNDS) * HANGING.requests;
        assert!(waited >= all / 2, "only {waited} of {all} requests waited for redis");
        let name = format!("strict, {name}, redis hangs: p99");
        table.push(row(name, median(&seen[0], |seen| seen.p99)).beside(&most).goal(IN_TIME));
        limiter_tests::eventually::until("redis is asked", Duration::from_secs(20), || {
            (agent.status()["degraded"] == false).then_some(())
        });
    }
}

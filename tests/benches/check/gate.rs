//! The whole check, from headers to the decision, as the agent puts it together.

use std::{fmt::Write as _, sync::Arc};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use limiter_tests::{bench::Case, in_process};
use limiter_user::{
    api::gate::Gate,
    clock::{Clock, SharedClock},
    limiter::{Kind, Limiter},
    store::memory::MemoryStore,
};

use crate::{
    clients::{CLIENTS, Clients, Turns},
    counters::count,
    threads,
};

/// A round of a few milliseconds, in many of which nothing else wants the CPU.
const REPEAT: u32 = CLIENTS / 50;
static API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Clients that do not stop.
const ABUSIVE: u32 = 500;
const PATH: &str = "/api/v1/service7/items/4711?page=2";
const ENDPOINTS: usize = 100;
const KEY_LEN: usize = 46;

/// Gates of a policy with so many rules, all of which apply to every request.
pub(crate) struct Checks {
    rules: usize,
    /// API keys as clients send them, in the order of turns.
    keys: Vec<HeaderValue>,
    roomy: Gate,
    /// Lets nothing pass but what has passed already.
    spent: Gate,
    /// The same, and looks at every counter for every request.
    forgetful: Gate,
    turns: Turns,
}

impl Checks {
    pub(crate) fn new(clients: &Clients, rules: usize) -> Self {
        let keys: Vec<String> = (0..CLIENTS).map(|client| format!("lk_{client:043}")).collect();
        let gate = |limit, adapt| gate(clients, &keys, (rules, limit), adapt);
        let (roomy, spent) = (gate(1_000_000, remembering), gate(1, remembering));
        let forgetful = gate(1, Limiter::remembering_nothing);
        // One after the other in memory, for they come out of a socket and are in the cache.
        let in_order = (0..CLIENTS as usize).map(|turn| keys[clients.at(turn)].clone()).collect::<Vec<_>>().join("");
        let in_order: &'static str = in_order.leak();
        let key = |turn: usize| HeaderValue::from_static(&in_order[turn * KEY_LEN..][..KEY_LEN]);
        let keys = (0..CLIENTS as usize).map(key).collect();
        let checks = Self { rules, keys, roomy, spent, forgetful, turns: clients.turns() };
        for turn in 0..CLIENTS as usize {
            checks.ask(&checks.roomy, &mut headers(), turn, Kind::Allowed);
            checks.ask(&checks.spent, &mut headers(), turn, Kind::Allowed);
            checks.ask(&checks.forgetful, &mut headers(), turn, Kind::Allowed);
        }
        checks
    }

    pub(crate) fn rules(&self) -> usize {
        self.rules
    }

    pub(crate) fn allowed(&self, threads: usize) -> Case<'_> {
        self.case("allowed", &self.roomy, Kind::Allowed, threads)
    }

    /// Of so many clients that what is remembered of one is gone when its turn comes again.
    pub(crate) fn denied(&self, threads: usize) -> Case<'_> {
        self.case("denied", &self.spent, Kind::Denied, threads)
    }

    /// A few clients that do not stop: what each of their requests costs where every counter is looked at, and where denials
    /// are remembered.
    pub(crate) fn abused(&self) -> [Case<'_>; 2] {
        let case = |how, gate| {
            let name = format!("whole check, {} rules, denied again, {how}", self.rules);
            Case::new(name, ABUSIVE * 2, move |repeat| {
                threads::over(1, 0..repeat as usize, headers, |headers: &mut HeaderMap, turn| {
                    self.ask(gate, headers, turn % ABUSIVE as usize, Kind::Denied);
                })
            })
        };
        [case("looked at", &self.forgetful), case("remembered", &self.spent)]
    }

    fn case<'c>(&'c self, name: &str, gate: &'c Gate, kind: Kind, threads: usize) -> Case<'c> {
        let name = format!("whole check, {} rules, {name}, {}", self.rules, count(threads));
        // Of many rules fewer, so that a round stays as short.
        let repeat = if self.rules > 10 { REPEAT / 4 } else { REPEAT };
        Case::new(name, repeat, move |repeat| {
            let (turns, ask) =
                (self.turns.next(repeat), |headers: &mut HeaderMap, turn| self.ask(gate, headers, turn, kind));
            threads::over(threads, turns, headers, ask)
        })
    }

    fn ask(&self, gate: &Gate, headers: &mut HeaderMap, turn: usize, kind: Kind) {
        headers.get_mut(&API_KEY).expect("it is there").clone_from(&self.keys[turn]);
        assert_eq!(in_process::check(gate, headers, PATH), kind);
    }
}

/// What a gateway sends along.
fn headers() -> HeaderMap {
    let lines = [
        ("host", "api.example.org"),
        ("user-agent", "curl/8.5.0"),
        ("accept", "application/json"),
        ("x-original-method", "GET"),
        ("x-original-uri", PATH),
        ("x-forwarded-for", "203.0.113.9"),
        ("x-api-key", "replaced"),
    ];
    let lines = lines.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
    lines.into_iter().collect()
}

/// Rules of users and of keys in turns, of which every second is about one endpoint group out of many.
fn policy(rules: usize, limit: u32) -> String {
    let mut text = String::new();
    for group in 0..ENDPOINTS {
        writeln!(text, "[[endpoints]]\nname = \"g{group}\"\nmatch = [\"/api/v1/service{group}/items/*\"]")
            .expect("text");
    }
    for rule in 0..rules {
        let scope = ["user", "key"][rule / 2 % 2];
        let endpoint = ["", "endpoint = \"g7\"\n"][rule % 2];
        write!(text, "[[rules]]\nid = \"rule{rule}\"\nscope = \"{scope}\"\n{endpoint}").expect("text");
        writeln!(text, "limit = {limit}\nwindow = \"1d\"").expect("text");
    }
    text
}

fn remembering(limiter: Limiter) -> Limiter {
    limiter
}

fn gate(clients: &Clients, keys: &[String], (rules, limit): (usize, u32), adapt: fn(Limiter) -> Limiter) -> Gate {
    let clock: Arc<dyn Clock> = Arc::new(SharedClock::new());
    let counters = Arc::new(MemoryStore::new(Arc::clone(&clock), 4_000_000));
    let pairs = keys.iter().map(String::as_str).zip(clients.ids.iter().map(|id| &**id));
    in_process::gate_with("", &policy(rules, limit), in_process::key_store(pairs), clock, counters, adapt)
}

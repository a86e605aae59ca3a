//! The whole check, from headers to the decision, as the agent puts it together.

use std::{fmt::Write as _, fs, net::Ipv4Addr, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use limiter_tests::bench::Case;
use limiter_user::{
    active::Active,
    api::{callers::Callers, gate::Gate, serve::Peer},
    clock::{Clock, SharedClock},
    config::{Config, Environment},
    host::HostAddresses,
    identity::{KeySecret, KeyStore, api_key::id_to_hex},
    limiter::{Kind, Limiter, Request},
    metrics::Metrics,
    policy::Policy,
    pressure::Pressure,
    push::Pusher,
    store::{Charge, memory::MemoryStore},
    top::Top,
};

use crate::{
    clients::{CLIENTS, Clients},
    counters::count,
    threads,
};

const REPEAT: u32 = CLIENTS / 5;
const SECRET: [u8; 32] = [7; 32];
const PATH: &str = "/api/v1/service7/items/4711?page=2";
const ENDPOINTS: usize = 100;

/// As many rules as that apply to every request.
pub(crate) struct Checks<'a> {
    clients: &'a Clients,
    rules: usize,
    /// API keys as clients send them.
    keys: Vec<HeaderValue>,
    roomy: Gate,
    /// Lets nothing pass but what has passed already.
    spent: Gate,
}

impl<'a> Checks<'a> {
    pub(crate) fn new(clients: &'a Clients, rules: usize) -> Self {
        let keys: Vec<String> = (0..CLIENTS).map(|client| format!("lk_{client:043}")).collect();
        let (roomy, spent) = (gate(clients, &keys, rules, 1_000_000), gate(clients, &keys, rules, 1));
        let keys = keys.iter().map(|key| HeaderValue::from_str(key).expect("a header")).collect();
        let checks = Self { clients, rules, keys, roomy, spent };
        for client in 0..CLIENTS as usize {
            checks.ask(&checks.roomy, &mut headers(), client, Kind::Allowed);
            checks.ask(&checks.spent, &mut headers(), client, Kind::Allowed);
        }
        checks
    }

    pub(crate) fn rules(&self) -> usize {
        self.rules
    }

    pub(crate) fn allowed(&self, threads: usize) -> Case<'_> {
        self.case("allowed", &self.roomy, Kind::Allowed, threads)
    }

    pub(crate) fn denied(&self, threads: usize) -> Case<'_> {
        self.case("denied", &self.spent, Kind::Denied, threads)
    }

    fn case<'c>(&'c self, name: &str, gate: &'c Gate, kind: Kind, threads: usize) -> Case<'c> {
        let turns = self.clients.turns();
        let name = format!("whole check, {} rules, {name}, {}", self.rules, count(threads));
        Case::new(name, REPEAT, move |repeat| {
            let ask = |headers: &mut HeaderMap, client| self.ask(gate, headers, client, kind);
            threads::over(threads, turns.next(repeat), headers, ask)
        })
    }

    fn ask(&self, gate: &Gate, headers: &mut HeaderMap, client: usize, kind: Kind) {
        headers.get_mut("x-api-key").expect("it is there").clone_from(&self.keys[client]);
        let subject = gate.subject_of_headers(headers, std::iter::empty(), Peer(Some(Ipv4Addr::LOCALHOST.into())));
        let decision = gate.decide(&Request {
            subject: &subject,
            method: "GET",
            path: PATH,
            also: &[],
            attributes: &[],
            cost: 1,
            charge: Charge::Commit,
        });
        assert_eq!(decision.kind, kind);
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
fn policy(rules: usize, limit: u32) -> Policy {
    let mut text = String::new();
    for group in 0..ENDPOINTS {
        writeln!(text, "[[endpoints]]\nname = \"g{group}\"\nmatch = [\"/api/v1/service{group}/items/*\"]").expect("text");
    }
    for rule in 0..rules {
        let scope = ["user", "key"][rule / 2 % 2];
        let endpoint = ["", "endpoint = \"g7\"\n"][rule % 2];
        write!(text, "[[rules]]\nid = \"rule{rule}\"\nscope = \"{scope}\"\n{endpoint}").expect("text");
        writeln!(text, "limit = {limit}\nwindow = \"1d\"").expect("text");
    }
    Policy::parse(Path::new("/policy.toml"), &text).expect("a policy")
}

fn key_store(clients: &Clients, keys: &[String]) -> KeyStore {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (key_file, secret_file) = (folder.path().join("keys.toml"), folder.path().join("key_secret"));
    let secret = KeySecret::new(&SECRET);
    let mut text = String::new();
    for (client, key) in clients.ids.iter().zip(keys) {
        writeln!(text, "[[keys]]\nid = \"{}\"\nclient = \"{client}\"", id_to_hex(secret.id_of(key))).expect("text");
    }
    fs::write(&key_file, text).expect("write the keys");
    fs::write(&secret_file, "07".repeat(SECRET.len())).expect("write the secret");
    fs::set_permissions(&secret_file, fs::Permissions::from_mode(0o600)).expect("make the secret one");
    KeyStore::load(&key_file, &secret_file).expect("the keys are right")
}

fn gate(clients: &Clients, keys: &[String], rules: usize, limit: u32) -> Gate {
    let text = "[node]\nid = \"bench\"\n[xdp]\ninterfaces = []\n";
    let config = Config::parse(Path::new("/limiter.toml"), text, Environment::default()).expect("a configuration");
    let clock: Arc<dyn Clock> = Arc::new(SharedClock::new());
    let counters = Arc::new(MemoryStore::new(Arc::clone(&clock), 4_000_000));
    let metrics = Arc::new(Metrics::new());
    let pressure = Arc::new(Pressure::new(config.api.pressure));
    let active = Active::derive(policy(rules, limit), &[], &metrics, &pressure, clock.now()).share();
    let prefixes = config.identity.prefixes;
    let limiter = Limiter::new(active, counters, Arc::clone(&clock), prefixes);
    let callers = Callers::new(&config.identity, key_store(clients, keys), true, None, clock).expect("callers");
    let host = Arc::new(HostAddresses::read().expect("the addresses of this host"));
    let pusher = Pusher::disabled(Arc::clone(&metrics));
    let gate = Gate::new(limiter, callers, Vec::new(), host, pusher, metrics);
    gate.reporting_to(pressure).observed_by(Arc::new(Top::new(prefixes)))
}

//! What the agent decides requests with, put together in this process: no sockets, and a clock of the test's own.

use std::{fs, net::Ipv4Addr, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc};

use axum::http::HeaderMap;
use limiter_user::{
    active::Active,
    api::{callers::Callers, gate::Gate, serve::Peer},
    clock::Clock,
    config::{Config, Environment},
    host::HostAddresses,
    identity::{Jwt, KeySecret, KeyStore, api_key::id_to_hex},
    limiter::{Kind, Limiter, Request},
    metrics::Metrics,
    policy::Policy,
    pressure::Pressure,
    push::Pusher,
    store::{Charge, memory::MemoryStore},
    top::Top,
};

const SECRET: [u8; KeySecret::LEN] = [7; KeySecret::LEN];

/// A key file of these API keys with their clients.
///
/// # Panics
///
/// When the files cannot be written, or are wrong.
pub fn key_store<'a>(keys: impl IntoIterator<Item = (&'a str, &'a str)>) -> KeyStore {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (key_file, secret_file) = (folder.path().join("keys.toml"), folder.path().join("key_secret"));
    let secret = KeySecret::new(&SECRET);
    let entry = |(key, client)| format!("[[keys]]\nid = \"{}\"\nclient = \"{client}\"\n", id_to_hex(secret.id_of(key)));
    fs::write(&key_file, keys.into_iter().map(entry).collect::<String>()).expect("write the keys");
    fs::write(&secret_file, "07".repeat(SECRET.len())).expect("write the secret");
    fs::set_permissions(&secret_file, fs::Permissions::from_mode(0o600)).expect("make the secret one");
    KeyStore::load(&key_file, &secret_file).expect("the keys are right")
}

/// A gate as the agent builds it, with nothing to push to. `configuration` follows the tables `[node]` and `[xdp]`.
///
/// # Panics
///
/// When the configuration or the policy is wrong.
pub fn gate(
    configuration: &str,
    policy: &str,
    keys: KeyStore,
    clock: Arc<dyn Clock>,
    counters: Arc<MemoryStore>,
) -> Gate {
    gate_with(configuration, policy, keys, clock, counters, |limiter| limiter)
}

/// The same, of a limiter that `adapt` has made otherwise.
///
/// # Panics
///
/// As [`gate`] does.
pub fn gate_with(
    configuration: &str,
    policy: &str,
    keys: KeyStore,
    clock: Arc<dyn Clock>,
    counters: Arc<MemoryStore>,
    adapt: impl FnOnce(Limiter) -> Limiter,
) -> Gate {
    let text = format!("[node]\nid = \"here\"\n[xdp]\ninterfaces = []\n{configuration}");
    let config = Config::parse(Path::new("/limiter.toml"), &text, Environment::default()).expect("a configuration");
    let policy = Policy::parse(Path::new("/policy.toml"), policy).expect("a policy");
    let metrics = Arc::new(Metrics::new());
    let pressure = Arc::new(Pressure::new(config.api.pressure));
    let active = Active::derive(policy, &[], &metrics, &pressure, clock.now()).share();
    let prefixes = config.identity.prefixes;
    let limiter = adapt(Limiter::new(active, counters, Arc::clone(&clock), prefixes));
    let jwt = config.identity.jwt.as_ref().map(|jwt| Jwt::load(jwt).expect("keys of tokens"));
    let callers = Callers::new(&config.identity, keys, true, jwt, clock).expect("callers");
    let host = Arc::new(HostAddresses::read().expect("the addresses of this host"));
    let pusher = Pusher::disabled(Arc::clone(&metrics));
    let gate = Gate::new(limiter, callers, Vec::new(), host, pusher, metrics);
    gate.reporting_to(pressure).observed_by(Arc::new(Top::new(prefixes)))
}

/// A request that costs one, from a gateway on this host: who sends it, and what becomes of it.
pub fn check(gate: &Gate, headers: &HeaderMap, path: &str) -> Kind {
    let subject = gate.subject_of_headers(headers, std::iter::empty(), Peer(Some(Ipv4Addr::LOCALHOST.into())));
    let request =
        Request { subject: &subject, method: "GET", path, also: &[], attributes: &[], cost: 1, charge: Charge::Commit };
    gate.decide(&request).kind
}

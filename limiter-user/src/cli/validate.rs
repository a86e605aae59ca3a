//! `limiter validate`, and the check that it shares with the start of the agent.

use std::path::Path;

use super::{
    ConfigArg,
    keys::{finish_now, key_store, now},
    report, say, warn,
};
use crate::{
    api::serve::is_taken_by_no_socket,
    config::{Config, ConfigErrors, Environment, IdentityKind, KeyStoreKind, Listen, RedisConfig, StoreKind},
    dataplane::canonical,
    exit::Exit,
    identity::{Entries, Jwt, JwtWatch, KeySecret, KeyStore, KeyWatch, api_key::id_to_hex},
    policy::{Policy, Scope},
    telemetry,
    watch::FileWatch,
};

/// Everything that the agent reads before it starts.
#[derive(Debug)]
#[non_exhaustive]
pub struct Checked {
    pub config: Config,
    /// What the configuration was read with.
    pub environment: Environment,
    pub policy: Policy,
    /// Of the policy file as it was before it was read.
    pub policy_watch: FileWatch,
    /// Of the key file; those in Redis are not read here.
    pub keys: KeyStore,
    /// Notices what changes in the key file from here on.
    pub watch: KeyWatch,
    /// The keys of tokens, where tokens are believed, and what notices that they change.
    pub jwt: Option<(Jwt, JwtWatch)>,
    /// What is right and yet may surprise.
    pub notes: Vec<String>,
}

/// Reads configuration, policy and API keys, and reports the mistakes of all of them at once.
pub fn check(path: &Path, environment: Environment) -> Result<Checked, ConfigErrors> {
    let configuration = Config::check(path, environment.clone());
    let mut errors = configuration.errors;
    let mut keep = |found: ConfigErrors| errors.extend(found);
    keep(telemetry::check(&environment));
    let policy = configuration.policy_file.and_then(|file| {
        let watch = FileWatch::new(file);
        Policy::load(watch.path()).map_err(&mut keep).ok().map(|policy| (policy, watch))
    });
    let keys = configuration.config.as_ref().and_then(|config| {
        let (key_file, secret_file) = (&config.identity.key_file, &config.identity.key_secret_file);
        let watch = KeyWatch::new(key_file.clone(), secret_file.clone());
        let keys = match &config.identity.key_store {
            KeyStoreKind::File => KeyStore::load(key_file, secret_file),
            // Redis need not be there for a start, so nothing is asked of it.
            KeyStoreKind::Redis(_) => {
                KeySecret::load(secret_file).map(|secret| KeyStore::new(secret, Entries::default()))
            }
        };
        Some((keys.map_err(&mut keep).ok()?, watch))
    });
    let jwt = configuration.config.as_ref().and_then(|config| config.identity.jwt.as_ref()).and_then(|config| {
        let watch = JwtWatch::new(config.clone());
        Some((watch.load().map_err(&mut keep).ok()?, watch))
    });
    if let Some(config) = &configuration.config {
        keep(check_sockets(config));
    }
    if let (Some(config), Some((policy, _)), Some((keys, _))) = (&configuration.config, &policy, &keys) {
        keep(check_policy(config, policy, keys.secret().is_some()));
    }
    match (configuration.config, policy, keys) {
        (Some(config), Some((policy, policy_watch)), Some((keys, watch))) if errors.is_empty() => {
            let notes = notes(&config, &policy, (config.identity.key_store == KeyStoreKind::File).then_some(&keys));
            Ok(Checked { config, environment, policy, policy_watch, keys, watch, jwt, notes })
        }
        _ => Err(errors),
    }
}

/// Paths where the agent would take the place of what is no socket.
fn check_sockets(config: &Config) -> ConfigErrors {
    let mut errors = ConfigErrors::new();
    for (key, address) in [("api.http", &config.api.http), ("api.admin", &config.api.admin)] {
        if let Listen::Unix(path) = address
            && is_taken_by_no_socket(path)
        {
            let message = format!("{} is there and is no socket: choose another path, or remove it", path.display());
            errors.extend(ConfigErrors::of_file(&config.path, key, message, false));
        }
    }
    errors
}

/// What of a policy does not fit the configuration. `has_secret`: there is a secret that all nodes hash with.
pub(crate) fn check_policy(config: &Config, policy: &Policy, has_secret: bool) -> ConfigErrors {
    let mut errors = check_scopes(config, policy, has_secret);
    errors.extend(check_packet_rules(config, policy));
    errors
}

/// Rules whose identity no request can have, or which nodes would count apart.
fn check_scopes(config: &Config, policy: &Policy, has_secret: bool) -> ConfigErrors {
    let mut errors = ConfigErrors::new();
    let order = &config.identity.order;
    if !policy.bypass.key_ids.is_empty() && !order.contains(&IdentityKind::ApiKey) {
        let message = "names API keys, and identity.order has no \"api_key\"";
        errors.extend(ConfigErrors::of_file(&config.policy.file, "bypass.key_id", message, false));
    }
    for rule in &policy.rules {
        let by_session = [IdentityKind::Session, IdentityKind::UserAgent];
        let message = match rule.scope {
            Scope::Key if !order.contains(&IdentityKind::ApiKey) => {
                format!("the rule \"{}\" limits API keys, and identity.order has no \"api_key\"", rule.id)
            }
            Scope::Session if !by_session.iter().any(|kind| order.contains(kind)) => format!(
                "the rule \"{}\" limits sessions, and identity.order has neither \"session_cookie\" nor \"user_agent\"",
                rule.id
            ),
            Scope::Session if config.store.kind != StoreKind::Memory && !has_secret => format!(
                "the rule \"{}\" counts sessions in Redis, by hashes that all nodes have to make alike: write 64 random \
                 hexadecimal digits to {} (openssl rand -hex 32), readable by the agent alone, and copy it to all nodes",
                rule.id,
                config.identity.key_secret_file.display()
            ),
            Scope::User | Scope::Key | Scope::Session | Scope::Ip | Scope::Global | Scope::Attribute(_) => continue,
        };
        errors.extend(ConfigErrors::of_file(&config.policy.file, "rules.scope", message, false));
    }
    errors
}

/// Packet rules that hold for a part of a source only. All of a source has one bucket, which the parameters of one rule have
/// to charge: by those of two it would keep to neither.
fn check_packet_rules(config: &Config, policy: &Policy) -> ConfigErrors {
    let mut errors = ConfigErrors::new();
    let prefixes = config.identity.prefixes;
    for rule in policy.packet_rules.iter().filter(|rule| rule.is_charged()) {
        for cidr in rule.cidrs.iter().map(|cidr| canonical(*cidr)) {
            let source = prefixes.len_of(cidr.addr());
            if cidr.prefix_len() <= source {
                continue;
            }
            let setting = if cidr.addr().is_ipv4() { "ipv4_prefix" } else { "ipv6_prefix" };
            let message = format!(
                "the rule \"{}\" limits {cidr}, and all addresses of a /{source} are one source with one bucket \
                 (identity.{setting} = {source}): write a /{source} or a shorter prefix, or set identity.{setting} to {}",
                rule.id,
                cidr.prefix_len()
            );
            errors.extend(ConfigErrors::of_file(&config.policy.file, "packet_rules.cidr", message, false));
        }
    }
    errors
}

/// What is right and yet may surprise. Without `keys`, what is known without them.
pub(crate) fn notes(config: &Config, policy: &Policy, keys: Option<&KeyStore>) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(keys) = keys {
        notes.extend(of_keys(config, policy, keys));
    }
    if let Some(open) = open_to_others(&config.api.http) {
        notes.push(open);
    }
    let of_packets = policy.packet_rules.len() + policy.allow.len() + policy.deny.len();
    if config.xdp.interfaces.is_empty() && of_packets > 0 {
        notes.push(format!(
            "xdp.interfaces is empty, so {} packet rules, {} allow and {} deny prefixes do not act on packets here",
            policy.packet_rules.len(),
            policy.allow.len(),
            policy.deny.len()
        ));
    }
    notes
}

/// What policy and keys say of each other, where keys are asked for.
pub(crate) fn of_keys(config: &Config, policy: &Policy, keys: &KeyStore) -> Vec<String> {
    if !config.identity.order.contains(&IdentityKind::ApiKey) {
        return Vec::new();
    }
    let place = match &config.identity.key_store {
        KeyStoreKind::File => config.identity.key_file.display().to_string(),
        KeyStoreKind::Redis(redis) => format!("Redis at {}", redis.name()),
    };
    let unknown = policy.bypass.key_ids.iter().filter(|id| !keys.has(**id));
    let notes = unknown.map(|id| format!("bypass names the API key {}, which {place} does not have", id_to_hex(*id)));
    notes.chain(keys.check_plans(policy, now()).iter().map(ToString::to_string)).collect()
}

/// Who may ask may also charge and refund: there is no password.
pub(crate) fn open_to_others(http: &Listen) -> Option<String> {
    match http {
        Listen::Tcp(address) if !address.ip().to_canonical().is_loopback() => Some(format!(
            "api.http = \"{http}\" is open to other hosts, and whoever reaches it may charge, refund and try out anybody's limits \
             (POST /v1/decide): let only gateways reach it, by a firewall or a network of their own, or listen on loopback or \
             a Unix socket"
        )),
        Listen::Tcp(_) | Listen::Unix(_) => None,
    }
}

/// How many keys Redis has, and what does not fit there. An agent starts with such keys, and without Redis: these are notes.
fn look_at_redis(redis: &RedisConfig, checked: &Checked) -> (Option<usize>, Vec<String>) {
    let listed = match key_store(redis).and_then(|admin| finish_now(admin.list())?) {
        Ok(listed) => listed,
        Err(error) => return (None, vec![format!("the API keys in Redis are not checked: {error:#}")]),
    };
    let mut notes = of_keys(&checked.config, &checked.policy, &listed.keys);
    notes.extend(listed.hindrances(&checked.config.identity.key_secret_file, checked.keys.secret()));
    (Some(listed.keys.len()), notes)
}

pub fn run(arguments: &ConfigArg) -> Exit {
    match check(&arguments.config, Environment::of_process()) {
        Ok(checked) => {
            let (keys, of_redis) = match &checked.config.identity.key_store {
                KeyStoreKind::File => (Some(checked.keys.len()), Vec::new()),
                KeyStoreKind::Redis(redis) => look_at_redis(redis, &checked),
            };
            for note in checked.notes.iter().chain(&of_redis) {
                warn(format_args!("note: {note}"));
            }
            let Checked { config, policy, .. } = &checked;
            let summary = format_args!(
                "{} and {} are valid: {} rules, {} packet rules, {} endpoint groups, {} plans, {} API keys",
                config.path.display(),
                config.policy.file.display(),
                policy.rules.len(),
                policy.packet_rules.len(),
                policy.endpoints.len(),
                policy.plans.len(),
                keys.map_or("unknown".to_owned(), |keys| keys.to_string())
            );
            say(summary).err().unwrap_or(Exit::Ok)
        }
        Err(errors) => report(&errors),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;

    struct Files(tempfile::TempDir);

    impl Files {
        fn new(config: &str, policy: &str, keys: &str) -> Self {
            let files = Self(tempfile::tempdir().unwrap());
            let names = "[policy]\nfile = \"policy.toml\"\n[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"secret\"\n";
            for (name, text) in [
                ("limiter.toml", format!("{names}{config}")),
                ("policy.toml", policy.into()),
                ("keys.toml", keys.into()),
            ] {
                fs::write(files.path(name), text).unwrap();
            }
            files
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn check(&self) -> Result<Checked, ConfigErrors> {
            check(&self.path("limiter.toml"), Environment::default())
        }
    }

    #[test]
    fn mistakes_of_all_files_are_reported_at_once() {
        let files = Files::new("[xdp]\nmod = 1\n", "alow = []\n", "");
        let errors = files.check().unwrap_err().to_string();
        let expected = format!(
            "{}:7: xdp.mod: unknown field: did you mean \"mode\"?\n{}:1: alow: unknown field: did you mean \"allow\"?",
            files.path("limiter.toml").display(),
            files.path("policy.toml").display()
        );
        assert_eq!(errors, expected);
    }

    #[test]
    fn a_missing_policy_is_named() {
        let files = Files::new("", "", "");
        fs::remove_file(files.path("policy.toml")).unwrap();
        let errors = files.check().unwrap_err();
        let expected = format!("{}: cannot read the policy: no such file", files.path("policy.toml").display());
        assert_eq!((errors.to_string(), errors.exit()), (expected, Exit::Config));
    }

    #[test]
    fn plans_of_keys_that_the_policy_lacks_are_noted_once_each_and_are_no_mistake() {
        let key = |n: u8, plan: &str, more: &str| {
            format!("[[keys]]\nid = \"{n:032x}\"\nclient = \"c\"\nplan = \"{plan}\"\n{more}")
        };
        let keys: String = (1..=5).map(|n| key(n, "pro", "")).collect();
        let ended = key(6, "old", "disabled = true\n") + &key(7, "older", "expires = 2026-01-01T00:00:00Z\n");
        let keys = ended + &keys + &key(8, "free", "") + &key(9, "pro", "disabled = true\n");
        let files = Files::new("", "[plans.free]\n", &keys);
        fs::write(files.path("secret"), format!("{}\n", "0".repeat(64))).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(files.path("secret"), mode).unwrap();
        let [pro] = &files.check().unwrap().notes[..] else { panic!("one note expected") };
        let file = files.path("keys.toml");
        let named = (1..=3).map(|n| format!("{n:032x}")).collect::<Vec<_>>().join(", ");
        let expected = format!(
            "{}:11: keys.plan: the policy has no plan \"pro\": requests with the key {named} and 2 more have the limits of those \
             without a plan",
            file.display()
        );
        assert_eq!(*pro, expected);
        fs::write(files.path("policy.toml"), "[plans.pro]\n[plans.free]\n").unwrap();
        assert_eq!(files.check().unwrap().notes, [""; 0]);
    }

    #[test]
    fn a_rule_for_keys_that_nobody_reads_is_a_mistake() {
        let policy = "[[rules]]\nid = \"k\"\nscope = \"key\"\nlimit = 1\nwindow = \"1s\"\n";
        let files = Files::new("order = [\"ip\"]\n", policy, "");
        let errors = files.check().unwrap_err().to_string();
        assert!(errors.ends_with("the rule \"k\" limits API keys, and identity.order has no \"api_key\""), "{errors}");
        let files = Files::new("order = [\"ip\", \"api_key\"]\n", policy, "");
        assert!(files.check().unwrap_err().to_string().contains("\"ip\" comes last"));
    }

    #[test]
    fn a_rule_for_sessions_needs_sessions_and_nodes_that_agree_on_them() {
        let policy = "[[rules]]\nid = \"s\"\nscope = \"session\"\nlimit = 1\nwindow = \"1s\"\n";
        let files = Files::new("order = [\"api_key\", \"ip\"]\n", policy, "");
        let errors = files.check().unwrap_err().to_string();
        assert!(errors.ends_with("identity.order has neither \"session_cookie\" nor \"user_agent\""), "{errors}");
        assert!(Files::new("", policy, "").check().is_ok());
        let redis =
            "session_cookie = \"sid\"\n[store]\nkind = \"redis\"\n[store.redis]\nurls = [\"redis://127.0.0.1\"]\n";
        let files = Files::new(redis, policy, "");
        let errors = files.check().unwrap_err().to_string();
        assert!(errors.contains("write 64 random hexadecimal digits to") && errors.contains("secret"), "{errors}");
        fs::write(files.path("secret"), format!("{}\n", "0".repeat(64))).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(files.path("secret"), mode).unwrap();
        assert!(files.check().is_ok());
    }

    #[test]
    fn packet_rules_without_an_interface_are_noted() {
        let files = Files::new("", "deny = [\"192.0.2.0/24\"]\n", "");
        let [note] = &files.check().unwrap().notes[..] else { panic!("one note expected") };
        assert!(note.starts_with("xdp.interfaces is empty, so 0 packet rules, 0 allow and 1 deny prefixes"), "{note}");
    }
}

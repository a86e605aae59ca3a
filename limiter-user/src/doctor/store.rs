//! The Redis that counters are shared through.

use std::time::Duration;

use super::{finding::Seen, host::Host};
use crate::{
    agent::redis_config,
    cli::keys,
    clock::SharedClock,
    config::{self, KeyStoreKind},
    exit::Exit,
    identity::KeySecret,
    store::{
        StoreError,
        redis::{
            ACL_RULES, CLUSTER_ACL_RULES, Examination, KEY_STORE_ACL_RULES, SENTINEL_ACL_RULES, Topology, examine_now,
        },
    },
};

/// More than the agent gives a call: to say that a server is slow, one has to wait for it.
const PATIENCE: Duration = Duration::from_secs(1);
/// Windows of two nodes whose clocks differ by more than this would begin at different times, were the server's clock
/// not the one that counts; people who read `X-RateLimit-Reset` see the difference.
const CLOCK_TOLERANCE_MS: u64 = 1000;

pub(super) fn examine(config: &config::RedisConfig) -> Result<Examination, String> {
    let clock = SharedClock::new();
    examine_now(&redis_config(config), PATIENCE, || clock.local().get()).map_err(|error| error.to_string())
}

pub(super) fn reachable(host: &Host) -> Seen {
    let (Some(config), Some(examined)) = (host.redis_config(), host.redis()) else { return not_in_use() };
    let name = config.name();
    let examined = match examined {
        Ok(examined) => examined,
        Err(error) => return Seen::unseen(format!("{name}: {error}")),
    };
    match &examined.round_trip {
        Ok(round_trip) => {
            let version = examined.facts.as_ref().map_or("of a version it does not tell", |facts| &facts.version);
            let found = format!("{name} answers in {} us, Redis {version}", round_trip.as_micros());
            if *round_trip >= config.timeout {
                return Seen::warning(
                    format!("{found}, and store.redis.timeout is {} ms", config.timeout.as_millis()),
                    "use a Redis in the same data centre, or raise store.redis.timeout",
                );
            }
            if major(version).is_some_and(|major| major < 6) {
                return Seen::error(Exit::Unavailable, found, "upgrade Redis to version 6 or later");
            }
            Seen::ok(found)
        }
        Err(StoreError::Unavailable { reason, .. } | StoreError::BadReply { reason, .. }) => {
            Seen::error(Exit::Unavailable, format!("{name}: {reason}"), remedy(host, reason))
        }
        Err(StoreError::Timeout { .. }) => Seen::error(
            Exit::Unavailable,
            format!("{name} does not answer within {} s", PATIENCE.as_secs()),
            remedy(host, ""),
        ),
    }
}

fn remedy(host: &Host, reason: &str) -> String {
    let reason = reason.to_ascii_lowercase();
    let is_of_password = ["wrongpass", "noauth", "password", "authentication"].iter().any(|word| reason.contains(word));
    if reason.contains("cluster support disabled") {
        "the server is by itself: set store.redis.mode = \"standalone\""
    } else if reason.contains("unknown command") && reason.contains("sentinel") {
        "these are no sentinels: name sentinels in store.redis.urls, or set store.redis.mode to what the servers are"
    } else if reason.contains("noperm") || reason.contains("no permission") {
        return set_user(host);
    } else if is_of_password {
        "set store.redis.username and store.redis.password_file to what Redis knows (ACL LIST, requirepass)"
    } else {
        "start Redis, or correct store.redis.urls; check with: redis-cli -u URL ping"
    }
    .to_owned()
}

fn major(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}

pub(super) fn eviction(host: &Host) -> Seen {
    let Some(examined) = answering(host) else { return not_examined(host) };
    let facts = examined.facts.as_ref();
    match facts.and_then(|facts| facts.maxmemory_policy.as_deref()) {
        Some("noeviction") => Seen::ok("maxmemory-policy is noeviction"),
        Some(policy) => Seen::warning(
            match facts.map_or(0, |facts| facts.maxmemory) {
                0 => format!("maxmemory-policy is {policy}; maxmemory is not set, so it does not act yet"),
                bytes => format!("maxmemory-policy is {policy}, with a maxmemory of {bytes} bytes"),
            },
            "redis-cli config set maxmemory-policy noeviction # and the same in redis.conf",
        ),
        None => Seen::warning(
            "the server does not tell its maxmemory-policy: this user may not run INFO",
            "check on the server: redis-cli config get maxmemory-policy",
        ),
    }
}

/// The keys themselves: whether this host can recognise them, and whether Redis may throw them away.
pub(super) fn key_store(host: &Host) -> Seen {
    let Some(config) = &host.config else { return Seen::ok("not looked at: the configuration is not known") };
    let KeyStoreKind::Redis(redis) = &config.identity.key_store else {
        return Seen::ok("not in use: identity.key_store is \"file\"");
    };
    let Some(examined) = answering(host) else { return not_examined(host) };
    let listed = match keys::key_store(redis).and_then(|admin| keys::finish_now(admin.list())?) {
        Ok(listed) => listed,
        Err(error) => return Seen::error(Exit::Unavailable, format!("{error:#}"), "see the check redis.permissions"),
    };
    let secret_file = &config.identity.key_secret_file;
    let secret = match KeySecret::load(secret_file) {
        Ok(secret) => secret,
        Err(errors) => return Seen::error(errors.exit(), errors.to_string(), "see the check config"),
    };
    if let Some(hindrance) = listed.hindrances(secret_file, secret.as_ref()).into_iter().next() {
        let remedy = "the same secret on all nodes; \"limiter keys list\" shows what can be read";
        return Seen::error(Exit::Config, hindrance, remedy);
    }
    let policy = examined.facts.as_ref().and_then(|facts| facts.maxmemory_policy.as_deref());
    match policy.filter(|policy| policy.starts_with("allkeys")) {
        Some(policy) => Seen::warning(
            format!(
                "{} API keys, which have no time to live, and maxmemory-policy {policy} may evict them",
                listed.keys.len()
            ),
            "redis-cli config set maxmemory-policy noeviction # and the same in redis.conf",
        ),
        None if !listed.exists => Seen::ok("no API keys yet: \"limiter keys add\" makes the first"),
        None => Seen::ok(format!("{} API keys, hashed with the secret of this host", listed.keys.len())),
    }
}

pub(super) fn permissions(host: &Host) -> Seen {
    let Some(examined) = answering(host) else { return not_examined(host) };
    let keys_are_there = host.has_keys_in_redis();
    let mut refused = examined.refused.clone();
    if keys_are_there {
        refused.extend(examined.key_store_refused.iter().cloned());
    }
    if refused.is_empty() {
        let what = if keys_are_there { "counters and API keys" } else { "counters" };
        return Seen::ok(format!("this user may load and call the scripts, which may read and write {what}"));
    }
    let remedy = if refused.iter().any(|refused| refused.contains("READONLY")) {
        "a replica is not written to: name its primary in store.redis.urls".to_owned()
    } else {
        set_user(host)
    };
    Seen::error(Exit::Unavailable, format!("refused: {}", refused.join("; ")), remedy)
}

/// The command that gives the agent's user all that it needs, as a shell takes it.
fn set_user(host: &Host) -> String {
    let config = host.redis_config();
    let mut rules = vec![ACL_RULES];
    match config.map(|config| &config.topology) {
        Some(Topology::Cluster) => rules.push(CLUSTER_ACL_RULES),
        Some(Topology::Sentinel { .. }) => rules.push(SENTINEL_ACL_RULES),
        Some(Topology::Standalone) | None => {}
    }
    if host.has_keys_in_redis() {
        rules.push(KEY_STORE_ACL_RULES);
    }
    let user = config.and_then(|config| config.username.as_deref()).unwrap_or("USER");
    format!("redis-cli acl setuser {user} {}", quoted(&rules.join(" ")))
}

/// Rules as a shell passes them on.
fn quoted(rules: &str) -> String {
    let quoted = rules.split(' ').map(|rule| match rule.contains(['*', '|', '~', '>']) {
        true => format!("'{rule}'"),
        false => rule.to_owned(),
    });
    quoted.collect::<Vec<_>>().join(" ")
}

pub(super) fn topology(host: &Host) -> Seen {
    let Some(examined) = answering(host) else { return not_examined(host) };
    let wants_cluster = host.redis_config().is_some_and(|config| config.topology == Topology::Cluster);
    match &examined.facts {
        Some(facts) if facts.is_cluster && !wants_cluster => Seen::error(
            Exit::Config,
            "the server is part of a cluster, and store.redis.mode is not \"cluster\"",
            "set store.redis.mode = \"cluster\", or name a server with cluster-enabled no in store.redis.urls",
        ),
        Some(_) => Seen::ok(match host.redis_config().map(|config| &config.topology) {
            Some(Topology::Cluster) => "a cluster, as store.redis.mode says; examined is one of its nodes",
            Some(Topology::Sentinel { .. }) => "the primary that the sentinels name, as store.redis.mode says",
            Some(Topology::Standalone) | None => "standalone, as store.redis.mode says",
        }),
        None => {
            Seen::warning("the server does not tell: this user may not run INFO", "redis-cli acl setuser USER +info")
        }
    }
}

pub(super) fn clock(host: &Host) -> Seen {
    let Some(examined) = answering(host) else { return not_examined(host) };
    let Some(offset_us) = examined.clock_offset_us else { return Seen::unseen("the server does not tell its time") };
    let offset_ms = offset_us.unsigned_abs() / 1000;
    let found = format!("the clocks of this host and of Redis differ by {offset_ms} ms");
    if offset_ms <= CLOCK_TOLERANCE_MS {
        Seen::ok(found)
    } else {
        Seen::warning(found, "synchronise both hosts: timedatectl set-ntp true")
    }
}

fn answering(host: &Host) -> Option<&Examination> {
    host.redis()?.as_ref().ok().filter(|examined| examined.round_trip.is_ok())
}

fn not_in_use() -> Seen {
    Seen::ok("not in use: neither counters nor keys are in Redis")
}

fn not_examined(host: &Host) -> Seen {
    match host.redis_config() {
        None => not_in_use(),
        Some(_) => Seen::warning("not seen: Redis does not answer", "see the check redis"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_says_the_rights_that_the_agent_needs() {
        let readme = include_str!("../../../README.md");
        let command = format!("redis-cli ACL SETUSER limiter on '>PASSWORD' {}\n", quoted(ACL_RULES));
        assert!(readme.contains(&command), "{command}");
        for (with, rules) in [
            ("in a cluster", CLUSTER_ACL_RULES),
            ("behind sentinels", SENTINEL_ACL_RULES),
            ("with `key_store = \"redis\"`", KEY_STORE_ACL_RULES),
        ] {
            let line = readme.lines().find(|line| line.trim().starts_with(&format!("- {with}")));
            assert!(line.is_some_and(|line| line.ends_with(&format!("`{}`", quoted(rules)))), "{with}: {line:?}");
        }
    }
}

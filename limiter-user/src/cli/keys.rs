//! `limiter keys`.

use std::{fmt::Display, io::ErrorKind};

use anyhow::Context;
use limiter_common::time::UnixMicros;

use super::{
    ConfigArg, KeysAddArgs, KeysArgs, KeysCommand, KeysDisableArgs, KeysImportArgs, KeysRotateArgs, finish, report,
    say, warn,
};
use crate::{
    agent::redis_config,
    clock::SharedClock,
    config::{Config, ConfigErrors, Environment, IdentityConfig, KeyStoreKind, RedisConfig},
    exit::{Exit, Unavailable},
    file::read_text,
    identity::{
        KeyStore,
        api_key::id_to_hex,
        key_file::{self, NewKey, client_id},
        key_redis::{KeyAdmin, KeyStoreError},
    },
    policy::Policy,
};

pub fn run(arguments: &KeysArgs) -> Exit {
    match &arguments.command {
        KeysCommand::Add(arguments) => add(arguments),
        KeysCommand::List(arguments) => finish(list(arguments)),
        KeysCommand::Disable(arguments) => finish(disable(arguments)),
        KeysCommand::Rotate(arguments) => finish(rotate(arguments)),
        KeysCommand::Import(arguments) => finish(import(arguments)),
    }
}

fn add(arguments: &KeysAddArgs) -> Exit {
    let client = match arguments.client.as_deref().map(client_id).transpose() {
        Ok(client) => client,
        Err(error) => {
            warn(format_args!("--client: {error}"));
            return Exit::Usage;
        }
    };
    let config = match Config::load(&arguments.config.config, Environment::of_process()) {
        Ok(config) => config,
        Err(errors) => return report(&errors),
    };
    let plan = arguments.plan.as_deref();
    if let Some(plan) = plan
        && let Err(errors) = check_plan(&config, plan)
    {
        return report(&errors);
    }
    finish(add_to_store(&config, client, plan))
}

fn add_to_store(config: &Config, client: Option<std::sync::Arc<str>>, plan: Option<&str>) -> anyhow::Result<()> {
    let IdentityConfig { key_store: kind, key_file, key_secret_file, .. } = &config.identity;
    let now = now();
    match kind {
        KeyStoreKind::File => {
            let new = key_file::add(key_file, key_secret_file, client, plan, now)?;
            say_added(&new, plan, key_file.display())
        }
        KeyStoreKind::Redis(redis) => {
            let had_secret = key_secret_file.exists();
            let admin = key_store(redis)?;
            let new = finish_now(admin.add(key_secret_file, client, plan, now))??;
            if !had_secret {
                warn(format_args!(
                    "made {}, which keys are hashed with: copy it to all nodes, or they will know no key",
                    key_secret_file.display()
                ));
            }
            say_added(&new, plan, format_args!("Redis at {}", admin.name()))
        }
    }
}

pub(crate) fn now() -> UnixMicros {
    SharedClock::new().local()
}

/// The key store in Redis; nothing is asked yet.
pub(crate) fn key_store(redis: &RedisConfig) -> anyhow::Result<KeyAdmin> {
    Ok(KeyAdmin::connect(&redis_config(redis))?)
}

/// Waits for Redis, in a runtime of its own.
pub(crate) fn finish_now<T>(
    asked: impl Future<Output = Result<T, KeyStoreError>>,
) -> anyhow::Result<anyhow::Result<T>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(asked).map_err(|error| match error {
        KeyStoreError::Config(errors) => errors.into(),
        KeyStoreError::Store(_) => Unavailable(error.to_string()).into(),
        KeyStoreError::Address(_) | KeyStoreError::Random(_) => error.into(),
    }))
}

/// The key itself is all that is on standard output.
fn say_added(new: &NewKey, plan: Option<&str>, place: impl Display) -> anyhow::Result<()> {
    let plan = plan.map(|plan| format!(", plan {plan}")).unwrap_or_default();
    let id = id_to_hex(new.id);
    warn(format_args!("added the key {id} of client {}{plan} to {place}: it is shown this once", new.client));
    print_key(new)
}

fn print_key(new: &NewKey) -> anyhow::Result<()> {
    super::print(new.key.expose())
}

fn disable(arguments: &KeysDisableArgs) -> anyhow::Result<()> {
    let config = Config::load(&arguments.config.config, Environment::of_process())?;
    let id = id_to_hex(arguments.id);
    let is_new = match &config.identity.key_store {
        KeyStoreKind::File => key_file::disable(&config.identity.key_file, arguments.id)?,
        KeyStoreKind::Redis(redis) => finish_now(key_store(redis)?.disable(arguments.id, now()))??,
    };
    match is_new {
        true => warn(format_args!("disabled the key {id}: running agents refuse it within a second")),
        false => warn(format_args!("the key {id} was disabled already")),
    }
    Ok(())
}

fn rotate(arguments: &KeysRotateArgs) -> anyhow::Result<()> {
    let config = Config::load(&arguments.config.config, Environment::of_process())?;
    let IdentityConfig { key_store: kind, key_file, key_secret_file, .. } = &config.identity;
    let (id, grace) = (arguments.id, arguments.grace);
    let (new, end) = match kind {
        KeyStoreKind::File => key_file::rotate(key_file, key_secret_file, id, grace, now())?,
        KeyStoreKind::Redis(redis) => finish_now(key_store(redis)?.rotate(key_secret_file, id, grace, now()))??,
    };
    warn(format_args!(
        "added the key {} of client {}, which is shown this once; the old one, {}, ends at {}",
        id_to_hex(new.id),
        new.client,
        id_to_hex(arguments.id),
        key_file::date(end)
    ));
    print_key(&new)
}

fn import(arguments: &KeysImportArgs) -> anyhow::Result<()> {
    let config = Config::load(&arguments.config.config, Environment::of_process())?;
    let IdentityConfig { key_store: kind, key_file, key_secret_file, .. } = &config.identity;
    let KeyStoreKind::Redis(redis) = kind else {
        return Err(crate::exit::Refused(
            "keys are imported into Redis, and identity.key_store is \"file\": set it to \"redis\" first".to_owned(),
        )
        .into());
    };
    let file = arguments.file.as_ref().unwrap_or(key_file);
    // A missing file is an empty one to an agent, and a mistake here.
    std::fs::metadata(file).with_context(|| format!("reading the keys of {}", file.display()))?;
    let keys = KeyStore::load(file, key_secret_file)?;
    let admin = key_store(redis)?;
    let changed = finish_now(admin.import(key_secret_file, &keys, now()))??;
    say(format_args!(
        "{} keys in {}: {changed} new or changed in Redis at {}",
        keys.len(),
        file.display(),
        admin.name()
    ))
    .map_err(|_exit| anyhow::anyhow!("writing to standard output failed"))
}

/// A policy that cannot be read cannot be asked, and whoever adds keys need not be able to read it.
fn check_plan(config: &Config, plan: &str) -> Result<(), ConfigErrors> {
    let file = &config.policy.file;
    let text = match read_text(file) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            // The name goes into the file as it is.
            crate::config::identifier(plan).map_err(|error| ConfigErrors::of_file(file, "plans", error, false))?;
            warn(format_args!("note: {} cannot be read, so the plan is not checked: {error}", file.display()));
            return Ok(());
        }
        Err(error) => return Err(ConfigErrors::of_io("read the policy", file, "policy.file", &error)),
    };
    let policy = Policy::parse(file, &text)?;
    if policy.plan(plan).is_none() {
        let plans = policy.plans.join(", ");
        let known = if plans.is_empty() { "none is declared".into() } else { format!("declared are {plans}") };
        return Err(ConfigErrors::of_file(file, "plans", format!("there is no plan \"{plan}\": {known}"), false));
    }
    Ok(())
}

fn list(arguments: &ConfigArg) -> anyhow::Result<()> {
    let config = Config::load(&arguments.config, Environment::of_process())?;
    let IdentityConfig { key_store: kind, key_file, key_secret_file, .. } = &config.identity;
    let keys = match kind {
        KeyStoreKind::File => KeyStore::load(key_file, key_secret_file)?,
        KeyStoreKind::Redis(redis) => {
            let listed = finish_now(key_store(redis)?.list())??;
            for (id, error) in &listed.unreadable {
                warn(format_args!("the key {id} is left out: {error}"));
            }
            listed.keys
        }
    };
    let now = now();
    let width = keys.entries().iter().map(|entry| entry.client.len()).max().unwrap_or(0).max("CLIENT".len());
    let plans = keys.entries().iter().map(|entry| entry.plan.as_ref().map_or(1, |plan| plan.len())).max();
    let plan_width = plans.unwrap_or(0).max("PLAN".len());
    let row = |id: &str, client: &str, plan: &str, state: &str| {
        say(format_args!("{id:<32}  {client:<width$}  {plan:<plan_width$}  {state}"))
    };
    let mut rows = vec![row("ID", "CLIENT", "PLAN", "STATE")];
    for entry in keys.entries() {
        let state = match entry.expires {
            _ if entry.disabled => "disabled".to_owned(),
            Some(end) if entry.has_ended(now) => format!("ended {}", key_file::date(end)),
            Some(end) => format!("active until {}", key_file::date(end)),
            None => "active".to_owned(),
        };
        rows.push(row(&id_to_hex(entry.id), &entry.client, entry.plan.as_deref().unwrap_or("-"), &state));
    }
    match rows.into_iter().find_map(Result::err) {
        None => Ok(()),
        Some(_exit) => anyhow::bail!("writing to standard output failed"),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn a_plan_is_looked_for_in_a_regular_file_alone() {
        const POLICY: &str = "[plans.pro]\n";
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let check = |policy: &str, plan: &str| {
            let text = format!("[node]\nid = \"n\"\n[policy]\nfile = \"{policy}\"\n");
            let config = Config::parse(&at("limiter.toml"), &text, Environment::default()).unwrap();
            check_plan(&config, plan).map_err(|errors| errors.to_string())
        };
        fs::write(at("policy.toml"), POLICY).unwrap();
        mkfifo(&at("pipe"), Mode::S_IRWXU).unwrap();
        let pipe = at("pipe");
        // Whoever reads a pipe as a file gets this, and waits for it; whoever does not leaves this waiting.
        thread::spawn(move || fs::write(pipe, POLICY));
        for (policy, plan, says) in [
            ("policy.toml", "pro", None),
            ("policy.toml", "gold", Some("there is no plan \"gold\": declared are pro")),
            ("nothing.toml", "gold", None),
            ("nothing.toml", "a b", Some("is not 1 to 64 of the characters")),
            ("pipe", "pro", Some("it is no regular file")),
        ] {
            let checked = check(policy, plan);
            let is_said = match says {
                None => checked.is_ok(),
                Some(says) => checked.as_ref().is_err_and(|error| error.contains(says)),
            };
            assert!(is_said, "{policy}, {plan}: {checked:?}");
        }
    }
}

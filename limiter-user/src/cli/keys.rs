//! `limiter keys`.

use std::io::ErrorKind;

use super::{ConfigArg, KeysAddArgs, KeysArgs, KeysCommand, KeysDisableArgs, KeysRotateArgs, report, say, warn};
use crate::{
    clock::SharedClock,
    config::{Config, ConfigErrors, Environment, IdentityConfig},
    exit::Exit,
    identity::{
        KeyStore,
        api_key::id_to_hex,
        key_file::{self, client_id},
    },
    policy::Policy,
};

pub fn run(arguments: &KeysArgs) -> Exit {
    match &arguments.command {
        KeysCommand::Add(arguments) => add(arguments),
        KeysCommand::List(arguments) => list(arguments),
        KeysCommand::Disable(arguments) => finish(disable(arguments)),
        KeysCommand::Rotate(arguments) => finish(rotate(arguments)),
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
    let IdentityConfig { key_file, key_secret_file, .. } = &config.identity;
    match key_file::add(key_file, key_secret_file, client, plan, SharedClock::new().local()) {
        Ok(new) => {
            let plan = plan.map(|plan| format!(", plan {plan}")).unwrap_or_default();
            warn(format_args!(
                "added the key {} of client {}{plan} to {}: it is shown this once",
                id_to_hex(new.id),
                new.client,
                key_file.display()
            ));
            say(new.key.expose()).err().unwrap_or(Exit::Ok)
        }
        Err(errors) => report(&errors),
    }
}

fn finish(result: Result<Exit, ConfigErrors>) -> Exit {
    result.unwrap_or_else(|errors| report(&errors))
}

fn disable(arguments: &KeysDisableArgs) -> Result<Exit, ConfigErrors> {
    let config = Config::load(&arguments.config.config, Environment::of_process())?;
    let id = id_to_hex(arguments.id);
    match key_file::disable(&config.identity.key_file, arguments.id)? {
        true => warn(format_args!("disabled the key {id}: running agents refuse it within a second")),
        false => warn(format_args!("the key {id} was disabled already")),
    }
    Ok(Exit::Ok)
}

fn rotate(arguments: &KeysRotateArgs) -> Result<Exit, ConfigErrors> {
    let config = Config::load(&arguments.config.config, Environment::of_process())?;
    let IdentityConfig { key_file, key_secret_file, .. } = &config.identity;
    let now = SharedClock::new().local();
    let (new, end) = key_file::rotate(key_file, key_secret_file, arguments.id, arguments.grace, now)?;
    warn(format_args!(
        "added the key {} of client {}, which is shown this once; the old one, {}, ends at {}",
        id_to_hex(new.id),
        new.client,
        id_to_hex(arguments.id),
        key_file::date(end)
    ));
    Ok(say(new.key.expose()).err().unwrap_or(Exit::Ok))
}

/// A policy that cannot be read cannot be asked, and whoever adds keys need not be able to read it.
fn check_plan(config: &Config, plan: &str) -> Result<(), ConfigErrors> {
    let file = &config.policy.file;
    let text = match std::fs::read_to_string(file) {
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

fn list(arguments: &ConfigArg) -> Exit {
    let config = match Config::load(&arguments.config, Environment::of_process()) {
        Ok(config) => config,
        Err(errors) => return report(&errors),
    };
    let keys = match KeyStore::load(&config.identity.key_file, &config.identity.key_secret_file) {
        Ok(keys) => keys,
        Err(errors) => return report(&errors),
    };
    let now = SharedClock::new().local();
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
    rows.into_iter().find_map(Result::err).unwrap_or(Exit::Ok)
}

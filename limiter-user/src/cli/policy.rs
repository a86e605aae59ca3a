//! `limiter policy diff`.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use axum::http::Method;
use serde::Serialize;

use super::{PolicyDiffArgs, client, print, validate, warn};
use crate::{
    api::admin::{COUNTERS_ROUTE, POLICY_ROUTE},
    config::{Config, ConfigErrors, KeyStoreKind},
    exit::Unavailable,
    identity::{Entries, KeySecret, KeyStore},
    policy::{
        Policy,
        difference::{Change, Entry, Kind, difference},
    },
};

#[derive(Debug, Serialize)]
struct Report<'a> {
    differs: bool,
    compared_with: &'a str,
    /// Whether an agent was asked for its counters.
    agent: bool,
    changes: &'a [Entry],
}

/// What an agent would refuse of the policy, by its configuration, and what may surprise. Whoever compares policies need not
/// be able to read the keys.
fn check(config: &Config, policy: &Policy) -> Result<(), ConfigErrors> {
    let identity = &config.identity;
    let is_in_file = identity.key_store == KeyStoreKind::File;
    let keys = match is_in_file {
        true => KeyStore::load(&identity.key_file, &identity.key_secret_file),
        false => KeySecret::load(&identity.key_secret_file).map(|secret| KeyStore::new(secret, Entries::default())),
    };
    if let Err(errors) = &keys {
        for error in errors.iter() {
            warn(format_args!("note: the policy is compared without the API keys: {error}"));
        }
    }
    // A secret that cannot be read is not missed.
    let has_secret = keys.as_ref().map_or(true, |keys| keys.secret().is_some());
    validate::check_policy(config, policy, has_secret).or(Some(()))?;
    for note in keys.iter().filter(|_| is_in_file).flat_map(|keys| validate::of_keys(config, policy, keys)) {
        warn(format_args!("note: {note}"));
    }
    Ok(())
}

pub(super) async fn diff(arguments: &PolicyDiffArgs) -> Result<()> {
    let config = arguments.config.load()?;
    let configured = &config.policy.file;
    // What is in force is not what the file says while the agent has refused it.
    let in_force = match client::ask(&config.api.admin, Method::GET, POLICY_ROUTE, None).await {
        Ok(text) => Some(String::from_utf8(text.to_vec()).context("reading the policy in force")?),
        Err(error) if error.is::<Unavailable>() => None,
        Err(error) => return Err(error),
    };
    let (before, compared_with) = match &in_force {
        Some(text) => (Policy::parse(configured, text), format!("the policy in force of {}", configured.display())),
        None => (Policy::load(configured), configured.display().to_string()),
    };
    let (before, after) = match (before, Policy::load(arguments.file.as_ref().unwrap_or(configured))) {
        (Ok(before), Ok(after)) => (before, after),
        (Err(mut errors), after) => {
            errors.extend(after.err().unwrap_or_default());
            return Err(errors.into());
        }
        (Ok(_), Err(errors)) => return Err(errors.into()),
    };
    check(&config, &after)?;
    let mut entries = difference(&before, &after);
    let counters = match &in_force {
        Some(_) => {
            let answer = client::ask(&config.api.admin, Method::GET, COUNTERS_ROUTE, None).await?;
            let counters: BTreeMap<String, u64> =
                serde_json::from_slice(&answer).context("reading the agent's answer")?;
            Some(counters)
        }
        None => None,
    };
    if let Some(counters) = &counters {
        for entry in entries.iter_mut().filter(|entry| entry.kind == Kind::Rule && entry.change != Change::Added) {
            entry.clients = Some(counters.get(&entry.name).copied().unwrap_or(0));
        }
    }
    if arguments.json {
        let differs = !entries.is_empty();
        let report = Report { differs, compared_with: &compared_with, agent: counters.is_some(), changes: &entries };
        return print(serde_json::to_string(&report)?);
    }
    if entries.is_empty() {
        return print(format_args!("no difference from {compared_with}"));
    }
    if counters.is_none() {
        warn("note: no agent runs, so how many known clients this concerns cannot be said");
    }
    for entry in &entries {
        print(entry)?;
    }
    Ok(())
}

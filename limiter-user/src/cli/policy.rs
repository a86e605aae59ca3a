//! `limiter policy diff`.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use axum::http::Method;
use serde::Serialize;

use super::{PolicyDiffArgs, client, print, warn};
use crate::{
    api::admin::COUNTERS_ROUTE,
    exit::Unavailable,
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

pub(super) async fn diff(arguments: &PolicyDiffArgs) -> Result<()> {
    let config = arguments.config.load()?;
    let (before, after) = match (Policy::load(&config.policy.file), Policy::load(&arguments.file)) {
        (Ok(before), Ok(after)) => (before, after),
        (Err(mut errors), after) => {
            errors.extend(after.err().unwrap_or_default());
            return Err(errors.into());
        }
        (Ok(_), Err(errors)) => return Err(errors.into()),
    };
    let mut entries = difference(&before, &after);
    let counters = match client::ask(&config.api.admin, Method::GET, COUNTERS_ROUTE, None).await {
        Ok(answer) => {
            let counters: BTreeMap<String, u64> =
                serde_json::from_slice(&answer).context("reading the agent's answer")?;
            Some(counters)
        }
        Err(error) if error.is::<Unavailable>() => None,
        Err(error) => return Err(error),
    };
    if let Some(counters) = &counters {
        for entry in entries.iter_mut().filter(|entry| entry.kind == Kind::Rule && entry.change != Change::Added) {
            entry.clients = Some(counters.get(&entry.name).copied().unwrap_or(0));
        }
    }
    let compared_with = config.policy.file.display().to_string();
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

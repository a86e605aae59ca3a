//! `limiter block|unblock|allow|unallow`.

use std::time::Duration;

use anyhow::{Context, Result};
use axum::http::Method;
use ipnet::IpNet;

use super::{ConfigArg, PrefixArgs, PrefixForArgs, client, print};
use crate::api::admin::{AclAction, AclChange, AclChanged};

/// What is changed, where.
#[derive(Debug)]
pub(super) struct Change {
    config: ConfigArg,
    prefix: IpNet,
    lasts: Option<Duration>,
}

impl From<PrefixForArgs> for Change {
    fn from(arguments: PrefixForArgs) -> Self {
        Self { config: arguments.config, prefix: arguments.prefix, lasts: arguments.duration }
    }
}

impl From<PrefixArgs> for Change {
    fn from(arguments: PrefixArgs) -> Self {
        Self { config: arguments.config, prefix: arguments.prefix, lasts: None }
    }
}

pub(super) async fn change(action: AclAction, change: &Change) -> Result<()> {
    let config = change.config.load()?;
    let for_ms = change.lasts.map(|lasts| u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX));
    let body = serde_json::to_string(&AclChange { prefix: change.prefix, for_ms })?;
    let answer = client::ask(&config.api.admin, Method::POST, action.path(), Some(body)).await?;
    let AclChanged { effect } = serde_json::from_slice(&answer).context("reading the agent's answer")?;
    print(effect)
}

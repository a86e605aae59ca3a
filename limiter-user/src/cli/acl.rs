//! `limiter block|unblock|allow|unallow`.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use axum::http::{Method, StatusCode};
use ipnet::IpNet;

use super::client;
use crate::{
    api::admin::{AclAction, AclChange},
    config::Config,
};

pub async fn change(config: &Config, action: AclAction, prefix: IpNet, lasts: Option<Duration>) -> Result<()> {
    let for_ms = lasts.map(|lasts| u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX));
    let body = serde_json::to_string(&AclChange { prefix, for_ms })?;
    let (status, answer) = client::call(&config.api.admin, Method::POST, action.path(), Some(body)).await?;
    if status == StatusCode::OK {
        return Ok(());
    }
    let answer: serde_json::Value = serde_json::from_slice(&answer).context("reading the agent's answer")?;
    bail!("{}", answer["message"].as_str().unwrap_or("the agent refused without saying why"));
}

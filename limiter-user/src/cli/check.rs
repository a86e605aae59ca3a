//! `limiter check`: asks the running agent, as a gateway would.

use std::{io::Write, net::IpAddr};

use anyhow::{Context, Result, bail};
use axum::http::{Method, StatusCode};
use serde_json::{Map, Value, json};

use super::client;
use crate::config::Config;

#[derive(Debug)]
pub struct Question {
    pub api_key: Option<String>,
    pub user: Option<String>,
    pub plan: Option<String>,
    pub ip: Option<IpAddr>,
    pub method: String,
    pub path: String,
    pub cost: u64,
    pub peek: bool,
}

pub async fn check(config: &Config, question: Question, out: &mut impl Write) -> Result<()> {
    let fields = [
        ("api_key", question.api_key.map(Value::from)),
        ("user", question.user.map(Value::from)),
        ("plan", question.plan.map(Value::from)),
        ("ip", question.ip.map(|ip| json!(ip))),
        ("method", Some(question.method.into())),
        ("path", Some(question.path.into())),
        ("cost", Some(question.cost.into())),
        ("peek", Some(question.peek.into())),
    ];
    let body: Map<String, Value> =
        fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    let body = Value::from(body).to_string();
    let (status, answer) = client::call(&config.api.http, Method::POST, "/v1/decide", Some(body)).await?;
    let answer: Value = serde_json::from_slice(&answer).context("reading the agent's answer")?;
    if status != StatusCode::OK {
        bail!("{}", answer["message"].as_str().unwrap_or("the agent refused without saying why"));
    }
    writeln!(out, "{answer}")?;
    Ok(())
}

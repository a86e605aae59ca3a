//! `limiter check`.

use anyhow::{Context, Result};
use axum::http::Method;
use serde_json::{Map, Value, json};

use super::{CheckArgs, client, print};
use crate::api::decide::Reply;

pub(super) async fn check(arguments: &CheckArgs) -> Result<()> {
    let config = arguments.config.load()?;
    let attributes: Map<String, Value> =
        arguments.attributes.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let fields = [
        ("api_key", json!(arguments.key)),
        ("user", json!(arguments.user)),
        ("session", json!(arguments.session)),
        ("plan", json!(arguments.plan)),
        ("ip", json!(arguments.ip)),
        ("method", json!(arguments.method)),
        ("path", json!(arguments.path)),
        ("cost", json!(arguments.cost)),
        ("peek", json!(arguments.peek)),
        ("attributes", json!(attributes)),
    ];
    let given = fields.into_iter().filter(|(_, value)| !value.is_null());
    let body: Map<String, Value> = given.map(|(name, value)| (name.to_owned(), value)).collect();
    let body = Value::from(body).to_string();
    let answer = client::ask(&config.api.http, Method::POST, "/v1/decide", Some(body)).await?;
    if arguments.json {
        return print(String::from_utf8_lossy(&answer));
    }
    let reply: Reply = serde_json::from_slice(&answer).context("reading the agent's answer")?;
    print(describe(&reply))
}

fn describe(reply: &Reply) -> String {
    let mut text = format!("{} ({})", if reply.allowed { "allowed" } else { "denied" }, reply.reason);
    if let (Some(rule), Some(limit), Some(remaining)) = (&reply.rule, reply.limit, reply.remaining) {
        text.push_str(&format!(" by rule {rule}: {remaining} of {limit} left"));
    }
    if let Some(wait_ms) = reply.retry_after_ms {
        text.push_str(&format!(", retry after {wait_ms} ms"));
    }
    if !reply.shadow.is_empty() {
        text.push_str(&format!("; in shadow mode, {} would deny", reply.shadow.join(", ")));
    }
    text
}

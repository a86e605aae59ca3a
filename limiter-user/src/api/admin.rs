//! The admin API: health, metrics, status, and the calls behind the command line.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Query, Request, State},
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::task::spawn_blocking;

use crate::{
    active::SharedActive,
    dataplane::{Dataplane, List, canonical},
    metrics::Metrics,
    status::StatusSource,
    store::memory::MemoryStore,
    top::Top,
};

/// How many counters each rule has in memory.
pub const COUNTERS_ROUTE: &str = "/v1/counters";

/// The policy in force, as its file was.
pub const POLICY_ROUTE: &str = "/v1/policy";

/// What the admin API acts on.
#[derive(Debug)]
pub struct Admin {
    pub metrics: Arc<Metrics>,
    pub status: Arc<StatusSource>,
    pub active: SharedActive,
    /// `None` when the agent runs without XDP.
    pub dataplane: Option<Arc<dyn Dataplane>>,
    pub top: Arc<Top>,
    pub counters: Arc<MemoryStore>,
}

/// What `/v1/top` is asked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TopQuery {
    /// Of each list; all that are kept, if there are fewer.
    #[serde(default = "default_rows")]
    rows: usize,
}

fn default_rows() -> usize {
    10
}

/// A change of the allow or deny list.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AclChange {
    pub prefix: IpNet,
    /// Absent: until it is taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
}

/// The answer to it.
#[derive(Debug, Deserialize, Serialize)]
pub struct AclChanged {
    /// What holds now, for people.
    pub effect: String,
}

/// The four changes, by the name in the URL and on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AclAction {
    Block,
    Unblock,
    Allow,
    Unallow,
}

impl AclAction {
    pub const ALL: &[Self] = &[Self::Block, Self::Unblock, Self::Allow, Self::Unallow];

    pub const fn path(self) -> &'static str {
        match self {
            Self::Block => "/v1/block",
            Self::Unblock => "/v1/unblock",
            Self::Allow => "/v1/allow",
            Self::Unallow => "/v1/unallow",
        }
    }

    const fn list(self) -> List {
        match self {
            Self::Block | Self::Unblock => List::Deny,
            Self::Allow | Self::Unallow => List::Allow,
        }
    }
}

/// What a change of a list has brought about, in words.
fn effect(action: AclAction, change: &AclChange, in_policy: bool) -> String {
    let prefix = canonical(change.prefix);
    let until = match change.for_ms {
        Some(for_ms) => format!("for {:?}", Duration::from_millis(for_ms)),
        None => format!("until \"limiter un{} {prefix}\"", action.path().trim_start_matches("/v1/")),
    };
    let what = match (action, in_policy) {
        (AclAction::Block, _) => format!("packets from {prefix} to what xdp.protect names are dropped"),
        (AclAction::Allow, _) => format!("packets from {prefix} pass, whatever the packet rules say"),
        (AclAction::Unblock, false) => return format!("{prefix} is no longer blocked"),
        (AclAction::Unallow, false) => return format!("{prefix} is no longer allowed"),
        (AclAction::Unblock, true) => {
            return format!("the operator's block of {prefix} is gone; the policy file denies it still");
        }
        (AclAction::Unallow, true) => {
            return format!("the operator's allow of {prefix} is gone; the policy file allows it still");
        }
    };
    match in_policy {
        false => format!("{what}, {until}"),
        true => format!(
            "{what}: the policy file says so already, without an end; this entry counts only if the \
             prefix leaves that file, {until} or a restart of the agent"
        ),
    }
}

pub fn router(admin: Arc<Admin>) -> Router {
    let router = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/v1/status", get(status))
        .route("/v1/top", get(top))
        .route(COUNTERS_ROUTE, get(counters))
        .route(POLICY_ROUTE, get(policy));
    let router = AclAction::ALL.iter().fold(router, |router, &action| {
        router.route(action.path(), post(move |state, change| change_acl(action, state, change)))
    });
    router.with_state(admin)
}

async fn ready(State(admin): State<Arc<Admin>>) -> Response {
    let status = admin.status.read();
    let code = if status.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(json!({ "ready": status.ready, "degraded": status.degraded, "degraded_by": status.degraded_by })))
        .into_response()
}

/// Answers 503 until the agent is ready: what a gateway does then, it has been told by its operator.
pub async fn until_ready(State(status): State<Arc<StatusSource>>, request: Request, next: Next) -> Response {
    if status.is_ready() {
        return next.run(request).await;
    }
    let body = json!({ "error": "not_ready", "message": "the agent does not know the API keys yet" });
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match admin.metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn status(State(admin): State<Arc<Admin>>) -> Response {
    Json(admin.status.read()).into_response()
}

async fn top(State(admin): State<Arc<Admin>>, Query(query): Query<TopQuery>) -> Response {
    match admin.top.read(admin.dataplane.as_deref(), query.rows) {
        Ok(report) => Json(report).into_response(),
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

async fn counters(State(admin): State<Arc<Admin>>) -> Response {
    // There may be millions of them.
    match spawn_blocking(move || admin.counters.count_by_rule()).await {
        Ok(counters) => {
            let counters: BTreeMap<String, u64> =
                counters.into_iter().map(|(rule, count)| (rule.to_string(), count)).collect();
            Json(counters).into_response()
        }
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

async fn policy(State(admin): State<Arc<Admin>>) -> Response {
    let text = admin.active.load().policy.text.to_string();
    ([(header::CONTENT_TYPE, "application/toml")], text).into_response()
}

async fn change_acl(action: AclAction, State(admin): State<Arc<Admin>>, Json(change): Json<AclChange>) -> Response {
    let Some(dataplane) = &admin.dataplane else {
        let message = "the agent runs without XDP, so no packet can be blocked or allowed: set [xdp] interfaces";
        return refuse(StatusCode::CONFLICT, message);
    };
    let lasts = change.for_ms.map(Duration::from_millis);
    let (dataplane, prefix) = (Arc::clone(dataplane), change.prefix);
    // It may have to wait for the kernel to accept a program.
    let changing = spawn_blocking(move || {
        let changed = match action {
            AclAction::Block => dataplane.block(prefix, lasts),
            AclAction::Unblock => dataplane.unblock(prefix),
            AclAction::Allow => dataplane.allow(prefix, lasts),
            AclAction::Unallow => dataplane.unallow(prefix),
        };
        (changed, dataplane.is_in_policy(action.list(), prefix))
    });
    let (done, in_policy) = match changing.await {
        Ok(changed) => changed,
        Err(error) => return refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    };
    match done {
        Ok(()) => {
            tracing::info!(target: "limiter::dataplane", action = action.path(), prefix = %change.prefix, for_ms = change.for_ms, "the operator changed a prefix");
            Json(AclChanged { effect: effect(action, &change, in_policy) }).into_response()
        }
        Err(error) => refuse(StatusCode::CONFLICT, &error.to_string()),
    }
}

fn refuse(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({ "error": "refused", "message": message }))).into_response()
}

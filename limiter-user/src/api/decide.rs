//! `POST /v1/decide`: the check for programs, single and in batches.

use std::{borrow::Cow, cmp::Ordering, collections::BTreeMap, net::IpAddr, sync::Arc};

use axum::{
    Extension,
    body::Bytes,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};

use super::{body, gate::Gate, headers, hold, pressure, serve::Peer};
use crate::{
    limiter::{Attribute, Caller, Decision, Kind, Request, Subject},
    store::Charge,
};

/// Most requests in a batch.
const MAX_BATCH: usize = 1000;
/// Most attributes of a request.
const MAX_ATTRIBUTES: usize = 16;
/// Longest user name, in bytes.
const MAX_USER: usize = 256;
/// Longest value of a session cookie, in bytes.
const MAX_SESSION: usize = 4096;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    api_key: Option<String>,
    user: Option<String>,
    session: Option<String>,
    plan: Option<String>,
    ip: Option<IpAddr>,
    #[serde(default = "get")]
    method: String,
    #[serde(default = "root")]
    path: String,
    /// 0 is a question, and what is negative is given back. Wide enough for all that is either.
    #[serde(default = "one")]
    cost: i128,
    #[serde(default)]
    peek: bool,
    #[serde(default)]
    attributes: BTreeMap<String, String>,
    /// How long the origin took for an earlier request.
    latency_ms: Option<serde_json::Number>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Questions {
    Batch(Vec<serde_json::Value>),
    Single(serde_json::Value),
}

/// The answer to one question.
#[derive(Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Reply<'a> {
    pub allowed: bool,
    pub rule: Option<Cow<'a, str>>,
    pub limit: Option<u64>,
    pub remaining: Option<u64>,
    /// Epoch seconds, as in `X-RateLimit-Reset`.
    pub reset_at: Option<u64>,
    pub retry_after_ms: Option<u64>,
    pub reason: Cow<'a, str>,
    /// Shadow rules that would have denied.
    pub shadow: Vec<Cow<'a, str>>,
}

fn get() -> String {
    "GET".into()
}

fn root() -> String {
    "/".into()
}

const fn one() -> i128 {
    1
}

pub async fn decide(State(gate): State<Arc<Gate>>, Extension(peer): Extension<Peer>, body: Bytes) -> Response {
    match answer(&gate, peer, &body).await {
        Ok(response) => response,
        Err(message) => {
            gate.metrics().bad_request();
            body::bad_request(&message)
        }
    }
}

/// Every question of a batch is understood before the first is decided, so a bad one changes nothing.
async fn answer(gate: &Gate, peer: Peer, body: &[u8]) -> Result<Response, String> {
    let questions: Questions =
        serde_json::from_slice(body).map_err(|error| format!("the body is not JSON: {error}"))?;
    match questions {
        Questions::Single(question) => {
            let mut decision = ask(gate, peer, &understand(gate, question)?).await;
            let mut response = json(&Reply::from(&decision));
            headers::add(&decision, gate.header_families(), response.headers_mut());
            hold::until(decision.turn.take(), gate.metrics(), &mut response);
            Ok(response)
        }
        Questions::Batch(questions) if questions.len() > MAX_BATCH => {
            Err(format!("the batch has {} requests: send at most {MAX_BATCH}", questions.len()))
        }
        Questions::Batch(questions) => {
            let understood = questions.into_iter().enumerate().map(|(position, question)| {
                understand(gate, question).map_err(|error| format!("request {position} of the batch: {error}"))
            });
            let understood = understood.collect::<Result<Vec<_>, _>>()?;
            // Those that Redis decides wait together; the others are decided one after the other, as they stand there.
            let mut decisions = join_all(understood.iter().map(|question| ask(gate, peer, question))).await;
            let mut response = json(&decisions.iter().map(Reply::from).collect::<Vec<_>>());
            // One answer for all of them, so it waits for the last.
            let turns = decisions.iter_mut().filter_map(|decision| decision.turn.take());
            hold::until(turns, gate.metrics(), &mut response);
            Ok(response)
        }
    }
}

/// A question, and what its attributes mean.
type Understood = (Question, Vec<Attribute>);

fn understand(gate: &Gate, question: serde_json::Value) -> Result<Understood, String> {
    let question: Question = serde_json::from_value(question).map_err(|error| error.to_string())?;
    let given = [("api_key", &question.api_key), ("user", &question.user), ("session", &question.session)];
    let mut given = given.iter().filter(|(_, value)| value.is_some()).map(|(name, _)| name);
    if let (Some(first), Some(second)) = (given.next(), given.next()) {
        return Err(format!("{first} and {second} are both given: a request is one caller's"));
    }
    if question.session.as_ref().is_some_and(|session| session.is_empty() || session.len() > MAX_SESSION) {
        return Err(format!("session must have 1 to {MAX_SESSION} bytes"));
    }
    if question.user.as_ref().is_some_and(|user| user.is_empty() || user.len() > MAX_USER) {
        return Err(format!("user must have 1 to {MAX_USER} bytes"));
    }
    if question.peek && question.cost < 0 {
        return Err("peek and a negative cost are both given: giving back is no question".into());
    }
    if let Some(latency_ms) = &question.latency_ms {
        pressure::latency_ms(latency_ms).map_err(|error| error.to_string())?;
    }
    if question.plan.is_some() && question.user.is_none() {
        return Err(
            "plan is given without user: a key has the plan that it was made with, and only users that you name have \
                    one that you name: give user, or leave plan out"
                .into(),
        );
    }
    if let Some(plan) = &question.plan
        && !gate.has_plan(plan)
    {
        return Err(format!("the policy has no plan \"{plan}\""));
    }
    if question.attributes.len() > MAX_ATTRIBUTES {
        return Err(format!("the request has {} attributes: give at most {MAX_ATTRIBUTES}", question.attributes.len()));
    }
    let attributes = question.attributes.iter().map(|(name, value)| Attribute::new(name, value));
    let attributes = attributes.collect::<Result<_, _>>()?;
    Ok((question, attributes))
}

async fn ask(gate: &Gate, peer: Peer, (question, attributes): &Understood) -> Decision {
    if let Some(Ok(report)) = question.latency_ms.as_ref().map(pressure::latency_ms) {
        gate.report(report, peer);
    }
    let caller = match (&question.api_key, &question.user, &question.session) {
        (Some(api_key), _, _) => gate.caller_of_key(api_key),
        (None, Some(user), _) => {
            Caller::User { user: user.as_str().into(), plan: question.plan.as_deref().map(Into::into) }
        }
        (None, None, Some(session)) => gate.caller_of_session(session),
        (None, None, None) => Caller::Anonymous,
    };
    let subject = Subject { caller, address: question.ip.map(|ip| gate.named_client(ip, peer)) };
    let charge = match question.cost.cmp(&0) {
        Ordering::Less => Charge::Refund,
        Ordering::Greater if !question.peek => Charge::Commit,
        Ordering::Greater | Ordering::Equal => Charge::Peek,
    };
    gate.decide(&Request {
        subject: &subject,
        method: &question.method,
        path: &question.path,
        also: &[],
        attributes,
        // A cost of 0 asks what a request would be told, so it is decided as the smallest one.
        cost: u64::try_from(question.cost.unsigned_abs()).unwrap_or(u64::MAX).max(1),
        charge,
    })
    .await
}

impl<'a> From<&'a Decision> for Reply<'a> {
    fn from(decision: &'a Decision) -> Self {
        let answer = decision.answer.as_ref();
        Self {
            allowed: decision.kind == Kind::Allowed,
            rule: answer.map(|answer| Cow::from(&*answer.rule)),
            limit: answer.map(|answer| answer.ceiling),
            remaining: answer.map(|answer| answer.remaining),
            reset_at: answer.map(headers::reset_epoch_seconds),
            retry_after_ms: answer.and_then(|answer| answer.retry_after_us).map(|wait_us| wait_us.div_ceil(1000)),
            reason: Cow::Borrowed(match (decision.kind, answer) {
                (Kind::Allowed, None) if decision.bypass.is_some() => "bypass",
                (Kind::Allowed, Some(_)) => "allowed",
                (Kind::Allowed, None) => "no_rule",
                (Kind::Denied, _) => "rate_limit_exceeded",
                (Kind::Unsatisfiable, _) => "cost_exceeds_limit",
                (Kind::Unavailable, _) => "limit_unavailable",
                (Kind::Unauthenticated, _) => "unauthenticated",
            }),
            shadow: decision.shadow.iter().map(|rule| Cow::from(&**rule)).collect(),
        }
    }
}

fn json(value: &impl Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text).into_response(),
        Err(error) => body::bad_request(&error.to_string()),
    }
}

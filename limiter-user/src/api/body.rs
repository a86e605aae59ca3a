//! Bodies of refusals: JSON, or problem details (RFC 9457) for clients that would rather have them.

use axum::{
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{
    accept::{self, JSON, PROBLEM_JSON},
    headers,
};
use crate::{
    config::HeaderFamilies,
    limiter::{Answer, Decision, Kind},
    policy::response::{ResponseTemplate, Values},
};

/// Problem types of draft-ietf-httpapi-ratelimit-headers-10, with their titles.
const QUOTA_EXCEEDED: Problem =
    Problem { uri: "https://iana.org/assignments/http-problem-types#quota-exceeded", title: "Quota Exceeded" };
const REDUCED_CAPACITY: Problem = Problem {
    uri: "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
    title: "Temporary Reduced Capacity",
};
const ABNORMAL_USAGE: Problem = Problem {
    uri: "https://iana.org/assignments/http-problem-types#abnormal-usage-detected",
    title: "Abnormal Usage Detected",
};

/// What a refusal is about, beside its status.
#[derive(Clone, Copy, Debug)]
struct Problem {
    uri: &'static str,
    title: &'static str,
}

/// How an answer to a gateway is to look.
#[derive(Clone, Copy, Debug)]
pub struct Style<'a> {
    /// What the client says of itself, as the gateway sent it along.
    pub request_headers: &'a HeaderMap,
    /// In place of 429, for gateways that know only some.
    pub deny_status: Option<StatusCode>,
    pub families: HeaderFamilies,
    /// The request had an API key that is not valid, so a denial is for trying too many of them.
    pub is_guessing: bool,
}

/// The response to a gateway: 200 without a body, or `deny_status` (429 when `None`) or 401 with one.
pub fn response(decision: &Decision, style: &Style<'_>) -> Response {
    let denied = style.deny_status.unwrap_or(StatusCode::TOO_MANY_REQUESTS);
    let mut response = match decision.kind {
        Kind::Allowed => StatusCode::OK.into_response(),
        Kind::Denied => refuse(denied, decision, style, "rate_limit_exceeded", "Too many requests"),
        Kind::Unsatisfiable => {
            let message = "The request costs more than its limit ever allows";
            refuse(denied, decision, style, "cost_exceeds_limit", message)
        }
        Kind::Unavailable => {
            let message = "The limit cannot be checked at present";
            refuse(denied, decision, style, "limit_unavailable", message)
        }
        Kind::Unauthenticated => {
            let message = "The API key or token is not valid";
            let mut response = refuse(StatusCode::UNAUTHORIZED, decision, style, "unauthenticated", message);
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            response
        }
    };
    headers::add(decision, style.families, response.headers_mut());
    response
}

/// As the rule that denied words it, else as usual.
fn refuse(status: StatusCode, decision: &Decision, style: &Style<'_>, error: &str, message: &str) -> Response {
    let worded = decision.answer.as_ref().and_then(|answer| Some((answer, answer.response.as_deref()?)));
    let Some((answer, template)) = worded else { return usual(status, decision, style, error, message) };
    // A gateway that asked for a status knows only that one.
    let status = style.deny_status.or(template.status).unwrap_or(status);
    let values = values(answer);
    let mut response = match &template.body {
        None => usual(status, decision, style, error, message),
        Some(body) => {
            let content_type = [(header::CONTENT_TYPE, body.content_type.clone())];
            (status, content_type, body.text.filled(&values)).into_response()
        }
    };
    add_headers(template, &values, response.headers_mut());
    response
}

fn values(answer: &Answer) -> Values<'_> {
    Values {
        rule: &answer.rule,
        limit: answer.ceiling,
        remaining: answer.remaining,
        retry_after_seconds: headers::retry_after_seconds(answer),
        reset: headers::reset_epoch_seconds(answer),
    }
}

fn add_headers(template: &ResponseTemplate, values: &Values<'_>, headers: &mut HeaderMap) {
    for (name, text) in &template.headers {
        match HeaderValue::try_from(text.filled(values)) {
            Ok(value) => {
                headers.insert(name, value);
            }
            Err(error) => tracing::error!(target: "limiter::api", %name, %error, "a header value is not valid"),
        }
    }
}

fn usual(status: StatusCode, decision: &Decision, style: &Style<'_>, error: &str, message: &str) -> Response {
    let retry_after = decision.answer.as_ref().and_then(headers::retry_after_seconds);
    let (kind, mut body) = if accept::prefers_problem(style.request_headers) {
        (PROBLEM_JSON, problem(status, decision, style, error, message))
    } else {
        (JSON, json!({ "error": error, "message": message }))
    };
    if let Some(seconds) = retry_after {
        body["retry_after_seconds"] = seconds.into();
    }
    (status, [(header::CONTENT_TYPE, kind), (header::VARY, "accept")], body.to_string()).into_response()
}

fn problem(status: StatusCode, decision: &Decision, style: &Style<'_>, error: &str, message: &str) -> Value {
    let problem = match decision.kind {
        Kind::Denied if style.is_guessing => Some(ABNORMAL_USAGE),
        Kind::Denied if decision.answer.as_ref().is_some_and(|answer| answer.is_tightened) => Some(REDUCED_CAPACITY),
        Kind::Denied => Some(QUOTA_EXCEEDED),
        Kind::Unavailable => Some(REDUCED_CAPACITY),
        Kind::Allowed | Kind::Unsatisfiable | Kind::Unauthenticated => None,
    };
    // RFC 9457, section 4.2.1: a problem without a type of its own is called as its status is.
    let (uri, title) = problem.map_or_else(
        || ("about:blank", status.canonical_reason().unwrap_or_default()),
        |problem| (problem.uri, problem.title),
    );
    let mut body = json!({ "type": uri, "title": title, "status": status.as_u16(), "detail": message, "error": error });
    if problem.is_some() {
        body["violated-policies"] = decision.answer.iter().map(|answer| Value::from(&*answer.rule)).collect();
    }
    body
}

/// A request to the API from somebody who may not make it.
pub fn forbidden(message: &str) -> Response {
    let body = json!({ "error": "forbidden", "message": message }).to_string();
    (StatusCode::FORBIDDEN, [(header::CONTENT_TYPE, JSON)], body).into_response()
}

/// A request to the API that cannot be understood.
pub fn bad_request(message: &str) -> Response {
    let body = json!({ "error": "bad_request", "message": message }).to_string();
    (StatusCode::BAD_REQUEST, [(header::CONTENT_TYPE, JSON)], body).into_response()
}

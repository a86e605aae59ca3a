//! Bodies of refusals: JSON, or problem details (RFC 9457) for clients that accept them.

use axum::{
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::headers;
use crate::limiter::{Decision, Kind};

const PROBLEM_JSON: &str = "application/problem+json";

/// Problem types of draft-ietf-httpapi-ratelimit-headers-10.
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";

/// The response to a gateway: 200 without a body, or `deny_status` (429 when `None`) or 401 with one.
pub fn response(decision: &Decision, request_headers: &HeaderMap, deny_status: Option<StatusCode>) -> Response {
    let denied = deny_status.unwrap_or(StatusCode::TOO_MANY_REQUESTS);
    let (status, refusal) = match decision.kind {
        Kind::Allowed => (StatusCode::OK, None),
        Kind::Denied => (denied, Some(("rate_limit_exceeded", "Too many requests"))),
        Kind::Unsatisfiable => {
            (denied, Some(("cost_exceeds_limit", "The request costs more than its limit ever allows")))
        }
        Kind::Unauthenticated => {
            (StatusCode::UNAUTHORIZED, Some(("unauthenticated", "The API key or token is not valid")))
        }
    };
    let mut response = match refusal {
        None => status.into_response(),
        Some((error, message)) => refuse(status, decision, error, message, accepts_problem(request_headers)),
    };
    if decision.kind == Kind::Unauthenticated {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    headers::add(decision, response.headers_mut());
    response
}

fn refuse(status: StatusCode, decision: &Decision, error: &str, message: &str, problem: bool) -> Response {
    let retry_after = decision.answer.as_ref().and_then(headers::retry_after_seconds);
    let mut body = if problem {
        let mut body = json!({ "title": message, "status": status.as_u16(), "error": error });
        if decision.kind == Kind::Denied {
            body["type"] = QUOTA_EXCEEDED.into();
            body["violated-policies"] = decision.answer.iter().map(|answer| Value::from(&*answer.rule)).collect();
        }
        body
    } else {
        json!({ "error": error, "message": message })
    };
    if let Some(seconds) = retry_after {
        body["retry_after_seconds"] = seconds.into();
    }
    let kind = if problem { PROBLEM_JSON } else { "application/json" };
    (status, [(header::CONTENT_TYPE, kind)], body.to_string()).into_response()
}

fn accepts_problem(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::ACCEPT)
        .iter()
        .any(|accept| accept.to_str().is_ok_and(|accept| accept.contains(PROBLEM_JSON)))
}

/// A request to the API that cannot be understood.
pub fn bad_request(message: &str) -> Response {
    let body = json!({ "error": "bad_request", "message": message }).to_string();
    (StatusCode::BAD_REQUEST, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

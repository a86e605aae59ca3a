//! `/v1/check`: nginx `auth_request`, Caddy `forward_auth`, Traefik ForwardAuth, Envoy `ext_authz` over HTTP.
//!
//! The gateway sends the client's headers along. Method and path of the client's request come from the headers that
//! these gateways set, else from the call itself: Envoy appends the path to the prefix it is given.

use std::sync::Arc;

use axum::{
    Extension,
    extract::{OriginalUri, Query, State},
    http::{HeaderMap, Method, StatusCode},
    response::Response,
};
use serde::Deserialize;

use super::{body, gate::Gate, serve::Peer};
use crate::{limiter::Request, store::Charge};

pub const ROUTE: &str = "/v1/check";

#[derive(Debug, Deserialize)]
pub struct Options {
    deny_status: Option<u16>,
}

const METHOD_HEADERS: [&str; 2] = ["x-original-method", "x-forwarded-method"];
const PATH_HEADERS: [&str; 3] = ["x-original-uri", "x-forwarded-uri", "x-original-url"];

pub async fn check(
    State(gate): State<Arc<Gate>>,
    Extension(peer): Extension<Peer>,
    Query(options): Query<Options>,
    method: Method,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
) -> Response {
    let deny_status = match options.deny_status {
        None => None,
        Some(401) => Some(StatusCode::UNAUTHORIZED),
        Some(403) => Some(StatusCode::FORBIDDEN),
        Some(429) => Some(StatusCode::TOO_MANY_REQUESTS),
        Some(other) => {
            gate.metrics().bad_request();
            return body::bad_request(&format!("deny_status is {other}: use 401, 403 or 429"));
        }
    };
    // Lossy: a path with bytes above 127 must still match the groups that its other segments match.
    let first = |names: &[&str]| {
        let value = names.iter().find_map(|name| headers.get(*name))?;
        Some(String::from_utf8_lossy(value.as_bytes()))
    };
    let (original_method, original_path) = (first(&METHOD_HEADERS), first(&PATH_HEADERS));
    let subject = gate.subject_of_headers(&headers, peer);
    let decision = gate.decide(&Request {
        subject: &subject,
        method: original_method.as_deref().unwrap_or(method.as_str()),
        path: match &original_path {
            Some(path) => without_origin(path),
            None => uri.path().strip_prefix(ROUTE).filter(|path| !path.is_empty()).unwrap_or("/"),
        },
        cost: 1,
        charge: Charge::Commit,
    });
    body::response(&decision, &headers, deny_status)
}

/// The path of a URL, or the path itself. `//host/path` without a scheme is a path.
fn without_origin(url: &str) -> &str {
    let Some((scheme, rest)) = url.split_once("://") else { return url };
    if !scheme.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return url;
    }
    rest.find('/').map_or("/", |start| &rest[start..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_urls() {
        for (url, path) in [
            ("/a/b?c=d", "/a/b?c=d"),
            ("https://example.org/a/b", "/a/b"),
            ("https://example.org", "/"),
            ("//example.org/a", "//example.org/a"),
            ("/redirect?to=https://example.org/a", "/redirect?to=https://example.org/a"),
        ] {
            assert_eq!(without_origin(url), path);
        }
    }
}

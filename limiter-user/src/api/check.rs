//! `/v1/check`: nginx `auth_request`, Caddy `forward_auth`, Traefik ForwardAuth, Envoy `ext_authz` over HTTP.
//!
//! The gateway sends the client's headers along. Method and path of the client's request come from the headers that
//! these gateways set, else from the call itself: Envoy appends the path to the prefix it is given.

use std::{borrow::Cow, sync::Arc};

use axum::{
    Extension,
    extract::{OriginalUri, State},
    http::{HeaderMap, Method, StatusCode},
    response::Response,
};
use smallvec::SmallVec;

use super::{
    body::{self, Style},
    gate::Gate,
    hold, pressure,
    serve::Peer,
};
use crate::{limiter::Request, store::Charge};

pub const ROUTE: &str = "/v1/check";

const METHOD_HEADERS: [&str; 2] = ["x-original-method", "x-forwarded-method"];
const PATH_HEADERS: [&str; 3] = ["x-original-uri", "x-forwarded-uri", "x-original-url"];

/// What several header lines say of one thing, each once.
#[derive(Default)]
struct Readings<'a>(SmallVec<[Cow<'a, str>; 4]>);

impl<'a> Readings<'a> {
    fn add(&mut self, reading: Cow<'a, str>) {
        // Any more are too many.
        if self.0.len() <= MAX_PAIRS && !self.0.contains(&reading) {
            self.0.push(reading);
        }
    }
}

/// Requests that one may be, by the methods and paths that its headers name: each is looked at.
const MAX_PAIRS: usize = 16;

pub async fn check(
    State(gate): State<Arc<Gate>>,
    Extension(peer): Extension<Peer>,
    method: Method,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
) -> Response {
    let appended = uri.path().strip_prefix(ROUTE).filter(|path| !path.is_empty());
    // Behind an appended path the query is the client's.
    let query = if appended.is_none() { uri.query().unwrap_or_default() } else { "" };
    let deny_status = match query.split('&').find_map(|pair| pair.strip_prefix("deny_status=")) {
        None => None,
        Some("401") => Some(StatusCode::UNAUTHORIZED),
        Some("403") => Some(StatusCode::FORBIDDEN),
        Some("429") => Some(StatusCode::TOO_MANY_REQUESTS),
        Some(other) => {
            gate.metrics().bad_request();
            return body::bad_request(&format!("deny_status is \"{other}\": use 401, 403 or 429"));
        }
    };
    // Lossy: a path with bytes above 127 must still match the groups that its other segments match.
    let values = |names: &[&str]| -> Readings<'_> {
        let mut readings = Readings::default();
        // Of a line that is there twice either may be the client's own.
        for value in names.iter().flat_map(|name| headers.get_all(*name)) {
            readings.add(String::from_utf8_lossy(value.as_bytes()));
        }
        readings
    };
    let (mut methods, mut paths) = (values(&METHOD_HEADERS), values(&PATH_HEADERS));
    if methods.0.is_empty() || appended.is_some() {
        methods.add(method.as_str().into());
    }
    if paths.0.is_empty() || appended.is_some() {
        paths.add(appended.unwrap_or("/").into());
    }
    let (Readings(methods), Readings(paths)) = (methods, paths);
    if methods.len() * paths.len() > MAX_PAIRS {
        gate.metrics().bad_request();
        return body::bad_request(&format!(
            "its headers name too many different methods and paths, more than {MAX_PAIRS} requests together: let the gateway \
             set one of {} and one of {}, and take the others out of what clients send",
            METHOD_HEADERS.join(", "),
            PATH_HEADERS.join(", ")
        ));
    }
    // A gateway overwrites the headers that it sets itself and passes on those that others set: which of them is the
    // client's own cannot be told here, so a header can add rules to a request and never take one away.
    let pairs = paths.iter().flat_map(|path| methods.iter().map(move |method| (&**method, &**path)));
    let pairs: SmallVec<[(&str, &str); 4]> = pairs.collect();
    let (method, path) = pairs[0];
    pressure::report_of_headers(&gate, &headers, peer);
    let queries = paths.iter().filter_map(|url| url.split_once('?')).map(|(_, query)| query);
    let queries = queries.chain(appended.and(uri.query()));
    let subject = gate.subject_of_headers(&headers, queries, peer);
    let request = Request {
        subject: &subject,
        method,
        path,
        also: &pairs[1..],
        attributes: &[],
        cost: 1,
        charge: Charge::Commit,
    };
    let mut decision = gate.decide(&request).await;
    let mut response = body::response(
        &decision,
        &Style {
            request_headers: &headers,
            deny_status,
            families: gate.header_families(),
            is_guessing: subject.is_unauthenticated(),
        },
    );
    hold::until(decision.turn.take(), gate.metrics(), &mut response);
    response
}

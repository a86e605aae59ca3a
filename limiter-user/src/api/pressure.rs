//! `POST /v1/pressure`: the origin, or the gateway on its behalf, says how loaded it is.
//!
//! Whoever may name a client's address may also say this: a peer of this host or a trusted proxy. The header of a check is
//! another matter, because gateways pass on what clients send: it counts only where the configuration says that the
//! gateway sets it.

use std::sync::Arc;

use axum::{
    Extension,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::Number;

use super::{body, gate::Gate, serve::Peer};
use crate::pressure::{Report, ReportError};

pub const ROUTE: &str = "/v1/pressure";
const HEADER: &str = "x-limiter-pressure";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Load {
    level: Option<Number>,
    latency_ms: Option<Number>,
}

pub async fn report(State(gate): State<Arc<Gate>>, Extension(peer): Extension<Peer>, body: Bytes) -> Response {
    let Some(pressure) = gate.pressure() else { return StatusCode::NOT_FOUND.into_response() };
    if !gate.believes(peer) {
        pressure.refuse();
        let message = "load is believed of this host and of identity.trusted_proxies alone";
        return body::forbidden(message);
    }
    match understand(&body) {
        Ok(reports) => {
            reports.into_iter().flatten().for_each(|report| pressure.report(report));
            StatusCode::NO_CONTENT.into_response()
        }
        Err(message) => {
            pressure.refuse();
            gate.metrics().bad_request();
            body::bad_request(&message)
        }
    }
}

fn understand(body: &[u8]) -> Result<[Option<Report>; 2], String> {
    let load: Load = serde_json::from_slice(body).map_err(|error| format!("the body cannot be understood: {error}"))?;
    if load.level.is_none() && load.latency_ms.is_none() {
        return Err("neither level nor latency_ms is given".into());
    }
    let level = load.level.map(|level| Report::level(&decimal(&level))).transpose();
    let latency = load.latency_ms.map(|latency| latency_ms(&latency)).transpose();
    Ok([level.map_err(|error| error.to_string())?, latency.map_err(|error| error.to_string())?])
}

/// A latency in milliseconds, as JSON has it.
pub fn latency_ms(number: &Number) -> Result<Report, ReportError> {
    Report::latency_ms(&decimal(number))
}

/// Without an exponent, which JSON may have and which small numbers get.
fn decimal(number: &Number) -> String {
    match number.as_f64() {
        Some(float) if !number.is_u64() => float.to_string(),
        Some(_) | None => number.to_string(),
    }
}

/// Takes the header of a check, if it is to be believed.
pub fn report_of_headers(gate: &Gate, headers: &HeaderMap, peer: Peer) {
    let Some(pressure) = gate.pressure().filter(|pressure| pressure.reads_header()) else { return };
    for value in headers.get_all(HEADER) {
        let report = value.to_str().ok().filter(|_| gate.believes(peer)).map(|text| Report::level(text.trim()));
        match report {
            Some(Ok(report)) => pressure.report(report),
            Some(Err(_)) | None => pressure.refuse(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_as_json_has_them() {
        for (text, expected) in [
            (r#"{"level": 0.25}"#, [Some(Report::Level(250_000)), None]),
            (r#"{"level": 1}"#, [Some(Report::Level(1_000_000)), None]),
            (
                r#"{"level": 25e-2, "latency_ms": 1e2}"#,
                [Some(Report::Level(250_000)), Some(Report::LatencyUs(100_000))],
            ),
            (r#"{"level": 1e-9}"#, [Some(Report::Level(0)), None]),
            (r#"{"latency_ms": 0.5}"#, [None, Some(Report::LatencyUs(500))]),
        ] {
            assert_eq!(understand(text.as_bytes()), Ok(expected), "{text}");
        }
        for (text, message) in [
            ("", "cannot be understood"),
            ("{}", "neither level nor latency_ms"),
            (r#"{"level": 1.1}"#, "not a number from 0 to 1"),
            (r#"{"level": -0.1}"#, "not a number from 0 to 1"),
            (r#"{"level": 0.5, "latency_ms": -1}"#, "latency_ms is not a number"),
            (r#"{"latency_ms": 1e300}"#, "latency_ms is not a number"),
            (r#"{"level": "0.5"}"#, "cannot be understood"),
            (r#"{"levle": 0.5}"#, "unknown field `levle`"),
        ] {
            let error = understand(text.as_bytes()).unwrap_err();
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}

//! Rate-limit headers. The only file that builds them.
//!
//! `RateLimit-Policy` and `RateLimit` are structured fields (RFC 9651) as in draft-ietf-httpapi-ratelimit-headers-10;
//! `Retry-After` is RFC 9110, section 10.2.3; `X-RateLimit-*` is what most clients know.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header::RETRY_AFTER};

use crate::limiter::{Answer, Decision};

const X_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

const SECOND_US: u64 = 1_000_000;

/// Whole seconds to wait, rounded up: waiting that long is always enough.
pub fn retry_after_seconds(answer: &Answer) -> Option<u64> {
    answer.retry_after_us.map(|wait_us| wait_us.div_ceil(SECOND_US))
}

/// End of the window in epoch seconds, rounded up.
pub fn reset_epoch_seconds(answer: &Answer) -> u64 {
    answer.reset_us.div_ceil(SECOND_US)
}

/// Adds the headers of the rule that decided; none when no rule applied.
pub fn add(decision: &Decision, headers: &mut HeaderMap) {
    let Some(answer) = &decision.answer else { return };
    headers.insert(X_LIMIT, answer.ceiling.into());
    headers.insert(X_REMAINING, answer.remaining.into());
    headers.insert(X_RESET, reset_epoch_seconds(answer).into());
    let retry_after = retry_after_seconds(answer);
    if let Some(seconds) = retry_after {
        headers.insert(RETRY_AFTER, seconds.into());
    }
    // Rule ids are letters, digits, '.', '_' and '-', so they need no escaping in a structured string.
    let rule = &answer.rule;
    // The window parameter is whole seconds; a window that is not goes without it.
    let window = match answer.window_us % SECOND_US {
        0 => format!(";w={}", answer.window_us / SECOND_US),
        _ => String::new(),
    };
    insert(headers, RATE_LIMIT_POLICY, &format!("\"{rule}\";q={}{window}", answer.ceiling));
    // On a denial the same wait as Retry-After, which must not be earlier than `t`.
    let until_reset = answer.reset_us.saturating_sub(decision.now.get()).div_ceil(SECOND_US);
    let seconds = retry_after.unwrap_or(until_reset);
    insert(headers, RATE_LIMIT, &format!("\"{rule}\";r={};t={seconds}", answer.remaining));
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    match HeaderValue::from_str(value) {
        Ok(value) => {
            headers.insert(name, value);
        }
        Err(error) => tracing::error!(target: "limiter::api", %name, %error, "a header value is not valid"),
    }
}

#[cfg(test)]
mod tests {
    use limiter_common::time::UnixMicros;

    use super::*;
    use crate::limiter::Kind;

    fn decision(retry_after_us: Option<u64>) -> Decision {
        Decision {
            kind: if retry_after_us.is_some() { Kind::Denied } else { Kind::Allowed },
            now: UnixMicros::new(1_700_000_000_250_000),
            answer: Some(Answer {
                rule: "api-search".into(),
                ceiling: 100,
                window_us: 60 * SECOND_US,
                remaining: if retry_after_us.is_some() { 0 } else { 42 },
                reset_us: 1_700_000_040_000_000,
                retry_after_us,
            }),
            shadow: Default::default(),
            address_denial: None,
            bypass: None,
            turn: None,
        }
    }

    #[test]
    fn headers_of_an_allowance_and_of_a_denial() {
        for (retry_after_us, expected) in [
            (None, [Some("100"), Some("42"), Some("1700000040"), None, Some("\"api-search\";r=42;t=40")]),
            (
                Some(39_750_001),
                [Some("100"), Some("0"), Some("1700000040"), Some("40"), Some("\"api-search\";r=0;t=40")],
            ),
            (Some(1), [Some("100"), Some("0"), Some("1700000040"), Some("1"), Some("\"api-search\";r=0;t=1")]),
        ] {
            let mut headers = HeaderMap::new();
            add(&decision(retry_after_us), &mut headers);
            let value = |name| headers.get(name).map(|value| value.to_str().unwrap());
            let got = [X_LIMIT, X_REMAINING, X_RESET, RETRY_AFTER, RATE_LIMIT].map(value);
            assert_eq!(got, expected);
            assert_eq!(headers[RATE_LIMIT_POLICY], "\"api-search\";q=100;w=60");
        }
    }

    #[test]
    fn no_rule_no_headers_and_no_window_that_is_not_whole_seconds() {
        let mut headers = HeaderMap::new();
        let mut decision = decision(None);
        decision.answer.as_mut().unwrap().window_us = 1_500_000;
        add(&decision, &mut headers);
        assert_eq!(headers[RATE_LIMIT_POLICY], "\"api-search\";q=100");
        decision.answer = None;
        let mut headers = HeaderMap::new();
        add(&decision, &mut headers);
        assert!(headers.is_empty());
    }
}

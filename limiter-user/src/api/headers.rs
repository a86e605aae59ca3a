//! Rate-limit headers. The only file that builds them.
//!
//! `RateLimit-Policy` and `RateLimit` are structured fields (RFC 9651) as in draft-ietf-httpapi-ratelimit-headers-10;
//! `RateLimit-Limit` and its kin are those of draft-03, plain numbers; `Retry-After` is RFC 9110, section 10.2.3;
//! `X-RateLimit-*` is what most clients know.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header::RETRY_AFTER};

use crate::{
    config::HeaderFamilies,
    limiter::{Answer, Decision},
};

const X_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const LIMIT: HeaderName = HeaderName::from_static("ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("ratelimit-reset");

const SECOND_US: u64 = 1_000_000;
/// RFC 9651, section 3.3.1: an integer of a structured field has at most fifteen digits. Limits may be larger; a client
/// is then told this much, which nobody uses up.
const MAX_SF_INTEGER: u64 = 999_999_999_999_999;

/// Whole seconds to wait, rounded up: waiting that long is always enough.
pub fn retry_after_seconds(answer: &Answer) -> Option<u64> {
    answer.retry_after_us.map(|wait_us| wait_us.div_ceil(SECOND_US))
}

/// End of the window in epoch seconds, rounded up.
pub fn reset_epoch_seconds(answer: &Answer) -> u64 {
    answer.reset_us.div_ceil(SECOND_US)
}

/// Adds the headers of the rule that decided; none when no rule applied.
pub fn add(decision: &Decision, families: HeaderFamilies, headers: &mut HeaderMap) {
    let Some(answer) = &decision.answer else { return };
    let retry_after = retry_after_seconds(answer);
    if let Some(seconds) = retry_after {
        headers.insert(RETRY_AFTER, seconds.into());
    }
    if families.x_ratelimit {
        headers.insert(X_LIMIT, answer.ceiling.into());
        headers.insert(X_REMAINING, answer.remaining.into());
        headers.insert(X_RESET, reset_epoch_seconds(answer).into());
    }
    // On a denial the same wait as Retry-After, which must not be earlier than `t`.
    let until_reset = answer.reset_us.saturating_sub(decision.now.get()).div_ceil(SECOND_US);
    let seconds = retry_after.unwrap_or(until_reset);
    if families.draft_10 {
        add_draft_10(answer, seconds, headers);
    }
    if families.draft_03 {
        headers.insert(LIMIT, answer.ceiling.into());
        headers.insert(REMAINING, answer.remaining.into());
        headers.insert(RESET, seconds.into());
    }
}

fn add_draft_10(answer: &Answer, seconds: u64, headers: &mut HeaderMap) {
    let integer = |number: u64| number.min(MAX_SF_INTEGER);
    // Rule ids are letters, digits, '.', '_' and '-', so they need no escaping in a structured string.
    let rule = &answer.rule;
    // The window parameter is whole seconds; a window that is not goes without it.
    let window = match answer.window_us % SECOND_US {
        0 => format!(";w={}", integer(answer.window_us / SECOND_US)),
        _ => String::new(),
    };
    insert(headers, RATE_LIMIT_POLICY, &format!("\"{rule}\";q={}{window}", integer(answer.ceiling)));
    insert(headers, RATE_LIMIT, &format!("\"{rule}\";r={};t={}", integer(answer.remaining), integer(seconds)));
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

    const ALL: HeaderFamilies = HeaderFamilies { x_ratelimit: true, draft_10: true, draft_03: true };

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
                is_tightened: false,
                response: None,
            }),
            shadow: Default::default(),
            address_denial: None,
            bypass: None,
            turn: None,
        }
    }

    fn headers(decision: &Decision, families: HeaderFamilies) -> HeaderMap {
        let mut headers = HeaderMap::new();
        add(decision, families, &mut headers);
        headers
    }

    fn texts<const N: usize>(headers: &HeaderMap, names: [HeaderName; N]) -> [Option<&str>; N] {
        names.map(|name| headers.get(name).map(|value| value.to_str().unwrap()))
    }

    #[test]
    fn headers_of_an_allowance_and_of_a_denial() {
        for (retry_after_us, [remaining, retry_after, rate_limit, reset]) in [
            (None, [Some("42"), None, Some("\"api-search\";r=42;t=40"), Some("40")]),
            (Some(39_750_001), [Some("0"), Some("40"), Some("\"api-search\";r=0;t=40"), Some("40")]),
            (Some(1), [Some("0"), Some("1"), Some("\"api-search\";r=0;t=1"), Some("1")]),
        ] {
            let headers = headers(&decision(retry_after_us), ALL);
            let x = texts(&headers, [X_LIMIT, X_REMAINING, X_RESET, RETRY_AFTER]);
            assert_eq!(x, [Some("100"), remaining, Some("1700000040"), retry_after]);
            let draft_10 = texts(&headers, [RATE_LIMIT_POLICY, RATE_LIMIT]);
            assert_eq!(draft_10, [Some("\"api-search\";q=100;w=60"), rate_limit]);
            assert_eq!(texts(&headers, [LIMIT, REMAINING, RESET]), [Some("100"), remaining, reset]);
        }
    }

    #[test]
    fn each_family_is_there_when_it_is_switched_on() {
        for families in 0..8 {
            let [x_ratelimit, draft_10, draft_03] = [1, 2, 4].map(|bit| families & bit != 0);
            let headers = headers(&decision(Some(1)), HeaderFamilies { x_ratelimit, draft_10, draft_03 });
            let has = |names: &[HeaderName], is_on: bool| names.iter().all(|name| headers.contains_key(name) == is_on);
            assert!(has(&[X_LIMIT, X_REMAINING, X_RESET], x_ratelimit), "{headers:?}");
            assert!(has(&[RATE_LIMIT, RATE_LIMIT_POLICY], draft_10), "{headers:?}");
            assert!(has(&[LIMIT, REMAINING, RESET], draft_03), "{headers:?}");
            assert!(has(&[RETRY_AFTER], true), "{headers:?}");
        }
    }

    #[test]
    fn structured_integers_have_fifteen_digits_at_most() {
        let mut decision = decision(None);
        let answer = decision.answer.as_mut().unwrap();
        (answer.ceiling, answer.remaining) = (1 << 53, u64::MAX);
        (answer.window_us, answer.reset_us) = (u64::MAX / SECOND_US * SECOND_US, u64::MAX);
        let headers = headers(&decision, ALL);
        let [policy, rate_limit, limit] = texts(&headers, [RATE_LIMIT_POLICY, RATE_LIMIT, LIMIT]);
        assert_eq!(policy, Some("\"api-search\";q=999999999999999;w=18446744073709"));
        assert_eq!(rate_limit, Some("\"api-search\";r=999999999999999;t=18445044073710"));
        assert_eq!(limit, Some("9007199254740992"), "a plain number has no bound");
    }

    #[test]
    fn no_rule_no_headers_and_no_window_that_is_not_whole_seconds() {
        let mut decision = decision(None);
        decision.answer.as_mut().unwrap().window_us = 1_500_000;
        assert_eq!(headers(&decision, ALL)[RATE_LIMIT_POLICY], "\"api-search\";q=100");
        decision.answer = None;
        assert!(headers(&decision, ALL).is_empty());
    }
}

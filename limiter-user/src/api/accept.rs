//! What a client would rather read (RFC 9110, section 12.5.1), as far as a refusal has a choice.

use axum::http::{HeaderMap, header};

pub const JSON: &str = "application/json";
pub const PROBLEM_JSON: &str = "application/problem+json";

/// Quality in thousandths.
const FULL: u16 = 1000;

/// How well a client likes a media type, by the most specific range that covers it.
#[derive(Clone, Copy, Debug, Default)]
struct Liking {
    /// 1 for `*/*`, 2 for `application/*`, 3 for the type itself.
    by: u8,
    quality: u16,
}

impl Liking {
    fn learn(&mut self, by: u8, quality: u16) {
        if by > self.by {
            *self = Self { by, quality };
        } else if by == self.by {
            self.quality = self.quality.max(quality);
        }
    }
}

/// Whether problem details are wanted: the client names the type itself, and likes plain JSON no better. `*/*` and
/// `application/*` get the plain JSON, as does whoever says nothing.
pub fn prefers_problem(headers: &HeaderMap) -> bool {
    let (mut json, mut problem) = (Liking::default(), Liking::default());
    for line in headers.get_all(header::ACCEPT) {
        for range in outside_quotes(line.as_bytes(), b',') {
            let mut parts = outside_quotes(range, b';').map(<[u8]>::trim_ascii);
            let media = parts.next().unwrap_or_default();
            // What cannot be understood is no preference.
            let Some(quality) = quality(parts) else { continue };
            let is = |name: &str| media.eq_ignore_ascii_case(name.as_bytes());
            if is(PROBLEM_JSON) {
                problem.learn(3, quality);
            } else if is(JSON) {
                json.learn(3, quality);
            } else if is("application/*") {
                json.learn(2, quality);
            } else if is("*/*") {
                json.learn(1, quality);
            }
        }
    }
    problem.by > 0 && problem.quality > 0 && problem.quality >= json.quality
}

/// The weight among the parameters of a range.
fn quality<'a>(mut parameters: impl Iterator<Item = &'a [u8]>) -> Option<u16> {
    let weight = parameters.find_map(|parameter| match parameter {
        [b'q' | b'Q', b'=', weight @ ..] => Some(weight),
        _ => None,
    });
    let Some(weight) = weight else { return Some(FULL) };
    let (whole, decimals) = match weight {
        [whole] | [whole, b'.'] => (whole, &[][..]),
        [whole, b'.', decimals @ ..] if decimals.len() <= 3 => (whole, decimals),
        _ => return None,
    };
    let digit = |byte: &u8| byte.is_ascii_digit().then(|| u16::from(byte - b'0'));
    let mut thousandths = digit(whole)?;
    for place in 0..3 {
        thousandths = thousandths * 10 + decimals.get(place).map_or(Some(0), digit)?;
    }
    (thousandths <= FULL).then_some(thousandths)
}

/// The parts between separators that no quoted string contains.
fn outside_quotes(text: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> {
    let (mut quoted, mut escaped) = (false, false);
    text.split(move |byte| {
        if escaped {
            escaped = false;
        } else if quoted && *byte == b'\\' {
            escaped = true;
        } else if *byte == b'"' {
            quoted = !quoted;
        }
        !quoted && *byte == separator
    })
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn problem_details_go_to_who_would_rather_have_them() {
        for (accept, expected) in [
            (&[][..], false),
            (&[""], false),
            (&["*/*"], false),
            (&["application/*"], false),
            (&["application/json"], false),
            (&["text/html, */*;q=0.8"], false),
            (&["application/problem+json"], true),
            (&["APPLICATION/Problem+JSON"], true),
            (&["application/json, application/problem+json"], true),
            (&["application/json", "application/problem+json"], true),
            (&["application/json;q=0.9, application/problem+json"], true),
            (&["application/json, application/problem+json;q=0.9"], false),
            (&["application/json;q=0.5,application/problem+json;q=0.501"], true),
            (&["*/*, application/problem+json;q=0.1"], false),
            (&["*/*;q=0.1, application/problem+json;q=0.1"], true),
            (&["application/json;q=0, */*, application/problem+json;q=0.2"], true),
            (&["application/problem+json;q=0"], false),
            (&["application/problem+json;q=0.000"], false),
            (&["application/problem+json ; charset=utf-8 ; Q=1.0"], true),
            (&["application/problem+json;q=2"], false),
            (&["application/problem+json;q=0.1234"], false),
            (&["application/problem+json;q="], false),
            (&["application/problem+json;q=x"], false),
            (&["text/x;a=\"application/problem+json,application/problem+json\""], false),
            (&["text/x;a=\"\\\",\", application/problem+json"], true),
            (&["application/problem+jsonx"], false),
            (&["text/html;level=\"unclosed, application/problem+json"], false),
        ] {
            let mut headers = HeaderMap::new();
            for line in accept {
                headers.append(header::ACCEPT, HeaderValue::from_static(line));
            }
            assert_eq!(prefers_problem(&headers), expected, "{accept:?}");
        }
    }
}

//! What a pattern of an endpoint group says.
//!
//! `[METHOD[,METHOD…] ]/PATH`; without a method, or with `*`, any method; `GET` includes `HEAD`. In the path, by segment:
//!
//! - `name` is that segment exactly (case counts, percent-encoding does not),
//! - `pre*` is any one segment that begins with `pre`,
//! - `*` is any one segment; as the last segment of a pattern, one or more,
//! - `**` is any number of segments, none included.

use std::fmt;

const MAX_PATTERN_LEN: usize = 1024;
const MAX_SEGMENTS: usize = 64;
/// All patterns of a policy together: each is a bit.
pub(super) const MAX_METHODS: usize = 63;

/// One pattern of an endpoint group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// In upper case; empty for any.
    pub(super) methods: Vec<Box<str>>,
    pub(super) steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Exact(Box<[u8]>),
    Prefix(Box<[u8]>),
    /// Any one segment.
    One,
    /// Any number of segments. Never two in a row.
    Rest,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    #[error("\"{0}\" has no path: write \"[METHOD ]/PATH\", as in \"GET /api/v1/search/*\"")]
    NoPath(String),
    #[error("\"{0}\" cannot be a method")]
    Method(String),
    #[error("\"{0}\": a path has no query and no fragment")]
    Query(String),
    #[error("\"{0}\": a pattern has no \".\" and no \"..\"")]
    Dots(String),
    #[error("\"{0}\": \"*\" stands alone in a segment or at its end")]
    Star(String),
    #[error("a pattern has at most {MAX_PATTERN_LEN} bytes and {MAX_SEGMENTS} segments")]
    TooLong,
    #[error("patterns name more than {MAX_METHODS} different methods")]
    TooManyMethods,
}

impl Pattern {
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        if text.len() > MAX_PATTERN_LEN {
            return Err(PatternError::TooLong);
        }
        let (methods, path) = match text.trim().split_once(char::is_whitespace) {
            Some((methods, path)) => (methods, path.trim_start()),
            None => ("*", text.trim()),
        };
        if !path.starts_with('/') || path.contains(char::is_whitespace) {
            return Err(PatternError::NoPath(text.into()));
        }
        if path.contains(['?', '#']) {
            return Err(PatternError::Query(text.into()));
        }
        Ok(Self { methods: Self::methods(methods)?, steps: Self::steps(text, path)? })
    }

    /// Orders patterns that match the same path.
    pub(super) fn specificity(&self) -> (Vec<(u8, usize)>, bool) {
        let steps = self.steps.iter().map(|step| match step {
            Step::Exact(_) => (4, 0),
            Step::Prefix(prefix) => (3, prefix.len()),
            Step::One => (2, 0),
            Step::Rest => (0, 0),
        });
        (steps.chain([(1, 0)]).collect(), !self.methods.is_empty())
    }

    fn methods(text: &str) -> Result<Vec<Box<str>>, PatternError> {
        if text == "*" {
            return Ok(Vec::new());
        }
        let methods = text.split(',').map(|method| {
            let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'+-.^_`|~".contains(&byte);
            if method.is_empty() || !method.bytes().all(is_token) {
                return Err(PatternError::Method(method.into()));
            }
            Ok(method.to_ascii_uppercase().into())
        });
        methods.collect()
    }

    fn steps(text: &str, path: &str) -> Result<Vec<Step>, PatternError> {
        let segments: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
        if segments.len() > MAX_SEGMENTS {
            return Err(PatternError::TooLong);
        }
        let mut steps = Vec::new();
        for (index, segment) in segments.iter().enumerate() {
            let is_last = index + 1 == segments.len();
            match segment.strip_suffix('*') {
                Some("*") if steps.last() == Some(&Step::Rest) => {}
                Some("*") => steps.push(Step::Rest),
                Some("") if is_last => steps.extend([Step::One, Step::Rest]),
                Some("") => steps.push(Step::One),
                Some(prefix) if !prefix.contains('*') => steps.push(Step::Prefix(decoded(prefix))),
                None if !segment.contains('*') => {
                    let name = decoded(segment);
                    if matches!(&*name, b"." | b"..") {
                        return Err(PatternError::Dots(text.into()));
                    }
                    steps.push(Step::Exact(name));
                }
                Some(_) | None => return Err(PatternError::Star(text.into())),
            }
        }
        Ok(steps)
    }
}

/// As it is written in a policy, in one form: equal texts are equal patterns.
impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.methods.is_empty() {
            write!(f, "{} ", self.methods.join(","))?;
        }
        if self.steps.is_empty() {
            return f.write_str("/");
        }
        let mut steps = &self.steps[..];
        while let [step, rest @ ..] = steps {
            f.write_str("/")?;
            steps = rest;
            match step {
                Step::Exact(name) => write_encoded(f, name)?,
                Step::Prefix(prefix) => {
                    write_encoded(f, prefix)?;
                    f.write_str("*")?;
                }
                Step::One => {
                    f.write_str("*")?;
                    // At the end, "*" is one or more.
                    if rest == [Step::Rest] {
                        return Ok(());
                    }
                }
                Step::Rest => f.write_str("**")?,
            }
        }
        Ok(())
    }
}

fn write_encoded(f: &mut fmt::Formatter<'_>, segment: &[u8]) -> fmt::Result {
    for &byte in segment {
        if byte.is_ascii_graphic() && !b"/%*?#".contains(&byte) {
            write!(f, "{}", char::from(byte))?;
        } else {
            write!(f, "%{byte:02X}")?;
        }
    }
    Ok(())
}

fn decoded(segment: &str) -> Box<[u8]> {
    let mut rest = segment.as_bytes();
    let mut bytes = Vec::with_capacity(rest.len());
    while let Some((byte, _, after)) = next_byte(rest) {
        bytes.push(byte);
        rest = after;
    }
    bytes.into()
}

/// The first byte of `text`, whether it was percent-encoded, and what follows. A `%` that encodes nothing is itself.
pub(super) fn next_byte(text: &[u8]) -> Option<(u8, bool, &[u8])> {
    let hex = |digit: u8| char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok());
    match text {
        [b'%', high, low, rest @ ..] => match (hex(*high), hex(*low)) {
            (Some(high), Some(low)) => Some((high << 4 | low, true, rest)),
            (None, _) | (_, None) => Some((b'%', false, &text[1..])),
        },
        [byte, rest @ ..] => Some((*byte, false, rest)),
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Endpoints;

    #[test]
    fn equal_patterns_are_shown_alike() {
        for (text, shown) in [
            ("/", "/"),
            ("/login/", "/login"),
            ("* //a/%62/", "/a/b"),
            ("get,POST /api/*", "GET,POST /api/*"),
            ("/a/*/b", "/a/*/b"),
            ("/a/*/**", "/a/*"),
            ("/**/**/x", "/**/x"),
            ("/v%2A*/x%2F%c3%a9", "/v%2A*/x%2F%C3%A9"),
        ] {
            let pattern = Pattern::parse(text).unwrap();
            assert_eq!(pattern.to_string(), shown);
            assert_eq!(Pattern::parse(shown).unwrap(), pattern, "{text}");
        }
    }

    #[test]
    fn bad_patterns_are_refused() {
        for (pattern, message) in [
            ("", "has no path"),
            ("login", "has no path"),
            ("GET", "has no path"),
            ("*", "has no path"),
            ("GET login", "has no path"),
            ("GET /a /b", "has no path"),
            ("G(T /a", "\"G(T\" cannot be a method"),
            ("GET, /a", "\"\" cannot be a method"),
            ("/a?b=1", "no query"),
            ("/a#b", "no query"),
            ("/a/../b", "no \"..\""),
            ("/a/%2e/b", "no \"..\""),
            ("/a*b", "\"*\" stands alone"),
            ("/*b", "\"*\" stands alone"),
            ("/a**", "\"*\" stands alone"),
            ("/***", "\"*\" stands alone"),
        ] {
            let error = Pattern::parse(pattern).expect_err(pattern).to_string();
            assert!(error.contains(message), "{pattern}: {error}");
        }
        assert_eq!(Pattern::parse(&"/a".repeat(65)), Err(PatternError::TooLong));
        assert_eq!(Pattern::parse(&format!("/{}", "a".repeat(1024))), Err(PatternError::TooLong));
        let many: Vec<String> = (0..64).map(|index| format!("M{index}")).collect();
        let pattern = Pattern::parse(&format!("{} /", many.join(","))).unwrap();
        assert!(matches!(Endpoints::new(vec![("a".into(), vec![pattern])]), Err(PatternError::TooManyMethods)));
    }
}

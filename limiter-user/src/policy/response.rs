//! Refusals as an operator words them: status, headers and a body with placeholders.
//!
//! A template is checked when the policy is read, so that filling it in cannot fail and has a bound.

use std::fmt::Write as _;

use axum::http::{HeaderName, HeaderValue, StatusCode};

/// Longest body, filled in.
pub const MAX_BODY: usize = 64 * 1024;
/// Longest value of a header, filled in.
pub const MAX_HEADER: usize = 4096;
/// Most headers of one template.
pub const MAX_HEADERS: usize = 32;

/// What a rule answers in place of the usual.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResponseTemplate {
    /// 429 unless given.
    pub status: Option<StatusCode>,
    pub headers: Vec<(HeaderName, Text)>,
    /// `None` keeps the usual body.
    pub body: Option<Body>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    pub content_type: HeaderValue,
    pub text: Text,
}

/// Text with placeholders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    pieces: Vec<Piece>,
    escape: Escape,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Literal(Box<str>),
    Placeholder(Placeholder),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placeholder {
    Rule,
    Limit,
    Remaining,
    RetryAfterSeconds,
    Reset,
}

/// How values are written, so that they are text where they stand and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Escape {
    /// Plain text, and headers.
    None,
    /// HTML and XML.
    Markup,
    Json,
}

/// What placeholders stand for.
#[derive(Clone, Copy, Debug)]
pub struct Values<'a> {
    pub rule: &'a str,
    pub limit: u64,
    pub remaining: u64,
    /// `None` when waiting does not help.
    pub retry_after_seconds: Option<u64>,
    /// Epoch seconds.
    pub reset: u64,
}

impl Values<'_> {
    /// For trying a template out.
    pub const SAMPLE: Self = Values { rule: "rule", limit: 100, remaining: 0, retry_after_seconds: Some(1), reset: 1 };
}

impl Placeholder {
    const ALL: [(&'static str, Self); 5] = [
        ("rule", Self::Rule),
        ("limit", Self::Limit),
        ("remaining", Self::Remaining),
        ("retry_after_seconds", Self::RetryAfterSeconds),
        ("reset", Self::Reset),
    ];

    /// The longest that it is filled in with.
    const fn max_len(self) -> usize {
        match self {
            // Ids of rules have at most 64 bytes, none of which any kind of text escapes.
            Self::Rule => 64,
            Self::Limit | Self::Remaining | Self::RetryAfterSeconds | Self::Reset => 20,
        }
    }
}

impl Escape {
    /// By the media type of the body.
    pub fn of(content_type: &str) -> Self {
        let media = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        match media.split_once('/').map_or("", |(_, subtype)| subtype) {
            subtype if subtype == "json" || subtype.ends_with("+json") => Self::Json,
            subtype if ["html", "xml"].contains(&subtype) || subtype.ends_with("+xml") => Self::Markup,
            _ => Self::None,
        }
    }

    fn write(self, text: &str, to: &mut String) {
        for c in text.chars() {
            let escaped = match (self, c) {
                (Self::Markup, '&') => "&amp;",
                (Self::Markup, '<') => "&lt;",
                (Self::Markup, '>') => "&gt;",
                (Self::Markup, '"') => "&quot;",
                (Self::Markup, '\'') => "&#39;",
                (Self::Json, '"') => "\\\"",
                (Self::Json, '\\') => "\\\\",
                (Self::Json, '\0'..='\x1f') => {
                    // A String takes whatever is written to it.
                    write!(to, "\\u{:04x}", u32::from(c)).unwrap_or_default();
                    continue;
                }
                (Self::None | Self::Markup | Self::Json, _) => {
                    to.push(c);
                    continue;
                }
            };
            to.push_str(escaped);
        }
    }

    /// In place of a number that there is none of.
    const fn nothing(self) -> &'static str {
        match self {
            Self::Json => "null",
            Self::None | Self::Markup => "-",
        }
    }
}

impl Text {
    /// A brace with a word and a brace is a placeholder; any other brace is itself.
    pub fn parse(text: &str, escape: Escape, max_len: usize) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let (mut rest, mut literal, mut longest) = (text, String::new(), text.len());
        while let Some(at) = rest.find('{') {
            let after = &rest[at + 1..];
            let word = after.split_once('}').map(|(word, _)| word).filter(|word| is_word(word));
            let Some(word) = word else {
                literal.push_str(&rest[..=at]);
                rest = after;
                continue;
            };
            let known = Placeholder::ALL.iter().find(|(name, _)| *name == word);
            let Some((_, placeholder)) = known else {
                let known = Placeholder::ALL.map(|(name, _)| format!("{{{name}}}")).join(", ");
                return Err(format!(
                    "{{{word}}} is not a placeholder: known are {known}; a brace that is none has a space after it"
                ));
            };
            literal.push_str(&rest[..at]);
            if !literal.is_empty() {
                pieces.push(Piece::Literal(std::mem::take(&mut literal).into()));
            }
            pieces.push(Piece::Placeholder(*placeholder));
            longest = longest.saturating_add(placeholder.max_len()) - (word.len() + 2);
            rest = &after[word.len() + 1..];
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            pieces.push(Piece::Literal(literal.into()));
        }
        if longest > max_len {
            return Err(format!("could become {longest} bytes when it is filled in: at most {max_len}"));
        }
        Ok(Self { pieces, escape })
    }

    /// With the placeholders filled in.
    pub fn filled(&self, values: &Values<'_>) -> String {
        let mut text = String::new();
        for piece in &self.pieces {
            let number = match piece {
                Piece::Literal(literal) => {
                    text.push_str(literal);
                    continue;
                }
                Piece::Placeholder(Placeholder::Rule) => {
                    self.escape.write(values.rule, &mut text);
                    continue;
                }
                Piece::Placeholder(Placeholder::Limit) => Some(values.limit),
                Piece::Placeholder(Placeholder::Remaining) => Some(values.remaining),
                Piece::Placeholder(Placeholder::RetryAfterSeconds) => values.retry_after_seconds,
                Piece::Placeholder(Placeholder::Reset) => Some(values.reset),
            };
            match number {
                Some(number) => text.push_str(&number.to_string()),
                None => text.push_str(self.escape.nothing()),
            }
        }
        text
    }
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(text: &str, escape: Escape, rule: &str, retry_after_seconds: Option<u64>) -> String {
        let values = Values { rule, limit: 5, remaining: 0, retry_after_seconds, reset: 1_700_000_000 };
        Text::parse(text, escape, MAX_BODY).unwrap().filled(&values)
    }

    #[test]
    fn placeholders_are_filled_in_and_other_braces_stay() {
        for (text, expected) in [
            ("", ""),
            ("{rule}", "a.b"),
            ("{limit}/{remaining}/{retry_after_seconds}/{reset}", "5/0/7/1700000000"),
            ("{\"wait\":{retry_after_seconds}}", "{\"wait\":7}"),
            ("{{rule}}", "{a.b}"),
            ("body { color: red } {", "body { color: red } {"),
            ("{}{ rule }{é}", "{}{ rule }{é}"),
            ("é{rule}é", "éa.bé"),
        ] {
            assert_eq!(filled(text, Escape::None, "a.b", Some(7)), expected, "{text}");
        }
    }

    #[test]
    fn values_are_text_wherever_they_stand() {
        let hostile = "</p>\"'&\\\n";
        for (content_type, rule, nothing) in [
            ("text/plain", hostile, "-"),
            ("text/html; charset=utf-8", "&lt;/p&gt;&quot;&#39;&amp;\\\n", "-"),
            ("IMAGE/SVG+XML", "&lt;/p&gt;&quot;&#39;&amp;\\\n", "-"),
            ("application/xml", "&lt;/p&gt;&quot;&#39;&amp;\\\n", "-"),
            ("application/json", "</p>\\\"'&\\\\\\u000a", "null"),
            ("application/vnd.api+json;v=1", "</p>\\\"'&\\\\\\u000a", "null"),
        ] {
            let escape = Escape::of(content_type);
            assert_eq!(filled("{rule}", escape, hostile, None), rule, "{content_type}");
            assert_eq!(filled("{retry_after_seconds}", escape, "", None), nothing, "{content_type}");
        }
    }

    #[test]
    fn what_no_placeholder_is_called_and_what_could_grow_too_long_is_refused() {
        for (text, max_len, message) in [
            ("{rul}", 100, "{rul} is not a placeholder: known are {rule}, {limit}, "),
            ("{key}", 100, "{key} is not a placeholder"),
            ("{rule}{rule}", 127, "could become 128 bytes when it is filled in: at most 127"),
            ("xx{limit}", 21, "could become 22 bytes"),
        ] {
            let error = Text::parse(text, Escape::None, max_len).unwrap_err();
            assert!(error.starts_with(message), "{text}: {error}");
        }
        let longest = Values { rule: &"r".repeat(64), limit: u64::MAX, ..Values::SAMPLE };
        let text = Text::parse("{rule}{limit}!", Escape::Json, 85).unwrap();
        assert_eq!(text.filled(&longest).len(), 85, "and the bound is what it can reach");
    }
}

//! What rules answer, as the policy file words it.

use std::{collections::HashSet, sync::Arc};

use axum::http::{HeaderName, HeaderValue, StatusCode};

use super::index_of;
use crate::{
    config::{Table, Value, identifier},
    policy::{
        raw::RawResponse,
        response::{Body, Escape, MAX_BODY, MAX_HEADER, MAX_HEADERS, ResponseTemplate, Text, Values},
    },
};

const PLAIN: &str = "text/plain; charset=utf-8";

/// Of the connection, or of the agent's own.
const RESERVED: [(&str, &str); 14] = [
    ("content-type", "give it as content_type"),
    ("content-length", "it follows from the body"),
    ("content-encoding", "bodies are sent as they are"),
    ("transfer-encoding", "it is the connection's"),
    ("connection", "it is the connection's"),
    ("keep-alive", "it is the connection's"),
    ("proxy-connection", "it is the connection's"),
    ("upgrade", "it is the connection's"),
    ("te", "it is the connection's"),
    ("trailer", "it is the connection's"),
    ("date", "the agent sets it"),
    ("retry-after", "the agent sets it"),
    ("ratelimit", "see [api.headers] of the configuration"),
    ("ratelimit-policy", "see [api.headers] of the configuration"),
];
const RESERVED_PREFIXES: [&str; 2] = ["x-ratelimit-", "ratelimit-"];

/// `[responses.NAME]`.
#[derive(Debug, Default)]
pub(super) struct Responses {
    names: Vec<Arc<str>>,
    /// `None` where there is a mistake.
    templates: Vec<Option<Arc<ResponseTemplate>>>,
}

impl Responses {
    pub(super) fn read(value: Option<&Value<'_>>) -> Self {
        let mut responses = Self::default();
        for (name, value) in value.and_then(Value::table).map(Table::named).unwrap_or_default() {
            if let Err(error) = identifier(name) {
                value.error(error);
            }
            responses.names.push(name.into());
            responses.templates.push(template(&value).map(Arc::new));
        }
        responses
    }

    /// What a rule's `response` is: a name, or the thing itself.
    pub(super) fn of_rule(&self, value: &Value<'_>) -> Option<Arc<ResponseTemplate>> {
        match value.as_str() {
            Some(name) => {
                let index = index_of(name, &self.names, "response", |message| value.error(message))?;
                self.templates[index].clone()
            }
            None => template(value).map(Arc::new),
        }
    }
}

fn template(value: &Value<'_>) -> Option<ResponseTemplate> {
    let raw = RawResponse::read(value.table()?);
    if raw.status.is_none() && raw.body.is_none() && raw.headers.is_none() {
        raw.place.error("changes nothing: give a status, a body or headers");
    }
    let status = raw.status.as_ref().and_then(|status| status.within(400..=599));
    let status = status.and_then(|status: u16| StatusCode::from_u16(status).ok());
    if let (Some(content_type), None) = (&raw.content_type, &raw.body) {
        content_type.error("says nothing without a body");
    }
    let content_type = raw.content_type.as_ref().map(|value| value.parsed("a media type", content_type));
    let content_type = content_type.unwrap_or(Some(PLAIN.to_owned()));
    // Without a content type the braces of the body are looked at all the same.
    let escape = content_type.as_deref().map_or(Escape::None, Escape::of);
    let text = raw.body.as_ref().map(|value| value.parsed("text", |text| body(text, escape)));
    let headers = raw.headers.as_ref().map(headers).unwrap_or_default();
    let body = match text {
        None => None,
        Some(text) => Some(Body { content_type: HeaderValue::try_from(content_type?).ok()?, text: text? }),
    };
    Some(ResponseTemplate { status, headers, body })
}

fn content_type(text: &str) -> Result<String, String> {
    let is_token = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$&^_.+-".contains(&byte))
    };
    let media = text.split(';').next().unwrap_or_default().trim_end();
    let is_media = media.split_once('/').is_some_and(|(kind, subtype)| is_token(kind) && is_token(subtype));
    if !is_media || !is_field_value(text) {
        return Err(format!("{text:?} is not a media type such as \"text/html; charset=utf-8\""));
    }
    Ok(text.to_owned())
}

fn body(text: &str, escape: Escape) -> Result<Text, String> {
    let text = Text::parse(text, escape, MAX_BODY)?;
    if escape == Escape::Json {
        for retry_after_seconds in [Some(1), None] {
            let sample = text.filled(&Values { retry_after_seconds, ..Values::SAMPLE });
            serde_json::from_str::<serde::de::IgnoredAny>(&sample)
                .map_err(|error| format!("is not JSON when it is filled in ({sample}): {error}"))?;
        }
    }
    Ok(text)
}

fn headers(value: &Value<'_>) -> Vec<(HeaderName, Text)> {
    let named = value.table().map(Table::named).unwrap_or_default();
    if named.len() > MAX_HEADERS {
        value.error(format_args!("{} headers: at most {MAX_HEADERS}", named.len()));
    }
    let mut taken = HashSet::new();
    let mut headers = Vec::new();
    for (name, value) in named {
        let Some(text) = value.parsed("text", header_text) else { continue };
        let lower = name.to_ascii_lowercase();
        let reserved = RESERVED.iter().find(|(reserved, _)| *reserved == lower).map(|(_, instead)| *instead);
        let reserved = reserved.or_else(|| {
            RESERVED_PREFIXES.iter().any(|prefix| lower.starts_with(prefix)).then_some(RESERVED[RESERVED.len() - 1].1)
        });
        match (HeaderName::try_from(&*lower), reserved) {
            (_, Some(instead)) => value.error(format_args!("\"{name}\" cannot be set here: {instead}")),
            (Err(_), None) => value.error(format_args!("\"{name}\" cannot be the name of a header")),
            (Ok(_), None) if !taken.insert(lower) => value.error(format_args!("\"{name}\" is named twice")),
            (Ok(header), None) => headers.push((header, text)),
        }
    }
    headers
}

fn header_text(text: &str) -> Result<Text, String> {
    if !is_field_value(text) {
        return Err("has other characters than ASCII on one line, which a header cannot carry".into());
    }
    Text::parse(text, Escape::None, MAX_HEADER)
}

fn is_field_value(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b' '..=b'~' | b'\t'))
}

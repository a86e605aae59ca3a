//! `[[bypass]]`.

use std::collections::{BTreeSet, HashSet};

use super::{one_or_more, tables};
use crate::{
    config::{Value, prefix::prefix},
    identity::api_key::id_from_hex,
    policy::{Bypass, Endpoints, endpoints::Pattern, raw::RawBypass},
};

pub(super) fn bypass(value: Option<&Value<'_>>) -> Bypass {
    let mut cidrs = HashSet::new();
    let mut key_ids = BTreeSet::new();
    let (mut paths, mut texts) = (Vec::new(), HashSet::new());
    for table in tables(value) {
        let raw = RawBypass::read(table);
        if [&raw.cidr, &raw.key_id, &raw.path].into_iter().flatten().count() != 1 {
            raw.place.error("an entry has either cidr or key_id or path: write several entries");
            continue;
        }
        for value in elements(raw.cidr.as_ref(), "a prefix, or a list of prefixes") {
            if let Some(cidr) = value.parsed("a prefix", prefix) {
                once(&value, cidrs.insert(cidr));
            }
        }
        for value in elements(raw.key_id.as_ref(), "the id of an API key, or a list of ids") {
            let parse = |text: &str| {
                id_from_hex(text).ok_or("is not 32 hexadecimal digits: \"limiter keys list\" shows the ids of keys")
            };
            if let Some(id) = value.parsed("the id of an API key", parse) {
                once(&value, key_ids.insert(id));
            }
        }
        for value in elements(raw.path.as_ref(), "a pattern, or a list of patterns") {
            if let Some(pattern) = value.parsed("a pattern", Pattern::parse) {
                once(&value, texts.insert(pattern.to_string()));
                paths.push(pattern);
            }
        }
    }
    let groups = if paths.is_empty() { Vec::new() } else { vec![("bypass".into(), paths)] };
    let paths = Endpoints::new(groups).unwrap_or_else(|error| {
        if let Some(value) = value {
            value.error(error);
        }
        Endpoints::default()
    });
    Bypass { cidrs: cidrs.into_iter().collect(), key_ids, paths }
}

fn elements<'d>(value: Option<&Value<'d>>, expected: &str) -> Vec<Value<'d>> {
    let elements = value.and_then(|value| one_or_more(value, expected, "is empty, so nothing would be let through"));
    elements.unwrap_or_default()
}

fn once(value: &Value<'_>, is_new: bool) {
    if !is_new {
        value.error("is named twice");
    }
}

//! What Redis, and a node's copy of it, say of a key, in JSON.

use std::sync::Arc;

use limiter_common::time::UnixMicros;
use serde::{Deserialize, Serialize};

use super::{
    api_key::{id_from_hex, id_to_hex},
    key_file::{KeyEntry, client_id},
};
use crate::config::{Origin, identifier};

/// Fields that are not known are refused: they may say that a key is not valid.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeyRecord {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) client: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) plan: Option<String>,
    /// Epoch seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) created: Option<u64>,
    /// Epoch seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) expires: Option<u64>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub(super) disabled: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

pub(super) fn seconds(at: UnixMicros) -> u64 {
    at.get() / 1_000_000
}

impl KeyRecord {
    pub(super) fn of(entry: &KeyEntry) -> Self {
        Self {
            client: Some(entry.client.to_string()),
            plan: entry.plan.as_deref().map(str::to_owned),
            created: entry.created.map(seconds),
            expires: entry.expires.map(seconds),
            disabled: entry.disabled,
        }
    }

    pub(super) fn to_json(&self) -> String {
        // A struct of texts and numbers always has a JSON form.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The entry, or what is wrong with it.
    pub(super) fn entry(self, id: &str, origin: &Origin) -> Result<KeyEntry, String> {
        let id = id_from_hex(id).ok_or("its id is not 32 hexadecimal digits")?;
        let client = client_id(&self.client.ok_or("it has no client")?)?;
        let plan = self.plan.as_deref().map(identifier).transpose()?.map(Arc::from);
        let instant = |seconds: u64| UnixMicros::new(seconds.saturating_mul(1_000_000));
        Ok(KeyEntry {
            id,
            client,
            plan,
            disabled: self.disabled,
            created: self.created.map(instant),
            expires: self.expires.map(instant),
            origin: origin.clone(),
            id_origin: origin.clone(),
        })
    }

    pub(super) fn parse(id: &str, json: &str, origin: &Origin) -> Result<KeyEntry, String> {
        let record: Self = serde_json::from_str(json).map_err(|error| format!("its record is unreadable: {error}"))?;
        record.entry(id, origin)
    }
}

/// What two that know the same key know together: a key only ever moves towards its end, as in `keys_merge.lua`.
pub(super) fn joined(mut stored: KeyEntry, known: &KeyEntry) -> KeyEntry {
    stored.disabled |= known.disabled;
    stored.expires = match (stored.expires, known.expires) {
        (Some(a), Some(b)) if b.get() < a.get() => Some(b),
        (Some(a), _) => Some(a),
        (None, b) => b,
    };
    stored
}

/// Id and record.
pub(super) fn written(entry: &KeyEntry) -> (String, String) {
    (id_to_hex(entry.id), KeyRecord::of(entry).to_json())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ApiKeyId;

    #[test]
    fn records_are_these_bytes_and_are_read_again() {
        let origin = Origin::Redis("r".into());
        let at = |seconds: u64| Some(UnixMicros::new(seconds * 1_000_000));
        let entry = |plan: Option<&str>, disabled, created, expires| KeyEntry {
            id: ApiKeyId([17; 16]),
            client: "c_1".into(),
            plan: plan.map(Arc::from),
            disabled,
            created,
            expires,
            origin: origin.clone(),
            id_origin: origin.clone(),
        };
        for (entry, json) in [
            (entry(None, false, None, None), r#"{"client":"c_1"}"#),
            (
                entry(Some("pro"), true, at(1_767_225_600), at(253_402_300_799)),
                r#"{"client":"c_1","plan":"pro","created":1767225600,"expires":253402300799,"disabled":true}"#,
            ),
        ] {
            let (id, text) = written(&entry);
            assert_eq!((id.as_str(), text.as_str()), ("11111111111111111111111111111111", json));
            let read = KeyRecord::parse(&id, &text, &origin).unwrap();
            assert_eq!(format!("{read:?}"), format!("{entry:?}"));
        }
        for (id, json, reason) in [
            ("lk_1", r#"{"client":"c"}"#, "its id is not"),
            ("11111111111111111111111111111111", "{}", "no client"),
            ("11111111111111111111111111111111", r#"{"client":"a b"}"#, "is not 1 to 128"),
            ("11111111111111111111111111111111", r#"{"client":"c","plan":""}"#, "is not 1 to 64"),
            ("11111111111111111111111111111111", r#"{"client":"c","not_before":1}"#, "unknown field"),
            ("11111111111111111111111111111111", r#"{"client":"c","expires":-1}"#, "unreadable"),
            ("11111111111111111111111111111111", "garbage", "unreadable"),
        ] {
            let error = KeyRecord::parse(id, json, &origin).unwrap_err();
            assert!(error.contains(reason) && !error.contains("lk_1"), "{json}: {error}");
        }
    }

    #[test]
    fn a_key_only_moves_towards_its_end() {
        let origin = Origin::Redis("r".into());
        let entry = |disabled, expires: Option<u64>| {
            let record = KeyRecord { client: Some("c".into()), expires, disabled, ..KeyRecord::default() };
            record.entry("11111111111111111111111111111111", &origin).unwrap()
        };
        for (a, b, expected) in [
            ((false, None), (false, None), (false, None)),
            ((true, None), (false, Some(5)), (true, Some(5))),
            ((false, Some(7)), (false, Some(5)), (false, Some(5))),
            ((false, Some(5)), (true, None), (true, Some(5))),
        ] {
            for (one, other) in [(a, b), (b, a)] {
                let joined = joined(entry(one.0, one.1), &entry(other.0, other.1));
                assert_eq!((joined.disabled, joined.expires.map(seconds)), expected, "{one:?} {other:?}");
            }
        }
    }
}

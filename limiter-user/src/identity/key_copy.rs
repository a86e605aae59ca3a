//! A node's own copy of the keys in Redis, for a start without Redis.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{api_key::id_to_hex, entries::Entries, key_file::replace, key_record::KeyRecord};
use crate::{config::Origin, file::read_text};

/// Which state of the store something is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// Drawn anew whenever the store began empty.
    pub(super) epoch: String,
    /// Of the last change.
    pub(super) position: u64,
}

/// What was copied.
#[derive(Debug)]
pub(super) struct Copied {
    pub(super) place: Option<Place>,
    pub(super) entries: Entries,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    about: String,
    /// What the keys are hashed with.
    secret: String,
    place: Option<Place>,
    /// By id.
    keys: BTreeMap<String, KeyRecord>,
}

/// `Ok(None)` where there is none, or one of keys that were hashed with another secret.
pub(super) fn read(path: &Path, secret: &str, origin: &Origin) -> Result<Option<Copied>, String> {
    let text = match read_text(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let document: Document = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    if document.secret != secret {
        return Ok(None);
    }
    let entry = |(id, record): (String, KeyRecord)| record.entry(&id, origin);
    let entries: Result<Entries, String> = document.keys.into_iter().map(entry).collect();
    Ok(Some(Copied { place: document.place, entries: entries? }))
}

/// A reader sees the copy as it was before or after.
pub(super) fn write(path: &Path, server: &str, secret: String, copied: &Copied) -> io::Result<()> {
    let keys = copied.entries.iter().map(|entry| (id_to_hex(entry.id), KeyRecord::of(entry)));
    let document = Document {
        about: format!("Keyed hashes of the API keys in Redis at {server}, for a start without Redis"),
        secret,
        place: copied.place.clone(),
        keys: keys.collect(),
    };
    let text = serde_json::to_string(&document)?;
    // The file behind a symbolic link is what is replaced.
    let path = fs::canonicalize(path).unwrap_or_else(|_| PathBuf::from(path));
    replace(&path, &(text + "\n"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::identity::key_record::written;

    #[test]
    fn a_copy_is_read_again_by_who_has_the_secret() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("copy.json");
        let origin = Origin::Redis("r".into());
        assert!(read(&path, "s", &origin).unwrap().is_none());
        let id = "11111111111111111111111111111111";
        let json = r#"{"client":"c_1","plan":"pro","created":1767225600,"disabled":true}"#;
        let entries: Entries = [KeyRecord::parse(id, json, &origin).unwrap()].into_iter().collect();
        let place = Some(Place { epoch: "e".into(), position: 7 });
        write(&path, "r", "s".into(), &Copied { place: place.clone(), entries }).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let copied = read(&path, "s", &origin).unwrap().unwrap();
        assert_eq!(copied.place, place);
        let read_again: Vec<_> = copied.entries.iter().map(written).collect();
        assert_eq!(read_again, [(id.to_owned(), json.to_owned())]);
        assert!(read(&path, "another", &origin).unwrap().is_none());
        fs::write(&path, "{").unwrap();
        assert!(read(&path, "s", &origin).is_err());
    }
}

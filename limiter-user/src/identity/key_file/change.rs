//! Keys that end: at once, or after a time in which a new one takes their place.
//!
//! The file is somebody's own, with comments: one line is put below a key's `id`, and the rest stays as it is. What comes of
//! that is read again before it is written, and has to be what was meant.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use limiter_common::time::UnixMicros;

use super::{KeyEntry, NewKey, append, date::rfc_3339, end_of_grace, parse, replace, with_suffix};
use crate::{
    config::{ConfigErrors, Origin},
    file::read_text,
    identity::api_key::{KeySecret, id_to_hex},
    store::ApiKeyId,
};

/// The key file, of which nobody else makes another meanwhile.
pub(super) struct Locked {
    /// Behind all symbolic links.
    pub(super) path: PathBuf,
    pub(super) text: String,
    pub(super) entries: HashMap<ApiKeyId, KeyEntry>,
    _lock: File,
}

impl Locked {
    /// Others that change it at the same time wait.
    pub(super) fn open(key_file: &Path) -> Result<Self, ConfigErrors> {
        // The file behind a symbolic link is what is replaced.
        let path = fs::canonicalize(key_file).unwrap_or_else(|_| key_file.to_owned());
        let lock_file = with_suffix(&path, ".lock");
        let lock = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&lock_file);
        let lock = lock.map_err(of_io("open the lock", &lock_file))?;
        lock.lock().map_err(of_io("lock", &lock_file))?;
        let text = match read_text(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(of_io("read the API keys", &path)(error)),
        };
        let entries = parse(&path, &text)?;
        Ok(Self { path, text, entries, _lock: lock })
    }

    /// Puts the text in place of the file: a reader sees it before or after.
    pub(super) fn write(&self, text: &str) -> Result<(), ConfigErrors> {
        replace(&self.path, text).map_err(of_io("write", &self.path))
    }

    fn error(&self, message: impl Into<String>) -> ConfigErrors {
        ConfigErrors::of_file(&self.path, "keys", message, false)
    }

    fn entry(&self, id: ApiKeyId) -> Result<&KeyEntry, ConfigErrors> {
        let missing = || self.error(format!("there is no key {}: \"limiter keys list\" shows them", id_to_hex(id)));
        self.entries.get(&id).ok_or_else(missing)
    }

    /// The text with this line below the key's id, and without another of its name.
    fn with_line(&self, entry: &KeyEntry, name: &str, value: &str) -> Result<String, ConfigErrors> {
        let Origin::File { line: Some(id_line), .. } = entry.id_origin else {
            return Err(self.error("it is not known where the key's id stands"));
        };
        let begin = match &entry.origin {
            Origin::File { line: Some(line), .. } => *line,
            Origin::File { line: None, .. } | Origin::Variable(_) | Origin::Redis(_) => id_line,
        };
        let is_header = |line: &str| line.trim_start().starts_with('[');
        let of_name = |line: &str| line.split_once('=').is_some_and(|(key, _)| key.trim() == name);
        let mut text = String::with_capacity(self.text.len() + 64);
        let mut is_within = false;
        for (index, line) in self.text.lines().enumerate() {
            let number = index + 1;
            is_within = (is_within && !is_header(line)) || number == begin;
            if !(is_within && of_name(line)) {
                text.push_str(line);
                text.push('\n');
            }
            if number == id_line {
                text.push_str(&format!("{name} = {value}\n"));
            }
        }
        let is_meant = parse(&self.path, &text).is_ok_and(|changed| {
            changed.len() == self.entries.len()
                && changed.iter().all(|(id, changed)| match self.entries.get(id) {
                    Some(old) if *id == entry.id => changed.client == old.client && changed.plan == old.plan,
                    Some(old) => changed.state() == old.state(),
                    None => false,
                })
        });
        match is_meant {
            true => Ok(text),
            false => Err(self.error(format!(
                "cannot be changed line by line: write \"{name} = {value}\" below the id {} yourself",
                id_to_hex(entry.id)
            ))),
        }
    }
}

pub(super) fn of_io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ConfigErrors {
    let path = path.to_owned();
    move |error| ConfigErrors::of_io(operation, &path, "", &error)
}

/// Ends a key at once. The answer is whether it was not disabled before.
pub fn disable(key_file: &Path, id: ApiKeyId) -> Result<bool, ConfigErrors> {
    let locked = Locked::open(key_file)?;
    let entry = locked.entry(id)?;
    if entry.disabled {
        return Ok(false);
    }
    locked.write(&locked.with_line(entry, "disabled", "true")?)?;
    Ok(true)
}

/// Makes a new key for the client and the plan of an old one, which ends after `grace`.
pub fn rotate(
    key_file: &Path,
    secret_file: &Path,
    id: ApiKeyId,
    grace: Duration,
    now: UnixMicros,
) -> Result<(NewKey, UnixMicros), ConfigErrors> {
    let locked = Locked::open(key_file)?;
    let entry = locked.entry(id)?;
    if entry.has_ended(now) {
        return Err(
            locked.error(format!("the key {} has ended: make another with \"limiter keys add\"", id_to_hex(id)))
        );
    }
    let secret = KeySecret::load(secret_file)?.ok_or_else(|| {
        ConfigErrors::of_file(secret_file, "identity.key_secret_file", "is missing, so no key can be made", false)
    })?;
    let end = end_of_grace(now, grace, entry.expires);
    let mut text = locked.with_line(entry, "expires", &rfc_3339(end))?;
    let new = NewKey::make(&secret, entry.client.clone()).map_err(|error| locked.error(error.to_string()))?;
    append(&mut text, new.id, &entry.client, entry.plan.as_deref(), now);
    parse(&locked.path, &text)?;
    locked.write(&text)?;
    Ok((new, end))
}

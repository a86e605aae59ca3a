//! The key store in a file: ids, clients and plans, and never a key.

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write as _},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
    sync::Arc,
};

use limiter_common::time::UnixMicros;

use super::api_key::{KeySecret, MAX_KEY_LEN, generate_key, id_from_hex, id_to_hex, random_digits};
use crate::{
    config::{ConfigError, ConfigErrors, Context, Environment, Origin, Secret, Table, Value, identifier, raw_table},
    policy::Policy,
    store::ApiKeyId,
};

raw_table!(RawKeys { keys });

raw_table!(RawKey in place { id, client, plan, disabled, created });

/// What a key file says of one key.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeyEntry {
    pub id: ApiKeyId,
    pub client: Arc<str>,
    pub plan: Option<Arc<str>>,
    pub disabled: bool,
    origin: Origin,
}

/// All keys of a file. Load it again when the file has changed.
#[derive(Clone, Debug, Default)]
pub struct KeyStore {
    secret: Option<KeySecret>,
    entries: HashMap<ApiKeyId, KeyEntry>,
}

/// Whose key it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyLookup {
    Known { id: ApiKeyId, client: Arc<str>, plan: Option<Arc<str>> },
    Disabled(ApiKeyId),
    Unknown,
}

impl KeyStore {
    /// Reads both files. Without a key file there are no keys, and without keys no secret is needed.
    pub fn load(key_file: &Path, secret_file: &Path) -> Result<Self, ConfigErrors> {
        let entries = match fs::read_to_string(key_file) {
            Ok(text) => parse(key_file, &text),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(HashMap::new()),
            Err(error) => Err(ConfigErrors::of_io("read the API keys", key_file, "identity.key_file", &error)),
        };
        match (entries, KeySecret::load(secret_file)) {
            (Ok(entries), Ok(secret)) if secret.is_some() || entries.is_empty() => Ok(Self { secret, entries }),
            (Ok(_), Ok(_)) => {
                let message = format!("is missing, and {} has keys that were hashed with it", key_file.display());
                Err(ConfigErrors::of_file(secret_file, "identity.key_secret_file", message, false))
            }
            (entries, secret) => {
                let mut errors = ConfigErrors::new();
                errors.extend(entries.err().unwrap_or_default());
                errors.extend(secret.err().unwrap_or_default());
                Err(errors)
            }
        }
    }

    /// Hashes the key once.
    pub fn lookup(&self, presented: &str) -> KeyLookup {
        let Some(secret) = self.secret.as_ref().filter(|_| presented.len() <= MAX_KEY_LEN) else {
            return KeyLookup::Unknown;
        };
        match self.entries.get(&secret.id_of(presented)) {
            Some(KeyEntry { id, disabled: true, .. }) => KeyLookup::Disabled(*id),
            Some(KeyEntry { id, client, plan, .. }) => {
                KeyLookup::Known { id: *id, client: client.clone(), plan: plan.clone() }
            }
            None => KeyLookup::Unknown,
        }
    }

    /// What keys, and sessions, are hashed with, if there is a file with it.
    pub const fn secret(&self) -> Option<&KeySecret> {
        self.secret.as_ref()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// In the order of the file.
    pub fn entries(&self) -> Vec<&KeyEntry> {
        let mut entries: Vec<_> = self.entries.values().collect();
        entries.sort_by(|a, b| a.origin.cmp(&b.origin));
        entries
    }

    /// Keys whose plan the policy does not have.
    pub fn check_plans(&self, policy: &Policy) -> ConfigErrors {
        let mut errors = ConfigErrors::new();
        for entry in self.entries() {
            if let Some(plan) = entry.plan.as_ref().filter(|plan| policy.plan(plan).is_none()) {
                let message = format!("the policy has no plan \"{plan}\"");
                let origin = entry.origin.clone();
                errors.push(ConfigError { origin, key: "keys.plan".into(), message, no_permission: false });
            }
        }
        errors
    }
}

/// 1 to 128 bytes that need no escaping anywhere.
pub fn client_id(text: &str) -> Result<Arc<str>, String> {
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-@:+".contains(&byte);
    if text.is_empty() || text.len() > 128 || !text.bytes().all(is_safe) {
        return Err(format!("\"{text}\" is not 1 to 128 of the characters A-Z a-z 0-9 _ . - @ : +"));
    }
    Ok(text.into())
}

fn parse(path: &Path, text: &str) -> Result<HashMap<ApiKeyId, KeyEntry>, ConfigErrors> {
    let context = Context::new(path, text, Environment::default());
    let document = context.parse(text)?;
    let raw = RawKeys::read(Table::root(&context, &document));
    let mut entries = HashMap::new();
    for table in raw.keys.as_ref().and_then(Value::tables).unwrap_or_default() {
        let raw = RawKey::read(table);
        if let Some(created) = &raw.created
            && !created.is_date()
        {
            created.text("a date");
        }
        let Some(entry) = entry(&raw) else { continue };
        if entries.insert(entry.id, entry).is_some()
            && let Some(id) = &raw.id
        {
            id.error("is the id of a key above already");
        }
    }
    context.take_errors().or(Some(entries))
}

fn entry(raw: &RawKey<'_>) -> Option<KeyEntry> {
    let required = |value: &Option<Value<'_>>, field| {
        if value.is_none() {
            raw.place.error_in(field, "is missing");
        }
    };
    required(&raw.id, "id");
    required(&raw.client, "client");
    let id = raw.id.as_ref().and_then(|value| {
        // The text is not repeated: somebody may have put a key here.
        value.parsed("32 hexadecimal digits", |text| {
            id_from_hex(text).ok_or("is not 32 hexadecimal digits: \"limiter keys add\" makes entries")
        })
    });
    let client = raw.client.as_ref().and_then(|value| value.parsed("a client id", client_id));
    let plan = raw.plan.as_ref().and_then(|value| value.parsed("the name of a plan", identifier)).map(Arc::from);
    let disabled = raw.disabled.as_ref().and_then(Value::boolean).unwrap_or(false);
    Some(KeyEntry { id: id?, client: client?, plan, disabled, origin: raw.place.origin() })
}

/// A key that was just added.
#[derive(Debug)]
#[non_exhaustive]
pub struct NewKey {
    pub key: Secret,
    pub id: ApiKeyId,
    pub client: Arc<str>,
}

/// Makes a key, and the secret if there is none, and adds its entry to the file.
///
/// Others that add at the same time wait. The file is replaced in one step, so a reader sees it before or after.
pub fn add(
    key_file: &Path,
    secret_file: &Path,
    client: Option<Arc<str>>,
    plan: Option<&str>,
    created: UnixMicros,
) -> Result<NewKey, ConfigErrors> {
    let of_io = |operation: &'static str, path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| ConfigErrors::of_io(operation, &path, "", &error)
    };
    let random = |error: super::api_key::RandomError| ConfigErrors::of_file(key_file, "", error.to_string(), false);

    // The file behind a symbolic link is what is replaced.
    let key_file = fs::canonicalize(key_file).unwrap_or_else(|_| key_file.to_owned());
    let lock_file = with_suffix(&key_file, ".lock");
    let lock = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&lock_file);
    let lock = lock.map_err(of_io("open the lock", &lock_file))?;
    lock.lock().map_err(of_io("lock", &lock_file))?;

    let text = match fs::read_to_string(&key_file) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        Err(error) => return Err(of_io("read the API keys", &key_file)(error)),
    };
    let entries = parse(&key_file, &text)?;
    let secret = match KeySecret::load(secret_file)? {
        Some(secret) => secret,
        None if entries.is_empty() => {
            let secret = KeySecret::generate().map_err(random)?;
            replace(secret_file, &format!("{}\n", secret.expose())).map_err(of_io("write", secret_file))?;
            KeySecret::load(secret_file)?
                .ok_or_else(|| ConfigErrors::of_file(secret_file, "", "is gone although it was just written", false))?
        }
        None => {
            let message = format!("is missing, and {} has keys that were hashed with it", key_file.display());
            return Err(ConfigErrors::of_file(secret_file, "identity.key_secret_file", message, false));
        }
    };
    let client = match client {
        Some(client) => client,
        None => format!("c_{}", random_digits(16).map_err(random)?).into(),
    };
    let key = generate_key().map_err(random)?;
    let id = secret.id_of(key.expose());

    let mut text = text;
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    if !text.is_empty() {
        text.push('\n');
    }
    let plan = plan.map(|plan| format!("plan = \"{plan}\"\n")).unwrap_or_default();
    let written = write!(
        text,
        "[[keys]]\nid = \"{}\"\nclient = \"{client}\"\n{plan}created = {}\n",
        id_to_hex(id),
        rfc_3339(created)
    );
    written.map_err(|error| ConfigErrors::of_file(&key_file, "", error.to_string(), false))?;
    // Whatever the file was like, what is written must be readable.
    parse(&key_file, &text)?;
    replace(&key_file, &text).map_err(of_io("write", &key_file))?;
    drop(lock);
    Ok(NewKey { key, id, client })
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Puts a file in place of what is there, in one step, with the owner and mode of the old one, or for the owner alone.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let temporary = with_suffix(path, ".new");
    let written = write_new(path, &temporary, text).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The error that matters is the first.
        fs::remove_file(&temporary).unwrap_or_default();
        return written;
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

fn write_new(path: &Path, temporary: &Path, text: &str) -> io::Result<()> {
    // What a crash left: the lock is held, so nobody is writing it.
    match fs::remove_file(temporary) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(temporary)?;
    if let Ok(old) = fs::metadata(path) {
        let new = file.metadata()?;
        if (old.uid(), old.gid()) != (new.uid(), new.gid()) {
            fchown(&file, Some(old.uid()), Some(old.gid()))?;
        }
        file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o7777))?;
    }
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// As in `2026-01-31T12:00:00Z`.
fn rfc_3339(at: UnixMicros) -> String {
    let seconds = at.get() / 1_000_000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant's civil_from_days, for days since 1970: eras of 400 years that begin in March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: UnixMicros = UnixMicros::new(1_767_225_600_000_000);

    struct Files {
        folder: tempfile::TempDir,
    }

    impl Files {
        fn new() -> Self {
            Self { folder: tempfile::tempdir().unwrap() }
        }

        fn keys(&self) -> PathBuf {
            self.folder.path().join("keys.toml")
        }

        fn secret(&self) -> PathBuf {
            self.folder.path().join("keys.secret")
        }

        fn add(&self, client: &str, plan: Option<&str>) -> NewKey {
            add(&self.keys(), &self.secret(), Some(client_id(client).unwrap()), plan, NOW).unwrap()
        }

        fn load(&self) -> Result<KeyStore, ConfigErrors> {
            KeyStore::load(&self.keys(), &self.secret())
        }

        fn write(&self, text: &str) {
            fs::write(self.keys(), text).unwrap();
        }
    }

    #[test]
    fn an_added_key_is_known_and_its_text_is_nowhere() {
        let files = Files::new();
        let first = files.add("c_1", Some("free"));
        let second = files.add("c_2", None);
        let store = files.load().unwrap();
        assert_eq!(
            store.lookup(first.key.expose()),
            KeyLookup::Known { id: first.id, client: "c_1".into(), plan: Some("free".into()) }
        );
        assert_eq!(
            store.lookup(second.key.expose()),
            KeyLookup::Known { id: second.id, client: "c_2".into(), plan: None }
        );
        for unknown in ["", "lk_", "unknown", &"x".repeat(1 << 20)] {
            assert_eq!(store.lookup(unknown), KeyLookup::Unknown);
        }
        let text = fs::read_to_string(files.keys()).unwrap();
        for key in [&first, &second] {
            let printed = format!("{text}{store:?}{first:?}{second:?}");
            assert!(!printed.contains(key.key.expose()), "{printed}");
        }
        assert!(text.contains("created = 2026-01-01T00:00:00Z"), "{text}");
        for file in [files.keys(), files.secret()] {
            assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600, "{}", file.display());
        }
    }

    #[test]
    fn a_disabled_key_is_told_apart() {
        let files = Files::new();
        let key = files.add("c_1", None);
        let text = fs::read_to_string(files.keys()).unwrap();
        files.write(&format!("{text}disabled = true\n"));
        assert_eq!(files.load().unwrap().lookup(key.key.expose()), KeyLookup::Disabled(key.id));
    }

    #[test]
    fn what_the_file_holds_besides_is_kept() {
        let files = Files::new();
        files.write("# Ours.");
        fs::set_permissions(files.keys(), fs::Permissions::from_mode(0o640)).unwrap();
        files.add("c_1", None);
        files.add("c_2", None);
        let text = fs::read_to_string(files.keys()).unwrap();
        assert!(text.starts_with("# Ours.\n\n[[keys]]\n"), "{text}");
        assert_eq!(fs::metadata(files.keys()).unwrap().mode() & 0o777, 0o640);
    }

    #[test]
    fn a_link_to_the_file_stays_a_link() {
        let files = Files::new();
        let real = files.folder.path().join("real.toml");
        fs::write(&real, "").unwrap();
        std::os::unix::fs::symlink(&real, files.keys()).unwrap();
        files.add("c_1", None);
        assert!(fs::symlink_metadata(files.keys()).unwrap().is_symlink());
        assert!(fs::read_to_string(real).unwrap().contains("c_1"));
    }

    #[test]
    fn adds_at_the_same_time_lose_nothing() {
        let files = Files::new();
        let keys: Vec<NewKey> = std::thread::scope(|scope| {
            let adds: Vec<_> = (0..8)
                .map(|index| {
                    let files = &files;
                    scope.spawn(move || (0..5).map(|n| files.add(&format!("c_{index}_{n}"), None)).collect::<Vec<_>>())
                })
                .collect();
            adds.into_iter().flat_map(|add| add.join().unwrap()).collect()
        });
        let store = files.load().unwrap();
        assert_eq!(store.len(), 40);
        for key in keys {
            assert!(matches!(store.lookup(key.key.expose()), KeyLookup::Known { client, .. } if client == key.client));
        }
    }

    #[test]
    fn without_files_every_key_is_unknown() {
        let store = Files::new().load().unwrap();
        assert!(store.is_empty());
        assert_eq!(store.lookup("lk_x"), KeyLookup::Unknown);
    }

    #[test]
    fn mistakes_are_reported_together_and_never_repeat_an_id() {
        let files = Files::new();
        files.add("c_1", None);
        files.write(
            "[[keys]]\nid = \"lk_hunter2\"\nclient = \"a b\"\n\n[[keys]]\nclint = \"c\"\ncreated = 1\n\
             [[keys]]\nid = \"00000000000000000000000000000000\"\nclient = \"c\"\n\
             [[keys]]\nid = \"00000000000000000000000000000000\"\nclient = \"c\"\nplan = \"x y\"\ndisabled = 1\n",
        );
        let errors = files.load().unwrap_err().to_string();
        let path = files.keys().display().to_string();
        let expected = [
            ":2: keys[0].id: is not 32 hexadecimal digits: \"limiter keys add\" makes entries",
            ":3: keys[0].client: \"a b\" is not 1 to 128 of the characters A-Z a-z 0-9 _ . - @ : +",
            ":5: keys[1].id: is missing",
            ":5: keys[1].client: is missing",
            ":6: keys[1].clint: unknown field: did you mean \"client\"?",
            ":7: keys[1].created: expected a date, found an integer",
            ":12: keys[3].id: is the id of a key above already",
            ":14: keys[3].plan: \"x y\" is not 1 to 64 of the characters A-Z a-z 0-9 _ . -",
            ":15: keys[3].disabled: expected true or false, found an integer",
        ];
        let expected: Vec<String> = expected.iter().map(|line| format!("{path}{line}")).collect();
        assert_eq!(errors.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_broken_file_is_not_added_to() {
        let files = Files::new();
        files.write("[[keys]\n");
        assert!(add(&files.keys(), &files.secret(), None, None, NOW).is_err());
        assert_eq!(fs::read_to_string(files.keys()).unwrap(), "[[keys]\n");
    }

    #[test]
    fn keys_without_their_secret_are_refused() {
        let files = Files::new();
        files.add("c_1", None);
        fs::remove_file(files.secret()).unwrap();
        for error in [files.load().unwrap_err(), add(&files.keys(), &files.secret(), None, None, NOW).unwrap_err()] {
            assert!(error.to_string().contains("is missing"), "{error}");
        }
    }

    #[test]
    fn a_secret_that_everybody_can_read_is_refused() {
        let files = Files::new();
        files.add("c_1", None);
        fs::set_permissions(files.secret(), fs::Permissions::from_mode(0o644)).unwrap();
        let error = files.load().unwrap_err().to_string();
        assert!(error.contains("everybody may use it (mode 0644): run chmod 600"), "{error}");
    }

    #[test]
    fn dates() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_164_800, "2024-02-29T00:00:00Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc_3339(UnixMicros::new(seconds * 1_000_000)), date);
        }
    }
}

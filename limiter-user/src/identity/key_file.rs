//! The key store in a file: ids, clients and plans, and never a key.

mod change;
mod date;

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write as _},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use limiter_common::time::UnixMicros;

use self::change::{Locked, of_io};
pub use self::change::{disable, rotate};
use super::{
    api_key::{KeySecret, MAX_KEY_LEN, RandomError, generate_key, id_from_hex, id_to_hex, random_digits},
    entries::{Entries, KeyOwner, KeyPlace},
};
use crate::{
    config::{ConfigError, ConfigErrors, Context, Environment, Origin, Secret, Table, Value, identifier, raw_table},
    file::read_text,
    policy::Policy,
    store::ApiKeyId,
};

raw_table!(RawKeys { keys });

raw_table!(RawKey in place { id, client, plan, disabled, created, expires });

/// What a key store says of one key.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeyEntry {
    pub id: ApiKeyId,
    pub client: Arc<str>,
    pub plan: Option<Arc<str>>,
    pub disabled: bool,
    pub created: Option<UnixMicros>,
    /// When it ends by itself.
    pub expires: Option<UnixMicros>,
    pub(super) origin: Origin,
    /// Where its id stands, in a file.
    pub(super) id_origin: Origin,
}

impl KeyEntry {
    /// Whether the key is not valid any more.
    pub fn has_ended(&self, now: UnixMicros) -> bool {
        self.disabled || self.expires.is_some_and(|expires| now.get() >= expires.get())
    }

    /// What the file says of it, wherever that stands.
    fn state(&self) -> (&str, Option<&str>, bool, Option<UnixMicros>) {
        (&self.client, self.plan.as_deref(), self.disabled, self.expires)
    }
}

/// All keys, of a file or of Redis, as they were at one moment.
#[derive(Clone, Debug, Default)]
pub struct KeyStore {
    secret: Option<KeySecret>,
    entries: Entries,
    generation: Generation,
}

/// Another one for each key store.
#[derive(Clone, Debug)]
struct Generation(u64);

impl Default for Generation {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl KeyStore {
    /// Reads both files. Without a key file there are no keys, and without keys no secret is needed.
    pub fn load(key_file: &Path, secret_file: &Path) -> Result<Self, ConfigErrors> {
        let entries = match read_text(key_file) {
            Ok(text) => parse(key_file, &text),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(HashMap::new()),
            Err(error) => Err(ConfigErrors::of_io("read the API keys", key_file, "identity.key_file", &error)),
        };
        match (entries, KeySecret::load(secret_file)) {
            (Ok(entries), Ok(secret)) if secret.is_some() || entries.is_empty() => {
                Ok(Self::new(secret, entries.into_values().collect()))
            }
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

    /// Keys that were hashed with `secret`.
    pub fn new(secret: Option<KeySecret>, entries: Entries) -> Self {
        Self { secret, entries, generation: Generation::default() }
    }

    /// One key, and where it is.
    #[cfg(test)]
    pub(super) fn of(owner: KeyOwner) -> (Self, KeyPlace) {
        let (id, mut store) = (owner.id, Self::default());
        store.entries.put_owner(owner);
        let place = store.entries.place_of(id).expect("it was put in");
        (store, place)
    }

    /// Another number for each key store.
    pub(crate) const fn generation(&self) -> u64 {
        self.generation.0
    }

    pub fn has(&self, id: ApiKeyId) -> bool {
        self.entries.get(id).is_some()
    }

    /// Where the owner of a key is, even if that has ended. Hashes the key once.
    pub(super) fn place_of(&self, presented: &str) -> Option<KeyPlace> {
        let secret = self.secret.as_ref().filter(|_| presented.len() <= MAX_KEY_LEN)?;
        self.entries.place_of(secret.id_of(presented))
    }

    /// Of a place that this key store has given out.
    #[inline]
    pub(super) fn owner(&self, place: KeyPlace) -> &KeyOwner {
        self.entries.owner(place)
    }

    #[inline]
    pub(super) fn prefetch_owner(&self, place: KeyPlace) {
        self.entries.prefetch_owner(place);
    }

    /// What keys, and sessions, are hashed with, if there is a file with it.
    pub const fn secret(&self) -> Option<&KeySecret> {
        self.secret.as_ref()
    }

    pub const fn len(&self) -> usize {
        self.entries.len()
    }

    pub const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// In the order of the file, or of the times at which they were made.
    pub fn entries(&self) -> Vec<&KeyEntry> {
        let mut entries: Vec<_> = self.entries.iter().collect();
        entries.sort_by(|a, b| (&a.origin, a.created, a.id).cmp(&(&b.origin, b.created, b.id)));
        entries
    }

    /// Plans of valid keys that the policy does not have, each once. Whoever has such a key is limited like one without a
    /// plan, so that a plan can be retired, and nodes that share their keys and not yet their policy agree.
    pub fn check_plans(&self, policy: &Policy, now: UnixMicros) -> ConfigErrors {
        /// Ids that are named, however many there are.
        const NAMED: usize = 3;
        let lacks = |entry: &&KeyEntry| {
            !entry.has_ended(now) && entry.plan.as_ref().is_some_and(|plan| policy.plan(plan).is_none())
        };
        let mut by_plan: BTreeMap<&str, Vec<&KeyEntry>> = BTreeMap::new();
        for entry in self.entries.iter().filter(lacks) {
            by_plan.entry(entry.plan.as_deref().unwrap_or_default()).or_default().push(entry);
        }
        let mut errors = ConfigErrors::new();
        for (plan, mut entries) in by_plan {
            let by_place =
                |a: &&KeyEntry, b: &&KeyEntry| (&a.origin, a.created, a.id).cmp(&(&b.origin, b.created, b.id));
            // There may be a million, and few are named.
            if let Some(last) = NAMED.checked_sub(1).filter(|last| *last < entries.len()) {
                entries.select_nth_unstable_by(last, by_place);
            }
            let named = entries.len().min(NAMED);
            entries[..named].sort_by(by_place);
            let ids: Vec<_> = entries.iter().take(NAMED).map(|entry| id_to_hex(entry.id)).collect();
            let more = match entries.len().saturating_sub(NAMED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let message = format!(
                "the policy has no plan \"{plan}\": requests with the key {}{more} have the limits of those without a plan",
                ids.join(", ")
            );
            let Some(origin) = entries.first().map(|entry| entry.origin.clone()) else { continue };
            errors.push(ConfigError { origin, key: "keys.plan".into(), message, no_permission: false });
        }
        errors
    }
}

/// A time as key files have it.
pub fn date(at: UnixMicros) -> String {
    date::rfc_3339(at)
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
    let expires = raw.expires.as_ref().and_then(|value| {
        let expires = value.as_date().and_then(|date| date::instant(&date));
        if expires.is_none() {
            value.error("is not a date such as 2026-01-31T12:00:00Z");
        }
        expires
    });
    let created = raw.created.as_ref().and_then(Value::as_date).and_then(|date| date::instant(&date));
    let id_origin = raw.id.as_ref()?.place().origin();
    Some(KeyEntry { id: id?, client: client?, plan, disabled, created, expires, origin: raw.place.origin(), id_origin })
}

/// A key that was just added.
#[derive(Debug)]
#[non_exhaustive]
pub struct NewKey {
    pub key: Secret,
    pub id: ApiKeyId,
    pub client: Arc<str>,
}

impl NewKey {
    pub(super) fn make(secret: &KeySecret, client: Arc<str>) -> Result<Self, RandomError> {
        let key = generate_key()?;
        Ok(Self { id: secret.id_of(key.expose()), key, client })
    }
}

/// The id of a client that was given none.
pub(super) fn new_client() -> Result<Arc<str>, RandomError> {
    Ok(format!("c_{}", random_digits(16)?).into())
}

/// Writes a new secret, which nobody has used yet.
pub(super) fn make_secret(secret_file: &Path) -> Result<KeySecret, ConfigErrors> {
    let secret =
        KeySecret::generate().map_err(|error| ConfigErrors::of_file(secret_file, "", error.to_string(), false))?;
    replace(secret_file, &format!("{}\n", secret.expose())).map_err(of_io("write", secret_file))?;
    KeySecret::load(secret_file)?
        .ok_or_else(|| ConfigErrors::of_file(secret_file, "", "is gone although it was just written", false))
}

/// When a replaced key ends, in whole seconds, as stores have it; an end that was set before is not put off.
pub(super) fn end_of_grace(now: UnixMicros, grace: Duration, expires: Option<UnixMicros>) -> UnixMicros {
    let grace_us = u64::try_from(grace.as_micros()).unwrap_or(u64::MAX);
    let end = UnixMicros::new(now.get().saturating_add(grace_us).div_ceil(1_000_000).saturating_mul(1_000_000));
    expires.map_or(end, |expires| if expires.get() < end.get() { expires } else { end })
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
    let random = |error: RandomError| ConfigErrors::of_file(key_file, "", error.to_string(), false);
    let locked = Locked::open(key_file)?;
    let (key_file, entries) = (&locked.path, &locked.entries);
    let secret = match KeySecret::load(secret_file)? {
        Some(secret) => secret,
        None if entries.is_empty() => make_secret(secret_file)?,
        None => {
            let message = format!("is missing, and {} has keys that were hashed with it", key_file.display());
            return Err(ConfigErrors::of_file(secret_file, "identity.key_secret_file", message, false));
        }
    };
    let client = match client {
        Some(client) => client,
        None => new_client().map_err(random)?,
    };
    let new = NewKey::make(&secret, client).map_err(random)?;

    let mut text = locked.text.clone();
    append(&mut text, new.id, &new.client, plan, created);
    // Whatever the file was like, what is written must be readable.
    parse(key_file, &text)?;
    locked.write(&text)?;
    Ok(new)
}

/// Adds an entry behind all others.
fn append(text: &mut String, id: ApiKeyId, client: &str, plan: Option<&str>, created: UnixMicros) {
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    if !text.is_empty() {
        text.push('\n');
    }
    let plan = plan.map(|plan| format!("plan = \"{plan}\"\n")).unwrap_or_default();
    text.push_str(&format!(
        "[[keys]]\nid = \"{}\"\nclient = \"{client}\"\n{plan}created = {}\n",
        id_to_hex(id),
        date::rfc_3339(created)
    ));
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Puts a file in place of what is there, in one step, with the owner and mode of the old one, or for the owner alone.
pub(super) fn replace(path: &Path, text: &str) -> io::Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: UnixMicros = UnixMicros::new(1_767_225_600_000_000);

    struct Files {
        folder: tempfile::TempDir,
    }

    /// Whose a key is.
    #[derive(Debug, PartialEq, Eq)]
    enum Found {
        Valid(KeyOwner),
        Ended(ApiKeyId),
        Unknown,
    }

    fn find(store: &KeyStore, presented: &str, now: UnixMicros) -> Found {
        match store.place_of(presented).map(|place| store.owner(place)) {
            Some(owner) if owner.has_ended(now) => Found::Ended(owner.id),
            Some(owner) => Found::Valid(owner.clone()),
            None => Found::Unknown,
        }
    }

    fn known(key: &NewKey, client: &str, plan: Option<&str>) -> Found {
        Found::Valid(KeyOwner::new(key.id, client, plan.map(Into::into)))
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
        assert_eq!(find(&store, first.key.expose(), NOW), known(&first, "c_1", Some("free")));
        assert_eq!(find(&store, second.key.expose(), NOW), known(&second, "c_2", None));
        for unknown in ["", "lk_", "unknown", &"x".repeat(1 << 20)] {
            assert_eq!(find(&store, unknown, NOW), Found::Unknown);
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
        assert_eq!(find(&files.load().unwrap(), key.key.expose(), NOW), Found::Ended(key.id));
    }

    #[test]
    fn a_key_is_disabled_and_replaced_in_a_file_of_somebodys_own() {
        let files = Files::new();
        files.write("# Ours.\n");
        let (first, second) = (files.add("c_1", Some("free")), files.add("c_2", None));
        let text = fs::read_to_string(files.keys()).unwrap();
        files.write(&text.replace("client = \"c_1\"", "disabled = false # for now\nclient = \"c_1\" # the first"));
        let hour = Duration::from_secs(3600);
        let (new, end) = rotate(&files.keys(), &files.secret(), first.id, hour, NOW).unwrap();
        assert_eq!(end.get(), NOW.get() + 3_600_000_000);
        let lookup = |key: &NewKey, now: UnixMicros| find(&files.load().unwrap(), key.key.expose(), now);
        let known = |key: &NewKey| known(key, "c_1", Some("free"));
        let before_end = UnixMicros::new(end.get() - 1);
        assert_eq!((lookup(&first, before_end), lookup(&new, before_end)), (known(&first), known(&new)));
        assert_eq!((lookup(&first, end), lookup(&new, end)), (Found::Ended(first.id), known(&new)));
        // Rotated again: its end stays where it was.
        let (_, again) = rotate(&files.keys(), &files.secret(), first.id, 2 * hour, NOW).unwrap();
        assert_eq!(again.get(), end.get());

        assert!(disable(&files.keys(), first.id).unwrap());
        assert!(!disable(&files.keys(), first.id).unwrap(), "it was before");
        assert_eq!(lookup(&first, NOW), Found::Ended(first.id));
        assert!(matches!(lookup(&second, NOW), Found::Valid(_)));
        let error = rotate(&files.keys(), &files.secret(), first.id, hour, NOW).unwrap_err().to_string();
        assert!(error.contains("has ended"), "{error}");
        let error = disable(&files.keys(), ApiKeyId([0; 16])).unwrap_err().to_string();
        assert!(error.contains("there is no key 00000000000000000000000000000000"), "{error}");
        let text = fs::read_to_string(files.keys()).unwrap();
        assert!(text.starts_with("# Ours.\n") && text.contains("client = \"c_1\" # the first"), "{text}");
        assert_eq!((text.matches("disabled").count(), text.matches("expires").count()), (1, 1), "{text}");
    }

    #[test]
    fn a_file_that_cannot_be_changed_by_lines_stays_as_it_is() {
        let files = Files::new();
        let key = files.add("c_1", None);
        let text = format!("keys = [{{ id = \"{}\", client = \"c_1\" }}]\n", id_to_hex(key.id));
        files.write(&text);
        let error = disable(&files.keys(), key.id).unwrap_err().to_string();
        assert!(error.contains("write \"disabled = true\" below the id"), "{error}");
        assert_eq!(fs::read_to_string(files.keys()).unwrap(), text);
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
            assert!(matches!(find(&store, key.key.expose(), NOW), Found::Valid(owner) if *owner.client == *key.client));
        }
    }

    #[test]
    fn without_files_every_key_is_unknown() {
        let store = Files::new().load().unwrap();
        assert!(store.is_empty());
        assert_eq!(find(&store, "lk_x", NOW), Found::Unknown);
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
}

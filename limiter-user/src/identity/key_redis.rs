//! Changes of the key store in Redis, and a look at all of it, for the command line.
//!
//! Each change is one script call, so hosts that change keys at the same time lose nothing of each other. Keys are made
//! and hashed here: neither a key nor the secret ever goes to Redis.

use std::{path::Path, sync::Arc, time::Duration};

use limiter_common::time::UnixMicros;

use super::{
    api_key::{KeySecret, RandomError, id_from_hex, id_to_hex, random_digits},
    entries::Entries,
    key_file::{KeyEntry, KeyStore, NewKey, end_of_grace, make_secret, new_client},
    key_record::{KeyRecord, seconds, written},
};
use crate::{
    config::{ConfigErrors, Origin},
    store::{
        ApiKeyId, StoreError,
        redis::{KeyChange, KeyCondition, KeyRefusal, MergedKey, RedisConfig, RedisConfigError, RedisKeys},
    },
};

/// An operator waits longer than a request.
const PATIENCE: Duration = Duration::from_secs(5);
/// Entries of one reply: a script call of about a millisecond.
pub(super) const PAGE: usize = 500;

/// Why keys were not changed or listed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyStoreError {
    /// Something is wrong here, or with what was asked.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    #[error("{0}: start Redis, or correct store.redis; \"limiter doctor\" says what is wrong")]
    Store(#[from] StoreError),
    #[error("store.redis.urls: {0}")]
    Address(#[from] RedisConfigError),
    #[error(transparent)]
    Random(#[from] RandomError),
}

/// The keys as they are, and how many records cannot be read.
#[derive(Debug)]
#[non_exhaustive]
pub struct Listed {
    pub keys: KeyStore,
    /// Whether there is a store at all.
    pub exists: bool,
    /// Tells which secret the keys are hashed with.
    pub secret: Option<String>,
    /// Ids of records that are unreadable, and why.
    pub unreadable: Vec<(String, String)>,
}

impl Listed {
    /// What keeps keys from being recognised on a host with this secret.
    pub fn hindrances(&self, secret_file: &Path, secret: Option<&KeySecret>) -> Vec<String> {
        let mut found: Vec<_> = self
            .unreadable
            .iter()
            .map(|(id, error)| format!("the key {} is left out: {error}", known_id(id).map_or("?", |_| id)))
            .collect();
        let file = secret_file.display();
        match (&self.secret, secret.map(KeySecret::fingerprint)) {
            (Some(theirs), Some(own)) if *theirs != own => found.push(format!(
                "the keys in Redis are hashed with another secret than {file}: copy it from a node that has it"
            )),
            (Some(_), None) => found.push(format!(
                "{file} is missing, and the keys in Redis are hashed with it: copy it from a node that has it"
            )),
            (Some(_), Some(_)) | (None, _) => {}
        }
        found
    }
}

/// The key store as commands use it.
#[derive(Debug)]
pub struct KeyAdmin {
    redis: RedisKeys,
}

impl KeyAdmin {
    pub fn connect(config: &RedisConfig) -> Result<Self, KeyStoreError> {
        Ok(Self { redis: RedisKeys::connect(config)? })
    }

    /// Address without credentials.
    pub fn name(&self) -> &str {
        self.redis.name()
    }

    fn refused(&self, message: impl Into<String>) -> KeyStoreError {
        ConfigErrors::of_redis(self.name(), message).into()
    }

    /// As [`super::key_file::add`].
    pub async fn add(
        &self,
        secret_file: &Path,
        client: Option<Arc<str>>,
        plan: Option<&str>,
        created: UnixMicros,
    ) -> Result<NewKey, KeyStoreError> {
        let secret = match KeySecret::load(secret_file)? {
            Some(secret) => secret,
            None if self.redis.page(0, 1, PATIENCE).await?.count == 0 => make_secret(secret_file)?,
            None => return Err(self.no_secret(secret_file)),
        };
        let client = match client {
            Some(client) => client,
            None => new_client()?,
        };
        let new = NewKey::make(&secret, client)?;
        let change = addition(&new, plan, created);
        self.merge(secret_file, Some(&secret), created, &[change]).await?;
        Ok(new)
    }

    /// As [`super::key_file::disable`].
    pub async fn disable(&self, id: ApiKeyId, now: UnixMicros) -> Result<bool, KeyStoreError> {
        let record = KeyRecord { disabled: true, ..KeyRecord::default() }.to_json();
        let change = KeyChange { condition: KeyCondition::Known, id: id_to_hex(id), record };
        let merged = self.merge(Path::new(""), None, now, &[change]).await?;
        Ok(merged.iter().any(|key| key.changed))
    }

    /// As [`super::key_file::rotate`].
    pub async fn rotate(
        &self,
        secret_file: &Path,
        id: ApiKeyId,
        grace: Duration,
        now: UnixMicros,
    ) -> Result<(NewKey, UnixMicros), KeyStoreError> {
        let hex = id_to_hex(id);
        let secret = KeySecret::load(secret_file)?.ok_or_else(|| self.no_secret(secret_file))?;
        let Some(json) = self.redis.record(&hex, PATIENCE).await? else { return Err(self.missing(&hex)) };
        // A key's client and plan never change.
        let old = KeyRecord::parse(&hex, &json, &Origin::Redis(self.name().into()))
            .map_err(|error| self.refused(format!("the key {hex} cannot be replaced: {error}")))?;
        let new = NewKey::make(&secret, old.client.clone())?;
        let end = end_of_grace(now, grace, old.expires);
        let record = KeyRecord { expires: Some(seconds(end)), ..KeyRecord::default() }.to_json();
        let ending = KeyChange { condition: KeyCondition::Valid, id: hex.clone(), record };
        let changes = [ending, addition(&new, old.plan.as_deref(), now)];
        let merged = self.merge(secret_file, Some(&secret), now, &changes).await?;
        // Somebody else may have given it an earlier end meanwhile.
        let record = merged.first().and_then(|key| serde_json::from_str::<KeyRecord>(&key.record).ok());
        let end = record.and_then(|record| record.expires).map_or(end, |at| UnixMicros::new(at * 1_000_000));
        Ok((new, end))
    }

    /// Puts keys of a file into the store, as they are: whoever has one goes on with it. Returns how many changed
    /// anything. Keys that are known already only move towards their end, so a second time changes nothing.
    pub async fn import(&self, secret_file: &Path, keys: &KeyStore, now: UnixMicros) -> Result<usize, KeyStoreError> {
        let secret = KeySecret::load(secret_file)?.ok_or_else(|| self.no_secret(secret_file))?;
        let change = |entry: &&KeyEntry| {
            let (id, record) = written(entry);
            KeyChange { condition: KeyCondition::Any, id, record }
        };
        let changes: Vec<KeyChange> = keys.entries().iter().map(change).collect();
        let mut changed = 0;
        for page in changes.chunks(PAGE) {
            let merged = self.merge(secret_file, Some(&secret), now, page).await?;
            changed += merged.iter().filter(|key| key.changed).count();
        }
        Ok(changed)
    }

    pub async fn list(&self) -> Result<Listed, KeyStoreError> {
        let origin = Origin::Redis(self.name().into());
        let (mut entries, mut unreadable, mut position) = (Entries::default(), Vec::new(), 0);
        loop {
            let page = self.redis.page(position, PAGE, PATIENCE).await?;
            let is_last = page.entries.len() < PAGE;
            for stored in page.entries {
                position = stored.position;
                let Some(record) = stored.record else { continue };
                unreadable.retain(|(id, _)| *id != stored.id);
                match KeyRecord::parse(&stored.id, &record, &origin) {
                    Ok(entry) => entries.insert(entry),
                    Err(error) => unreadable.push((stored.id, error)),
                }
            }
            if is_last {
                let keys = KeyStore::new(None, entries);
                return Ok(Listed { keys, exists: page.epoch.is_some(), secret: page.secret, unreadable });
            }
        }
    }

    async fn merge(
        &self,
        secret_file: &Path,
        secret: Option<&KeySecret>,
        now: UnixMicros,
        changes: &[KeyChange],
    ) -> Result<Vec<MergedKey>, KeyStoreError> {
        let fingerprint = secret.map(KeySecret::fingerprint);
        let epoch = new_epoch()?;
        let merged = self.redis.merge(&epoch, fingerprint.as_deref(), seconds(now), changes, PATIENCE).await?;
        let id = changes.first().map(|change| change.id.as_str()).unwrap_or_default();
        merged.map_err(|refusal| match refusal {
            KeyRefusal::Secret => self.other_secret(secret_file),
            KeyRefusal::Missing => self.missing(id),
            KeyRefusal::Ended => {
                self.refused(format!("the key {id} has ended: make another with \"limiter keys add\""))
            }
            KeyRefusal::Taken => self.refused("a key of this id is there already: try again"),
            KeyRefusal::Unreadable => self.refused(format!(
                "the record of the key {id} is no JSON: remove it (HDEL rl:{{keys}}:entries {id}) and make another key"
            )),
        })
    }

    fn missing(&self, id: &str) -> KeyStoreError {
        self.refused(format!("there is no key {id}: \"limiter keys list\" shows them"))
    }

    fn no_secret(&self, secret_file: &Path) -> KeyStoreError {
        let message = format!(
            "is missing, and Redis at {} has keys that were hashed with it: copy it from a node that has it",
            self.name()
        );
        ConfigErrors::of_file(secret_file, "identity.key_secret_file", message, false).into()
    }

    fn other_secret(&self, secret_file: &Path) -> KeyStoreError {
        let message = format!(
            "is not the secret that the keys in Redis at {} are hashed with: copy it from a node that has it",
            self.name()
        );
        ConfigErrors::of_file(secret_file, "identity.key_secret_file", message, false).into()
    }
}

fn addition(new: &NewKey, plan: Option<&str>, created: UnixMicros) -> KeyChange {
    let record = KeyRecord {
        client: Some(new.client.to_string()),
        plan: plan.map(str::to_owned),
        created: Some(seconds(created)),
        ..KeyRecord::default()
    };
    KeyChange { condition: KeyCondition::New, id: id_to_hex(new.id), record: record.to_json() }
}

/// For a store that begins with this change.
pub(super) fn new_epoch() -> Result<String, RandomError> {
    random_digits(16)
}

/// The id of a key, where it is one.
pub(super) fn known_id(id: &str) -> Option<ApiKeyId> {
    id_from_hex(id)
}

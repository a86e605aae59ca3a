//! The key store in Redis: pages of changes, and changes that take effect as a whole. What a record says is not known here.

use std::time::Duration;

use redis::{Cmd, FromRedisValue, Value, from_redis_value};

use super::{RedisConfig, RedisConfigError, RedisStore, cluster::Call, key::KEY_STORE, script::Script, slot::slot};
use crate::store::StoreError;

/// Records that one `HSCAN` looks at.
const SCANNED: usize = 200;

/// Speaks through a connection of its own, so that pages of keys do not hold up counts.
#[derive(Clone, Debug)]
pub struct RedisKeys {
    store: RedisStore,
    read: std::sync::Arc<Script>,
    merge: std::sync::Arc<Script>,
}

/// Entries that changed behind a position, in the order of their changes.
#[derive(Debug)]
#[non_exhaustive]
pub struct KeyPage {
    /// `None` of a store that nobody has written to.
    pub epoch: Option<String>,
    /// Of the last change.
    pub position: u64,
    /// Of all entries.
    pub count: u64,
    /// Of entries that have a place in the order.
    pub ordered: u64,
    /// What tells whether keys are hashed alike.
    pub secret: Option<String>,
    pub entries: Vec<StoredKey>,
}

#[derive(Debug)]
#[non_exhaustive]
pub struct StoredKey {
    pub id: String,
    pub position: u64,
    /// `None` when somebody took the record away.
    pub record: Option<String>,
}

/// What has to hold of a key before anything changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyCondition {
    Any,
    New,
    Known,
    /// Known, and not ended.
    Valid,
}

impl KeyCondition {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::New => "new",
            Self::Known => "known",
            Self::Valid => "valid",
        }
    }
}

#[derive(Clone, Debug)]
pub struct KeyChange {
    pub condition: KeyCondition,
    pub id: String,
    /// What is known of it, or what is to be added, in JSON.
    pub record: String,
}

#[derive(Debug)]
pub struct MergedKey {
    pub changed: bool,
    /// After the change.
    pub record: String,
}

/// Why nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRefusal {
    /// The keys there are hashed with another secret.
    Secret,
    Missing,
    Ended,
    /// Two keys of one id.
    Taken,
    /// The record there is no JSON.
    Unreadable,
}

impl RedisKeys {
    /// As [`RedisStore::connect`].
    pub fn connect(config: &RedisConfig) -> Result<Self, RedisConfigError> {
        let store = RedisStore::connect(config)?;
        Ok(Self { store, read: Script::keys_read().into(), merge: Script::keys_merge().into() })
    }

    /// Address without credentials.
    pub fn name(&self) -> &str {
        self.store.name()
    }

    /// Changes with every new connection.
    pub fn generation(&self) -> u64 {
        self.store.generation()
    }

    /// At most `limit` entries that changed behind `position`.
    pub async fn page(&self, position: u64, limit: usize, deadline: Duration) -> Result<KeyPage, StoreError> {
        const OPERATION: &str = "read API keys";
        let mut call = with_names(&self.read);
        call.arg(position).arg(limit);
        let reply = self.call(OPERATION, &self.read, call, deadline).await?;
        page(reply).map_err(|misfit| self.store.bad_reply(OPERATION, misfit))
    }

    /// Merges what `changes` say into what is there, all of it or nothing. `epoch` is for a store that has none, `secret`
    /// tells how the keys are hashed where any is added.
    pub async fn merge(
        &self,
        epoch: &str,
        secret: Option<&str>,
        now_s: u64,
        changes: &[KeyChange],
        deadline: Duration,
    ) -> Result<Result<Vec<MergedKey>, KeyRefusal>, StoreError> {
        const OPERATION: &str = "change API keys";
        let mut call = with_names(&self.merge);
        call.arg(epoch).arg(secret.unwrap_or_default()).arg(now_s);
        for change in changes {
            call.arg(change.condition.as_str()).arg(&change.id).arg(&change.record);
        }
        let reply = self.call(OPERATION, &self.merge, call, deadline).await?;
        merged(reply, changes.len()).map_err(|misfit| self.store.bad_reply(OPERATION, misfit))
    }

    /// The record of one key.
    pub async fn record(&self, id: &str, deadline: Duration) -> Result<Option<String>, StoreError> {
        const OPERATION: &str = "read an API key";
        let mut call = redis::cmd("HGET");
        call.arg(KEY_STORE[0]).arg(id);
        let reply = self.store.single_at(OPERATION, key_slot(), call, deadline).await?;
        from_redis_value(reply).map_err(|error| self.store.bad_reply(OPERATION, error.to_string()))
    }

    /// Gives every record a place in the order that has none: somebody put it there by hand, or Redis lost the order.
    pub async fn put_in_order(&self, epoch: &str, secret: Option<&str>, deadline: Duration) -> Result<(), StoreError> {
        const OPERATION: &str = "list API keys";
        let misfit = |reason| self.store.bad_reply(OPERATION, reason);
        let mut cursor = 0;
        loop {
            let mut scan = redis::cmd("HSCAN");
            scan.arg(KEY_STORE[0]).arg(cursor).arg("COUNT").arg(SCANNED);
            let reply = self.store.single_at(OPERATION, key_slot(), scan, deadline).await?;
            let (next, found): (u64, Vec<String>) = read(reply).map_err(misfit)?;
            let mut call = with_names(&self.merge);
            call.arg(epoch).arg(secret.unwrap_or_default()).arg(0);
            for id in found.iter().step_by(2) {
                call.arg(KeyCondition::Any.as_str()).arg(id).arg("");
            }
            self.call(OPERATION, &self.merge, call, deadline).await?;
            if next == 0 {
                return Ok(());
            }
            cursor = next;
        }
    }

    async fn call(
        &self,
        operation: &'static str,
        script: &Script,
        call: Cmd,
        deadline: Duration,
    ) -> Result<Value, StoreError> {
        let call = Call { slot: key_slot(), command: call };
        let mut replies = self.store.run(operation, script, vec![call], deadline).await?;
        replies.pop().unwrap_or_else(|| Err(self.store.bad_reply(operation, "no reply".to_owned())))
    }
}

/// All names have one hash tag.
fn key_slot() -> u16 {
    slot(KEY_STORE[0].as_bytes())
}

fn with_names(script: &Script) -> Cmd {
    let mut call = script.call(KEY_STORE.len());
    for name in KEY_STORE {
        call.arg(name);
    }
    call
}

fn read<T: FromRedisValue>(value: Value) -> Result<T, String> {
    from_redis_value(value).map_err(|error| error.to_string())
}

fn some(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

fn page(reply: Value) -> Result<KeyPage, String> {
    let mut values = read::<Vec<Value>>(reply)?.into_iter();
    let mut next = || values.next().ok_or("too short");
    let (epoch, position, count) = (read(next()?)?, read(next()?)?, read(next()?)?);
    let (ordered, secret) = (read(next()?)?, read(next()?)?);
    let mut entries = Vec::with_capacity(values.len() / 3);
    while let Some(id) = values.next() {
        let mut next = || values.next().ok_or("an entry is too short");
        entries.push(StoredKey { id: read(id)?, position: read(next()?)?, record: some(read(next()?)?) });
    }
    Ok(KeyPage { epoch: some(epoch), position, count, ordered, secret: some(secret), entries })
}

fn merged(reply: Value, count: usize) -> Result<Result<Vec<MergedKey>, KeyRefusal>, String> {
    let mut values = read::<Vec<Value>>(reply)?.into_iter();
    let outcome: String = read(values.next().ok_or("empty")?)?;
    let refusal = match outcome.as_str() {
        "ok" => None,
        "secret" => Some(KeyRefusal::Secret),
        "missing" => Some(KeyRefusal::Missing),
        "ended" => Some(KeyRefusal::Ended),
        "taken" => Some(KeyRefusal::Taken),
        "unreadable" => Some(KeyRefusal::Unreadable),
        other => return Err(format!("\"{other}\" is no outcome")),
    };
    if let Some(refusal) = refusal {
        return Ok(Err(refusal));
    }
    let mut keys = Vec::with_capacity(count);
    while let Some(changed) = values.next() {
        let record = read(values.next().ok_or("a key is too short")?)?;
        keys.push(MergedKey { changed: read::<u64>(changed)? == 1, record });
    }
    if keys.len() == count { Ok(Ok(keys)) } else { Err(format!("{} answers to {count} keys", keys.len())) }
}

//! Follows the key store in Redis: all keys are in memory, and what changes there is known here within a second.
//!
//! Each look is one script call that answers with what changed behind the position that is known; a whole pass over the
//! store, in pages, is made at the start, after a new connection, and when the number of keys does not fit.
//!
//! Architecture invariant: no request waits for Redis, and nothing that Redis forgets ends a key. A store that is empty, or
//! older than what this node knows, has been lost: the known keys stay in force and are given back to it. A key goes
//! away only when somebody took it out of a store that is otherwise whole.

mod copy;
mod status;

use std::{collections::BTreeSet, path::PathBuf, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{task::JoinHandle, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;

pub use self::status::{FollowedKeys, FollowedState};
use super::{
    api_key::{KeySecret, RandomError},
    entries::Entries,
    key_copy::Place,
    key_file::{KeyEntry, KeyStore},
    key_record::{KeyRecord, joined, seconds, written},
    key_redis::{PAGE, known_id, new_epoch},
};
use crate::{
    clock::{SharedClock, Stopwatch},
    config::Origin,
    store::{
        StoreError,
        redis::{KeyChange, KeyCondition, KeyPage, KeyRefusal, RedisConfig, RedisConfigError, RedisKeys},
    },
    watch::{Stamp, stamp},
};

/// Between two looks: a change is in force well within a second.
const LOOK: Duration = Duration::from_millis(250);
/// Of one call. Nobody waits for it.
const DEADLINE: Duration = Duration::from_millis(500);
/// Keys given back in one call: a few milliseconds of Redis.
const GIVEN_BACK: usize = 200;
/// Whole passes of one look: what a pass puts right in Redis, the next one finds.
const PASSES: usize = 3;
/// Between two copies on disk, so that many changes do not make many.
const BETWEEN_COPIES: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct KeyFollower {
    redis: RedisKeys,
    origin: Origin,
    secret_file: PathBuf,
    secret_stamp: Stamp,
    secret: Option<KeySecret>,
    copy_file: PathBuf,
    entries: Entries,
    /// What `entries` are of; `None` before the first whole pass.
    place: Option<Place>,
    /// Of the connection at the last look.
    generation: u64,
    /// Position and number of keys in Redis at the end of the last whole pass: another would find nothing else.
    passed: Option<(u64, u64)>,
    unreadable: BTreeSet<String>,
    /// Keys are to be given back to Redis, and not all of them were.
    lost: bool,
    changed: bool,
    status: FollowedKeys,
    copied: Option<Stopwatch>,
    copying: Option<JoinHandle<()>>,
    uncopied: bool,
    said: Said,
}

/// What was logged last, so that it is logged once.
#[derive(Debug, Default)]
struct Said {
    away: bool,
    problem: Option<String>,
    copy: Arc<Mutex<Option<String>>>,
}

/// Who wants to know of changed keys.
pub trait KeyUser: Send {
    fn replace(&mut self, keys: KeyStore);

    /// That keys are known, after a start that did not know them.
    fn known(&mut self);
}

#[derive(Debug, thiserror::Error)]
enum LookError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Redis answers, and this stands in the way.
    #[error("{0}")]
    Problem(String),
    #[error(transparent)]
    Random(#[from] RandomError),
}

impl KeyFollower {
    /// Does not connect yet. `secret` is what the file held.
    pub fn new(
        config: &RedisConfig,
        secret_file: PathBuf,
        secret: Option<KeySecret>,
        copy_file: PathBuf,
    ) -> Result<Self, RedisConfigError> {
        let redis = RedisKeys::connect(config)?;
        let server: Arc<str> = redis.name().into();
        Ok(Self {
            origin: Origin::Redis(Arc::clone(&server)),
            status: FollowedKeys { server, state: Arc::default() },
            redis,
            secret_stamp: stamp(&secret_file),
            secret_file,
            secret,
            copy_file,
            entries: Entries::default(),
            place: None,
            generation: 0,
            passed: None,
            unreadable: BTreeSet::new(),
            lost: false,
            changed: false,
            copied: None,
            copying: None,
            uncopied: false,
            said: Said::default(),
        })
    }

    pub fn status(&self) -> FollowedKeys {
        self.status.clone()
    }

    /// Whether keys are known: from Redis, or from the copy.
    pub fn is_loaded(&self) -> bool {
        self.status.state.lock().loaded
    }

    /// The keys as they are known.
    pub fn keys(&self) -> KeyStore {
        KeyStore::new(self.secret.clone(), self.entries.clone())
    }

    /// Reads the keys from Redis, or from the copy where Redis does not answer or has none. Keys that were hashed with
    /// another secret than this host's are as good as none.
    pub async fn start(&mut self) {
        let looked = self.look().await;
        let is_hindered = matches!(looked, Err(LookError::Problem(_)));
        if (looked.is_err() || self.entries.is_empty()) && !is_hindered {
            self.read_copy();
            if !self.entries.is_empty() {
                tracing::warn!(target: "limiter::api", keys = self.entries.len(), file = %self.copy_file.display(),
                    "Redis has no API keys or does not answer: those of the copy are in force");
            }
        }
        self.conclude(looked);
        self.changed = false;
    }

    /// Follows until `shutdown`.
    pub async fn run(mut self, mut user: impl KeyUser, shutdown: CancellationToken) {
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut was_loaded = self.is_loaded();
        loop {
            tokio::select! {
                _ = looks.tick() => {}
                () = shutdown.cancelled() => break,
            }
            let looked = tokio::select! {
                looked = self.look() => looked,
                () = shutdown.cancelled() => break,
            };
            self.conclude(looked);
            if std::mem::take(&mut self.changed) {
                user.replace(self.keys());
            }
            if !was_loaded && self.is_loaded() {
                was_loaded = true;
                user.known();
            }
            self.copy(BETWEEN_COPIES).await;
        }
        self.copy(Duration::ZERO).await;
        if let Some(copying) = self.copying.take() {
            // It has logged what went wrong.
            drop(copying.await);
        }
    }

    /// Says what a look has come to.
    fn conclude(&mut self, looked: Result<(), LookError>) {
        let (connected, problem) = match looked {
            Ok(()) => (true, None),
            Err(LookError::Store(error)) => {
                if !std::mem::replace(&mut self.said.away, true) {
                    tracing::warn!(target: "limiter::api", %error, keys = self.entries.len(),
                        "API keys cannot be read from Redis: the last known ones stay in force");
                }
                let problem = match error {
                    StoreError::BadReply { .. } => Some(error.to_string()),
                    StoreError::Timeout { .. } | StoreError::Unavailable { .. } => None,
                };
                (false, problem)
            }
            Err(error @ (LookError::Problem(_) | LookError::Random(_))) => (true, Some(error.to_string())),
        };
        if connected && std::mem::take(&mut self.said.away) {
            tracing::info!(target: "limiter::api", "API keys are read from Redis again");
        }
        if problem != self.said.problem {
            if let Some(problem) = problem.as_ref().filter(|_| connected) {
                tracing::error!(target: "limiter::api", problem, "API keys in Redis cannot be used: the last known ones stay in force");
            }
            self.said.problem.clone_from(&problem);
        }
        let mut state = self.status.state.lock();
        state.connected = connected;
        state.loaded |= connected && problem.is_none();
        state.problem = problem;
        state.keys = self.entries.len();
        state.unreadable = self.unreadable.len();
    }

    /// Learns what has changed.
    async fn look(&mut self) -> Result<(), LookError> {
        self.reread_secret()?;
        let behind = self.place.as_ref().map_or(0, |place| place.position);
        let page = self.redis.page(behind, PAGE, DEADLINE).await?;
        self.check_secret(&page)?;
        let generation = self.redis.generation();
        let follows = self.generation == generation
            && !self.lost
            && self.place.as_ref().is_some_and(|place| follows(place, &page));
        if follows && self.catch_up(page).await? {
            return Ok(());
        }
        for _ in 0..PASSES {
            if self.pass().await? {
                self.generation = generation;
                break;
            }
        }
        Ok(())
    }

    fn reread_secret(&mut self) -> Result<(), LookError> {
        let now = stamp(&self.secret_file);
        if now == self.secret_stamp {
            return Ok(());
        }
        match KeySecret::load(&self.secret_file) {
            // A secret that is gone is a mishap, as an empty key file is.
            Ok(None) if self.secret.is_some() => {}
            Ok(secret) => {
                self.secret = secret;
                self.changed = true;
            }
            Err(errors) => return Err(LookError::Problem(errors.to_string())),
        }
        self.secret_stamp = now;
        Ok(())
    }

    /// Keys of another secret would answer 401 to everybody.
    fn check_secret(&self, page: &KeyPage) -> Result<(), LookError> {
        let own = self.secret.as_ref().map(KeySecret::fingerprint);
        let file = self.secret_file.display();
        match (&page.secret, own) {
            (Some(theirs), Some(own)) if *theirs != own => Err(LookError::Problem(format!(
                "they are hashed with another secret than {file}: copy it from a node that has it"
            ))),
            (Some(_), None) => Err(LookError::Problem(format!(
                "{file} is missing, and they are hashed with it: copy it from a node that has it"
            ))),
            (Some(_), Some(_)) | (None, _) => Ok(()),
        }
    }

    /// Applies changes page by page. The answer is whether everything fits afterwards.
    async fn catch_up(&mut self, mut page: KeyPage) -> Result<bool, LookError> {
        loop {
            let is_last = page.entries.len() < PAGE;
            let (count, ordered, position) = (page.count, page.ordered, page.position);
            for stored in page.entries {
                if let Some(place) = &mut self.place {
                    place.position = stored.position;
                }
                let Some(record) = stored.record else { continue };
                if let Some(entry) = self.readable(&stored.id, &record) {
                    self.put(entry);
                }
            }
            if is_last {
                let known = (self.entries.len() + self.unreadable_alone()) as u64;
                return Ok((count == known && ordered >= count) || self.passed == Some((position, count)));
            }
            let Some(place) = self.place.clone() else { return Ok(false) };
            page = self.redis.page(place.position, PAGE, DEADLINE).await?;
            if !follows(&place, &page) {
                return Ok(false);
            }
        }
    }

    fn put(&mut self, entry: KeyEntry) {
        self.entries.insert(entry);
        self.changed = true;
        self.uncopied = true;
    }

    /// Unreadable records of which no earlier, readable one is known.
    fn unreadable_alone(&self) -> usize {
        let alone = |id: &&String| known_id(id).is_none_or(|id| self.entries.get(id).is_none());
        self.unreadable.iter().filter(alone).count()
    }

    fn readable(&mut self, id: &str, record: &str) -> Option<KeyEntry> {
        match KeyRecord::parse(id, record, &self.origin) {
            Ok(entry) => {
                self.unreadable.remove(id);
                Some(entry)
            }
            Err(error) => {
                if self.unreadable.insert(id.to_owned()) {
                    // An id that is none may be a key that somebody put there.
                    let id = known_id(id).map_or("?", |_| id);
                    tracing::error!(target: "limiter::api", id, error, "a record of the key store in Redis is left out");
                }
                None
            }
        }
    }

    /// Reads everything, and tells what somebody took away from what Redis has lost. The answer is whether all is in order;
    /// otherwise what was not has been put right as far as this node can, and another pass is due.
    async fn pass(&mut self) -> Result<bool, LookError> {
        let (mut seen, mut listed) = (Entries::default(), BTreeSet::new());
        let mut place: Option<Place> = None;
        let last = loop {
            let page = self.redis.page(place.as_ref().map_or(0, |place| place.position), PAGE, DEADLINE).await?;
            self.check_secret(&page)?;
            if let Some(place) = place.as_ref().filter(|place| !follows(place, &page)) {
                return Err(LookError::Problem(format!(
                    "the store began anew while it was read, at {}",
                    place.position
                )));
            }
            let is_last = page.entries.len() < PAGE;
            let epoch = page.epoch.clone().unwrap_or_default();
            let position = page.entries.last().map_or(page.position, |stored| stored.position);
            for stored in &page.entries {
                let Some(record) = &stored.record else { continue };
                match self.readable(&stored.id, record) {
                    Some(entry) => seen.insert(entry),
                    None => drop(listed.insert(stored.id.clone())),
                }
            }
            place = Some(Place { epoch, position });
            if is_last {
                break page;
            }
        };
        self.unreadable.retain(|id| listed.contains(id));
        let is_whole = last.epoch.is_some() && last.count > 0 && (seen.len() + listed.len()) as u64 == last.count;
        let is_newer = self.place.as_ref().is_none_or(|known| follows(known, &last));
        let missing = if is_whole && is_newer && !self.lost { Vec::new() } else { missing(&self.entries, &seen) };
        for id in listed.iter().filter_map(|id| known_id(id)) {
            // Better what was last known of it than nothing.
            if let Some(entry) = self.entries.get(id) {
                seen.insert(entry.clone());
            }
        }
        for entry in &missing {
            seen.insert(entry.clone());
        }
        self.replace(seen);
        let is_nameless = last.epoch.is_none() && last.count > 0;
        if missing.is_empty() && !is_nameless {
            self.place = place.filter(|place| !place.epoch.is_empty());
            self.lost = false;
            let passed = Some((last.position, last.count));
            if last.ordered < last.count && std::mem::replace(&mut self.passed, passed) != passed {
                self.put_in_order().await?;
                return Ok(false);
            }
            self.passed = passed;
            return Ok(true);
        }
        if !std::mem::replace(&mut self.lost, true) {
            self.status.state.lock().losses += 1;
            tracing::warn!(target: "limiter::api", lost = missing.len(), known = self.entries.len(),
                "Redis has lost API keys: the known ones stay in force, and are given back to it");
        }
        self.give_back(&missing).await?;
        self.lost = false;
        self.place = None;
        Ok(false)
    }

    async fn put_in_order(&mut self) -> Result<(), LookError> {
        let secret = self.secret.as_ref().map(KeySecret::fingerprint);
        tracing::warn!(target: "limiter::api", "API keys in Redis have no place in its order of changes: giving them one");
        Ok(self.redis.put_in_order(&new_epoch()?, secret.as_deref(), DEADLINE).await?)
    }

    fn replace(&mut self, entries: Entries) {
        let is_same = entries.len() == self.entries.len()
            && entries
                .iter()
                .all(|entry| self.entries.get(entry.id).is_some_and(|known| written(known) == written(entry)));
        if !is_same {
            self.entries = entries;
            self.changed = true;
        }
        self.uncopied |= !is_same;
    }

    async fn give_back(&mut self, missing: &[KeyEntry]) -> Result<(), LookError> {
        let secret = self.secret.as_ref().map(KeySecret::fingerprint);
        let epoch = new_epoch()?;
        let now_s = seconds(SharedClock::new().local());
        // A store that has only lost its name gets one.
        let entries_of_calls = missing.chunks(GIVEN_BACK).chain(missing.is_empty().then_some(missing));
        for entries in entries_of_calls {
            let changes: Vec<_> = entries
                .iter()
                .map(|entry| {
                    let (id, record) = written(entry);
                    KeyChange { condition: KeyCondition::Any, id, record }
                })
                .collect();
            match self.redis.merge(&epoch, secret.as_deref(), now_s, &changes, DEADLINE).await? {
                Ok(_) => {}
                Err(KeyRefusal::Secret) => {
                    return Err(LookError::Problem("they are hashed with another secret than this host's".into()));
                }
                Err(refusal) => return Err(LookError::Problem(format!("known keys are refused: {refusal:?}"))),
            }
        }
        tracing::info!(target: "limiter::api", keys = missing.len(), "Redis has the lost API keys again");
        Ok(())
    }
}

/// Whether a page is of the store that `place` is of, and not of an older state of it.
fn follows(place: &Place, page: &KeyPage) -> bool {
    page.epoch.as_deref() == Some(&*place.epoch) && page.position >= place.position
}

/// What `seen` does not have of `known`, together with what it has.
fn missing(known: &Entries, seen: &Entries) -> Vec<KeyEntry> {
    let missing = |entry: &KeyEntry| match seen.get(entry.id) {
        None => Some(entry.clone()),
        Some(stored) => {
            let both = joined(stored.clone(), entry);
            (written(&both) != written(stored)).then_some(both)
        }
    };
    known.iter().filter_map(missing).collect()
}

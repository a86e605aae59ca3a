//! Units that this node has taken from shared counters ahead of their use, so that requests need not ask.
//!
//! What is lent is counted in Redis before it is used. It belongs to the window that Redis counted it in and is used in no
//! other; what is not used goes back: when the key is idle, when the window is over, and when the node stops. A node that dies
//! leaves what it held counted as used until the window is over.
//!
//! Architecture invariant: at most one question about a counter is under way, however many requests wait for its answer, and
//! nobody waits longer than their own deadline; the answer is of use to those who come later all the same.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use foldhash::fast::FixedState;
use limiter_common::time::UnixMicros;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use tokio::{sync::watch, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use self::{
    holding::{Holding, Terms},
    stats::Counts,
};
pub use self::{
    holding::{Lent, Statement, Take},
    stats::LeaseStats,
};
use super::{AsCell as _, Cell, CellOutcome, CellRef, CounterKey, StoreError, algorithm::View, redis::RedisStore};
use crate::clock::{SharedClock, Stopwatch};

mod holding;
mod stats;

/// Enough that two cores rarely want the same lock.
const SHARDS: usize = 64;
/// Of one shard. Beyond, a request is decided by Redis.
const MAX_OF_SHARD: usize = 4096;
/// From here on a shard gives up what nobody has used for longest, so that there is room for who comes.
const CROWDED: usize = MAX_OF_SHARD / 4 * 3;
/// How often holdings are looked at that may be too large.
const LOOK: Duration = Duration::from_millis(250);
/// Statements in one pipeline.
const BATCH: usize = 512;
/// Holdings of one look that are told again only because there was no answer, or another server may be there.
const MOST_AGAIN: usize = 8 * BATCH;
/// How often a node that stops gives back what it holds, as long as it gets no answer, and for how long at most.
const MOST_GOODBYES: usize = 3;
const GOODBYES_WITHIN: Duration = Duration::from_secs(2);
/// How long a question may take. Requests do not wait so long.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// Questions in a row that failed, and the time without an answer, after which Redis is taken to be away: one that is lost or
/// late is no reason to use what nobody has counted. Where there is a breaker, it knows sooner.
const FAILURES_UNTIL_AWAY: u64 = 5;
const AWAY_AFTER: Duration = Duration::from_secs(3);
/// Requests that wait in vain for one answer are one failure in this time, and another one after it.
const LATE_EVERY_US: u64 = 50_000;

#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LeaseConfig {
    /// For so long a holding should last.
    pub horizon: Duration,
    /// Between two questions about a counter that has less than is wanted.
    pub spacing: Duration,
    /// After this time a counter that is spent is asked about again.
    pub look_again: Duration,
    /// Questions whose answers nobody waits for are gathered for so long, and go as one message.
    pub gather: Duration,
}

impl LeaseConfig {
    /// Asks about a counter at its ceiling as often as others are shared.
    pub fn with_sync_interval(sync_interval: Duration) -> Self {
        let (horizon, look_again) = (Duration::from_millis(500), Duration::from_millis(250));
        Self { horizon, spacing: sync_interval, look_again, gather: sync_interval / 2 }
    }
}

/// Cheap to clone; all clones share what is held.
#[derive(Clone)]
pub struct Leases(Arc<Inner>);

struct Inner {
    redis: RedisStore,
    clock: Arc<SharedClock>,
    terms: Terms,
    shards: Box<[Mutex<Shard>]>,
    random: RandomState,
    /// Of the next message, and of the next holding.
    number: AtomicU64,
    counts: Counts,
    health: Mutex<Health>,
    gather: Duration,
    /// Of counters of which little is left.
    gathered: Mutex<Vec<Low>>,
}

/// A counter that is to be asked about, and what it must be lent to be of use.
#[derive(Debug)]
struct Low {
    hash: u64,
    key: CounterKey,
    need: u64,
}

/// How a question ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Whoever waited has to look again: others have waited as well.
    Answered,
    Unanswered,
    /// Nothing can be held of another counter.
    NoRoom,
}

/// What the last look saw of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// Of connections.
    generation: u64,
    losses: u64,
}

type UnderWay = watch::Receiver<bool>;

#[derive(Debug, Default)]
struct Health {
    failures: u64,
    /// Since the last answer, or the first failure.
    since: Option<Stopwatch>,
}

#[derive(Default)]
struct Shard {
    /// By hash; several of one hash are as good as never.
    leases: HashMap<u64, SmallVec<[Lease; 1]>, FixedState>,
    len: usize,
}

struct Lease {
    key: CounterKey,
    holding: Holding,
    /// Ends with the question that is under way, and says whether it was answered.
    under_way: Option<UnderWay>,
    /// A question about it is to be sent soon.
    is_gathered: bool,
    /// When a request last gave up waiting.
    late_us: u64,
}

impl std::fmt::Debug for Leases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leases").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Shard {
    fn get(&mut self, hash: u64, cell: &CellRef<'_>) -> Option<&mut Lease> {
        self.leases.get_mut(&hash)?.iter_mut().find(|lease| cell.is_of(&lease.key))
    }

    fn find(&mut self, hash: u64, key: &CounterKey) -> Option<&mut Lease> {
        self.leases.get_mut(&hash)?.iter_mut().find(|lease| lease.key == *key)
    }

    /// Begins one, if there is room.
    fn begin(&mut self, hash: u64, lease: Lease) -> bool {
        if self.len >= MAX_OF_SHARD {
            return false;
        }
        let same_hash = self.leases.entry(hash).or_default();
        let before = same_hash.len();
        same_hash.retain(|other| other.key != lease.key);
        same_hash.push(lease);
        self.len += same_hash.len() - before;
        true
    }
}

impl Leases {
    /// `clock` measures time, and says nothing of windows: those are Redis'.
    pub fn new(redis: RedisStore, clock: Arc<SharedClock>, config: LeaseConfig) -> Self {
        let us = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let terms = Terms {
            horizon_us: us(config.horizon),
            spacing_us: us(config.spacing),
            look_again_us: us(config.look_again),
            gather_us: us(config.gather),
        };
        Self(Arc::new(Inner {
            redis,
            clock,
            terms,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            random: RandomState::new(),
            number: AtomicU64::new(1),
            counts: Counts::default(),
            health: Mutex::default(),
            gather: config.gather,
            gathered: Mutex::default(),
        }))
    }

    /// Who lends.
    pub fn store(&self) -> &RedisStore {
        &self.0.redis
    }

    pub fn stats(&self) -> LeaseStats {
        self.0.counts.snapshot()
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        let shard = usize::try_from(hash >> 58).unwrap_or(0) % SHARDS;
        self.0.shards[shard].lock()
    }

    fn local_us(&self) -> u64 {
        self.0.clock.local().get()
    }

    /// Takes the cost of a cell out of what is held; asks for more in the background when little is left.
    pub fn take(&self, cell: &CellRef<'_>) -> Take {
        let (hash, local_us) = (cell.hash(), self.local_us());
        let mut shard = self.shard(hash);
        let Some(lease) = shard.get(hash, cell) else { return Take::Unknown };
        if !lease.holding.is_of(&cell.algorithm) {
            return Take::Unknown;
        }
        let take = lease.holding.take(&cell.algorithm, cell.cost, local_us, &self.0.terms);
        let refill = match take {
            Take::Taken { is_low, .. } => is_low,
            Take::Refused { is_old, .. } => is_old,
            Take::Unknown => false,
        };
        if refill && lease.under_way().is_none() && !lease.is_gathered {
            let need = if matches!(take, Take::Refused { .. }) { cell.cost } else { 0 };
            lease.is_gathered = true;
            self.gather(Low { hash, key: lease.key.clone(), need });
        }
        drop(shard);
        match take {
            Take::Taken { .. } => self.0.counts.hit(),
            Take::Refused { .. } => self.0.counts.refused(),
            Take::Unknown => {}
        }
        take
    }

    /// Whether a request of this cost has to wait for Redis.
    pub fn lacks(&self, cell: &CellRef<'_>) -> bool {
        let (hash, local_us) = (cell.hash(), self.local_us());
        let mut shard = self.shard(hash);
        let lease = shard.get(hash, cell).filter(|lease| lease.holding.is_of(&cell.algorithm));
        lease.is_none_or(|lease| lease.holding.lacks(cell.cost, local_us))
    }

    /// Gives back what a request took in the window of this index and was not allowed to use.
    pub fn put_back(&self, cell: &CellRef<'_>, index: u64) {
        let hash = cell.hash();
        if let Some(lease) = self.shard(hash).get(hash, cell) {
            lease.holding.put_back(index, cell.cost);
        }
    }

    /// Gives back what this node's requests have used, at most.
    pub fn refund(&self, cell: &CellRef<'_>) -> Option<CellOutcome> {
        let (hash, local_us) = (cell.hash(), self.local_us());
        let mut shard = self.shard(hash);
        let lease = shard.get(hash, cell)?;
        lease.holding.refund(cell.cost);
        lease.holding.peek(0, local_us)
    }

    /// What a request would be told, as far as that is known here.
    pub fn peek(&self, cell: &CellRef<'_>) -> Option<CellOutcome> {
        let (hash, local_us) = (cell.hash(), self.local_us());
        let mut shard = self.shard(hash);
        let lease = shard.get(hash, cell).filter(|lease| lease.holding.is_of(&cell.algorithm))?;
        lease.holding.peek(cell.cost, local_us)
    }

    /// What the counter stands for by what Redis said last, and Redis' time.
    pub fn known(&self, cell: &CellRef<'_>) -> Option<(View, UnixMicros)> {
        let (hash, local_us) = (cell.hash(), self.local_us());
        let mut shard = self.shard(hash);
        let (view, now_us) = shard.get(hash, cell)?.holding.known(local_us)?;
        Some((view, UnixMicros::new(now_us)))
    }

    /// Waits until the question about this counter has ended, for `deadline` at most; asks it if nobody does.
    pub async fn ask(&self, cell: &Cell, deadline: Duration) -> Asked {
        let Some(mut ended) = self.join(&cell.as_cell()) else { return Asked::NoRoom };
        self.0.counts.missed();
        let answered = tokio::time::timeout(deadline, ended.wait_for(|answered| *answered)).await;
        match answered {
            Ok(Ok(_)) => Asked::Answered,
            // The question ended without an answer.
            Ok(Err(_)) => Asked::Unanswered,
            Err(_elapsed) => {
                self.waited_in_vain(&cell.as_cell());
                Asked::Unanswered
            }
        }
    }

    /// The answer may still come, and is of use to those who come later. But a server that is too slow for requests is to be
    /// left alone by them as one that fails, or clients would be refused for as long as it is slow.
    fn waited_in_vain(&self, cell: &CellRef<'_>) {
        let (hash, local_us) = (cell.hash(), self.local_us());
        let is_news = self.shard(hash).get(hash, cell).is_none_or(|lease| {
            let is_news = local_us >= lease.late_us.saturating_add(LATE_EVERY_US);
            lease.late_us = if is_news { local_us } else { lease.late_us };
            is_news
        });
        if is_news {
            self.0.redis.was_late(&cell.identity);
        }
    }

    fn join(&self, cell: &CellRef<'_>) -> Option<watch::Receiver<bool>> {
        let (hash, local_us) = (cell.hash(), self.local_us());
        let mut shard = self.shard(hash);
        let is_current = shard.get(hash, cell).is_some_and(|lease| lease.holding.is_of(&cell.algorithm));
        if !is_current {
            // Another window is another holding: what is held of the old one stays counted until that is over.
            let number = self.0.number.fetch_add(1, Ordering::Relaxed);
            let tag = u32::try_from(self.0.random.hash_one(number) >> 32).unwrap_or(0);
            let lease = Lease {
                key: cell.key(),
                holding: Holding::new(tag, cell.algorithm),
                under_way: None,
                is_gathered: false,
                late_us: 0,
            };
            if !shard.begin(hash, lease) {
                return None;
            }
        }
        let lease = shard.get(hash, cell)?;
        if let Some(under_way) = lease.under_way() {
            return Some(under_way.clone());
        }
        Some(self.send(lease, cell.cost, local_us))
    }

    /// Asks in the background, at once.
    fn send(&self, lease: &mut Lease, need: u64, local_us: u64) -> watch::Receiver<bool> {
        let (statement, ended) = self.begin(lease, need, local_us);
        let under_way = ended.subscribe();
        let (leases, key) = (self.clone(), lease.key.clone());
        tokio::spawn(async move {
            let answered = leases.exchange(&[(key, statement)]).await;
            ended.send_replace(answered);
        });
        under_way
    }

    /// What to ask about a counter, from now on under way, and what ends that.
    fn begin(&self, lease: &mut Lease, need: u64, local_us: u64) -> (Statement, watch::Sender<bool>) {
        self.0.counts.expired(lease.holding.expired(local_us));
        let (ended, under_way) = watch::channel(false);
        lease.under_way = Some(under_way);
        (lease.holding.ask(need, local_us, &self.0.terms), ended)
    }

    /// Asks soon, together with others.
    fn gather(&self, low: Low) {
        let mut gathered = self.0.gathered.lock();
        gathered.push(low);
        if gathered.len() == 1 {
            let leases = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(leases.0.gather).await;
                leases.send_gathered();
            });
        }
    }

    /// A message to each server, so that one which does not answer keeps nobody waiting for the others.
    fn send_gathered(&self) {
        let gathered = std::mem::take(&mut *self.0.gathered.lock());
        let local_us = self.local_us();
        let mut by_server: HashMap<_, (Vec<_>, Vec<_>)> = HashMap::new();
        for Low { hash, key, need } in gathered {
            let mut shard = self.shard(hash);
            let Some(lease) = shard.find(hash, &key) else { continue };
            lease.is_gathered = false;
            // A request that could not wait has asked meanwhile.
            if lease.under_way().is_some() {
                continue;
            }
            let (statement, ended) = self.begin(lease, need, local_us);
            drop(shard);
            let (statements, ends) = by_server.entry(self.0.redis.server_of(&key.identity.borrowed())).or_default();
            statements.push((key, statement));
            ends.push(ended);
        }
        for (statements, ends) in by_server.into_values() {
            let leases = self.clone();
            tokio::spawn(async move { leases.exchange_all(&statements, &ends).await });
        }
    }

    /// In messages of a size that Redis is not kept busy by for long.
    async fn exchange_all(&self, statements: &[(CounterKey, Statement)], ended: &[watch::Sender<bool>]) {
        for (batch, ended) in statements.chunks(BATCH).zip(ended.chunks(BATCH)) {
            let answered = self.exchange(batch).await;
            // Whoever waits meanwhile looks again.
            for sender in ended {
                sender.send_replace(answered);
            }
        }
    }

    /// Tells Redis, and takes what it answers; returns whether it has answered all. Of each counter, `under_way` must be set.
    async fn exchange(&self, statements: &[(CounterKey, Statement)]) -> bool {
        let number = self.0.number.fetch_add(1, Ordering::Relaxed);
        let sent_us = self.local_us();
        let result = self.0.redis.lend(number, self.0.redis.fleet().reckoned(), statements, ANSWER_WITHIN).await;
        let received_us = self.local_us();
        let replies = match result {
            Ok(replies) => replies,
            Err(error) => statements.iter().map(|_| Err(error.clone())).collect(),
        };
        let mut all = true;
        for ((key, statement), reply) in statements.iter().zip(replies) {
            let hash = key.hash();
            // What is only told may be told again and again, and nobody waits for it.
            if reply.is_ok() || statement.want > 0 {
                self.judge_health(&reply);
            }
            all &= reply.is_ok();
            let mut shard = self.shard(hash);
            let Some(lease) = shard.find(hash, key) else { continue };
            lease.under_way = None;
            if let Ok(lent) = reply {
                lease.holding.lent(statement, &lent, sent_us, received_us, &self.0.terms);
                self.0.counts.lent(lent.granted);
            }
        }
        all
    }

    fn judge_health(&self, reply: &Result<Lent, StoreError>) {
        let mut health = self.0.health.lock();
        match reply {
            Ok(_) => *health = Health { failures: 0, since: Some(Stopwatch::start()) },
            Err(error) => {
                health.failures += 1;
                health.since.get_or_insert_with(Stopwatch::start);
                let failures = health.failures;
                drop(health);
                tracing::debug!(target: "limiter::store", %error, failures, "a question about a lease failed");
            }
        }
    }

    /// Whether Redis has not answered for some time, though it was asked.
    pub fn is_away(&self) -> bool {
        let health = self.0.health.lock();
        health.failures >= FAILURES_UNTIL_AWAY && health.since.is_some_and(|since| since.elapsed() >= AWAY_AFTER)
    }

    /// Gives back what is not used, until `shutdown`, and then all of it, for two seconds at most.
    pub async fn run(self, shutdown: CancellationToken) {
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut seen = Seen::default();
        let looking = async {
            loop {
                looks.tick().await;
                self.give_back(false, &mut seen).await;
            }
        };
        // One that is under way is cut off: what it had told may not have arrived, and is told again.
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = looking => {}
        }
        let goodbyes = async {
            // What is not heard is said again.
            for _ in 0..MOST_GOODBYES {
                self.give_back(true, &mut seen).await;
            }
        };
        if tokio::time::timeout(GOODBYES_WITHIN, goodbyes).await.is_err() {
            tracing::warn!(
                target: "limiter::store",
                redis = self.0.redis.name(),
                "stopped before this Redis has answered: what was lent to this node and not used counts until its windows are over"
            );
        }
    }

    /// Gives back what is too much, or all.
    async fn give_back(&self, everything: bool, seen: &mut Seen) {
        let local_us = self.local_us();
        let mut statements = Vec::new();
        let mut ended = Vec::new();
        // While Redis is away, nothing that is told arrives: a part of it is enough to try.
        let most_again = if self.is_away() { BATCH } else { MOST_AGAIN };
        let mut again = 0;
        // Another connection may lead to another server, or to one that has lost what it was told.
        let now = Seen { generation: self.0.redis.generation(), losses: self.0.redis.losses() };
        let is_other = std::mem::replace(seen, now) != now;
        for shard in &self.0.shards {
            let mut shard = shard.lock();
            shard.forget(local_us);
            for lease in shard.leases.values_mut().flatten() {
                let look = lease.holding.look(local_us);
                if is_other {
                    lease.holding.doubt();
                }
                if lease.under_way().is_some() {
                    continue;
                }
                let keep = if everything { Some(0) } else { look };
                let (left, expired) = (lease.holding.left(local_us), lease.holding.expired(local_us));
                let says_again = lease.holding.is_untold()
                    && again < most_again
                    && self.0.redis.outage(&lease.key.identity.borrowed()).is_none();
                again += usize::from(says_again);
                let keep = keep.filter(|keep| expired > 0 || left > *keep).or(says_again.then_some(left));
                let Some(keep) = keep else { continue };
                self.0.counts.expired(expired);
                self.0.counts.returned(left.saturating_sub(keep));
                statements.push((lease.key.clone(), lease.holding.release(keep, local_us)));
                let (sender, receiver) = watch::channel(false);
                lease.under_way = Some(receiver);
                ended.push(sender);
            }
        }
        self.exchange_all(&statements, &ended).await;
    }
}

impl Lease {
    /// The question that is under way. One whose task was dropped is none.
    fn under_way(&self) -> Option<&UnderWay> {
        self.under_way.as_ref().filter(|under_way| under_way.has_changed().is_ok())
    }
}

impl Shard {
    /// Forgets holdings whose windows are over for as long as a counter can matter. Until then this node is the one that can
    /// tell what they have used to a store that loses it; only where there is little room, those go as well that nobody has
    /// used for longest, which costs one question when they are used again.
    fn forget(&mut self, local_us: u64) {
        self.retain(|lease| !lease.holding.is_over(local_us));
        let mut surplus = self.len.saturating_sub(CROWDED);
        if surplus == 0 {
            return;
        }
        let idle = |lease: &Lease| lease.holding.idle_looks(local_us).filter(|_| lease.under_way().is_none());
        let mut looks: Vec<u32> = self.leases.values().flatten().filter_map(idle).collect();
        looks.sort_unstable_by(|one, other| other.cmp(one));
        let Some(&longest) = looks.get(surplus.min(looks.len()).saturating_sub(1)) else { return };
        self.retain(|lease| {
            let goes = surplus > 0 && idle(lease).is_some_and(|looks| looks >= longest);
            surplus -= usize::from(goes);
            !goes
        });
    }

    /// Whatever is under way stays.
    fn retain(&mut self, mut stays: impl FnMut(&Lease) -> bool) {
        self.leases.retain(|_, leases| {
            leases.retain(|lease| lease.under_way().is_some() || stays(lease));
            !leases.is_empty()
        });
        self.len = self.leases.values().map(SmallVec::len).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Algorithm, Identity};

    const SECOND: u64 = 1_000_000;
    /// An hour and a half after 1970 by the store's clock and by this host's.
    const NOW: u64 = 5400 * SECOND;

    /// One that has used ten units of an hour's window, and that nobody has used for so many looks.
    fn used(number: u64, looks: u32) -> Lease {
        let algorithm = Algorithm::sliding_window(3600 * SECOND, 1000);
        let mut holding = Holding::new(7, algorithm);
        let terms = Terms { horizon_us: 1, spacing_us: 1, look_again_us: 1, gather_us: 0 };
        let statement = holding.ask(10, NOW, &terms);
        let counts = limiter_common::sliding_window::Counts { index: 1, previous: 0, current: 10 };
        let lent = Lent { now_us: NOW, granted: 10, counts, own_current: 10 };
        holding.lent(&statement, &lent, NOW, NOW, &terms);
        assert!(matches!(holding.take(&algorithm, 10, NOW, &terms), Take::Taken { .. }));
        for _ in 0..=looks {
            holding.look(NOW);
        }
        let key = CounterKey { identity: Identity::User(format!("u{number}").into()), rule: "r".into() };
        Lease { key, holding, under_way: None, is_gathered: false, late_us: 0 }
    }

    fn shard(leases: impl IntoIterator<Item = Lease>) -> Shard {
        let mut shard = Shard::default();
        for lease in leases {
            assert!(shard.begin(lease.key.hash(), lease));
        }
        shard
    }

    #[test]
    fn what_was_used_is_known_until_its_windows_are_over() {
        let mut shard = shard((0..10).map(|number| used(number, 1_000_000)));
        // The window ends after half an hour, and counts for an hour more.
        for (later, left) in [(0, 10), (60, 10), (1800, 10), (5400, 10), (1800 + 2 * 3600, 0)] {
            shard.forget(NOW + later * SECOND);
            assert_eq!((shard.len, shard.leases.len()), (left, left), "after {later} s");
        }
    }

    #[test]
    fn where_there_is_little_room_those_go_that_nobody_has_used_for_longest() {
        let count = CROWDED + 100;
        let looks = |number: usize| if number < 10 { 0 } else { 240 + u32::try_from(number).unwrap() };
        let mut shard = shard((0..count).map(|number| used(number as u64, looks(number))));
        shard.forget(NOW);
        assert_eq!(shard.len, CROWDED);
        let stays = |number: usize| {
            let key = used(number as u64, 0).key;
            shard.leases.get(&key.hash()).is_some_and(|leases| leases.iter().any(|lease| lease.key == key))
        };
        for number in 0..count {
            assert_eq!(stays(number), number < CROWDED, "{number}");
        }
        // Of those that were used a moment ago none goes, and no more come in than there is room for.
        let mut shard = self::shard((0..MAX_OF_SHARD).map(|number| used(number as u64, 10)));
        shard.forget(NOW);
        assert_eq!(shard.len, MAX_OF_SHARD);
        let another = used(MAX_OF_SHARD as u64, 0);
        assert!(!shard.begin(another.key.hash(), another));
    }

    #[test]
    fn what_is_under_way_stays_and_what_was_cut_off_is_not_under_way() {
        let (sender, receiver) = watch::channel(false);
        let mut shard = shard([Lease { under_way: Some(receiver), ..used(1, 0) }]);
        let much_later = NOW + 100 * 3600 * SECOND;
        shard.forget(much_later);
        assert_eq!(shard.len, 1);
        drop(sender);
        shard.forget(much_later);
        assert_eq!(shard.len, 0);
    }
}

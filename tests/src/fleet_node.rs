//! What an agent decides requests with and shares counters by, in this process: several of them are a fleet.

use std::{path::Path, sync::Arc, time::Duration};

use limiter_common::time::UnixMicros;
use limiter_user::{
    active::{Active, SharedActive},
    clock::{Clock, SharedClock},
    config::PressureConfig,
    limiter::{Caller, Decision, Kind, Limiter, Precise, Request, Subject},
    metrics::Metrics,
    policy::{FailurePolicy, Policy, Scratch},
    pressure::Pressure,
    store::{
        Charge, Name,
        lease::{LeaseConfig, Leases},
        memory::MemoryStore,
        redis::{RedisConfig, RedisStore},
        sync::{SyncConfig, SyncState, SyncStatus, SyncWorker},
    },
};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::eventually::eventually;

const WAIT: Duration = Duration::from_secs(30);

pub struct FleetNode {
    pub limiter: Arc<Limiter>,
    pub memory: Arc<MemoryStore>,
    pub leases: Leases,
    pub active: SharedActive,
    pub clock: Arc<SharedClock>,
    pub status: SyncStatus,
    store: RedisStore,
    shutdown: CancellationToken,
    workers: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for FleetNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FleetNode").finish_non_exhaustive()
    }
}

/// A user, as the gateway names one.
pub fn user(name: &str) -> Subject {
    Subject { caller: Caller::User { user: Name::from(name), plan: None }, address: None }
}

impl FleetNode {
    /// # Panics
    ///
    /// When the policy or the address is wrong.
    pub async fn start(policy: &str, redis: &RedisConfig, sync_interval: Duration) -> Self {
        let clock = Arc::new(SharedClock::new());
        let memory = Arc::new(MemoryStore::shared(clock.clone(), 100_000));
        let policy = Policy::parse(Path::new("/policy.toml"), policy).expect("a policy");
        let metrics = Metrics::new();
        let unreported =
            PressureConfig { header: false, interval: Duration::from_secs(1), expires: Duration::from_secs(1) };
        let pressure = Pressure::new(unreported);
        let active = Active::derive(policy, &[], &metrics, &pressure, UnixMicros::new(0)).share();
        let store = RedisStore::connect(redis).expect("an address");
        let requests = store.connect_beside(redis).expect("an address");
        let terms = LeaseConfig::with_sync_interval(sync_interval);
        let leases = Leases::new(requests.clone(), clock.clone(), terms);
        let probed = requests.clone();
        let precise = Precise { redis: requests, leases: leases.clone() };
        let window_clock = clock.clone() as Arc<dyn Clock>;
        let prefixes = limiter_common::addr::SrcPrefixes::default();
        let limiter = Limiter::new(active.clone(), memory.clone(), window_clock, prefixes)
            .sharing_through(store.clone())
            .with_precise(precise);
        let mut config = SyncConfig::default();
        config.interval = sync_interval;
        // The machine may be busy; a round that fails for that is not what is tested.
        config.batch_deadline = Duration::from_millis(500);
        let (local, strict) = (active.clone(), active.clone());
        let mut worker = SyncWorker::new(memory.clone(), store.clone(), clock.clone(), config)
            .probing(probed)
            .with_local(Box::new(move |key| local.load().is_local(key)))
            .with_strict(Box::new(move |key| strict.load().is_strict(key)));
        worker.round().await;
        let status = worker.status();
        let shutdown = CancellationToken::new();
        let workers =
            vec![tokio::spawn(worker.run(shutdown.clone())), tokio::spawn(leases.clone().run(shutdown.clone()))];
        Self { limiter: Arc::new(limiter), memory, leases, active, clock, status, store, shutdown, workers }
    }

    /// As the gate does.
    pub async fn decide(&self, subject: &Subject, path: &str, cost: u64, charge: Charge) -> Decision {
        let request = Request { subject, method: "GET", path, also: &[], attributes: &[], cost, charge };
        match self.limiter.decide(&request, &mut Scratch::default()) {
            Some(decision) => decision,
            None => self.limiter.ask(&request).await,
        }
    }

    pub async fn allows(&self, subject: &Subject) -> bool {
        self.decide(subject, "/", 1, Charge::Commit).await.kind == Kind::Allowed
    }

    /// What the rule that decides says is left.
    ///
    /// # Panics
    ///
    /// When no rule applies.
    pub async fn remaining(&self, subject: &Subject) -> u64 {
        let decision = self.decide(subject, "/", 1, Charge::Peek).await;
        decision.answer.expect("a rule applies").remaining
    }

    /// Waits until Redis has confirmed everything that this node has admitted from memory.
    pub async fn until_sent(&self) {
        eventually(WAIT, async || {
            let stats = self.status.get();
            // What is under way is in no queue.
            let is_sent = self.memory.stats().queued == 0 && stats.lag.is_zero();
            if is_sent && stats.state == SyncState::Connected { Ok(()) } else { Err(stats) }
        })
        .await;
    }

    /// Whether every server is asked, by requests and in the background.
    pub fn is_whole(&self) -> bool {
        self.store.is_whole() && self.leases.store().is_whole()
    }

    /// How many requests rules with this name have answered without Redis, whatever they answered.
    ///
    /// # Panics
    ///
    /// When there is no such rule.
    pub fn unanswered(&self, rule: &str) -> u64 {
        let active = self.active.load();
        let index = active.policy.rules.iter().position(|known| &*known.id == rule).expect("a rule of the policy");
        FailurePolicy::ALL.iter().map(|policy| active.metrics[index].failures(*policy)).sum()
    }

    /// Gracefully: everything is handed over.
    ///
    /// # Panics
    ///
    /// When a worker has.
    pub async fn stop(mut self) {
        self.shutdown.cancel();
        for worker in std::mem::take(&mut self.workers) {
            worker.await.expect("a worker");
        }
    }

    /// Without handing over anything.
    pub fn kill(self) {
        drop(self);
    }
}

impl Drop for FleetNode {
    fn drop(&mut self) {
        // A node that nobody has any more must not go on sharing, and be alive to the others of the same server.
        self.workers.iter().for_each(JoinHandle::abort);
    }
}

//! Puts a changed policy in force while the agent runs.
//!
//! The policy changes as a whole or not at all: it is read and checked like at a start, then the data plane exchanges
//! its program, and then everybody else takes the new one at the next look at the one pointer. Counters, buckets and
//! budgets stay as they are.

use std::{sync::Arc, time::Duration};

use ipnet::IpNet;
use tokio::{sync::Notify, task::spawn_blocking, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::{
    active::{Active, SharedActive},
    api::gate::Gate,
    clock::SharedClock,
    config::ConfigErrors,
    dataplane::{Dataplane, DataplaneError, ErrorKind},
    metrics::{Metrics, ReloadResult},
    policy::Policy,
    status::StatusSource,
    watch::FileWatch,
};

/// How often the file is looked at. It is read after two looks that found the same change: within a second, and not
/// while it is being written.
const LOOK: Duration = Duration::from_millis(500);

/// Makes a policy file effective, whenever it has changed or somebody asks.
#[derive(Debug)]
pub struct Reloader {
    pub(crate) watch: FileWatch,
    pub(crate) trusted_proxies: Vec<IpNet>,
    pub(crate) active: SharedActive,
    pub(crate) gate: Arc<Gate>,
    pub(crate) dataplane: Option<Arc<dyn Dataplane>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) status: Arc<StatusSource>,
    pub(crate) clock: Arc<SharedClock>,
    /// Told after each change.
    pub(crate) changed: Arc<Notify>,
}

/// Why a policy was not put in force.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    #[error(transparent)]
    Invalid(#[from] ConfigErrors),
    #[error(transparent)]
    Dataplane(#[from] DataplaneError),
}

impl ReloadError {
    fn result(&self) -> ReloadResult {
        match self {
            Self::Invalid(_) => ReloadResult::Invalid,
            Self::Dataplane(error) if error.kind() == ErrorKind::Configuration => ReloadResult::Invalid,
            Self::Dataplane(_) => ReloadResult::Failed,
        }
    }
}

impl Reloader {
    /// `asked` reloads at once, changed or not.
    pub async fn run(mut self, asked: Arc<Notify>, shutdown: CancellationToken) {
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = looks.tick() => if !self.watch.has_settled() { continue },
                () = asked.notified() => {}
                () = shutdown.cancelled() => return,
            }
            // The kernel checks the program for a while, and a list may be long.
            let reloading = spawn_blocking(move || {
                self.reload();
                self
            });
            match reloading.await {
                Ok(reloader) => self = reloader,
                Err(error) => {
                    tracing::error!(target: "limiter", %error, "reloading has ended: restart the agent");
                    return;
                }
            }
        }
    }

    fn reload(&mut self) {
        self.watch.mark_read();
        let file = self.watch.path().display().to_string();
        let result = match self.put_in_force() {
            Ok(active) => {
                let (rules, packet_rules) = (active.policy.rules.len(), active.policy.packet_rules.len());
                tracing::info!(target: "limiter", file, rules, packet_rules, "the changed policy is in force");
                self.status.set_policy_error(None);
                ReloadResult::Ok
            }
            Err(error) => {
                tracing::error!(target: "limiter", file, %error, "the policy in force stays: the changed one cannot be used");
                self.status.set_policy_error(Some(error.to_string()));
                error.result()
            }
        };
        self.metrics.policy_reloaded(result);
    }

    fn put_in_force(&self) -> Result<Arc<Active>, ReloadError> {
        let policy = Policy::load(self.watch.path())?;
        self.gate.check_plans(&policy)?;
        if let Some(dataplane) = &self.dataplane {
            dataplane.reload(&policy)?;
        }
        let active = Active::derive(policy, &self.trusted_proxies, &self.metrics, self.clock.local());
        let active = Arc::new(active);
        self.active.store(Arc::clone(&active));
        self.changed.notify_one();
        Ok(active)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io, path::Path, sync::atomic::AtomicBool};

    use axum::http::HeaderName;

    use super::*;
    use crate::{
        api::gate::KeyUse,
        clock::Clock,
        config::{Config, Environment},
        dataplane::fake::FakeDataplane,
        host::HostAddresses,
        identity::KeyStore,
        limiter::Limiter,
        push::Pusher,
        store::memory::MemoryStore,
    };

    fn reloader(file: &Path, dataplane: Arc<FakeDataplane>) -> Reloader {
        let config = Config::parse(Path::new("/limiter.toml"), "", Environment::default()).unwrap();
        let clock = Arc::new(SharedClock::new());
        let counters = Arc::new(MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, 1));
        let metrics = Arc::new(Metrics::new());
        let watch = FileWatch::new(file.to_owned());
        let active = Active::derive(Policy::load(file).unwrap(), &[], &metrics, clock.local()).share();
        let dataplane: Option<Arc<dyn Dataplane>> = Some(dataplane);
        let status = StatusSource::new(&config, Arc::clone(&active), Arc::clone(&counters), dataplane.clone(), None);
        let prefixes = config.identity.prefixes;
        let limiter = Limiter::new(Arc::clone(&active), counters, Arc::clone(&clock) as Arc<dyn Clock>, prefixes);
        let key_use =
            KeyUse { enabled: true, header: HeaderName::from_static("x-api-key"), has_file: AtomicBool::new(false) };
        let keys = KeyStore::load(&file.with_extension("keys"), &file.with_extension("secret")).unwrap();
        let pusher = Pusher::disabled(Arc::clone(&metrics));
        let host = Arc::new(HostAddresses::default());
        let gate = Gate::new(limiter, keys, key_use, Vec::new(), host, pusher, Arc::clone(&metrics));
        Reloader {
            watch,
            trusted_proxies: Vec::new(),
            active,
            gate: Arc::new(gate),
            dataplane,
            metrics,
            status: Arc::new(status),
            clock,
            changed: Arc::new(Notify::new()),
        }
    }

    #[test]
    fn what_the_kernel_refuses_is_not_in_force_for_requests_either() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("policy.toml");
        fs::write(&file, "").unwrap();
        let fake = Arc::new(FakeDataplane::default());
        let mut reloader = reloader(&file, Arc::clone(&fake));
        fs::write(&file, "[[rules]]\nid = \"r\"\nscope = \"ip\"\nlimit = 5\nwindow = \"1s\"\n").unwrap();

        let source = Box::new(io::Error::other("out of memory"));
        fake.fail_next(DataplaneError::Load { source });
        reloader.reload();
        assert!(reloader.active.load().policy.rules.is_empty());
        assert!(reloader.status.policy_error().is_some_and(|error| error.contains("out of memory")));
        assert!(reloader.metrics.encode().unwrap().contains("policy_reloads_total{result=\"failed\"} 1\n"));

        reloader.reload();
        assert_eq!((reloader.active.load().policy.rules.len(), fake.reloads()), (1, 1));
        assert_eq!(reloader.status.policy_error(), None);
    }
}

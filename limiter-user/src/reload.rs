//! Puts a changed policy in force while the agent runs, and what of a changed configuration can be.
//!
//! Both change as a whole or not at all: they are read and checked like at a start, then the data plane exchanges its
//! program, and then everybody else takes the new one at the next look at the one pointer. Counters, buckets and budgets
//! stay as they are.
//!
//! The policy file is watched. The configuration is read again when somebody asks: what it says about interfaces is too
//! much to come into force because a file was saved.

use std::{sync::Arc, time::Duration};

use ipnet::IpNet;
use tokio::{sync::Notify, task::spawn_blocking, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::{
    active::{Active, SharedActive},
    cli::validate,
    clock::SharedClock,
    config::{Config, ConfigErrors, Environment, XdpConfig, difference},
    dataplane::{Dataplane, DataplaneError, ErrorKind, LiveSettings},
    identity::in_force::KeysInForce,
    metrics::{Metrics, ReloadResult},
    policy::Policy,
    pressure::Pressure,
    status::StatusSource,
    watch::FileWatch,
};

/// How often the file is looked at. It is read after two looks that found the same change: within a second, and not
/// while it is being written.
const LOOK: Duration = Duration::from_millis(500);

/// Makes a policy file effective, whenever it has changed or somebody asks; then the configuration as well.
#[derive(Debug)]
pub struct Reloader {
    /// As the agent was started with.
    pub(crate) config: Config,
    /// What of its settings is in force, as it was last read.
    pub(crate) live: LiveSettings,
    pub(crate) environment: Environment,
    pub(crate) watch: FileWatch,
    pub(crate) trusted_proxies: Vec<IpNet>,
    pub(crate) active: SharedActive,
    pub(crate) keys: KeysInForce,
    pub(crate) pressure: Arc<Pressure>,
    pub(crate) dataplane: Option<Arc<dyn Dataplane>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) status: Arc<StatusSource>,
    pub(crate) clock: Arc<SharedClock>,
    /// Told after each change.
    pub(crate) changed: Arc<Notify>,
}

/// What is read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Policy,
    ConfigurationAndPolicy,
}

/// Who asks for a reload, changed or not.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// An operator, for everything.
    pub everything: Arc<Notify>,
    /// The agent itself, for a policy that was refused and may not be any more.
    pub policy: Arc<Notify>,
}

/// Why a policy or a configuration was not put in force.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    #[error(transparent)]
    Invalid(#[from] ConfigErrors),
    /// Taken for a write that has not ended, or found no room: nobody means to lift every limit that way.
    #[error(
        "read the policy {file}: the file is empty, as one is that is being written, or whose disk is full: to lift every limit, leave a comment in it"
    )]
    Emptied { file: String },
    #[error(transparent)]
    Dataplane(#[from] DataplaneError),
}

impl ReloadError {
    fn result(&self) -> ReloadResult {
        match self {
            Self::Invalid(_) | Self::Emptied { .. } => ReloadResult::Invalid,
            Self::Dataplane(error) if error.kind() == ErrorKind::Configuration => ReloadResult::Invalid,
            Self::Dataplane(_) => ReloadResult::Failed,
        }
    }
}

impl Reloader {
    pub async fn run(mut self, asked: Asked, shutdown: CancellationToken) {
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let what = tokio::select! {
                _ = looks.tick() => if self.watch.has_settled() { What::Policy } else { continue },
                () = asked.everything.notified() => What::ConfigurationAndPolicy,
                () = asked.policy.notified() => What::Policy,
                () = shutdown.cancelled() => return,
            };
            // The kernel checks the program for a while, and a list may be long.
            let reloading = spawn_blocking(move || {
                self.reload(what);
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

    fn reload(&mut self, what: What) {
        self.watch.mark_read();
        let file = self.watch.path().display().to_string();
        let before = self.active.load_full();
        let result = match self.read_and_put_in_force(what) {
            Ok((active, settings)) => {
                let (rules, packet_rules) = (active.policy.rules.len(), active.policy.packet_rules.len());
                match what {
                    What::Policy => {
                        tracing::info!(target: "limiter", file, rules, packet_rules, "the changed policy is in force");
                    }
                    What::ConfigurationAndPolicy => {
                        let policy = if active.policy.text == before.policy.text { "the same" } else { "changed" };
                        let changed = if settings.is_empty() { "none".to_owned() } else { settings.join(", ") };
                        tracing::info!(
                            target: "limiter",
                            file,
                            rules,
                            packet_rules,
                            policy,
                            changed_settings = changed,
                            "configuration and policy were read again, and are in force"
                        );
                    }
                }
                self.status.set_policy_error(None);
                ReloadResult::Ok
            }
            Err(error) => {
                let said = match (&error, what) {
                    // What the kernel refuses is as likely what the configuration says of interfaces.
                    (ReloadError::Dataplane(error), What::ConfigurationAndPolicy) => {
                        format!("{} with {file}: {error}", self.config.path.display())
                    }
                    (ReloadError::Invalid(_) | ReloadError::Emptied { .. } | ReloadError::Dataplane(_), _) => {
                        error.to_string()
                    }
                };
                tracing::error!(target: "limiter", error = %said, "what is in force stays: what was read cannot be used");
                self.status.set_policy_error(Some(said));
                error.result()
            }
        };
        self.metrics.policy_reloaded(result);
    }

    /// Names the settings that have changed with it.
    fn read_and_put_in_force(&mut self, what: What) -> Result<(Arc<Active>, Vec<&'static str>), ReloadError> {
        if what == What::Policy {
            return Ok((self.put_in_force(Policy::load(self.watch.path())?, None)?, Vec::new()));
        }
        // All mistakes of both.
        let read = Config::load(&self.config.path, self.environment.clone());
        let (config, policy) = match (read, Policy::load(self.watch.path())) {
            (Ok(config), Ok(policy)) => (config, policy),
            (Err(mut errors), policy) => {
                errors.extend(policy.err().unwrap_or_default());
                return Err(errors.into());
            }
            (Ok(_), Err(errors)) => return Err(errors.into()),
        };
        let mut needs_restart = difference::needs_restart(&self.config, &config);
        if self.dataplane.is_none() && !config.xdp.interfaces.is_empty() {
            // The packet layer is off since the start.
            needs_restart.push("xdp.interfaces");
        }
        let live = live_settings(&config.xdp);
        let active = self.put_in_force(policy, Some(&live))?;
        for name in &needs_restart {
            tracing::warn!(target: "limiter", "{name} has changed in the configuration, which needs a restart");
        }
        self.status.set_needs_restart(needs_restart);
        // Without a packet layer none of them does anything.
        let changed = self.dataplane.as_ref().map(|_| self.live.changed_to(&live)).unwrap_or_default();
        self.live = live;
        Ok((active, changed))
    }

    fn put_in_force(&self, policy: Policy, settings: Option<&LiveSettings>) -> Result<Arc<Active>, ReloadError> {
        if policy.is_blank() && !self.active.load().policy.is_blank() {
            return Err(ReloadError::Emptied { file: self.watch.path().display().to_string() });
        }
        validate::check_policy(&self.config, &policy, &self.keys.get()).or(Some(()))?;
        match (&self.dataplane, settings) {
            (Some(dataplane), Some(settings)) => dataplane.reconfigure(settings, &policy)?,
            (Some(dataplane), None) => dataplane.reload(&policy)?,
            (None, _) => {}
        }
        let active = Active::derive(policy, &self.trusted_proxies, &self.metrics, &self.pressure, self.clock.local());
        let active = Arc::new(active);
        self.active.store(Arc::clone(&active));
        self.changed.notify_one();
        Ok(active)
    }
}

/// What takes effect without a restart.
pub(crate) fn live_settings(xdp: &XdpConfig) -> LiveSettings {
    LiveSettings {
        interfaces: xdp.interfaces.clone(),
        protect: xdp.protect.clone(),
        drop_malformed: xdp.drop_malformed,
        on_exit: xdp.on_exit,
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io, path::Path};

    use super::*;
    use crate::{
        clock::Clock,
        dataplane::{Protect, fake::FakeDataplane},
        store::memory::MemoryStore,
    };

    fn reloader(file: &Path, dataplane: Arc<FakeDataplane>) -> Reloader {
        let config_file = file.with_file_name("limiter.toml");
        let config = Config::parse(&config_file, "[node]\nid = \"n\"\n", Environment::default()).unwrap();
        let clock = Arc::new(SharedClock::new());
        let counters = Arc::new(MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, 1));
        let metrics = Arc::new(Metrics::new());
        let watch = FileWatch::new(file.to_owned());
        let pressure = Arc::new(Pressure::new(config.api.pressure));
        let active = Active::derive(Policy::load(file).unwrap(), &[], &metrics, &pressure, clock.local()).share();
        let dataplane: Option<Arc<dyn Dataplane>> = Some(dataplane);
        let status = StatusSource::new(
            &config,
            Arc::clone(&active),
            Arc::clone(&counters),
            dataplane.clone(),
            None,
            Arc::clone(&pressure),
        );
        Reloader {
            live: live_settings(&config.xdp),
            config,
            environment: Environment::default(),
            watch,
            trusted_proxies: Vec::new(),
            active,
            keys: KeysInForce::default(),
            pressure,
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
        reloader.reload(What::Policy);
        assert!(reloader.active.load().policy.rules.is_empty());
        assert!(reloader.status.policy_error().is_some_and(|error| error.contains("out of memory")));
        assert!(reloader.metrics.encode().unwrap().contains("policy_reloads_total{result=\"failed\"} 1\n"));

        reloader.reload(What::Policy);
        assert_eq!((reloader.active.load().policy.rules.len(), fake.reloads()), (1, 1));
        assert_eq!(reloader.status.policy_error(), None);
    }

    #[test]
    fn a_configuration_takes_effect_as_a_whole_and_what_cannot_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (file, config) = (folder.path().join("policy.toml"), folder.path().join("limiter.toml"));
        fs::write(&file, "").unwrap();
        let fake = Arc::new(FakeDataplane::default());
        let mut reloader = reloader(&file, Arc::clone(&fake));
        let with = |text: &str| format!("[node]\nid = \"n\"\n[xdp]\ninterfaces = [\"eth1\"]\n{text}");

        fs::write(&config, with("mod = 1\n[api]\nhttp = \"7070\"\n")).unwrap();
        fs::write(&file, "alow = []\n").unwrap();
        reloader.reload(What::ConfigurationAndPolicy);
        let error = reloader.status.policy_error().unwrap();
        for mistake in ["limiter.toml:5: xdp.mod", "api.http", "policy.toml:1: alow"] {
            assert!(error.contains(mistake), "{mistake}: {error}");
        }
        assert_eq!((fake.settings(), fake.reloads()), (None, 0));

        fs::write(&file, "").unwrap();
        fs::write(&config, with("mode = \"generic\"\nprotect = \"all\"\n")).unwrap();
        reloader.reload(What::Policy);
        assert_eq!((fake.settings(), fake.reloads()), (None, 1), "the configuration waits for somebody to ask");
        reloader.reload(What::ConfigurationAndPolicy);
        let settings = fake.settings().unwrap();
        assert_eq!((settings.interfaces, settings.protect), (vec!["eth1".to_owned()], Protect::All));
        assert_eq!(reloader.status.needs_restart(), ["xdp.mode"]);

        fs::write(&config, with("")).unwrap();
        fake.fail_next(DataplaneError::NoSuchInterface { interface: "eth1".to_owned() });
        reloader.reload(What::ConfigurationAndPolicy);
        assert!(
            reloader
                .status
                .policy_error()
                .is_some_and(|error| error.contains("limiter.toml with ") && error.contains("attach to eth1"))
        );
        assert_eq!(reloader.status.needs_restart(), ["xdp.mode"]);
        reloader.reload(What::ConfigurationAndPolicy);
        assert_eq!((reloader.status.policy_error(), reloader.status.needs_restart()), (None, Vec::new()));
    }
}

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
    identity::KnownKeys,
    metrics::{Metrics, ReloadResult},
    policy::Policy,
    pressure::Pressure,
    status::StatusSource,
    watch::{AtStart, FileWatch, NotInForce},
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
    pub(crate) keys: KnownKeys,
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
enum ReloadError {
    #[error(transparent)]
    Invalid(#[from] ConfigErrors),
    /// Taken for a write that has not ended, or found no room: nobody means to lift every limit that way.
    #[error(
        "read the policy {file}: the file is empty, as one is that is being written, or whose disk is full: to lift every limit, leave a comment in it"
    )]
    Emptied { file: String },
    #[error(transparent)]
    Dataplane(#[from] DataplaneError),
    /// Of a changed configuration, whose interfaces are as likely the reason as the policy is.
    #[error("{files}: {error}")]
    Reconfigure { files: String, error: DataplaneError },
    #[error("{file} has changed, and was read with {other}, which cannot be used: reload again once that is right")]
    Waits { file: String, other: String },
}

impl ReloadError {
    fn result(&self) -> ReloadResult {
        match self {
            Self::Invalid(_) | Self::Emptied { .. } | Self::Waits { .. } => ReloadResult::Invalid,
            Self::Dataplane(error) | Self::Reconfigure { error, .. } if error.kind() == ErrorKind::Configuration => {
                ReloadResult::Invalid
            }
            Self::Dataplane(_) | Self::Reconfigure { .. } => ReloadResult::Failed,
        }
    }

    fn not_in_force(&self) -> NotInForce {
        let at_start = match self {
            Self::Invalid(_) => AtStart::Fails,
            Self::Emptied { .. } => AtStart::TakesNothing,
            Self::Dataplane(_) | Self::Reconfigure { .. } | Self::Waits { .. } => AtStart::MayFail,
        };
        NotInForce { error: self.to_string(), at_start }
    }
}

/// What is wrong with each of the two files, if they were read at all; one of them has something.
#[derive(Debug)]
struct Refused {
    configuration: Option<Box<ReloadError>>,
    policy: Option<Box<ReloadError>>,
}

impl<E: Into<ReloadError>> From<E> for Refused {
    fn from(of_policy: E) -> Self {
        Self { configuration: None, policy: Some(Box::new(of_policy.into())) }
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
                if what == What::ConfigurationAndPolicy {
                    self.status.set_configuration_error(None);
                }
                ReloadResult::Ok
            }
            Err(Refused { configuration, policy }) => {
                let files = [("configuration", &configuration), ("policy", &policy)];
                let mut result = ReloadResult::Invalid;
                for (file, error) in files.into_iter().filter_map(|(file, error)| Some((file, error.as_ref()?))) {
                    tracing::error!(target: "limiter", file, %error, "what is in force stays: what was read cannot be used");
                    if error.result() == ReloadResult::Failed {
                        result = ReloadResult::Failed;
                    }
                }
                self.status.set_policy_error(policy.as_deref().map(ReloadError::not_in_force));
                if what == What::ConfigurationAndPolicy {
                    self.status.set_configuration_error(configuration.as_deref().map(ReloadError::not_in_force));
                }
                result
            }
        };
        self.metrics.policy_reloaded(result);
    }

    /// Names the settings that have changed with it.
    fn read_and_put_in_force(&mut self, what: What) -> Result<(Arc<Active>, Vec<&'static str>), Refused> {
        if what == What::Policy {
            return Ok((self.put_in_force(Policy::load(self.watch.path())?, None)?, Vec::new()));
        }
        let active = self.active.load_full();
        let [configuration_file, policy_file] =
            [&self.config.path, self.watch.path()].map(|path| path.display().to_string());
        let waits = |has_changed: bool, file: &str, other: &str| {
            has_changed.then(|| Box::new(ReloadError::Waits { file: file.to_owned(), other: other.to_owned() }))
        };
        let configuration_waits = |live: &LiveSettings| waits(*live != self.live, &configuration_file, &policy_file);
        let policy_waits =
            |policy: &Policy| waits(policy.text != active.policy.text, &policy_file, &configuration_file);
        // All mistakes of both.
        let read = Config::load(&self.config.path, self.environment.clone());
        let (config, policy) = match (read, Policy::load(self.watch.path())) {
            (Ok(config), Ok(policy)) => (config, policy),
            (Ok(config), Err(errors)) => {
                let configuration = configuration_waits(&live_settings(&config.xdp));
                return Err(Refused { configuration, ..errors.into() });
            }
            (Err(errors), policy) => {
                let policy = policy.map_or_else(|errors| Some(Box::new(errors.into())), |policy| policy_waits(&policy));
                return Err(Refused { configuration: Some(Box::new(errors.into())), policy });
            }
        };
        let mut needs_restart = difference::needs_restart(&self.config, &config);
        if self.dataplane.is_none() && !config.xdp.interfaces.is_empty() {
            // The packet layer is off since the start.
            needs_restart.push("xdp.interfaces");
        }
        let live = live_settings(&config.xdp);
        let (configuration, of_policy) = (configuration_waits(&live), policy_waits(&policy));
        let active = self.put_in_force(policy, Some(&live)).map_err(|error| match (error, configuration) {
            (ReloadError::Dataplane(error), Some(_)) => {
                let files = format!("{configuration_file} with {policy_file}");
                let configuration = Some(Box::new(ReloadError::Reconfigure { files, error }));
                Refused { configuration, policy: of_policy }
            }
            (error, configuration) => Refused { configuration, ..error.into() },
        })?;
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
        let has_secret = self.keys.with_store(|keys| keys.secret().is_some());
        validate::check_policy(&self.config, &policy, has_secret).or(Some(()))?;
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
        identity::KeyStore,
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
            keys: KnownKeys::new(KeyStore::default()).unwrap(),
            pressure,
            dataplane,
            metrics,
            status: Arc::new(status),
            clock,
            changed: Arc::new(Notify::new()),
        }
    }

    /// Of the configuration, and of the policy.
    fn errors(reloader: &Reloader) -> (Option<String>, Option<String>) {
        let status = reloader.status.read();
        (status.configuration_error, status.policy.error)
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
        let (of_configuration, of_policy) = errors(&reloader);
        for mistake in ["limiter.toml:5: xdp.mod", "api.http"] {
            assert!(of_configuration.as_ref().is_some_and(|error| error.contains(mistake)), "{of_configuration:?}");
        }
        assert!(of_policy.is_some_and(|error| error.contains("policy.toml:1: alow")));
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
        let (of_configuration, of_policy) = errors(&reloader);
        assert!(
            of_configuration
                .is_some_and(|error| error.contains("limiter.toml with ") && error.contains("attach to eth1"))
        );
        assert_eq!(of_policy, None, "it is in force");
        assert_eq!(reloader.status.needs_restart(), ["xdp.mode"]);
        reloader.reload(What::ConfigurationAndPolicy);
        assert_eq!((errors(&reloader), reloader.status.needs_restart()), ((None, None), Vec::new()));
    }

    #[test]
    fn each_file_keeps_its_own_error_until_it_is_in_force() {
        const CONFIG: &str = "[node]\nid = \"n\"\n";
        const OTHER: &str = "[node]\nid = \"n\"\n[xdp]\nprotect = \"all\"\n";
        const RULE: &str = "[[rules]]\nid = \"r\"\nscope = \"ip\"\nlimit = 5\nwindow = \"1s\"\n";
        let fails = |file| format!("{file} cannot be used as last read, and a start would fail");
        let may_fail = |file| format!("{file} could not be put in force as last read, and a start may fail as well");
        let (configuration, policy) = ("the configuration", "the policy");
        let folder = tempfile::tempdir().unwrap();
        let (file, config) = (folder.path().join("policy.toml"), folder.path().join("limiter.toml"));
        fs::write(&file, "# none\n").unwrap();
        let fake = Arc::new(FakeDataplane::default());
        let mut reloader = reloader(&file, Arc::clone(&fake));
        let refuse = || {
            fake.fail_next(DataplaneError::Load { source: Box::new(io::Error::other("out of memory")) });
        };
        // The configuration, the policy, what is read again, whether the kernel refuses it, and what is said then.
        let both = What::ConfigurationAndPolicy;
        for (step, (text, rules, what, is_refused, said)) in [
            ("mod = 1\n", "# none\n", both, false, vec![fails(configuration)]),
            ("mod = 1\n", RULE, What::Policy, false, vec![fails(configuration)]),
            ("mod = 1\n", "alow = []\n", What::Policy, false, vec![fails(configuration), fails(policy)]),
            (CONFIG, "alow = []\n", both, false, vec![fails(policy)]),
            (OTHER, "alow = []\n", both, false, vec![may_fail(configuration), fails(policy)]),
            (OTHER, RULE, What::Policy, false, vec![may_fail(configuration)]),
            (OTHER, RULE, both, true, vec![may_fail(configuration)]),
            (OTHER, "# none\n", both, true, vec![may_fail(configuration), may_fail(policy)]),
            ("mod = 1\n", "# none\n", both, false, vec![fails(configuration), may_fail(policy)]),
            (OTHER, RULE, both, false, vec![]),
            (OTHER, "# none\n", both, true, vec![may_fail(policy)]),
            (OTHER, "", What::Policy, false, vec!["the policy is gone or empty as last read".to_owned()]),
            (OTHER, "# none\n", What::Policy, false, vec![]),
        ]
        .into_iter()
        .enumerate()
        {
            fs::write(&config, text).unwrap();
            fs::write(&file, rules).unwrap();
            if is_refused {
                refuse();
            }
            reloader.reload(what);
            let status = reloader.status.read();
            let is_said = status.degraded_by.len() == said.len()
                && said.iter().zip(&status.degraded_by).all(|(said, by)| by.starts_with(said));
            assert!(is_said, "step {step}: {:?} and not {said:?}", status.degraded_by);
            let wrong = |file| reloader.status.files_not_in_force().contains(&(file, true));
            let has = |file: &str| said.iter().any(|said| said.starts_with(file));
            assert_eq!((wrong("configuration"), wrong("policy")), (has(configuration), has(policy)), "step {step}");
            let (of_configuration, of_policy) = errors(&reloader);
            assert_eq!(
                (of_configuration.is_some(), of_policy.is_some()),
                (has(configuration), has(policy)),
                "step {step}"
            );
        }
    }
}

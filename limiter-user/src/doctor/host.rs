//! What the checks look at, read once.

use std::{cell::OnceCell, io, path::Path};

use super::device::Device;
use crate::{
    capability::Capabilities,
    cli::validate::{self, Checked},
    config::{Config, ConfigErrors, Environment, KeyStoreKind, RedisConfig, XdpMode},
    dataplane::{
        DataplaneError,
        probe::{self, Accepted},
    },
    store::redis::Examination,
};

const DEFAULT_PIN_DIR: &str = "/sys/fs/bpf/limiter";

#[derive(Debug)]
pub(super) struct Host {
    pub(super) checked: Result<Checked, ConfigErrors>,
    /// Also known when only the policy or the keys are wrong.
    pub(super) config: Option<Config>,
    pub(super) capabilities: io::Result<Capabilities>,
    pub(super) interfaces: Vec<Interface>,
    program: OnceCell<Result<Accepted, DataplaneError>>,
    redis: OnceCell<Option<Result<Examination, String>>>,
}

#[derive(Debug)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) device: io::Result<Device>,
}

impl Host {
    pub(super) fn read(config_path: &Path) -> Self {
        let config = Config::check(config_path, Environment::of_process()).config;
        let names = config.as_ref().map(|config| config.xdp.interfaces.clone()).unwrap_or_default();
        Self {
            checked: validate::check(config_path, Environment::of_process()),
            config,
            capabilities: Capabilities::of_process(),
            interfaces: names.into_iter().map(Interface::read).collect(),
            program: OnceCell::new(),
            redis: OnceCell::new(),
        }
    }

    /// Whether packets are to be limited. A configuration that cannot be read may want it.
    pub(super) fn wants_packets(&self) -> bool {
        self.config.as_ref().is_none_or(|config| !config.xdp.interfaces.is_empty())
    }

    pub(super) fn pin_dir(&self) -> &Path {
        self.config.as_ref().map_or(Path::new(DEFAULT_PIN_DIR), |config| &config.xdp.pin_dir)
    }

    pub(super) fn mode(&self) -> XdpMode {
        self.config.as_ref().map_or(XdpMode::Auto, |config| config.xdp.mode)
    }

    pub(super) fn redis_config(&self) -> Option<&RedisConfig> {
        self.config.as_ref()?.redis()
    }

    pub(super) fn has_keys_in_redis(&self) -> bool {
        self.config.as_ref().is_some_and(|config| config.identity.key_store != KeyStoreKind::File)
    }

    /// Whether the kernel takes the program: tried once.
    pub(super) fn program(&self) -> &Result<Accepted, DataplaneError> {
        self.program.get_or_init(probe::try_program)
    }

    /// What Redis answers: asked once. `None` when there is no Redis to ask.
    pub(super) fn redis(&self) -> Option<&Result<Examination, String>> {
        self.redis.get_or_init(|| self.redis_config().map(super::store::examine)).as_ref()
    }

    pub(super) fn can_mount(&self) -> bool {
        self.capabilities.as_ref().is_ok_and(|capabilities| capabilities.has(crate::capability::SYS_ADMIN))
    }
}

impl Interface {
    fn read(name: String) -> Self {
        Self { device: Device::read(&name), name }
    }
}

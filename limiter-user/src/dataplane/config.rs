//! Settings of the packet layer.

use std::path::PathBuf;

use limiter_common::{
    addr::SrcPrefixes,
    quota::{Quota, Rate},
    schema::{MAPS, MapSpec, SCHEMA_VERSION},
    time::KtimeNs,
};

use super::{AttachedMode, diagnosis::Diagnosis};
use crate::clock::ktime;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataplaneConfig {
    /// Empty: the program is loaded and attached nowhere.
    pub interfaces: Vec<String>,
    pub mode: XdpMode,
    pub protect: Protect,
    /// On a BPF file system.
    pub pin_dir: PathBuf,
    /// Buckets of each family.
    pub max_sources: u32,
    pub on_exit: OnExit,
    /// Otherwise malformed packets are counted and passed.
    pub drop_malformed: bool,
    pub src_prefixes: SrcPrefixes,
    /// Whether budgets may be pushed; otherwise packets are spared the lookup.
    pub budgets: bool,
    /// What the program writes about single packets.
    pub diagnosis: Diagnosis,
}

/// What of [`DataplaneConfig`] can change while a program is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveSettings {
    pub interfaces: Vec<String>,
    pub protect: Protect,
    pub drop_malformed: bool,
    pub on_exit: OnExit,
}

impl LiveSettings {
    /// Names of the settings that are others in `new`.
    pub fn changed_to(&self, new: &Self) -> Vec<&'static str> {
        let Self { interfaces, protect, drop_malformed, on_exit } = self;
        let changed = [
            (*interfaces != new.interfaces, "xdp.interfaces"),
            (*protect != new.protect, "xdp.protect"),
            (*drop_malformed != new.drop_malformed, "xdp.drop_malformed"),
            (*on_exit != new.on_exit, "xdp.on_exit"),
        ];
        changed.into_iter().filter_map(|(is_changed, name)| is_changed.then_some(name)).collect()
    }
}

impl DataplaneConfig {
    pub(super) fn with(&self, settings: &LiveSettings) -> Self {
        let LiveSettings { interfaces, protect, drop_malformed, on_exit } = settings.clone();
        Self { interfaces, protect, drop_malformed, on_exit, ..self.clone() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum XdpMode {
    /// Native, or generic where the driver has no native mode, which is said aloud.
    #[default]
    Auto,
    Native,
    Generic,
}

impl XdpMode {
    /// Whether an interface that is attached in `mode` may stay so.
    pub(super) const fn allows(self, mode: AttachedMode) -> bool {
        match self {
            Self::Auto => true,
            Self::Native => matches!(mode, AttachedMode::Native),
            Self::Generic => matches!(mode, AttachedMode::Generic),
        }
    }
}

/// The traffic that limits apply to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Protect {
    All,
    /// Destination ports.
    Ports(Vec<(Transport, u16)>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    Tcp,
    Udp,
}

/// What happens to enforcement when the agent ends in good order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnExit {
    #[default]
    Keep,
    Detach,
}

/// Numbers of the program that no configuration file names.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// How often an update of a bucket is tried while other CPUs change it; at most 8.
    pub swap_attempts: u32,
    /// How many new sources get a bucket of their own. `None`: a hundredth of `max_sources` a second.
    pub new_sources: Option<Quota>,
    /// One packet in so many is a sample; 0: none.
    pub sample_one_in: u32,
    /// How many events of a class one CPU sends. `None`: the program tells nothing, and pays nothing for it.
    pub events: Option<Quota>,
    /// How much later it is for the program and its deadlines than the kernel's clock says: 0, but for tests of times
    /// that no host has reached.
    pub clock_offset_ns: u64,
    /// The one that the object was built with.
    pub schema: Schema,
}

/// A layout of the maps, and its number. A newer one may append fields to a value and entries to an array; what it
/// gives another meaning it gives another name.
#[derive(Clone, Copy, Debug)]
pub struct Schema {
    pub version: u32,
    pub maps: &'static [MapSpec],
}

impl Default for Schema {
    fn default() -> Self {
        Self { version: SCHEMA_VERSION, maps: MAPS }
    }
}

impl Default for Tuning {
    fn default() -> Self {
        let events = Quota { rate: Rate { count: 1000, per_ns: 1_000_000_000 }, burst: 500 };
        Self {
            swap_attempts: 8,
            new_sources: None,
            sample_one_in: 128,
            events: Some(events),
            clock_offset_ns: 0,
            schema: Schema::default(),
        }
    }
}

impl Tuning {
    /// The time of the program.
    pub(super) fn now(&self) -> KtimeNs {
        ktime().saturating_add_ns(self.clock_offset_ns)
    }
}

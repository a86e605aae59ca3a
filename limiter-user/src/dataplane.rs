//! The XDP program from the agent's side: loading, attaching, and what is read from and written to its maps.
//!
//! Architecture invariant: only this module names `aya`.

mod acl;
mod attach;
mod budgets;
mod compile;
pub mod config;
mod diagnosis;
mod error;
mod events;
pub mod fake;
mod foreign;
mod globals;
mod kernel;
mod link_state;
mod loader;
mod maps;
mod migrate;
mod own_links;
mod pins;
pub mod probe;
mod raw_map;
mod slots;
mod unpin;

use std::{fmt, net::IpAddr, sync::Arc, time::Duration};

use ipnet::IpNet;
use limiter_common::{
    acl::Origin,
    budget::BudgetReason,
    event::{EventClass, EventCounts},
    quota::Quota,
    stats::Counter,
    verdict::Verdict,
};

use crate::policy::Policy;

pub use self::{
    acl::canonical,
    config::{DataplaneConfig, LiveSettings, OnExit, Protect, Schema, Transport, Tuning, XdpMode},
    diagnosis::Diagnosis,
    error::{DataplaneError, ErrorKind},
    events::{AsyncEventReader, EventReader},
    kernel::{KernelDataplane, TestRun},
    link_state::LinkType,
    loader::embedded_object,
    unpin::{Unpinned, detach_pinned, lock_idle, unpin},
};
pub(crate) use self::{
    error::chain,
    link_state::{ONE_BUFFER_MTU, XdpFeatures, mtu_of, xdp_features},
};

/// Whether sources in a prefix are passed or dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum List {
    Allow,
    Deny,
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        })
    }
}

/// The counter of one verdict of one rule.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RuleCounter {
    /// `None` for what no rule decided.
    pub rule: Option<Arc<str>>,
    pub verdict: Verdict,
    pub counter: Counter,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AclListing {
    pub list: List,
    pub prefix: IpNet,
    pub origin: Origin,
    /// `None` for an entry that stays.
    pub remaining: Option<Duration>,
    /// An operator's, which counts only once the policy no longer lists the same prefix.
    pub is_behind_policy: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetListing {
    /// The source prefix that it holds for.
    pub source: IpNet,
    pub effect: BudgetEffect,
    pub remaining: Duration,
    pub reason: Option<BudgetReason>,
    pub rule: Option<Arc<str>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetEffect {
    /// Drops everything.
    Block,
    /// Replaces the source's packet limit.
    Replace,
}

/// How full a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MapUsage {
    pub map: &'static str,
    pub entries: u64,
    pub capacity: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttachedInterface {
    pub name: Arc<str>,
    pub mode: AttachedMode,
    pub program_id: u32,
}

/// An interface of the configuration on which nothing is limited.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingInterface {
    pub name: Arc<str>,
    pub reason: String,
}

/// The mode that an interface really uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttachedMode {
    Native,
    Generic,
}

impl AttachedMode {
    pub const ALL: &[Self] = &[Self::Native, Self::Generic];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
        }
    }
}

/// What the agent asks of the packet layer. Calls are short (system calls on maps), except `reload`, `reconfigure`
/// and changes of the lists: they wait for a reload, and the first prefix of a kind makes a new program.
pub trait Dataplane: fmt::Debug + Send + Sync + 'static {
    /// Counters of all verdicts that have occurred, by rule. They never go back, also over reloads and restarts.
    fn counters(&self) -> Result<Vec<RuleCounter>, DataplaneError>;

    /// Drops everything of `prefix`, for a time or until [`Self::unblock`].
    fn block(&self, prefix: IpNet, lasts: Option<Duration>) -> Result<(), DataplaneError>;

    fn unblock(&self, prefix: IpNet) -> Result<(), DataplaneError>;

    /// Passes everything of `prefix`, which goes before every other rule.
    fn allow(&self, prefix: IpNet, lasts: Option<Duration>) -> Result<(), DataplaneError>;

    fn unallow(&self, prefix: IpNet) -> Result<(), DataplaneError>;

    /// Drops everything of this source for a time that the kernel itself ends.
    fn push_budget(
        &self,
        source: IpAddr,
        lasts: Duration,
        reason: BudgetReason,
        rule: &str,
    ) -> Result<(), DataplaneError>;

    /// Replaces the packet limit of this source for a time that the kernel itself ends.
    fn replace_budget(
        &self,
        source: IpAddr,
        packets: Quota,
        lasts: Duration,
        reason: BudgetReason,
        rule: &str,
    ) -> Result<(), DataplaneError>;

    /// Whether there was one.
    fn remove_budget(&self, source: IpAddr) -> Result<bool, DataplaneError>;

    /// Budgets whose deadline has not passed.
    fn budgets(&self) -> Vec<BudgetListing>;

    /// Prefixes of the policy, and of operators as long as they hold.
    fn acl(&self) -> Vec<AclListing>;

    /// Whether the policy file has this prefix in its list, where an operator's entry does not show.
    fn is_in_policy(&self, list: List, prefix: IpNet) -> bool;

    /// Whether an allow prefix contains this address.
    fn is_allowed(&self, address: IpAddr) -> bool;

    /// Removes entries whose deadline has passed, and tells how many. The kernel ignores them already.
    fn expire(&self) -> Result<usize, DataplaneError>;

    /// What the program tells. For one reader; `None` where nothing is told.
    fn events(&self) -> Result<Option<EventReader>, DataplaneError>;

    /// What became of the events of each class. The numbers never go back, also over reloads and restarts.
    fn event_counts(&self) -> Result<Vec<(EventClass, EventCounts)>, DataplaneError>;

    /// The rule whose counters are in `slot`.
    fn rule_in(&self, slot: u32) -> Option<Arc<str>>;

    /// Logs the lines about single packets that the program has written, if it writes any.
    fn flush_diagnosis(&self);

    /// Without walking through maps.
    fn map_usage(&self) -> Result<Vec<MapUsage>, DataplaneError>;

    fn interfaces(&self) -> Result<Vec<AttachedInterface>, DataplaneError>;

    /// Interfaces that are gone, or that came back and could not be attached to.
    fn missing(&self) -> Vec<MissingInterface>;

    /// Attaches again to interfaces that are back. Cheap while there is none, and meant to be called over and over.
    fn mend(&self) -> Result<(), DataplaneError>;

    /// Puts a new policy in force in one step. An error changes nothing. Takes as long as the kernel needs to accept
    /// the program; everything but changes of the lists goes on meanwhile.
    fn reload(&self, policy: &Policy) -> Result<(), DataplaneError>;

    /// As [`Self::reload`], with other settings: a new interface has the program from then on, one that is not named
    /// any more has none, and the others are never without.
    fn reconfigure(&self, settings: &LiveSettings, policy: &Policy) -> Result<(), DataplaneError>;

    /// What the configuration wants at exit: nothing, or detaching.
    fn stop(&self) -> Result<(), DataplaneError>;
}

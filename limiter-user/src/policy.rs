//! The policy as the rest of the agent uses it: checked, with every name resolved.
//!
//! `policy/raw.rs` reads the file, `policy/compile.rs` makes this of it, `policy/endpoints.rs` matches paths.

mod compile;
pub mod endpoints;
mod raw;

use std::{collections::BTreeMap, path::Path, sync::Arc};

use ipnet::IpNet;
use limiter_common::{quota::Quota, rule::EnforcementMode, sliding_window::BurstFactor};

pub use self::endpoints::{Endpoints, Scratch};
use crate::{
    config::{self, ConfigErrors},
    store::Algorithm,
};

/// A whole policy file.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Policy {
    pub rules: Vec<Rule>,
    /// The endpoint groups; rules name them by index.
    pub endpoints: Endpoints,
    /// Names of the declared plans.
    pub plans: Vec<Arc<str>>,
    pub packet_rules: Vec<PacketRuleSpec>,
    pub allow: Vec<IpNet>,
    pub deny: Vec<IpNet>,
}

impl Policy {
    /// Reads the file at `path`; reports every mistake at once, with line and key.
    pub fn load(path: &Path) -> Result<Self, ConfigErrors> {
        Self::parse(path, &config::read_file("read the policy", path)?)
    }

    /// Like [`Self::load`], of a text that stands for the file at `path`.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigErrors> {
        compile::compile(path, text)
    }

    /// Index of a plan by its name.
    pub fn plan(&self, name: &str) -> Option<usize> {
        self.plans.iter().position(|plan| &**plan == name)
    }
}

/// Whose requests a rule counts together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// A client: all API keys with the same client id.
    User,
    /// One API key.
    Key,
    /// A session: the cookie of that name, or an address with its User-Agent.
    Session,
    /// A client address, cut to the configured prefix.
    Ip,
    /// Everybody.
    Global,
}

impl Scope {
    pub const ALL: &[Self] = &[Self::User, Self::Key, Self::Session, Self::Ip, Self::Global];

    /// The name in policy files and in the names of counters.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Key => "key",
            Self::Session => "session",
            Self::Ip => "ip",
            Self::Global => "global",
        }
    }
}

/// "unlimited" is a word, never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    Unlimited,
    /// An algorithm with its parameters. The most that it lets pass at once is its ceiling.
    Limited(Algorithm),
}

impl Limit {
    /// `None` where there is none.
    pub const fn ceiling(&self) -> Option<u64> {
        match self {
            Self::Unlimited => None,
            Self::Limited(algorithm) => Some(algorithm.ceiling()),
        }
    }
}

/// A request rule.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rule {
    pub id: Arc<str>,
    pub scope: Scope,
    /// Index of the endpoint group that it applies to; `None` applies to every request.
    pub endpoint: Option<usize>,
    pub window_us: u64,
    pub burst_factor: BurstFactor,
    /// Limit of clients whose plan is not in `plans`, and of requests without a plan.
    pub limit: Limit,
    /// Limits by plan, by index in [`Policy::plans`].
    pub plans: BTreeMap<usize, Limit>,
    /// Multiplies the request's own cost; at least 1.
    pub cost: u64,
    pub mode: EnforcementMode,
}

impl Rule {
    pub fn limit_for(&self, plan: Option<usize>) -> Limit {
        plan.and_then(|plan| self.plans.get(&plan)).copied().unwrap_or(self.limit)
    }
}

/// A packet rule, before it becomes map entries.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PacketRuleSpec {
    pub id: Arc<str>,
    /// At least one.
    pub cidrs: Vec<IpNet>,
    pub packets: Option<Quota>,
    pub bytes: Option<Quota>,
    pub new_connections: Option<Quota>,
    pub mode: EnforcementMode,
}

impl PacketRuleSpec {
    /// A rule without limits.
    pub fn new(id: &str, cidr: IpNet, mode: EnforcementMode) -> Self {
        Self { id: id.into(), cidrs: vec![cidr], packets: None, bytes: None, new_connections: None, mode }
    }
}

#[cfg(test)]
mod tests;

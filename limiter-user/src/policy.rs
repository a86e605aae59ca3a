//! The policy as the rest of the agent uses it: checked, with every name resolved.
//!
//! `policy/raw.rs` reads the file, `policy/compile.rs` makes this of it, `policy/endpoints.rs` matches paths.

mod bypass;
mod compile;
pub mod difference;
pub mod endpoints;
mod failure;
mod precision;
mod prefix_set;
mod raw;
pub mod response;

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::Arc,
};

use foldhash::fast::RandomState;
use ipnet::IpNet;
use limiter_common::{adaptive::FULL, quota::Quota, rule::EnforcementMode, sliding_window::BurstFactor};

pub use self::{
    bypass::{Bypass, BypassKind},
    endpoints::{Endpoints, Match, Scratch},
    failure::FailurePolicy,
    precision::Precision,
    prefix_set::PrefixSet,
    response::ResponseTemplate,
};
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
    /// By group, what its requests want of every rule while its counters cannot be shared; empty where no group says.
    pub endpoint_failures: Vec<Option<FailurePolicy>>,
    /// Names of the declared plans.
    pub plans: Vec<Arc<str>>,
    /// By index, the plan that each inherits from.
    pub plan_parents: Vec<Option<usize>>,
    /// Attributes of requests that rules count by; [`Scope::Attribute`] names them by index.
    pub attributes: Vec<Arc<str>>,
    /// Requests that no rule limits. What `allow` has are packets.
    pub bypass: Bypass,
    pub packet_rules: Vec<PacketRuleSpec>,
    pub allow: Vec<IpNet>,
    pub deny: Vec<IpNet>,
    /// The file, as it was read.
    pub text: Box<str>,
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

    /// Whether the file says nothing at all, not even a comment.
    pub fn is_blank(&self) -> bool {
        self.text.trim().is_empty()
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
    /// One value of an attribute that the request is given with; the index is that in [`Policy::attributes`].
    Attribute(u16),
}

impl Scope {
    /// Those that have no name of the operator's.
    pub const ALL: &[Self] = &[Self::User, Self::Key, Self::Session, Self::Ip, Self::Global];

    /// The name in policy files and in the names of counters.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Key => "key",
            Self::Session => "session",
            Self::Ip => "ip",
            Self::Global => "global",
            Self::Attribute(_) => "attribute",
        }
    }
}

/// Which of the rules whose endpoint groups match apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Matching {
    /// This one, whatever else does.
    #[default]
    All,
    /// This one, unless another one that says so too, of the same scope, has a more specific endpoint.
    MostSpecific,
}

impl Matching {
    pub const ALL: &[(&'static str, Self)] = &[("all", Self::All), ("most_specific", Self::MostSpecific)];
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
    pub matching: Matching,
    pub window_us: u64,
    pub burst_factor: BurstFactor,
    /// Limit of clients whose plan is not in `plans`, and of requests without a plan.
    pub limit: Limit,
    /// Limits by plan, by index in [`Policy::plans`], inherited ones included.
    pub plans: BTreeMap<usize, Limit>,
    /// Limits of single clients, which come before those of plans.
    pub overrides: HashMap<Arc<str>, Limit, RandomState>,
    /// Multiplies the request's own cost; at least 1.
    pub cost: u64,
    pub on_store_failure: FailurePolicy,
    pub precision: Precision,
    pub mode: EnforcementMode,
    /// What gateways are answered when this rule denies; `None` for the usual.
    pub response: Option<Arc<ResponseTemplate>>,
    /// How it gives way to pressure, if it does.
    pub adaptive: Option<Adaptive>,
}

/// How a rule gives way to pressure: towards its floor while the origin is above a target, and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adaptive {
    /// The least that a limit shrinks to; a limit that is no greater stays.
    pub floor: u64,
    /// With the burst factor.
    pub floor_ceiling: u64,
    /// Of reported levels, in millionths.
    pub target: u32,
    pub target_latency_us: Option<u64>,
    /// What a step down leaves of the share, in millionths.
    pub decrease: u32,
    /// The time of the whole way back.
    pub recover_us: u64,
}

impl Rule {
    /// The share at which every limit of this rule is at its floor.
    pub fn share_of_floor(&self, adaptive: &Adaptive) -> u32 {
        let limits = std::iter::once(&self.limit).chain(self.plans.values()).chain(self.overrides.values());
        let shares = limits.filter_map(|limit| match limit {
            Limit::Limited(algorithm) => Some(algorithm.share_of_floor(adaptive.floor, adaptive.floor_ceiling)),
            Limit::Unlimited => None,
        });
        shares.min().unwrap_or(FULL)
    }

    #[inline]
    pub fn limit_for(&self, client: Option<&str>, plan: Option<usize>) -> Limit {
        // Most rules have none, and then the client is not hashed.
        if !self.overrides.is_empty()
            && let Some(limit) = client.and_then(|client| self.overrides.get(client))
        {
            return *limit;
        }
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

    /// Whether packets are charged to a bucket by this rule.
    pub fn is_charged(&self) -> bool {
        let limits = [self.packets, self.bytes, self.new_connections];
        self.mode != EnforcementMode::Off && limits.iter().any(Option::is_some)
    }
}

#[cfg(test)]
mod tests;

//! The policy in force, with everything that is derived from it once, so that no request derives it again.
//!
//! A start and a reload derive the same here. Whoever needs any of it reads one pointer, so all of it changes at once.

use std::sync::Arc;

use arc_swap::ArcSwap;
use ipnet::IpNet;
use limiter_common::{rule::EnforcementMode, time::UnixMicros};

use crate::{
    metrics::{Metrics, RuleMetrics},
    policy::{Policy, Scope},
};

/// The one pointer.
pub type SharedActive = Arc<ArcSwap<Active>>;

#[derive(Debug)]
#[non_exhaustive]
pub struct Active {
    pub policy: Policy,
    /// Indices of the rules without an endpoint that are not off, then per endpoint group of those that name it.
    pub always: Vec<usize>,
    pub by_endpoint: Vec<Vec<usize>>,
    /// In the order of the policy's rules.
    pub metrics: Vec<RuleMetrics>,
    /// Trusted proxies and allow prefixes.
    pub never_pushed: Vec<IpNet>,
    /// Whether any rule is about keys or their users.
    pub limits_keys: bool,
    /// Whether any rule is about sessions.
    pub limits_sessions: bool,
    pub loaded_at: UnixMicros,
}

impl Active {
    pub fn derive(policy: Policy, trusted_proxies: &[IpNet], metrics: &Metrics, loaded_at: UnixMicros) -> Self {
        let mut always = Vec::new();
        let mut by_endpoint = vec![Vec::new(); policy.endpoints.len()];
        for (index, rule) in policy.rules.iter().enumerate() {
            if rule.mode == EnforcementMode::Off {
                continue;
            }
            match rule.endpoint {
                None => always.push(index),
                Some(endpoint) => by_endpoint[endpoint].push(index),
            }
        }
        Self {
            always,
            by_endpoint,
            metrics: policy.rules.iter().map(|rule| metrics.rule(&rule.id)).collect(),
            never_pushed: trusted_proxies.iter().chain(&policy.allow).copied().collect(),
            limits_keys: policy.rules.iter().any(|rule| matches!(rule.scope, Scope::Key | Scope::User)),
            limits_sessions: policy.rules.iter().any(|rule| rule.scope == Scope::Session),
            policy,
            loaded_at,
        }
    }

    pub fn share(self) -> SharedActive {
        Arc::new(ArcSwap::from_pointee(self))
    }
}

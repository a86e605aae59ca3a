//! The policy in force, with everything that is derived from it once, so that no request derives it again.
//!
//! A start and a reload derive the same here. Whoever needs any of it reads one pointer, so all of it changes at once.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;
use ipnet::IpNet;
use limiter_common::{rule::EnforcementMode, time::UnixMicros};

use crate::{
    metrics::{BypassMetrics, Metrics, RememberedMetrics, RuleMetrics},
    policy::{Matching, Policy, Precision, Scope},
    pressure::{Pressure, ShareChanges, Tightened},
    store::{CounterKey, Name},
};

static NEXT_GENERATION: AtomicU64 = AtomicU64::new(0);

/// The one pointer.
pub type SharedActive = Arc<ArcSwap<Active>>;

#[derive(Debug)]
#[non_exhaustive]
pub struct Active {
    /// Another one each time.
    pub generation: u64,
    pub policy: Policy,
    /// The rules without an endpoint that are not off, then per endpoint group those that name it.
    pub always: Applicable,
    pub by_endpoint: Vec<Applicable>,
    /// Whether any of them gives way to one that is more specific.
    pub narrows: bool,
    /// In the order of the policy's rules, and so are the next ones: what their counters are called.
    pub counter_names: Vec<Name>,
    pub metrics: Vec<RuleMetrics>,
    pub bypassed: BypassMetrics,
    pub remembered: RememberedMetrics,
    /// What rules that give way to pressure grant at this time.
    pub shares: Vec<Option<Tightened>>,
    /// How often that changed.
    pub share_changes: ShareChanges,
    /// Trusted proxies, allow prefixes, and what requests are never limited from.
    pub never_pushed: Vec<IpNet>,
    /// Whether anything in the policy is about keys or their users.
    pub limits_keys: bool,
    /// Names of the counters that one node alone has at a time.
    pub local: Vec<Name>,
    /// Names of the counters that Redis alone decides.
    pub strict: HashSet<Name>,
    /// Whether memory alone may not be able to decide, for the precision of any rule.
    pub asks_redis: bool,
    /// Whether any rule is about sessions.
    pub limits_sessions: bool,
    pub loaded_at: UnixMicros,
}

/// Indices of rules.
#[derive(Clone, Debug, Default)]
pub struct Applicable {
    /// Those that apply whatever else does.
    pub all: Vec<usize>,
    /// Those that give way to a more specific one.
    pub most_specific: Vec<usize>,
}

impl Active {
    pub fn derive(
        policy: Policy,
        trusted_proxies: &[IpNet],
        metrics: &Metrics,
        pressure: &Pressure,
        loaded_at: UnixMicros,
    ) -> Self {
        let mut always = Applicable::default();
        let mut by_endpoint = vec![Applicable::default(); policy.endpoints.len()];
        let mut narrows = false;
        for (index, rule) in policy.rules.iter().enumerate() {
            if rule.mode == EnforcementMode::Off {
                continue;
            }
            let rules = rule.endpoint.map_or(&mut always, |endpoint| &mut by_endpoint[endpoint]);
            match rule.matching {
                Matching::All => rules.all.push(index),
                Matching::MostSpecific => {
                    narrows = true;
                    rules.most_specific.push(index);
                }
            }
        }
        Self {
            generation: NEXT_GENERATION.fetch_add(1, Ordering::Relaxed),
            always,
            by_endpoint,
            narrows,
            counter_names: policy.rules.iter().map(|rule| Arc::clone(&rule.id).into()).collect(),
            metrics: policy.rules.iter().map(|rule| metrics.rule_in_force(rule, loaded_at)).collect(),
            bypassed: metrics.bypassed(),
            remembered: metrics.remembered(),
            shares: pressure.shares_of(&policy.rules),
            share_changes: pressure.share_changes(),
            never_pushed: trusted_proxies
                .iter()
                .chain(&policy.allow)
                .copied()
                .chain(policy.bypass.cidrs.iter())
                .collect(),
            limits_keys: policy.rules.iter().any(|rule| matches!(rule.scope, Scope::Key | Scope::User))
                || !policy.bypass.key_ids.is_empty(),
            local: names_of(&policy, Precision::Local),
            strict: names_of(&policy, Precision::Strict),
            asks_redis: policy
                .rules
                .iter()
                .any(|rule| rule.precision.asks_redis() && rule.mode != EnforcementMode::Off),
            limits_sessions: policy.rules.iter().any(|rule| rule.scope == Scope::Session),
            policy,
            loaded_at,
        }
    }

    /// Whether a counter is used by one node at a time, so that what others had is taken over once.
    pub fn is_local(&self, key: &CounterKey) -> bool {
        self.local.contains(&key.rule)
    }

    /// Whether Redis alone decides a counter.
    pub fn is_strict(&self, key: &CounterKey) -> bool {
        self.strict.contains(&key.rule)
    }

    pub fn share(self) -> SharedActive {
        Arc::new(ArcSwap::from_pointee(self))
    }
}

fn names_of<C: FromIterator<Name>>(policy: &Policy, precision: Precision) -> C {
    policy.rules.iter().filter(|rule| rule.precision == precision).map(|rule| Arc::clone(&rule.id).into()).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_is_never_limited_is_never_pushed_to_the_kernel() {
        let policy = "allow = [\"192.0.2.0/28\"]\n[[bypass]]\ncidr = \"203.0.113.0/24\"\n";
        let policy = Policy::parse(Path::new("/policy.toml"), policy).unwrap();
        let proxies = ["10.0.0.0/8".parse().unwrap()];
        let active = Active::derive(policy, &proxies, &Metrics::new(), &Pressure::unreported(), UnixMicros::new(0));
        let expected = ["10.0.0.0/8", "192.0.2.0/28", "203.0.113.0/24"].map(|prefix| prefix.parse().unwrap());
        assert_eq!(active.never_pushed, expected);
    }
}

//! A data plane in memory, for tests of the agent. It judges nothing; it remembers what it was told.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use ipnet::IpNet;
use limiter_common::{
    addr::SrcPrefixes,
    budget::BudgetReason,
    event::{EventClass, EventCounts},
    quota::Quota,
    schema::MAX_BUDGETS,
    time::KtimeNs,
};
use parking_lot::Mutex;

use super::{
    AclListing, AttachedInterface, BudgetEffect, BudgetListing, Dataplane, DataplaneError, EventReader, List,
    LiveSettings, MapUsage, MissingInterface, RuleCounter,
    acl::{self, Acl, canonical},
};
use crate::{clock::ktime, policy::Policy};

#[derive(Debug, Default)]
pub struct FakeDataplane {
    prefixes: SrcPrefixes,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    acl: Acl,
    budgets: BTreeMap<IpAddr, FakeBudget>,
    counters: Vec<RuleCounter>,
    reloads: usize,
    settings: Option<LiveSettings>,
    failure: Option<DataplaneError>,
}

#[derive(Clone, Debug)]
struct FakeBudget {
    deadline: KtimeNs,
    effect: BudgetEffect,
    reason: BudgetReason,
    rule: Arc<str>,
}

impl FakeDataplane {
    pub fn new(prefixes: SrcPrefixes, policy: &Policy) -> Self {
        let acl = Acl::new(&policy.allow, &policy.deny, [], ktime());
        Self { prefixes, state: Mutex::new(State { acl, ..State::default() }) }
    }

    /// What `counters` answers from now on.
    pub fn set_counters(&self, counters: Vec<RuleCounter>) {
        self.state.lock().counters = counters;
    }

    /// The next call that can fail does.
    pub fn fail_next(&self, error: DataplaneError) {
        self.state.lock().failure = Some(error);
    }

    pub fn reloads(&self) -> usize {
        self.state.lock().reloads
    }

    /// Those of the last change.
    pub fn settings(&self) -> Option<LiveSettings> {
        self.state.lock().settings.clone()
    }

    fn put(&self, list: List, prefix: IpNet, lasts: Option<Duration>) -> Result<(), DataplaneError> {
        let prefix = canonical(prefix);
        let now = ktime();
        let mut state = self.state.lock();
        state.fail()?;
        if list == List::Deny
            && let Some(allow) = state.acl.allow_around(prefix, now)
        {
            return Err(DataplaneError::Covered { prefix, allow });
        }
        let deadline = lasts.map_or(KtimeNs::NEVER, |lasts| acl::deadline(now, lasts));
        if state.acl.in_policy(list, prefix) {
            state.acl.hide(list, prefix, deadline);
        } else {
            state.acl.insert(list, prefix, deadline);
        }
        Ok(())
    }

    fn take(&self, list: List, prefix: IpNet) -> Result<(), DataplaneError> {
        let prefix = canonical(prefix);
        let mut state = self.state.lock();
        state.fail()?;
        if state.acl.forget_hidden(list, prefix) {
            return Ok(());
        }
        state.acl.require(list, prefix)?;
        state.acl.remove(list, prefix);
        Ok(())
    }

    fn push(
        &self,
        source: IpAddr,
        lasts: Duration,
        effect: BudgetEffect,
        reason: BudgetReason,
        rule: &str,
    ) -> Result<(), DataplaneError> {
        let mut state = self.state.lock();
        state.fail()?;
        let deadline = acl::deadline(ktime(), lasts);
        let budget = FakeBudget { deadline, effect, reason, rule: rule.into() };
        state.budgets.insert(self.prefixes.cut(source), budget);
        Ok(())
    }
}

impl State {
    fn fail(&mut self) -> Result<(), DataplaneError> {
        self.failure.take().map_or(Ok(()), Err)
    }
}

impl Dataplane for FakeDataplane {
    fn counters(&self) -> Result<Vec<RuleCounter>, DataplaneError> {
        let mut state = self.state.lock();
        state.fail()?;
        Ok(state.counters.clone())
    }

    fn block(&self, prefix: IpNet, lasts: Option<Duration>) -> Result<(), DataplaneError> {
        self.put(List::Deny, prefix, lasts)
    }

    fn unblock(&self, prefix: IpNet) -> Result<(), DataplaneError> {
        self.take(List::Deny, prefix)
    }

    fn allow(&self, prefix: IpNet, lasts: Option<Duration>) -> Result<(), DataplaneError> {
        self.put(List::Allow, prefix, lasts)
    }

    fn unallow(&self, prefix: IpNet) -> Result<(), DataplaneError> {
        self.take(List::Allow, prefix)
    }

    fn push_budget(
        &self,
        source: IpAddr,
        lasts: Duration,
        reason: BudgetReason,
        rule: &str,
    ) -> Result<(), DataplaneError> {
        self.push(source, lasts, BudgetEffect::Block, reason, rule)
    }

    fn replace_budget(
        &self,
        source: IpAddr,
        packets: Quota,
        lasts: Duration,
        reason: BudgetReason,
        rule: &str,
    ) -> Result<(), DataplaneError> {
        packets.params().map_err(|source| DataplaneError::Quota { rule: rule.to_owned(), source })?;
        self.push(source, lasts, BudgetEffect::Replace, reason, rule)
    }

    fn remove_budget(&self, source: IpAddr) -> Result<bool, DataplaneError> {
        let mut state = self.state.lock();
        state.fail()?;
        Ok(state.budgets.remove(&self.prefixes.cut(source)).is_some())
    }

    fn budgets(&self) -> Vec<BudgetListing> {
        let now = ktime();
        let state = self.state.lock();
        let holding = state.budgets.iter().filter(|(_, budget)| budget.deadline > now);
        let listed = holding.map(|(source, budget)| BudgetListing {
            source: IpNet::new(*source, self.prefixes.len_of(*source)).unwrap_or_else(|_| acl::host(*source)),
            effect: budget.effect,
            remaining: acl::remaining(now, budget.deadline).unwrap_or(Duration::MAX),
            reason: Some(budget.reason),
            rule: Some(Arc::clone(&budget.rule)),
        });
        listed.collect()
    }

    fn acl(&self) -> Vec<AclListing> {
        self.state.lock().acl.list(ktime())
    }

    fn is_in_policy(&self, list: List, prefix: IpNet) -> bool {
        self.state.lock().acl.in_policy(list, canonical(prefix))
    }

    fn is_allowed(&self, address: IpAddr) -> bool {
        self.state.lock().acl.allow_around(acl::host(address), ktime()).is_some()
    }

    fn expire(&self) -> Result<usize, DataplaneError> {
        let now = ktime();
        let mut state = self.state.lock();
        state.fail()?;
        let prefixes = state.acl.expired(now);
        for (list, prefix) in &prefixes {
            state.acl.remove(*list, *prefix);
        }
        let before = state.budgets.len();
        state.budgets.retain(|_, budget| budget.deadline > now);
        Ok(prefixes.len() + before - state.budgets.len())
    }

    fn events(&self) -> Result<Option<EventReader>, DataplaneError> {
        Ok(None)
    }

    fn event_counts(&self) -> Result<Vec<(EventClass, EventCounts)>, DataplaneError> {
        Ok(Vec::new())
    }

    fn rule_in(&self, _: u32) -> Option<Arc<str>> {
        None
    }

    fn flush_diagnosis(&self) {}

    fn map_usage(&self) -> Result<Vec<MapUsage>, DataplaneError> {
        let mut state = self.state.lock();
        state.fail()?;
        let usage = [(true, "BUDGETS_V4"), (false, "BUDGETS_V6")].map(|(is_ipv4, map)| MapUsage {
            map,
            entries: state.budgets.keys().filter(|source| source.is_ipv4() == is_ipv4).count() as u64,
            capacity: MAX_BUDGETS.into(),
        });
        Ok(usage.to_vec())
    }

    fn interfaces(&self) -> Result<Vec<AttachedInterface>, DataplaneError> {
        Ok(Vec::new())
    }

    fn missing(&self) -> Vec<MissingInterface> {
        Vec::new()
    }

    fn mend(&self) -> Result<(), DataplaneError> {
        Ok(())
    }

    fn reload(&self, policy: &Policy) -> Result<(), DataplaneError> {
        let mut state = self.state.lock();
        state.fail()?;
        let operators: Vec<_> = state.acl.operators().collect();
        state.acl = Acl::new(&policy.allow, &policy.deny, operators, ktime());
        state.reloads += 1;
        Ok(())
    }

    fn reconfigure(&self, settings: &LiveSettings, policy: &Policy) -> Result<(), DataplaneError> {
        self.reload(policy)?;
        self.state.lock().settings = Some(settings.clone());
        Ok(())
    }

    fn stop(&self) -> Result<(), DataplaneError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn a_block_under_an_allow_prefix_and_an_absent_prefix_are_errors() {
        let policy =
            Policy { allow: vec![net("192.0.2.0/24")], deny: vec![net("203.0.113.0/24")], ..Policy::default() };
        let fake = FakeDataplane::new(SrcPrefixes::default(), &policy);
        let covered = fake.block(net("192.0.2.7/32"), None).unwrap_err().to_string();
        assert!(covered.contains("192.0.2.0/24 contains it"), "{covered}");
        let absent = fake.unblock(net("203.0.113.0/24")).unwrap_err().to_string();
        assert!(absent.contains("the policy file has it"), "{absent}");
        fake.block(net("198.51.100.0/24"), None).unwrap();
        fake.unblock(net("198.51.100.0/24")).unwrap();
    }

    #[test]
    fn entries_end_at_their_deadline_and_operators_entries_outlive_reloads() {
        let fake = FakeDataplane::default();
        fake.block(net("192.0.2.7/32"), Some(Duration::ZERO)).unwrap();
        fake.block(net("192.0.2.8/32"), None).unwrap();
        fake.push_budget("2001:db8::1".parse().unwrap(), Duration::ZERO, BudgetReason::KeepsSending, "r").unwrap();
        assert_eq!(fake.expire().unwrap(), 2);
        fake.reload(&Policy::default()).unwrap();
        let listed = fake.acl();
        assert_eq!(listed.len(), 1);
        assert_eq!((listed[0].prefix, listed[0].remaining), (net("192.0.2.8/32"), None));
    }
}

//! The real data plane.

use std::{borrow::Cow, fs::File, net::IpAddr, sync::Arc, time::Duration};

use ipnet::IpNet;
use limiter_common::{
    budget::{Budget, BudgetEntry, BudgetReason},
    event::{EventClass, EventCounts},
    quota::Quota,
    schema::{MAX_ACL_PREFIXES, MAX_BUDGETS},
    stats::NO_RULE,
    time::KtimeNs,
    verdict::Verdict,
};
use parking_lot::{Mutex, MutexGuard, RwLock};

use super::{
    AclListing, AttachedInterface, BudgetEffect, BudgetListing, Dataplane, DataplaneConfig, DataplaneError,
    EventReader, List, LiveSettings, MapUsage, MissingInterface, OnExit, RuleCounter, Tuning,
    acl::{self, Acl, canonical},
    attach,
    budgets::Budgets,
    compile::{self, CompiledRules},
    loader::{self, Attached, CREATED, Plan},
    maps,
    pins::PinDir,
    slots::Slots,
};
use crate::policy::Policy;

/// A program in force, and what the agent knows of its maps.
///
/// Dropping it changes nothing in the kernel: the program goes on behind its pinned links.
#[derive(Debug)]
pub struct KernelDataplane {
    object: Cow<'static, [u8]>,
    tuning: Tuning,
    /// Held by whoever makes a new program, and by whoever changes what goes into one, so that no change is lost. What
    /// runs all the time (counters, budgets, expiry) goes on meanwhile.
    building: Mutex<()>,
    /// Locked for system calls on maps and links, never while a program is loaded.
    state: RwLock<State>,
    _lock: File,
}

#[derive(Debug)]
struct State {
    /// As it is in force.
    config: DataplaneConfig,
    attached: Attached,
    rules: Arc<CompiledRules>,
    /// Ids of request rules, whose slots are not given away.
    request_rules: Vec<Arc<str>>,
    acl: Acl,
    budgets: Budgets,
}

impl State {
    /// Puts an operator's entry into a list, or removes it, and writes anew what is in that prefix and now holds longer or
    /// shorter. An error changes nothing.
    fn list(&mut self, list: List, prefix: IpNet, deadline: Option<KtimeNs>) -> Result<(), DataplaneError> {
        let before = self.acl.entries_in(list, prefix);
        let held = self.acl.set(list, prefix, deadline);
        let after = self.acl.entries_in(list, prefix);
        let written = self.attached.maps.rewrite_acl(list, &before, &after);
        if written.is_err() {
            self.acl.set(list, prefix, held);
            if let Err(error) = self.attached.maps.rewrite_acl(list, &after, &before) {
                tracing::warn!(
                    target: "limiter::dataplane", %error,
                    "what is in {prefix} may end at another time than it should, until the next reload",
                );
            }
        }
        written
    }
}

/// Result of running the program on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TestRun {
    pub dropped: bool,
    /// Time that one run took, on average.
    pub duration: Duration,
}

impl KernelDataplane {
    /// Loads the program and puts it in force; takes over what an earlier agent left pinned. An error leaves nothing
    /// attached or pinned that was not before.
    pub fn start(
        object: impl Into<Cow<'static, [u8]>>,
        config: DataplaneConfig,
        policy: &Policy,
        tuning: Tuning,
    ) -> Result<Self, DataplaneError> {
        Self::start_unexplained(object.into(), config, policy, tuning).map_err(DataplaneError::explained)
    }

    fn start_unexplained(
        object: Cow<'static, [u8]>,
        config: DataplaneConfig,
        policy: &Policy,
        tuning: Tuning,
    ) -> Result<Self, DataplaneError> {
        let rules = Arc::new(compile::compile(&policy.packet_rules)?);
        let (pins, created) = PinDir::prepare(&config.pin_dir, tuning.schema)?;
        let lock = pins.lock()?;
        let _older = pins.lock_older()?;
        let acl = Acl::new(&policy.allow, &policy.deny, maps::read_operators(&pins)?, tuning.now());
        let plan = Plan { object: &object, config: &config, tuning: &tuning, rules: &rules, acl: &acl, slots: None };
        let configured = loader::load(plan, pins, created)?.verify()?.fill()?;
        let budgets = configured.budgets()?;
        let attached = configured.start(&budgets)?;
        let state = State { config, attached, rules, request_rules: request_rules(policy), acl, budgets };
        Ok(Self { object, tuning, building: Mutex::new(()), state: RwLock::new(state), _lock: lock })
    }

    /// Runs the program on a frame, as if it had arrived. Counts and charges.
    pub fn test_run(&self, frame: &[u8], repeat: u32) -> Result<TestRun, DataplaneError> {
        const XDP_DROP: u32 = 1;
        let result = self.state.read().attached.test_run(frame, repeat)?;
        Ok(TestRun { dropped: result.return_value == XDP_DROP, duration: result.duration })
    }

    /// Instructions that the verifier walked through.
    pub fn verified_instructions(&self) -> Option<u32> {
        self.state.read().attached.verified_instructions
    }

    /// Size of the program, without what the verifier has removed.
    pub fn program_bytes(&self) -> Option<u32> {
        self.state.read().attached.program_bytes
    }

    fn put(&self, list: List, prefix: IpNet, lasts: Option<Duration>) -> Result<(), DataplaneError> {
        let prefix = canonical(prefix);
        let now = self.tuning.now();
        let deadline = lasts.map_or(KtimeNs::NEVER, |lasts| acl::deadline(now, lasts));
        let building = self.building.lock();
        let mut state = self.state.write();
        if list == List::Deny
            && let Some(allow) = state.acl.allow_around(prefix, now)
        {
            return Err(DataplaneError::Covered { prefix, allow });
        }
        // The policy's entry has no deadline, and so holds longer than any other, until a policy comes without it.
        if state.acl.in_policy(list, prefix) {
            state.acl.hide(list, prefix, deadline);
            return Ok(());
        }
        let is_ipv4 = prefix.addr().is_ipv4();
        let count = state.acl.count(list, is_ipv4) + 1;
        if count > MAX_ACL_PREFIXES as usize {
            let what = match list {
                List::Allow => "allow prefixes",
                List::Deny => "deny prefixes",
            };
            return Err(DataplaneError::TooMany { what, count, capacity: MAX_ACL_PREFIXES });
        }
        if state.attached.looks_up(list, prefix) {
            return state.list(list, prefix, Some(deadline));
        }
        // The first of its kind that operators add: the program in force may not look for it.
        let mut acl = state.acl.clone();
        acl.insert(list, prefix, deadline);
        let (config, rules) = (state.config.clone(), Arc::clone(&state.rules));
        let request_rules = state.request_rules.clone();
        drop(state);
        self.replace(&building, config, rules, request_rules, acl)
    }

    /// Makes a program of these rules and lists, and puts it in force in one step. An error changes nothing.
    fn replace(
        &self,
        _building: &MutexGuard<'_, ()>,
        config: DataplaneConfig,
        rules: Arc<CompiledRules>,
        request_rules: Vec<Arc<str>>,
        acl: Acl,
    ) -> Result<(), DataplaneError> {
        let slots = self.state.write().reserve_slots(&rules)?;
        let (mut pins, created) = PinDir::prepare(&config.pin_dir, self.tuning.schema)?;
        pins.forget_older();
        let Self { object, tuning, .. } = self;
        let plan = Plan { object, config: &config, tuning, rules: &rules, acl: &acl, slots: Some(&slots) };
        let configured = loader::load(plan, pins, created)?.verify()?.fill()?;
        let mut guard = self.state.write();
        let state = &mut *guard;
        let attached = configured.replace(&mut state.attached, &state.budgets)?;
        let replaced = std::mem::replace(&mut state.attached, attached);
        (state.config, state.rules, state.request_rules, state.acl) = (config, rules, request_rules, acl);
        drop(guard);
        // Freeing the maps of a long list takes a while.
        drop(replaced);
        Ok(())
    }

    /// A program of this policy, and of the configuration in force or what is made of it.
    fn rebuild(
        &self,
        policy: &Policy,
        config: impl FnOnce(&DataplaneConfig) -> DataplaneConfig,
    ) -> Result<(), DataplaneError> {
        let rules = Arc::new(compile::compile(&policy.packet_rules)?);
        let building = self.building.lock();
        let (config, operators): (_, Vec<_>) = {
            let state = self.state.read();
            (config(&state.config), state.acl.operators().collect())
        };
        let acl = Acl::new(&policy.allow, &policy.deny, operators, self.tuning.now());
        self.replace(&building, config, rules, request_rules(policy), acl)
    }

    fn take(&self, list: List, prefix: IpNet) -> Result<(), DataplaneError> {
        let prefix = canonical(prefix);
        let _building = self.building.lock();
        let mut state = self.state.write();
        if state.acl.forget_hidden(list, prefix) {
            return Ok(());
        }
        state.acl.require(list, prefix)?;
        state.list(list, prefix, None)
    }

    /// Removes what was pushed for sources in `prefix`; whether there was any. To whoever operates a host, an address
    /// that the agent blocked is as blocked as one of a list.
    fn lift(&self, prefix: IpNet) -> Result<bool, DataplaneError> {
        let prefix = canonical(prefix);
        let mut state = self.state.write();
        let State { config, attached, budgets, .. } = &mut *state;
        let prefixes = config.src_prefixes;
        let is_inside = |source: &IpAddr| {
            let is_part = prefix.prefix_len() >= prefixes.len_of(*source) && prefixes.cut(prefix.addr()) == *source;
            is_part || prefix.contains(source)
        };
        let sources: Vec<IpAddr> = budgets.iter().map(|(source, _)| *source).filter(is_inside).collect();
        for source in &sources {
            budgets.remove(&mut attached.maps, *source)?;
        }
        Ok(!sources.is_empty())
    }

    fn push(
        &self,
        source: IpAddr,
        lasts: Duration,
        rule: &str,
        budget: impl FnOnce(KtimeNs, u32) -> Budget,
    ) -> Result<(), DataplaneError> {
        let mut state = self.state.write();
        let State { config, attached, rules, request_rules, budgets, .. } = &mut *state;
        if !config.budgets {
            return Err(DataplaneError::BudgetsOff);
        }
        let source = config.src_prefixes.cut(source);
        if budgets.get(&source).is_none() {
            let same_family = budgets.count(source.is_ipv4());
            if same_family >= MAX_BUDGETS as usize {
                let count = same_family + 1;
                return Err(DataplaneError::TooMany { what: "budgets", count, capacity: MAX_BUDGETS });
            }
        }
        let slot = match attached.slots.slot(rule) {
            Some(slot) => slot,
            None => {
                let rule: Arc<str> = rule.into();
                let in_use = || rules.rules.iter().map(|rule| &rule.id).chain(&*request_rules).cloned().collect();
                let taken = attached.slots.take(&rule, in_use);
                if let Some(taken) = taken {
                    attached.maps.give_slot(taken, &rule)?;
                }
                taken.map_or(NO_RULE, |taken| taken.slot)
            }
        };
        let now = self.tuning.now();
        let budget = budget(acl::deadline(now, lasts), slot);
        // One that goes on is no news for being pushed again.
        let goes_on = |held: &&Budget| !held.expired(now) && held.is_block() == budget.is_block();
        let reported = match budgets.get(&source).filter(goes_on) {
            Some(_) => attached.maps.budget_reported(source)?,
            None => 0,
        };
        budgets.insert(&mut attached.maps, source, BudgetEntry { budget, reported })
    }
}

/// Ids of the rules that budgets may name.
fn request_rules(policy: &Policy) -> Vec<Arc<str>> {
    policy.rules.iter().map(|rule| Arc::clone(&rule.id)).collect()
}

impl State {
    /// Slots with one for each of `rules`. The program in force still counts in those of its own rules, so they are
    /// given away only when there is no other.
    fn reserve_slots(&mut self, rules: &CompiledRules) -> Result<Slots, DataplaneError> {
        let Attached { maps, slots, .. } = &mut self.attached;
        let (new, old) = (rules.ids(), self.rules.ids());
        let taken = slots.take_all(rules.by_width(), &new.union(&old).copied().collect());
        let taken = taken.or_else(|_| slots.take_all(rules.by_width(), &new)).map_err(loader::too_many_rules)?;
        for taken in taken {
            if let Some(rule) = slots.rule(taken.slot) {
                maps.give_slot(taken, rule)?;
            }
        }
        Ok(slots.clone())
    }
}

impl Dataplane for KernelDataplane {
    fn counters(&self) -> Result<Vec<RuleCounter>, DataplaneError> {
        let state = self.state.read();
        let Attached { maps, slots, .. } = &state.attached;
        let rules = slots.taken().map(|(slot, rule)| (slot, Some(Arc::clone(rule))));
        let mut counters = Vec::new();
        for (slot, rule) in std::iter::once((NO_RULE, None)).chain(rules) {
            let of_slot = maps.counters(slot)?;
            for verdict in Verdict::all() {
                let counter = *of_slot.of(verdict);
                if counter.packets > 0 {
                    counters.push(RuleCounter { rule: rule.clone(), verdict, counter });
                }
            }
        }
        Ok(counters)
    }

    fn block(&self, prefix: IpNet, lasts: Option<Duration>) -> Result<(), DataplaneError> {
        self.put(List::Deny, prefix, lasts)
    }

    fn unblock(&self, prefix: IpNet) -> Result<(), DataplaneError> {
        let lifted = self.lift(prefix)?;
        match self.take(List::Deny, prefix) {
            Err(DataplaneError::Absent { in_policy: false, .. }) if lifted => Ok(()),
            taken => taken,
        }
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
        self.push(source, lasts, rule, |deadline, slot| Budget::block(deadline, reason, slot))
    }

    fn replace_budget(
        &self,
        source: IpAddr,
        packets: Quota,
        lasts: Duration,
        reason: BudgetReason,
        rule: &str,
    ) -> Result<(), DataplaneError> {
        let packets = packets.params().map_err(|source| DataplaneError::Quota { rule: rule.to_owned(), source })?;
        self.push(source, lasts, rule, |deadline, slot| Budget::replace(packets, deadline, reason, slot))
    }

    fn remove_budget(&self, source: IpAddr) -> Result<bool, DataplaneError> {
        let State { config, attached, budgets, .. } = &mut *self.state.write();
        budgets.remove(&mut attached.maps, config.src_prefixes.cut(source))
    }

    fn budgets(&self) -> Vec<BudgetListing> {
        let now = self.tuning.now();
        let state = self.state.read();
        let holding = state.budgets.iter().filter(|(_, budget)| !budget.expired(now));
        let listed = holding.map(|(source, budget)| {
            let prefix = IpNet::new(*source, state.config.src_prefixes.len_of(*source));
            BudgetListing {
                source: prefix.unwrap_or_else(|_| acl::host(*source)),
                effect: if budget.is_block() { BudgetEffect::Block } else { BudgetEffect::Replace },
                remaining: acl::remaining(now, budget.deadline()).unwrap_or(Duration::MAX),
                reason: budget.reason(),
                rule: state.attached.slots.rule(budget.rule_slot()).cloned(),
            }
        });
        listed.collect()
    }

    fn acl(&self) -> Vec<AclListing> {
        self.state.read().acl.list(self.tuning.now())
    }

    fn is_in_policy(&self, list: List, prefix: IpNet) -> bool {
        self.state.read().acl.in_policy(list, canonical(prefix))
    }

    fn is_allowed(&self, address: IpAddr) -> bool {
        self.state.read().acl.allow_around(acl::host(address), self.tuning.now()).is_some()
    }

    fn expire(&self) -> Result<usize, DataplaneError> {
        let now = self.tuning.now();
        // Most of the time there is nothing to remove, and nobody has to wait.
        let (prefixes, sources) = {
            let state = self.state.read();
            (state.acl.expired(now), state.budgets.expired(now))
        };
        let mut removed = 0;
        if prefixes.is_empty() && sources.is_empty() {
            return Ok(removed);
        }
        let State { attached, acl, budgets, .. } = &mut *self.state.write();
        for (list, prefix) in prefixes {
            // It may have got a new deadline meanwhile. What is in it holds no shorter without it.
            if acl.is_expired(list, prefix, now) {
                attached.maps.remove_acl(list, prefix)?;
                acl.remove(list, prefix);
                removed += 1;
            }
        }
        for source in sources {
            if budgets.get(&source).is_some_and(|budget| budget.expired(now)) {
                budgets.remove(&mut attached.maps, source)?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    fn events(&self) -> Result<Option<EventReader>, DataplaneError> {
        EventReader::open(&self.state.read().attached.pins).map(Some)
    }

    fn event_counts(&self) -> Result<Vec<(EventClass, EventCounts)>, DataplaneError> {
        let state = self.state.read();
        EventClass::ALL.iter().map(|class| Ok((*class, state.attached.maps.event_counts(*class)?))).collect()
    }

    fn rule_in(&self, slot: u32) -> Option<Arc<str>> {
        self.state.read().attached.slots.rule(slot).cloned()
    }

    fn flush_diagnosis(&self) {
        let state = self.state.read();
        let Attached { lines, slots, .. } = &state.attached;
        if let Some(lines) = lines {
            lines.flush(slots);
        }
    }

    fn map_usage(&self) -> Result<Vec<MapUsage>, DataplaneError> {
        let state = self.state.read();
        let mut usage = Vec::new();
        for (list, is_ipv4, map) in [
            (List::Allow, true, "ALLOW_V4"),
            (List::Allow, false, "ALLOW_V6"),
            (List::Deny, true, "DENY_V4"),
            (List::Deny, false, "DENY_V6"),
        ] {
            let entries = state.acl.count(list, is_ipv4) as u64;
            usage.push(MapUsage { map, entries, capacity: MAX_ACL_PREFIXES.into() });
        }
        for (is_ipv4, map) in [(true, "BUDGETS_V4"), (false, "BUDGETS_V6")] {
            let entries = state.budgets.count(is_ipv4) as u64;
            usage.push(MapUsage { map, entries, capacity: MAX_BUDGETS.into() });
        }
        for ((map, created), capacity) in
            ["BUCKETS_V4", "BUCKETS_V6"].into_iter().zip(CREATED).zip(state.attached.max_sources)
        {
            // Buckets only leave when the map is full and a newer one needs the place.
            let capacity = u64::from(capacity);
            let entries = state.attached.maps.creation(created)?.min(capacity);
            usage.push(MapUsage { map, entries, capacity });
        }
        Ok(usage)
    }

    fn interfaces(&self) -> Result<Vec<AttachedInterface>, DataplaneError> {
        let state = self.state.read();
        state.attached.in_force()
    }

    fn missing(&self) -> Vec<MissingInterface> {
        self.state.read().attached.missing()
    }

    fn mend(&self) -> Result<(), DataplaneError> {
        // A program that is being made is attached or exchanged soon.
        let Some(_building) = self.building.try_lock() else { return Ok(()) };
        let State { config, attached, .. } = &mut *self.state.write();
        attached.mend(config.mode)
    }

    fn reload(&self, policy: &Policy) -> Result<(), DataplaneError> {
        self.rebuild(policy, DataplaneConfig::clone)
    }

    fn reconfigure(&self, settings: &LiveSettings, policy: &Policy) -> Result<(), DataplaneError> {
        self.rebuild(policy, |config| config.with(settings))
    }

    fn stop(&self) -> Result<(), DataplaneError> {
        let state = self.state.read();
        match state.config.on_exit {
            OnExit::Keep => Ok(()),
            OnExit::Detach => attach::detach_all(&state.attached.pins),
        }
    }
}

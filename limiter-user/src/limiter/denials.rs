//! Denials that are remembered, so that whoever keeps on asking costs one look instead of one for each rule. The second
//! denial in a row is the first to be remembered.
//!
//! What is remembered is not an answer but what it is made of, so that each answer is that of its own time: the rule that
//! decided, what its counter said, and the other rules that deny as well. It holds while a full check would say the same:
//!
//! - until the first of the counters that deny does not any more, or a window ends, or an admission leaves a log
//!   ([`Denial::until`]): within that time a counter that nothing happens to says what can be computed from what it said;
//! - as long as nothing happens to any counter of the request: [`Moment`] tells. A counter that denies may not change at
//!   all, by a refund for one, and one that allows may be charged as long as it goes on to allow;
//! - for the same question: policy, shares of pressure, caller, plan, address, attributes and endpoint groups are in the
//!   [`Key`]. An API key that ends or changes its plan makes another caller, and a reload another policy.
//!
//! Architecture invariant: only what counters in memory say is remembered, of requests that are charged, with the cost that
//! a gateway's have. Whatever is lost here, or found not to hold, costs a full check and changes no answer.

mod key;
mod table;

use std::sync::Arc;

use limiter_common::{addr::SrcPrefixes, rule::EnforcementMode, sliding_window::Outcome, time::UnixMicros};
use smallvec::SmallVec;

pub(super) use self::key::Caller;
use self::{key::Key, table::Table};
use super::{AddressDenial, Answer, CheckSource, Decision, Kind, Request, Touched, select::Matches};
use crate::{
    active::Active,
    policy::Scope,
    store::{
        Algorithm, CellOutcome, Charge,
        algorithm::View,
        memory::{MemoryStore, Moment, Watched},
    },
};

/// Rules that deny the same request beside the one that decides. Of more it is not remembered.
const MAX_OTHERS: usize = 32;
/// No denial is remembered for longer without a look at its counters.
const LONGEST_US: u64 = 3_600_000_000;

/// All denials that are remembered.
#[derive(Debug)]
pub(super) struct Denials {
    table: Table,
    secret: key::Secret,
}

/// How long a client is told to wait.
#[derive(Clone, Copy, Debug)]
enum Wait {
    /// Until this instant.
    Until(u64),
    /// As long whenever it asks.
    For(u64),
    /// Waiting does not help.
    Never,
}

/// What the answers to one denied question are made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Denial {
    /// Of the counters.
    moment: Moment,
    /// When it was decided: a clock that steps back asks anew.
    since: u64,
    /// From here on another answer may be right.
    until: u64,
    kind: Kind,
    /// The rule that decided, and what its counter said.
    rule: u16,
    algorithm: Algorithm,
    view: View,
    wait: Wait,
    is_tightened: bool,
    /// The rule of the address's longest denial, and when that ends.
    address: Option<(u16, u64)>,
    /// The other rules that deny: enforced ones, and those in shadow mode.
    others: [u16; MAX_OTHERS],
    others_len: u8,
}

impl Denials {
    /// For so many counters: one denial for each 64 of them, at most 64 Ki.
    /// `None` without random numbers: then nothing is remembered.
    pub(super) fn new(counters: usize) -> Option<Self> {
        let secret = key::Secret::random().ok()?;
        Some(Self { table: Table::new((counters / 64).clamp(64, 1 << 16)), secret })
    }

    /// Whether a denial of this request would be remembered.
    pub(super) fn are_of(request: &Request<'_>) -> bool {
        request.charge == Charge::Commit && request.cost == 1
    }

    /// Whether any denial of a caller may be remembered: of most none is, and that is seen at once.
    #[inline]
    pub(super) fn may_have(&self, caller: Caller, now: UnixMicros) -> bool {
        self.table.may_have(caller, now.get())
    }

    /// Whether the next denial of a caller is to be remembered: whoever is denied once and goes away is not worth it.
    #[inline]
    pub(super) fn comes_back(&self, caller: Caller) -> bool {
        self.table.comes_back(caller)
    }

    /// A caller is denied who did not come back.
    pub(super) fn note(&self, caller: Caller) {
        self.table.note(caller);
    }

    pub(super) fn key(
        &self,
        active: &Active,
        request: &Request<'_>,
        prefixes: SrcPrefixes,
        plan: Option<usize>,
        matches: &Matches,
    ) -> Key {
        let address = request.subject.address.map(|client| prefixes.cut(client.address));
        Key::new(&self.secret, active, request, address, plan, matches)
    }

    pub(super) fn find(&self, key: &Key, now: UnixMicros, counters: &MemoryStore) -> Option<Denial> {
        self.table.find(key, |denial| denial.holds(now, counters))
    }

    /// Remembers a denial, if it lasts.
    pub(super) fn remember(&self, caller: Caller, key: &Key, denial: Denial) {
        self.table.put(caller, key, denial);
    }
}

impl Denial {
    /// Of a request that was decided a moment ago by the rule at `deciding` of those that it touched.
    pub(super) fn new(
        now: UnixMicros,
        touched: &Touched<'_>,
        outcomes: &[CellOutcome],
        watched: &Watched,
        (decision, deciding): (&Decision, usize),
        active: &Active,
    ) -> Option<Self> {
        let index = |position: usize| u16::try_from(touched.rules[position]).ok();
        let mut until = watched.changes_us.min(now.get().saturating_add(LONGEST_US));
        let mut address: Option<(u16, u64)> = None;
        let mut others = [0; MAX_OTHERS];
        let mut others_len = 0;
        for (position, (cell, outcome)) in touched.cells.iter().zip(outcomes).enumerate() {
            let ends = match outcome.outcome {
                Outcome::Allowed => continue,
                Outcome::Denied { retry_after_us } => {
                    let ends = now.get().checked_add(retry_after_us)?;
                    until = until.min(ends);
                    Some(ends)
                }
                Outcome::Never => None,
            };
            if position != deciding {
                *others.get_mut(others_len)? = index(position)?;
                others_len += 1;
            }
            if cell.enforced
                && let (Scope::Ip, Some(ends)) = (active.policy.rules[touched.rules[position]].scope, ends)
                && address.is_none_or(|(_, longest)| longest < ends)
            {
                address = Some((index(position)?, ends));
            }
        }
        let answer = decision.answer.as_ref()?;
        let wait = match (outcomes[deciding].outcome, answer.retry_after_us) {
            (Outcome::Denied { retry_after_us }, _) => Wait::Until(now.get().checked_add(retry_after_us)?),
            (Outcome::Never, Some(wait_us)) => Wait::For(wait_us),
            (Outcome::Never, None) => Wait::Never,
            (Outcome::Allowed, _) => return None,
        };
        let denial = Self {
            moment: watched.moment?,
            since: now.get(),
            until,
            kind: decision.kind,
            rule: index(deciding)?,
            algorithm: touched.cells[deciding].algorithm,
            view: *watched.views.get(deciding)?,
            wait,
            is_tightened: answer.is_tightened,
            address,
            others,
            others_len: u8::try_from(others_len).ok()?,
        };
        (until > now.get()).then_some(denial)
    }

    fn holds(&self, now: UnixMicros, counters: &MemoryStore) -> bool {
        (self.since..self.until).contains(&now.get()) && counters.is_as_at(&self.moment)
    }

    /// The answer of `now`, counted as that of a full check is.
    pub(super) fn answer(&self, active: &Active, unauthenticated: bool, now: UnixMicros) -> Decision {
        let now_us = now.get();
        let mut shadow = SmallVec::new();
        for index in self.others.iter().take(usize::from(self.others_len)).copied().map(usize::from) {
            let (rule, metrics) = (&active.policy.rules[index], &active.metrics[index]);
            if rule.mode == EnforcementMode::Enforce {
                metrics.count_also_denied();
            } else {
                metrics.count_shadow_denied();
                shadow.push(Arc::clone(&rule.id));
            }
        }
        let address_denial = self.address.map(|(rule, ends)| {
            let rule = &active.policy.rules[usize::from(rule)];
            let covers_all = rule.endpoint.is_none();
            AddressDenial { rule: Arc::clone(&rule.id), retry_after_us: ends.saturating_sub(now_us), covers_all }
        });
        let index = usize::from(self.rule);
        // Only what memory says is remembered here.
        active.metrics[index].count(self.kind, CheckSource::Memory);
        active.remembered.count();
        let (rule, view) = (&active.policy.rules[index], self.view);
        let answer = Answer {
            rule: Arc::clone(&rule.id),
            ceiling: self.algorithm.ceiling(),
            window_us: self.algorithm.quota_us(),
            remaining: self.algorithm.remaining(view, now_us),
            reset_us: self.algorithm.reset_us(view, now_us),
            retry_after_us: match self.wait {
                Wait::Until(ends) => Some(ends.saturating_sub(now_us)),
                Wait::For(wait_us) => Some(wait_us),
                Wait::Never => None,
            },
            is_tightened: self.is_tightened,
            response: rule.response.clone(),
        };
        let decision = Decision::without_rule(unauthenticated, now);
        Decision { kind: self.kind, answer: Some(answer), shadow, address_denial, ..decision }
    }
}

#[cfg(test)]
mod tests;

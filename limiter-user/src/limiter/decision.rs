//! One answer out of many counters.

use std::sync::Arc;

use limiter_common::{rule::EnforcementMode, sliding_window::Outcome, time::UnixMicros};
use smallvec::SmallVec;

use super::{CheckSource, Request, Touched, Turn, failure::Failing};
use crate::{
    metrics::RuleMetrics,
    policy::{BypassKind, FailurePolicy, Limit, Precision, ResponseTemplate, Rule, Scope},
    store::{CellOutcome, Charge},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Allowed,
    Denied,
    /// The cost is above a ceiling, so waiting does not help.
    Unsatisfiable,
    /// A rule wants its counters shared, and they cannot be.
    Unavailable,
    /// The API key is unknown or disabled, or the token is not valid.
    Unauthenticated,
}

impl Kind {
    pub const ALL: &[Self] =
        &[Self::Allowed, Self::Denied, Self::Unsatisfiable, Self::Unavailable, Self::Unauthenticated];

    /// The name in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Denied => "denied",
            Self::Unsatisfiable => "unsatisfiable",
            Self::Unavailable => "unavailable",
            Self::Unauthenticated => "unauthenticated",
        }
    }
}

/// The answer to a request.
#[derive(Debug)]
#[must_use]
pub struct Decision {
    pub kind: Kind,
    /// When it was decided, by the clock of windows.
    pub now: UnixMicros,
    /// What the rule that decided says; `None` when no rule applies.
    pub answer: Option<Answer>,
    /// Shadow rules that would have denied.
    pub shadow: SmallVec<[Arc<str>; 2]>,
    /// The denial of the address itself that lasts longest.
    pub address_denial: Option<AddressDenial>,
    /// Why no rule was asked.
    pub bypass: Option<BypassKind>,
    /// To be waited for before the answer is given.
    pub turn: Option<Turn>,
}

/// State of the rule that decided: the longest wait of those that deny, else the least remaining.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub rule: Arc<str>,
    pub ceiling: u64,
    pub window_us: u64,
    pub remaining: u64,
    pub reset_us: u64,
    /// On a denial that waiting ends.
    pub retry_after_us: Option<u64>,
    /// The rule gives way to pressure at this time: its limit is less than it would be.
    pub is_tightened: bool,
    /// How the rule wants its denials answered.
    pub response: Option<Arc<ResponseTemplate>>,
}

/// An enforced rule of scope `ip` that denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressDenial {
    pub rule: Arc<str>,
    pub retry_after_us: u64,
    /// The rule covers every request of the address, not one group of endpoints.
    pub covers_all: bool,
}

impl Decision {
    /// Whether a limit denies it.
    pub const fn is_refusal(&self) -> bool {
        matches!(self.kind, Kind::Denied | Kind::Unsatisfiable | Kind::Unavailable)
    }

    pub(super) fn without_rule(unauthenticated: bool, now: UnixMicros) -> Self {
        let kind = if unauthenticated { Kind::Unauthenticated } else { Kind::Allowed };
        Self { kind, now, answer: None, shadow: SmallVec::new(), address_denial: None, bypass: None, turn: None }
    }
}

/// Whether a cell's ceiling is less than its rule says, under pressure.
#[cold]
fn is_tightened(request: &Request<'_>, touched: &Touched<'_>, rules: &[Rule], position: usize) -> bool {
    let whole = rules[touched.rules[position]].limit_for(request.subject.client(), touched.plan);
    whole != Limit::Limited(touched.cells[position].algorithm)
}

/// Who decided the counters of a request, where it was not memory as rules want it.
#[derive(Clone, Copy)]
pub(super) struct Decided<'a> {
    pub(super) failing: &'a Failing,
    /// By the places of the cells; empty where all are from memory.
    pub(super) sources: &'a [CheckSource],
}

impl<'a> Decided<'a> {
    pub(super) const fn by_memory(failing: &'a Failing) -> Self {
        Self { failing, sources: &[] }
    }
}

/// Also says which of the touched rules decided.
pub(super) fn conclude(
    request: &Request<'_>,
    now: UnixMicros,
    touched: &Touched<'_>,
    outcomes: &[CellOutcome],
    Decided { failing, sources }: Decided<'_>,
    rules: &[Rule],
    metrics: &[RuleMetrics],
) -> (Decision, Option<usize>) {
    let mut decision = Decision::without_rule(request.subject.is_unauthenticated(), now);
    // How much each candidate presses: waits above remainders, longer waits and smaller remainders first.
    let mut worst: Option<(u64, usize)> = None;
    let mut denied = false;
    for (position, (index, outcome)) in touched.rules.iter().zip(outcomes).enumerate() {
        if let Some(failing) = failing.at(position)
            && request.charge == Charge::Commit
        {
            metrics[*index].count_failure(failing.policy);
        }
        let (denies, pressure) = match outcome.outcome {
            Outcome::Allowed => (false, u64::MAX - outcome.remaining),
            Outcome::Denied { retry_after_us } => (true, retry_after_us.min(u64::MAX - 1)),
            Outcome::Never => (true, u64::MAX),
        };
        if rules[*index].mode != EnforcementMode::Enforce {
            if denies {
                if request.charge == Charge::Commit {
                    metrics[*index].count_shadow_denied();
                }
                decision.shadow.push(Arc::clone(&rules[*index].id));
            }
            continue;
        }
        // Only the address itself can be too much: not this node's share of its limit, nor that nothing can be shared.
        let is_excused =
            failing.at(position).is_some_and(|failing| failing.is_of_share || failing.policy != FailurePolicy::Local);
        if let (Scope::Ip, Outcome::Denied { retry_after_us }) = (rules[*index].scope, outcome.outcome)
            && !is_excused
            && decision.address_denial.as_ref().is_none_or(|denial| denial.retry_after_us < retry_after_us)
        {
            let covers_all = rules[*index].endpoint.is_none();
            decision.address_denial =
                Some(AddressDenial { rule: Arc::clone(&rules[*index].id), retry_after_us, covers_all });
        }
        if outcome.over > 0
            && rules[*index].precision == Precision::Async
            && !is_tightened(request, touched, rules, position)
        {
            metrics[*index].saw_overshoot(outcome.over, now);
        }
        let first_denial = denies && !denied;
        if first_denial || (denies == denied && worst.is_none_or(|(highest, _)| pressure > highest)) {
            worst = Some((pressure, position));
        }
        denied |= denies;
    }
    let Some((_, position)) = worst else {
        return (decision, None);
    };
    let (index, cell, outcome) = (touched.rules[position], &touched.cells[position], &outcomes[position]);
    let (is_tightened, fits_whole) = match rules[index].limit_for(request.subject.client(), touched.plan) {
        Limit::Limited(whole) => (whole != cell.algorithm, cell.cost <= whole.ceiling()),
        Limit::Unlimited => (false, false),
    };
    // What fits the whole limit and not what is left of it can be allowed when the pressure is gone.
    let fits_later = is_tightened && fits_whole && outcome.outcome == Outcome::Never;
    if denied {
        let never = outcome.outcome == Outcome::Never && !fits_later;
        let is_closed = failing.at(position).is_some_and(|failing| failing.policy == FailurePolicy::Closed);
        decision.kind = match (is_closed, never) {
            (true, _) => Kind::Unavailable,
            (false, true) => Kind::Unsatisfiable,
            (false, false) => Kind::Denied,
        };
        if request.charge == Charge::Commit {
            count_also_denied(position, touched, outcomes, metrics);
        }
    }
    if request.charge == Charge::Commit {
        metrics[index].count(decision.kind, sources.get(position).copied().unwrap_or(CheckSource::Memory));
    }
    decision.answer = Some(Answer {
        rule: Arc::clone(&rules[index].id),
        ceiling: failing.at(position).map_or(cell.algorithm, |failing| failing.whole).ceiling(),
        window_us: cell.algorithm.quota_us(),
        remaining: outcome.remaining,
        reset_us: outcome.reset_us,
        retry_after_us: match outcome.outcome {
            Outcome::Denied { retry_after_us } => Some(retry_after_us),
            Outcome::Never if fits_later => rules[index].adaptive.map(|adaptive| adaptive.recover_us),
            Outcome::Allowed | Outcome::Never => None,
        },
        is_tightened,
        response: if denied { rules[index].response.clone() } else { None },
    });
    (decision, Some(position))
}

/// Counts the enforced rules that deny beside the one at `deciding`: what a rule denies in all is what its twin in shadow mode
/// would deny.
fn count_also_denied(deciding: usize, touched: &Touched<'_>, outcomes: &[CellOutcome], metrics: &[RuleMetrics]) {
    for (position, (cell, outcome)) in touched.cells.iter().zip(outcomes).enumerate() {
        if cell.enforced && position != deciding && outcome.outcome != Outcome::Allowed {
            metrics[touched.rules[position]].count_also_denied();
        }
    }
}

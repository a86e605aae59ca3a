//! Budgets that the agent pushed for a source.

use limiter_common::time::KtimeNs;

use crate::{globals, maps::BudgetState, source::Family};

/// The budget of this source whose deadline has not passed.
#[inline(always)]
pub(crate) fn of<F: Family>(key: &F::Key, now: KtimeNs) -> Option<BudgetState> {
    if !globals::is_on(&globals::HAS_BUDGETS) {
        return None;
    }
    F::budget(key).filter(|budget| !budget.expired(now))
}

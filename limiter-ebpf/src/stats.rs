//! Counters: the slot of the rule, and in it the verdict with its reason, are the index.

use limiter_common::{stats::NO_RULE, verdict::Verdict};

use crate::maps;

/// A verdict, and the slot of the rule that it comes from.
#[derive(Clone, Copy)]
pub(crate) struct Ruling {
    pub(crate) verdict: Verdict,
    pub(crate) slot: u32,
}

impl From<Verdict> for Ruling {
    #[inline(always)]
    fn from(verdict: Verdict) -> Self {
        Self { verdict, slot: NO_RULE }
    }
}

#[inline(always)]
pub(crate) fn record(ruling: Ruling, bytes: u64) {
    maps::count(ruling.slot, ruling.verdict, bytes);
}

//! Counters: the slot of the rule, and in it the verdict with its reason, are the index.

use limiter_common::{
    event::News,
    stats::{self, NO_RULE},
    verdict::Verdict,
};

use crate::maps;

/// A verdict, the slot of the rule that it comes from, and what is new about it.
#[derive(Clone, Copy)]
pub(crate) struct Ruling {
    pub(crate) verdict: Verdict,
    pub(crate) slot: u32,
    pub(crate) news: News,
}

impl From<Verdict> for Ruling {
    #[inline(always)]
    fn from(verdict: Verdict) -> Self {
        Self { verdict, slot: NO_RULE, news: News::NONE }
    }
}

/// Index of the counter of a packet.
#[inline(always)]
pub(crate) fn index(ruling: Ruling) -> u32 {
    stats::rule_index(ruling.slot, ruling.verdict)
}

/// Counts a packet, and tells how many were counted there, by this CPU if it has counters of its own.
#[inline(always)]
pub(crate) fn record(ruling: Ruling, bytes: u64) -> u64 {
    maps::count(ruling.slot, ruling.verdict, bytes)
}

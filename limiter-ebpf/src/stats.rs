//! Counters: the verdict and its reason are the index.

use limiter_common::{
    event::News,
    stats::{self, NO_RULE},
    verdict::Verdict,
};

use crate::{maps, packet};

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

/// Index of the counter of a packet. The verifier does not know it, so that paths which differ in nothing else are one
/// from here on.
#[expect(clippy::cast_possible_truncation, reason = "the number is the one that it was")]
#[inline(always)]
pub(crate) fn index(ruling: Ruling, bytes: u64) -> u32 {
    packet::forget(stats::rule_index(ruling.slot, ruling.verdict) as usize, bytes) as u32
}

/// Counts a packet, and tells how many this CPU had counted there before.
#[inline(always)]
pub(crate) fn record(index: u32, bytes: u64) -> u64 {
    maps::count(index, bytes)
}

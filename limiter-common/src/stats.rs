//! Counters: by rule, and by verdict.

use crate::verdict::{PassReason, Verdict};

/// Packets and bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Counter {
    pub packets: u64,
    pub bytes: u64,
}

const _: () = assert!(size_of::<Counter>() == 8 + 8);

impl Counter {
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self { packets: self.packets.wrapping_add(other.packets), bytes: self.bytes.wrapping_add(other.bytes) }
    }
}

/// Counters of one slot: a power of two, at least [`Verdict::COUNT`].
const STRIDE: u32 = 32;

/// The counters of one rule, by [`Verdict::index`]. One map value, so that an agent with thousands of rules reads each
/// with one call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    by_verdict: [Counter; Self::LEN],
}

const _: () = assert!(size_of::<Counters>() == Counters::LEN * size_of::<Counter>());

impl Counters {
    const LEN: usize = STRIDE as usize;
    pub const ZERO: Self = Self { by_verdict: [Counter { packets: 0, bytes: 0 }; Self::LEN] };

    #[inline(always)]
    pub const fn of(&self, verdict: Verdict) -> &Counter {
        &self.by_verdict[Self::index(verdict)]
    }

    /// Which of the counters, one behind the other, is that of `verdict`. Masked so that the compiler, and with it the
    /// verifier, knows that it is in range.
    #[inline(always)]
    pub const fn index(verdict: Verdict) -> usize {
        verdict.index() as usize & (Self::LEN - 1)
    }

    #[must_use]
    pub fn plus(mut self, other: &Self) -> Self {
        for (counter, other) in self.by_verdict.iter_mut().zip(&other.by_verdict) {
            *counter = counter.plus(*other);
        }
        self
    }
}

const _: () = assert!(Counters::LEN.is_power_of_two() && Counters::LEN >= Verdict::COUNT as usize);

/// A number for the counter of `verdict` of the rule in `slot`, for what is told of single packets.
#[inline(always)]
pub const fn rule_index(slot: u32, verdict: Verdict) -> u32 {
    slot * STRIDE + verdict.index()
}

/// Whether that number is of a packet that no rule, enforced or in shadow, would drop.
#[inline(always)]
pub const fn is_pass(index: u32) -> bool {
    ((index % STRIDE) as usize) < PassReason::ALL.len()
}

/// The slot and the verdict whose counter has this number; no verdict where there is no such counter.
pub fn of_index(index: u32) -> (u32, Option<Verdict>) {
    (index / STRIDE, Verdict::all().nth((index % STRIDE) as usize))
}

/// Slot of packets that no rule decided about.
pub const NO_RULE: u32 = 0;
/// Slots for rules, the first of which is [`NO_RULE`]. A slot belongs to a rule id for as long as the maps are pinned,
/// so that counters stay with their rule across reloads and restarts.
pub const RULE_SLOTS: u32 = 32_768;
/// The first slots have counters of each CPU's own, in `STATS`: 0.5 MB a CPU. The others, for policies of more rules, have
/// counters that all CPUs add to, in `MORE_STATS`: 16 MB however many CPUs there are.
pub const PER_CPU_SLOTS: u32 = 1024;

/// Value of the `RULE_NAMES` map: the rule id that a slot belongs to, padded with zeros. All zeros: the slot is free.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleName {
    bytes: [u8; RuleName::MAX_LEN],
}

impl RuleName {
    pub const MAX_LEN: usize = 64;
    pub const FREE: Self = Self { bytes: [0; Self::MAX_LEN] };

    /// `None` when the id is empty, longer than [`Self::MAX_LEN`] bytes or has a zero byte.
    pub fn new(id: &str) -> Option<Self> {
        if id.is_empty() || id.len() > Self::MAX_LEN || id.as_bytes().contains(&0) {
            return None;
        }
        let mut bytes = [0; Self::MAX_LEN];
        bytes[..id.len()].copy_from_slice(id.as_bytes());
        Some(Self { bytes })
    }

    /// The id, or `None` for a free slot.
    pub fn as_str(&self) -> Option<&str> {
        let len = self.bytes.iter().position(|&byte| byte == 0).unwrap_or(Self::MAX_LEN);
        if len == 0 { None } else { core::str::from_utf8(&self.bytes[..len]).ok() }
    }
}

//! Counters: one per verdict, and a few per rule.

use crate::verdict::{DropReason, Verdict};

/// Packets and bytes. Per-CPU map value: each CPU adds to its own, so no atomics are needed.
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

/// Slot of packets that no rule decided about.
pub const NO_RULE: u32 = 0;
/// Slots for rules, the first of which is [`NO_RULE`]. A slot belongs to a rule id for as long as the maps are pinned,
/// so that counters stay with their rule across reloads and restarts.
pub const RULE_SLOTS: u32 = 1024;
/// Counters of one slot: a power of two, at least [`Verdict::COUNT`].
const STRIDE: u32 = Verdict::COUNT.next_power_of_two();
/// Entries of the `STATS` map: 0.5 MB a CPU.
pub const STATS_ENTRIES: u32 = RULE_SLOTS * STRIDE;

const _: () = assert!(DropReason::ALL.len() == 8 && STRIDE == 32);

/// Index of the counter of `verdict` for the rule in `slot`.
#[inline(always)]
pub const fn rule_index(slot: u32, verdict: Verdict) -> u32 {
    slot * STRIDE + verdict.index()
}

/// The slot and the verdict whose counter has this index; no verdict where there is no such counter.
pub fn of_index(index: u32) -> (u32, Option<Verdict>) {
    (index / STRIDE, Verdict::all().nth((index % STRIDE) as usize))
}

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

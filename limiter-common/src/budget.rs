//! Budgets that the agent pushes for a source, each with a deadline that the kernel checks.

use crate::{gcra::GcraParams, time::KtimeNs};

/// Map value: host byte order, no padding.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    deadline_ns: u64,
    kind: u32,
    reason: u32,
    /// Slot of the rule that it comes from, see [`crate::stats::RuleName`].
    rule_slot: u32,
    reserved: u32,
    /// The source's packet limit, for a budget that replaces it.
    packets: GcraParams,
}

const _: () = assert!(size_of::<Budget>() == 8 + 4 * 4 + size_of::<GcraParams>());

/// Map value: a budget, and what the program keeps about it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetEntry {
    pub budget: Budget,
    /// Until when it is known that this budget drops packets, see [`crate::event::mark`].
    pub reported: u64,
}

const _: () = assert!(size_of::<BudgetEntry>() == size_of::<Budget>() + 8);

#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Block = 1,
    Replace = 2,
}

/// Why a budget was pushed.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BudgetReason {
    /// The address is over a limit of its own.
    AddressOverLimit = 1,
    /// The address went on sending after denials.
    KeepsSending = 2,
}

impl BudgetReason {
    pub const ALL: &[Self] = &[Self::AddressOverLimit, Self::KeepsSending];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AddressOverLimit => "address_over_limit",
            Self::KeepsSending => "keeps_sending",
        }
    }
}

impl Budget {
    /// Drops everything of the source until `deadline`.
    pub const fn block(deadline: KtimeNs, reason: BudgetReason, rule_slot: u32) -> Self {
        const NONE: GcraParams = match GcraParams::from_interval(1, 1) {
            Some(params) => params,
            None => unreachable!(),
        };
        Self {
            deadline_ns: deadline.get(),
            kind: Kind::Block as u32,
            reason: reason as u32,
            rule_slot,
            reserved: 0,
            packets: NONE,
        }
    }

    /// Replaces the source's packet limit until `deadline`.
    pub const fn replace(packets: GcraParams, deadline: KtimeNs, reason: BudgetReason, rule_slot: u32) -> Self {
        let mut budget = Self::block(deadline, reason, rule_slot);
        budget.kind = Kind::Replace as u32;
        budget.packets = packets;
        budget
    }

    #[inline(always)]
    pub const fn expired(&self, now: KtimeNs) -> bool {
        self.deadline_ns <= now.get()
    }

    pub const fn deadline(&self) -> KtimeNs {
        KtimeNs::new(self.deadline_ns)
    }

    #[inline(always)]
    pub const fn is_block(&self) -> bool {
        self.kind == Kind::Block as u32
    }

    #[inline(always)]
    pub const fn packets(&self) -> &GcraParams {
        &self.packets
    }

    pub fn reason(&self) -> Option<BudgetReason> {
        BudgetReason::ALL.iter().copied().find(|reason| *reason as u32 == self.reason)
    }

    pub const fn rule_slot(&self) -> u32 {
        self.rule_slot
    }
}

//! What a decision was made from.

use crate::policy::Precision;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CheckSource {
    /// This node's own counters, or what it does without Redis.
    Memory,
    /// Units that Redis lent, or what it said when it was last asked for some.
    Lease,
    /// Redis was asked.
    Redis,
    /// What Redis denied a moment ago.
    Remembered,
}

impl CheckSource {
    pub const ALL: &[Self] = &[Self::Memory, Self::Lease, Self::Redis, Self::Remembered];

    /// The name in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Lease => "lease",
            Self::Redis => "redis",
            Self::Remembered => "remembered",
        }
    }

    /// Those that a rule of this precision can be decided from. A lease that there is no room for is none.
    pub const fn of(precision: Precision) -> &'static [Self] {
        match precision {
            Precision::Async | Precision::Local => &[Self::Memory],
            Precision::Strict => &[Self::Memory, Self::Redis, Self::Remembered],
            Precision::Leased => Self::ALL,
        }
    }
}

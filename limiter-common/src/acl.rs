//! Allow and deny prefixes.

use crate::time::KtimeNs;

/// Value of an allow or deny prefix. Host byte order, no padding.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AclEntry {
    /// [`KtimeNs::NEVER`] for an entry that stays.
    deadline_ns: u64,
    /// The entry's own prefix length: an expired entry hides shorter prefixes from a longest-prefix lookup, which is
    /// then repeated with one bit less.
    prefix_len: u32,
    origin: u32,
}

const _: () = assert!(size_of::<AclEntry>() == 8 + 4 + 4);

/// Who put an entry there.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Policy = 1,
    /// `limiter block` or `limiter allow`; survives reloads and restarts.
    Operator = 2,
}

/// How many nested expired prefixes a lookup looks behind. The agent removes expired entries every second.
pub const MAX_EXPIRED_NESTING: u32 = 4;

impl AclEntry {
    pub const fn new(prefix_len: u8, origin: Origin, deadline: KtimeNs) -> Self {
        Self { deadline_ns: deadline.get(), prefix_len: prefix_len as u32, origin: origin as u32 }
    }

    #[inline(always)]
    pub const fn deadline(&self) -> KtimeNs {
        KtimeNs::new(self.deadline_ns)
    }

    #[inline(always)]
    pub const fn expired(&self, now: KtimeNs) -> bool {
        self.deadline_ns <= now.get()
    }

    #[inline(always)]
    pub const fn prefix_len(&self) -> u32 {
        self.prefix_len
    }

    pub const fn is_operators(&self) -> bool {
        self.origin == Origin::Operator as u32
    }
}

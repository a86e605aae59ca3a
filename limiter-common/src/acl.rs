//! Allow and deny prefixes.

use crate::time::KtimeNs;

/// What was put into a list at a prefix. Host byte order, no padding; before schema 4 it was all of the map value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// [`KtimeNs::NEVER`] for what stays.
    deadline_ns: u64,
    /// Of older schemas, the length of the prefix.
    reserved: u32,
    origin: u32,
}

const _: () = assert!(size_of::<Listed>() == 8 + 4 + 4);

/// Value of an allow or deny prefix. Host byte order, no padding.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AclEntry {
    listed: Listed,
    /// Until when addresses of this prefix are in the list: by what was put there, or by the wider prefixes around it. A
    /// lookup finds the longest prefix alone, and behind one that has expired there may be another that has not.
    until_ns: u64,
}

const _: () = assert!(size_of::<AclEntry>() == size_of::<Listed>() + 8);

/// Who put an entry there.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Policy = 1,
    /// `limiter block` or `limiter allow`; survives reloads and restarts.
    Operator = 2,
}

impl Listed {
    pub const fn new(origin: Origin, deadline: KtimeNs) -> Self {
        Self { deadline_ns: deadline.get(), reserved: 0, origin: origin as u32 }
    }

    pub const fn deadline(&self) -> KtimeNs {
        KtimeNs::new(self.deadline_ns)
    }

    pub const fn is_operators(&self) -> bool {
        self.origin == Origin::Operator as u32
    }
}

impl AclEntry {
    pub const fn new(listed: Listed, until: KtimeNs) -> Self {
        Self { listed, until_ns: until.get() }
    }

    pub const fn listed(&self) -> &Listed {
        &self.listed
    }

    pub const fn until(&self) -> KtimeNs {
        KtimeNs::new(self.until_ns)
    }

    /// Whether addresses whose longest prefix this is are in the list.
    #[inline(always)]
    pub const fn holds(&self, now: KtimeNs) -> bool {
        self.until_ns > now.get()
    }
}

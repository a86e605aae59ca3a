//! Allow and deny prefixes.

use limiter_common::{acl::AclEntry, time::KtimeNs};

use crate::{globals, source::Family};

#[inline(always)]
pub(crate) fn allows<F: Family>(source: F, now: KtimeNs) -> bool {
    globals::ALLOW_FAMILIES.load() & F::BIT != 0
        && F::ALLOW_FILTER.load().may_contain(source.leading())
        && holds(source.allow(), now)
}

#[inline(always)]
pub(crate) fn denies<F: Family>(source: F, now: KtimeNs) -> bool {
    globals::DENY_FAMILIES.load() & F::BIT != 0
        && F::DENY_FILTER.load().may_contain(source.leading())
        && holds(source.deny(), now)
}

/// Whether any prefix of the address holds: the longest, which a lookup finds, knows until when those around it do.
#[inline(always)]
fn holds(longest: Option<&AclEntry>, now: KtimeNs) -> bool {
    longest.is_some_and(|entry| entry.holds(now))
}

//! Allow and deny prefixes.

use limiter_common::{
    acl::{AclEntry, MAX_EXPIRED_NESTING},
    time::KtimeNs,
};

use crate::{globals, source::Family};

#[inline(always)]
pub(crate) fn allows<F: Family>(source: F, now: KtimeNs) -> bool {
    globals::ALLOW_FAMILIES.load() & F::BIT != 0
        && F::ALLOW_FILTER.load().may_contain(source.leading())
        && holds(now, F::BITS, |prefix_len| source.allow(prefix_len))
}

#[inline(always)]
pub(crate) fn denies<F: Family>(source: F, now: KtimeNs) -> bool {
    globals::DENY_FAMILIES.load() & F::BIT != 0
        && F::DENY_FILTER.load().may_contain(source.leading())
        && holds(now, F::BITS, |prefix_len| source.deny(prefix_len))
}

/// Whether any prefix holds. The longest is found first, and an expired one must not hide a shorter one that is
/// valid, so the lookup is then repeated among the prefixes that are shorter.
#[inline(always)]
fn holds<'a>(now: KtimeNs, bits: u32, longest_up_to: impl Fn(u32) -> Option<&'a AclEntry>) -> bool {
    let mut prefix_len = bits;
    for _ in 0..MAX_EXPIRED_NESTING + 1 {
        let Some(entry) = longest_up_to(prefix_len) else { return false };
        if !entry.expired(now) {
            return true;
        }
        match entry.prefix_len().checked_sub(1) {
            Some(shorter) => prefix_len = shorter,
            None => return false,
        }
    }
    false
}

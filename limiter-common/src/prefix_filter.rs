//! Whether a list of prefixes may contain an address at all: one bit of 64, chosen by the first bits of the address.
//!
//! Lists of allowed and denied prefixes are mostly short, and most packets are in none of them. The answer of a filter
//! costs a few instructions, a lookup in the trie of prefixes several times as much. A filter says "perhaps" too often,
//! and never "no" too often; whoever chooses addresses so that it says "perhaps" makes his packets cost what they would
//! cost without it.

/// Map value and global: host byte order, no padding.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixFilter {
    /// By hash of the first `len` bits.
    seen: u64,
    /// As many bits as the shortest prefix has; 1 to 64.
    len: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<PrefixFilter>() == 8 + 4 + 4);

impl PrefixFilter {
    /// Says "perhaps" to everything, at no cost.
    pub const ALL: Self = Self { seen: u64::MAX, len: 64, reserved: 0 };

    /// Beyond so many of the 64 bits, asking costs more than it saves.
    const WORTHWHILE: u32 = 32;

    /// Of prefixes, each as its length and the first 64 bits of its address.
    pub fn of(prefixes: impl Iterator<Item = (u8, u64)> + Clone) -> Self {
        let shortest = prefixes.clone().map(|(len, _)| len).min().unwrap_or(0);
        if shortest == 0 {
            return Self::ALL;
        }
        let mut filter = Self { seen: 0, len: u32::from(shortest.min(64)), reserved: 0 };
        for (_, leading) in prefixes {
            filter.seen |= filter.bit(leading);
        }
        if filter.seen.count_ones() > Self::WORTHWHILE { Self::ALL } else { filter }
    }

    /// Whether an address that begins with these 64 bits may be in the list.
    #[inline(always)]
    pub const fn may_contain(&self, leading: u64) -> bool {
        self.seen == u64::MAX || self.seen & self.bit(leading) != 0
    }

    /// Whether it says "perhaps" to every address of this prefix.
    pub const fn covers(&self, prefix_len: u8, leading: u64) -> bool {
        self.seen == u64::MAX || (prefix_len as u32 >= self.len && self.may_contain(leading))
    }

    #[inline(always)]
    const fn bit(&self, leading: u64) -> u64 {
        // Fibonacci hashing: the upper bits of the product depend on all bits of the prefix.
        let prefix = leading >> ((64 - self.len) & 63);
        1 << (prefix.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn never_says_no_to_what_a_list_contains(
            prefixes in prop::collection::vec((0u8..=128, any::<u64>()), 0..60),
            address: u64, chosen: prop::sample::Index, other in (0u8..=128, any::<u64>()),
        ) {
            let filter = PrefixFilter::of(prefixes.iter().copied());
            if !prefixes.is_empty() {
                let (len, leading) = prefixes[chosen.index(prefixes.len())];
                let host_bits = u64::MAX.checked_shr(u32::from(len)).unwrap_or(0);
                let inside = (leading & !host_bits) | (address & host_bits);
                prop_assert!(filter.may_contain(inside), "{filter:?} {len} {inside:x}");
                prop_assert!(filter.covers(len, leading));
            }
            let (len, leading) = other;
            if filter.covers(len, leading) {
                let host_bits = u64::MAX.checked_shr(u32::from(len)).unwrap_or(0);
                prop_assert!(filter.may_contain((leading & !host_bits) | (address & host_bits)));
            }
        }
    }

    #[test]
    fn a_short_list_is_told_from_most_addresses_and_a_long_one_is_not_asked() {
        let net = |n: u64| (24u8, (0x0a00_0000 | n << 8) << 32);
        let short = PrefixFilter::of((0..4).map(net));
        let perhaps = (100..1124u64).filter(|n| short.may_contain(net(*n).1)).count();
        assert!(perhaps < 1024 / 8, "{perhaps} of 1024");
        assert_eq!(PrefixFilter::of((0..100).map(net)), PrefixFilter::ALL);
        assert_eq!(PrefixFilter::of([(0, 0)].into_iter()), PrefixFilter::ALL);
    }
}

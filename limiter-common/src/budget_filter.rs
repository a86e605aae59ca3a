//! Whether a source may have a budget at all: one bit of 65,536, chosen by its key.
//!
//! Few sources have one, and a look at the bit costs a fraction of a lookup in the budgets. A bit is set for as long as
//! any source that it stands for has a budget: it says "perhaps" too often, and never "no" too often. Whoever chooses
//! addresses so that it says "perhaps" makes his packets cost what they would cost without it.

/// Words of the map that holds the bits: 8 KB, so that it stays in the nearest cache.
pub const WORDS: u32 = 1024;
/// Bits of both families.
pub const BITS: u32 = WORDS * u64::BITS;

const _: () = assert!(BITS == 1 << 16);

/// Which bit stands for a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Below [`BITS`].
    bit: u64,
}

impl Place {
    /// Of a key as a number, see [`crate::addr::SrcKeyV4::digest`].
    #[inline(always)]
    pub const fn of(digest: u64) -> Self {
        // Fibonacci hashing: the upper bits of the product depend on all bits of the key.
        Self { bit: digest.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48 }
    }

    /// Index of its word, below [`WORDS`].
    #[expect(clippy::cast_possible_truncation, reason = "ten bits")]
    #[inline(always)]
    pub const fn word(self) -> u32 {
        (self.bit >> 6) as u32
    }

    /// The bit in its word.
    #[inline(always)]
    pub const fn mask(self) -> u64 {
        1 << (self.bit & 63)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::addr::{SrcKeyV4, SrcKeyV6, SrcMaskV4, SrcMaskV6};

    fn v4(address: u32) -> Place {
        Place::of(SrcKeyV4::new(address.to_be_bytes(), SrcMaskV4::new(32)).digest())
    }

    fn v6(address: u128, prefix_len: u8) -> Place {
        Place::of(SrcKeyV6::new(address.to_be_bytes(), SrcMaskV6::new(prefix_len)).digest())
    }

    /// Neighbours are what a subnet, a site or a scan has; as many throws as this into 65,536 places hit some 3,970 of
    /// them when they are thrown at random.
    #[test]
    fn neighbours_have_bits_of_their_own() {
        type Nth = fn(u32) -> Place;
        let families: [(&str, Nth); 6] = [
            ("hosts", |n| v4(0x0a00_0000 + n)),
            ("networks", |n| v4(0x0a00_0001 + (n << 8))),
            ("subnets", |n| v6((0x2001_0db8_0001_0000 << 64) | (u128::from(n) << 64), 64)),
            ("sites", |n| v6((0x2001_0db8_0000_0000 << 64) | (u128::from(n) << 80), 48)),
            ("interfaces", |n| v6((0x2001_0db8_0001_0002 << 64) | u128::from(n), 128)),
            ("interfaces by hardware", |n| v6(0x2001_0db8_0001_0002_0211_22ff_fe00_0000 | u128::from(n), 128)),
        ];
        for (name, nth) in families {
            let places: HashSet<_> = (0..4096).map(|n| (nth(n).word(), nth(n).mask())).collect();
            assert!(places.len() > 3900, "{name}: {}", places.len());
            assert!(places.iter().all(|(word, mask)| *word < WORDS && mask.is_power_of_two()), "{name}");
        }
    }
}

//! Numbers that look random and are the same in every run.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number below `bound`.
    ///
    /// # Panics
    ///
    /// When nothing is below it.
    pub fn below<T: TryFrom<u64>>(&mut self, bound: T) -> T
    where
        u64: TryFrom<T>,
    {
        let bound = u64::try_from(bound).ok().expect("a bound that is not negative");
        T::try_from(self.next() % bound).ok().expect("below the bound")
    }
}

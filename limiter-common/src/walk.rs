//! How a benchmark makes one frame come from many sources: the frame carries the state of a walk, and the program
//! `walk` of the benchmark object steps it before the limiter runs.

/// Where in the frame the state is: behind the headers of UDP over IPv4 or IPv6.
pub const STATE_OFFSET: usize = 64;
/// Where the number of a source is in the frame: all of an IPv4 address, and the upper half of an IPv6 address that a
/// /64 keeps.
pub const SOURCE_OFFSET: usize = 26;

/// Visits `count` sources over and over, `stride` apart. Host byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walk {
    pub first: u32,
    pub count: u32,
    /// Below `count`.
    pub stride: u32,
    /// Below `count`.
    pub index: u32,
}

const _: () = assert!(size_of::<Walk>() == 4 * 4);

impl Walk {
    pub const LEN: usize = size_of::<Self>();

    /// The source to send from now, and the state after it.
    #[must_use]
    #[inline(always)]
    pub const fn step(self) -> (u32, Self) {
        let next = self.index.wrapping_add(self.stride);
        let index = if next >= self.count { next.wrapping_sub(self.count) } else { next };
        (self.first.wrapping_add(self.index), Self { index, ..self })
    }

    pub const fn to_bytes(self) -> [u8; Self::LEN] {
        let words = [self.first, self.count, self.stride, self.index];
        let mut bytes = [0; Self::LEN];
        let mut at = 0;
        while at < Self::LEN {
            bytes[at] = words[at / 4].to_ne_bytes()[at % 4];
            at += 1;
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visits_every_source_once_a_round() {
        let mut walk = Walk { first: 100, count: 1000, stride: 617, index: 0 };
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..1000 {
            let (source, next) = walk.step();
            assert!((100..1100).contains(&source) && seen.insert(source), "{source}");
            walk = next;
        }
        assert_eq!(walk.index, 0);
    }
}

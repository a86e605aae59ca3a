//! Source addresses as keys: full, in network order, cut to a prefix, never folded or hashed into less.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An IPv4 address: four bytes in network order, which the XDP program moves as one word.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddressV4 {
    word: u32,
}

/// An IPv6 address: sixteen bytes in network order, moved as two words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddressV6 {
    words: [u64; 2],
}

/// An IPv4 source, cut to the configured prefix. Map key: four bytes in network order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SrcKeyV4 {
    address: AddressV4,
}

/// An IPv6 source, cut to the configured prefix. Map key: sixteen bytes in network order, so that any prefix length
/// up to /128 is a key without collisions.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SrcKeyV6 {
    address: AddressV6,
}

const _: () = assert!(size_of::<SrcKeyV4>() == 4);
const _: () = assert!(size_of::<SrcKeyV6>() == 16);

/// Bits that a source key keeps: the prefix length as a mask, in network order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrcMaskV4(pub [u8; 4]);

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrcMaskV6([[u8; 8]; 2]);

impl AddressV4 {
    #[inline(always)]
    pub const fn new(octets: [u8; 4]) -> Self {
        Self { word: u32::from_ne_bytes(octets) }
    }

    #[inline(always)]
    pub const fn octets(self) -> [u8; 4] {
        self.word.to_ne_bytes()
    }

    /// The address as the upper half of a number, for [`crate::prefix_filter`].
    #[inline(always)]
    pub const fn leading(self) -> u64 {
        (u32::from_be(self.word) as u64) << 32
    }
}

impl AddressV6 {
    /// Whether it is link-local (`fe80::/10`) or unspecified (`::`): no router passes on what comes from there.
    #[inline(always)]
    pub const fn is_of_link(self) -> bool {
        self.is_link_local() || self.words[0] | self.words[1] == 0
    }

    #[inline(always)]
    const fn is_link_local(self) -> bool {
        self.leading() >> 54 == 0xfe80 >> 6
    }

    #[inline(always)]
    pub const fn new(octets: [u8; 16]) -> Self {
        let [a, b, c, d, e, f, g, h, rest @ ..] = octets;
        Self::from_halves([[a, b, c, d, e, f, g, h], rest])
    }

    /// From the first eight bytes and the last eight.
    #[inline(always)]
    pub const fn from_halves([first, last]: [[u8; 8]; 2]) -> Self {
        Self { words: [u64::from_ne_bytes(first), u64::from_ne_bytes(last)] }
    }

    /// The first 64 bits as a number, for [`crate::prefix_filter`].
    #[inline(always)]
    pub const fn leading(self) -> u64 {
        u64::from_be(self.words[0])
    }

    #[inline(always)]
    pub const fn octets(self) -> [u8; 16] {
        let [[a, b, c, d, e, f, g, h], [i, j, k, l, m, n, o, p]] =
            [self.words[0].to_ne_bytes(), self.words[1].to_ne_bytes()];
        [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
    }
}

impl SrcMaskV4 {
    /// `prefix_len` above 32 counts as 32.
    pub const fn new(prefix_len: u8) -> Self {
        let len = if prefix_len > 32 { 32 } else { prefix_len };
        Self(if len == 0 { [0; 4] } else { (u32::MAX << (32 - len)).to_be_bytes() })
    }
}

impl SrcMaskV6 {
    /// `prefix_len` above 128 counts as 128.
    pub const fn new(prefix_len: u8) -> Self {
        let len = if prefix_len > 128 { 128 } else { prefix_len };
        let bytes = if len == 0 { [0; 16] } else { (u128::MAX << (128 - len)).to_be_bytes() };
        let [a, b, c, d, e, f, g, h, rest @ ..] = bytes;
        Self([[a, b, c, d, e, f, g, h], rest])
    }

    /// From the mask of the first eight bytes and that of the last eight.
    #[inline(always)]
    pub const fn from_halves(first: [u8; 8], last: [u8; 8]) -> Self {
        Self([first, last])
    }

    /// The bits that make the source of this address: of a link-local one all, since every host of a link has one in
    /// `fe80::/64`, and they are no more one source than the networks of the world are.
    #[inline(always)]
    pub const fn of(self, address: AddressV6) -> Self {
        if address.is_link_local() { Self::new(128) } else { self }
    }

    pub const fn halves(&self) -> [[u8; 8]; 2] {
        self.0
    }
}

impl SrcKeyV4 {
    pub const fn new(address: [u8; 4], mask: SrcMaskV4) -> Self {
        Self::of(AddressV4::new(address), mask)
    }

    #[inline(always)]
    pub const fn of(address: AddressV4, mask: SrcMaskV4) -> Self {
        Self { address: AddressV4 { word: address.word & u32::from_ne_bytes(mask.0) } }
    }

    pub const fn octets(&self) -> [u8; 4] {
        self.address.octets()
    }

    /// The key as a number, for [`crate::budget_filter`].
    #[inline(always)]
    pub const fn digest(&self) -> u64 {
        // As people count: neighbours differ in the low bits.
        u32::from_be(self.address.word) as u64
    }
}

impl SrcKeyV6 {
    pub const fn new(address: [u8; 16], mask: SrcMaskV6) -> Self {
        Self::of(AddressV6::new(address), mask)
    }

    #[inline(always)]
    pub const fn of(address: AddressV6, mask: SrcMaskV6) -> Self {
        let mask = AddressV6::from_halves(mask.0);
        let words = [address.words[0] & mask.words[0], address.words[1] & mask.words[1]];
        Self { address: AddressV6 { words } }
    }

    pub const fn octets(&self) -> [u8; 16] {
        self.address.octets()
    }

    /// A number that depends on the whole key, for [`crate::budget_filter`].
    #[inline(always)]
    pub const fn digest(&self) -> u64 {
        self.address.words[0] ^ self.address.words[1]
    }
}

impl From<SrcKeyV4> for Ipv4Addr {
    fn from(key: SrcKeyV4) -> Self {
        key.octets().into()
    }
}

impl From<SrcKeyV6> for Ipv6Addr {
    fn from(key: SrcKeyV6) -> Self {
        key.octets().into()
    }
}

/// How far source addresses are cut: the default is /32 and /64. Link-local ones never are, see [`SrcMaskV6::of`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrcPrefixes {
    pub ipv4: u8,
    pub ipv6: u8,
}

impl Default for SrcPrefixes {
    fn default() -> Self {
        Self { ipv4: 32, ipv6: 64 }
    }
}

impl SrcPrefixes {
    /// The address that stands for its whole prefix. IPv4-mapped IPv6 is IPv4.
    pub fn cut(&self, address: IpAddr) -> IpAddr {
        match address.to_canonical() {
            IpAddr::V4(v4) => IpAddr::V4(SrcKeyV4::new(v4.octets(), SrcMaskV4::new(self.ipv4)).into()),
            IpAddr::V6(v6) => {
                let address = AddressV6::new(v6.octets());
                IpAddr::V6(SrcKeyV6::of(address, SrcMaskV6::new(self.ipv6).of(address)).into())
            }
        }
    }

    /// Length of the prefix that [`Self::cut`] keeps of this address.
    pub fn len_of(&self, address: IpAddr) -> u8 {
        match address.to_canonical() {
            IpAddr::V4(_) => self.ipv4,
            IpAddr::V6(v6) if AddressV6::new(v6.octets()).is_link_local() => 128,
            IpAddr::V6(_) => self.ipv6,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_make_the_mask() {
        for len in [0, 48, 64, 100, 128] {
            let mask = SrcMaskV6::new(len);
            let [first, last] = mask.halves();
            assert_eq!(SrcMaskV6::from_halves(first, last), mask, "/{len}");
        }
    }

    #[test]
    fn cuts_to_the_prefix_and_unmaps() {
        let prefixes = |ipv4, ipv6| SrcPrefixes { ipv4, ipv6 };
        for (prefixes, address, cut) in [
            (prefixes(32, 64), "192.0.2.77", "192.0.2.77"),
            (prefixes(24, 64), "192.0.2.77", "192.0.2.0"),
            (prefixes(0, 0), "192.0.2.77", "0.0.0.0"),
            (prefixes(32, 64), "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
            (prefixes(32, 48), "2001:db8:1:2:3:4:5:6", "2001:db8:1::"),
            (prefixes(32, 128), "2001:db8:1:2:3:4:5:6", "2001:db8:1:2:3:4:5:6"),
            (prefixes(32, 64), "::ffff:192.0.2.77", "192.0.2.77"),
            (prefixes(32, 64), "fe80::3:4:5:6", "fe80::3:4:5:6"),
            (prefixes(32, 48), "febf:1:2:3:4:5:6:7", "febf:1:2:3:4:5:6:7"),
            (prefixes(32, 64), "fec0::1", "fec0::"),
        ] {
            assert_eq!(prefixes.cut(address.parse().unwrap()), cut.parse::<IpAddr>().unwrap(), "{address}");
        }
        for (address, len) in [("192.0.2.7", 32), ("::ffff:192.0.2.7", 32), ("2001:db8::1", 64), ("fe80::1", 128)] {
            assert_eq!(SrcPrefixes::default().len_of(address.parse().unwrap()), len, "{address}");
        }
    }
}

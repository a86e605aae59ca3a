//! Prefixes, to be found by what they contain.

use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
};

use foldhash::fast::RandomState;
use ipnet::IpNet;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixSet {
    // Only the policy decides what is in it, so that the hash need not withstand an adversary.
    prefixes: HashSet<IpNet, RandomState>,
    /// The lengths that any of them has, the longest first: there are few, and a search need not try others.
    lengths: Vec<u8>,
}

impl PrefixSet {
    pub fn is_empty(&self) -> bool {
        self.prefixes.is_empty()
    }

    /// In no order.
    pub fn iter(&self) -> impl Iterator<Item = IpNet> {
        self.prefixes.iter().copied()
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        self.around(address.into()).is_some()
    }

    /// The longest that contains all of `cidr`.
    pub fn around(&self, cidr: IpNet) -> Option<IpNet> {
        let mut lengths = self.lengths.iter().filter(|len| **len <= cidr.prefix_len());
        lengths.find_map(|len| {
            let wider = IpNet::new(cidr.addr(), *len).ok()?.trunc();
            self.prefixes.contains(&wider).then_some(wider)
        })
    }
}

impl FromIterator<IpNet> for PrefixSet {
    fn from_iter<I: IntoIterator<Item = IpNet>>(prefixes: I) -> Self {
        let prefixes: HashSet<IpNet, RandomState> = prefixes.into_iter().collect();
        let lengths: BTreeSet<u8> = prefixes.iter().map(IpNet::prefix_len).collect();
        Self { prefixes, lengths: lengths.into_iter().rev().collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_longest_prefix_of_the_same_family() {
        let prefixes = ["10.0.0.0/8", "10.1.0.0/16", "192.0.2.7/32", "2001:db8::/32", "::/0"];
        let set: PrefixSet = prefixes.iter().map(|prefix| prefix.parse().unwrap()).collect();
        for (cidr, around) in [
            ("10.1.2.3/32", Some("10.1.0.0/16")),
            ("10.1.0.0/16", Some("10.1.0.0/16")),
            ("10.0.0.0/15", Some("10.0.0.0/8")),
            ("10.0.0.0/7", None),
            ("192.0.2.7/32", Some("192.0.2.7/32")),
            ("192.0.2.8/32", None),
            ("2001:db8:1::/48", Some("2001:db8::/32")),
            ("fe80::1/128", Some("::/0")),
        ] {
            let around = around.map(|around| around.parse().unwrap());
            assert_eq!(set.around(cidr.parse().unwrap()), around, "{cidr}");
        }
        assert!(set.contains("10.200.0.1".parse().unwrap()));
        assert!(!set.contains("192.0.2.6".parse().unwrap()));
        assert!(!PrefixSet::default().contains("::1".parse().unwrap()));
    }
}

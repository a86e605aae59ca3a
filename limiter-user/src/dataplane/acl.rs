//! Allow and deny prefixes as the agent knows them, so that listing and expiring never walk through a map.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use ipnet::{IpNet, Ipv4Net};
use limiter_common::{
    acl::{AclEntry, Origin},
    addr::{AddressV4, AddressV6},
    prefix_filter::PrefixFilter,
    time::KtimeNs,
};

use super::{AclListing, DataplaneError, List};

/// Without host bits; an IPv4-mapped IPv6 prefix is the IPv4 prefix.
pub fn canonical(prefix: IpNet) -> IpNet {
    const MAPPED_BITS: u8 = 96;
    if let IpNet::V6(v6) = prefix
        && let Some(v4) = v6.addr().to_ipv4_mapped()
        && let Some(len) = v6.prefix_len().checked_sub(MAPPED_BITS)
        && let Ok(net) = Ipv4Net::new(v4, len)
    {
        return IpNet::V4(net.trunc());
    }
    prefix.trunc()
}

/// The first 64 bits of a prefix, for its filter.
pub(super) fn leading(prefix: IpNet) -> u64 {
    match prefix.addr() {
        IpAddr::V4(address) => AddressV4::new(address.octets()).leading(),
        IpAddr::V6(address) => AddressV6::new(address.octets()).leading(),
    }
}

/// A deadline from now.
pub(super) fn deadline(now: KtimeNs, lasts: Duration) -> KtimeNs {
    now.saturating_add_ns(u64::try_from(lasts.as_nanos()).unwrap_or(u64::MAX))
}

/// How long until then; `None` for never.
pub(super) fn remaining(now: KtimeNs, deadline: KtimeNs) -> Option<Duration> {
    (deadline != KtimeNs::NEVER).then(|| Duration::from_nanos(deadline.get().saturating_sub(now.get())))
}

/// What an operator has put into a list, and until when it holds.
pub(super) type OperatorEntry = ((List, IpNet), KtimeNs);

/// Both lists. An entry of the policy goes before an operator's of the same prefix, since it has no deadline.
#[derive(Clone, Debug, Default)]
pub(super) struct Acl {
    policy: BTreeSet<(List, IpNet)>,
    operators: BTreeMap<(List, IpNet), KtimeNs>,
    /// What operators have put where the policy has the same prefix: it counts again once the policy has not. Known to this
    /// agent alone, since a map has one entry for a prefix.
    hidden: BTreeMap<(List, IpNet), KtimeNs>,
    /// How many entries there are by list and family, so that nobody has to count a long list.
    counts: [[usize; 2]; 2],
}

impl Acl {
    /// The policy's lists, and the entries of operators that hold beside them.
    pub(super) fn new(
        allow: &[IpNet],
        deny: &[IpNet],
        operators: impl IntoIterator<Item = OperatorEntry>,
        now: KtimeNs,
    ) -> Self {
        let allow = allow.iter().map(|prefix| (List::Allow, canonical(*prefix)));
        let deny = deny.iter().map(|prefix| (List::Deny, canonical(*prefix)));
        let policy: BTreeSet<_> = allow.chain(deny).collect();
        let held = operators.into_iter().filter(|(_, deadline)| *deadline > now);
        let (hidden, operators): (BTreeMap<_, _>, BTreeMap<_, _>) = held.partition(|(key, _)| policy.contains(key));
        let mut counts = [[0; 2]; 2];
        for (list, prefix) in policy.iter().chain(operators.keys()) {
            *of_family(&mut counts, *list, prefix.addr().is_ipv4()) += 1;
        }
        Self { policy, operators, hidden, counts }
    }

    /// Those that hold, and those that the policy's stand in front of.
    pub(super) fn operators(&self) -> impl Iterator<Item = OperatorEntry> {
        self.operators.iter().chain(&self.hidden).map(|(key, deadline)| (*key, *deadline))
    }

    /// Remembers an operator's entry of a prefix that the policy has, or forgets it.
    pub(super) fn hide(&mut self, list: List, prefix: IpNet, deadline: Option<KtimeNs>) {
        match deadline {
            Some(deadline) => self.hidden.insert((list, prefix), deadline),
            None => self.hidden.remove(&(list, prefix)),
        };
    }

    /// Everything that belongs in the maps.
    pub(super) fn entries(&self) -> impl Iterator<Item = (List, IpNet, AclEntry)> {
        let policy = self
            .policy
            .iter()
            .map(|(list, prefix)| (*list, *prefix, AclEntry::new(prefix.prefix_len(), Origin::Policy, KtimeNs::NEVER)));
        let operators = self.operators.iter().map(|((list, prefix), deadline)| {
            (*list, *prefix, AclEntry::new(prefix.prefix_len(), Origin::Operator, *deadline))
        });
        policy.chain(operators)
    }

    pub(super) fn count(&self, list: List, is_ipv4: bool) -> usize {
        self.counts[usize::from(list == List::Deny)][usize::from(is_ipv4)]
    }

    /// What the program asks before it looks into a list. Operators change theirs while the program runs.
    pub(super) fn filter(&self, list: List, is_ipv4: bool) -> PrefixFilter {
        let is_meant = move |key: &&(List, IpNet)| key.0 == list && key.1.addr().is_ipv4() == is_ipv4;
        if self.operators.keys().any(|key| is_meant(&key)) {
            return PrefixFilter::ALL;
        }
        PrefixFilter::of(self.policy.iter().filter(is_meant).map(|(_, prefix)| (prefix.prefix_len(), leading(*prefix))))
    }

    pub(super) fn in_policy(&self, list: List, prefix: IpNet) -> bool {
        self.policy.contains(&(list, prefix))
    }

    /// The allow prefix that holds and contains `prefix`.
    pub(super) fn allow_around(&self, prefix: IpNet, now: KtimeNs) -> Option<IpNet> {
        let holds = |key: &(List, IpNet)| {
            self.policy.contains(key) || self.operators.get(key).is_some_and(|deadline| *deadline > now)
        };
        // From the prefix itself to /0: at most 129 lookups, however long the lists are.
        let mut around = Some(prefix);
        while let Some(candidate) = around {
            if holds(&(List::Allow, candidate)) {
                return Some(candidate);
            }
            around = candidate.supernet();
        }
        None
    }

    pub(super) fn insert(&mut self, list: List, prefix: IpNet, deadline: KtimeNs) {
        if self.operators.insert((list, prefix), deadline).is_none() {
            *of_family(&mut self.counts, list, prefix.addr().is_ipv4()) += 1;
        }
    }

    /// Whether operators have put `prefix` there.
    pub(super) fn require(&self, list: List, prefix: IpNet) -> Result<(), DataplaneError> {
        if self.operators.contains_key(&(list, prefix)) {
            return Ok(());
        }
        Err(DataplaneError::Absent { list, prefix, in_policy: self.in_policy(list, prefix) })
    }

    pub(super) fn remove(&mut self, list: List, prefix: IpNet) {
        if self.operators.remove(&(list, prefix)).is_some() {
            *of_family(&mut self.counts, list, prefix.addr().is_ipv4()) -= 1;
        }
    }

    pub(super) fn is_expired(&self, list: List, prefix: IpNet, now: KtimeNs) -> bool {
        self.operators.get(&(list, prefix)).is_some_and(|deadline| *deadline <= now)
    }

    /// Operators' entries whose deadline has passed.
    pub(super) fn expired(&self, now: KtimeNs) -> Vec<(List, IpNet)> {
        self.operators.iter().filter(|(_, deadline)| **deadline <= now).map(|(key, _)| *key).collect()
    }

    pub(super) fn list(&self, now: KtimeNs) -> Vec<AclListing> {
        let policy = self.policy.iter().map(|(list, prefix)| AclListing {
            list: *list,
            prefix: *prefix,
            origin: Origin::Policy,
            remaining: None,
        });
        let operators = self.operators.iter().filter(|(_, deadline)| **deadline > now);
        let operators = operators.map(|((list, prefix), deadline)| AclListing {
            list: *list,
            prefix: *prefix,
            origin: Origin::Operator,
            remaining: remaining(now, *deadline),
        });
        policy.chain(operators).collect()
    }
}

fn of_family(counts: &mut [[usize; 2]; 2], list: List, is_ipv4: bool) -> &mut usize {
    &mut counts[usize::from(list == List::Deny)][usize::from(is_ipv4)]
}

/// A single address as a prefix.
pub(super) fn host(address: IpAddr) -> IpNet {
    IpNet::from(address.to_canonical())
}

/// Shorthand for the map side: the prefix length and the address in network order.
pub(super) enum Prefix {
    V4(u32, [u8; 4]),
    V6(u32, [u8; 16]),
}

impl From<IpNet> for Prefix {
    fn from(prefix: IpNet) -> Self {
        match prefix {
            IpNet::V4(v4) => Self::V4(v4.prefix_len().into(), v4.addr().octets()),
            IpNet::V6(v6) => Self::V6(v6.prefix_len().into(), v6.addr().octets()),
        }
    }
}

impl Prefix {
    /// The other direction, for what is found in a map. `None` for a length that no address has.
    pub(super) fn v4(prefix_len: u32, octets: [u8; 4]) -> Option<IpNet> {
        IpNet::new(Ipv4Addr::from(octets).into(), u8::try_from(prefix_len).ok()?).ok()
    }

    pub(super) fn v6(prefix_len: u32, octets: [u8; 16]) -> Option<IpNet> {
        IpNet::new(std::net::Ipv6Addr::from(octets).into(), u8::try_from(prefix_len).ok()?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn mapped_prefixes_are_ipv4_and_host_bits_are_cut() {
        for (given, expected) in [
            ("192.0.2.77/24", "192.0.2.0/24"),
            ("::ffff:192.0.2.77/120", "192.0.2.0/24"),
            ("::ffff:192.0.2.77/64", "::/64"),
            ("2001:db8::1/32", "2001:db8::/32"),
        ] {
            assert_eq!(canonical(net(given)), net(expected), "{given}");
        }
    }

    #[test]
    fn finds_the_allow_prefix_around_another() {
        let now = KtimeNs::new(100);
        let operators = [((List::Allow, net("198.51.100.0/24")), KtimeNs::new(101))];
        let acl = Acl::new(&[net("192.0.2.0/24")], &[], operators, now);
        assert_eq!(acl.allow_around(net("192.0.2.7/32"), now), Some(net("192.0.2.0/24")));
        assert_eq!(acl.allow_around(net("192.0.0.0/16"), now), None);
        assert_eq!(acl.allow_around(net("198.51.100.0/25"), now), Some(net("198.51.100.0/24")));
        assert_eq!(acl.allow_around(net("198.51.100.0/25"), KtimeNs::new(101)), None, "expired");
    }

    #[test]
    fn counts_follow_every_change() {
        let now = KtimeNs::new(0);
        let (four, six) = (net("192.0.2.0/24"), net("2001:db8::/32"));
        let operators = [((List::Deny, four), KtimeNs::new(9)), ((List::Allow, six), KtimeNs::NEVER)];
        let mut acl = Acl::new(&[six], &[four, net("192.0.2.7/24"), net("10.0.0.0/8")], operators, now);
        let counts = |acl: &Acl| {
            [(List::Allow, true), (List::Allow, false), (List::Deny, true), (List::Deny, false)]
                .map(|(list, is_ipv4)| acl.count(list, is_ipv4))
        };
        assert_eq!(counts(&acl), [0, 1, 2, 0]);
        acl.insert(List::Deny, six, KtimeNs::NEVER);
        acl.insert(List::Deny, six, KtimeNs::new(9));
        assert_eq!(counts(&acl), [0, 1, 2, 1]);
        acl.remove(List::Deny, six);
        acl.remove(List::Deny, six);
        acl.remove(List::Allow, four);
        assert_eq!(counts(&acl), [0, 1, 2, 0]);
    }

    #[test]
    fn entries_of_the_policy_go_before_operators_which_count_again_without_them() {
        let (key, now) = ((List::Deny, net("192.0.2.0/24")), KtimeNs::new(0));
        let deadlines = |acl: &Acl| acl.entries().map(|(_, _, entry)| entry.deadline()).collect::<Vec<_>>();
        let acl = Acl::new(&[], &[key.1], [(key, KtimeNs::new(101))], now);
        assert_eq!((deadlines(&acl), acl.count(key.0, true)), (vec![KtimeNs::NEVER], 1));
        assert!(acl.expired(KtimeNs::new(101)).is_empty(), "what the policy has does not expire");
        let mut acl = Acl::new(&[], &[], acl.operators(), now);
        assert_eq!((deadlines(&acl), acl.count(key.0, true)), (vec![KtimeNs::new(101)], 1));
        // Put there, or taken back, while the policy has it.
        acl = Acl::new(&[], &[key.1], acl.operators(), now);
        acl.hide(key.0, key.1, Some(KtimeNs::NEVER));
        assert_eq!(acl.operators().collect::<Vec<_>>(), [(key, KtimeNs::NEVER)]);
        acl.hide(key.0, key.1, None);
        assert_eq!(deadlines(&Acl::new(&[], &[], acl.operators(), now)), []);
    }
}

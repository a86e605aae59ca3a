//! Allow and deny prefixes as the agent knows them, so that listing and expiring never walk through a map.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use ipnet::{IpNet, Ipv4Net};
use limiter_common::{
    acl::{AclEntry, Listed, Origin},
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

    /// Remembers an operator's entry of a prefix that the policy has.
    pub(super) fn hide(&mut self, list: List, prefix: IpNet, deadline: KtimeNs) {
        self.hidden.insert((list, prefix), deadline);
    }

    /// Forgets such an entry. Tells whether there was one.
    pub(super) fn forget_hidden(&mut self, list: List, prefix: IpNet) -> bool {
        self.hidden.remove(&(list, prefix)).is_some()
    }

    /// Everything that belongs in the maps.
    pub(super) fn entries(&self) -> impl Iterator<Item = (List, IpNet, AclEntry)> {
        [List::Allow, List::Deny].into_iter().flat_map(|list| {
            let policy = self.policy.range((list, FIRST)..);
            let operators = self.operators.range((list, FIRST)..);
            let entries = nested(policy, operators, move |key| key.0 == list, NOT_LISTED);
            entries.map(move |(prefix, entry)| (list, prefix, entry))
        })
    }

    /// What belongs in the map for a prefix, if it is in the list, and for those in it, which hold as long as it does.
    pub(super) fn entries_in(&self, list: List, prefix: IpNet) -> BTreeMap<IpNet, AclEntry> {
        let is_in = |key: &(List, IpNet)| key.0 == list && prefix.contains(&key.1);
        let (policy, operators) = (self.policy.range((list, prefix)..), self.operators.range((list, prefix)..));
        nested(policy, operators, is_in, self.until_around(list, prefix)).collect()
    }

    /// Until when the prefixes around this one hold.
    fn until_around(&self, list: List, prefix: IpNet) -> KtimeNs {
        let around = std::iter::successors(prefix.supernet(), IpNet::supernet);
        around.filter_map(|around| self.deadline(list, around)).max().unwrap_or(NOT_LISTED)
    }

    /// Until when a prefix is in the list by itself.
    fn deadline(&self, list: List, prefix: IpNet) -> Option<KtimeNs> {
        let key = (list, prefix);
        if self.policy.contains(&key) { Some(KtimeNs::NEVER) } else { self.operators.get(&key).copied() }
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
        std::iter::successors(Some(prefix), IpNet::supernet).find(|around| holds(&(List::Allow, *around)))
    }

    /// Tells until when it would have held before.
    pub(super) fn insert(&mut self, list: List, prefix: IpNet, deadline: KtimeNs) -> Option<KtimeNs> {
        let before = self.operators.insert((list, prefix), deadline);
        if before.is_none() {
            *of_family(&mut self.counts, list, prefix.addr().is_ipv4()) += 1;
        }
        before
    }

    /// [`Self::insert`], or [`Self::remove`] without a deadline.
    pub(super) fn set(&mut self, list: List, prefix: IpNet, deadline: Option<KtimeNs>) -> Option<KtimeNs> {
        match deadline {
            Some(deadline) => self.insert(list, prefix, deadline),
            None => self.remove(list, prefix),
        }
    }

    /// Whether operators have put `prefix` there.
    pub(super) fn require(&self, list: List, prefix: IpNet) -> Result<(), DataplaneError> {
        if self.operators.contains_key(&(list, prefix)) {
            return Ok(());
        }
        Err(DataplaneError::Absent { list, prefix, in_policy: self.in_policy(list, prefix) })
    }

    /// Tells until when it would have held.
    pub(super) fn remove(&mut self, list: List, prefix: IpNet) -> Option<KtimeNs> {
        let removed = self.operators.remove(&(list, prefix));
        if removed.is_some() {
            *of_family(&mut self.counts, list, prefix.addr().is_ipv4()) -= 1;
        }
        removed
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
            is_behind_policy: false,
        });
        let of_operators = [(&self.operators, false), (&self.hidden, true)];
        let operators = of_operators.into_iter().flat_map(|(entries, is_behind_policy)| {
            let holding = entries.iter().filter(|(_, deadline)| **deadline > now);
            holding.map(move |((list, prefix), deadline)| AclListing {
                list: *list,
                prefix: *prefix,
                origin: Origin::Operator,
                remaining: remaining(now, *deadline),
                is_behind_policy,
            })
        });
        policy.chain(operators).collect()
    }
}

/// What has to be done to a map that holds `before`, and shall hold `after`: entries to be written, and then prefixes to be
/// removed.
pub(super) fn differences(
    before: &BTreeMap<IpNet, AclEntry>,
    after: &BTreeMap<IpNet, AclEntry>,
) -> impl Iterator<Item = (IpNet, Option<AclEntry>)> {
    let written = after.iter().filter(|(prefix, entry)| before.get(prefix) != Some(entry));
    let removed = before.keys().filter(|prefix| !after.contains_key(prefix));
    written.map(|(prefix, entry)| (*prefix, Some(*entry))).chain(removed.map(|prefix| (*prefix, None)))
}

/// The prefix that comes before all others.
const FIRST: IpNet = IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0));
/// Until when an address holds of which no prefix is in a list.
const NOT_LISTED: KtimeNs = KtimeNs::new(0);

/// Map values of prefixes of one list, given by two iterators that go through theirs in order. A prefix holds as long as the
/// one around it, and that one, by the same rule, as long as any around it: each has to be held against one other alone.
fn nested<'a>(
    policy: impl Iterator<Item = &'a (List, IpNet)>,
    operators: impl Iterator<Item = (&'a (List, IpNet), &'a KtimeNs)>,
    is_meant: impl Fn(&(List, IpNet)) -> bool,
    until_around: KtimeNs,
) -> impl Iterator<Item = (IpNet, AclEntry)> {
    let policy = policy.take_while(|key| is_meant(key));
    let operators = operators.take_while(|(key, _)| is_meant(key));
    let policy = policy.map(|(_, prefix)| (*prefix, Listed::new(Origin::Policy, KtimeNs::NEVER)));
    let operators = operators.map(|((_, prefix), deadline)| (*prefix, Listed::new(Origin::Operator, *deadline)));
    let mut all: Vec<_> = policy.chain(operators).collect();
    // In the order of the maps: a prefix, what is in it, and then what comes behind it.
    all.sort_by_key(|(prefix, _)| *prefix);
    let mut around: Vec<(IpNet, KtimeNs)> = Vec::new();
    all.into_iter().map(move |(prefix, listed)| {
        while around.pop_if(|(wide, _)| !wide.contains(&prefix)).is_some() {}
        let until = around.last().map_or(until_around, |(_, until)| *until).max(listed.deadline());
        around.push((prefix, until));
        (prefix, AclEntry::new(listed, until))
    })
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
    use proptest::prelude::*;

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

    /// As a prefix of eight bits at the end of a fixed network, so that many are in one another.
    fn small((bits, len): (u8, u8)) -> IpNet {
        let address = Ipv4Addr::from([192, 0, 2, bits]);
        IpNet::new(address.into(), 24 + len).unwrap().trunc()
    }

    proptest! {
        /// By a lookup of the longest prefix alone, at any time, it is as if all prefixes of an address were asked.
        #[test]
        fn the_longest_prefix_knows_until_when_any_holds(
            policy in prop::collection::vec((any::<u8>(), 0u8..=8), 0..3),
            operators in prop::collection::vec(((any::<u8>(), 0u8..=8), 1u64..20), 0..30),
            changes in prop::collection::vec(((any::<u8>(), 0u8..=8), prop::option::of(1u64..20)), 0..20),
        ) {
            let list = List::Deny;
            let policy: Vec<_> = policy.into_iter().map(small).collect();
            let put = operators.iter().map(|(prefix, deadline)| ((list, small(*prefix)), KtimeNs::new(*deadline)));
            let mut acl = Acl::new(&[net("192.0.2.0/25")], &policy, put, NOT_LISTED);
            let of_list = |acl: &Acl| -> BTreeMap<_, _> {
                acl.entries().filter(|(of, ..)| *of == list).map(|(_, prefix, entry)| (prefix, entry)).collect()
            };
            // The map, which every change brings up to date.
            let mut map = of_list(&acl);
            for (prefix, deadline) in changes {
                let prefix = small(prefix);
                if acl.in_policy(list, prefix) {
                    continue;
                }
                let before = acl.entries_in(list, prefix);
                acl.set(list, prefix, deadline.map(KtimeNs::new));
                for (changed, entry) in differences(&before, &acl.entries_in(list, prefix)) {
                    match entry {
                        Some(entry) => map.insert(changed, entry),
                        None => map.remove(&changed),
                    };
                }
                prop_assert_eq!(&map, &of_list(&acl));
            }
            for address in (0..=255).map(|bits| small((bits, 8))) {
                let longest = map.iter().filter(|(prefix, _)| prefix.contains(&address));
                let longest = longest.max_by_key(|(prefix, _)| prefix.prefix_len()).map(|(_, entry)| entry);
                for now in (0..=20).map(KtimeNs::new) {
                    let any = std::iter::successors(Some(address), IpNet::supernet)
                        .any(|prefix| acl.deadline(list, prefix).is_some_and(|deadline| deadline > now));
                    prop_assert_eq!(longest.is_some_and(|entry| entry.holds(now)), any, "{} at {:?}", address, now);
                }
            }
        }
    }

    #[test]
    fn what_has_expired_can_be_removed_without_a_look_at_what_is_in_it() {
        let now = KtimeNs::new(10);
        let operators = [("192.0.2.0/24", 12), ("192.0.2.0/25", 9), ("192.0.2.0/26", 11), ("192.0.2.0/27", 8)];
        let operators = operators.map(|(prefix, deadline)| ((List::Deny, net(prefix)), KtimeNs::new(deadline)));
        let mut acl = Acl::new(&[], &[], [], now);
        for ((list, prefix), deadline) in operators {
            acl.insert(list, prefix, deadline);
        }
        let before = acl.entries_in(List::Deny, net("192.0.2.0/24"));
        for (list, prefix) in acl.expired(now) {
            acl.remove(list, prefix);
        }
        let after = acl.entries_in(List::Deny, net("192.0.2.0/24"));
        let removed = [net("192.0.2.0/25"), net("192.0.2.0/27")].map(|prefix| (prefix, None));
        assert_eq!(differences(&before, &after).collect::<Vec<_>>(), removed);
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
        let deadlines = |acl: &Acl| acl.entries().map(|(_, _, entry)| entry.listed().deadline()).collect::<Vec<_>>();
        let acl = Acl::new(&[], &[key.1], [(key, KtimeNs::new(101))], now);
        assert_eq!((deadlines(&acl), acl.count(key.0, true)), (vec![KtimeNs::NEVER], 1));
        assert!(acl.expired(KtimeNs::new(101)).is_empty(), "what the policy has does not expire");
        let mut acl = Acl::new(&[], &[], acl.operators(), now);
        assert_eq!((deadlines(&acl), acl.count(key.0, true)), (vec![KtimeNs::new(101)], 1));
        // Put there, or taken back, while the policy has it.
        acl = Acl::new(&[], &[key.1], acl.operators(), now);
        acl.hide(key.0, key.1, KtimeNs::NEVER);
        assert_eq!(acl.operators().collect::<Vec<_>>(), [(key, KtimeNs::NEVER)]);
        let listed: Vec<_> = acl.list(now).iter().map(|entry| (entry.origin, entry.is_behind_policy)).collect();
        assert_eq!(listed, [(Origin::Policy, false), (Origin::Operator, true)]);
        assert!(acl.forget_hidden(key.0, key.1) && !acl.forget_hidden(key.0, key.1));
        assert_eq!(deadlines(&Acl::new(&[], &[], acl.operators(), now)), []);
    }
}

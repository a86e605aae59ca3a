//! Which denials become budgets. Pure: takes `now` as an argument, touches no map.

use std::{collections::HashMap, net::IpAddr, sync::Arc, time::Duration};

use ipnet::IpNet;
use limiter_common::{addr::SrcPrefixes, budget::BudgetReason, time::UnixMicros};

/// A denial of an address by a rule of scope `ip`.
#[derive(Clone, Debug)]
pub struct Denial {
    /// The packet source: never an address that a proxy reported, nor one of this host.
    pub address: IpAddr,
    pub rule: Arc<str>,
    pub retry_after_us: u64,
    /// The rule covers every request of the address.
    pub covers_all: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Push {
    pub block_for: Duration,
    pub reason: BudgetReason,
}

/// What the operator configures.
#[derive(Clone, Debug)]
pub struct PushSettings {
    /// No push lasts longer.
    pub max_block: Duration,
    /// Denials by a rule that covers only some endpoints before its address is blocked: until then the address may be
    /// well-behaved everywhere else.
    pub after_denials: u32,
    pub prefixes: SrcPrefixes,
    /// Trusted proxies and allow prefixes.
    pub never: Vec<IpNet>,
}

/// Sources that are remembered at one time: 65,536, about 6 MB. Beyond it the ones whose denial is over are forgotten,
/// and if there are none, new sources are not counted.
const MAX_REMEMBERED: usize = 65_536;

#[derive(Debug)]
pub struct PushPolicy {
    settings: PushSettings,
    sources: HashMap<IpAddr, Remembered>,
    /// Before this, looking for sources to forget again would find few and cost a walk over all of them.
    next_purge: UnixMicros,
}

#[derive(Clone, Copy, Debug)]
struct Remembered {
    denials: u32,
    /// End of the last denial.
    until: UnixMicros,
    /// What has been pushed already.
    blocked_until: UnixMicros,
}

impl PushPolicy {
    pub fn new(settings: PushSettings) -> Self {
        Self { settings, sources: HashMap::new(), next_purge: UnixMicros::new(0) }
    }

    /// Takes over the exemptions of a new policy. Denials under the old one say nothing about the new one.
    pub fn renew(&mut self, never: Vec<IpNet>) {
        self.settings.never = never;
        self.sources.clear();
    }

    /// What to push for a denial, if anything.
    pub fn decide(&mut self, denial: &Denial, now: UnixMicros) -> Option<Push> {
        if self.is_exempt(denial.address) {
            return None;
        }
        let source = self.settings.prefixes.cut(denial.address);
        if self.sources.len() >= MAX_REMEMBERED && !self.sources.contains_key(&source) {
            if now >= self.next_purge {
                self.sources.retain(|_, remembered| remembered.until > now);
                self.next_purge = now.saturating_add_us(1_000_000);
            }
            if self.sources.len() >= MAX_REMEMBERED {
                return None;
            }
        }
        let until = now.saturating_add_us(denial.retry_after_us);
        let fresh = Remembered { denials: 0, until, blocked_until: UnixMicros::new(0) };
        let remembered = self.sources.entry(source).or_insert(fresh);
        if remembered.until <= now {
            *remembered = fresh;
        }
        remembered.denials = remembered.denials.saturating_add(1);
        remembered.until = remembered.until.max(until);
        let reason = if denial.covers_all {
            BudgetReason::AddressOverLimit
        } else if remembered.denials > self.settings.after_denials {
            BudgetReason::KeepsSending
        } else {
            return None;
        };
        let block_for = Duration::from_micros(denial.retry_after_us).min(self.settings.max_block);
        let end = now.saturating_add_us(u64::try_from(block_for.as_micros()).unwrap_or(u64::MAX));
        // Requests that were under way when the block was written are denied too, and change nothing.
        if end <= remembered.blocked_until {
            return None;
        }
        remembered.blocked_until = end;
        Some(Push { block_for, reason })
    }

    /// Forgets a source whose push could not be written, so that its next denial is pushed again.
    pub fn forget(&mut self, address: IpAddr) {
        self.sources.remove(&self.settings.prefixes.cut(address));
    }

    /// A source key stands for its whole prefix, so one exempt address in it exempts all of it.
    pub fn is_exempt(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        let Ok(source) = IpNet::new(address, self.settings.prefixes.len_of(address)) else { return true };
        let source = source.trunc();
        let overlaps = |net: &IpNet| net.contains(&source) || source.contains(net);
        address.is_loopback()
            || address.is_unspecified()
            || address.is_multicast()
            || self.settings.never.iter().any(overlaps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_US: u64 = 1_000_000;

    fn policy() -> PushPolicy {
        let never = ["10.0.0.0/8", "2001:db8:a::1/128"].map(|net| net.parse().unwrap()).to_vec();
        PushPolicy::new(PushSettings {
            max_block: Duration::from_secs(60),
            after_denials: 3,
            prefixes: SrcPrefixes::default(),
            never,
        })
    }

    fn denial(address: &str, seconds: u64, covers_all: bool) -> Denial {
        let address = address.parse().unwrap();
        Denial { address, rule: "r".into(), retry_after_us: seconds * SECOND_US, covers_all }
    }

    #[test]
    fn an_address_over_its_own_limit_is_blocked_until_its_retry_after_and_no_longer_than_max_block() {
        for (seconds, blocked) in [(1, 1), (59, 59), (60, 60), (3600, 60)] {
            let push = policy().decide(&denial("198.51.100.1", seconds, true), UnixMicros::new(0)).unwrap();
            let expected = Push { block_for: Duration::from_secs(blocked), reason: BudgetReason::AddressOverLimit };
            assert_eq!(push, expected);
        }
    }

    #[test]
    fn proxies_and_allowed_prefixes_are_never_pushed() {
        for address in [
            "10.1.2.3",
            "::ffff:10.1.2.3",
            "127.0.0.1",
            "::1",
            "0.0.0.0",
            "224.0.0.1",
            // Not the allowed address itself, but one bucket with it.
            "2001:db8:a::2",
        ] {
            assert_eq!(policy().decide(&denial(address, 10, true), UnixMicros::new(0)), None, "{address}");
        }
    }

    #[test]
    fn a_rule_for_some_endpoints_blocks_only_who_keeps_sending() {
        let mut policy = policy();
        for _ in 0..3 {
            assert_eq!(policy.decide(&denial("198.51.100.1", 10, false), UnixMicros::new(0)), None);
        }
        let push = policy.decide(&denial("198.51.100.1", 10, false), UnixMicros::new(SECOND_US));
        assert_eq!(push, Some(Push { block_for: Duration::from_secs(10), reason: BudgetReason::KeepsSending }));
        // Once the denial is over, counting begins anew.
        let later = UnixMicros::new(12 * SECOND_US);
        assert_eq!(policy.decide(&denial("198.51.100.1", 10, false), later), None);
    }

    #[test]
    fn a_block_is_written_once() {
        let mut policy = policy();
        let first = denial("198.51.100.1", 10, true);
        assert!(policy.decide(&first, UnixMicros::new(0)).is_some());
        let under_way = Denial { retry_after_us: 10 * SECOND_US - 5, ..first.clone() };
        assert_eq!(policy.decide(&under_way, UnixMicros::new(5)), None);
        policy.forget(first.address);
        assert!(policy.decide(&under_way, UnixMicros::new(5)).is_some());
    }

    #[test]
    fn a_new_policy_exempts_others_and_begins_anew() {
        let mut policy = policy();
        let (exempt, blocked) = (denial("10.1.2.3", 10, true), denial("198.51.100.1", 10, true));
        assert!(policy.decide(&exempt, UnixMicros::new(0)).is_none());
        assert!(policy.decide(&blocked, UnixMicros::new(0)).is_some());
        policy.renew(vec!["198.51.100.0/24".parse().unwrap()]);
        assert!(policy.decide(&exempt, UnixMicros::new(0)).is_some());
        assert!(policy.decide(&blocked, UnixMicros::new(0)).is_none());
        policy.renew(Vec::new());
        assert!(policy.decide(&blocked, UnixMicros::new(0)).is_some(), "not taken for one that is blocked already");
    }

    #[test]
    fn memory_is_bounded_and_live_sources_keep_their_place() {
        let mut policy = policy();
        for n in 0..u32::try_from(MAX_REMEMBERED).unwrap() + 100 {
            let address = IpAddr::V4((0xc600_0000 + n).into());
            let push = policy.decide(
                &Denial { address, rule: "r".into(), retry_after_us: SECOND_US, covers_all: true },
                UnixMicros::new(0),
            );
            assert_eq!(push.is_some(), (n as usize) < MAX_REMEMBERED);
        }
        let later = UnixMicros::new(2 * SECOND_US);
        assert!(policy.decide(&denial("198.51.100.1", 1, true), later).is_some());
        assert_eq!(policy.sources.len(), 1);
    }
}

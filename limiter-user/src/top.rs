//! Who sends most, and of whom most is dropped, at this time: what `limiter top` and `/v1/top` show.
//!
//! It is made from samples that the XDP program sends anyway, so that looking reads no map of sources. Of each list a
//! bounded number of entries is kept, and what they say fades within seconds.

mod heavy_hitters;

use std::{cell::Cell, net::IpAddr};

use limiter_common::{
    addr::SrcPrefixes,
    event::{self, Event},
    verdict::Verdict,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use self::heavy_hitters::{Decay, HeavyHitters, seven_eighths};
use crate::{
    dataplane::{Dataplane, DataplaneError},
    identity::api_key::id_to_hex,
    limiter::{Caller, Kind},
    store::ApiKeyId,
};

/// Entries of each list. A source with a thousandth of the packets is among them for sure.
const CAPACITY: usize = 1024;
/// One request in so many is a sample.
const REQUESTS_ONE_IN: u32 = 8;

/// What was seen lately. With seven eighths left each second, a steady rate keeps between 7 and 8 times itself.
#[derive(Debug)]
pub struct Top {
    prefixes: SrcPrefixes,
    lists: Mutex<Lists>,
    keys: Mutex<HeavyHitters<ApiKeyId, Requests>>,
}

#[derive(Debug)]
struct Lists {
    busiest: HeavyHitters<IpAddr, Traffic>,
    most_dropped: HeavyHitters<IpAddr, Traffic>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Traffic {
    packets: u64,
    bytes: u64,
    dropped: u64,
    would_drop: u64,
    /// The last verdict that was no pass, and the slot of its rule.
    over: Option<(Verdict, Option<u32>)>,
}

impl Decay for Traffic {
    fn decay(&mut self) {
        for number in [&mut self.packets, &mut self.bytes, &mut self.dropped, &mut self.would_drop] {
            *number = seven_eighths(*number);
        }
    }
}

impl Traffic {
    fn add(&mut self, event: &Event, verdict: Verdict) {
        let packets = event.represents();
        self.packets += packets;
        self.bytes += packets * event.bytes();
        match verdict {
            Verdict::Pass(_) => return,
            Verdict::Drop(_) => self.dropped += packets,
            Verdict::ShadowDrop(_) => self.would_drop += packets,
        }
        self.over = Some((verdict, event.slot()));
    }

    fn over(&self) -> u64 {
        self.dropped + self.would_drop
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Requests {
    requests: u64,
    denied: u64,
}

impl Decay for Requests {
    fn decay(&mut self) {
        self.requests = seven_eighths(self.requests);
        self.denied = seven_eighths(self.denied);
    }
}

impl Top {
    pub fn new(prefixes: SrcPrefixes) -> Self {
        let lists = Lists { busiest: HeavyHitters::new(CAPACITY), most_dropped: HeavyHitters::new(CAPACITY) };
        Self { prefixes, lists: Mutex::new(lists), keys: Mutex::new(HeavyHitters::new(CAPACITY)) }
    }

    /// Takes samples; other events say nothing about amounts.
    pub fn saw(&self, events: &[Event]) {
        let mut lists = self.lists.lock();
        for event in events {
            let (Some(source), Some(verdict)) = (event.source(), event.verdict()) else { continue };
            if event.represents() == 0 {
                continue;
            }
            let source = self.prefixes.cut(source);
            lists.busiest.add(source, event.represents()).add(event, verdict);
            if !matches!(verdict, Verdict::Pass(_)) {
                lists.most_dropped.add(source, event.represents()).add(event, verdict);
            }
        }
    }

    /// Takes a request of an API key, if it is a sample.
    pub fn saw_request(&self, caller: &Caller, kind: Kind) {
        thread_local! {
            static SEEN: Cell<u64> = const { Cell::new(0) };
        }
        let Caller::Key(owner) = caller else { return };
        let seen = SEEN.replace(SEEN.get().wrapping_add(1));
        if !event::is_sampled(seen, event::sampled_below(REQUESTS_ONE_IN)) {
            return;
        }
        let weight = u64::from(REQUESTS_ONE_IN);
        // Whoever decides about requests does not wait for whoever looks.
        let Some(mut keys) = self.keys.try_lock() else { return };
        let requests = keys.add(owner.id, weight);
        requests.requests += weight;
        if !matches!(kind, Kind::Allowed) {
            requests.denied += weight;
        }
    }

    /// Makes what was seen count less. To be called once a second.
    pub fn fade(&self) {
        let mut lists = self.lists.lock();
        lists.busiest.decay();
        lists.most_dropped.decay();
        drop(lists);
        self.keys.lock().decay();
    }

    /// The first `rows` of each list.
    pub fn read(&self, dataplane: Option<&dyn Dataplane>, rows: usize) -> Result<TopReport, DataplaneError> {
        let packets = dataplane.map(totals).transpose()?;
        let lists = self.lists.lock();
        let list = |rows: Vec<(&IpAddr, &Traffic)>| rows.into_iter().map(|(s, t)| self.row(*s, t, dataplane)).collect();
        let busiest = list(lists.busiest.heaviest(rows, |traffic| traffic.packets));
        let most_dropped = list(lists.most_dropped.heaviest(rows, Traffic::over));
        drop(lists);
        let keys = self.keys.lock();
        let keys = keys.heaviest(rows, |requests| requests.requests).into_iter().map(|(id, requests)| TopKey {
            key: id_to_hex(*id),
            requests_per_second: a_second(requests.requests),
            denied_per_second: a_second(requests.denied),
        });
        let keys = keys.collect();
        Ok(TopReport { packets, busiest, most_dropped, keys })
    }

    fn row(&self, source: IpAddr, traffic: &Traffic, dataplane: Option<&dyn Dataplane>) -> TopSource {
        let rule = traffic.over.and_then(|(_, slot)| dataplane?.rule_in(slot?));
        TopSource {
            source: match self.prefixes.len_of(source) {
                32 if source.is_ipv4() => source.to_string(),
                128 => source.to_string(),
                len => format!("{source}/{len}"),
            },
            packets_per_second: a_second(traffic.packets),
            bytes_per_second: a_second(traffic.bytes),
            dropped_per_second: a_second(traffic.dropped),
            would_drop_per_second: a_second(traffic.would_drop),
            reason: traffic.over.map(|(verdict, _)| verdict.reason().to_owned()),
            rule: rule.map(|rule| rule.to_string()),
        }
    }
}

/// In the middle between 7 and 8 times the rate.
fn a_second(faded: u64) -> u64 {
    faded.saturating_mul(2).div_ceil(15)
}

/// Exact, from the counters.
fn totals(dataplane: &dyn Dataplane) -> Result<Totals, DataplaneError> {
    let mut totals = Totals::default();
    for counter in dataplane.counters()? {
        let total = match counter.verdict {
            Verdict::Pass(_) => &mut totals.passed,
            Verdict::Drop(_) => &mut totals.dropped,
            Verdict::ShadowDrop(_) => &mut totals.would_drop,
        };
        *total += counter.counter.packets;
    }
    Ok(totals)
}

/// The whole answer.
#[derive(Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TopReport {
    /// `None` when the agent runs without XDP.
    pub packets: Option<Totals>,
    /// By packets, passed and dropped.
    pub busiest: Vec<TopSource>,
    /// By packets that were dropped, or would be.
    pub most_dropped: Vec<TopSource>,
    /// By requests.
    pub keys: Vec<TopKey>,
}

/// Packets since the maps were made, exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    pub passed: u64,
    pub dropped: u64,
    pub would_drop: u64,
}

/// A source and its estimated rates.
#[derive(Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TopSource {
    pub source: String,
    pub packets_per_second: u64,
    pub bytes_per_second: u64,
    pub dropped_per_second: u64,
    pub would_drop_per_second: u64,
    /// Why packets of it are dropped, and by which rule.
    pub reason: Option<String>,
    pub rule: Option<String>,
}

/// An API key, by its id, and its estimated rates.
#[derive(Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TopKey {
    pub key: String,
    pub requests_per_second: u64,
    pub denied_per_second: u64,
}

#[cfg(test)]
mod tests {
    use limiter_common::{
        event::{EventKind, News},
        stats::{NO_RULE, rule_index},
        time::KtimeNs,
        verdict::{DropReason, PassReason},
    };

    use super::*;
    use crate::identity::KeyOwner;

    fn sample(host: u8, verdict: Verdict) -> Event {
        let news = News::of(EventKind::Sample);
        Event::new(KtimeNs::new(0), news, rule_index(NO_RULE, verdict), 100)
            .from_v4([192, 0, 2, host])
            .representing(128)
    }

    #[test]
    fn steady_rates_are_told_as_they_are_and_fade() {
        let top = Top::new(SrcPrefixes::default());
        for _ in 0..60 {
            let mut events = vec![sample(1, Verdict::Pass(PassReason::Conforming)); 100];
            events.extend(vec![sample(2, Verdict::Drop(DropReason::RateLimitedPackets)); 40]);
            events.extend(vec![sample(3, Verdict::ShadowDrop(DropReason::RateLimitedPackets)); 10]);
            top.saw(&events);
            top.fade();
        }
        let report = top.read(None, 2).unwrap();
        let sources = |list: &[TopSource]| list.iter().map(|row| row.source.clone()).collect::<Vec<_>>();
        assert_eq!(sources(&report.busiest), ["192.0.2.1", "192.0.2.2"]);
        assert_eq!(sources(&report.most_dropped), ["192.0.2.2", "192.0.2.3"]);
        let busiest = &report.busiest[0];
        assert!((11_500..=13_500).contains(&busiest.packets_per_second), "{busiest:?}");
        assert_eq!((busiest.dropped_per_second, &busiest.reason), (0, &None));
        assert_eq!(report.most_dropped[0].reason.as_deref(), Some("rate_limited_packets"));
        assert!(report.most_dropped[1].would_drop_per_second > 0);
        for _ in 0..120 {
            top.fade();
        }
        assert!(top.read(None, 9).unwrap().busiest.is_empty());
    }

    #[test]
    fn keys_are_ranked_by_requests_and_other_callers_left_out() {
        let top = Top::new(SrcPrefixes::default());
        let key = |id: u8| Caller::Key(KeyOwner::new(ApiKeyId([id; 16]), "c", None).into());
        for round in 0..10_000 {
            top.saw_request(&key(1), Kind::Allowed);
            if round % 4 == 0 {
                top.saw_request(&key(2), Kind::Denied);
            }
            top.saw_request(&Caller::Anonymous, Kind::Allowed);
        }
        let report = top.read(None, 9).unwrap();
        let keys: Vec<_> = report.keys.iter().map(|row| row.key.as_str()).collect();
        assert_eq!(keys, [id_to_hex(ApiKeyId([1; 16])), id_to_hex(ApiKeyId([2; 16]))]);
        assert_eq!(report.keys[0].denied_per_second, 0);
        assert_eq!(report.keys[1].denied_per_second, report.keys[1].requests_per_second);
    }
}

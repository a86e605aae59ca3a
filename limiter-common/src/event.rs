//! What the XDP program tells of while it works: samples of packets, and what has just begun.
//!
//! Never one event a packet. Something that lasts is told once and again after it has been quiet, packets are sampled,
//! and each CPU has an [`EventMeter`] that bounds how many events it sends.

use core::net::IpAddr;

use crate::{
    gcra::{self, GcraParams, Outcome},
    stats::{self, NO_RULE},
    time::KtimeNs,
    verdict::Verdict,
};

/// Declares the kinds in order, with their names outside and what bounds their number. A kind is a bit of [`News`].
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $text:literal in $class:ident,)*) => {
        /// What an event tells of.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum EventKind {
            $($(#[$doc])* $kind,)*
        }

        impl EventKind {
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// The name in metrics, logs and `limiter status`.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$kind => $text,)*
                }
            }

            pub const fn class(self) -> EventClass {
                match self {
                    $(Self::$kind => EventClass::$class,)*
                }
            }
        }
    };
}

kinds! {
    /// A packet chosen at random, see [`is_sampled`].
    Sample = "sample" in Samples,
    /// A source is over a limit, and was not for a while.
    SourceLimited = "source_limited" in Sources,
    /// A pushed budget drops its first packet.
    BudgetHit = "budget_hit" in Sources,
    /// More sources are new than get a bucket of their own.
    NewSourcesOver = "new_sources_over" in Maps,
    /// The kernel had no room for a bucket.
    InsertFailed = "insert_failed" in Maps,
}

/// Kinds of events that are bounded together: samples of a flood leave room for the news that there is one.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventClass {
    Samples,
    Sources,
    Maps,
}

impl EventClass {
    pub const ALL: &[Self] = &[Self::Samples, Self::Sources, Self::Maps];
    /// Entries of the `EVENT_METERS` map.
    #[expect(clippy::cast_possible_truncation, reason = "a count of variants")]
    pub const COUNT: u32 = Self::ALL.len() as u32;

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Samples => "samples",
            Self::Sources => "sources",
            Self::Maps => "maps",
        }
    }
}

/// The kinds of what one packet brought about.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct News(u32);

impl News {
    pub const NONE: Self = Self(0);

    #[inline(always)]
    pub const fn of(kind: EventKind) -> Self {
        Self(1 << kind as u32)
    }

    /// What [`Self::bits`] gave.
    #[inline(always)]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    #[inline(always)]
    pub const fn bits(self) -> u32 {
        self.0
    }

    #[inline(always)]
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    #[inline(always)]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    #[inline(always)]
    pub const fn has(self, kind: EventKind) -> bool {
        self.0 & 1 << kind as u32 != 0
    }

    pub fn kinds(self) -> impl Iterator<Item = EventKind> {
        EventKind::ALL.iter().copied().filter(move |kind| self.has(*kind))
    }

    /// What bounds this event: the rarest of its kinds.
    #[inline(always)]
    pub const fn class(self) -> EventClass {
        if self.has(EventKind::NewSourcesOver) || self.has(EventKind::InsertFailed) {
            EventClass::Maps
        } else if self.has(EventKind::SourceLimited) || self.has(EventKind::BudgetHit) {
            EventClass::Sources
        } else {
            EventClass::Samples
        }
    }
}

/// One entry of the ring `EVENTS`: host byte order, no padding.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Event {
    at_ns: u64,
    represents: u64,
    source: [u8; 16],
    /// 4, 6, or 0 for a packet without a readable address.
    family: u32,
    news: News,
    /// Index of the counter that the packet is in.
    counter: u32,
    bytes: u32,
}

const _: () = assert!(size_of::<Event>() == 2 * 8 + 16 + 4 * 4);

impl Event {
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "no frame has four gigabytes")]
    pub const fn new(at: KtimeNs, news: News, counter: u32, bytes: u64) -> Self {
        Self { at_ns: at.get(), represents: 0, source: [0; 16], family: 0, news, counter, bytes: bytes as u32 }
    }

    #[inline(always)]
    #[must_use]
    pub const fn from_v4(mut self, address: [u8; 4]) -> Self {
        [self.source[0], self.source[1], self.source[2], self.source[3]] = address;
        self.family = 4;
        self
    }

    #[inline(always)]
    #[must_use]
    pub const fn from_v6(mut self, address: [u8; 16]) -> Self {
        self.source = address;
        self.family = 6;
        self
    }

    /// For a sample: how many packets it stands for.
    #[inline(always)]
    #[must_use]
    pub const fn representing(mut self, packets: u64) -> Self {
        self.represents = packets;
        self
    }

    /// From an entry of the ring; `None` when the length is another.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (at_ns, rest) = bytes.split_first_chunk()?;
        let (represents, rest) = rest.split_first_chunk()?;
        let (source, rest) = rest.split_first_chunk()?;
        let (family, rest) = rest.split_first_chunk()?;
        let (news, rest) = rest.split_first_chunk()?;
        let (counter, rest) = rest.split_first_chunk()?;
        let bytes = rest.try_into().ok()?;
        Some(Self {
            at_ns: u64::from_ne_bytes(*at_ns),
            represents: u64::from_ne_bytes(*represents),
            source: *source,
            family: u32::from_ne_bytes(*family),
            news: News(u32::from_ne_bytes(*news)),
            counter: u32::from_ne_bytes(*counter),
            bytes: u32::from_ne_bytes(bytes),
        })
    }

    pub const fn at(&self) -> KtimeNs {
        KtimeNs::new(self.at_ns)
    }

    /// How many packets this sample stands for; 0 unless it is one.
    pub const fn represents(&self) -> u64 {
        self.represents
    }

    /// The sender's whole address.
    pub const fn source(&self) -> Option<IpAddr> {
        let [a, b, c, d, ..] = self.source;
        match self.family {
            4 => Some(IpAddr::V4(core::net::Ipv4Addr::new(a, b, c, d))),
            6 => Some(IpAddr::V6(core::net::Ipv6Addr::from_bits(u128::from_be_bytes(self.source)))),
            _ => None,
        }
    }

    pub const fn news(&self) -> News {
        self.news
    }

    /// `None` for an event of another version of this program.
    pub fn verdict(&self) -> Option<Verdict> {
        stats::of_index(self.counter).1
    }

    /// Slot of the rule that decided.
    pub fn slot(&self) -> Option<u32> {
        let (slot, _) = stats::of_index(self.counter);
        if slot == NO_RULE { None } else { Some(slot) }
    }

    /// Length of the frame.
    pub const fn bytes(&self) -> u64 {
        self.bytes as u64
    }
}

/// What is worth telling once has been told until this time. A mark is one u64 beside the state that it is about; 0 is
/// a mark that was never set.
pub mod mark {
    use super::KtimeNs;

    /// For how long something has to be quiet until it is news again.
    pub const QUIET_NS: u64 = 60_000_000_000;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Renewal {
        /// What to store.
        pub mark: u64,
        pub is_news: bool,
    }

    /// What happens to a mark when the thing occurs. `None`, the usual answer, leaves it as it is: while something
    /// goes on, the mark is moved no more than twice in [`QUIET_NS`].
    #[inline(always)]
    pub const fn renew(mark: u64, now: KtimeNs) -> Option<Renewal> {
        let now = now.get();
        let is_news = now >= mark;
        if !is_news && mark - now > QUIET_NS / 2 {
            return None;
        }
        Some(Renewal { mark: now.wrapping_add(QUIET_NS), is_news })
    }
}

/// The threshold of [`is_sampled`] for one packet in `one_in`; 0 samples nothing.
pub const fn sampled_below(one_in: u32) -> u64 {
    match one_in {
        0 => 0,
        1 => u64::MAX,
        _ => u64::MAX / one_in as u64,
    }
}

/// Whether the packet that a counter counts as its `count`th is a sample. Multiples of the golden ratio, modulo 1, lie
/// evenly, and so do those of every other step: the choice has no rhythm that a sender could share, and needs neither a
/// random number nor state of its own, but one multiplication.
#[inline(always)]
pub const fn is_sampled(count: u64, below: u64) -> bool {
    count.wrapping_mul(0x9e37_79b9_7f4a_7c15) < below
}

/// What one CPU has sent of one class. Per-CPU map value: each CPU changes its own, so no atomics are needed.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct EventMeter {
    tat: u64,
    /// Events that were not sent since the last that was.
    missed: u64,
    pub counts: EventCounts,
}

const _: () = assert!(size_of::<EventMeter>() == 2 * 8 + size_of::<EventCounts>());

/// What became of events.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct EventCounts {
    pub sent: u64,
    /// Not sent, since the CPU had sent too many.
    pub suppressed: u64,
    /// Not sent, since the reader was too slow, or absent.
    pub ring_full: u64,
}

const _: () = assert!(size_of::<EventCounts>() == 3 * 8);

impl EventCounts {
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            sent: self.sent.wrapping_add(other.sent),
            suppressed: self.suppressed.wrapping_add(other.suppressed),
            ring_full: self.ring_full.wrapping_add(other.ring_full),
        }
    }
}

impl EventMeter {
    /// Whether another event may be sent, and for how many it stands: for itself, and for those that could not be sent
    /// before it.
    #[inline(always)]
    pub fn admit(&mut self, params: &GcraParams, now: KtimeNs) -> Option<u64> {
        let step = gcra::check(self.tat, params, now.ticks(), 1);
        self.tat = step.tat;
        match step.outcome {
            Outcome::Conforming => Some(self.missed.wrapping_add(1)),
            Outcome::NonConforming { .. } | Outcome::NeverConforming => {
                self.missed = self.missed.wrapping_add(1);
                self.counts.suppressed = self.counts.suppressed.wrapping_add(1);
                None
            }
        }
    }

    /// What became of an event that was admitted.
    #[inline(always)]
    pub fn done(&mut self, was_sent: bool) {
        if was_sent {
            self.missed = 0;
            self.counts.sent = self.counts.sent.wrapping_add(1);
        } else {
            self.missed = self.missed.wrapping_add(1);
            self.counts.ring_full = self.counts.ring_full.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn news_are_told_once_and_again_after_they_were_quiet() {
        let at = |seconds: u64| KtimeNs::new(seconds * SECOND);
        let first = mark::renew(0, at(100)).unwrap();
        assert!(first.is_news);
        // What goes on is no news, however long it goes on, and seldom moves the mark.
        let (mut mark, mut moved) = (first.mark, 0);
        for second in 101..1000 {
            if let Some(renewal) = mark::renew(mark, at(second)) {
                assert!(!renewal.is_news, "{second}");
                (mark, moved) = (renewal.mark, moved + 1);
            }
        }
        assert!((25..=31).contains(&moved), "{moved}");
        assert!(!mark::renew(mark, at(1029)).is_some_and(|renewal| renewal.is_news));
        assert!(mark::renew(mark, at(1061)).is_some_and(|renewal| renewal.is_news));
    }

    type Nth = fn(u64) -> u64;

    #[test]
    fn samples_are_as_many_as_asked_for_and_have_no_rhythm() {
        for one_in in [2, 100, 128, 1024] {
            let below = sampled_below(one_in);
            let expected = 1_000_000 / one_in;
            let spread = 5 * expected.isqrt();
            let all: [(&str, Nth); 4] = [
                ("all", |count| count),
                ("every 128th", |count| count * 128),
                ("every 1000th", |count| count * 1000 + 7),
                ("late", |count| count + (1 << 40)),
            ];
            for (what, nth) in all {
                let sampled = (0..1_000_000).filter(|count| is_sampled(nth(*count), below)).count();
                let sampled = u32::try_from(sampled).unwrap();
                assert!(sampled.abs_diff(expected) <= spread, "one in {one_in}, {what}: {sampled}");
            }
        }
        assert!((0..1000).all(|count| !is_sampled(count, sampled_below(0))));
        assert!((0..1000).all(|count| is_sampled(count, sampled_below(1))));
    }

    #[test]
    fn a_meter_counts_what_it_holds_back_and_the_next_event_stands_for_it() {
        // One a second, two at once.
        let params = GcraParams::from_interval(SECOND << gcra::TICK_SHIFT, 2).unwrap();
        let mut meter = EventMeter::default();
        let at = |ms: u64| KtimeNs::new(1000 * SECOND + ms * 1_000_000);
        for (ms, expected) in [(0, Some(1)), (0, Some(1)), (1, None), (2, None), (1001, Some(3)), (1002, None)] {
            let admitted = meter.admit(&params, at(ms));
            assert_eq!(admitted, expected, "{ms} ms");
            if admitted.is_some() {
                meter.done(true);
            }
        }
        assert_eq!(meter.counts, EventCounts { sent: 3, suppressed: 3, ring_full: 0 });
        assert_eq!(meter.admit(&params, at(2003)), Some(2));
        meter.done(false);
        assert_eq!(meter.counts.ring_full, 1);
        assert_eq!(meter.admit(&params, at(3003)), Some(3));
    }

    #[test]
    fn an_event_keeps_what_it_was_made_of() {
        use crate::verdict::DropReason;
        let verdict = Verdict::Drop(DropReason::Blocked);
        let counter = stats::rule_index(7, verdict);
        let event = Event::new(KtimeNs::new(5), News::of(EventKind::BudgetHit), counter, 60);
        assert_eq!((event.source(), event.verdict(), event.slot()), (None, Some(verdict), Some(7)));
        for address in ["192.0.2.7", "2001:db8::7"] {
            let address: IpAddr = address.parse().unwrap();
            let from = match address {
                IpAddr::V4(v4) => event.from_v4(v4.octets()),
                IpAddr::V6(v6) => event.from_v6(v6.octets()),
            };
            assert_eq!(from.source(), Some(address));
        }
    }

    #[test]
    fn the_class_of_mixed_news_is_the_rarest() {
        for kind in EventKind::ALL {
            assert_eq!(News::of(*kind).class(), kind.class(), "{kind:?}");
            let with_sample = News::of(*kind).and(News::of(EventKind::Sample));
            assert_eq!(with_sample.class(), kind.class(), "{kind:?} and a sample");
        }
        let both = News::of(EventKind::SourceLimited).and(News::of(EventKind::NewSourcesOver));
        assert_eq!(both.class(), EventClass::Maps);
        assert_eq!(both.kinds().count(), 2);
    }
}

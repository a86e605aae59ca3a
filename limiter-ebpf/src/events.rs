//! What the program tells the agent: `limiter_common::event`. All of it hangs on the verdict, so that a packet that is
//! neither news nor a sample pays for two comparisons.

use aya_ebpf::{bindings::xdp_md, programs::XdpContext};
use limiter_common::{
    event::{self, Event, EventKind, News, mark},
    packet::{Source, source_of},
    time::KtimeNs,
};

use crate::{
    budget, clock, diagnosis, globals,
    maps::{self, BucketState, BudgetState, Tat},
    packet::{self, Frame},
    source::Family,
    stats::{self, Ruling},
};

/// What it means that a packet is over a limit: the first hit of a budget, or that its source begins to be limited.
///
/// The budget is looked up once more, so that nothing of it is carried through the buckets.
#[inline(always)]
pub(crate) fn of_limit<F: Family>(bucket: BucketState, key: &F::Key, by_budget: bool, now: KtimeNs) -> News {
    if by_budget {
        budget::of::<F>(key, now).map_or(News::NONE, |budget| of_budget(&budget, now))
    } else {
        once(bucket.reported, EventKind::SourceLimited, now)
    }
}

#[inline(always)]
pub(crate) fn of_budget(budget: &BudgetState, now: KtimeNs) -> News {
    once(budget.reported, EventKind::BudgetHit, now)
}

/// What it means that a source gets no bucket of its own.
#[inline(always)]
pub(crate) fn of_pressure(kind: EventKind, now: KtimeNs) -> News {
    maps::pressure_mark(kind).map_or(News::NONE, |reported| once(reported, kind, now))
}

/// Of several CPUs that see it at the same time, one tells.
#[expect(clippy::cast_possible_truncation, reason = "the number is the one that it was")]
#[inline(always)]
fn once(reported: Tat, kind: EventKind, now: KtimeNs) -> News {
    if !globals::is_on(&globals::HAS_EVENTS) {
        return News::NONE;
    }
    let seen = reported.load();
    let news = match mark::renew(seen, now) {
        Some(renewal) if reported.swap(seen, renewal.mark) == seen && renewal.is_news => News::of(kind),
        Some(_) | None => News::NONE,
    };
    News::from_bits(packet::forget(news.bits() as usize, seen) as u32)
}

/// Tells what a packet brought about, if anything. `count` is how many this CPU has counted as it.
#[inline(always)]
pub(crate) fn report(ctx: &XdpContext, ruling: Ruling, count: u64) {
    let below = globals::SAMPLED_BELOW.load();
    let mut news = ruling.news;
    if below != 0 && event::is_sampled(count, below) {
        news = news.and(News::of(EventKind::Sample));
    }
    // One question for both, which most packets answer with no.
    if !news.is_none() || diagnosis::is_on() {
        let index = stats::index(ruling);
        if !news.is_none() {
            tell(ctx.ctx, news.bits(), index);
        }
        diagnosis::log(ctx, ruling.news, index);
    }
}

/// A function of its own, which reads the packet once more: the path of all other packets keeps its registers.
///
/// Global, so that the verifier looks at it once, and not for every way that leads here.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn tell(ctx: *mut xdp_md, news: u32, index: u32) -> u32 {
    let news = News::from_bits(news);
    let now = clock::now();
    let class = news.class();
    let Some(stands_for) = maps::admit_event(class, now) else { return 0 };
    let frame = Frame::new(&XdpContext::new(ctx));
    let event = Event::new(now, news, index, frame.len());
    let event = if news.has(EventKind::Sample) {
        // A sample that is news as well is not among those that the meter of samples has counted.
        let samples = if matches!(class, event::EventClass::Samples) { stands_for } else { 1 };
        event.representing(samples.wrapping_mul(u64::from(globals::SAMPLE_ONE_IN.load())))
    } else {
        event
    };
    let event = match source_of(&frame) {
        Some(Source::V4(address)) => event.from_v4(address.octets()),
        Some(Source::V6(address)) => event.from_v6(address.octets()),
        None => event,
    };
    maps::send_event(class, event);
    0
}

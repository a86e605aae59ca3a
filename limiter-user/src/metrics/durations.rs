//! A histogram of durations that threads write to without waiting for each other.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::{MetricType, TypedMetric},
};

/// Parts that threads share out among themselves.
const PARTS: usize = 16;

/// `N` bounds, and what is above all of them.
#[derive(Clone)]
pub(super) struct Durations<const N: usize> {
    /// Upper bounds, in ascending order.
    bounds: [Duration; N],
    parts: Arc<[Part<N>; PARTS]>,
}

/// Apart from its neighbours: no two threads write to one cache line.
#[repr(align(128))]
struct Part<const N: usize> {
    /// By bound.
    counts: [AtomicU64; N],
    above: AtomicU64,
    sum_ns: AtomicU64,
}

impl<const N: usize> fmt::Debug for Durations<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Durations").field("bounds", &self.bounds).finish_non_exhaustive()
    }
}

impl<const N: usize> Durations<N> {
    pub(super) fn new(bounds: [Duration; N]) -> Self {
        let zeros = || std::array::from_fn(|_| AtomicU64::new(0));
        let part = |_| Part { counts: zeros(), above: AtomicU64::new(0), sum_ns: AtomicU64::new(0) };
        Self { bounds, parts: Arc::new(std::array::from_fn(part)) }
    }

    pub(super) fn observe(&self, duration: Duration) {
        let part = &self.parts[part_of_thread()];
        let bound = self.bounds.iter().position(|bound| duration <= *bound);
        bound.map_or(&part.above, |bound| &part.counts[bound]).fetch_add(1, Ordering::Relaxed);
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        part.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    fn sum(&self, pick: impl Fn(&Part<N>) -> &AtomicU64) -> u64 {
        self.parts.iter().fold(0, |sum, part| sum.wrapping_add(pick(part).load(Ordering::Relaxed)))
    }
}

fn part_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static PART: usize = NEXT.fetch_add(1, Ordering::Relaxed) % PARTS;
    }
    PART.with(|part| *part)
}

impl<const N: usize> EncodeMetric for Durations<N> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let counts = (0..N).map(|bound| (self.bounds[bound].as_secs_f64(), self.sum(|part| &part.counts[bound])));
        let mut buckets: Vec<(f64, u64)> = counts.collect();
        buckets.push((f64::INFINITY, self.sum(|part| &part.above)));
        let count = buckets.iter().map(|(_, count)| count).sum();
        let sum = Duration::from_nanos(self.sum(|part| &part.sum_ns)).as_secs_f64();
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

/// A histogram that somebody else has counted.
pub(super) struct ConstDurations<'a> {
    pub(super) bounds_us: &'a [u64],
    /// By bound, not cumulated, and what is above all of them.
    pub(super) counts: &'a [u64],
    pub(super) sum_us: u64,
}

impl EncodeMetric for ConstDurations<'_> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let bounds = self.bounds_us.iter().map(|&us| Duration::from_micros(us).as_secs_f64()).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(self.counts.iter().copied()).collect();
        let sum = Duration::from_micros(self.sum_us).as_secs_f64();
        encoder.encode_histogram::<NoLabelSet>(sum, self.counts.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

impl<const N: usize> TypedMetric for Durations<N> {
    const TYPE: MetricType = MetricType::Histogram;
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text::encode, registry::Registry};

    use super::*;

    #[test]
    fn counts_what_several_threads_observe() {
        let durations = Durations::new([1, 10].map(Duration::from_millis));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| [1, 2, 10, 11].map(|ms| durations.observe(Duration::from_millis(ms))));
            }
        });
        let mut registry = Registry::default();
        registry.register("took", "Time", durations);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let expected = "# HELP took Time.\n# TYPE took histogram\ntook_sum 0.096\ntook_count 16\n\
                        took_bucket{le=\"0.001\"} 4\ntook_bucket{le=\"0.01\"} 12\ntook_bucket{le=\"+Inf\"} 16\n# EOF\n";
        assert_eq!(text, expected);
    }
}

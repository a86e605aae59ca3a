//! The state of token and leaky buckets: one instant, and how much of what it lacks this node has told the others.

use limiter_common::bucket::Bucket;

use super::{OwnState, in_ns, units};

#[derive(Clone, Copy, Debug)]
pub(super) struct BucketState {
    interval_ns: u64,
    fill_ns: u64,
    /// When the bucket is full again, as far as this node knows.
    tat_ns: u64,
    /// Units that this node has taken, less those that it gave back.
    total: u64,
    acknowledged: u64,
}

impl BucketState {
    pub(super) const fn new(bucket: &Bucket, tat_ns: u64) -> Self {
        Self { interval_ns: bucket.interval_ns(), fill_ns: bucket.fill_ns(), tat_ns, total: 0, acknowledged: 0 }
    }

    #[inline]
    pub(super) const fn tat_ns(&self) -> u64 {
        self.tat_ns
    }

    /// A bucket that lacks more than it can hold (its limit was lowered, or the clock stepped back) is cut to an exhausted
    /// one, so that nobody waits out an old limit's debt.
    #[inline]
    pub(super) fn move_to(&mut self, bucket: &Bucket, from_us: u64, window_us: u64, now_us: u64) {
        let now_ns = in_ns(now_us);
        if window_us != from_us {
            let ahead = u128::from(self.tat_ns.saturating_sub(now_ns));
            let scaled = (ahead * u128::from(window_us)).div_ceil(u128::from(from_us));
            self.tat_ns = now_ns.saturating_add(u64::try_from(scaled).unwrap_or(u64::MAX));
        }
        (self.interval_ns, self.fill_ns) = (bucket.interval_ns(), bucket.fill_ns());
        self.tat_ns = self.tat_ns.min(now_ns.saturating_add(self.fill_ns));
    }

    #[inline]
    pub(super) fn charge(&mut self, bucket: &Bucket, now_us: u64, cost: u64) {
        self.tat_ns = bucket.taken(self.tat_ns, in_ns(now_us), cost);
        self.total = self.total.saturating_add(cost);
    }

    pub(super) fn give_back(&mut self, bucket: &Bucket, now_us: u64, cost: u64) {
        // What came back by itself meanwhile cannot be given back as well.
        let cost = cost.min(self.total).min(self.taken_units(now_us));
        self.tat_ns = bucket.given_back(self.tat_ns, in_ns(now_us), cost);
        self.total -= cost;
    }

    /// Units that are missing at `now_us`, begun ones counted whole.
    pub(super) fn taken_units(&self, now_us: u64) -> u64 {
        units(self.tat_ns.saturating_sub(in_ns(now_us)).min(self.fill_ns), self.interval_ns)
    }

    pub(super) const fn unconfirmed(&self) -> u64 {
        self.total.saturating_sub(self.acknowledged)
    }

    pub(super) const fn differs(&self) -> bool {
        self.total != self.acknowledged
    }

    pub(super) const fn has_own_counts(&self) -> bool {
        self.total != 0 || self.differs()
    }

    pub(super) const fn own_state(&self) -> OwnState {
        let Self { interval_ns, fill_ns, tat_ns, total, acknowledged } = *self;
        OwnState::Bucket { interval_ns, fill_ns, total, acknowledged, tat_ns }
    }

    /// The shared bucket, and on top of it what this node took or gave back since it sent its total.
    pub(super) fn learn(&mut self, shared_tat_ns: u64, own_total: u64, now_us: u64, adopts: bool) {
        self.acknowledged = own_total;
        if !adopts {
            return;
        }
        self.tat_ns = if self.total == own_total {
            shared_tat_ns
        } else {
            let more = self.interval_ns.saturating_mul(self.total.saturating_sub(own_total));
            let less = self.interval_ns.saturating_mul(own_total.saturating_sub(self.total));
            shared_tat_ns.max(in_ns(now_us)).saturating_add(more).saturating_sub(less)
        };
    }

    /// Takes the bucket that a decision of the shared store left.
    pub(super) fn inform(&mut self, shared_tat_ns: u64, now_us: u64) {
        self.learn(shared_tat_ns, self.acknowledged, now_us, true);
    }
}

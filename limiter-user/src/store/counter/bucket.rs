//! The state of token and leaky buckets: one instant, and how much of what it lacks this node has told the others.
//!
//! Nodes that take from a bucket before they hear of each other may take more than it holds. That is owed: the instant lies
//! further ahead than the exhausted bucket takes to fill, and time makes up for it before anything is allowed.

use limiter_common::bucket::Bucket;

use super::{OwnState, Print, in_ns, units};

/// Of a debt, a millisecond.
const GRAIN_NS_LOG2: u32 = 20;

#[derive(Clone, Copy, Debug)]
pub(super) struct BucketState {
    interval_ns: u64,
    fill_ns: u64,
    /// When the bucket is full again, as far as this node knows.
    tat_ns: u64,
    /// Units that this node has taken, less those that it gave back.
    total: u64,
    acknowledged: u64,
    /// How much more than the whole bucket was lacking when this was last heard, in grains, rounded up. An instant further
    /// ahead is no debt: a clock stepped back, or the limit was lowered.
    owed: u32,
    /// Whether the shared store may not have heard yet of something that was given back.
    gave_back: bool,
}

impl BucketState {
    pub(super) const fn new(bucket: &Bucket, tat_ns: u64) -> Self {
        let (interval_ns, fill_ns) = (bucket.interval_ns(), bucket.fill_ns());
        Self { interval_ns, fill_ns, tat_ns, total: 0, acknowledged: 0, owed: 0, gave_back: false }
    }

    #[inline]
    pub(super) const fn tat_ns(&self) -> u64 {
        self.tat_ns
    }

    /// The time in which a unit comes back, and that the exhausted bucket takes to fill.
    pub(super) const fn pace(&self) -> (u64, u64) {
        (self.interval_ns, self.fill_ns)
    }

    #[inline]
    fn owed_ns(&self) -> u64 {
        u64::from(self.owed) << GRAIN_NS_LOG2
    }

    #[inline]
    fn set_owed(&mut self, owed_ns: u64) {
        self.owed = u32::try_from(owed_ns.div_ceil(1 << GRAIN_NS_LOG2)).unwrap_or(u32::MAX);
    }

    /// A bucket that lacks more than it can hold, and not because so much was taken (its limit was lowered, or the clock
    /// stepped back), is cut, so that nobody waits for what was never owed.
    #[inline]
    pub(super) fn move_to(&mut self, bucket: &Bucket, from_us: u64, window_us: u64, now_us: u64) {
        let now_ns = in_ns(now_us);
        if (self.interval_ns, self.fill_ns) != (bucket.interval_ns(), bucket.fill_ns()) || window_us != from_us {
            self.be_of(bucket, from_us, window_us, now_ns);
        }
        self.tat_ns = self.tat_ns.min(now_ns.saturating_add(self.fill_ns).saturating_add(self.owed_ns()));
    }

    #[cold]
    fn be_of(&mut self, bucket: &Bucket, from_us: u64, window_us: u64, now_ns: u64) {
        let mut lacks = self.tat_ns.saturating_sub(now_ns);
        // Time that went by has paid, by the old limit. Else it does not matter, nor how often somebody has looked.
        let mut owed_ns = self.owed_ns().min(lacks.saturating_sub(self.fill_ns));
        if window_us != from_us {
            let scaled = |ns: u64| (u128::from(ns) * u128::from(window_us)).div_ceil(u128::from(from_us));
            let scaled = |ns: u64| u64::try_from(scaled(ns)).unwrap_or(u64::MAX);
            (lacks, owed_ns) = (scaled(lacks), scaled(owed_ns));
            self.tat_ns = now_ns.saturating_add(lacks);
        }
        (self.interval_ns, self.fill_ns) = (bucket.interval_ns(), bucket.fill_ns());
        self.set_owed(owed_ns);
    }

    pub(super) fn print(&self) -> Print {
        Print::of_bucket(self.tat_ns, self.interval_ns, self.fill_ns, self.owed_ns())
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
        self.gave_back |= cost > 0;
    }

    /// Units that are missing at `now_us`, begun ones counted whole.
    pub(super) fn taken_units(&self, now_us: u64) -> u64 {
        units(self.tat_ns.saturating_sub(in_ns(now_us)), self.interval_ns)
    }

    /// A full bucket says nothing, but that something was given back which the shared store still counts, or will when what
    /// is under way arrives: at the longest for as long as it has not come back by itself.
    pub(super) fn expires_us(&self) -> u64 {
        let told_ns = if self.gave_back { self.fill_ns.saturating_add(self.owed_ns()) } else { 0 };
        self.tat_ns.saturating_add(told_ns).div_ceil(1000)
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
        let Self { interval_ns, fill_ns, tat_ns, total, acknowledged, .. } = *self;
        OwnState::Bucket { interval_ns, fill_ns, total, acknowledged, tat_ns }
    }

    /// The shared bucket, and on top of it what this node took or gave back since it sent its total.
    pub(super) fn learn(&mut self, shared_tat_ns: u64, own_total: u64, now_us: u64, adopts: bool) {
        self.acknowledged = own_total;
        self.gave_back &= self.differs();
        if adopts {
            self.take(shared_tat_ns, now_us);
        }
    }

    /// Takes the bucket that a decision of the shared store left.
    pub(super) fn inform(&mut self, shared_tat_ns: u64, now_us: u64) {
        self.take(shared_tat_ns, now_us);
    }

    fn take(&mut self, shared_tat_ns: u64, now_us: u64) {
        let now_ns = in_ns(now_us);
        let more = self.interval_ns.saturating_mul(self.total.saturating_sub(self.acknowledged));
        let less = self.interval_ns.saturating_mul(self.acknowledged.saturating_sub(self.total));
        self.tat_ns = if more > 0 {
            // Of what was taken meanwhile, a part may have come back: no more than this node sees is missing, of a full bucket.
            let seen = more.min(self.tat_ns.saturating_sub(now_ns));
            shared_tat_ns.saturating_add(more).max(now_ns.saturating_add(seen))
        } else {
            shared_tat_ns.saturating_sub(less)
        };
        self.set_owed(self.tat_ns.saturating_sub(now_ns).saturating_sub(self.fill_ns));
    }

    pub(super) fn forget_debt(&mut self, now_us: u64) {
        self.tat_ns = self.tat_ns.min(in_ns(now_us).saturating_add(self.fill_ns));
        self.owed = 0;
    }
}

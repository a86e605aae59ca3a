//! One counter as this node knows it: what it admitted itself, what the others are known to have admitted, and how
//! much of its own the shared store has confirmed. Pure: `lua/sync.lua` is the other half of the exchange.

use std::{num::NonZeroU8, sync::Arc};

use limiter_common::{
    sliding_log,
    sliding_window::{Counts, Window},
};

use self::{bucket::BucketState, log::LogState, watch::Watch, windows::WindowState};
pub(super) use self::{room::LogRoom, watch::Print};
use super::{
    CounterKey,
    algorithm::{Algorithm, Kind, View, in_ns},
};

mod bucket;
mod log;
mod room;
mod watch;
mod windows;

/// What one node has admitted on one counter: totals, not differences. Sending them twice changes nothing, and whatever a
/// lost message said, the next one says again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnTotals {
    pub key: CounterKey,
    /// Names this node's part of the counter. Drawn anew for each counter that this node creates: one that was given up
    /// and comes back starts at 0 beside what it had admitted before.
    pub tag: u32,
    pub window_us: u64,
    pub state: OwnState,
}

/// One admission of a log, named by the node's tag and a number of its own: told twice, it is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedAdmission {
    pub tag: u32,
    pub number: u32,
    pub at_us: u64,
    /// Less what was given back of it.
    pub cost: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnState {
    Windows {
        /// `current` is of the window `index`, `previous` of the one before.
        counts: Counts,
        /// What the shared store had confirmed of `counts.current` before.
        acknowledged_current: u64,
    },
    Bucket {
        interval_ns: u64,
        /// Time that the exhausted bucket takes to fill.
        fill_ns: u64,
        /// Units taken since this node knows the counter, less those given back.
        total: u64,
        /// What the shared store had confirmed of `total` before.
        acknowledged: u64,
        /// The bucket as this node sees it: what it took itself cannot be more than what that lacks.
        tat_ns: u64,
    },
    /// The admissions that the shared store does not have as they are.
    Log { admissions: Vec<LoggedAdmission> },
}

/// What the shared store knows of a counter after it has taken this node's totals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SharedCounts {
    Windows {
        /// Sums over all nodes.
        counts: Counts,
        /// This node's part of them.
        own_previous: u64,
        own_current: u64,
    },
    Bucket {
        /// Of all nodes together.
        tat_ns: u64,
        /// This node's total in it.
        own_total: u64,
    },
    /// All admissions that count, this node's as well.
    Log { admissions: Vec<LoggedAdmission> },
}

/// What the shared store said last of a counter, in the window that it said it of, without what this node has admitted by
/// itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    pub key: CounterKey,
    pub window_us: u64,
    /// Of buckets: the time in which a unit comes back, and that the exhausted bucket takes to fill.
    pub interval_ns: u64,
    pub fill_ns: u64,
    pub view: View,
}

/// Whose counts a node adds to its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adopts {
    /// What the others have, whenever it is told.
    Always,
    /// What the others had when this node took the counter over: with the first answer, and never after it.
    Once,
}

/// What was said between this node and the shared store about a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Talk {
    None,
    /// Something was told, and nothing was ever answered.
    Told,
    /// The last message was answered.
    Answered,
    /// Something was told after an answer.
    ToldMore,
}

impl Talk {
    /// Whether the shared store has ever answered.
    const fn has_answer(self) -> bool {
        matches!(self, Self::Answered | Self::ToldMore)
    }

    /// Whether the last message has no answer: it may still arrive, whatever became of the counter since.
    const fn is_open(self) -> bool {
        matches!(self, Self::Told | Self::ToldMore)
    }

    const fn told(self) -> Self {
        if self.has_answer() { Self::ToldMore } else { Self::Told }
    }
}

/// The small numbers beside the state fill what would be padding: a counter is as small as its large ones.
#[derive(Clone, Debug)]
enum State {
    Windows { tag: u32, charges: u8, watch: Watch, talk: Talk, counts: WindowState },
    Bucket { tag: u32, charges: u8, watch: Watch, talk: Talk, bucket: BucketState },
    Log { tag: u32, charges: u8, watch: Watch, talk: Talk, log: Box<LogState> },
}

#[derive(Clone, Debug)]
pub(super) struct Counter {
    window_us: u64,
    state: State,
}

const _: () = assert!(size_of::<Counter>() == 8 + 8 + 7 * 8);

impl Counter {
    pub(super) fn new(algorithm: &Algorithm, now_us: u64, tag: u32) -> Self {
        let state = match algorithm.kind() {
            Kind::Windows => {
                let counts = WindowState::new(now_us / algorithm.window_us());
                State::Windows { tag, charges: 0, watch: Watch::NOBODY, talk: Talk::None, counts }
            }
            Kind::Bucket(bucket) => State::Bucket {
                tag,
                charges: 0,
                watch: Watch::NOBODY,
                talk: Talk::None,
                bucket: BucketState::new(bucket, 0),
            },
            Kind::Log(_) => State::Log { tag, charges: 0, watch: Watch::NOBODY, talk: Talk::None, log: Box::default() },
        };
        Self { window_us: algorithm.window_us(), state }
    }

    /// Takes what it needs of the room for logs, if it is one.
    pub(super) fn be_in(&mut self, room: &Arc<LogRoom>) {
        if let State::Log { log, .. } = &mut self.state {
            log.be_in(room);
        }
    }

    /// How much of that it takes.
    pub(super) fn log_room(&self) -> usize {
        match &self.state {
            State::Log { log, .. } => log.room(),
            State::Windows { .. } | State::Bucket { .. } => 0,
        }
    }

    /// What the counter stands for: everybody's counts. `need` is what has to fit, for the wait if it does not. The counter
    /// must have been moved to the request.
    #[inline]
    pub(super) fn view(&self, algorithm: &Algorithm, now_us: u64, need: u64) -> View {
        match &self.state {
            State::Windows { counts, .. } => View::Windows(counts.counts()),
            State::Bucket { bucket, .. } => View::Bucket { tat_ns: bucket.tat_ns() },
            State::Log { log, .. } => Self::view_of_log(log, algorithm, now_us, need),
        }
    }

    fn view_of_log(log: &LogState, algorithm: &Algorithm, now_us: u64, need: u64) -> View {
        let Kind::Log(window) = algorithm.kind() else { return algorithm.unused(now_us) };
        let used = log.used(window, now_us);
        View::Log {
            used,
            wait_us: sliding_log::wait_us(window, used, log.admissions(), now_us, need),
            reset_us: log.expires_us(window.window_us).max(now_us),
        }
    }

    /// The same as moving it and looking at it, without a change.
    pub(super) fn peek(&self, algorithm: &Algorithm, now_us: u64, need: u64) -> View {
        match (&self.state, algorithm.kind()) {
            (State::Log { log, .. }, Kind::Log(_)) => Self::view_of_log(log, algorithm, now_us, need),
            (State::Windows { .. } | State::Bucket { .. } | State::Log { .. }, _) => {
                let mut counter = self.clone();
                counter.move_to(algorithm, now_us);
                counter.view(algorithm, now_us, need)
            }
        }
    }

    /// The same, of this node's own admissions alone, which may be `most`. `None` where they are not known apart.
    pub(super) fn peek_own(&self, algorithm: &Algorithm, now_us: u64, need: u64, most: u64) -> Option<View> {
        match (&self.state, algorithm.kind()) {
            (State::Windows { .. }, Kind::Windows) => {
                let mut counter = self.clone();
                counter.move_to(algorithm, now_us);
                let State::Windows { counts, .. } = counter.state else { return None };
                Some(View::Windows(counts.own_counts()))
            }
            (State::Log { tag, log, .. }, Kind::Log(window)) => {
                let window = Window { ceiling: most, ..*window };
                let own = || log.admissions_of(*tag);
                let used = sliding_log::used(&window, own(), now_us);
                let wait_us = sliding_log::wait_us(&window, used, own(), now_us, need);
                Some(View::Log { used, wait_us, reset_us: log.expires_us(window.window_us).max(now_us) })
            }
            (State::Windows { .. } | State::Bucket { .. } | State::Log { .. }, _) => None,
        }
    }

    /// What the shared store said last, in the window that it said it of, without what this node has admitted by itself. `None`
    /// where that is not known apart, or of another algorithm.
    pub(super) fn heard(&self, algorithm: &Algorithm, now_us: u64) -> Option<View> {
        match (&self.state, algorithm.kind()) {
            (State::Windows { counts, .. }, Kind::Windows) if self.window_us == algorithm.window_us() => {
                Some(View::Windows(counts.counts_of_others()))
            }
            (State::Bucket { bucket, .. }, Kind::Bucket(_)) if !bucket.has_own_counts() => {
                Some(View::Bucket { tat_ns: bucket.tat_ns() })
            }
            (State::Log { tag, log, .. }, Kind::Log(_)) if !log.has_own(*tag) => {
                Some(Self::view_of_log(log, algorithm, now_us, 0))
            }
            (State::Windows { .. } | State::Bucket { .. } | State::Log { .. }, _) => None,
        }
    }

    /// The same, by the parameters that the counter has. `None` also where it is nothing.
    pub(super) fn heard_last(&self, key: &CounterKey, now_us: u64) -> Option<Heard> {
        let window_us = self.window_us;
        let (view, interval_ns, fill_ns) = match &self.state {
            State::Windows { counts, .. } => (View::Windows(counts.counts_of_others()), 0, 0),
            State::Bucket { bucket, .. } if !bucket.has_own_counts() => {
                let (interval_ns, fill_ns) = bucket.pace();
                (View::Bucket { tat_ns: bucket.tat_ns() }, interval_ns, fill_ns)
            }
            State::Log { tag, log, .. } if !log.has_own(*tag) => {
                let used = log.used(&Window { window_us, ceiling: 0 }, now_us);
                (View::Log { used, wait_us: 0, reset_us: log.expires_us(window_us) }, 0, 0)
            }
            State::Bucket { .. } | State::Log { .. } => return None,
        };
        let is_nothing = match view {
            View::Windows(counts) => counts.previous == 0 && counts.current == 0,
            View::Bucket { tat_ns } => tat_ns <= in_ns(now_us),
            View::Log { used, .. } => used == 0,
        };
        (!is_nothing).then(|| Heard { key: key.clone(), window_us, interval_ns, fill_ns, view })
    }

    /// Moves the counter to `now_us`, and to the algorithm and window that its rule has by now. Returns how much of this
    /// node's own counts was never confirmed and weighs nothing any more, but somebody may want to know.
    ///
    /// A policy may give its rule another window or algorithm. Nobody gets a fresh window by that, nor is locked out for
    /// what was allowed before:
    /// - counts of a window stay, in proportion when it became shorter;
    /// - a bucket keeps the share of it that is taken;
    /// - between windows, a bucket and a log, as many units stay taken as were.
    #[inline]
    pub(super) fn move_to(&mut self, algorithm: &Algorithm, now_us: u64) -> u64 {
        let window_us = algorithm.window_us();
        match (&mut self.state, algorithm.kind()) {
            (State::Windows { counts, .. }, Kind::Windows) => {
                let late = counts.move_to(self.window_us, window_us, now_us);
                self.window_us = window_us;
                late
            }
            (State::Bucket { bucket: state, .. }, Kind::Bucket(bucket)) => {
                state.move_to(bucket, self.window_us, window_us, now_us);
                self.window_us = window_us;
                0
            }
            (State::Log { log, .. }, Kind::Log(window)) => {
                self.window_us = window_us;
                log.move_to(window, now_us)
            }
            (State::Windows { .. } | State::Bucket { .. } | State::Log { .. }, _) => self.convert(algorithm, now_us),
        }
    }

    /// Other nodes and the shared store do the same with what they know, so what is carried over is nobody's own.
    #[cold]
    fn convert(&mut self, algorithm: &Algorithm, now_us: u64) -> u64 {
        let late = self.unconfirmed();
        let window_us = algorithm.window_us();
        let old = Window { window_us: self.window_us, ceiling: 0 };
        let (tag, charges, watch, talk, taken) = match &mut self.state {
            State::Windows { tag, charges, watch, talk, counts } => {
                counts.move_to(self.window_us, self.window_us, now_us);
                (*tag, *charges, *watch, *talk, old.estimate(&counts.counts(), now_us))
            }
            State::Bucket { tag, charges, watch, talk, bucket } => {
                (*tag, *charges, *watch, *talk, bucket.taken_units(now_us))
            }
            State::Log { tag, charges, watch, talk, log } => (*tag, *charges, *watch, *talk, log.used(&old, now_us)),
        };
        let tag = next_tag(tag);
        self.state = match algorithm.kind() {
            Kind::Windows => {
                State::Windows { tag, charges, watch, talk, counts: WindowState::of_others(now_us / window_us, taken) }
            }
            Kind::Bucket(bucket) => {
                let tat_ns = bucket.taken(0, in_ns(now_us), taken.min(bucket.burst()));
                State::Bucket { tag, charges, watch, talk, bucket: BucketState::new(bucket, tat_ns) }
            }
            Kind::Log(_) => State::Log { tag, charges, watch, talk, log: Box::new(LogState::of_others(now_us, taken)) },
        };
        self.window_us = window_us;
        late
    }

    /// The counter must have been moved to the request.
    #[inline]
    pub(super) fn charge(&mut self, algorithm: &Algorithm, now_us: u64, cost: u64) {
        let (State::Windows { charges, .. } | State::Bucket { charges, .. } | State::Log { charges, .. }) =
            &mut self.state;
        *charges = charges.saturating_add(1);
        match (&mut self.state, algorithm.bucket()) {
            (State::Windows { counts, .. }, _) => counts.charge(cost),
            (State::Bucket { bucket: state, .. }, Some(bucket)) => state.charge(bucket, now_us, cost),
            (State::Log { tag, log, .. }, _) => log.charge(*tag, now_us, cost),
            (State::Bucket { .. }, None) => {}
        }
    }

    /// Gives back what this node itself has taken, at most. The counter must have been moved to the request.
    pub(super) fn give_back(&mut self, algorithm: &Algorithm, now_us: u64, cost: u64) {
        match (&mut self.state, algorithm.bucket()) {
            (State::Windows { counts, .. }, _) => counts.give_back(cost),
            (State::Bucket { bucket: state, .. }, Some(bucket)) => state.give_back(bucket, now_us, cost),
            (State::Log { tag, log, .. }, _) => log.give_back(*tag, cost),
            (State::Bucket { .. }, None) => {}
        }
    }

    #[inline]
    const fn watch_mut(&mut self) -> &mut Watch {
        let (State::Windows { watch, .. } | State::Bucket { watch, .. } | State::Log { watch, .. }) = &mut self.state;
        watch
    }

    /// Whether somebody drew a conclusion from what the counter says.
    #[inline]
    pub(super) const fn is_watched(&self) -> bool {
        let (State::Windows { watch, .. } | State::Bucket { watch, .. } | State::Log { watch, .. }) = &self.state;
        watch.is_kept()
    }

    /// Somebody draws a conclusion from what the counter says to a request: that it has `room` beside what that needs, or
    /// that it denies, which every change may end. See [`Algorithm::room`].
    pub(super) fn watch(&mut self, room: Option<u64>) {
        let is_bucket = matches!(self.state, State::Bucket { .. });
        self.watch_mut().keep(room, is_bucket);
    }

    /// Nobody watches any more.
    pub(super) const fn forget_watch(&mut self) {
        *self.watch_mut() = Watch::NOBODY;
    }

    /// Takes the cost of a charge from what watchers leave open. Returns whether that is too much for one of them.
    #[inline]
    pub(super) fn outgrows_watch(&mut self, algorithm: &Algorithm, cost: u64) -> bool {
        let cost = match algorithm.bucket() {
            Some(bucket) => bucket.increment_ns(cost),
            None => cost,
        };
        let is_bucket = matches!(self.state, State::Bucket { .. });
        !self.watch_mut().take(cost, is_bucket)
    }

    /// What differs when anything has happened to the counter but that time went by.
    pub(super) fn print(&self) -> Print {
        match &self.state {
            State::Windows { counts, .. } => Print::of_counts(&counts.counts(), self.window_us),
            State::Bucket { bucket, .. } => bucket.print(),
            State::Log { log, .. } => Print::of_log(log.lasting()),
        }
    }

    /// When time alone makes something else of the counter: at the end of its window, or when an admission leaves the log.
    /// 0 where it always does.
    pub(super) fn changes_us(&self, now_us: u64) -> u64 {
        match &self.state {
            State::Windows { counts, .. } => counts.ends_us(self.window_us),
            State::Bucket { .. } => u64::MAX,
            State::Log { log, .. } => log.first_leaves_us(self.window_us, now_us),
        }
    }

    /// The instant from which the counter says nothing that an absent one does not say.
    pub(super) fn expires_us(&self) -> u64 {
        match &self.state {
            State::Windows { counts, .. } => counts.expires_us(self.window_us),
            State::Bucket { bucket, .. } => bucket.expires_us(),
            State::Log { log, .. } => log.expires_us(self.window_us),
        }
    }

    pub(super) fn is_expired(&self, now_us: u64) -> bool {
        self.expires_us() <= now_us
    }

    /// How often it was charged, up to 255: what is given up for want of room is what was asked for least.
    pub(super) fn charges(&self) -> NonZeroU8 {
        let (State::Windows { charges, .. } | State::Bucket { charges, .. } | State::Log { charges, .. }) = &self.state;
        NonZeroU8::new(*charges).unwrap_or(NonZeroU8::MIN)
    }

    /// Own units that the shared store has not confirmed.
    pub(super) fn unconfirmed(&self) -> u64 {
        match &self.state {
            State::Windows { counts, .. } => counts.unconfirmed(),
            State::Bucket { bucket, .. } => bucket.unconfirmed(),
            State::Log { log, .. } => log.unconfirmed(),
        }
    }

    /// Whether the shared store knows something else of this node than this node does.
    fn differs(&self) -> bool {
        match &self.state {
            State::Windows { counts, .. } => counts.differs(),
            State::Bucket { bucket, .. } => bucket.differs(),
            State::Log { log, .. } => log.differs(),
        }
    }

    /// Whether there is anything to tell the shared store.
    pub(super) fn has_own_counts(&self) -> bool {
        match &self.state {
            State::Windows { counts, .. } => counts.has_own_counts(),
            State::Bucket { bucket, .. } => bucket.has_own_counts(),
            State::Log { tag, log, .. } => log.has_own(*tag),
        }
    }

    /// Moves on to `now_us` with the parameters that it has. Returns the same as [`Self::move_to`].
    pub(super) fn advance_to(&mut self, now_us: u64) -> u64 {
        match &mut self.state {
            State::Windows { counts, .. } => counts.move_to(self.window_us, self.window_us, now_us),
            State::Bucket { .. } => 0,
            State::Log { log, .. } => log.move_to(&Window { window_us: self.window_us, ceiling: 0 }, now_us),
        }
    }

    const fn talk_mut(&mut self) -> &mut Talk {
        let (State::Windows { talk, .. } | State::Bucket { talk, .. } | State::Log { talk, .. }) = &mut self.state;
        talk
    }

    /// What the shared store is to be told, if anything: also that there is nothing any more, where a message that has no
    /// answer may still arrive and say otherwise. An answer to it has to come through [`Self::learn`].
    pub(super) fn tell(&mut self, key: &CounterKey) -> Option<OwnTotals> {
        if !self.has_own_counts() && !self.talk_mut().is_open() {
            return None;
        }
        let talk = self.talk_mut();
        *talk = talk.told();
        Some(self.own_totals(key.clone()))
    }

    pub(super) fn own_totals(&self, key: CounterKey) -> OwnTotals {
        let (tag, state) = match &self.state {
            State::Windows { tag, counts, .. } => (*tag, counts.own_state()),
            State::Bucket { tag, bucket, .. } => (*tag, bucket.own_state()),
            State::Log { tag, log, .. } => (*tag, OwnState::Log { admissions: log.untold() }),
        };
        OwnTotals { key, tag, window_us: self.window_us, state }
    }

    /// Takes what the shared store said about `sent`, by the shared store's clock. Returns unconfirmed counts of windows
    /// that are over, as `move_to` does, and whether there is more to send. What was said about a counter that has another
    /// window, algorithm or tag by now is no news of this one.
    pub(super) fn learn(
        &mut self,
        sent: &OwnTotals,
        shared: &SharedCounts,
        now_us: u64,
        adopts: Adopts,
    ) -> (u64, bool) {
        if self.window_us != sent.window_us {
            return (0, false);
        }
        let adopts = adopts == Adopts::Always || !self.talk_mut().has_answer();
        let late = match (&mut self.state, shared) {
            (
                State::Windows { tag, counts, .. },
                &SharedCounts::Windows { counts: sums, own_previous, own_current },
            ) if *tag == sent.tag => counts.learn(sums, own_previous, own_current, adopts),
            (State::Bucket { tag, bucket, .. }, &SharedCounts::Bucket { tat_ns, own_total }) if *tag == sent.tag => {
                bucket.learn(tat_ns, own_total, now_us, adopts);
                0
            }
            (State::Log { tag, log, .. }, SharedCounts::Log { admissions }) if *tag == sent.tag => {
                log.learn(admissions, *tag, adopts);
                0
            }
            (State::Windows { .. } | State::Bucket { .. } | State::Log { .. }, _) => return (0, false),
        };
        *self.talk_mut() = Talk::Answered;
        (late, self.differs())
    }

    /// Forgets what a bucket owes. Whoever looks at a value before the shared store has weighed it cannot tell a debt from an
    /// instant that a clock left which was ahead.
    pub(super) fn forget_debt(&mut self, now_us: u64) {
        if let State::Bucket { bucket, .. } = &mut self.state {
            bucket.forget_debt(now_us);
        }
    }

    /// Takes what the shared store holds after a decision of its own, which nobody's part says. The counter must have been
    /// moved to it. Returns the same as [`Self::move_to`].
    ///
    /// What this node has admitted without the shared store, and not told it yet, comes on top.
    pub(super) fn inform(&mut self, view: View, now_us: u64) -> u64 {
        match (&mut self.state, view) {
            (State::Windows { counts, .. }, View::Windows(sums)) => counts.inform(sums),
            (State::Bucket { bucket, .. }, View::Bucket { tat_ns }) => {
                bucket.inform(tat_ns, now_us);
                0
            }
            (State::Log { tag, log, .. }, View::Log { used, reset_us, .. }) => {
                log.inform(*tag, used, reset_us.saturating_sub(self.window_us));
                0
            }
            (State::Windows { .. } | State::Bucket { .. } | State::Log { .. }, _) => 0,
        }
    }
}

/// Another one, as good as random.
const fn next_tag(tag: u32) -> u32 {
    tag.wrapping_mul(0x9e37_79b1).wrapping_add(0x7f4a_7c15)
}

/// Units of `interval_ns` that `ns` stand for, rounded up.
const fn units(ns: u64, interval_ns: u64) -> u64 {
    ns.div_ceil(interval_ns)
}

#[cfg(test)]
mod tests {
    use limiter_common::{bucket::Bucket, sliding_window::Outcome};

    use super::*;

    fn window(window_us: u64) -> Algorithm {
        Algorithm::sliding_window(window_us, 100)
    }

    fn counter(now_us: u64, current: u64) -> Counter {
        let mut counter = Counter::new(&window(1000), now_us, 7);
        counter.charge(&window(1000), now_us, current);
        counter
    }

    #[test]
    fn an_answer_about_another_tag_is_no_answer() {
        let key = CounterKey { identity: crate::store::Identity::Global, rule: "r".into() };
        let mut counter = counter(1500, 5);
        let sent = counter.tell(&key).expect("five units");
        let log = Algorithm::SlidingLog(Window { window_us: 1000, ceiling: 100 });
        counter.move_to(&log, 1500);
        assert!(!counter.has_own_counts(), "what was carried over is nobody's own");
        let counts = Counts { index: 1, previous: 0, current: 50 };
        let answer = SharedCounts::Windows { counts, own_previous: 0, own_current: 5 };
        assert_eq!(counter.learn(&sent, &answer, 1500, Adopts::Once), (0, false));
        // The first answer about this one is still to come, and what the others have is in it.
        let sent = counter.tell(&key).expect("the last message has no answer");
        let admission = LoggedAdmission { tag: 1, number: 1, at_us: 1500, cost: 50 };
        counter.learn(&sent, &SharedCounts::Log { admissions: vec![admission] }, 1500, Adopts::Once);
        let View::Log { used, .. } = counter.view(&log, 1500, 0) else { panic!("{counter:?}") };
        assert_eq!(used, 55);
        assert!(counter.tell(&key).is_none());
    }

    fn counts(counter: &Counter) -> Counts {
        match counter.view(&window(1000), 0, 0) {
            View::Windows(counts) => counts,
            View::Bucket { .. } | View::Log { .. } => panic!("{counter:?}"),
        }
    }

    /// What the store says: sums, and our part of them.
    fn learn(
        counter: &mut Counter,
        index: u64,
        [previous, current]: [u64; 2],
        [own_previous, own_current]: [u64; 2],
    ) -> u64 {
        let key = CounterKey { identity: crate::store::Identity::Global, rule: "r".into() };
        let counts = Counts { index, previous, current };
        let sent = counter.own_totals(key);
        counter.learn(&sent, &SharedCounts::Windows { counts, own_previous, own_current }, 0, Adopts::Always).0
    }

    #[test]
    fn others_are_the_sum_without_our_own_part() {
        let mut counter = counter(5_500, 10);
        assert_eq!(learn(&mut counter, 5, [7, 40], [0, 10]), 0);
        assert_eq!(counts(&counter), Counts { index: 5, previous: 7, current: 40 });
        assert_eq!(counter.unconfirmed(), 0);
    }

    #[test]
    fn a_reply_of_the_window_before_counts_as_previous() {
        let mut counter = counter(5_500, 10);
        assert_eq!(counter.move_to(&window(1000), 6_100), 0);
        counter.charge(&window(1000), 6_100, 3);
        learn(&mut counter, 5, [7, 40], [0, 10]);
        assert_eq!(counts(&counter), Counts { index: 6, previous: 40, current: 3 });
        assert_eq!(counter.unconfirmed(), 3);
    }

    #[test]
    fn a_reply_of_the_next_window_moves_the_counter() {
        let mut counter = counter(5_999, 10);
        learn(&mut counter, 6, [30, 4], [10, 0]);
        assert_eq!(counts(&counter), Counts { index: 6, previous: 30, current: 4 });
        counter.move_to(&window(1000), 5_999);
        assert_eq!(counts(&counter), Counts { index: 6, previous: 30, current: 4 }, "our clock is a little behind");
    }

    #[test]
    fn what_was_told_and_taken_back_before_an_answer_is_told_again() {
        let key = CounterKey { identity: super::super::Identity::Global, rule: "r".into() };
        for algorithm in
            [window(1000), Algorithm::TokenBucket { bucket: Bucket::new(100, 1000, 100).unwrap(), window_us: 1000 }]
        {
            let mut counter = Counter::new(&algorithm, 5_000, 7);
            assert_eq!(counter.tell(&key), None, "there is nothing to tell");
            counter.charge(&algorithm, 5_000, 3);
            let sent = counter.tell(&key).unwrap();
            counter.give_back(&algorithm, 5_000, 3);
            // The message may have been lost, and may as well arrive later.
            let again = counter.tell(&key).unwrap();
            assert_ne!(again, sent);
            let shared = match again.state {
                OwnState::Windows { .. } => {
                    SharedCounts::Windows { counts: counts(&counter), own_previous: 0, own_current: 0 }
                }
                OwnState::Bucket { .. } | OwnState::Log { .. } => SharedCounts::Bucket { tat_ns: 0, own_total: 0 },
            };
            assert_eq!(counter.learn(&again, &shared, 5_000, Adopts::Always), (0, false));
            assert_eq!(counter.tell(&key), None, "all is said");
        }
    }

    #[test]
    fn a_store_that_came_back_empty_does_not_make_us_forget_the_others() {
        let mut counter = counter(5_500, 10);
        learn(&mut counter, 5, [7, 40], [0, 10]);
        learn(&mut counter, 5, [0, 10], [0, 10]);
        assert_eq!(counts(&counter), Counts { index: 5, previous: 7, current: 40 });
    }

    #[test]
    fn counts_of_windows_that_are_over_are_reported() {
        let mut counter = counter(5_500, 10);
        assert_eq!(counter.move_to(&window(1000), 6_500), 0, "the previous window can still be sent");
        assert_eq!(counter.move_to(&window(1000), 7_500), 10);
        assert_eq!(counter.move_to(&window(1000), 9_500), 0);
    }

    #[test]
    fn a_clock_that_steps_back_keeps_the_counts() {
        let mut counter = counter(5_500, 10);
        counter.move_to(&window(1000), 4_999);
        assert_eq!(counts(&counter), Counts { index: 5, previous: 0, current: 10 });
        counter.move_to(&window(1000), 2_500);
        assert_eq!(counts(&counter), Counts { index: 2, previous: 0, current: 10 });
    }

    #[test]
    fn another_window_keeps_the_counts_in_proportion() {
        let mut longer = counter(5_500, 10);
        longer.move_to(&window(60_000), 6_500);
        assert_eq!(counts(&longer), Counts { index: 0, previous: 10, current: 0 });
        let mut shorter = counter(5_500, 10);
        shorter.move_to(&window(150), 5_600);
        assert_eq!(counts(&shorter), Counts { index: 37, previous: 0, current: 2 });
    }

    fn bucket(limit: u64, window_us: u64) -> Algorithm {
        Algorithm::TokenBucket { bucket: Bucket::new(limit, window_us, limit).unwrap(), window_us }
    }

    fn log(ceiling: u64, window_us: u64) -> Algorithm {
        Algorithm::SlidingLog(Window { window_us, ceiling })
    }

    fn left(counter: &Counter, algorithm: &Algorithm, now_us: u64) -> u64 {
        algorithm.remaining(counter.view(algorithm, now_us, 0), now_us)
    }

    #[test]
    fn another_algorithm_keeps_what_was_taken() {
        const MINUTE: u64 = 60_000_000;
        let now_us = 1_000 * MINUTE;
        for (from, taken, to, remaining) in [
            (bucket(10, MINUTE), 10, bucket(10, MINUTE), 0),
            // The same share of another window, in both directions.
            (bucket(10, MINUTE), 4, bucket(100, 60 * MINUTE), 60),
            (bucket(100, 60 * MINUTE), 40, bucket(10, MINUTE), 6),
            // A lowered limit, and one that is below what was taken.
            (bucket(10, MINUTE), 4, bucket(5, MINUTE), 3),
            (bucket(10, MINUTE), 10, bucket(5, MINUTE), 0),
            // Between windows and buckets, the same units.
            (Algorithm::sliding_window(MINUTE, 10), 4, bucket(10, MINUTE), 6),
            (Algorithm::sliding_window(MINUTE, 10), 10, bucket(5, MINUTE), 0),
            (bucket(10, MINUTE), 4, Algorithm::FixedWindow(Window { window_us: MINUTE, ceiling: 10 }), 6),
            (bucket(10, MINUTE), 4, Algorithm::sliding_window(60 * MINUTE, 100), 96),
            (Algorithm::sliding_window(MINUTE, 10), 4, log(10, MINUTE), 6),
            (bucket(10, MINUTE), 10, log(5, MINUTE), 0),
            (log(10, MINUTE), 4, bucket(10, MINUTE), 6),
            (log(10, MINUTE), 4, log(10, 60 * MINUTE), 6),
            (
                Algorithm::sliding_window(MINUTE, 10),
                4,
                Algorithm::FixedWindow(Window { window_us: MINUTE, ceiling: 10 }),
                6,
            ),
        ] {
            let mut counter = Counter::new(&from, now_us, 7);
            counter.charge(&from, now_us, taken);
            counter.move_to(&to, now_us);
            assert_eq!(left(&counter, &to, now_us), remaining, "{from:?} {to:?}");
            // And as good as new when the new window says so, whatever the old one was.
            counter.move_to(&to, now_us + 2 * to.window_us());
            assert_eq!(left(&counter, &to, now_us + 2 * to.window_us()), to.ceiling(), "{from:?} {to:?}");
        }
    }

    #[test]
    fn what_is_given_back_is_never_more_than_was_taken_here() {
        const SECOND: u64 = 1_000_000;
        let now_us = 1_000 * SECOND;
        for algorithm in [
            bucket(10, SECOND),
            Algorithm::sliding_window(SECOND, 10),
            log(10, SECOND),
            Algorithm::FixedWindow(Window { window_us: SECOND, ceiling: 10 }),
        ] {
            let mut counter = Counter::new(&algorithm, now_us, 7);
            for (taken, back, remaining) in [(4, 1, 7), (0, 100, 10), (0, 5, 10), (10, 3, 3)] {
                counter.charge(&algorithm, now_us, taken);
                counter.give_back(&algorithm, now_us, back);
                assert_eq!(left(&counter, &algorithm, now_us), remaining, "{algorithm:?} {taken} {back}");
            }
        }
        // What others have taken stays taken.
        let mut counter = counter(5_500, 10);
        learn(&mut counter, 5, [0, 40], [0, 10]);
        counter.give_back(&window(1000), 5_500, 100);
        assert_eq!(counts(&counter), Counts { index: 5, previous: 0, current: 30 });
    }

    #[test]
    fn a_shared_bucket_lacks_what_all_have_taken_and_what_is_under_way() {
        let (algorithm, now_us) = (bucket(10, 1_000_000), 1_000_000_000);
        let mut counter = Counter::new(&algorithm, now_us, 7);
        counter.charge(&algorithm, now_us, 2);
        let sent = counter.own_totals(CounterKey { identity: crate::store::Identity::Global, rule: "r".into() });
        counter.charge(&algorithm, now_us, 1);
        // Others have taken five.
        let shared = SharedCounts::Bucket { tat_ns: now_us * 1000 + 700_000_000, own_total: 2 };
        assert_eq!(counter.learn(&sent, &shared, now_us, Adopts::Always), (0, true));
        assert_eq!(left(&counter, &algorithm, now_us), 2);
        assert_eq!(counter.unconfirmed(), 1);
        // An answer about another life of this counter is no news.
        let stranger = OwnTotals { tag: 8, ..sent };
        counter.learn(&stranger, &SharedCounts::Bucket { tat_ns: 0, own_total: 0 }, now_us, Adopts::Always);
        assert_eq!((left(&counter, &algorithm, now_us), counter.unconfirmed()), (2, 1));
    }

    #[test]
    fn what_nodes_owe_is_kept_until_time_has_paid_and_nothing_else_is() {
        const SECOND: u64 = 1_000_000;
        // A unit takes a tenth of a second to come back.
        let (algorithm, now_us) = (bucket(10, SECOND), 1_000 * SECOND);
        let owing = |units: u64| {
            let mut counter = Counter::new(&algorithm, now_us, 7);
            counter.charge(&algorithm, now_us, 10);
            let key = CounterKey { identity: crate::store::Identity::Global, rule: "r".into() };
            let sent = counter.own_totals(key);
            let tat_ns = in_ns(now_us) + 100_000_000 * (10 + units);
            counter.learn(&sent, &SharedCounts::Bucket { tat_ns, own_total: 10 }, now_us, Adopts::Always);
            counter
        };
        let wait =
            |counter: &Counter, to: &Algorithm, now_us: u64| match to.check(counter.view(to, now_us, 1), now_us, 1).0 {
                Outcome::Denied { retry_after_us } => retry_after_us,
                other @ (Outcome::Allowed | Outcome::Never) => panic!("{other:?}"),
            };
        for (owed, then_us, to, waits, over) in [
            (0, now_us, algorithm, 100_000, 0),
            (5, now_us, algorithm, 600_000, 5),
            (5, now_us + 300_000, algorithm, 300_000, 2),
            // A clock that stepped back, by less and by more than what is owed, and after a part of that was paid.
            (0, now_us - 200_000, algorithm, 100_000, 0),
            (5, now_us - 200_000, algorithm, 600_000, 5),
            (5, now_us - 900 * SECOND, algorithm, 600_000, 5),
            // Another limit: what the old one would have had to wait for is no debt of the new one.
            (5, now_us, bucket(5, SECOND), 700_000, 2),
            (
                5,
                now_us,
                Algorithm::TokenBucket { bucket: Bucket::new(10, SECOND, 2).unwrap(), window_us: SECOND },
                600_000,
                5,
            ),
            (5, now_us, bucket(10, 2 * SECOND), 1_200_000, 5),
        ] {
            let mut counter = owing(owed);
            counter.move_to(&to, then_us);
            let view = counter.view(&to, then_us, 1);
            // To the millisecond, in which debts are counted.
            assert!(wait(&counter, &to, then_us).abs_diff(waits) < 2_000, "{owed} {then_us} {to:?} {counter:?}");
            assert_eq!((to.remaining(view, then_us), to.over(view, then_us)), (0, over), "{owed} {then_us} {to:?}");
            let mut later = counter.clone();
            later.move_to(&to, then_us + 100_000);
            later.move_to(&to, then_us);
            assert!(wait(&later, &to, then_us) <= waits + 2_000, "a clock that goes to and fro adds nothing");
        }
        // Who gives back pays the debt first.
        let mut counter = owing(5);
        counter.give_back(&algorithm, now_us, 7);
        assert_eq!(left(&counter, &algorithm, now_us), 2);
        // A node that begins has not seen it come about.
        let mut counter = owing(5);
        counter.forget_debt(now_us);
        assert_eq!(wait(&counter, &algorithm, now_us), 100_000);
    }

    #[test]
    fn a_bucket_is_not_forgotten_before_all_that_was_given_back_is_told() {
        const SECOND: u64 = 1_000_000;
        let (algorithm, now_us) = (bucket(10, 10 * SECOND), 1_000 * SECOND);
        let key = || CounterKey { identity: crate::store::Identity::Global, rule: "r".into() };
        let answer = |counter: &mut Counter, sent: &OwnTotals| {
            let OwnState::Bucket { total, .. } = sent.state else { panic!("{sent:?}") };
            let tat_ns = in_ns(now_us) + SECOND * 1000 * total;
            counter.learn(sent, &SharedCounts::Bucket { tat_ns, own_total: total }, now_us, Adopts::Always);
        };
        let mut counter = Counter::new(&algorithm, now_us, 7);
        counter.charge(&algorithm, now_us, 3);
        let taken = counter.own_totals(key());
        // While that is under way.
        counter.give_back(&algorithm, now_us, 3);
        assert!(!counter.is_expired(now_us) && left(&counter, &algorithm, now_us) == 10);
        answer(&mut counter, &taken);
        assert!(!counter.is_expired(now_us) && left(&counter, &algorithm, now_us) == 10);
        let given_back = counter.own_totals(key());
        answer(&mut counter, &given_back);
        assert!(counter.is_expired(now_us));
        // Where nobody answers, it is of no use once it would have come back by itself.
        counter.charge(&algorithm, now_us, 10);
        counter.give_back(&algorithm, now_us, 10);
        assert!(!counter.is_expired(now_us + 10 * SECOND - 1) && counter.is_expired(now_us + 10 * SECOND));
    }

    #[test]
    fn a_shared_log_has_each_admission_once() {
        let (algorithm, now_us) = (log(100, 1000), 1_000_000);
        let mut counter = Counter::new(&algorithm, now_us, 7);
        for at in [0, 0, 1, 2] {
            counter.charge(&algorithm, now_us + at, 1);
        }
        let key = || CounterKey { identity: crate::store::Identity::Global, rule: "r".into() };
        let sent = counter.own_totals(key());
        let OwnState::Log { admissions } = &sent.state else { panic!("{sent:?}") };
        assert_eq!(admissions.iter().map(|admission| admission.cost).collect::<Vec<_>>(), [2, 1, 1]);
        // Another node's lie between, told twice.
        let other = LoggedAdmission { tag: 8, number: 0, at_us: now_us + 1, cost: 5 };
        let mut all = admissions.clone();
        all.insert(1, other);
        for _ in 0..2 {
            let shared = SharedCounts::Log { admissions: all.clone() };
            assert_eq!(counter.learn(&sent, &shared, now_us, Adopts::Always), (0, false));
            assert_eq!(left(&counter, &algorithm, now_us + 2), 91);
        }
        // Given back here, it is to be told; given back there, it is learnt.
        counter.give_back(&algorithm, now_us + 2, 2);
        let OwnState::Log { admissions: told } = counter.own_totals(key()).state else { panic!() };
        assert_eq!(
            told.iter().map(|admission| (admission.number, admission.cost)).collect::<Vec<_>>(),
            [(1, 0), (2, 0)]
        );
        let shared = SharedCounts::Log { admissions: vec![LoggedAdmission { cost: 1, ..other }] };
        assert_eq!(counter.learn(&sent, &shared, now_us, Adopts::Always), (0, true), "the store has forgotten ours");
        assert_eq!(left(&counter, &algorithm, now_us + 2), 97);
        // One after the other they leave the window.
        for (at, remaining) in [(999, 97), (1000, 99), (1001, 100)] {
            counter.move_to(&algorithm, now_us + at);
            assert_eq!(left(&counter, &algorithm, now_us + at), remaining, "{at}");
        }
    }
}

//! What this node holds of one counter: units that the shared store has counted as used already, and that requests may use
//! without asking. Pure: `lua/lease.lua` is the other half of the exchange, and instants are arguments.

use limiter_common::sliding_window::{Counts, Outcome};

use crate::store::{Algorithm, CellOutcome, algorithm::View};

/// Of a window, the questions of one node that keep their distance. What is left when it ends is about as much as one of them
/// would get.
const SPACINGS_OF_WINDOW: u64 = 128;
/// Questions that need not keep their distance, though there is less than is wanted: enough to take a quarter of a thousand
/// units, of what is left a quarter, and so on, up to the last one.
const SCARCE_AT_ONCE: u64 = 32;

/// Looks in a row, four in a second, at a holding that nobody used, after which it may go where there is little room.
const IDLE_LOOKS: u32 = 240;

/// What holds for all holdings of this node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// For so long a holding should last, and for an eighth of a window at most.
    pub(super) horizon_us: u64,
    /// Between two questions about a counter of which nothing was left, or over and over less than was wanted; and a small
    /// part of a window at most.
    pub(super) spacing_us: u64,
    /// After this time a counter that is spent is looked at again: others may have given back what they did not use.
    pub(super) look_again_us: u64,
    /// So long a question may wait for others to go with.
    pub(super) gather_us: u64,
}

/// What this node tells the shared store, and asks of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statement {
    /// Names this node's part of the counter.
    pub tag: u32,
    pub algorithm: Algorithm,
    pub index: u64,
    /// Used of the window before.
    pub previous: u64,
    /// Used or held of the window `index`.
    pub current: u64,
    /// To be lent at least, or nothing; and at most.
    pub need: u64,
    pub want: u64,
}

/// What the shared store answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    /// By its clock.
    pub now_us: u64,
    pub granted: u64,
    /// Sums over all nodes, with what was lent.
    pub counts: Counts,
    /// What this node has of the window, used or held.
    pub own_current: u64,
}

/// What a request is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// Out of what is held, in the window of this index.
    Taken {
        outcome: CellOutcome,
        index: u64,
        /// Few units are left: it is time to ask for more.
        is_low: bool,
    },
    /// By what the shared store said last.
    Refused {
        outcome: CellOutcome,
        /// That is a while ago.
        is_old: bool,
    },
    /// Nobody knows before the shared store is asked.
    Unknown,
}

#[derive(Clone, Copy, Debug)]
struct Told {
    counts: Counts,
    now_us: u64,
    received_us: u64,
}

#[derive(Debug)]
pub(super) struct Holding {
    tag: u32,
    algorithm: Algorithm,
    index: u64,
    held: u64,
    used: u64,
    previous_used: u64,
    /// By this host's clock: from then on the window may be over by the store's.
    ends_us: u64,
    told: Option<Told>,
    /// No question before.
    ask_from_us: u64,
    /// When as many questions would have been asked, that far from each other, as were answered with less than was wanted.
    scarce_us: u64,
    /// When it last asked, and how long the answer took.
    asked_us: u64,
    round_trip_us: u64,
    /// Units that requests wanted since.
    demand: u64,
    /// What the last holding was meant to be.
    size: u64,
    /// With fewer units left, more are asked for.
    low: u64,
    used_at_look: u64,
    asked_at_look_us: u64,
    /// Looks since it was last used or renewed.
    idle_looks: u32,
    /// The store has not answered what it was told last: it may count units that nobody has any more.
    is_untold: bool,
    /// A message before it was not answered, and may arrive yet; see `lua/lease.lua`.
    is_one_late: bool,
}

impl Holding {
    pub(super) const fn new(tag: u32, algorithm: Algorithm) -> Self {
        Self {
            tag,
            algorithm,
            index: 0,
            held: 0,
            used: 0,
            previous_used: 0,
            ends_us: 0,
            told: None,
            ask_from_us: 0,
            scarce_us: 0,
            asked_us: 0,
            round_trip_us: 0,
            demand: 0,
            size: 0,
            low: 0,
            used_at_look: 0,
            asked_at_look_us: 0,
            idle_looks: 0,
            is_untold: false,
            is_one_late: false,
        }
    }

    /// Whether what is held is of these windows. Of others, a new holding has to be begun.
    pub(super) const fn is_of(&self, algorithm: &Algorithm) -> bool {
        let same_kind = matches!(
            (&self.algorithm, algorithm),
            (Algorithm::SlidingWindow(_), Algorithm::SlidingWindow(_))
                | (Algorithm::FixedWindow(_), Algorithm::FixedWindow(_))
        );
        same_kind && self.algorithm.window_us() == algorithm.window_us()
    }

    /// Units that a request may use at `local_us`, by this host's clock.
    pub(super) const fn left(&self, local_us: u64) -> u64 {
        if local_us < self.ends_us { self.held - self.used } else { 0 }
    }

    /// Units that nobody can use any more, and that the store does not know of yet.
    pub(super) const fn expired(&self, local_us: u64) -> u64 {
        if local_us < self.ends_us { 0 } else { self.held - self.used }
    }

    pub(super) fn take(&mut self, algorithm: &Algorithm, cost: u64, local_us: u64, terms: &Terms) -> Take {
        if self.algorithm != *algorithm {
            // Another ceiling: what was lent under the old one goes back with the next question.
            self.algorithm = *algorithm;
            self.held = self.used;
        }
        let left = self.left(local_us);
        if left >= cost {
            self.used += cost;
            self.demand = self.demand.saturating_add(cost);
            let is_low = left - cost < self.low && local_us >= self.ask_from_us;
            let outcome = self.outcome(Outcome::Allowed, cost, local_us);
            return Take::Taken { outcome, index: self.index, is_low };
        }
        let Some(told) = self.told else {
            self.demand = self.demand.saturating_add(cost);
            return Take::Unknown;
        };
        let now_us = told.now_us.saturating_add(local_us.saturating_sub(told.received_us));
        let is_old = local_us.saturating_sub(told.received_us) >= terms.look_again_us;
        match self.algorithm.check(self.view(told.counts, now_us), now_us, cost - left).0 {
            Outcome::Allowed if local_us < self.ask_from_us => {
                let retry_after_us = self.ask_from_us - local_us;
                let outcome = self.outcome(Outcome::Denied { retry_after_us }, cost, local_us);
                Take::Refused { outcome, is_old: false }
            }
            Outcome::Allowed => {
                self.demand = self.demand.saturating_add(cost);
                Take::Unknown
            }
            _ if cost > self.algorithm.ceiling() => {
                Take::Refused { outcome: self.outcome(Outcome::Never, cost, local_us), is_old: false }
            }
            denied @ (Outcome::Denied { .. } | Outcome::Never) => {
                Take::Refused { outcome: self.outcome(denied, cost, local_us), is_old }
            }
        }
    }

    /// Whether neither what is held nor what the store said last decides about this cost.
    pub(super) fn lacks(&self, cost: u64, local_us: u64) -> bool {
        let left = self.left(local_us);
        let Some(told) = self.told else { return left < cost };
        let now_us = told.now_us.saturating_add(local_us.saturating_sub(told.received_us));
        let allows = || self.algorithm.check(self.view(told.counts, now_us), now_us, cost - left).0 == Outcome::Allowed;
        left < cost && local_us >= self.ask_from_us && allows()
    }

    /// What a request of this cost would be told, as far as is known here.
    pub(super) fn peek(&self, cost: u64, local_us: u64) -> Option<CellOutcome> {
        let (view, now_us) = self.known(local_us)?;
        let outcome = self.algorithm.check(view, now_us, cost).0;
        Some(self.outcome(outcome, cost, local_us))
    }

    /// What the counter stands for without what this node holds and does not use, and the store's time, as far as they are
    /// known here.
    pub(super) fn known(&self, local_us: u64) -> Option<(View, u64)> {
        let told = self.told?;
        let now_us = told.now_us.saturating_add(local_us.saturating_sub(told.received_us));
        let view = match self.view(told.counts, now_us) {
            View::Windows(counts) => {
                let unused = if counts.index == self.index { self.held - self.used } else { 0 };
                View::Windows(Counts { current: counts.current.saturating_sub(unused), ..counts })
            }
            other @ (View::Bucket { .. } | View::Log { .. }) => other,
        };
        Some((view, now_us))
    }

    fn view(&self, counts: Counts, now_us: u64) -> View {
        View::Windows(counts.at(now_us / self.algorithm.window_us()))
    }

    fn outcome(&self, outcome: Outcome, cost: u64, local_us: u64) -> CellOutcome {
        let Some((view, now_us)) = self.known(local_us) else { return CellOutcome::new(outcome, local_us) };
        let remaining = self.algorithm.remaining(view, now_us);
        // What is left and may not be asked for yet is not there for this request.
        let is_denied = matches!(outcome, Outcome::Denied { .. });
        let remaining = if is_denied { remaining.min(cost.saturating_sub(1)) } else { remaining };
        CellOutcome { remaining, ..CellOutcome::new(outcome, self.algorithm.reset_us(view, now_us)) }
    }

    /// Gives back what a request took in the window of this index and was not allowed to use.
    pub(super) fn put_back(&mut self, index: u64, cost: u64) {
        if index == self.index {
            self.used = self.used.saturating_sub(cost);
        } else if index.saturating_add(1) == self.index {
            self.give_back_of_previous(cost);
        }
    }

    /// What is left of the current window is told when it goes back. Of the one before, it has to be told for itself: nobody may
    /// ask about the counter again.
    fn give_back_of_previous(&mut self, cost: u64) {
        let back = cost.min(self.previous_used);
        self.previous_used -= back;
        self.is_untold |= back > 0;
    }

    /// Gives back what requests have used here, at most: a client pays back.
    pub(super) fn refund(&mut self, cost: u64) {
        let of_current = cost.min(self.used);
        self.used -= of_current;
        self.give_back_of_previous(cost - of_current);
    }

    /// What to tell, and to ask for `need` units and as many more as this node can be expected to use.
    pub(super) fn ask(&mut self, need: u64, local_us: u64, terms: &Terms) -> Statement {
        let left = self.left(local_us);
        self.forget_expired(local_us);
        let window_us = self.algorithm.window_us();
        let horizon_us = terms.horizon_us.max(self.round_trip_us.saturating_mul(4)).min(window_us / 8);
        let first = self.asked_us == 0;
        let elapsed_us = local_us.saturating_sub(self.asked_us).max(1000);
        let demand = self.demand.max(need);
        let in_time = |us: u64| {
            let units = u128::from(demand) * u128::from(us) / u128::from(elapsed_us);
            u64::try_from(units).unwrap_or(u64::MAX)
        };
        if first {
            // Most clients ask once.
            (self.size, self.low) = (need, 0);
        } else {
            let most = demand.max(self.size).saturating_mul(2);
            self.size = in_time(horizon_us).clamp(need.min(most), most);
            // Until the answer to the next question is there, and some more: requests do not come at even distances, and of a slow
            // key a few are many.
            let lead_us = self.round_trip_us.saturating_mul(2).saturating_add(10_000 + terms.gather_us);
            let usual = in_time(lead_us);
            let at_times = usual.saturating_add(1).isqrt().saturating_mul(2).saturating_add(1);
            self.low = usual.saturating_add(at_times).min(self.size / 2);
        }
        (self.asked_us, self.demand) = (local_us.max(1), 0);
        let want = self.size.saturating_sub(left).max(need);
        self.statement(need, want)
    }

    /// What to tell of a holding of which no more than `keep` units will be used.
    pub(super) fn release(&mut self, keep: u64, local_us: u64) -> Statement {
        self.forget_expired(local_us);
        self.held = self.held.min(self.used.saturating_add(keep));
        self.statement(0, 0)
    }

    fn forget_expired(&mut self, local_us: u64) {
        self.held -= self.expired(local_us);
    }

    /// Whether what was told last has to be told again, if no answer to it is to come.
    pub(super) const fn is_untold(&self) -> bool {
        self.is_untold
    }

    /// The store may not know any more what it was told.
    pub(super) const fn doubt(&mut self) {
        self.is_untold |= self.held > 0 || self.previous_used > 0;
    }

    const fn statement(&mut self, need: u64, want: u64) -> Statement {
        self.is_one_late |= self.is_untold;
        self.is_untold = true;
        Statement {
            tag: self.tag,
            algorithm: self.algorithm,
            index: self.index,
            previous: self.previous_used,
            current: self.held,
            need,
            want,
        }
    }

    /// Takes the answer to a statement that left at `sent_us` and was answered by `received_us`.
    ///
    /// The store read its clock after `sent_us`, so its window cannot be over before as much time has passed since then as was
    /// left of it: what is held is never used in another window than it was counted in, however slow the network is.
    pub(super) fn lent(&mut self, sent: &Statement, lent: &Lent, sent_us: u64, received_us: u64, terms: &Terms) {
        let Lent { now_us, granted, counts, own_current } = *lent;
        self.is_one_late &= granted == 0 && sent.want > 0;
        self.is_untold = self.is_one_late;
        if counts.index != self.index {
            self.previous_used = if counts.index == self.index.saturating_add(1) { self.used } else { 0 };
            // Of a window that the store went back to, it counts what this node had.
            self.used = own_current.saturating_sub(granted);
            self.index = counts.index;
        }
        self.held = own_current.max(self.used);
        if sent.algorithm != self.algorithm {
            // Lent under a ceiling that holds no more.
            self.held = self.used;
        }
        let window_us = self.algorithm.window_us();
        let end_us = counts.index.saturating_add(1).saturating_mul(window_us);
        self.ends_us = sent_us.saturating_add(end_us.saturating_sub(now_us));
        self.round_trip_us = received_us.saturating_sub(sent_us);
        self.told = Some(Told { counts, now_us, received_us });
        self.ask_from_us = if granted < sent.want {
            let nothing_left = self.algorithm.remaining(self.view(counts, now_us), now_us) == 0;
            self.next_of_scarce(nothing_left, received_us, terms.spacing_us.min(window_us / SPACINGS_OF_WINDOW))
        } else {
            0
        };
    }

    /// From when on to ask again about a counter that has less than this node wants.
    ///
    /// While there is something, at once: few questions, each for a part of what is left, get all of it. A counter at its
    /// ceiling goes on to have a little, as time passes; questions about that keep their distance, since what nobody took out
    /// yet is there for the next one.
    fn next_of_scarce(&mut self, nothing_left: bool, received_us: u64, spacing_us: u64) -> u64 {
        self.scarce_us = self.scarce_us.max(received_us).saturating_add(spacing_us);
        let at_once = self.scarce_us.saturating_sub(spacing_us.saturating_mul(SCARCE_AT_ONCE));
        if nothing_left { at_once.max(received_us.saturating_add(spacing_us)) } else { at_once }
    }

    /// Looks since anybody wanted anything, where nothing is held here and that is a minute or so.
    pub(super) const fn idle_looks(&self, local_us: u64) -> Option<u32> {
        let is_idle = self.idle_looks >= IDLE_LOOKS && self.left(local_us) == 0 && self.expired(local_us) == 0;
        if is_idle { Some(self.idle_looks) } else { None }
    }

    /// Whether nothing that this node has used matters any more, nor anything that it may have been lent without an answer.
    pub(super) const fn is_over(&self, local_us: u64) -> bool {
        let window_us = self.algorithm.window_us();
        let ends_us = if self.ends_us == 0 { self.asked_us.saturating_add(window_us) } else { self.ends_us };
        local_us >= ends_us.saturating_add(window_us.saturating_mul(2))
    }

    /// Looks at what requests used since the last look; says how much of what is left should be kept, if that is too much by
    /// far: more than twice what was used meanwhile, of a holding that was not renewed in that time.
    pub(super) fn look(&mut self, local_us: u64) -> Option<u64> {
        let used = self.used.saturating_sub(self.used_at_look);
        let is_settled = self.asked_at_look_us == self.asked_us;
        self.idle_looks =
            if is_settled && self.used == self.used_at_look { self.idle_looks.saturating_add(1) } else { 0 };
        (self.used_at_look, self.asked_at_look_us) = (self.used, self.asked_us);
        if self.expired(local_us) > 0 {
            return Some(0);
        }
        let keep = used.saturating_mul(2);
        (is_settled && self.left(local_us) > keep).then_some(keep)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;
    const TERMS: Terms = Terms { horizon_us: 500_000, spacing_us: 12_500, look_again_us: SECOND, gather_us: 0 };
    const ALGORITHM: Algorithm = Algorithm::sliding_window(60 * SECOND, 1000);
    /// This host's clock is not the store's.
    const LOCAL: u64 = 77 * SECOND;
    /// Ten seconds into the window.
    const STORE: u64 = 600_010 * SECOND;

    fn lent(holding: &mut Holding, granted: u64, current: u64, at_us: u64) {
        let own_current = holding.held + granted;
        let lent = Lent {
            now_us: STORE + at_us,
            granted,
            counts: Counts { index: (STORE + at_us) / (60 * SECOND), previous: 0, current },
            own_current,
        };
        let statement = holding.statement(0, 0);
        holding.lent(&statement, &lent, LOCAL + at_us, LOCAL + at_us + 1000, &TERMS);
    }

    fn is_taken(holding: &mut Holding, cost: u64, at_us: u64) -> bool {
        matches!(holding.take(&ALGORITHM, cost, LOCAL + at_us, &TERMS), Take::Taken { .. })
    }

    #[test]
    fn what_is_held_is_used_in_its_window_alone() {
        let mut holding = Holding::new(7, ALGORITHM);
        assert_eq!(holding.take(&ALGORITHM, 1, LOCAL, &TERMS), Take::Unknown);
        assert_eq!(holding.ask(1, LOCAL, &TERMS).want, 1, "most clients ask once");
        lent(&mut holding, 5, 100, 0);
        assert!(is_taken(&mut holding, 3, 1000));
        assert!(!is_taken(&mut holding, 3, 2000));
        assert!(is_taken(&mut holding, 1, 50 * SECOND - 1));
        // The store's clock was read after the question left, and by then fifty seconds were left.
        assert!(!is_taken(&mut holding, 1, 50 * SECOND));
        assert_eq!(holding.expired(LOCAL + 50 * SECOND), 1);
        let statement = holding.ask(1, LOCAL + 50 * SECOND, &TERMS);
        assert_eq!((statement.previous, statement.current), (0, 4), "what was not used goes back");
        let next = Lent {
            now_us: STORE + 50 * SECOND,
            granted: 2,
            counts: Counts { index: 10001, previous: 99, current: 2 },
            own_current: 2,
        };
        holding.lent(&statement, &next, LOCAL + 50 * SECOND, LOCAL + 50 * SECOND, &TERMS);
        assert_eq!(holding.left(LOCAL + 50 * SECOND), 2);
        let statement = holding.release(0, LOCAL + 51 * SECOND);
        assert_eq!((statement.index, statement.previous, statement.current), (10001, 4, 0));
    }

    #[test]
    fn a_spent_counter_is_refused_here_until_it_can_allow_again() {
        let mut holding = Holding::new(7, ALGORITHM);
        holding.ask(1, LOCAL, &TERMS);
        lent(&mut holding, 0, 1000, 0);
        let Take::Refused { outcome, is_old: false } = holding.take(&ALGORITHM, 1, LOCAL + 1000, &TERMS) else {
            panic!()
        };
        // The count weighs less than 1000 from the 60th millisecond of the next window on.
        assert!(matches!(outcome.outcome, Outcome::Denied { retry_after_us: 50_000_000..50_100_000 }), "{outcome:?}");
        assert_eq!(outcome.remaining, 0);
        let later = holding.take(&ALGORITHM, 1, LOCAL + 2 * SECOND, &TERMS);
        assert!(matches!(later, Take::Refused { is_old: true, .. }), "{later:?}");
        assert_eq!(holding.take(&ALGORITHM, 1, LOCAL + 51 * SECOND, &TERMS), Take::Unknown);
        lent(&mut holding, 0, 997, 3 * SECOND);
        let Take::Refused { outcome, .. } = holding.take(&ALGORITHM, 5, LOCAL + 3 * SECOND + 2000, &TERMS) else {
            panic!()
        };
        assert_eq!(outcome.remaining, 3, "denied by its cost");
        let never = holding.take(&ALGORITHM, 1001, LOCAL, &TERMS);
        assert!(matches!(never, Take::Refused { outcome: CellOutcome { outcome: Outcome::Never, .. }, .. }));
    }

    #[test]
    fn a_counter_at_its_ceiling_is_asked_about_now_and_then() {
        const WINDOW: u64 = SECOND;
        let algorithm = Algorithm::sliding_window(WINDOW, 10_000);
        let mut holding = Holding::new(7, algorithm);
        let (mut asked, mut taken, mut left) = (0_u64, 0_u64, 1000_u64);
        // Ten requests a millisecond, of which five can be allowed: others use the rest.
        for number in 0..20_000_u64 {
            let local_us = LOCAL + number * 100;
            left += u64::from(number.is_multiple_of(2));
            let take = match holding.take(&algorithm, 1, local_us, &TERMS) {
                Take::Unknown => {
                    asked += 1;
                    let statement = holding.ask(1, local_us, &TERMS);
                    let granted = statement.need.max(statement.want.min(left / 4)).min(left);
                    left -= granted;
                    let now_us = STORE + number * 100;
                    let index = now_us / WINDOW;
                    let own_current = if index == statement.index { statement.current } else { 0 } + granted;
                    let counts = Counts { index, previous: 0, current: 10_000 - left };
                    let lent = Lent { now_us, granted, counts, own_current };
                    holding.lent(&statement, &lent, local_us, local_us, &TERMS);
                    holding.take(&algorithm, 1, local_us, &TERMS)
                }
                known @ (Take::Taken { .. } | Take::Refused { .. }) => known,
            };
            taken += u64::from(matches!(take, Take::Taken { .. }));
        }
        // 97 %.
        assert!(taken >= 10_670, "{taken} of 11000");
        // 256 in two windows, and some at once.
        assert!((200..350).contains(&asked), "{asked} questions");
    }

    #[test]
    fn the_size_follows_the_rate_and_an_idle_holding_goes_back() {
        let mut holding = Holding::new(7, ALGORITHM);
        let mut at_us = 0;
        let mut wanted = Vec::new();
        // A request each millisecond.
        for _ in 0..2000 {
            at_us += 1000;
            match holding.take(&ALGORITHM, 1, LOCAL + at_us, &TERMS) {
                Take::Taken { is_low: false, .. } => {}
                Take::Taken { is_low: true, .. } => {
                    let want = holding.ask(0, LOCAL + at_us, &TERMS).want;
                    wanted.push(want);
                    lent(&mut holding, want, 0, at_us);
                }
                Take::Unknown => {
                    let want = holding.ask(1, LOCAL + at_us, &TERMS).want;
                    wanted.push(want);
                    lent(&mut holding, want, 0, at_us);
                    assert!(is_taken(&mut holding, 1, at_us));
                }
                Take::Refused { .. } => panic!("of 1000 none is used"),
            }
        }
        assert!(wanted[0] == 1 && wanted.len() < 20, "{wanted:?}");
        assert!(wanted.iter().all(|want| *want <= 500), "{wanted:?}");
        assert!(wanted.iter().any(|want| *want >= 400), "{wanted:?}");
        let left = holding.left(LOCAL + at_us);
        assert!(left > 0);
        holding.look(LOCAL + at_us);
        assert_eq!(holding.look(LOCAL + at_us + 250_000), Some(0));
        let before = holding.used;
        let statement = holding.release(0, LOCAL + at_us + 250_000);
        assert_eq!((statement.current, holding.left(LOCAL + at_us + 250_000)), (before, 0));
    }

    #[test]
    fn what_was_told_is_untold_until_it_is_answered() {
        let mut holding = Holding::new(7, ALGORITHM);
        assert!(!holding.is_untold());
        holding.ask(1, LOCAL, &TERMS);
        assert!(holding.is_untold());
        lent(&mut holding, 5, 5, 0);
        assert!(!holding.is_untold());
        // The answer to this one is lost: the store may count five units of which nobody has any.
        holding.release(0, LOCAL + 1000);
        assert!(holding.is_untold() && holding.left(LOCAL + 1000) == 0);
        let again = holding.release(0, LOCAL + 2000);
        assert_eq!((again.previous, again.current, again.need, again.want), (0, 0, 0, 0));
        lent(&mut holding, 0, 0, 3000);
        assert!(!holding.is_untold());
    }

    #[test]
    fn a_question_in_vain_settles_nothing_that_may_come_late() {
        let mut holding = Holding::new(7, ALGORITHM);
        let answer = |holding: &mut Holding, sent: &Statement, granted| {
            let counts = Counts { index: STORE / (60 * SECOND), previous: 0, current: 1000 };
            let lent = Lent { now_us: STORE, granted, counts, own_current: granted };
            holding.lent(sent, &lent, LOCAL, LOCAL + 1000, &TERMS);
        };
        // The first is lost, or late, and of the second nothing is lent.
        holding.ask(1, LOCAL, &TERMS);
        let second = holding.ask(1, LOCAL, &TERMS);
        answer(&mut holding, &second, 0);
        assert!(holding.is_untold());
        let nothing = holding.release(0, LOCAL);
        answer(&mut holding, &nothing, 0);
        assert!(!holding.is_untold());
        // What is lent settles it as well.
        holding.ask(1, LOCAL, &TERMS);
        let second = holding.ask(1, LOCAL, &TERMS);
        answer(&mut holding, &second, 1);
        assert!(!holding.is_untold());
    }

    #[test]
    fn what_a_denied_request_took_is_there_again() {
        let mut holding = Holding::new(7, ALGORITHM);
        holding.ask(1, LOCAL, &TERMS);
        lent(&mut holding, 5, 5, 0);
        let Take::Taken { index, outcome, .. } = holding.take(&ALGORITHM, 4, LOCAL + 1000, &TERMS) else { panic!() };
        assert_eq!(outcome.remaining, 996, "what is held and not used is there for this node's clients");
        holding.put_back(index, 4);
        assert_eq!(holding.left(LOCAL + 1000), 5);
        // Of the window before, it is told with the next question.
        assert!(is_taken(&mut holding, 3, 1000));
        lent(&mut holding, 0, 0, 60 * SECOND);
        holding.put_back(index, 3);
        assert_eq!(holding.release(0, LOCAL + 60 * SECOND).previous, 0);
    }

    #[test]
    fn what_is_given_back_of_the_window_before_is_told_whether_anybody_asks_or_not() {
        let in_next_window = |holding: &mut Holding| {
            let counts = Counts { index: STORE / (60 * SECOND) + 1, previous: 5, current: 0 };
            let lent = Lent { now_us: STORE + 60 * SECOND, granted: 0, counts, own_current: 0 };
            let statement = holding.statement(0, 0);
            holding.lent(&statement, &lent, LOCAL + 60 * SECOND, LOCAL + 60 * SECOND, &TERMS);
            assert!(!holding.is_untold());
        };
        type GivesBack = fn(&mut Holding, u64);
        let ways: [GivesBack; 2] = [
            |holding, cost| holding.refund(cost),
            |holding, cost| {
                holding.put_back(STORE / (60 * SECOND), cost);
            },
        ];
        for gives_back in ways {
            let mut holding = Holding::new(7, ALGORITHM);
            holding.ask(5, LOCAL, &TERMS);
            lent(&mut holding, 5, 5, 0);
            assert!(is_taken(&mut holding, 5, 1000));
            in_next_window(&mut holding);
            gives_back(&mut holding, 3);
            assert!(holding.is_untold());
            assert_eq!(holding.release(0, LOCAL + 60 * SECOND).previous, 2);
            in_next_window(&mut holding);
            gives_back(&mut holding, 0);
            assert!(!holding.is_untold(), "there is nothing to tell");
        }
    }

    #[test]
    fn a_lower_ceiling_takes_back_what_was_lent_under_the_old_one() {
        let mut holding = Holding::new(7, ALGORITHM);
        holding.ask(1, LOCAL, &TERMS);
        lent(&mut holding, 50, 50, 0);
        let lower = Algorithm::sliding_window(60 * SECOND, 10);
        let refused = holding.take(&lower, 1, LOCAL + 1000, &TERMS);
        assert!(matches!(refused, Take::Refused { .. }), "{refused:?}");
        assert_eq!(holding.ask(1, LOCAL + 1000, &TERMS).current, 0);
    }
}

//! Requests of which some rules are `leased` or `strict`: what memory, leases and Redis say, together.
//!
//! Every counter is charged before the request passes, and what was charged is given back if it does not pass after all, to
//! the window that it was charged in. So no counter ever says less than what was admitted, in whatever order the answers
//! come. The order is chosen for what a denial costs: memory is looked at first, since it is free; then leases are used, whose
//! units can be put back; then Redis decides, and memory is charged last, so that a denial by Redis leaves nothing behind in
//! what this node tells the others. Only where another request was quicker in memory meanwhile, Redis has to take back.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use limiter_common::{sliding_window::Outcome, time::UnixMicros};
use smallvec::SmallVec;

use super::{
    CheckSource, Touched,
    failure::Failing,
    spent::Spent,
    unanswered::{Instead, Unanswered},
};
use crate::{
    active::Active,
    clock::Stopwatch,
    policy::Precision,
    store::{
        AsCell as _, At, Cell, CellOutcome, CellRef, Charge, Outcomes,
        algorithm::View,
        lease::{Asked, Leases, Take},
        memory::{INLINE_CELLS, MemoryStore},
        passes,
        redis::RedisStore,
    },
};

/// How long it may take Redis to take something back. Nobody waits for it.
const TAKE_BACK_WITHIN: Duration = Duration::from_secs(1);
/// How often a request waits for a lease: each time, others may have been quicker.
const MOST_ROUNDS: usize = 8;

/// Where precise rules are decided.
#[derive(Clone, Debug)]
pub struct Precise {
    pub redis: RedisStore,
    pub leases: Leases,
}

/// What this node knows.
#[derive(Clone, Copy)]
pub(super) struct Memories<'a> {
    pub(super) counters: &'a MemoryStore,
    /// `None` where nothing is remembered.
    pub(super) spent: Option<&'a Arc<Spent>>,
}

/// Places of a request's cells, by who decides them.
type Places = SmallVec<[usize; INLINE_CELLS]>;
/// What Redis was charged, and when by its clock.
type Charged = Vec<(Cell, UnixMicros)>;
type Cells<'a> = SmallVec<[CellRef<'a>; INLINE_CELLS]>;

/// A request's cells, with what is known of each so far.
pub(super) struct Judging<'a, 'c> {
    precise: &'a Precise,
    counters: &'a MemoryStore,
    spent: Option<&'a Arc<Spent>>,
    now: UnixMicros,
    active: &'a Active,
    touched: &'a Touched<'c>,
    /// Of the request, as their rules want them by now.
    cells: Cells<'c>,
    /// Those whose counters cannot be shared.
    pub(super) failing: Failing,
    pub(super) outcomes: Outcomes,
    /// Where those are from.
    pub(super) sources: SmallVec<[CheckSource; INLINE_CELLS]>,
    /// Cells that memory decides, that leases decide, and that Redis decides.
    memory: Places,
    leased: Places,
    strict: Places,
    /// Leased cells that nobody could be asked about.
    refused: Places,
    /// What was taken out of leases: place and index of the window.
    taken: SmallVec<[(usize, u64); INLINE_CELLS]>,
}

/// How far leases bring a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leased {
    Passes,
    Denied,
    /// Some have to be asked for.
    Unknown,
}

impl<'a, 'c> Judging<'a, 'c> {
    pub(super) fn new(
        precise: &'a Precise,
        Memories { counters, spent }: Memories<'a>,
        now: UnixMicros,
        active: &'a Active,
        touched: &'a Touched<'c>,
        failing: Failing,
    ) -> Self {
        let precisions: SmallVec<[Precision; INLINE_CELLS]> = touched.precisions(active, &failing).collect();
        let places = |wanted: fn(Precision) -> bool| -> Places {
            precisions.iter().enumerate().filter(|(_, precision)| wanted(**precision)).map(|(place, _)| place).collect()
        };
        let nothing = CellOutcome::allowed(now.get());
        Self {
            memory: places(|precision| matches!(precision, Precision::Async | Precision::Local)),
            leased: places(|precision| precision == Precision::Leased),
            strict: places(|precision| precision == Precision::Strict),
            refused: Places::new(),
            taken: SmallVec::new(),
            outcomes: SmallVec::from_elem(nothing, touched.cells.len()),
            sources: SmallVec::from_elem(CheckSource::Memory, touched.cells.len()),
            precise,
            counters,
            spent,
            now,
            cells: touched.cells.clone(),
            active,
            touched,
            failing,
        }
    }

    /// Decides without waiting, if that can be done.
    pub(super) fn at_once(&mut self) -> bool {
        if !self.strict.is_empty() {
            return self.is_spent();
        }
        match self.take_leases() {
            Leased::Unknown => return false,
            Leased::Denied => self.look_into_memory(),
            Leased::Passes => drop(self.charge_memory()),
        }
        true
    }

    /// Decides everything but what memory does, within the time that a request waits for Redis. Returns what Redis was charged;
    /// `None` when the request is denied already.
    pub(super) async fn prepare(&mut self) -> Option<Charged> {
        let watch = Stopwatch::start();
        let left = |watch: &Stopwatch, precise: &Precise| precise.redis.timeout().saturating_sub(watch.elapsed());
        self.look_into_memory();
        if !self.pass(&self.memory) {
            self.guess();
            return None;
        }
        // Others may have been denied since this one was found to need Redis.
        if self.is_spent() {
            return None;
        }
        let mut rounds = 0;
        loop {
            match self.take_leases() {
                Leased::Passes => break,
                Leased::Denied => {
                    self.guess_strict();
                    return None;
                }
                Leased::Unknown => {}
            }
            rounds += 1;
            let time = left(&watch, self.precise);
            if rounds > MOST_ROUNDS + 1 {
                self.do_without_leases(|_| true);
            } else if rounds > MOST_ROUNDS || time.is_zero() {
                // An answer may have come in the last moment.
                rounds = MOST_ROUNDS + 1;
                let leases = &self.precise.leases;
                let lacking: Places =
                    self.leased.iter().copied().filter(|&place| leases.lacks(&self.cells[place])).collect();
                self.do_without_leases(|place| lacking.contains(&place));
            } else {
                self.ask_for_leases(time).await;
            }
        }
        let charged = self.charge_redis(left(&watch, self.precise)).await;
        if !self.pass(&self.strict) {
            self.put_back();
            return None;
        }
        Some(charged)
    }

    /// Charges memory, and so everything; or nothing.
    pub(super) fn finish(&mut self, charged: Charged) {
        if !self.charge_memory() && !charged.is_empty() {
            self.take_back(charged);
        }
    }

    /// Says what the request would be told.
    pub(super) async fn peek(&mut self) -> Option<Charged> {
        self.look_into_memory();
        let leases = &self.precise.leases;
        let mut unknown = self.strict.clone();
        for &place in &self.leased {
            match leases.peek(&self.cells[place]) {
                Some(outcome) => self.outcomes[place] = outcome,
                None => unknown.push(place),
            }
        }
        self.ask_redis(Charge::Peek, &unknown).await;
        None
    }

    /// Gives the costs back.
    pub(super) async fn refund(&mut self) -> Option<Charged> {
        self.in_memory(Charge::Refund, &self.memory.clone());
        let mut elsewhere = self.strict.clone();
        for &place in &self.leased {
            match self.precise.leases.refund(&self.cells[place]) {
                Some(outcome) => {
                    self.outcomes[place] = CellOutcome { outcome: Outcome::Allowed, ..outcome };
                }
                None => elsewhere.push(place),
            }
        }
        self.ask_redis(Charge::Refund, &elsewhere).await;
        if let Some(spent) = self.spent {
            elsewhere.iter().for_each(|place| spent.forget(&self.cells[*place]));
        }
        None
    }

    /// Without charging anything; where Redis does not answer, memory does.
    async fn ask_redis(&mut self, charge: Charge, places: &Places) {
        if places.is_empty() {
            return;
        }
        let cells: Vec<Cell> = places.iter().map(|place| self.cells[*place].to_owned()).collect();
        let redis = &self.precise.redis;
        match redis.judge(At::StoreClock, charge, &cells, redis.timeout()).await {
            Ok(judged) => {
                for (place, judged) in places.iter().zip(judged) {
                    self.outcomes[*place] = judged.outcome;
                    if charge == Charge::Refund {
                        // Else memory would go on to say that it denies.
                        self.counters.inform(&self.cells[*place], judged.view, judged.at);
                    }
                }
            }
            Err(error) => {
                tracing::debug!(target: "limiter::store", %error, "answered from what this node knows");
                if charge == Charge::Refund {
                    self.in_memory(charge, places);
                    return;
                }
                let mut in_memory = Places::new();
                for &place in places {
                    match self.instead_of_redis(place) {
                        Instead::Memory => in_memory.push(place),
                        Instead::Outcome(outcome) => self.outcomes[place] = outcome,
                    }
                }
                self.in_memory(charge, &in_memory);
            }
        }
    }

    fn pass(&self, places: &Places) -> bool {
        places.iter().all(|&place| !self.cells[place].enforced || self.outcomes[place].outcome == Outcome::Allowed)
    }

    fn in_memory(&mut self, charge: Charge, places: &Places) {
        if places.is_empty() {
            return;
        }
        let cells: Cells<'_> = places.iter().map(|place| self.cells[*place]).collect();
        let mut outcomes = Outcomes::new();
        self.counters.decide_into(self.now, charge, &cells, &mut outcomes, None);
        for (place, outcome) in places.iter().zip(outcomes) {
            self.outcomes[*place] = outcome;
        }
    }

    fn look_into_memory(&mut self) {
        self.in_memory(Charge::Peek, &self.memory.clone());
    }

    /// What leases and Redis would say, as far as is known here, of a request that they need not decide.
    fn guess(&mut self) {
        for &place in &self.leased {
            if let Some(outcome) = self.precise.leases.peek(&self.cells[place]) {
                self.outcomes[place] = outcome;
            }
        }
        self.guess_strict();
    }

    fn guess_strict(&mut self) {
        self.in_memory(Charge::Peek, &self.strict.clone());
    }

    /// Takes all costs out of leases, or none.
    fn take_leases(&mut self) -> Leased {
        let mut result = if self.pass(&self.refused) { Leased::Passes } else { Leased::Denied };
        for &place in &self.leased {
            let cell = &self.cells[place];
            match self.precise.leases.take(cell) {
                Take::Taken { outcome, index, .. } => {
                    self.taken.push((place, index));
                    (self.outcomes[place], self.sources[place]) = (outcome, CheckSource::Lease);
                }
                Take::Refused { outcome, .. } => {
                    (self.outcomes[place], self.sources[place]) = (outcome, CheckSource::Lease);
                    if cell.enforced && result == Leased::Passes {
                        result = Leased::Denied;
                    }
                }
                Take::Unknown => result = Leased::Unknown,
            }
        }
        if result != Leased::Passes {
            self.put_back();
        }
        result
    }

    /// Whether Redis denied one of the counters that it decides a moment ago. Then nobody is asked.
    fn is_spent(&mut self) -> bool {
        let Some(spent) = self.spent else { return false };
        let found = |place: &usize| spent.find(&self.cells[*place]).map(|outcome| (*place, outcome));
        let found: SmallVec<[(usize, CellOutcome); INLINE_CELLS]> = self.strict.iter().filter_map(found).collect();
        if !found.iter().any(|(place, _)| self.cells[*place].enforced) {
            return false;
        }
        self.look_into_memory();
        self.guess();
        for (place, outcome) in found {
            (self.outcomes[place], self.sources[place]) = (outcome, CheckSource::Remembered);
        }
        true
    }

    fn put_back(&mut self) {
        for (place, index) in self.taken.drain(..) {
            self.precise.leases.put_back(&self.cells[place], index);
            let outcome = &mut self.outcomes[place];
            outcome.remaining = outcome.remaining.saturating_add(self.cells[place].cost);
        }
    }

    async fn ask_for_leases(&mut self, time: Duration) {
        let leases = &self.precise.leases;
        let needed = self.leased.iter().copied();
        // Those that a request could be decided by are left alone.
        let needed = needed.filter(|&place| leases.lacks(&self.cells[place]));
        let needed: Vec<(usize, Cell)> = needed.map(|place| (place, self.cells[place].to_owned())).collect();
        let asked = join_all(needed.iter().map(|(_, cell)| leases.ask(cell, time))).await;
        let mut unanswered = Places::new();
        let mut no_room = Places::new();
        for ((place, _), asked) in needed.iter().zip(asked) {
            match asked {
                Asked::Answered => {}
                Asked::Unanswered => unanswered.push(*place),
                Asked::NoRoom => no_room.push(*place),
            }
        }
        // What nothing can be held of is decided by Redis.
        self.leased.retain(|place| !no_room.contains(place));
        self.strict.extend(no_room);
        if !unanswered.is_empty() {
            self.do_without_leases(|place| unanswered.contains(&place));
        }
    }

    /// Decides some of the leased cells without Redis.
    fn do_without_leases(&mut self, which: impl Fn(usize) -> bool) {
        let mut keep = Places::new();
        for place in std::mem::take(&mut self.leased) {
            if !which(place) {
                keep.push(place);
                continue;
            }
            self.sources[place] = CheckSource::Memory;
            match self.instead_of_redis(place) {
                Instead::Memory => self.memory.push(place),
                Instead::Outcome(outcome) => {
                    self.outcomes[place] = outcome;
                    self.refused.push(place);
                }
            }
        }
        self.leased = keep;
    }

    /// Charges what Redis decides, and returns it with the time of the charge; nothing where it denies.
    async fn charge_redis(&mut self, time: Duration) -> Charged {
        if self.strict.is_empty() {
            return Vec::new();
        }
        let cells: Vec<Cell> = self.strict.iter().map(|place| self.cells[*place].to_owned()).collect();
        let asked = Stopwatch::start();
        let heard = self.strict.iter().map(|place| self.counters.heard(self.now, &self.cells[*place]));
        let heard: SmallVec<[Option<View>; INLINE_CELLS]> = heard.collect();
        let judged = match self.precise.redis.charge_knowing(&cells, &heard, time).await {
            Ok(judged) => judged,
            Err(error) => {
                tracing::debug!(target: "limiter::store", %error, "decided by what this node knows");
                self.do_without_redis();
                return Vec::new();
            }
        };
        for (place, judged) in self.strict.iter().zip(&judged) {
            (self.outcomes[*place], self.sources[*place]) = (judged.outcome, CheckSource::Redis);
            self.counters.inform(&self.cells[*place], judged.view, judged.at);
            if let Some(spent) = self.spent {
                spent.see(&self.cells[*place], judged, asked);
            }
        }
        let outcomes: Vec<CellOutcome> = judged.iter().map(|judged| judged.outcome).collect();
        if !passes(&cells, &outcomes) {
            return Vec::new();
        }
        let allowed = cells.into_iter().zip(judged).filter(|(_, judged)| judged.outcome.outcome == Outcome::Allowed);
        allowed.map(|(cell, judged)| (cell, judged.at)).collect()
    }

    fn instead_of_redis(&mut self, place: usize) -> Instead {
        let unanswered = Unanswered {
            precise: self.precise,
            counters: self.counters,
            now: self.now,
            rule: &self.active.policy.rules[self.touched.rules[place]],
            of_endpoints: self.touched.of_endpoints,
            place,
            len: self.cells.len(),
        };
        unanswered.instead(&mut self.cells[place], &mut self.failing)
    }

    fn do_without_redis(&mut self) {
        for place in std::mem::take(&mut self.strict) {
            match self.instead_of_redis(place) {
                Instead::Memory => self.memory.push(place),
                Instead::Outcome(outcome) => {
                    self.outcomes[place] = outcome;
                    self.strict.push(place);
                }
            }
        }
    }

    /// Charges memory last. What leases gave goes back if it denies.
    fn charge_memory(&mut self) -> bool {
        self.in_memory(Charge::Commit, &self.memory.clone());
        let passes = self.pass(&self.memory);
        if !passes {
            self.put_back();
        }
        passes
    }

    fn take_back(&self, charged: Charged) {
        let (redis, spent) = (self.precise.redis.clone(), self.spent.cloned());
        tokio::spawn(async move {
            if let Err(error) = redis.take_back(&charged, TAKE_BACK_WITHIN).await {
                tracing::debug!(target: "limiter::store", %error, "a request that was denied stays charged");
            }
            if let Some(spent) = spent {
                charged.iter().for_each(|(cell, _)| spent.forget(&cell.as_cell()));
            }
        });
    }
}

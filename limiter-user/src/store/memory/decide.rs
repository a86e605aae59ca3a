//! Deciding a request by its counters: all of them at once.

use limiter_common::{sliding_window::Outcome, time::UnixMicros};
use parking_lot::MutexGuard;
use smallvec::SmallVec;

use super::{
    INLINE_CELLS, MemoryStore,
    index::KeyHash,
    shard::{Shard, SlotIndex},
    watch::{Moment, Watched},
};
use crate::store::{AsCell, CellOutcome, CellRef, Charge, Outcomes, algorithm::View, passes, taken_before};

/// Shards of one request: all counters of one identity are in one.
const INLINE_SHARDS: usize = 24;

type Hashes = SmallVec<[KeyHash; INLINE_CELLS]>;
type Locks<'a> = SmallVec<[MutexGuard<'a, Shard>; INLINE_SHARDS]>;

/// Where one cell of a request is, and what its counter said before the request.
struct Place {
    /// Index into the locks that the request holds.
    lock: usize,
    slot: Option<SlotIndex>,
    view: View,
}

type Places = SmallVec<[Place; INLINE_CELLS]>;

impl MemoryStore {
    /// Decides all cells at once. All of them are charged, or none; the outcomes are in the order of `cells`.
    ///
    /// `now` should be of this store's clock, and may be a little older than that of a request decided before.
    pub fn decide<C: AsCell>(&self, now: UnixMicros, charge: Charge, cells: &[C]) -> Outcomes {
        let mut outcomes = Outcomes::new();
        self.decide_into(now, charge, cells, &mut outcomes, None);
        outcomes
    }

    /// Like [`Self::decide`], into what may be large. Where the request is denied, `watched` is told by what.
    pub fn decide_into<C: AsCell>(
        &self,
        now: UnixMicros,
        charge: Charge,
        cells: &[C],
        outcomes: &mut Outcomes,
        watched: Option<&mut Watched>,
    ) {
        outcomes.clear();
        match cells {
            [cell] => outcomes.push(self.decide_single(now, charge, &cell.as_cell(), watched)),
            _ => self.decide_all(now.get(), charge, cells, outcomes, watched),
        }
    }

    /// A request with one counter.
    #[inline]
    pub fn decide_one(&self, now: UnixMicros, charge: Charge, cell: &CellRef<'_>) -> CellOutcome {
        self.decide_single(now, charge, cell, None)
    }

    #[inline]
    fn decide_single(
        &self,
        now: UnixMicros,
        charge: Charge,
        cell: &CellRef<'_>,
        watched: Option<&mut Watched>,
    ) -> CellOutcome {
        let (now_us, algorithm) = (now.get(), &cell.algorithm);
        let hash = KeyHash::of(cell);
        let mut shard = self.shard_of(hash);
        let slot = shard.find(hash, cell);
        let mut view = shard.view(slot, algorithm, charge, now_us, cell.cost);
        if charge == Charge::Refund {
            return refund(&mut shard, slot, cell, view, now_us);
        }
        let (outcome, delay_us) = algorithm.check(view, now_us, cell.cost);
        if charge == Charge::Commit && outcome == Outcome::Allowed {
            match slot {
                Some(slot) => shard.charge(slot, algorithm, now_us, cell.cost),
                None => shard.charge_new(hash, cell, now_us),
            }
            view = algorithm.taken(view, now_us, cell.cost);
        } else if let Some(watched) = watched {
            watched.changes_us = shard.watch(hash, slot, None, now_us).min(denies_until(cell, view, now_us));
            watched.views.push(view);
            watched.moment = Moment::of(&self.changes, &[hash]);
        }
        drop(shard);
        let (remaining, reset_us) = (algorithm.remaining(view, now_us), algorithm.reset_us(view, now_us));
        CellOutcome { outcome, remaining, reset_us, delay_us }
    }

    fn decide_all<C: AsCell>(
        &self,
        now_us: u64,
        charge: Charge,
        cells: &[C],
        outcomes: &mut Outcomes,
        watched: Option<&mut Watched>,
    ) {
        let hashes: Hashes = cells.iter().map(|cell| KeyHash::of(&cell.as_cell())).collect();
        // A counter that appears twice in a request has to hold the sum.
        let has_twins = (1..hashes.len()).any(|number| hashes[..number].contains(&hashes[number]));
        let mut places = Places::new();
        let mut locks = self.lock(&hashes, &mut places);

        for (number, cell) in cells.iter().enumerate() {
            let (cell, place) = (cell.as_cell(), &mut places[number]);
            let (shard, algorithm) = (&mut locks[place.lock], &cell.algorithm);
            place.slot = shard.find(hashes[number], &cell);
            let taken = if has_twins { taken_before(cells, outcomes, number) } else { 0 };
            place.view = shard.view(place.slot, algorithm, charge, now_us, cell.cost.saturating_add(taken));
            if charge == Charge::Refund {
                outcomes.push(refund(shard, place.slot, &cell, place.view, now_us));
                continue;
            }
            let weighed = if taken == 0 { place.view } else { algorithm.taken(place.view, now_us, taken) };
            let (outcome, delay_us) = algorithm.check(weighed, now_us, cell.cost);
            outcomes.push(CellOutcome { delay_us, ..CellOutcome::new(outcome, 0) });
        }
        if charge == Charge::Refund {
            return;
        }
        let charged = charge == Charge::Commit && passes(cells, outcomes);
        if charged {
            charge_all(cells, &hashes, &places, outcomes, &mut locks, now_us);
        } else if let Some(watched) = watched.filter(|_| !has_twins) {
            watch_all(cells, &hashes, &places, outcomes, &mut locks, now_us, watched);
            watched.moment = Moment::of(&self.changes, &hashes);
        }
        drop(locks);

        for number in 0..cells.len() {
            let (cell, mut view) = (cells[number].as_cell(), places[number].view);
            let algorithm = &cell.algorithm;
            if charged {
                let cost = match outcomes[number].outcome {
                    _ if has_twins => taken_by_all(cells, outcomes, number),
                    Outcome::Allowed => cell.cost,
                    Outcome::Denied { .. } | Outcome::Never => 0,
                };
                view = algorithm.taken(view, now_us, cost);
            }
            outcomes[number].remaining = algorithm.remaining(view, now_us);
            outcomes[number].reset_us = algorithm.reset_us(view, now_us);
        }
    }

    /// Locks the shards of all hashes, each once, in ascending order: two requests never wait for each other.
    fn lock(&self, hashes: &[KeyHash], places: &mut Places) -> Locks<'_> {
        let shard = |hash: &KeyHash| hash.shard(self.shards.len());
        let mut order: SmallVec<[usize; INLINE_CELLS]> = hashes.iter().map(shard).collect();
        order.sort_unstable();
        order.dedup();
        places.extend(hashes.iter().map(|hash| {
            let lock = order.binary_search(&shard(hash)).unwrap_or(0);
            Place { lock, slot: None, view: View::default() }
        }));
        order.iter().map(|&shard| self.shards[shard].lock()).collect()
    }
}

/// Until when a counter that denies can say the same, if there is one or none: what is left of a window, and when that
/// ends.
fn denies_until(cell: &CellRef<'_>, view: View, now_us: u64) -> u64 {
    match view {
        View::Windows(_) => cell.algorithm.reset_us(view, now_us),
        View::Bucket { .. } => u64::MAX,
        // Nothing is in it: it ends now, whenever it is asked.
        View::Log { reset_us, .. } => {
            if reset_us > now_us {
                u64::MAX
            } else {
                0
            }
        }
    }
}

/// Marks every counter of a denied request: who denies must not change, and who allows must not come to deny.
fn watch_all<C: AsCell>(
    cells: &[C],
    hashes: &[KeyHash],
    places: &[Place],
    outcomes: &[CellOutcome],
    locks: &mut [MutexGuard<'_, Shard>],
    now_us: u64,
    watched: &mut Watched,
) {
    watched.changes_us = u64::MAX;
    for (((cell, hash), place), outcome) in cells.iter().zip(hashes).zip(places).zip(outcomes) {
        let cell = cell.as_cell();
        let allows = outcome.outcome == Outcome::Allowed;
        let room = allows.then(|| cell.algorithm.room(place.view, now_us, cell.cost));
        let mut changes_us = locks[place.lock].watch(*hash, place.slot, room, now_us);
        if !allows {
            changes_us = changes_us.min(denies_until(&cell, place.view, now_us));
        }
        watched.changes_us = watched.changes_us.min(changes_us);
        watched.views.push(place.view);
    }
}

/// Gives the cost back, and says what is left then.
#[cold]
fn refund(shard: &mut Shard, slot: Option<SlotIndex>, cell: &CellRef<'_>, mut view: View, now_us: u64) -> CellOutcome {
    let algorithm = &cell.algorithm;
    if let Some(slot) = slot {
        shard.give_back(slot, algorithm, now_us, cell.cost);
        view = shard.view(Some(slot), algorithm, Charge::Refund, now_us, 0);
    }
    let (remaining, reset_us) = (algorithm.remaining(view, now_us), algorithm.reset_us(view, now_us));
    CellOutcome { remaining, ..CellOutcome::new(Outcome::Allowed, reset_us) }
}

/// What the request takes from the counter of cell `number`, by whichever cell.
fn taken_by_all<C: AsCell>(cells: &[C], outcomes: &[CellOutcome], number: usize) -> u64 {
    let cell = cells[number].as_cell();
    let same = cells.iter().map(AsCell::as_cell).zip(outcomes);
    let same = same.filter(|(other, outcome)| outcome.outcome == Outcome::Allowed && other.is_same_counter(&cell));
    same.fold(0, |sum, (other, _)| sum.saturating_add(other.cost))
}

/// Charges the cells that allow. Existing counters first: an insertion invalidates the slots.
fn charge_all<C: AsCell>(
    cells: &[C],
    hashes: &[KeyHash],
    places: &[Place],
    outcomes: &[CellOutcome],
    locks: &mut [MutexGuard<'_, Shard>],
    now_us: u64,
) {
    let allowed = |number: &usize| outcomes[*number].outcome == Outcome::Allowed;
    let mut has_new = false;
    for number in (0..cells.len()).filter(allowed) {
        let (cell, place) = (cells[number].as_cell(), &places[number]);
        match place.slot {
            Some(slot) => locks[place.lock].charge(slot, &cell.algorithm, now_us, cell.cost),
            None => has_new = true,
        }
    }
    if has_new {
        for number in (0..cells.len()).filter(allowed).filter(|number| places[*number].slot.is_none()) {
            locks[places[number].lock].charge_new(hashes[number], &cells[number].as_cell(), now_us);
        }
    }
}

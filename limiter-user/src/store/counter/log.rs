//! The state of a sliding log: every admission that still counts, whoever made it.

use std::sync::Arc;

use limiter_common::{
    sliding_log::{self, Admission},
    sliding_window::Window,
};

use super::{LoggedAdmission, room::LogRoom};

#[derive(Debug, Default)]
pub(super) struct LogState {
    /// By time, oldest first.
    entries: Vec<Entry>,
    /// Number of the next admission of this node's.
    next: u32,
    /// Room that is taken of a store's, and how much; `None` of one that is in no store, or not for long.
    room: Option<Arc<LogRoom>>,
    taken: usize,
}

/// A log with less room to spare than this keeps it.
const SPARE: usize = 64;

/// A copy is in no store.
impl Clone for LogState {
    fn clone(&self) -> Self {
        Self { entries: self.entries.clone(), next: self.next, room: None, taken: 0 }
    }
}

impl Drop for LogState {
    fn drop(&mut self) {
        if let Some(room) = &self.room {
            room.change(self.taken, 0);
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    admission: LoggedAdmission,
    /// Whether the shared store has it as it is.
    told: bool,
}

impl LogState {
    /// With units that were taken under another algorithm, and are nobody's own.
    pub(super) fn of_others(now_us: u64, cost: u64) -> Self {
        let mut log = Self::default();
        if cost > 0 {
            let admission = LoggedAdmission { tag: 0, number: 0, at_us: now_us, cost };
            log.insert(Entry { admission, told: true });
        }
        log
    }

    /// Takes what it needs of this room from now on.
    pub(super) fn be_in(&mut self, room: &Arc<LogRoom>) {
        self.room.get_or_insert_with(|| Arc::clone(room));
        self.measure();
    }

    /// Takes as much room as it needs by now.
    fn measure(&mut self) {
        let (before, now) = (self.taken, self.entries.capacity());
        if let Some(room) = &self.room
            && before != now
        {
            room.change(before, now);
            self.taken = now;
        }
    }

    /// Room that it takes, in admissions.
    pub(super) fn room(&self) -> usize {
        self.entries.capacity()
    }

    pub(super) fn admissions(&self) -> impl Iterator<Item = Admission> {
        self.entries.iter().map(|entry| Admission { at_us: entry.admission.at_us, cost: entry.admission.cost })
    }

    /// Those that are not forgotten as soon as the log is looked at: what was given back is, once it is told.
    pub(super) fn lasting(&self) -> impl Iterator<Item = Admission> {
        let lasting = self.entries.iter().filter(|entry| entry.admission.cost > 0 || !entry.told);
        lasting.map(|entry| Admission { at_us: entry.admission.at_us, cost: entry.admission.cost })
    }

    /// Those that this tag names.
    pub(super) fn admissions_of(&self, tag: u32) -> impl Iterator<Item = Admission> {
        let own = self.entries.iter().filter(move |entry| entry.admission.tag == tag);
        own.map(|entry| Admission { at_us: entry.admission.at_us, cost: entry.admission.cost })
    }

    /// Forgets what does not count any more. What lies further ahead than a window was never true, and counts from now.
    pub(super) fn move_to(&mut self, window: &Window, now_us: u64) -> u64 {
        let mut late = 0;
        self.entries.retain(|Entry { admission, told }| {
            let counts = Admission { at_us: admission.at_us, cost: admission.cost }.counts(window, now_us);
            late += if counts || *told { 0 } else { admission.cost };
            // One that was given back stays until the shared store knows.
            counts && (admission.cost > 0 || !*told)
        });
        if self.entries.last().is_some_and(|last| last.admission.at_us > now_us.saturating_add(window.window_us)) {
            for entry in &mut self.entries {
                entry.admission.at_us = entry.admission.at_us.min(now_us);
            }
        }
        if self.entries.capacity() > SPARE.max(self.entries.len() * 4) {
            self.entries.shrink_to(self.entries.len() * 2);
            self.measure();
        }
        late
    }

    pub(super) fn charge(&mut self, tag: u32, now_us: u64, cost: u64) {
        // Of one instant, as long as nobody was told.
        if let Some(last) = self.entries.last_mut()
            && (last.admission.tag, last.admission.at_us, last.told) == (tag, now_us, false)
        {
            last.admission.cost = last.admission.cost.saturating_add(cost);
            return;
        }
        let admission = LoggedAdmission { tag, number: self.next, at_us: now_us, cost };
        self.next = self.next.wrapping_add(1);
        self.insert(Entry { admission, told: false });
    }

    fn insert(&mut self, entry: Entry) {
        let at_us = entry.admission.at_us;
        let position = self.entries.partition_point(|other| other.admission.at_us <= at_us);
        self.entries.insert(position, entry);
        self.measure();
    }

    /// The newest of this node's own first.
    pub(super) fn give_back(&mut self, tag: u32, mut cost: u64) {
        for entry in self.entries.iter_mut().rev().filter(|entry| entry.admission.tag == tag) {
            let back = cost.min(entry.admission.cost);
            entry.admission.cost -= back;
            entry.told &= back == 0;
            cost -= back;
        }
    }

    /// When the first admission leaves the window; 0 where a clock has stepped back before some, which leave later and later
    /// then.
    pub(super) fn first_leaves_us(&self, window_us: u64, now_us: u64) -> u64 {
        match (self.entries.first(), self.entries.last()) {
            (_, Some(last)) if last.admission.at_us > now_us => 0,
            (Some(first), _) => first.admission.at_us.saturating_add(window_us),
            (None, _) => u64::MAX,
        }
    }

    pub(super) fn expires_us(&self, window_us: u64) -> u64 {
        self.entries.last().map_or(0, |last| last.admission.at_us.saturating_add(window_us))
    }

    pub(super) fn used(&self, window: &Window, now_us: u64) -> u64 {
        sliding_log::used(window, self.admissions(), now_us)
    }

    pub(super) fn unconfirmed(&self) -> u64 {
        let untold = self.entries.iter().filter(|entry| !entry.told);
        untold.fold(0, |sum, entry| sum.saturating_add(entry.admission.cost))
    }

    pub(super) fn differs(&self) -> bool {
        self.entries.iter().any(|entry| !entry.told)
    }

    pub(super) fn has_own(&self, tag: u32) -> bool {
        self.entries.iter().any(|entry| entry.admission.tag == tag)
    }

    /// Those of this node's own that the shared store does not have as they are.
    pub(super) fn untold(&self) -> Vec<LoggedAdmission> {
        self.entries.iter().filter(|entry| !entry.told).map(|entry| entry.admission).collect()
    }

    /// Takes what the shared store has. What it does not have of this node's own is told again, and what it does not have of
    /// others is kept: it may have come back empty. An admission is never raised, only given back.
    pub(super) fn learn(&mut self, shared: &[LoggedAdmission], tag: u32, adopts: bool) {
        for entry in &mut self.entries {
            entry.told = entry.admission.tag != tag;
        }
        let known = self.entries.len();
        for admission in shared {
            match position(&self.entries[..known], admission) {
                Some(position) => {
                    let entry = &mut self.entries[position];
                    if admission.tag == tag {
                        entry.told = entry.admission.cost == admission.cost;
                    } else if adopts {
                        entry.admission.cost = entry.admission.cost.min(admission.cost);
                    }
                }
                // What this node does not know any more of its own does not count any more.
                None if admission.tag == tag || !adopts => {}
                None => self.entries.push(Entry { admission: *admission, told: true }),
            }
        }
        self.entries.sort_by_key(|entry| entry.admission.at_us);
        self.measure();
    }

    /// Takes what a decision of the shared store left: so many units, of which the newest came at `newest_us`. When the others
    /// came it does not say, so that they count as long as that one.
    pub(super) fn inform(&mut self, tag: u32, used: u64, newest_us: u64) {
        self.entries.retain(|entry| entry.admission.tag == tag);
        let told = self.entries.iter().filter(|entry| entry.told);
        let own = told.fold(0u64, |sum, entry| sum.saturating_add(entry.admission.cost));
        let cost = used.saturating_sub(own);
        if cost > 0 {
            let admission = LoggedAdmission { tag: 0, number: 0, at_us: newest_us, cost };
            self.insert(Entry { admission, told: true });
        }
    }
}

fn position(entries: &[Entry], admission: &LoggedAdmission) -> Option<usize> {
    let begin = entries.partition_point(|entry| entry.admission.at_us < admission.at_us);
    let name = |admission: &LoggedAdmission| (admission.at_us, admission.tag, admission.number);
    let same_time = entries[begin..].iter().take_while(|entry| entry.admission.at_us == admission.at_us);
    let offset = same_time.map(|entry| name(&entry.admission)).position(|other| other == name(admission))?;
    Some(begin + offset)
}

//! Whether counters have to be given up that still count: some clients are limited less than they should be then.

use super::MemoryStats;

/// Looks without a counter given up after which it is over.
const QUIET: u32 = 60;

/// Compares one look with the next, so that only changes are told.
#[derive(Debug, Default)]
pub struct Crowding {
    evicted: u64,
    /// Looks since a counter was given up, while it is crowded.
    quiet: Option<u32>,
}

impl Crowding {
    /// `Some(true)` when it begins, and `Some(false)` when it is over.
    pub fn look(&mut self, stats: &MemoryStats) -> Option<bool> {
        let grows = std::mem::replace(&mut self.evicted, stats.evicted) < stats.evicted;
        match (grows, self.quiet) {
            (true, before) => {
                self.quiet = Some(0);
                before.is_none().then_some(true)
            }
            (false, Some(quiet)) if quiet + 1 >= QUIET => {
                self.quiet = None;
                Some(false)
            }
            (false, quiet) => {
                self.quiet = quiet.map(|quiet| quiet + 1);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_when_it_begins_and_when_it_is_over() {
        let mut crowding = Crowding::default();
        let mut look = |evicted| crowding.look(&MemoryStats { evicted, ..MemoryStats::default() });
        assert_eq!([look(0), look(3), look(4), look(4)], [None, Some(true), None, None]);
        let told: Vec<_> = (0..QUIET * 2).filter_map(|_| look(4)).collect();
        assert_eq!(told, [false]);
        assert_eq!(look(5), Some(true));
    }
}

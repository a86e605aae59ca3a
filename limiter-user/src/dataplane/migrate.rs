//! Takes the shared state over from the pins of an older schema, while the older program goes on.
//!
//! A map whose layout has not changed is pinned in the new directory as well: both programs then work on it, and there
//! is nothing to copy. A map with a new layout is copied: before the new program is put in force, and once more after
//! it, for what the older one has changed meanwhile. Nothing of the older pins is changed until the new program is in
//! force everywhere, so that a start that ends at any point in between can be made again.

use std::collections::HashMap;

use aya::maps::{MapData, MapError, MapInfo};
use limiter_common::schema::{Lifetime, MapKind, MapSpec, creation};

use super::{
    DataplaneError,
    error::map_error,
    maps,
    pins::{CreatedPins, PinDir, VersionDir},
    raw_map::{self, Opened},
    unpin,
};

/// How an entry of an older map becomes one of a newer map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Merge {
    /// Only the agent writes: what is there stays, what is not is taken.
    Absent,
    /// Theoretical arrival times: the later one, so that no bucket is refilled.
    Later,
    /// Counters: they never go back.
    Counter,
}

impl Merge {
    /// `None` for a map whose entries mean nothing to another program.
    fn of(spec: &MapSpec) -> Option<Self> {
        if spec.kind == MapKind::PerCpuArray || spec.name == "MORE_STATS" {
            return Some(Self::Counter);
        }
        if spec.kind == MapKind::LruHash || ["AGGREGATES", "CREATION"].contains(&spec.name) {
            return Some(Self::Later);
        }
        [MapKind::Hash, MapKind::Array].contains(&spec.kind).then_some(Self::Absent)
    }
}

/// Shared maps of older schemas that have to be copied.
#[derive(Default)]
pub(super) struct Migration {
    copies: Vec<Copying>,
}

struct Copying {
    map: &'static str,
    merge: Merge,
    from: Opened,
    to: Opened,
    /// Of counters, by key: what was copied.
    copied: HashMap<Vec<u8>, Vec<u64>>,
}

/// Pins maps of older schemas under the new one where their layout is the same. The newest goes first.
pub(super) fn adopt(pins: &PinDir, created: &mut CreatedPins) -> Result<(), DataplaneError> {
    for spec in shared(pins) {
        let path = pins.map(spec.name);
        for version in pins.older().iter().rev() {
            if path.exists() {
                break;
            }
            let adopting = || -> Result<bool, DataplaneError> {
                let Some(map) = open(version, spec)? else { return Ok(false) };
                let info = map.info().map_err(map_error("look at", spec.name))?;
                if !is_the_same(spec, &info) {
                    return Ok(false);
                }
                map.pin(&path).map_err(map_error("pin", spec.name))?;
                Ok(true)
            };
            if adopting().map_err(|source| failed(pins, version, source))? {
                created.file(path.clone());
            }
        }
    }
    Ok(())
}

/// The seed of an earlier start; 0 when there is none.
pub(super) fn seed(pins: &PinDir) -> Result<u64, DataplaneError> {
    let seed = maps::read_pinned_seed(pins)?;
    if seed != 0 {
        return Ok(seed);
    }
    for version in pins.older().iter().rev() {
        for spec in shared(pins).filter(|spec| spec.name == "CREATION") {
            let read = || -> Result<Option<u64>, DataplaneError> {
                let Some(map) = open(version, spec)? else { return Ok(None) };
                let opened = raw_map::open(map).map_err(map_error("open", spec.name))?;
                let Some(opened) = opened else { return Ok(None) };
                let words = opened.map.get(&creation::SEED.to_ne_bytes()).map_err(map_error("read", spec.name))?;
                Ok(words.and_then(|words| words.first().copied()))
            };
            match read().map_err(|source| failed(pins, version, source))? {
                None | Some(0) => {}
                Some(seed) => return Ok(seed),
            }
        }
    }
    Ok(0)
}

impl Migration {
    /// To be called when the new maps are pinned.
    pub(super) fn open(pins: &PinDir) -> Result<Self, DataplaneError> {
        let mut migration = Self::default();
        for version in pins.older() {
            let (mut same, mut copied, mut lost) = (Vec::new(), Vec::new(), Vec::new());
            for spec in shared(pins) {
                match plan(pins, version, spec).map_err(|source| failed(pins, version, source))? {
                    Plan::Nothing => {}
                    Plan::Same => same.push(spec.name),
                    Plan::Copy(copying) => {
                        copied.push(spec.name);
                        migration.copies.push(*copying);
                    }
                    Plan::Lost(why) => lost.push(format!("{} ({why})", spec.name)),
                }
            }
            let (pinned, ours) = (version.number, pins.schema().version);
            tracing::info!(
                target: "limiter::dataplane",
                "takes over the pins of schema {pinned} for schema {ours}: as they are {}; copied {}",
                listed(&same),
                listed(&copied),
            );
            if !lost.is_empty() {
                let lost = lost.join(", ");
                tracing::warn!(target: "limiter::dataplane", "of schema {pinned}, schema {ours} cannot take over: {lost}");
            }
        }
        Ok(migration)
    }

    /// Copies all, or what has changed since.
    pub(super) fn copy(&mut self, pins: &PinDir) -> Result<(), DataplaneError> {
        for copying in &mut self.copies {
            let copied = copying.copy().map_err(map_error("copy", copying.map));
            // Of several older schemas the newest is the likely one.
            copied.map_err(|source| match pins.older().last() {
                Some(version) => failed(pins, version, source),
                None => source,
            })?;
        }
        Ok(())
    }

    /// To be called when the new program is in force everywhere: copies what the older one has changed to its end, and
    /// removes its pins.
    pub(super) fn finish(mut self, pins: &mut PinDir) -> Result<(), DataplaneError> {
        for copying in &mut self.copies {
            copying.settle().map_err(map_error("copy", copying.map))?;
        }
        for version in pins.older() {
            unpin::remove_superseded(&version.path)?;
            tracing::info!(target: "limiter::dataplane", "schema {} is removed from {}", version.number, version.path.display());
        }
        pins.forget_older();
        Ok(())
    }
}

fn listed(maps: &[&str]) -> String {
    if maps.is_empty() { "none".to_owned() } else { maps.join(", ") }
}

fn failed(pins: &PinDir, version: &VersionDir, source: DataplaneError) -> DataplaneError {
    DataplaneError::Migration { pinned: version.number, ours: pins.schema().version, source: Box::new(source) }
}

fn shared(pins: &PinDir) -> impl Iterator<Item = &'static MapSpec> + use<> {
    pins.schema().maps.iter().filter(|spec| spec.lifetime != Lifetime::Policy)
}

fn open(version: &VersionDir, spec: &MapSpec) -> Result<Option<MapData>, DataplaneError> {
    maps::open_pin(&version.path.join(spec.name), spec.name)
}

fn is_the_same(spec: &MapSpec, found: &MapInfo) -> bool {
    // Buckets may be of any capacity.
    maps::check(spec, found, found.max_entries()).is_ok()
}

/// What is to be done about a shared map of an older schema.
enum Plan {
    Nothing,
    /// It is pinned under the new schema too.
    Same,
    Copy(Box<Copying>),
    /// Why it cannot be copied.
    Lost(String),
}

fn plan(pins: &PinDir, version: &VersionDir, spec: &MapSpec) -> Result<Plan, DataplaneError> {
    let Some(from) = open(version, spec)? else { return Ok(Plan::Nothing) };
    let Some(to) = maps::open_pin(&pins.map(spec.name), spec.name)? else { return Ok(Plan::Nothing) };
    let look = |map: &MapData| map.info().map_err(map_error("look at", spec.name));
    let (old, new) = (look(&from)?, look(&to)?);
    if old.id() == new.id() {
        return Ok(Plan::Same);
    }
    if let Some(why) = incompatible(spec, &old, &new).map_err(map_error("look at", spec.name))? {
        return Ok(Plan::Lost(why));
    }
    let open = |map| raw_map::open(map).map_err(map_error("open", spec.name));
    match (Merge::of(spec), open(from)?, open(to)?) {
        (Some(merge), Some(from), Some(to)) => {
            Ok(Plan::Copy(Box::new(Copying { map: spec.name, merge, from, to, copied: HashMap::new() })))
        }
        _ => Ok(Plan::Lost("a map of a kind that is not copied".to_owned())),
    }
}

/// Why entries of one map mean something else in the other.
fn incompatible(spec: &MapSpec, old: &MapInfo, new: &MapInfo) -> Result<Option<String>, MapError> {
    let (old_kind, new_kind) = (old.map_type()?, new.map_type()?);
    let differ = |what: &str, old: u32, new: u32| Some(format!("{what} {old}, now {new}"));
    Ok(if old_kind != new_kind {
        Some(format!("type {old_kind:?}, now {new_kind:?}"))
    } else if old.key_size() != new.key_size() {
        differ("key size", old.key_size(), new.key_size())
    } else if old.value_size() > new.value_size() {
        differ("value size", old.value_size(), new.value_size())
    } else if is_indexed(spec) && old.max_entries() > new.max_entries() {
        differ("capacity", old.max_entries(), new.max_entries())
    } else if spec.name == "AGGREGATES" && old.max_entries() != new.max_entries() {
        // Which aggregate a source belongs to depends on how many there are.
        differ("capacity", old.max_entries(), new.max_entries())
    } else {
        None
    })
}

fn is_indexed(spec: &MapSpec) -> bool {
    [MapKind::Array, MapKind::PerCpuArray].contains(&spec.kind)
}

impl Copying {
    fn copy(&mut self) -> Result<(), MapError> {
        let Self { merge, from, to, copied, .. } = self;
        let (old_width, new_width) = (from.width, to.width);
        copied.clear();
        let target = &mut to.map;
        from.map.each(&mut |key, old| {
            let is_zero = old.iter().all(|word| *word == 0);
            if is_zero {
                return Ok(());
            }
            let new = target.get(key)?;
            if let Some(merged) = merge.merged(old, old_width, new.as_deref(), new_width) {
                target.set(key, &merged)?;
            }
            if *merge == Merge::Counter {
                copied.insert(key.to_vec(), old.to_vec());
            }
            Ok(())
        })
    }

    fn settle(&mut self) -> Result<(), MapError> {
        if self.merge != Merge::Counter {
            return self.copy();
        }
        let Self { from, to, copied, .. } = self;
        let (old_width, new_width) = (from.width, to.width);
        let target = &mut to.map;
        from.map.each(&mut |key, old| {
            let before = copied.get(key);
            let grown: Vec<_> = match before {
                Some(before) => old.iter().zip(before).map(|(old, before)| old.wrapping_sub(*before)).collect(),
                None => old.to_vec(),
            };
            if grown.iter().all(|word| *word == 0) {
                return Ok(());
            }
            let grown = widened(&grown, old_width, new_width);
            // What the new program counts between the two calls is lost: a packet or two of a counter that is busy.
            let Some(new) = target.get(key)? else { return Ok(()) };
            let sum: Vec<_> = new.iter().zip(&grown).map(|(new, grown)| new.wrapping_add(*grown)).collect();
            target.set(key, &sum)
        })
    }
}

/// Appended fields are zero.
fn widened(words: &[u64], from: usize, to: usize) -> Vec<u64> {
    let appended = std::iter::repeat_n(0, to - from);
    words.chunks(from).flat_map(|words| words.iter().copied().chain(appended.clone())).collect()
}

impl Merge {
    /// What is to be written; `None` when it is there already.
    fn merged(self, old: &[u64], old_width: usize, new: Option<&[u64]>, new_width: usize) -> Option<Vec<u64>> {
        let old = widened(old, old_width, new_width);
        let Some(new) = new.filter(|words| words.iter().any(|word| *word != 0)) else { return Some(old) };
        let mut merged = new.to_vec();
        for (index, (merged, old)) in merged.iter_mut().zip(&old).enumerate() {
            // A field that was appended is the new program's own.
            if index % new_width < old_width {
                *merged = self.word(*old, *merged);
            }
        }
        (merged != new).then_some(merged)
    }

    const fn word(self, old: u64, new: u64) -> u64 {
        match self {
            Self::Absent => new,
            Self::Counter => {
                if old > new {
                    old
                } else {
                    new
                }
            }
            // Zero is a field that nobody has written; arrival times wrap, and are compared as in `gcra`.
            Self::Later if new == 0 => old,
            Self::Later if old == 0 => new,
            Self::Later => {
                if old.wrapping_sub(new) >> 63 == 0 {
                    old
                } else {
                    new
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_values_are_extended_by_zeros() {
        assert_eq!(widened(&[1, 2, 3], 3, 4), [1, 2, 3, 0]);
        assert_eq!(widened(&[1, 2], 2, 2), [1, 2]);
        // Of two CPUs.
        assert_eq!(widened(&[1, 2, 3, 4], 2, 3), [1, 2, 0, 3, 4, 0]);
    }

    #[test]
    fn entries_are_merged_by_what_they_mean() {
        const BEFORE_WRAP: u64 = u64::MAX - 5;
        type Case<'a> = (Merge, (&'a [u64], usize), Option<&'a [u64]>, usize, Option<&'a [u64]>);
        let cases: [Case<'_>; 13] = [
            (Merge::Later, (&[7, 8], 2), None, 3, Some(&[7, 8, 0])),
            (Merge::Later, (&[7, 8], 2), Some(&[0, 0, 0]), 3, Some(&[7, 8, 0])),
            // The appended field stays what the new program made it.
            (Merge::Later, (&[7, 8], 2), Some(&[9, 1, 5]), 3, Some(&[9, 8, 5])),
            (Merge::Later, (&[7, 8], 2), Some(&[9, 9, 5]), 3, None),
            (Merge::Later, (&[7, 8], 2), Some(&[7, 8, 0]), 3, None),
            (Merge::Later, (&[3], 1), Some(&[BEFORE_WRAP]), 1, Some(&[3])),
            (Merge::Later, (&[BEFORE_WRAP], 1), Some(&[3]), 1, None),
            // A seed is any number, and 0 is none.
            (Merge::Later, (&[BEFORE_WRAP], 1), Some(&[0]), 1, Some(&[BEFORE_WRAP])),
            (Merge::Absent, (&[7, 8], 2), None, 2, Some(&[7, 8])),
            (Merge::Absent, (&[7, 8], 2), Some(&[1, 0]), 2, None),
            // Two CPUs.
            (Merge::Counter, (&[7, 8, 1, 2], 2), Some(&[0, 0, 0, 0]), 2, Some(&[7, 8, 1, 2])),
            (Merge::Counter, (&[7, 8, 1, 2], 2), Some(&[6, 9, 4, 1, 2, 4]), 3, Some(&[7, 9, 4, 1, 2, 4])),
            (Merge::Counter, (&[7, 8], 2), Some(&[7, 9]), 2, None),
        ];
        for (merge, (old, old_width), new, new_width, expected) in cases {
            let merged = merge.merged(old, old_width, new, new_width);
            assert_eq!(merged.as_deref(), expected, "{merge:?} {old:?} {new:?}");
        }
    }

    #[test]
    fn every_shared_map_of_this_schema_can_be_carried_on() {
        for spec in limiter_common::schema::MAPS.iter().filter(|spec| spec.lifetime != Lifetime::Policy) {
            assert!(Merge::of(spec).is_some(), "{}: say in migrate.rs how its entries are merged", spec.name);
            assert_eq!(spec.value_size % 8, 0, "{}: values are copied as words of eight bytes", spec.name);
        }
    }
}

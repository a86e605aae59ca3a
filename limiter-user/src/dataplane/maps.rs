//! Maps of a loaded program, with their types, and the check of those that are pinned.

use std::{collections::BTreeMap, fmt, net::IpAddr, path::Path};

use aya::{
    Ebpf, Pod,
    maps::{Array, HashMap, LpmTrie, Map, MapData, MapError, MapInfo, MapType, PerCpuArray, lpm_trie::Key},
};
use ipnet::IpNet;
use limiter_common::{
    acl::{AclEntry, Listed},
    addr::{SrcKeyV4, SrcKeyV6, SrcMaskV4, SrcMaskV6},
    budget::BudgetEntry,
    event::{EventClass, EventCounts, EventMeter},
    schema::{Lifetime, MapKind, MapSpec, creation},
    stats::{Counters, PER_CPU_SLOTS, RuleName},
};
use nix::errno::Errno;

use super::{
    DataplaneError, List,
    acl::{self, OperatorEntry, Prefix},
    error::{errno, map_error},
    pins::PinDir,
    slots::{Slots, Taken},
};

/// The maps that the agent uses while a program is in force.
pub(super) struct Maps {
    allow_v4: LpmTrie<MapData, [u8; 4], AclEntry>,
    allow_v6: LpmTrie<MapData, [u8; 16], AclEntry>,
    deny_v4: LpmTrie<MapData, [u8; 4], AclEntry>,
    deny_v6: LpmTrie<MapData, [u8; 16], AclEntry>,
    budget_filter: Array<MapData, u64>,
    budgets_v4: HashMap<MapData, SrcKeyV4, BudgetEntry>,
    budgets_v6: HashMap<MapData, SrcKeyV6, BudgetEntry>,
    creation: Array<MapData, u64>,
    stats: PerCpuArray<MapData, Counters>,
    more_stats: Array<MapData, Counters>,
    rule_names: Array<MapData, RuleName>,
    event_meters: PerCpuArray<MapData, EventMeter>,
}

impl fmt::Debug for Maps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Maps").finish_non_exhaustive()
    }
}

fn take<M: TryFrom<Map, Error = MapError>>(ebpf: &mut Ebpf, name: &'static str) -> Result<M, DataplaneError> {
    let map = ebpf.take_map(name).ok_or(DataplaneError::Object { what: name })?;
    M::try_from(map).map_err(map_error("open", name))
}

impl Maps {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, DataplaneError> {
        Ok(Self {
            allow_v4: take(ebpf, "ALLOW_V4")?,
            allow_v6: take(ebpf, "ALLOW_V6")?,
            deny_v4: take(ebpf, "DENY_V4")?,
            deny_v6: take(ebpf, "DENY_V6")?,
            budget_filter: take(ebpf, "BUDGET_FILTER")?,
            budgets_v4: take(ebpf, "BUDGETS_V4")?,
            budgets_v6: take(ebpf, "BUDGETS_V6")?,
            creation: take(ebpf, "CREATION")?,
            stats: take(ebpf, "STATS")?,
            more_stats: take(ebpf, "MORE_STATS")?,
            rule_names: take(ebpf, "RULE_NAMES")?,
            event_meters: take(ebpf, "EVENT_METERS")?,
        })
    }

    pub(super) fn insert_acl(&mut self, list: List, prefix: IpNet, entry: AclEntry) -> Result<(), DataplaneError> {
        match (list, Prefix::from(prefix)) {
            (List::Allow, Prefix::V4(len, octets)) => {
                self.allow_v4.insert(&Key::new(len, octets), entry, 0).map_err(map_error("write", "ALLOW_V4"))
            }
            (List::Allow, Prefix::V6(len, octets)) => {
                self.allow_v6.insert(&Key::new(len, octets), entry, 0).map_err(map_error("write", "ALLOW_V6"))
            }
            (List::Deny, Prefix::V4(len, octets)) => {
                self.deny_v4.insert(&Key::new(len, octets), entry, 0).map_err(map_error("write", "DENY_V4"))
            }
            (List::Deny, Prefix::V6(len, octets)) => {
                self.deny_v6.insert(&Key::new(len, octets), entry, 0).map_err(map_error("write", "DENY_V6"))
            }
        }
    }

    pub(super) fn remove_acl(&mut self, list: List, prefix: IpNet) -> Result<(), DataplaneError> {
        let (map, removed) = match (list, Prefix::from(prefix)) {
            (List::Allow, Prefix::V4(len, octets)) => ("ALLOW_V4", self.allow_v4.remove(&Key::new(len, octets))),
            (List::Allow, Prefix::V6(len, octets)) => ("ALLOW_V6", self.allow_v6.remove(&Key::new(len, octets))),
            (List::Deny, Prefix::V4(len, octets)) => ("DENY_V4", self.deny_v4.remove(&Key::new(len, octets))),
            (List::Deny, Prefix::V6(len, octets)) => ("DENY_V6", self.deny_v6.remove(&Key::new(len, octets))),
        };
        absent_is_fine(removed).map_err(map_error("write", map)).map(|_| ())
    }

    /// Makes of a part of a map that holds `before` one that holds `after`.
    pub(super) fn rewrite_acl(
        &mut self,
        list: List,
        before: &BTreeMap<IpNet, AclEntry>,
        after: &BTreeMap<IpNet, AclEntry>,
    ) -> Result<(), DataplaneError> {
        for (prefix, entry) in acl::differences(before, after) {
            match entry {
                Some(entry) => self.insert_acl(list, prefix, entry)?,
                None => self.remove_acl(list, prefix)?,
            }
        }
        Ok(())
    }

    pub(super) fn write_budget_filter(&mut self, word: u32, bits: u64) -> Result<(), DataplaneError> {
        self.budget_filter.set(word, bits, 0).map_err(map_error("write", "BUDGET_FILTER"))
    }

    /// `source` is cut to the configured prefix.
    pub(super) fn insert_budget(&mut self, source: IpAddr, budget: BudgetEntry) -> Result<(), DataplaneError> {
        match source {
            IpAddr::V4(v4) => {
                let key = SrcKeyV4::new(v4.octets(), SrcMaskV4::new(32));
                self.budgets_v4.insert(key, budget, 0).map_err(map_error("write", "BUDGETS_V4"))
            }
            IpAddr::V6(v6) => {
                let key = SrcKeyV6::new(v6.octets(), SrcMaskV6::new(128));
                self.budgets_v6.insert(key, budget, 0).map_err(map_error("write", "BUDGETS_V6"))
            }
        }
    }

    /// Until when it is known that the budget of this source drops packets; 0 when there is none.
    pub(super) fn budget_reported(&self, source: IpAddr) -> Result<u64, DataplaneError> {
        let (map, entry) = match source {
            IpAddr::V4(v4) => ("BUDGETS_V4", self.budgets_v4.get(&SrcKeyV4::new(v4.octets(), SrcMaskV4::new(32)), 0)),
            IpAddr::V6(v6) => ("BUDGETS_V6", self.budgets_v6.get(&SrcKeyV6::new(v6.octets(), SrcMaskV6::new(128)), 0)),
        };
        match entry {
            Ok(entry) => Ok(entry.reported),
            Err(MapError::KeyNotFound) => Ok(0),
            Err(error) => Err(map_error("read", map)(error)),
        }
    }

    /// Whether there was one.
    pub(super) fn remove_budget(&mut self, source: IpAddr) -> Result<bool, DataplaneError> {
        match source {
            IpAddr::V4(v4) => {
                let removed = self.budgets_v4.remove(&SrcKeyV4::new(v4.octets(), SrcMaskV4::new(32)));
                absent_is_fine(removed).map_err(map_error("write", "BUDGETS_V4"))
            }
            IpAddr::V6(v6) => {
                let removed = self.budgets_v6.remove(&SrcKeyV6::new(v6.octets(), SrcMaskV6::new(128)));
                absent_is_fine(removed).map_err(map_error("write", "BUDGETS_V6"))
            }
        }
    }

    /// Walks through the maps: for a start, which takes over what an earlier agent has pushed.
    pub(super) fn read_budgets(&self) -> Result<Vec<(IpAddr, BudgetEntry)>, DataplaneError> {
        let mut budgets = Vec::new();
        for entry in self.budgets_v4.iter() {
            let (key, budget) = entry.map_err(map_error("read", "BUDGETS_V4"))?;
            budgets.push((std::net::Ipv4Addr::from(key).into(), budget));
        }
        for entry in self.budgets_v6.iter() {
            let (key, budget) = entry.map_err(map_error("read", "BUDGETS_V6"))?;
            budgets.push((std::net::Ipv6Addr::from(key).into(), budget));
        }
        Ok(budgets)
    }

    /// What became of the events of a class: the sum over all CPUs.
    pub(super) fn event_counts(&self, class: EventClass) -> Result<EventCounts, DataplaneError> {
        let meters = self.event_meters.get(&(class as u32), 0).map_err(map_error("read", "EVENT_METERS"))?;
        Ok(meters.iter().fold(EventCounts::default(), |sum, meter| sum.plus(meter.counts)))
    }

    /// The sum over all CPUs.
    pub(super) fn counters(&self, slot: u32) -> Result<Counters, DataplaneError> {
        if let Some(index) = slot.checked_sub(PER_CPU_SLOTS) {
            // A program that does not use these has none.
            return if index < self.more_stats.len() {
                self.more_stats.get(&index, 0).map_err(map_error("read", "MORE_STATS"))
            } else {
                Ok(Counters::ZERO)
            };
        }
        let values = self.stats.get(&slot, 0).map_err(map_error("read", "STATS"))?;
        Ok(values.iter().fold(Counters::ZERO, |sum, counters| sum.plus(counters)))
    }

    fn clear_counters(&mut self, slot: u32) -> Result<(), DataplaneError> {
        if let Some(index) = slot.checked_sub(PER_CPU_SLOTS) {
            return if index < self.more_stats.len() {
                self.more_stats.set(index, Counters::ZERO, 0).map_err(map_error("write", "MORE_STATS"))
            } else {
                Ok(())
            };
        }
        let cpus = self.stats.get(&slot, 0).map_err(map_error("read", "STATS"))?.len();
        let zeros = vec![Counters::ZERO; cpus];
        let zeros = aya::maps::PerCpuValues::try_from(zeros).map_err(map_error("write", "STATS"))?;
        self.stats.set(slot, zeros, 0).map_err(map_error("write", "STATS"))
    }

    /// Writes down whose the slot is from now on.
    pub(super) fn give_slot(&mut self, taken: Taken, rule: &str) -> Result<(), DataplaneError> {
        let name = RuleName::new(rule).ok_or_else(|| DataplaneError::RuleId { rule: rule.to_owned() })?;
        if taken.was_used {
            self.clear_counters(taken.slot)?;
        }
        self.rule_names.set(taken.slot, name, 0).map_err(map_error("write", "RULE_NAMES"))
    }

    pub(super) fn creation(&self, slot: u32) -> Result<u64, DataplaneError> {
        self.creation.get(&slot, 0).map_err(map_error("read", "CREATION"))
    }

    pub(super) fn write_seed(&mut self, seed: u64) -> Result<(), DataplaneError> {
        self.creation.set(creation::SEED, seed, 0).map_err(map_error("write", "CREATION"))
    }
}

fn absent_is_fine(removed: Result<(), MapError>) -> Result<bool, MapError> {
    match removed {
        Ok(()) => Ok(true),
        Err(MapError::KeyNotFound) => Ok(false),
        Err(error) if errno(&error) == Some(Errno::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Entries of operators in the pinned policy maps of an earlier agent.
pub(super) fn read_operators(pins: &PinDir) -> Result<Vec<OperatorEntry>, DataplaneError> {
    let mut found = Vec::new();
    for (name, list) in [("ALLOW_V4", List::Allow), ("DENY_V4", List::Deny)] {
        read_list(pins, name, list, Prefix::v4, &mut found)?;
    }
    for (name, list) in [("ALLOW_V6", List::Allow), ("DENY_V6", List::Deny)] {
        read_list(pins, name, list, Prefix::v6, &mut found)?;
    }
    Ok(found)
}

fn read_list<A: Pod>(
    pins: &PinDir,
    name: &'static str,
    list: List,
    prefix: fn(u32, A) -> Option<IpNet>,
    found: &mut Vec<OperatorEntry>,
) -> Result<(), DataplaneError> {
    let Some(map) = open_pin(&pins.in_force(name), name)? else { return Ok(()) };
    let size = map.info().map_err(map_error("look at", name))?.value_size() as usize;
    let map = Map::LpmTrie(map);
    let mut take = |key: Key<A>, listed: &Listed| {
        if let Some(prefix) = prefix(key.prefix_len(), key.data()).filter(|_| listed.is_operators()) {
            found.push(((list, prefix), listed.deadline()));
        }
    };
    if size == size_of::<AclEntry>() {
        for entry in LpmTrie::<_, A, AclEntry>::try_from(map).map_err(map_error("open", name))?.iter() {
            let (key, entry) = entry.map_err(map_error("read", name))?;
            take(key, entry.listed());
        }
    } else if size == size_of::<Listed>() {
        // Of a schema before 4.
        for entry in LpmTrie::<_, A, Listed>::try_from(map).map_err(map_error("open", name))?.iter() {
            let (key, listed) = entry.map_err(map_error("read", name))?;
            take(key, &listed);
        }
    } else {
        tracing::warn!(
            target: "limiter::dataplane",
            "{name} is of another layout: what operators have put in it is not taken over",
        );
    }
    Ok(())
}

/// `None` when there is no pin.
pub(super) fn open_pin(path: &Path, name: &'static str) -> Result<Option<MapData>, DataplaneError> {
    if !path.exists() {
        return Ok(None);
    }
    MapData::from_pin(path).map(Some).map_err(map_error("open", name))
}

/// The seed of an earlier start; 0 when there is none.
pub(super) fn read_pinned_seed(pins: &PinDir) -> Result<u64, DataplaneError> {
    let Some(map) = open_pin(&pins.map("CREATION"), "CREATION")? else { return Ok(0) };
    let creation = Array::<_, u64>::try_from(Map::Array(map)).map_err(map_error("open", "CREATION"))?;
    creation.get(&creation::SEED, 0).map_err(map_error("read", "CREATION"))
}

/// The slots of an earlier start, which may have been one of an older schema.
pub(super) fn read_pinned_slots(pins: &PinDir) -> Result<Slots, DataplaneError> {
    const MAP: &str = "RULE_NAMES";
    let older = pins.older().iter().rev().map(|version| version.path.join(MAP));
    let Some(path) = std::iter::once(pins.map(MAP)).chain(older).find(|path| path.exists()) else {
        return Ok(Slots::default());
    };
    let Some(map) = open_pin(&path, MAP)? else { return Ok(Slots::default()) };
    let names = Array::<_, RuleName>::try_from(Map::Array(map)).map_err(map_error("open", "RULE_NAMES"))?;
    let mut taken = Vec::new();
    for (slot, name) in (0..).zip(names.iter()) {
        let name = name.map_err(map_error("read", "RULE_NAMES"))?;
        if let Some(rule) = name.as_str() {
            taken.push((slot, rule.into()));
        }
    }
    Ok(Slots::new(taken))
}

/// Holds a pinned or new map against the schema. Policy maps may be made smaller; the buckets are as large as
/// `max_sources` was when they were made.
pub(super) fn check(spec: &MapSpec, found: &MapInfo, max_sources: u32) -> Result<(), DataplaneError> {
    let mismatch =
        |what, pinned: String, ours: String| Err(DataplaneError::MapMismatch { map: spec.name, what, pinned, ours });
    let kind = found.map_type().map_err(map_error("look at", spec.name))?;
    if kind != kernel_type(spec.kind) {
        return mismatch("type", format!("{kind:?}"), spec.kind.as_str().to_owned());
    }
    if found.key_size() != spec.key_size {
        return mismatch("key size", found.key_size().to_string(), spec.key_size.to_string());
    }
    if found.value_size() != spec.value_size {
        return mismatch("value size", found.value_size().to_string(), spec.value_size.to_string());
    }
    let capacity = found.max_entries();
    match spec.lifetime {
        Lifetime::Shared if spec.kind == MapKind::LruHash => {
            if capacity != max_sources {
                tracing::warn!(
                    target: "limiter::dataplane",
                    "{} holds {capacity} sources and is kept so that no bucket is lost; max_sources = {max_sources} \
                     takes effect after \"limiter unpin\" and a restart",
                    spec.name,
                );
            }
            Ok(())
        }
        Lifetime::Shared if capacity != spec.capacity => {
            mismatch("capacity", capacity.to_string(), spec.capacity.to_string())
        }
        // A stand-in has one entry.
        Lifetime::WhenUsed if capacity != 1 && capacity != spec.capacity => {
            mismatch("capacity", capacity.to_string(), spec.capacity.to_string())
        }
        Lifetime::Shared | Lifetime::WhenUsed | Lifetime::Policy => Ok(()),
    }
}

const fn kernel_type(kind: MapKind) -> MapType {
    match kind {
        MapKind::Array => MapType::Array,
        MapKind::Hash => MapType::Hash,
        MapKind::LpmTrie => MapType::LpmTrie,
        MapKind::LruHash => MapType::LruHash,
        MapKind::PerCpuArray => MapType::PerCpuArray,
        MapKind::RingBuf => MapType::RingBuf,
    }
}

/// Checks the shared maps that are pinned, and tells which are not. Stand-ins never are.
pub(super) fn check_pinned(pins: &PinDir, max_sources: u32) -> Result<Vec<&'static str>, DataplaneError> {
    let mut missing = Vec::new();
    for spec in pins.schema().maps.iter().filter(|spec| spec.lifetime != Lifetime::Policy) {
        match open_pin(&pins.map(spec.name), spec.name)? {
            Some(map) => check(spec, &map.info().map_err(map_error("look at", spec.name))?, max_sources)?,
            None => missing.push(spec.name),
        }
    }
    Ok(missing)
}

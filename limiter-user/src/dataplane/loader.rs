//! Load, verify, fill, attach: in this order, which the types enforce. Each step takes what the step before returns.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use aya::{
    Ebpf, EbpfError, EbpfLoader,
    maps::{Array, LpmTrie, Map, MapData, MapError, lpm_trie::Key},
    pin::PinError,
    programs::{Program, ProgramError, TestRun as _, TestRunOptions, TestRunResult, Xdp},
};
use ipnet::IpNet;
use limiter_common::{
    rule::{EnforcementMode, PacketRule},
    schema::{self, Lifetime, MAX_ACL_PREFIXES, MapSpec, PORT_WORDS, creation},
    stats::{NO_RULE, RULE_SLOTS},
};
use nix::errno::Errno;

use super::{
    AttachedInterface, DataplaneConfig, DataplaneError, List, MissingInterface, Protect, Transport, Tuning, XdpMode,
    acl::{self, Acl, Prefix},
    attach::{self, Interface, InterfaceState, Undo},
    budgets::Budgets,
    compile::CompiledRules,
    diagnosis::{self, Lines},
    error::{errno, is_permission, map_error},
    globals::{AclFilters, Globals, acl_filters},
    maps::{self, Maps},
    migrate::{self, Migration},
    own_links,
    pins::{CreatedPins, PinDir, pin_error},
    slots::{Slots, Taken},
};

const PROGRAM: &str = "limiter";
pub(super) const NO_LIMIT: PacketRule = PacketRule::new(EnforcementMode::Off, NO_RULE);

/// The object that this binary carries.
#[cfg(limiter_bpf_object)]
pub fn embedded_object() -> Result<&'static [u8], DataplaneError> {
    Ok(aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/limiter.bpf.o")))
}

/// The object that this binary carries.
#[cfg(not(limiter_bpf_object))]
pub fn embedded_object() -> Result<&'static [u8], DataplaneError> {
    Err(DataplaneError::NoObject)
}

/// What a program is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan<'a> {
    pub(super) object: &'a [u8],
    pub(super) config: &'a DataplaneConfig,
    pub(super) tuning: &'a Tuning,
    pub(super) rules: &'a CompiledRules,
    pub(super) acl: &'a Acl,
    /// With a slot for each rule. `None`: what the pinned map says, which nobody else writes during a start, and for rules
    /// that it does not name the next best.
    pub(super) slots: Option<&'a Slots>,
}

/// Maps exist: the shared ones are those that were pinned, or new and pinned.
pub(super) struct Loaded<'a> {
    plan: Plan<'a>,
    pins: PinDir,
    created: CreatedPins,
    ebpf: Ebpf,
    seed: u64,
    slots: Slots,
    /// Slots that are not written down yet.
    taken: Vec<Taken>,
    filters: AclFilters,
}

/// Maps are as the schema says, and the kernel has accepted the program.
pub(super) struct Verified<'a>(Loaded<'a>);

/// The policy is in the maps.
pub(super) struct Configured<'a> {
    plan: Plan<'a>,
    pins: PinDir,
    created: CreatedPins,
    ebpf: Ebpf,
    maps: Maps,
    slots: Slots,
    migration: Migration,
    filters: AclFilters,
}

/// In force.
#[derive(Debug)]
pub(super) struct Attached {
    ebpf: Ebpf,
    pub(super) pins: PinDir,
    pub(super) maps: Maps,
    pub(super) slots: Slots,
    pub(super) interfaces: Vec<Interface>,
    pub(super) verified_instructions: Option<u32>,
    /// Size of the program without what the verifier has removed.
    pub(super) program_bytes: Option<u32>,
    /// What the program writes about single packets, if anything.
    pub(super) lines: Option<Lines>,
    /// By list and family: what the program asks before it looks into it. `None`: it never does.
    filters: AclFilters,
    pub(super) max_sources: [u32; 2],
}

pub(super) fn load<'a>(plan: Plan<'a>, pins: PinDir, mut created: CreatedPins) -> Result<Loaded<'a>, DataplaneError> {
    for (list, name) in [(List::Allow, "allow prefixes"), (List::Deny, "deny prefixes")] {
        for is_ipv4 in [true, false] {
            let count = plan.acl.count(list, is_ipv4);
            if count > MAX_ACL_PREFIXES as usize {
                return Err(DataplaneError::TooMany { what: name, count, capacity: MAX_ACL_PREFIXES });
            }
        }
    }
    migrate::adopt(&pins, &mut created)?;
    for missing in maps::check_pinned(&pins, plan.config.max_sources)? {
        created.file(pins.map(missing));
    }
    let seed = match migrate::seed(&pins)? {
        0 => RandomState::new().hash_one(0).max(1),
        seed => seed,
    };
    let (slots, taken) = match plan.slots {
        Some(slots) => (slots.clone(), Vec::new()),
        None => {
            let mut slots = maps::read_pinned_slots(&pins)?;
            let taken = slots.take_all(plan.rules.by_width(), &plan.rules.ids()).map_err(too_many_rules)?;
            (slots, taken)
        }
    };
    let filters = acl_filters(plan.acl);
    let globals = Globals::new(&plan, seed, &slots, filters)?;
    let specs = pins.schema().maps;
    let shared: Vec<_> = specs.iter().filter(|map| is_shared(map, &slots)).collect();
    let mut loader = EbpfLoader::new();
    for map in &shared {
        loader.map_pin_path(map.name, pins.map(map.name));
    }
    let rules = u32::try_from(plan.rules.rules.len()).unwrap_or(u32::MAX).max(1);
    loader
        .map_max_entries("BUCKETS_V4", plan.config.max_sources)
        .map_max_entries("BUCKETS_V6", plan.config.max_sources)
        .map_max_entries("RULES", rules)
        .map_max_entries(diagnosis::MAP, plan.config.diagnosis.log_bytes());
    for stand_in in specs.iter().filter(|map| map.lifetime == Lifetime::WhenUsed && !is_shared(map, &slots)) {
        loader.map_max_entries(stand_in.name, 1);
    }
    globals.apply(&mut loader);
    let ebpf = loader.load(plan.object).map_err(load_error)?;
    Ok(Loaded { plan, pins, created, ebpf, seed, slots, taken, filters })
}

/// Whether later programs go on with this map.
fn is_shared(map: &MapSpec, slots: &Slots) -> bool {
    match map.lifetime {
        Lifetime::Shared => true,
        Lifetime::WhenUsed => slots.need_more(),
        Lifetime::Policy => false,
    }
}

pub(super) fn too_many_rules(missing: usize) -> DataplaneError {
    let capacity = RULE_SLOTS - 1;
    DataplaneError::TooMany { what: "packet rules", count: capacity as usize + missing, capacity }
}

pub(super) fn load_error(error: EbpfError) -> DataplaneError {
    if is_permission(&error) {
        let object = "of the XDP program".to_owned();
        return DataplaneError::Permission { operation: "make the maps", object, source: Box::new(error) };
    }
    DataplaneError::Load { source: Box::new(error) }
}

pub(super) fn program(ebpf: &mut Ebpf) -> Result<&mut Xdp, DataplaneError> {
    const MISSING: DataplaneError = DataplaneError::Object { what: "XDP program" };
    let Some(Program::Xdp(program)) = ebpf.program_mut(PROGRAM) else { return Err(MISSING) };
    Ok(program)
}

impl<'a> Loaded<'a> {
    pub(super) fn verify(mut self) -> Result<Verified<'a>, DataplaneError> {
        for spec in self.pins.schema().maps {
            let map = self.ebpf.map(spec.name).ok_or(DataplaneError::Object { what: spec.name })?;
            let (Map::Array(data)
            | Map::HashMap(data)
            | Map::LruHashMap(data)
            | Map::LpmTrie(data)
            | Map::PerCpuArray(data)
            | Map::RingBuf(data)) = map
            else {
                return Err(DataplaneError::Object { what: spec.name });
            };
            let info = data.info().map_err(map_error("look at", spec.name))?;
            // The capacity of pinned buckets was looked at before.
            maps::check(spec, &info, info.max_entries())?;
        }
        program(&mut self.ebpf)?.load().map_err(verifier_error)?;
        Ok(Verified(self))
    }
}

fn program_pin_error(error: PinError) -> DataplaneError {
    if is_permission(&error) {
        return DataplaneError::Permission {
            operation: "pin",
            object: "the program".to_owned(),
            source: Box::new(error),
        };
    }
    DataplaneError::Load { source: Box::new(error) }
}

/// The end of the verifier's log names the instruction that it refuses.
pub(super) fn verifier_error(error: ProgramError) -> DataplaneError {
    const LINES: usize = 30;
    // The verifier refuses with EACCES too.
    if errno(&error) == Some(Errno::EPERM) {
        let object = "program".to_owned();
        return DataplaneError::Permission { operation: "load the XDP", object, source: Box::new(error) };
    }
    let text = error.to_string();
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let log = lines[lines.len().saturating_sub(LINES)..].join("\n");
    DataplaneError::Verifier { log, source: Box::new(error) }
}

impl<'a> Verified<'a> {
    pub(super) fn fill(self) -> Result<Configured<'a>, DataplaneError> {
        let Loaded { plan, pins, mut created, mut ebpf, seed, slots, taken, filters } = self.0;
        let mut migration = Migration::open(&pins)?;
        migration.copy(&pins)?;
        for map in pins.schema().maps.iter().filter(|map| map.lifetime == Lifetime::Policy) {
            let path = pins.next_map(map.name);
            // Left by an agent that died between pinning and renaming.
            if path.exists() {
                std::fs::remove_file(&path).map_err(|source| pin_error("remove the pin", path.clone(), source))?;
            }
            let found = ebpf.map(map.name).ok_or(DataplaneError::Object { what: map.name })?;
            found.pin(&path).map_err(map_error("pin", map.name))?;
            created.file(path);
        }
        let path = pins.next_program();
        if path.exists() {
            std::fs::remove_file(&path).map_err(|source| pin_error("remove the pin", path.clone(), source))?;
        }
        program(&mut ebpf)?.pin(&path).map_err(program_pin_error)?;
        created.file(path);
        fill_ports(&mut ebpf, &plan.config.protect)?;
        fill_prefixes(&mut ebpf, plan.rules)?;
        let mut maps = Maps::take(&mut ebpf)?;
        for taken in taken {
            if let Some(rule) = slots.rule(taken.slot) {
                maps.give_slot(taken, rule)?;
            }
        }
        fill_rules(&mut ebpf, &slots, plan.rules)?;
        for (list, prefix, entry) in plan.acl.entries() {
            maps.insert_acl(list, prefix, entry)?;
        }
        maps.write_seed(seed)?;
        Ok(Configured { plan, pins, created, ebpf, maps, slots, migration, filters })
    }
}

pub(super) fn port_bit((transport, port): &(Transport, u16)) -> u32 {
    match transport {
        Transport::Tcp => schema::tcp_port_bit(*port),
        Transport::Udp => schema::udp_port_bit(*port),
    }
}

fn fill_ports(ebpf: &mut Ebpf, protect: &Protect) -> Result<(), DataplaneError> {
    let Protect::Ports(ports) = protect else { return Ok(()) };
    let mut words = vec![0u64; PORT_WORDS as usize];
    for bit in ports.iter().map(port_bit) {
        words[(bit / u64::BITS) as usize] |= 1 << (bit % u64::BITS);
    }
    let mut map: Array<&mut MapData, u64> = open(ebpf, "PORTS")?;
    for (index, word) in (0..).zip(words) {
        if word != 0 {
            map.set(index, word, 0).map_err(map_error("write", "PORTS"))?;
        }
    }
    Ok(())
}

fn fill_prefixes(ebpf: &mut Ebpf, rules: &CompiledRules) -> Result<(), DataplaneError> {
    let mut v4: LpmTrie<&mut MapData, [u8; 4], u32> = open(ebpf, "RULES_V4")?;
    for (prefix, index) in &rules.prefixes {
        if let Prefix::V4(len, octets) = Prefix::from(*prefix) {
            v4.insert(&Key::new(len, octets), index, 0).map_err(map_error("write", "RULES_V4"))?;
        }
    }
    let mut v6: LpmTrie<&mut MapData, [u8; 16], u32> = open(ebpf, "RULES_V6")?;
    for (prefix, index) in &rules.prefixes {
        if let Prefix::V6(len, octets) = Prefix::from(*prefix) {
            v6.insert(&Key::new(len, octets), index, 0).map_err(map_error("write", "RULES_V6"))?;
        }
    }
    Ok(())
}

fn fill_rules(ebpf: &mut Ebpf, slots: &Slots, rules: &CompiledRules) -> Result<(), DataplaneError> {
    let mut map: Array<&mut MapData, PacketRule> = open(ebpf, "RULES")?;
    // A map of no rules has one entry, which limits nothing.
    let nothing = [NO_LIMIT];
    let entries = rules.rules.iter().map(|rule| rule.entry(slots.slot(&rule.id).unwrap_or(NO_RULE)));
    for (index, entry) in (0..).zip(entries.chain(nothing).take(rules.rules.len().max(1))) {
        map.set(index, entry, 0).map_err(map_error("write", "RULES"))?;
    }
    Ok(())
}

fn open<'a, M>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<M, DataplaneError>
where
    M: TryFrom<&'a mut Map, Error = MapError>,
{
    let map = ebpf.map_mut(name).ok_or(DataplaneError::Object { what: name })?;
    M::try_from(map).map_err(map_error("open", name))
}

impl Configured<'_> {
    /// What an earlier agent has pushed.
    pub(super) fn budgets(&self) -> Result<Budgets, DataplaneError> {
        let found = self.maps.read_budgets()?;
        Ok(Budgets::new(found.into_iter().map(|(source, entry)| (source, entry.budget)).collect()))
    }

    /// Puts the program in force for the first time in this process.
    pub(super) fn start(self, budgets: &Budgets) -> Result<Attached, DataplaneError> {
        let config = self.plan.config;
        self.attach(budgets, |program, pins| attach::start(program, &config.interfaces, config.mode, pins))
    }

    /// Puts the program in force in the place of this process' own. An error changes nothing.
    pub(super) fn replace(self, previous: &mut Attached, budgets: &Budgets) -> Result<Attached, DataplaneError> {
        let config = self.plan.config;
        let mut next = self.attach(budgets, |program, pins| {
            attach::exchange_all(program, &previous.interfaces, &config.interfaces, config.mode, pins)
        })?;
        // Rules may have taken slots while the program was loaded.
        next.slots = std::mem::take(&mut previous.slots);
        Ok(next)
    }

    fn attach(
        self,
        budgets: &Budgets,
        put_in_force: impl FnOnce(&mut Xdp, &PinDir) -> Result<(Vec<Interface>, Undo), DataplaneError>,
    ) -> Result<Attached, DataplaneError> {
        let Self { plan, mut pins, created, mut ebpf, mut maps, slots, mut migration, filters } = self;
        // Filling the maps may have taken a while.
        migration.copy(&pins)?;
        budgets.fill_filter(&mut maps)?;
        let config = plan.config;
        let xdp = program(&mut ebpf)?;
        let info = xdp.info().map_err(|error| DataplaneError::Load { source: Box::new(error) })?;
        let lines = Lines::open(&mut ebpf, config.diagnosis)?;
        let xdp = program(&mut ebpf)?;
        let (interfaces, mut undo) = put_in_force(xdp, &pins)?;
        if let Err(error) = undo.move_links().and_then(|()| pins.promote_next()) {
            undo.undo();
            return Err(error);
        }
        created.keep();
        if let Err(error) = attach::detach_others(&config.interfaces, &pins) {
            tracing::error!(target: "limiter::dataplane", %error, "could not detach from an interface that was removed");
        }
        if let Err(error) = migration.finish(&mut pins) {
            tracing::error!(
                target: "limiter::dataplane", %error, "the pins of an older schema stay, and the next start removes them",
            );
        }
        let max_sources = ["BUCKETS_V4", "BUCKETS_V6"].map(|name| capacity(&ebpf, name).unwrap_or(config.max_sources));
        Ok(Attached {
            ebpf,
            pins,
            maps,
            slots,
            interfaces,
            verified_instructions: info.verified_instruction_count(),
            program_bytes: info.size_translated(),
            lines,
            filters,
            max_sources,
        })
    }
}

fn capacity(ebpf: &Ebpf, name: &str) -> Option<u32> {
    let Map::LruHashMap(data) = ebpf.map(name)? else { return None };
    Some(data.info().ok()?.max_entries())
}

impl Attached {
    /// Of the interfaces that run the program.
    pub(super) fn in_force(&self) -> Result<Vec<AttachedInterface>, DataplaneError> {
        let links = self.pins.links()?;
        let mut attached = Vec::new();
        for interface in &self.interfaces {
            let InterfaceState::Attached(mode) = interface.state else { continue };
            if let Some(link) = links.iter().find(|link| *link.interface == *interface.name) {
                let program_id = own_links::program_behind(link)?;
                attached.push(AttachedInterface { name: Arc::clone(&interface.name), mode, program_id });
            }
        }
        Ok(attached)
    }

    /// Of the interfaces that do not.
    pub(super) fn missing(&self) -> Vec<MissingInterface> {
        let missing = self.interfaces.iter().filter_map(|interface| {
            let reason = match &interface.state {
                InterfaceState::Attached(_) => return None,
                InterfaceState::Gone => "there is no such interface".to_owned(),
                InterfaceState::Refused(reason) => reason.clone(),
            };
            Some(MissingInterface { name: Arc::clone(&interface.name), reason })
        });
        missing.collect()
    }

    /// Attaches again to interfaces that are back.
    pub(super) fn mend(&mut self, mode: XdpMode) -> Result<(), DataplaneError> {
        let Self { ebpf, pins, interfaces, .. } = self;
        attach::mend(program(ebpf)?, interfaces, mode, pins)
    }

    /// Whether the program looks into this list for every address of this prefix.
    pub(super) fn looks_up(&self, list: List, prefix: IpNet) -> bool {
        let [allow, deny] = self.filters;
        let [v4, v6] = match list {
            List::Allow => allow,
            List::Deny => deny,
        };
        let filter = if prefix.addr().is_ipv4() { v4 } else { v6 };
        filter.is_some_and(|filter| filter.covers(prefix.prefix_len(), acl::leading(prefix)))
    }

    pub(super) fn test_run(&self, frame: &[u8], repeat: u32) -> Result<TestRunResult, DataplaneError> {
        const MISSING: DataplaneError = DataplaneError::Object { what: "XDP program" };
        let Some(Program::Xdp(program)) = self.ebpf.program(PROGRAM) else { return Err(MISSING) };
        let options = TestRunOptions { data_in: Some(frame), repeat, ..TestRunOptions::new() };
        program.test_run(options).map_err(|error| DataplaneError::TestRun { source: Box::new(error) })
    }
}

/// Buckets that were made, by family.
pub(super) const CREATED: [u32; 2] = [creation::CREATED_V4, creation::CREATED_V6];

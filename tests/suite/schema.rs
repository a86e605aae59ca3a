//! An agent of a newer schema takes over from an older one, with real packets over veth. Needs root and the XDP object.

use std::{
    collections::BTreeSet,
    env, fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use aya::{
    Pod,
    maps::{LpmTrie, Map, MapData, loaded_maps},
    programs::{ProgramInfo, loaded_links, loaded_programs},
};
use limiter_common::{
    budget::BudgetReason,
    rule::EnforcementMode::Enforce,
    schema::{MAPS, SCHEMA_VERSION},
    verdict::{DropReason, PassReason, Verdict},
};
use limiter_tests::{
    eventually::until,
    fixture::{Limited, World},
    ip::xdp_of,
    netns::{CLIENT_V4, CLIENT_V6, INTERFACE, SECOND_INTERFACE, TestNet},
    object::xdp_object,
    older,
    ping_pong::{self, PingPong},
    traffic::{PORT, Traffic},
};
use limiter_user::dataplane::{Dataplane as _, DataplaneError, ErrorKind, KernelDataplane, Schema, XdpMode, unpin};

const BURST: u64 = 5;
const PATIENCE: Duration = Duration::from_secs(20);
/// Numbers of the tests' own.
const OLD: u32 = 10;

/// Addresses of the client that no deny prefix holds.
const LIMITED: [IpAddr; 2] = ping_pong::GOOD;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Buckets have one field less.
    Older,
    Present,
}

fn world(pin_dir: PathBuf) -> World {
    let burst = [(Limited::Packets, BURST)];
    let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &burst).rule("six", "::/0", Enforce, &burst);
    for denied in ping_pong::DENIED {
        let len = if denied.is_ipv4() { 32 } else { 128 };
        world = world.deny(&format!("{denied}/{len}"));
    }
    world.config.interfaces = vec![INTERFACE.to_owned()];
    world.config.pin_dir = pin_dir;
    world
}

fn start_here(world: &World, layout: Layout, version: u32) -> Result<KernelDataplane, DataplaneError> {
    let World { config, policy, mut tuning } = world.clone();
    let object = match layout {
        Layout::Older => older::object(),
        Layout::Present => xdp_object().to_vec(),
    };
    tuning.schema = match layout {
        Layout::Older => {
            // What would be told once is kept in the last field.
            tuning.events = None;
            older::schema(version)
        }
        Layout::Present => Schema { version, maps: MAPS },
    };
    KernelDataplane::start(object, config, &policy, tuning)
}

fn try_start(net: &TestNet, world: &World, layout: Layout, version: u32) -> Result<KernelDataplane, DataplaneError> {
    net.gateway(|| start_here(world, layout, version))
}

#[track_caller]
fn start(net: &TestNet, world: &World, layout: Layout, version: u32) -> KernelDataplane {
    try_start(net, world, layout, version).unwrap_or_else(|error| panic!("start: {error}"))
}

fn names_in(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn pins(net: &TestNet, version: u32) -> BTreeSet<String> {
    names_in(&net.pin_dir().join(format!("v{version}")))
}

fn versions(net: &TestNet) -> Vec<String> {
    names_in(net.pin_dir()).into_iter().collect()
}

fn program_of(dataplane: &KernelDataplane) -> u32 {
    dataplane.interfaces().expect("interfaces")[0].program_id
}

fn link_of(program: u32) -> Option<u32> {
    loaded_links().flatten().find(|link| link.program_id() == program).map(|link| link.id())
}

fn maps_of(program: u32) -> BTreeSet<u32> {
    let program = loaded_programs().flatten().find(|loaded| loaded.id() == program).expect("a program");
    program.map_ids().expect("maps").expect("a kernel that tells them").into_iter().collect()
}

fn program_ids() -> BTreeSet<u32> {
    loaded_programs().flatten().map(|program| program.id()).collect()
}

fn map_ids() -> BTreeSet<u32> {
    loaded_maps().flatten().map(|map| map.id()).collect()
}

/// Id of a pinned map.
fn pinned(net: &TestNet, version: u32, map: &str) -> u32 {
    let path = net.pin_dir().join(format!("v{version}")).join(map);
    MapData::from_pin(path).expect("a pinned map").info().expect("information").id()
}

/// Puts lists of prefixes as they were before schema 4, of shorter values, in the place of pinned ones.
fn shorten_lists(net: &TestNet, version: u32) {
    fn shorten<A: Pod>(path: &Path) {
        const WITHOUT_PREALLOCATION: u32 = 1;
        let list = Map::LpmTrie(MapData::from_pin(path).expect("a pinned list"));
        let list = LpmTrie::<_, A, [u8; 24]>::try_from(list).expect("a list");
        let mut shorter = LpmTrie::<MapData, A, [u8; 16]>::create(1000, WITHOUT_PREALLOCATION).expect("make a list");
        for entry in list.iter() {
            let (prefix, value) = entry.expect("read an entry");
            shorter.insert(&prefix, value.first_chunk().expect("it is longer"), 0).expect("write an entry");
        }
        fs::remove_file(path).expect("remove the pin");
        shorter.pin(path).expect("pin");
    }
    let folder = net.pin_dir().join(format!("v{version}"));
    for list in ["ALLOW", "DENY"] {
        shorten::<[u8; 4]>(&folder.join(format!("{list}_V4")));
        shorten::<[u8; 16]>(&folder.join(format!("{list}_V6")));
    }
}

/// Ids of the programs and of the maps that are pinned, of whichever schema. What a process has made and not pinned
/// ends with it.
fn everything_pinned(net: &TestNet) -> (BTreeSet<u32>, BTreeSet<u32>) {
    let (mut programs, mut maps) = (BTreeSet::new(), BTreeSet::new());
    for version in versions(net) {
        let directory = net.pin_dir().join(version);
        for name in names_in(&directory) {
            let path = directory.join(&name);
            if name.starts_with("program") {
                programs.extend(ProgramInfo::from_pin(path).map(|program| program.id()));
            } else if !name.starts_with("link-") {
                maps.extend(MapData::from_pin(path).and_then(|map| map.info()).map(|map| map.id()));
            }
        }
    }
    (programs, maps)
}

fn packets(dataplane: &KernelDataplane, verdict: Verdict) -> u64 {
    let counters = dataplane.counters().expect("counters");
    counters.iter().filter(|row| row.verdict == verdict).map(|row| row.counter.packets).sum()
}

#[test]
fn state_of_an_older_layout_is_taken_over_without_refill() {
    for mode in [XdpMode::Native, XdpMode::Generic] {
        let net = TestNet::new();
        let traffic = Traffic::new(&net);
        let mut world = world(net.pin_dir().to_owned());
        world.config.mode = mode;
        world.policy.deny.clear();
        let old = start(&net, &world, Layout::Older, OLD);
        for (source, sent) in [(CLIENT_V4[0], 20), (CLIENT_V6[0], 20), (CLIENT_V4[1], 2)] {
            assert_eq!(traffic.arriving(source, sent), BURST.min(sent));
        }
        old.push_budget(CLIENT_V6[1], Duration::from_secs(3600), BudgetReason::KeepsSending, "per-ip").expect("push");
        old.block("198.51.100.0/24".parse().expect("a prefix"), None).expect("block");
        old.allow("2001:db8::/32".parse().expect("a prefix"), Some(Duration::from_secs(3600))).expect("allow");
        let (program, old_maps) = (program_of(&old), maps_of(program_of(&old)));
        let link = link_of(program);
        let (stats, buckets) = (pinned(&net, OLD, "STATS"), pinned(&net, OLD, "BUCKETS_V4"));
        let usage = old.map_usage().expect("usage");
        drop(old);
        shorten_lists(&net, OLD);

        let new = start(&net, &world, Layout::Present, OLD + 1);
        assert_eq!(versions(&net), [format!("v{}", OLD + 1)]);
        assert_eq!(link_of(program_of(&new)), link, "behind the same link");
        assert_eq!(pinned(&net, OLD + 1, "STATS"), stats, "a map of the same layout stays");
        assert_ne!(pinned(&net, OLD + 1, "BUCKETS_V4"), buckets);
        for (source, left) in [(CLIENT_V4[0], 0), (CLIENT_V6[0], 0), (CLIENT_V4[1], BURST - 2), (CLIENT_V6[1], 0)] {
            assert_eq!(traffic.arriving(source, 20), left, "{source} {mode:?}");
        }
        assert_eq!(packets(&new, Verdict::Pass(PassReason::Conforming)), 3 * BURST, "counters go on");
        assert_eq!(new.map_usage().expect("usage"), usage, "buckets are counted on");
        assert_eq!(&**new.budgets()[0].rule.as_ref().expect("a rule"), "per-ip");
        let operators: Vec<_> =
            new.acl().into_iter().map(|entry| (entry.prefix.to_string(), entry.remaining.is_some())).collect();
        assert_eq!(operators, [("2001:db8::/32".to_owned(), true), ("198.51.100.0/24".to_owned(), false)]);

        let maps = maps_of(program_of(&new));
        until("the older program and its maps are gone", PATIENCE, || {
            let is_gone =
                !program_ids().contains(&program) && old_maps.difference(&maps).all(|id| !map_ids().contains(id));
            is_gone.then_some(())
        });
        // A restart and a reload of the newer agent are ordinary ones.
        drop(new);
        let new = start(&net, &world, Layout::Present, OLD + 1);
        new.reload(&world.policy).expect("reload");
        assert_eq!(traffic.arriving(CLIENT_V4[0], 20), 0);
    }
}

#[test]
fn pins_of_several_older_schemas_are_taken_over_together() {
    let net = TestNet::new();
    let traffic = Traffic::new(&net);
    let world = world(net.pin_dir().to_owned());
    drop(start(&net, &world, Layout::Older, OLD));
    assert_eq!(traffic.arriving(LIMITED[0], 20), BURST);
    // An upgrade that ended early: some of its maps, none of its links.
    let early = net.pin_dir().join(format!("v{}", OLD + 1));
    fs::create_dir(&early).expect("a folder");
    for map in ["STATS", "CREATION", "BUCKETS_V6"] {
        let path = net.pin_dir().join(format!("v{OLD}")).join(map);
        MapData::from_pin(path).expect("a map").pin(early.join(map)).expect("pin");
    }
    let new = start(&net, &world, Layout::Present, OLD + 2);
    assert_eq!(versions(&net), [format!("v{}", OLD + 2)]);
    assert_eq!(traffic.arriving(LIMITED[0], 20), 0);
    assert_eq!(traffic.arriving(LIMITED[1], 20), BURST);
    assert_eq!(packets(&new, Verdict::Pass(PassReason::Conforming)), 2 * BURST);
}

#[test]
fn what_cannot_be_taken_over_changes_nothing_and_says_both_numbers() {
    type Prepare = fn(&TestNet, &mut World);
    let cases: [(&str, u32, Prepare, &[&str]); 3] = [
        ("an older agent", OLD - 1, |_, _| {}, &["use schema 10, this agent needs 9", "\"limiter unpin\""]),
        (
            "a pin that cannot be opened",
            OLD + 1,
            |net, _| {
                let pin = net.pin_dir().join(format!("v{OLD}")).join("BUDGETS_V4");
                fs::remove_file(&pin).expect("remove");
                fs::create_dir(pin).expect("a folder in its place");
            },
            &["pins of schema 10 for schema 11", "BUDGETS_V4", "nothing has changed", "\"limiter unpin\""],
        ),
        (
            "a new interface that does not exist",
            OLD + 1,
            |_, world| world.config.interfaces.push("nope0".to_owned()),
            &["attach to nope0: there is no such interface"],
        ),
    ];
    for (name, version, prepare, says) in cases {
        let net = TestNet::new();
        let traffic = Traffic::new(&net);
        let mut world = world(net.pin_dir().to_owned());
        drop(start(&net, &world, Layout::Older, OLD));
        prepare(&net, &mut world);
        let (program, before) = (net.gateway(|| xdp_of(INTERFACE)), pins(&net, OLD));
        world.policy.deny.push("0.0.0.0/0".parse().expect("a prefix"));
        let error = try_start(&net, &world, Layout::Present, version).expect_err(name);
        for word in says {
            assert!(error.to_string().contains(word), "{name}: {word}: {error}");
        }
        assert_eq!(net.gateway(|| xdp_of(INTERFACE)), program, "{name}");
        assert_eq!((versions(&net), pins(&net, OLD)), (vec![format!("v{OLD}")], before), "{name}");
        assert_eq!(traffic.arriving(LIMITED[0], 20), BURST, "{name}: by the earlier policy");
        let folder = net.pin_dir().join(format!("v{OLD}")).join("BUDGETS_V4");
        if folder.is_dir() {
            fs::remove_dir(folder).expect("nothing is in it");
        }
    }
}

#[test]
fn what_stands_in_the_place_of_a_link_is_replaced_by_one() {
    let net = TestNet::new();
    let traffic = Traffic::new(&net);
    let mut world = world(net.pin_dir().to_owned());
    drop(start(&net, &world, Layout::Older, OLD));
    let directory = net.pin_dir().join(format!("v{OLD}"));
    fs::rename(directory.join("PORTS"), directory.join(format!("link-native-{SECOND_INTERFACE}"))).expect("rename");
    world.config.interfaces.push(SECOND_INTERFACE.to_owned());
    world.policy.deny.push("0.0.0.0/0".parse().expect("a prefix"));
    let _new = start(&net, &world, Layout::Present, OLD + 1);
    assert_eq!(versions(&net), [format!("v{}", OLD + 1)]);
    let programs = net.gateway(|| [INTERFACE, SECOND_INTERFACE].map(xdp_of));
    assert!(programs[0].is_some() && programs[0] == programs[1], "{programs:?}");
    assert_eq!(traffic.arriving(LIMITED[0], 20), 0, "by the new policy");
}

#[test]
fn an_older_agent_that_runs_is_not_taken_over() {
    let net = TestNet::new();
    let world = world(net.pin_dir().to_owned());
    let old = start(&net, &world, Layout::Older, OLD);
    let error = try_start(&net, &world, Layout::Present, OLD + 1).expect_err("in use");
    assert!(matches!(error, DataplaneError::InUse { .. }), "{error:?}");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(versions(&net), [format!("v{OLD}")]);
    drop(old);
    drop(start(&net, &world, Layout::Present, OLD + 1));
}

#[test]
fn a_map_with_another_key_begins_anew_and_the_rest_goes_on() {
    let net = TestNet::new();
    let traffic = Traffic::new(&net);
    let world = world(net.pin_dir().to_owned());
    drop(start(&net, &world, Layout::Older, OLD));
    assert_eq!(traffic.arriving(LIMITED[0], 20), BURST);
    assert_eq!(traffic.arriving(LIMITED[1], 20), BURST);
    let directory = net.pin_dir().join(format!("v{OLD}"));
    // Keys of IPv6 in the place of IPv4.
    fs::rename(directory.join("BUCKETS_V6"), directory.join("BUCKETS_V4")).expect("rename");
    let new = start(&net, &world, Layout::Present, OLD + 1);
    assert_eq!(traffic.arriving(LIMITED[0], 20), BURST);
    assert_eq!(packets(&new, Verdict::Pass(PassReason::Conforming)), 3 * BURST);
    assert_eq!(versions(&net), [format!("v{}", OLD + 1)]);
}

/// Limits nobody who is not denied.
fn generous(pin_dir: PathBuf, mode: XdpMode) -> World {
    let mut world = world(pin_dir);
    world.config.mode = mode;
    for rule in &mut world.policy.packet_rules {
        rule.packets = Some(limiter_tests::fixture::burst_of(100_000_000));
    }
    world
}

#[test]
fn no_packet_is_judged_wrongly_while_schemas_change() {
    for mode in [XdpMode::Native, XdpMode::Generic] {
        let net = TestNet::new();
        let world = generous(net.pin_dir().to_owned(), mode);
        let mut running = Some(start(&net, &world, Layout::Older, OLD));
        let traffic = PingPong::new(&net, PORT);
        let stop = AtomicBool::new(false);
        let rounds = thread::scope(|scope| {
            let playing = scope.spawn(|| traffic.play_until(&stop));
            for version in OLD + 1..OLD + 11 {
                drop(running.take());
                running = Some(start(&net, &world, Layout::Present, version));
            }
            stop.store(true, Ordering::Relaxed);
            playing.join().expect("every packet was judged rightly")
        });
        let dataplane = running.expect("the last");
        assert!(rounds > 100, "{rounds} rounds, {mode:?}");
        assert_eq!(packets(&dataplane, Verdict::Drop(DropReason::Denied)), 2 * rounds, "{mode:?}");
        assert_eq!(packets(&dataplane, Verdict::Pass(PassReason::Conforming)), 2 * rounds, "{mode:?}");
    }
}

/// Variables of the process that is killed.
const CHILD_PINS: &str = "LIMITER_TEST_UPGRADE_PINS";
const CHILD_VERSION: &str = "LIMITER_TEST_UPGRADE_VERSION";
const CHILD_LAYOUT: &str = "LIMITER_TEST_UPGRADE_LAYOUT";
const CHILD_MODE: &str = "LIMITER_TEST_UPGRADE_MODE";

/// What a child process runs: an agent's data plane, until it is killed. Of its own accord this test starts nothing.
#[test]
fn child_process() {
    let variable = |name| env::var(name).ok();
    let Some(pin_dir) = variable(CHILD_PINS) else { return };
    let version = variable(CHILD_VERSION).and_then(|version| version.parse().ok()).expect("a version");
    let layout = if variable(CHILD_LAYOUT).is_some() { Layout::Older } else { Layout::Present };
    let mode = if variable(CHILD_MODE).is_some() { XdpMode::Generic } else { XdpMode::Native };
    let world = generous(pin_dir.into(), mode);
    let _dataplane = start_here(&world, layout, version).expect("start");
    loop {
        thread::park();
    }
}

/// An agent in a process of its own.
struct Upgrade(Child);

impl Upgrade {
    fn spawn(net: &TestNet, layout: Layout, version: u32, mode: XdpMode) -> Self {
        let mut child = Command::new(env::current_exe().expect("this program"));
        child.args(["--exact", "child_process", "--nocapture"]).stdin(Stdio::null()).stdout(Stdio::null());
        child.env(CHILD_PINS, net.pin_dir()).env(CHILD_VERSION, version.to_string());
        if layout == Layout::Older {
            child.env(CHILD_LAYOUT, "older");
        }
        if mode == XdpMode::Generic {
            child.env(CHILD_MODE, "generic");
        }
        Self(net.gateway(|| child.spawn().expect("a child")))
    }

    /// `kill -9`.
    fn kill(mut self) {
        self.0.kill().expect("kill");
        self.0.wait().expect("the child ends");
    }
}

impl Drop for Upgrade {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|ended| ended.is_none()) {
            drop(self.0.kill());
            drop(self.0.wait());
        }
    }
}

/// How far an upgrade is, by what it leaves on the way: pins of the newer schema appear, and those of the older one go.
fn progress(net: &TestNet, older: u32) -> usize {
    let (old, new) = (pins(net, older), pins(net, older + 1));
    let has_link = |pins: &BTreeSet<String>| pins.iter().any(|pin| pin.starts_with("link-"));
    if !has_link(&new) {
        return new.len();
    }
    // More than all pins that come before the link.
    1000 + if old.is_empty() { 1000 } else { 100 - old.len() }
}

/// Half of a hundred cycles: `kill -9` somewhere in an upgrade, then the upgrade once more, to its end.
fn cycles(mode: XdpMode) {
    const CYCLES: u32 = 50;
    let net = TestNet::new();
    let world = generous(net.pin_dir().to_owned(), mode);
    let first = start(&net, &world, Layout::Older, OLD);
    let (link, mut programs) = (link_of(program_of(&first)), BTreeSet::from([program_of(&first)]));
    let mut maps = maps_of(program_of(&first));
    let every = pins(&net, OLD);
    assert!(link.is_some());
    drop(first);

    let traffic = PingPong::new(&net, PORT);
    let stop = AtomicBool::new(false);
    let (rounds, last) = thread::scope(|scope| {
        let playing = scope.spawn(|| traffic.play_until(&stop));
        let mut last = None;
        for (cycle, version) in (0..CYCLES).zip(OLD..) {
            drop(last.take());
            // From the first pin to the last, and a few times when everything is done.
            let until_here = match cycle % 10 {
                step @ 0..=6 => 1 + step as usize * 4,
                7 => 1000,
                8 => 1090,
                _ => 2000,
            };
            let child = Upgrade::spawn(&net, Layout::Present, version + 1, mode);
            until("the upgrade is there", PATIENCE, || (progress(&net, version) >= until_here).then_some(()));
            child.kill();
            let (its_programs, its_maps) = everything_pinned(&net);
            programs.extend(its_programs);
            maps.extend(its_maps);
            let dataplane = start(&net, &world, Layout::Present, version + 1);
            let program = program_of(&dataplane);
            assert_eq!(link_of(program), link, "cycle {cycle}: the same link");
            assert_eq!(versions(&net), [format!("v{}", version + 1)], "cycle {cycle}");
            assert_eq!(pins(&net, version + 1), every, "cycle {cycle}");
            programs.insert(program);
            maps.extend(maps_of(program));
            last = Some(dataplane);
        }
        stop.store(true, Ordering::Relaxed);
        (playing.join().expect("every packet was judged rightly"), last.expect("the last"))
    });
    assert!(rounds > u64::from(CYCLES), "{rounds} rounds");
    assert_eq!(packets(&last, Verdict::Drop(DropReason::Denied)), 2 * rounds);
    assert_eq!(packets(&last, Verdict::Pass(PassReason::Conforming)), 2 * rounds);
    let (program, mut in_use) = (program_of(&last), maps_of(program_of(&last)));
    // Some maps are the agent's alone.
    in_use.extend(everything_pinned(&net).1);
    until("of all programs the last is left", PATIENCE, || {
        program_ids().intersection(&programs).eq([&program]).then_some(())
    });
    until("and its maps", PATIENCE, || map_ids().intersection(&maps).all(|map| in_use.contains(map)).then_some(()));
    drop(last);
    net.gateway(|| unpin(net.pin_dir())).expect("unpin");
    until("everything is gone", PATIENCE, || {
        (!program_ids().contains(&program)
            && map_ids().is_disjoint(&maps)
            && !loaded_links().flatten().any(|left| Some(left.id()) == link))
        .then_some(())
    });
    assert!(!net.pin_dir().exists());
}

#[test]
fn fifty_kills_within_an_upgrade_open_no_gap_and_leak_nothing_in_native_mode() {
    cycles(XdpMode::Native);
}

#[test]
fn fifty_kills_within_an_upgrade_open_no_gap_and_leak_nothing_in_generic_mode() {
    cycles(XdpMode::Generic);
}

#[test]
fn the_agent_of_this_build_starts_with_its_own_number() {
    let net = TestNet::new();
    let World { config, policy, tuning } = world(net.pin_dir().to_owned());
    let _dataplane = net.gateway(|| KernelDataplane::start(xdp_object(), config, &policy, tuning)).expect("start");
    assert_eq!(versions(&net), [format!("v{SCHEMA_VERSION}")]);
}

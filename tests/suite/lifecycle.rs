//! Attaching, taking over, reloading and removing, with real packets over veth. Needs root and the XDP object.

use std::{collections::BTreeSet, fs, path::Path, time::Duration};

use aya::{
    maps::loaded_maps,
    programs::{loaded_links, loaded_programs},
};
use limiter_common::{
    budget::BudgetReason,
    rule::EnforcementMode::Enforce,
    schema::SCHEMA_VERSION,
    verdict::{DropReason, PassReason, Verdict},
};
use limiter_tests::{
    eventually::until,
    fixture::{Limited, World},
    ip::{ip, xdp_of},
    netns::{CLIENT_V4, CLIENT_V6, INTERFACE, SECOND_INTERFACE, TestNet, TestPins},
    object::xdp_object,
    traffic::{OTHER_PORT, Traffic},
};
use limiter_user::dataplane::{
    AttachedMode, Dataplane as _, DataplaneConfig, DataplaneError, ErrorKind as Kind, KernelDataplane, LiveSettings,
    OnExit, Protect, Unpinned, XdpMode, unpin,
};

const BURST: u64 = 5;
const PATIENCE: Duration = Duration::from_secs(30);

/// Five packets for each source, in the gateway of `net`.
fn world(net: &TestNet) -> World {
    let burst = [(Limited::Packets, BURST)];
    let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &burst).rule("six", "::/0", Enforce, &burst);
    world.config.interfaces = vec![INTERFACE.to_owned()];
    world.config.pin_dir = net.pin_dir().to_owned();
    world
}

fn try_start(net: &TestNet, world: &World) -> Result<KernelDataplane, DataplaneError> {
    let World { config, policy, tuning } = world.clone();
    net.gateway(|| KernelDataplane::start(xdp_object(), config, &policy, tuning))
}

#[track_caller]
fn start(net: &TestNet, world: &World) -> KernelDataplane {
    try_start(net, world).unwrap_or_else(|error| panic!("start: {error}"))
}

/// As `limiter unpin`, in the gateway's namespace.
fn unpin_in(net: &TestNet) -> Result<Unpinned, DataplaneError> {
    net.gateway(|| unpin(net.pin_dir()))
}

/// What `ip` tells of XDP on an interface of the gateway.
fn xdp(net: &TestNet, interface: &str) -> Option<serde_json::Value> {
    net.gateway(|| xdp_of(interface))
}

fn pins_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn version_dir(net: &TestNet) -> std::path::PathBuf {
    net.pin_dir().join(format!("v{SCHEMA_VERSION}"))
}

#[test]
fn limits_real_packets_of_both_families_in_both_modes() {
    for (mode, attached) in [(XdpMode::Native, AttachedMode::Native), (XdpMode::Generic, AttachedMode::Generic)] {
        let net = TestNet::new();
        let traffic = Traffic::new(&net);
        let mut world = world(&net);
        world.config.mode = mode;
        let dataplane = start(&net, &world);
        let interfaces = dataplane.interfaces().expect("interfaces");
        assert_eq!((interfaces.len(), interfaces[0].mode), (1, attached));
        assert_eq!(&*interfaces[0].name, INTERFACE);
        for source in CLIENT_V4.into_iter().chain(CLIENT_V6) {
            assert_eq!(traffic.arriving(source, 20), BURST, "{mode:?} {source}");
        }
        let dropped: u64 = dataplane
            .counters()
            .expect("counters")
            .iter()
            .filter(|row| row.verdict == Verdict::Drop(DropReason::RateLimitedPackets))
            .map(|row| row.counter.packets)
            .sum();
        assert_eq!(dropped, 4 * (20 - BURST), "{mode:?}");
    }
}

#[test]
fn auto_uses_native_mode_where_there_is_one() {
    let net = TestNet::new();
    let dataplane = start(&net, &world(&net));
    assert_eq!(dataplane.interfaces().expect("interfaces")[0].mode, AttachedMode::Native);
}

#[test]
fn auto_falls_back_to_generic_mode() {
    let net = TestNet::new();
    let mut world = world(&net);
    // Loopback has no native XDP.
    world.config.interfaces = vec!["lo".to_owned()];
    let dataplane = start(&net, &world);
    assert_eq!(dataplane.interfaces().expect("interfaces")[0].mode, AttachedMode::Generic);
    drop(dataplane);
    unpin_in(&net).expect("unpin");
    world.config.mode = XdpMode::Native;
    let error = try_start(&net, &world).expect_err("no native mode");
    assert!(matches!(error, DataplaneError::NotSupported { .. }), "{error}");
    assert!(error.to_string().contains("attach to lo in native mode"), "{error}");
    assert_eq!(error.kind(), Kind::Unavailable);
    assert!(!net.pin_dir().exists());
}

#[test]
fn other_ports_pass_while_the_source_is_blocked() {
    let net = TestNet::new();
    let dataplane = start(&net, &world(&net));
    let source = CLIENT_V4[0];
    dataplane.push_budget(source, Duration::from_secs(3600), BudgetReason::AddressOverLimit, "per-ip").expect("push");
    let traffic = Traffic::new(&net);
    assert_eq!(traffic.arriving(source, 20), 0);
    traffic.send(source, OTHER_PORT, b"ssh");
    assert_eq!(traffic.other_receives(), 3);
    assert!(dataplane.remove_budget(source).expect("remove"));
    assert_eq!(traffic.arriving(source, 20), BURST);
}

#[test]
fn a_budget_ends_at_its_deadline_without_the_agent() {
    let net = TestNet::new();
    let traffic = Traffic::new(&net);
    let dataplane = start(&net, &world(&net));
    let source = CLIENT_V6[0];
    dataplane.push_budget(source, Duration::from_millis(300), BudgetReason::KeepsSending, "per-ip").expect("push");
    drop(dataplane);
    assert_eq!(traffic.arriving(source, 1), 0);
    until("packets pass again", PATIENCE, || (traffic.arriving(source, 1) == 1).then_some(()));
}

#[test]
fn a_dead_agent_leaves_enforcement_and_a_new_one_takes_over_without_refill() {
    let net = TestNet::new();
    let traffic = Traffic::new(&net);
    let world = world(&net);
    let source = CLIENT_V4[0];
    let first = start(&net, &world);
    assert_eq!(traffic.arriving(source, BURST - 2), BURST - 2);
    first.block("198.51.100.0/24".parse().expect("a prefix"), None).expect("block");
    first.push_budget(CLIENT_V6[1], Duration::from_secs(3600), BudgetReason::KeepsSending, "per-ip").expect("push");
    let link = xdp(&net, INTERFACE).expect("attached");
    let program = first.interfaces().expect("interfaces")[0].program_id;
    drop(first);
    assert_eq!(xdp(&net, INTERFACE), Some(link), "nothing has changed");
    assert_eq!(traffic.arriving(source, 1), 1, "one of two is left");

    let second = start(&net, &world);
    assert_ne!(second.interfaces().expect("interfaces")[0].program_id, program, "a new program");
    assert_eq!(traffic.arriving(source, 20), 1, "no refill");
    assert_eq!(traffic.arriving(CLIENT_V6[1], 1), 0, "the budget still holds");
    assert_eq!(second.budgets().len(), 1);
    assert_eq!(&**second.budgets()[0].rule.as_ref().expect("a rule"), "per-ip");
    let operators: Vec<_> = second.acl().into_iter().map(|entry| entry.prefix.to_string()).collect();
    assert_eq!(operators, ["198.51.100.0/24"]);
    let counters = second.counters().expect("counters");
    let passed = counters.iter().find(|row| row.verdict == Verdict::Pass(PassReason::Conforming)).expect("passed");
    assert_eq!((passed.rule.as_deref(), passed.counter.packets), (Some("four"), BURST), "counters go on");
}

#[test]
fn a_restart_keeps_the_link() {
    let net = TestNet::new();
    let world = world(&net);
    let link_id = |dataplane: &KernelDataplane| {
        let program = dataplane.interfaces().expect("interfaces")[0].program_id;
        loaded_links().flatten().find(|link| link.program_id() == program).expect("a link of this program").id()
    };
    let first = link_id(&start(&net, &world));
    for _ in 0..5 {
        assert_eq!(link_id(&start(&net, &world)), first, "the program was exchanged behind the link");
    }
}

#[test]
fn a_reload_acts_on_the_next_packet_and_keeps_state() {
    let net = TestNet::new();
    let traffic = Traffic::new(&net);
    let mut world = world(&net);
    let dataplane = start(&net, &world);
    let source = CLIENT_V4[0];
    assert_eq!(traffic.arriving(source, 20), BURST);
    dataplane.block("203.0.113.0/24".parse().expect("a prefix"), Some(Duration::from_secs(3600))).expect("block");

    world.policy.packet_rules[0].packets = Some(limiter_tests::fixture::burst_of(BURST + 3));
    dataplane.reload(&world.policy).expect("reload");
    assert_eq!(traffic.arriving(source, 20), 3, "the new limit, less what was used");
    assert_eq!(dataplane.acl().len(), 1, "operators' entries stay");

    let mut broken = world.policy.clone();
    broken.packet_rules.push(broken.packet_rules[0].clone());
    let program = xdp(&net, INTERFACE);
    let error = dataplane.reload(&broken).expect_err("two rules of one prefix");
    assert_eq!(error.kind(), Kind::Configuration);
    assert_eq!(xdp(&net, INTERFACE), program, "a policy that fails changes nothing");
    assert_eq!(traffic.arriving(source, 5), 0);

    world.policy.allow.push("10.203.0.0/24".parse().expect("a prefix"));
    dataplane.reload(&world.policy).expect("reload");
    assert_eq!(traffic.arriving(source, 20), 20);
    let covered = dataplane.block("10.203.0.2/32".parse().expect("a prefix"), None).expect_err("covered");
    assert!(covered.to_string().contains("allow prefix 10.203.0.0/24"), "{covered}");
}

#[test]
fn operators_block_and_unblock() {
    let prefix = "10.203.0.2/32".parse().expect("a prefix");
    let source = CLIENT_V4[0];
    // Lists of the policy are known to the program, and what operators add is not among them.
    for lists in [false, true] {
        let net = TestNet::new();
        let traffic = Traffic::new(&net);
        let mut world = world(&net);
        if lists {
            world = world.allow("198.51.100.0/24").deny("203.0.113.0/24");
        }
        let dataplane = start(&net, &world);
        dataplane.block(prefix, None).expect("block");
        assert_eq!(traffic.arriving(source, 3), 0);
        dataplane.unblock(prefix).expect("unblock");
        assert_eq!(traffic.arriving(source, 3), 3);
        assert!(matches!(dataplane.unblock(prefix), Err(DataplaneError::Absent { .. })));
        dataplane.allow(prefix, None).expect("allow");
        assert_eq!(traffic.arriving(source, 20), 20);
        dataplane.unallow(prefix).expect("unallow");
        assert_eq!(traffic.arriving(source, 20), BURST - 3);
        dataplane.block(prefix, Some(Duration::ZERO)).expect("block");
        assert_eq!(dataplane.expire().expect("expire"), 1);
        assert_eq!(dataplane.expire().expect("expire"), 0);
    }
}

#[test]
fn unpin_removes_everything() {
    let net = TestNet::new();
    let traffic = Traffic::new(&net);
    let world = world(&net);
    drop(start(&net, &world));
    assert!(xdp(&net, INTERFACE).is_some());
    let unpinned = unpin_in(&net).expect("unpin");
    assert_eq!((unpinned.links, unpinned.still_attached.len()), (1, 0));
    assert_eq!(xdp(&net, INTERFACE), None);
    assert!(!net.pin_dir().exists());
    assert_eq!(traffic.arriving(CLIENT_V4[0], 20), 20);
    assert_eq!(unpin_in(&net).expect("again").links, 0);
}

#[test]
fn unpin_detaches_while_an_agent_runs() {
    let net = TestNet::new();
    let dataplane = start(&net, &world(&net));
    unpin_in(&net).expect("unpin");
    assert_eq!(xdp(&net, INTERFACE), None);
    assert_eq!(dataplane.interfaces().expect("interfaces"), []);
}

#[test]
fn an_agent_that_detaches_at_exit_keeps_the_maps() {
    let net = TestNet::new();
    let traffic = Traffic::new(&net);
    let mut world = world(&net);
    world.config.on_exit = OnExit::Detach;
    let dataplane = start(&net, &world);
    assert_eq!(traffic.arriving(CLIENT_V4[0], 20), BURST);
    net.gateway(|| dataplane.stop()).expect("stop");
    assert_eq!(xdp(&net, INTERFACE), None);
    drop(dataplane);
    let _dataplane = start(&net, &world);
    assert_eq!(traffic.arriving(CLIENT_V4[0], 20), 0, "no refill");
}

#[test]
fn a_missing_interface_is_named_and_leaves_nothing() {
    let net = TestNet::new();
    let mut world = world(&net);
    world.config.interfaces.push("nope0".to_owned());
    let error = try_start(&net, &world).expect_err("no such interface");
    assert_eq!(error.to_string(), "attach to nope0: there is no such interface; see \"ip link\"");
    assert_eq!(error.kind(), Kind::Configuration);
    assert_eq!(xdp(&net, INTERFACE), None);
    assert!(!net.pin_dir().exists());
}

#[test]
fn another_program_is_named_and_nothing_stays_attached() {
    let net = TestNet::new();
    let foreign = TestPins::new();
    let mut other = world(&net);
    other.config.interfaces = vec![SECOND_INTERFACE.to_owned()];
    other.config.pin_dir = foreign.path().to_owned();
    let other = start(&net, &other);
    let id = other.interfaces().expect("interfaces")[0].program_id;

    let mut world = world(&net);
    world.config.interfaces.push(SECOND_INTERFACE.to_owned());
    let error = try_start(&net, &world).expect_err("busy");
    assert!(matches!(error, DataplaneError::Busy { .. }), "{error:?}");
    let link = loaded_links().flatten().find(|link| link.program_id() == id).expect("its link").id();
    let expected = format!(
        "attach to {SECOND_INTERFACE}: another XDP program (\"limiter\", id {id}) is attached there in native mode by a BPF \
         link (id {link}); stop the agent that it belongs to, if one runs, and run \"limiter unpin\" with the xdp.pin_dir \
         of its configuration, or leave the interface out of xdp.interfaces"
    );
    assert_eq!(error.to_string(), expected);
    assert_eq!(error.kind(), Kind::Unavailable);
    assert_eq!(xdp(&net, INTERFACE), None, "the first interface is detached again");
    assert!(!net.pin_dir().exists());
}

#[test]
fn a_program_that_was_attached_without_a_link_is_named_with_its_remedy() {
    for (kind, attached) in [("xdpdrv", "native"), ("xdpgeneric", "generic")] {
        for mode in [XdpMode::Auto, XdpMode::Native, XdpMode::Generic] {
            let net = TestNet::new();
            let foreign = TestPins::new();
            let mut other = world(&net);
            other.config.interfaces = Vec::new();
            other.config.pin_dir = foreign.path().to_owned();
            drop(start(&net, &other));
            let pin = foreign.path().join(format!("v{SCHEMA_VERSION}/program"));
            net.gateway(|| ip(&format!("link set dev {SECOND_INTERFACE} {kind} pinned {}", pin.display())));
            let before = xdp(&net, SECOND_INTERFACE).expect("attached");
            let id = &before["prog"]["id"];

            let mut world = world(&net);
            world.config.interfaces.push(SECOND_INTERFACE.to_owned());
            world.config.mode = mode;
            let error = try_start(&net, &world).expect_err("busy");
            let expected = format!(
                "attach to {SECOND_INTERFACE}: another XDP program (\"limiter\", id {id}) is attached there in {attached} mode; \
                 remove it with \"ip link set dev {SECOND_INTERFACE} {kind} off\", \
                 or leave the interface out of xdp.interfaces"
            );
            assert_eq!((error.to_string(), error.kind()), (expected, Kind::Unavailable), "{mode:?}");
            assert_eq!(xdp(&net, SECOND_INTERFACE), Some(before), "it stays");
            assert_eq!(xdp(&net, INTERFACE), None);
            assert!(!net.pin_dir().exists());

            net.gateway(|| ip(&format!("link set dev {SECOND_INTERFACE} {kind} off")));
            drop(start(&net, &world));
        }
    }
}

#[test]
fn a_second_agent_does_not_take_the_interfaces_of_the_first() {
    let net = TestNet::new();
    let mut world = world(&net);
    let first = start(&net, &world);
    world.config.interfaces = vec![SECOND_INTERFACE.to_owned()];
    let error = try_start(&net, &world).expect_err("in use");
    assert!(matches!(error, DataplaneError::InUse { .. }), "{error:?}");
    assert_eq!(error.kind(), Kind::Unavailable);
    assert!(xdp(&net, INTERFACE).is_some() && xdp(&net, SECOND_INTERFACE).is_none());
    drop(first);
    let _second = start(&net, &world);
}

/// A restart with another policy that fails on the second of two interfaces.
struct FailingRestart {
    name: &'static str,
    interfaces: [&'static str; 2],
    mode: XdpMode,
    /// After the first start, which had the first interface, or both.
    had_both: bool,
    prepare: fn(&TestNet, &TestPins),
}

#[test]
fn a_restart_that_fails_leaves_the_program_that_ran() {
    for case in [
        FailingRestart {
            name: "another program is attached to a new interface",
            interfaces: [INTERFACE, SECOND_INTERFACE],
            mode: XdpMode::Auto,
            had_both: false,
            prepare: |net, foreign| {
                let mut other = world(net);
                other.config.interfaces = vec![SECOND_INTERFACE.to_owned()];
                other.config.pin_dir = foreign.path().to_owned();
                drop(start(net, &other));
            },
        },
        FailingRestart {
            name: "a new interface does not exist",
            interfaces: [INTERFACE, "nope0"],
            mode: XdpMode::Auto,
            had_both: false,
            prepare: |_, _| {},
        },
        FailingRestart {
            name: "an interface does not have the new mode",
            interfaces: [INTERFACE, "lo"],
            mode: XdpMode::Native,
            had_both: true,
            prepare: |_, _| {},
        },
        FailingRestart {
            name: "a link cannot be exchanged after another one was",
            interfaces: [INTERFACE, SECOND_INTERFACE],
            mode: XdpMode::Auto,
            had_both: true,
            prepare: |net, _| {
                let directory = version_dir(net);
                let link = directory.join(format!("link-native-{SECOND_INTERFACE}"));
                fs::rename(&link, directory.join("kept")).expect("rename");
                fs::rename(directory.join("PORTS"), link).expect("rename");
            },
        },
    ] {
        let (net, foreign) = (TestNet::new(), TestPins::new());
        let traffic = Traffic::new(&net);
        let mut world = world(&net);
        world.config.interfaces = case.interfaces.map(str::to_owned).to_vec();
        world.config.interfaces.truncate(if case.had_both { 2 } else { 1 });
        drop(start(&net, &world));
        (case.prepare)(&net, &foreign);
        let before = case.interfaces.map(|interface| xdp(&net, interface));
        let pins = pins_in(&version_dir(&net));

        world.config.interfaces = case.interfaces.map(str::to_owned).to_vec();
        world.config.mode = case.mode;
        world.policy.deny.push("0.0.0.0/0".parse().expect("a prefix"));
        try_start(&net, &world).expect_err(case.name);
        assert_eq!(case.interfaces.map(|interface| xdp(&net, interface)), before, "{}", case.name);
        assert_eq!(pins_in(&version_dir(&net)), pins, "{}", case.name);
        assert_eq!(traffic.arriving(CLIENT_V4[0], 20), BURST, "{}: by the earlier policy", case.name);
    }
}

#[test]
fn a_restart_waits_for_an_interface_that_it_had() {
    let net = TestNet::new();
    let mut world = world(&net);
    world.config.interfaces = vec![INTERFACE.to_owned(), SECOND_INTERFACE.to_owned()];
    drop(start(&net, &world));
    net.gateway(|| ip(&format!("link delete {SECOND_INTERFACE}")));
    let dataplane = start(&net, &world);
    let missing = dataplane.missing();
    assert_eq!((missing.len(), &*missing[0].name), (1, SECOND_INTERFACE));
    assert_eq!(dataplane.interfaces().expect("interfaces").len(), 1);
    dataplane.reload(&world.policy).expect("a reload does not need it");
    net.gateway(|| ip(&format!("link add {SECOND_INTERFACE} type veth peer name cl1")));
    net.gateway(|| dataplane.mend()).expect("mend");
    assert_eq!(dataplane.missing(), []);
    assert!(xdp(&net, SECOND_INTERFACE).is_some());
}

#[test]
fn what_was_unpinned_is_not_attached_again() {
    let net = TestNet::new();
    let dataplane = start(&net, &world(&net));
    unpin_in(&net).expect("unpin");
    net.gateway(|| dataplane.mend()).expect("mend");
    assert_eq!(xdp(&net, INTERFACE), None);
}

#[test]
fn an_interface_with_another_name_stays_limited() {
    let net = TestNet::new();
    let dataplane = start(&net, &world(&net));
    let before = xdp(&net, INTERFACE);
    net.gateway(|| ip(&format!("link set {INTERFACE} down")));
    net.gateway(|| ip(&format!("link set {INTERFACE} name renamed0")));
    net.gateway(|| dataplane.mend()).expect("mend");
    assert_eq!(dataplane.missing(), []);
    assert_eq!(xdp(&net, "renamed0"), before);
}

/// Gives an interface of the gateway another name.
fn rename(net: &TestNet, from: &str, to: &str) {
    net.gateway(|| ip(&format!("link set {from} down")));
    net.gateway(|| ip(&format!("link set {from} name {to}")));
    net.gateway(|| ip(&format!("link set {to} up")));
}

fn link_ids(net: &TestNet) -> BTreeSet<u32> {
    let programs: Vec<_> = [INTERFACE, SECOND_INTERFACE, "wan9"]
        .into_iter()
        .filter_map(|interface| xdp(net, interface)?["prog"]["id"].as_u64())
        .collect();
    let links = loaded_links().flatten().filter(|link| programs.contains(&u64::from(link.program_id())));
    links.map(|link| link.id()).collect()
}

/// What becomes of the interfaces, and what the configuration then names.
struct Renamed {
    name: &'static str,
    had: &'static [&'static str],
    change: fn(&TestNet),
    wanted: &'static [&'static str],
    /// Whether the links from before are those afterwards.
    keeps_links: bool,
    without: &'static [&'static str],
}

#[test]
fn links_follow_their_interfaces_and_not_the_names() {
    let new_gw0 = |net: &TestNet| {
        rename(net, INTERFACE, "wan9");
        net.gateway(|| ip(&format!("link add {INTERFACE} type veth peer name cl9")));
    };
    let swap = |net: &TestNet| {
        rename(net, INTERFACE, "wan9");
        rename(net, SECOND_INTERFACE, INTERFACE);
        rename(net, "wan9", SECOND_INTERFACE);
    };
    for case in [
        Renamed {
            name: "the configuration follows",
            had: &[INTERFACE],
            change: |net| rename(net, INTERFACE, "wan9"),
            wanted: &["wan9"],
            keeps_links: true,
            without: &[],
        },
        Renamed {
            name: "another interface has got the name",
            had: &[INTERFACE],
            change: new_gw0,
            wanted: &[INTERFACE],
            keeps_links: false,
            without: &["wan9"],
        },
        Renamed {
            name: "another interface has got the name, and both are wanted",
            had: &[INTERFACE],
            change: new_gw0,
            wanted: &[INTERFACE, "wan9"],
            keeps_links: false,
            without: &[],
        },
        Renamed {
            name: "names are swapped",
            had: &[INTERFACE, SECOND_INTERFACE],
            change: swap,
            wanted: &[INTERFACE, SECOND_INTERFACE],
            keeps_links: true,
            without: &[],
        },
        Renamed {
            name: "names are swapped, and one is not wanted any more",
            had: &[INTERFACE, SECOND_INTERFACE],
            change: swap,
            wanted: &[INTERFACE],
            keeps_links: false,
            without: &[SECOND_INTERFACE],
        },
    ] {
        for by_reload in [false, true] {
            let name = format!("{}, by_reload {by_reload}", case.name);
            let net = TestNet::new();
            let mut world = world(&net);
            world.config.interfaces = case.had.iter().map(|name| (*name).to_owned()).collect();
            let mut dataplane = start(&net, &world);
            let links = link_ids(&net);
            (case.change)(&net);
            world.config.interfaces = case.wanted.iter().map(|name| (*name).to_owned()).collect();
            if by_reload {
                let settings = LiveSettings {
                    interfaces: world.config.interfaces.clone(),
                    protect: world.config.protect.clone(),
                    drop_malformed: world.config.drop_malformed,
                    on_exit: world.config.on_exit,
                };
                net.gateway(|| dataplane.reconfigure(&settings, &world.policy)).expect(&name);
            } else {
                drop(dataplane);
                dataplane = try_start(&net, &world).unwrap_or_else(|error| panic!("{name}: {error}"));
            }
            let listed = net.gateway(|| dataplane.interfaces()).expect("interfaces");
            assert_eq!(listed.iter().map(|interface| &*interface.name).collect::<Vec<_>>(), case.wanted, "{name}");
            assert_eq!(dataplane.missing(), [], "{name}");
            for interface in case.wanted {
                let running = xdp(&net, interface).unwrap_or_else(|| panic!("{name}: nothing on {interface}"));
                assert_eq!(running["prog"]["id"], listed[0].program_id, "{name}: {interface}");
            }
            for interface in case.without {
                until(&name, PATIENCE, || xdp(&net, interface).is_none().then_some(()));
            }
            assert!(!case.keeps_links || link_ids(&net) == links, "{name}: {links:?}");
            let mut pins = pins_in(&version_dir(&net));
            pins.retain(|pin| pin.starts_with("link-"));
            let mut expected: Vec<_> = case.wanted.iter().map(|name| format!("link-native-{name}")).collect();
            expected.sort();
            assert_eq!(pins, expected, "{name}");
            // By the pins that are there now.
            net.gateway(|| dataplane.mend()).expect("mend");
            drop(dataplane);
            let links = link_ids(&net);
            drop(start(&net, &world));
            assert_eq!(link_ids(&net), links, "{name}");
        }
    }
}

#[test]
fn a_failed_restart_gives_links_their_names_back() {
    let (net, foreign) = (TestNet::new(), TestPins::new());
    let mut world = world(&net);
    drop(start(&net, &world));
    let mut other = world.clone();
    other.config.interfaces = vec![SECOND_INTERFACE.to_owned()];
    other.config.pin_dir = foreign.path().to_owned();
    drop(start(&net, &other));
    rename(&net, INTERFACE, "wan9");
    net.gateway(|| ip(&format!("link add {INTERFACE} type veth peer name cl9")));
    let before = (xdp(&net, "wan9"), pins_in(&version_dir(&net)));
    world.config.interfaces = vec![INTERFACE.to_owned(), "wan9".to_owned(), SECOND_INTERFACE.to_owned()];
    let error = try_start(&net, &world).expect_err("busy");
    assert!(matches!(error, DataplaneError::Busy { .. }), "{error}");
    assert_eq!((xdp(&net, "wan9"), pins_in(&version_dir(&net))), before);
    assert_eq!(xdp(&net, INTERFACE), None);
}

#[test]
fn an_interface_with_the_name_of_a_limited_one_is_limited_instead() {
    let net = TestNet::new();
    let dataplane = start(&net, &world(&net));
    rename(&net, INTERFACE, "wan9");
    net.gateway(|| dataplane.mend()).expect("mend");
    assert!(xdp(&net, "wan9").is_some(), "nobody else has the name");
    net.gateway(|| ip(&format!("link add {INTERFACE} type veth peer name cl9")));
    net.gateway(|| dataplane.mend()).expect("mend");
    assert_eq!(dataplane.missing(), []);
    assert!(xdp(&net, INTERFACE).is_some());
    // The kernel lets go of a link a little after its pin.
    until("nothing is on wan9, which no configuration names", PATIENCE, || xdp(&net, "wan9").is_none().then_some(()));
}

#[test]
fn an_interface_without_ethernet_headers_is_refused_and_nothing_changes() {
    let net = TestNet::new();
    let mut world = world(&net);
    net.gateway(|| ip("tuntap add dev tun9 mode tun"));
    let says =
        "attach to tun9: its frames have no Ethernet header (link type 65534: no header, as of tun and WireGuard)";
    for mode in [XdpMode::Auto, XdpMode::Native, XdpMode::Generic] {
        world.config.mode = mode;
        world.config.interfaces = vec![INTERFACE.to_owned(), "tun9".to_owned()];
        let error = try_start(&net, &world).expect_err("no Ethernet");
        assert!(error.to_string().starts_with(says), "{error}");
        assert_eq!(error.kind(), Kind::Configuration);
        assert_eq!([INTERFACE, "tun9"].map(|interface| xdp(&net, interface)), [None, None]);
        assert!(!net.pin_dir().exists());
    }
    // A tap has Ethernet frames.
    net.gateway(|| ip("tuntap add dev tap9 mode tap"));
    world.config.mode = XdpMode::Auto;
    world.config.interfaces = vec!["tap9".to_owned()];
    let dataplane = start(&net, &world);
    assert!(xdp(&net, "tap9").is_some());
    // One that is back is another one.
    net.gateway(|| ip("link delete tap9"));
    net.gateway(|| dataplane.mend()).expect("mend");
    net.gateway(|| ip("tuntap add dev tap9 mode tun"));
    net.gateway(|| dataplane.mend()).expect("mend");
    let missing = dataplane.missing();
    assert!(missing[0].reason.contains("no Ethernet header"), "{missing:?}");
    assert_eq!(xdp(&net, "tap9"), None);
}

#[test]
fn a_restart_that_may_uses_native_mode_again() {
    let net = TestNet::new();
    let mut world = world(&net);
    // Loopback has no native mode, and keeps its link.
    world.config.interfaces = vec![INTERFACE.to_owned(), "lo".to_owned()];
    world.config.mode = XdpMode::Generic;
    drop(start(&net, &world));
    world.config.mode = XdpMode::Auto;
    for _ in 0..2 {
        let interfaces = start(&net, &world).interfaces().expect("interfaces");
        let modes: Vec<_> = interfaces.iter().map(|interface| interface.mode).collect();
        assert_eq!(modes, [AttachedMode::Native, AttachedMode::Generic]);
    }
}

#[test]
fn interfaces_are_added_and_removed_by_a_restart() {
    let net = TestNet::new();
    let mut world = world(&net);
    world.config.interfaces = vec![INTERFACE.to_owned(), SECOND_INTERFACE.to_owned()];
    let dataplane = start(&net, &world);
    assert_eq!(dataplane.interfaces().expect("interfaces").len(), 2);
    assert!(xdp(&net, SECOND_INTERFACE).is_some());
    drop(dataplane);
    world.config.interfaces.pop();
    let _dataplane = start(&net, &world);
    assert!(xdp(&net, INTERFACE).is_some());
    assert_eq!(xdp(&net, SECOND_INTERFACE), None);
}

#[test]
fn the_mode_can_be_changed_by_a_restart() {
    let net = TestNet::new();
    let mut world = world(&net);
    drop(start(&net, &world));
    world.config.mode = XdpMode::Generic;
    let dataplane = start(&net, &world);
    assert_eq!(dataplane.interfaces().expect("interfaces")[0].mode, AttachedMode::Generic);
    assert_eq!(pins_in(&version_dir(&net)).iter().filter(|pin| pin.starts_with("link-")).count(), 1);
}

#[test]
fn pins_of_a_newer_schema_are_refused_and_can_be_removed() {
    let net = TestNet::new();
    let world = world(&net);
    drop(start(&net, &world));
    let old = net.pin_dir().join("v4711");
    fs::rename(version_dir(&net), &old).expect("rename");
    let error = try_start(&net, &world).expect_err("another schema").to_string();
    assert!(
        error.contains(&format!("use schema 4711, this agent needs {SCHEMA_VERSION}: run \"limiter unpin\"")),
        "{error}"
    );
    assert!(xdp(&net, INTERFACE).is_some(), "what was pinned goes on");
    assert_eq!(unpin_in(&net).expect("unpin").links, 1);
    assert_eq!(xdp(&net, INTERFACE), None);
}

#[test]
fn a_pinned_map_of_another_size_is_refused() {
    let net = TestNet::new();
    let world = world(&net);
    drop(start(&net, &world));
    let directory = version_dir(&net);
    // Array maps both, of values of other sizes.
    fs::rename(directory.join("AGGREGATES"), directory.join("CREATION")).expect("rename");
    let error = try_start(&net, &world).expect_err("another size");
    assert!(matches!(error, DataplaneError::MapMismatch { map: "CREATION", .. }), "{error:?}");
    assert!(error.to_string().contains("pinned map CREATION has value size 40, this agent needs 8"), "{error}");
}

#[test]
fn buckets_of_another_capacity_are_kept() {
    let net = TestNet::new();
    let traffic = Traffic::new(&net);
    let mut world = world(&net);
    drop(start(&net, &world));
    assert_eq!(traffic.arriving(CLIENT_V4[0], 20), BURST);
    world.config.max_sources = 2048;
    let dataplane = start(&net, &world);
    assert_eq!(traffic.arriving(CLIENT_V4[0], 20), 0);
    let usage = dataplane.map_usage().expect("usage");
    let buckets = usage.iter().find(|usage| usage.map == "BUCKETS_V4").expect("BUCKETS_V4");
    assert_eq!((buckets.entries, buckets.capacity), (1, 1024));
}

#[test]
fn many_restarts_leak_no_pin_program_or_map() {
    let net = TestNet::new();
    let world = world(&net);
    drop(start(&net, &world));
    let pins = pins_in(&version_dir(&net));
    assert!(!pins.iter().any(|pin| pin.ends_with("-next")), "{pins:?}");
    let mut programs = Vec::new();
    let mut maps = BTreeSet::new();
    for _ in 0..20 {
        let dataplane = start(&net, &world);
        let id = dataplane.interfaces().expect("interfaces")[0].program_id;
        programs.push(id);
        maps.extend(maps_of(id));
        drop(dataplane);
        assert_eq!(pins_in(&version_dir(&net)), pins);
    }
    let last = programs.pop().expect("twenty programs");
    // The kernel frees them in a worker of its own.
    until("only the last program is there", PATIENCE, || programs.iter().all(|id| !is_program(*id)).then_some(()));
    assert!(is_program(last));
    unpin_in(&net).expect("unpin");
    until("the last program is gone", PATIENCE, || (!is_program(last)).then_some(()));
    until("its maps are gone", PATIENCE, || {
        (!loaded_maps().flatten().any(|map| maps.contains(&map.id()))).then_some(())
    });
}

fn is_program(id: u32) -> bool {
    loaded_programs().flatten().any(|program| program.id() == id)
}

fn maps_of(program: u32) -> Vec<u32> {
    let program = loaded_programs().flatten().find(|loaded| loaded.id() == program).expect("a program");
    let maps = program.map_ids().expect("maps").expect("a kernel that tells them");
    assert!(maps.len() > 10, "{maps:?}");
    maps
}

#[test]
fn folders_above_the_pins_are_made_and_a_start_that_fails_removes_them() {
    let net = TestNet::new();
    let mut world = world(&net);
    world.config.pin_dir = net.pin_dir().join("of/us");
    let interfaces = std::mem::replace(&mut world.config.interfaces, vec!["nosuch0".to_owned()]);
    assert!(matches!(try_start(&net, &world), Err(DataplaneError::NoSuchInterface { .. })));
    assert!(!net.pin_dir().exists(), "nothing stays");
    world.config.interfaces = interfaces;
    drop(start(&net, &world));
    assert!(xdp(&net, INTERFACE).is_some());
    let unpinned = net.gateway(|| unpin(&world.config.pin_dir)).expect("unpin");
    assert_eq!(unpinned.links, 1);
    // The folders above are whoever's they are.
    fs::remove_dir(net.pin_dir().join("of")).expect("an empty folder");
}

#[test]
fn a_pin_directory_elsewhere_is_refused() {
    let net = TestNet::new();
    let mut world = world(&net);
    world.config.pin_dir = "/tmp/limiter-test-no-bpffs".into();
    let error = try_start(&net, &world).expect_err("not a BPF file system");
    assert!(matches!(error, DataplaneError::NoBpffs { .. }), "{error}");
    assert!(error.to_string().contains("mount -t bpf"), "{error}");
    assert!(!world.config.pin_dir.exists());
}

#[test]
fn everything_can_be_protected() {
    let net = TestNet::new();
    let mut world = world(&net);
    world.config = DataplaneConfig { protect: Protect::All, ..world.config };
    let _dataplane = start(&net, &world);
    let traffic = Traffic::new(&net);
    for _ in 0..20 {
        traffic.send(CLIENT_V6[0], OTHER_PORT, b"packet");
    }
    for _ in 0..BURST {
        traffic.other_receives();
    }
    traffic.send(CLIENT_V4[0], OTHER_PORT, b"a marker");
    assert_eq!(traffic.other_receives(), b"a marker".len(), "the next that arrives is not one of them");
}

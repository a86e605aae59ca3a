//! `limiter doctor` on hosts that are well, and on hosts that each have something wrong.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Output,
};

use aya::maps::MapData;
use limiter_tests::{
    agent::{Setup, exists},
    fixture::World,
    ip::{ip, xdp_of},
    netns::{INTERFACE, SECOND_INTERFACE, TestNet, TestPins},
    object::xdp_object,
    redis_server::RedisServer,
};
use limiter_user::{
    dataplane::{Dataplane as _, KernelDataplane},
    doctor::memory::shared_map_bytes,
};
use serde::Deserialize;

const RULE: &str = "[[packet_rules]]\nid = \"p\"\ncidr = \"0.0.0.0/0\"\npackets = { rate = \"10/s\", burst = 5 }\n";
const NOBODY: u32 = 65534;

/// The shape that scripts rely on: a field more or less is an error.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Finding {
    check: String,
    status: String,
    found: String,
    why: String,
    remedy: Option<String>,
}

#[derive(Debug)]
struct Report {
    exit: Option<i32>,
    findings: Vec<Finding>,
}

impl Report {
    fn new(output: &Output) -> Self {
        let findings = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        Self { exit: output.status.code(), findings }
    }

    fn of(&self, check: &str) -> &Finding {
        self.findings.iter().find(|finding| finding.check == check).unwrap_or_else(|| panic!("no {check}: {self:?}"))
    }

    /// Checks that are not well.
    fn unwell(&self) -> Vec<&str> {
        let unwell = self.findings.iter().filter(|finding| finding.status != "ok");
        unwell.map(|finding| finding.check.as_str()).collect()
    }
}

fn packets(interfaces: &[&str], pin_dir: &Path) -> String {
    format!(
        "[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"secret\"\n\
         [xdp]\ninterfaces = {interfaces:?}\npin_dir = \"{}\"\nmax_sources = 1024\n",
        pin_dir.display()
    )
}

fn examine(net: &TestNet, setup: &Setup) -> Report {
    Report::new(&net.gateway(|| setup.run(&["doctor", "--json"])))
}

/// A server that is reached from every network namespace.
async fn redis(arguments: &[&str]) -> (RedisServer, tempfile::TempDir, PathBuf) {
    let folder = tempfile::TempDir::new().expect("a folder");
    let socket = folder.path().join("redis.sock");
    let mut all = vec!["--unixsocket", socket.to_str().expect("a path")];
    all.extend(arguments);
    let server = RedisServer::start_with(&all).await;
    (server, folder, socket)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_good_host_is_all_ok_and_is_not_changed() {
    let net = TestNet::new();
    let (server, _folder, socket) = redis(&[]).await;
    // On a machine that is busy with other tests, an answer takes its time.
    let store = format!(
        "[store]\nkind = \"redis\"\n[store.redis]\nurls = [\"unix://{}\"]\ntimeout = \"1s\"\n",
        socket.display()
    );
    let setup = Setup::new(&(packets(&[INTERFACE, SECOND_INTERFACE], net.pin_dir()) + &store), RULE);
    let report = examine(&net, &setup);
    assert_eq!((report.exit, report.unwell()), (Some(0), Vec::new()), "{report:#?}");
    let mut counts = BTreeMap::new();
    for finding in &report.findings {
        assert!(!finding.why.is_empty() && finding.remedy.is_none(), "{finding:?}");
        *counts.entry(finding.check.as_str()).or_insert(0) += 1;
    }
    let once = [
        "api",
        "bpffs",
        "bpffs.schema",
        "bpffs.writable",
        "capabilities",
        "capabilities.user_namespace",
        "config",
        "config.key_file",
        "kernel.btf",
        "kernel.jit",
        "kernel.program",
        "kernel.version",
        "memory",
        "packets",
        "redis",
        "redis.clock",
        "redis.eviction",
        "redis.permissions",
        "redis.topology",
    ];
    let each = [
        "interface",
        "interface.lro",
        "interface.mtu",
        "interface.native",
        "interface.program",
        "interface.queues",
        "interface.vlan",
    ];
    let expected = once.into_iter().map(|check| (check, 1)).chain(each.into_iter().map(|check| (check, 2)));
    assert_eq!(counts, expected.collect());
    assert!(report.of("kernel.program").found.contains("instructions"), "{report:?}");
    assert!(report.of("interface").found.contains("driver veth"), "{report:?}");

    assert!(!exists(net.pin_dir()) && net.gateway(|| xdp_of(INTERFACE)).is_none());
    assert_eq!(server.run::<u64>(&["DBSIZE"]).await, 0);

    let text = net.gateway(|| setup.run(&["doctor"]));
    let text = String::from_utf8_lossy(&text.stdout);
    assert!(text.trim_end().ends_with(&format!("{} checks: 0 errors, 0 warnings", report.findings.len())), "{text}");
    assert!(!text.contains("remedy"), "{text}");
}

#[test]
fn without_interfaces_the_kernel_is_not_looked_at() {
    let setup = Setup::new("[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"secret\"\n", "");
    let report = Report::new(&setup.run(&["doctor", "--json"]));
    let checks: Vec<_> = report.findings.iter().map(|finding| finding.check.as_str()).collect();
    assert_eq!((report.exit, checks), (Some(0), vec!["config", "config.key_file", "api", "packets"]));
}

/// Something wrong, and what is said about it.
struct Case {
    name: &'static str,
    interface: &'static str,
    more: &'static str,
    prepare: fn(&TestNet, &Setup),
    check: &'static str,
    status: &'static str,
    exit: i32,
    found: &'static str,
    /// Empty: none.
    remedy: &'static str,
}

fn nothing(_: &TestNet, _: &Setup) {}

/// As another agent, which leaves its program attached.
fn attach(net: &TestNet, pin_dir: &Path) {
    let mut world = World::new();
    world.config.interfaces = vec![INTERFACE.to_owned()];
    world.config.pin_dir = pin_dir.to_owned();
    let World { config, policy, tuning } = world;
    let started = net.gateway(|| KernelDataplane::start(xdp_object(), config, &policy, tuning));
    drop(started.expect("another agent starts"));
}

#[test]
fn each_finding_of_a_host_is_provoked() {
    const GOOD: Case = Case {
        name: "",
        interface: INTERFACE,
        more: "",
        prepare: nothing,
        check: "",
        status: "error",
        exit: 69,
        found: "",
        remedy: "",
    };
    for case in [
        Case {
            name: "no such interface",
            interface: "nosuch0",
            check: "interface",
            exit: 78,
            found: "nosuch0: there is no such interface",
            remedy: "ip link",
            ..GOOD
        },
        Case {
            name: "no Ethernet headers",
            interface: "tun9",
            prepare: |net, _| net.gateway(|| ip("tuntap add dev tun9 mode tun")),
            check: "interface",
            exit: 78,
            found: "tun9: its frames have no Ethernet header (link type 65534",
            remedy: "leave it out of xdp.interfaces",
            ..GOOD
        },
        Case {
            name: "limits that no configuration names",
            interface: SECOND_INTERFACE,
            prepare: |net, _| attach(net, net.pin_dir()),
            check: "packets",
            status: "warning",
            exit: 0,
            found: "for gw0, which xdp.interfaces does not name",
            remedy: "limiter unpin",
            ..GOOD
        },
        Case {
            name: "limits that follow a new name",
            interface: "wan9",
            prepare: |net, _| {
                attach(net, net.pin_dir());
                net.gateway(|| ip(&format!("link set {INTERFACE} down")));
                net.gateway(|| ip(&format!("link set {INTERFACE} name wan9")));
            },
            check: "interface.program",
            status: "ok",
            exit: 0,
            found: "the limiter's own",
            ..GOOD
        },
        Case {
            name: "a long MTU that the driver takes",
            prepare: |net, _| net.gateway(|| ip(&format!("link set {INTERFACE} mtu 9000"))),
            check: "interface.mtu",
            status: "ok",
            exit: 0,
            found: "9000: frames need several buffers (frags)",
            ..GOOD
        },
        Case {
            name: "no native XDP, and none demanded",
            interface: "lo",
            check: "interface.native",
            status: "warning",
            exit: 0,
            found: "lo: no native XDP, the driver says so: generic mode",
            remedy: "xdp.mode = \"generic\"",
            ..GOOD
        },
        Case {
            name: "no native XDP, and it is demanded",
            interface: "lo",
            more: "mode = \"native\"\n",
            check: "interface.native",
            found: "no native XDP",
            remedy: "xdp.mode = \"auto\"",
            ..GOOD
        },
        Case {
            name: "a long MTU in generic mode",
            interface: "lo",
            more: "mode = \"generic\"\n",
            check: "interface.mtu",
            status: "ok",
            exit: 0,
            found: "65536: in generic mode",
            ..GOOD
        },
        Case {
            name: "an interface that is down",
            prepare: |net, _| net.gateway(|| ip(&format!("link set {INTERFACE} down"))),
            check: "interface",
            status: "ok",
            exit: 0,
            found: "there, down",
            ..GOOD
        },
        Case {
            name: "pins of another schema",
            prepare: |net, _| fs::create_dir_all(net.pin_dir().join("v4711")).expect("a directory"),
            check: "bpffs.schema",
            found: "use schema 4711",
            remedy: "limiter unpin",
            ..GOOD
        },
        Case {
            name: "the limiter's own program",
            prepare: |net, _| attach(net, net.pin_dir()),
            check: "interface.program",
            status: "ok",
            exit: 0,
            found: "the limiter's own",
            ..GOOD
        },
        Case {
            name: "a key file that others can write to",
            prepare: |_, setup| {
                setup.write("keys.toml", "");
                fs::set_permissions(setup.path("keys.toml"), fs::Permissions::from_mode(0o666)).expect("a mode");
            },
            check: "config.key_file",
            status: "warning",
            exit: 0,
            found: "mode 0666",
            remedy: "chmod go-w",
            ..GOOD
        },
        Case {
            name: "pins below folders that are not there",
            prepare: |net, setup| {
                let (pin_dir, nested) = (net.pin_dir().display().to_string(), net.pin_dir().join("a/b"));
                setup.configure(
                    &packets(&[INTERFACE], Path::new(&pin_dir)).replace(&pin_dir, &nested.display().to_string()),
                );
            },
            check: "bpffs.writable",
            status: "ok",
            exit: 0,
            found: "may write to",
            ..GOOD
        },
        Case {
            name: "an API that other hosts reach",
            prepare: |_, setup| {
                let text = fs::read_to_string(setup.path("limiter.toml")).expect("the configuration");
                let http = text.lines().find(|line| line.starts_with("http = ")).expect("a line").to_owned();
                setup.write("limiter.toml", &text.replace(&http, "http = \"0.0.0.0:7070\""));
            },
            check: "api",
            status: "warning",
            exit: 0,
            found: "api.http = \"0.0.0.0:7070\" is open to other hosts",
            remedy: "127.0.0.1:7070",
            ..GOOD
        },
        Case {
            name: "a policy that is wrong",
            prepare: |_, setup| setup.write("policy.toml", "alow = []\n"),
            check: "config",
            exit: 78,
            found: "policy.toml:1: alow",
            remedy: "limiter validate",
            ..GOOD
        },
        Case {
            name: "no configuration",
            prepare: |_, setup| fs::remove_file(setup.path("limiter.toml")).expect("a file"),
            check: "config",
            exit: 78,
            found: "limiter.toml: cannot read the configuration: no such file",
            remedy: "limiter validate",
            ..GOOD
        },
    ] {
        let net = TestNet::new();
        let setup = Setup::new(&(packets(&[case.interface], net.pin_dir()) + case.more), RULE);
        (case.prepare)(&net, &setup);
        let report = examine(&net, &setup);
        let Finding { status, found, remedy, .. } = report.of(case.check);
        assert_eq!((status.as_str(), report.exit), (case.status, Some(case.exit)), "{}: {report:#?}", case.name);
        assert!(found.contains(case.found), "{}: {found}", case.name);
        let remedy = remedy.as_deref().unwrap_or_default();
        assert!(remedy.contains(case.remedy) && remedy.is_empty() == case.remedy.is_empty(), "{}: {remedy}", case.name);
        let unwell = if case.status == "ok" { Vec::new() } else { vec![case.check] };
        // What is wrong with these has more consequences than one.
        assert!(["lo", "tun9"].contains(&case.interface) || report.unwell() == unwell, "{}: {report:#?}", case.name);
    }
}

#[test]
fn a_program_of_somebody_else_is_named() {
    let (net, other) = (TestNet::new(), TestPins::new());
    attach(&net, other.path());
    let setup = Setup::new(&packets(&[INTERFACE], net.pin_dir()), RULE);
    let report = examine(&net, &setup);
    let finding = report.of("interface.program");
    assert_eq!((report.exit, report.unwell()), (Some(69), vec!["interface.program"]), "{report:#?}");
    assert!(finding.found.contains("the program \"limiter\" of another owner"), "{finding:?}");
    // "ip link … xdp off" does nothing to a program that a link holds.
    assert!(
        finding.remedy.as_ref().is_some_and(|remedy| remedy.contains("run \"limiter unpin\" with the xdp.pin_dir"))
    );
}

#[test]
fn pins_elsewhere_than_on_a_bpf_file_system_are_an_error() {
    let net = TestNet::new();
    let setup = Setup::new(&packets(&[INTERFACE], Path::new("/tmp/limiter-test-no-bpffs")), RULE);
    let report = examine(&net, &setup);
    assert_eq!((report.exit, report.unwell()), (Some(69), vec!["bpffs"]), "{report:#?}");
    assert!(report.of("bpffs").remedy.as_ref().is_some_and(|remedy| remedy.contains("mount -t bpf")));
}

#[test]
fn pins_that_would_end_with_the_agent_are_a_warning() {
    let net = TestNet::new();
    let setup = Setup::new(&packets(&[INTERFACE], net.pin_dir()), RULE);
    // As "ip netns exec" does it: another mount namespace, with nothing on /sys/fs/bpf.
    let mut inside = std::process::Command::new("unshare");
    inside.args(["--mount", "sh", "-c", "while umount /sys/fs/bpf 2>/dev/null; do :; done; exec \"$0\" \"$@\""]);
    let command = setup.command(&["doctor", "--json"]);
    inside.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        inside.env(name, value.unwrap_or_default());
    }
    let report = Report::new(&net.gateway(|| inside.output()).expect("unshare"));
    let finding = report.of("bpffs");
    assert_eq!((report.exit, finding.status.as_str()), (Some(0), "warning"), "{report:#?}");
    assert!(finding.found.contains("what is pinned there ends with the agent"), "{finding:?}");
    assert!(
        finding.remedy.as_ref().is_some_and(|remedy| remedy.contains("nsenter --net=/run/netns/NAME")),
        "{finding:?}"
    );
}

#[test]
fn without_root_it_says_what_it_could_not_see() {
    let net = TestNet::new();
    attach(&net, net.pin_dir());
    let mut setup = Setup::new(&packets(&[INTERFACE], net.pin_dir()), RULE);
    setup.run_as(NOBODY, &[]);
    let report = examine(&net, &setup);
    assert_eq!(report.exit, Some(77), "{report:#?}");
    let missing = report.of("capabilities");
    for name in ["CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON"] {
        assert!(missing.found.contains(name), "{missing:?}");
    }
    for unseen in ["kernel.program", "interface.program"] {
        let finding = report.of(unseen);
        assert_eq!(finding.status, "warning", "{finding:?}");
        assert!(finding.remedy.as_ref().is_some_and(|remedy| remedy.contains("root")), "{finding:?}");
    }
    for seen in ["interface", "interface.native", "interface.mtu", "kernel.version", "memory", "config"] {
        assert_eq!(report.of(seen).status, "ok", "{report:#?}");
    }

    // Root may give the user what he may not read.
    fs::write(setup.path("limiter.toml"), "").expect("a file");
    std::os::unix::fs::chown(setup.path("limiter.toml"), Some(0), Some(0)).expect("root's");
    fs::set_permissions(setup.path("limiter.toml"), fs::Permissions::from_mode(0o600)).expect("a mode");
    let report = examine(&net, &setup);
    let config = report.of("config");
    assert_eq!((report.exit, config.status.as_str()), (Some(77), "error"), "{report:#?}");
    assert!(config.found.contains("Permission denied"), "{config:?}");
}

/// A server, how it is named in the configuration, and what is said about it.
struct RedisCase {
    name: &'static str,
    arguments: &'static [&'static str],
    commands: &'static [&'static [&'static str]],
    username: &'static str,
    password: &'static str,
    /// `standalone` unless given.
    mode: &'static str,
    check: &'static str,
    status: &'static str,
    found: &'static str,
    remedy: &'static str,
}

#[tokio::test(flavor = "multi_thread")]
async fn each_finding_of_redis_is_provoked() {
    const GOOD: RedisCase = RedisCase {
        name: "",
        arguments: &[],
        commands: &[],
        username: "",
        password: "",
        mode: "standalone",
        check: "",
        status: "error",
        found: "",
        remedy: "",
    };
    for case in [
        RedisCase {
            name: "evicting",
            arguments: &["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"],
            check: "redis.eviction",
            status: "warning",
            found: "allkeys-lru, with a maxmemory of 104857600 bytes",
            remedy: "noeviction",
            ..GOOD
        },
        RedisCase {
            name: "a wrong password",
            arguments: &["--requirepass", "right"],
            password: "hunter2",
            check: "redis",
            found: "redis://127.0.0.1",
            remedy: "password_file",
            ..GOOD
        },
        RedisCase {
            name: "no password",
            arguments: &["--requirepass", "right"],
            check: "redis",
            found: "",
            remedy: "password_file",
            ..GOOD
        },
        RedisCase {
            name: "a user who may not write",
            commands: &[&["ACL", "SETUSER", "reader", "on", ">pw", "~rl:*", "+@all", "-@write"]],
            username: "reader",
            password: "pw",
            check: "redis.permissions",
            found: "SET: ",
            remedy: "acl setuser",
            ..GOOD
        },
        RedisCase {
            name: "a user who may not touch counters",
            commands: &[&["ACL", "SETUSER", "other", "on", ">pw", "~other:*", "+@all"]],
            username: "other",
            password: "pw",
            check: "redis.permissions",
            found: "EVALSHA: ",
            remedy: "~rl:*",
            ..GOOD
        },
        RedisCase {
            name: "a user who may not call scripts",
            commands: &[&["ACL", "SETUSER", "plain", "on", ">pw", "~rl:*", "+@all", "-@scripting"]],
            username: "plain",
            password: "pw",
            check: "redis.permissions",
            found: "SCRIPT LOAD: ",
            remedy: "redis-cli acl setuser plain '~rl:*' +evalsha '+script|load' +get",
            ..GOOD
        },
        RedisCase {
            name: "a user who may do what the remedy says, and no more",
            commands: &[&[
                "ACL",
                "SETUSER",
                "limiter",
                "on",
                ">pw",
                "~rl:*",
                "+@read",
                "+@write",
                "+@scripting",
                "+time",
                "+info",
                "+ping",
            ]],
            username: "limiter",
            password: "pw",
            check: "redis.permissions",
            status: "ok",
            found: "may load and call the scripts",
            ..GOOD
        },
        RedisCase {
            name: "part of a cluster",
            arguments: &["--cluster-enabled", "yes"],
            check: "redis.topology",
            found: "part of a cluster",
            remedy: "cluster-enabled no",
            ..GOOD
        },
        RedisCase {
            name: "a user of a cluster who may not ask for its slots",
            arguments: &["--cluster-enabled", "yes"],
            commands: &[&["ACL", "SETUSER", "noslots", "on", ">pw", "~rl:*", "+@all", "-cluster"]],
            username: "noslots",
            mode: "cluster",
            password: "pw",
            check: "redis",
            found: "",
            remedy: "redis-cli acl setuser noslots '~rl:*' +evalsha",
            ..GOOD
        },
        RedisCase {
            name: "a replica",
            commands: &[&["REPLICAOF", "127.0.0.1", "1"]],
            check: "redis.permissions",
            found: "SET: ",
            remedy: "primary",
            ..GOOD
        },
    ] {
        let server = RedisServer::start_with(case.arguments).await;
        for command in case.commands {
            let _: redis::Value = server.run(command).await;
        }
        let report = ask(&server, case.mode, case.username, case.password).await;
        let Finding { status, found, remedy, .. } = report.of(case.check);
        let exit = match (case.status, case.check) {
            ("error", "redis.topology") => 78,
            ("error", _) => 69,
            _ => 0,
        };
        assert_eq!((status.as_str(), report.exit), (case.status, Some(exit)), "{}: {report:#?}", case.name);
        assert!(found.contains(case.found), "{}: {found}", case.name);
        assert!(remedy.as_deref().unwrap_or_default().contains(case.remedy), "{}: {remedy:?}", case.name);
        assert!(!format!("{report:?}").contains("hunter"), "{}: a password is printed: {report:?}", case.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_is_away_or_does_not_answer_is_an_error() {
    let mut server = RedisServer::start().await;
    server.freeze();
    let frozen = ask(&server, "standalone", "", "").await;
    server.thaw();
    server.kill();
    let away = ask(&server, "standalone", "", "").await;
    for (report, found) in [(frozen, "does not answer within 1 s"), (away, "refused")] {
        let finding = report.of("redis");
        assert_eq!((report.exit, finding.status.as_str()), (Some(69), "error"), "{report:#?}");
        assert!(finding.found.contains(found), "{finding:?}");
        assert!(finding.remedy.as_ref().is_some_and(|remedy| remedy.contains("start Redis")), "{finding:?}");
        assert_eq!(report.of("redis.eviction").status, "warning", "not seen: {report:#?}");
    }
}

async fn ask(server: &RedisServer, mode: &str, username: &str, password: &str) -> Report {
    let mut configuration = format!(
        "[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"secret\"\n\
         [store]\nkind = \"redis\"\n[store.redis]\nurls = [\"{}\"]\ntimeout = \"1s\"\nmode = \"{mode}\"\n",
        server.url()
    );
    if !username.is_empty() {
        configuration.push_str(&format!("username = \"{username}\"\n"));
    }
    if !password.is_empty() {
        configuration.push_str("password_file = \"password\"\n");
    }
    let setup = Setup::new(&configuration, "");
    setup.write("password", password);
    let output = tokio::task::spawn_blocking(move || setup.run(&["doctor", "--json"])).await;
    Report::new(&output.expect("running the binary"))
}

#[test]
fn the_memory_of_maps_is_what_the_kernel_says() {
    const SOURCES: u32 = 65_536;
    let net = TestNet::new();
    let mut world = World::new();
    world.config.pin_dir = net.pin_dir().to_owned();
    world.config.max_sources = SOURCES;
    let World { config, policy, tuning } = world;
    let dataplane = net.gateway(|| KernelDataplane::start(xdp_object(), config, &policy, tuning)).expect("a start");
    assert_eq!(dataplane.interfaces().expect("interfaces"), []);
    let version = fs::read_dir(net.pin_dir()).expect("pins").next().expect("a version").expect("a version").path();
    for (map, computed) in shared_map_bytes(SOURCES).expect("CPUs") {
        let Some(kernels) = memory_of(&version.join(map)) else { continue };
        let difference = kernels.abs_diff(computed);
        assert!(difference * 100 <= kernels * 15 + 819_200, "{map}: {kernels} bytes, and {computed} were computed");
    }
}

/// `None` on kernels that do not tell what a map takes (before 6.4 they count its entries alone).
fn memory_of(pin: &Path) -> Option<u64> {
    use std::os::fd::{AsFd as _, AsRawFd as _};
    let map = MapData::from_pin(pin).expect("a pinned map");
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.fd().as_fd().as_raw_fd())).expect("a map");
    about.lines().find_map(|line| line.strip_prefix("memlock:"))?.trim().parse().ok()
}

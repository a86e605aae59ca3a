//! The agent needs three capabilities and no more: shown by running it with just those, and with one of them left out.

use std::{
    fs,
    io::ErrorKind,
    net::{Ipv6Addr, SocketAddr, UdpSocket},
    os::unix::fs::chown,
    path::{Path, PathBuf},
    time::Duration,
};

use limiter_tests::{
    agent::{Agent, Setup, exists},
    eventually::until,
    ip::xdp_of,
    netns::{CLIENT_V4, GATEWAY_V4, INTERFACE, TestNet},
};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

const NOBODY: u32 = 65534;
const NEEDED: [&str; 3] = ["bpf", "net_admin", "perfmon"];
const PORT: u16 = 443;
const OTHER_PORT: u16 = 22;
const BURST: usize = 5;

fn policy(burst: usize) -> String {
    format!("[[packet_rules]]\nid = \"four\"\ncidr = \"0.0.0.0/0\"\npackets = {{ rate = \"1/m\", burst = {burst} }}\n")
}

fn setup(pin_dir: &Path, user: u32, capabilities: &[&str]) -> Setup {
    let configuration = format!(
        "[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"secret\"\n[xdp]\ninterfaces = [\"{INTERFACE}\"]\n\
         protect = [\"udp/{PORT}\"]\npin_dir = \"{}\"\nmax_sources = 1024\n",
        pin_dir.display()
    );
    let mut setup = Setup::new(&configuration, &policy(BURST));
    setup.run_as(user, capabilities);
    setup
}

/// Runs `work` in the gateway, in a mount namespace of its own with a BPF file system that is the user's, as the README
/// says to make one. It is gone with the thread.
fn with_bpffs_of<T: Send>(net: &TestNet, user: u32, work: impl FnOnce(PathBuf) -> T + Send) -> T {
    let folder = tempfile::TempDir::new().expect("a folder");
    let mount_point = folder.path().to_owned();
    net.gateway(move || {
        unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace");
        let nothing = None::<&str>;
        mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing).expect("mounts of one's own");
        mount(Some("bpf"), &mount_point, Some("bpf"), MsFlags::empty(), Some("mode=0700")).expect("a BPF file system");
        chown(&mount_point, Some(user), Some(user)).expect("the BPF file system is given away");
        work(mount_point.join("limiter"))
    })
}

/// UDP from a client to a protected port of the gateway.
struct Traffic {
    protected: UdpSocket,
    other: UdpSocket,
    client: UdpSocket,
}

impl Traffic {
    fn new(net: &TestNet) -> Self {
        let bind = |port| {
            let server = net.gateway(|| UdpSocket::bind(("::", port)).expect("bind the server"));
            server.set_read_timeout(Some(Duration::from_secs(10))).expect("set the timeout");
            server
        };
        let client = net.client(|| UdpSocket::bind(SocketAddr::new(CLIENT_V4[0], 0)).expect("bind the client"));
        Self { protected: bind(PORT), other: bind(OTHER_PORT), client }
    }

    /// How many of 20 packets arrive. The marker takes the same way, to a port that is not limited, and then goes to the
    /// protected one over loopback: what is not there before it does not come.
    fn arriving(&self) -> usize {
        let mut buffer = [0; 16];
        for _ in 0..20 {
            self.client.send_to(b"packet", (GATEWAY_V4, PORT)).expect("send");
        }
        self.client.send_to(b"marker", (GATEWAY_V4, OTHER_PORT)).expect("send");
        self.other.recv(&mut buffer).expect("the marker arrives");
        self.other.send_to(b"marker", (Ipv6Addr::LOCALHOST, PORT)).expect("send");
        let mut received = || self.protected.recv(&mut buffer).map(|len| buffer[..len] == *b"packet");
        std::iter::from_fn(|| received().expect("the marker arrives").then_some(())).count()
    }
}

fn status_of(agent: &Agent<'_>, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{}/status", agent.pid())).expect("the agent runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a line");
    line.split_whitespace().next().expect("a value").to_owned()
}

#[test]
fn three_capabilities_and_a_bpf_file_system_are_enough() {
    let net = TestNet::new();
    let traffic = Traffic::new(&net);
    with_bpffs_of(&net, NOBODY, |pin_dir| {
        let setup = setup(&pin_dir, NOBODY, &NEEDED);
        let doctor = setup.run(&["doctor"]);
        assert_eq!(doctor.status.code(), Some(0), "{doctor:?}");
        assert!(!exists(&pin_dir), "the doctor changes nothing");

        let agent = setup.start();
        assert_eq!(status_of(&agent, "Uid:"), NOBODY.to_string());
        // CAP_NET_ADMIN, CAP_PERFMON and CAP_BPF, by number 12, 38 and 39.
        assert_eq!(status_of(&agent, "CapEff:"), "000000c000001000");
        assert_eq!(traffic.arriving(), BURST, "limited");

        agent.reload(&policy(BURST + 2));
        assert_eq!(traffic.arriving(), 2, "reloaded, and the bucket is kept");
        let blocked = setup.run(&["block", "192.0.2.0/24"]);
        assert!(blocked.status.success(), "{blocked:?}");

        agent.kill();
        assert_eq!(traffic.arriving(), 0, "limited without an agent");
        let agent = setup.start();
        assert_eq!(traffic.arriving(), 0, "taken over, and the bucket is kept");
        assert_eq!(agent.status()["xdp"]["interfaces"][0]["mode"], "native", "{}", agent.status());
        assert!(agent.stop().success(), "{}", setup.log());
        assert!(!setup.log().contains("WARN") && !setup.log().contains("ERROR"), "{}", setup.log());

        let unpinned = setup.run(&["unpin"]);
        assert!(unpinned.status.success() && !exists(&pin_dir), "{unpinned:?}");
        until("it is detached", Duration::from_secs(10), || xdp_of(INTERFACE).is_none().then_some(()));
        assert_eq!(traffic.arriving(), 20);
    });
}

#[test]
fn root_needs_no_more_than_the_unit_leaves_it() {
    let net = TestNet::new();
    let traffic = Traffic::new(&net);
    net.gateway(|| {
        let setup = setup(net.pin_dir(), 0, &NEEDED);
        let agent = setup.start();
        assert_eq!(status_of(&agent, "CapEff:"), "000000c000001000");
        assert_eq!(traffic.arriving(), BURST);
        assert!(agent.stop().success());
    });
}

#[test]
fn each_capability_is_needed_and_named_when_it_is_missing() {
    for missing in NEEDED {
        let net = TestNet::new();
        let name = format!("CAP_{}", missing.to_uppercase());
        let others: Vec<_> = NEEDED.into_iter().filter(|other| *other != missing).collect();
        with_bpffs_of(&net, NOBODY, |pin_dir| {
            let setup = setup(&pin_dir, NOBODY, &others);
            let output = setup.run(&["run"]);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(77), "without {name}: {said}");
            assert!(said.contains(&format!("lacks {name} (to ")), "without {name}: {said}");
            assert!(said.contains("AmbientCapabilities"), "the remedy, without {name}: {said}");
            for other in &others {
                assert!(!said.contains(&format!("CAP_{}", other.to_uppercase())), "without {name}: {said}");
            }
            assert_eq!(said.trim().lines().count(), 1, "without {name}: {said}");
            assert!(!exists(&pin_dir) && xdp_of(INTERFACE).is_none(), "without {name}: something stays");

            let doctor = setup.run(&["doctor"]);
            let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
            assert_eq!(doctor.status.code(), Some(77), "{said}");
            assert!(said.contains(&format!("lacks {name} (to ")), "{said}");
        });
    }
}

#[test]
fn pins_that_the_user_may_not_make_are_named() {
    let net = TestNet::new();
    with_bpffs_of(&net, 0, |pin_dir| {
        let setup = setup(&pin_dir, NOBODY, &NEEDED);
        for command in ["run", "unpin"] {
            let output = setup.run(&[command]);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(77), "{command}: {said}");
            assert!(said.contains(&pin_dir.display().to_string()), "{command}: {said}");
            assert!(!said.contains("lacks"), "{command}: no capability is missing: {said}");
        }
        let created = fs::symlink_metadata(&pin_dir).map_err(|error| error.kind());
        assert_eq!(created.err(), Some(ErrorKind::NotFound));
    });
}

//! Network namespaces of a test: a client and a gateway, joined by a veth pair, and a pin directory. All of it is gone
//! when the value is dropped, also by a panic.

use std::{
    fs::{self, File},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    panic,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use limiter_user::dataplane;
use nix::sched::{CloneFlags, setns};

use crate::ip::{ip, ip_command};

const BPFFS: &str = "/sys/fs/bpf";
const PREFIX: &str = "limiter-test-";
/// The client's interface towards the gateway.
pub const CLIENT_INTERFACE: &str = "cl0";
/// The gateway's interface towards the client.
pub const INTERFACE: &str = "gw0";
/// A second one, between the same namespaces, without addresses.
pub const SECOND_INTERFACE: &str = "gw1";
/// The client's end of the second pair.
pub const SECOND_CLIENT_INTERFACE: &str = "cl1";

pub const GATEWAY_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 203, 0, 1));
pub const GATEWAY_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec, 0, 0, 0, 0, 0, 1));
/// Addresses of the client: two of each family, the IPv6 ones in different /64s.
pub const CLIENT_V4: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(10, 203, 0, 2)), IpAddr::V4(Ipv4Addr::new(10, 203, 0, 3))];
pub const CLIENT_V6: [IpAddr; 2] = [
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec, 0, 0, 0, 0, 0, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec, 0, 1, 0, 0, 0, 2)),
];

#[derive(Debug)]
pub struct TestNet {
    client: Namespace,
    gateway: Namespace,
    pins: TestPins,
}

impl TestNet {
    /// # Panics
    ///
    /// When the test does not run as root, or iproute2 fails.
    pub fn new() -> Self {
        remove_leftovers();
        let name = unique_name();
        let pins = TestPins::named(&name);
        let client = Namespace::new(format!("{name}-client"));
        let gateway = Namespace::new(format!("{name}-gateway"));
        let net = Self { client, gateway, pins };
        for (outside, inside) in [(CLIENT_INTERFACE, INTERFACE), (SECOND_CLIENT_INTERFACE, SECOND_INTERFACE)] {
            let (client, gateway) = (&net.client.name, &net.gateway.name);
            ip(&format!("link add {outside} netns {client} type veth peer name {inside} netns {gateway}"));
        }
        net.client.configure(
            CLIENT_INTERFACE,
            &CLIENT_V4.map(|address| (address, 24)),
            &CLIENT_V6.map(|address| (address, 64)),
        );
        net.client.configure(SECOND_CLIENT_INTERFACE, &[], &[]);
        net.gateway.configure(INTERFACE, &[(GATEWAY_V4, 24)], &[(GATEWAY_V6, 64)]);
        net.gateway.configure(SECOND_INTERFACE, &[], &[]);
        // The way back to the client's other /64.
        ip(&format!("-n {} route add {}/64 dev {INTERFACE}", net.gateway.name, CLIENT_V6[1]));
        net
    }

    /// One more address for the client to send from, in the /24 of [`GATEWAY_V4`].
    pub fn add_client_address(&self, address: Ipv4Addr) {
        self.client.configure(CLIENT_INTERFACE, &[(IpAddr::V4(address), 24)], &[]);
    }

    /// Runs `work` in a thread of the client's namespace. Sockets and processes made there stay there.
    pub fn client<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.client.enter(work)
    }

    /// Runs `work` in a thread of the gateway's namespace.
    pub fn gateway<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.gateway.enter(work)
    }

    /// On a BPF file system; does not exist yet.
    pub fn pin_dir(&self) -> &Path {
        self.pins.path()
    }
}

impl Default for TestNet {
    fn default() -> Self {
        Self::new()
    }
}

/// A pin directory of one's own, without namespaces.
#[derive(Debug)]
pub struct TestPins {
    path: PathBuf,
}

impl TestPins {
    pub fn new() -> Self {
        remove_leftovers();
        Self::named(&unique_name())
    }

    fn named(name: &str) -> Self {
        Self { path: Path::new(BPFFS).join(name) }
    }

    /// Does not exist yet.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Default for TestPins {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for TestPins {
    fn drop(&mut self) {
        remove_pins(&self.path);
    }
}

#[expect(clippy::print_stderr, reason = "a panic in a destructor would hide the one that is under way")]
fn remove_pins(path: &Path) {
    if path.exists()
        && let Err(error) = dataplane::unpin(path)
    {
        eprintln!("could not remove {}: {error}", path.display());
    }
}

#[derive(Debug)]
struct Namespace {
    name: String,
    file: File,
}

impl Namespace {
    fn new(name: String) -> Self {
        ip(&format!("netns add {name}"));
        let file = File::open(Path::new("/run/netns").join(&name)).expect("open the network namespace");
        let namespace = Self { name, file };
        ip(&format!("-n {} link set lo up", namespace.name));
        namespace
    }

    /// No duplicate address detection: addresses are usable at once.
    fn configure(&self, interface: &str, v4: &[(IpAddr, u8)], v6: &[(IpAddr, u8)]) {
        let name = &self.name;
        for (address, len) in v4 {
            ip(&format!("-n {name} address add {address}/{len} dev {interface}"));
        }
        for (address, len) in v6 {
            ip(&format!("-n {name} address add {address}/{len} dev {interface} nodad"));
        }
        ip(&format!("-n {name} link set {interface} up"));
    }

    /// `ip netns exec` would mount another /sys, without the BPF file system.
    fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let result = thread::scope(|scope| {
            let inside = scope.spawn(|| {
                setns(&self.file, CloneFlags::CLONE_NEWNET).expect("enter the network namespace");
                work()
            });
            inside.join()
        });
        result.unwrap_or_else(|cause| panic::resume_unwind(cause))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The veth pair goes with either end.
        delete_namespace(&self.name);
    }
}

#[expect(clippy::print_stderr, reason = "a panic in a destructor would hide the one that is under way")]
fn delete_namespace(name: &str) {
    let deleted = ip_command().args(["netns", "delete", name]).status();
    if !deleted.as_ref().is_ok_and(|status| status.success()) {
        eprintln!("could not delete the network namespace {name}: {deleted:?}");
    }
}

fn unique_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{PREFIX}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Removes what test processes that were killed have left.
fn remove_leftovers() {
    let is_left = |name: &str| {
        let Some((process, _)) = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')) else { return false };
        !Path::new("/proc").join(process).exists()
    };
    for (folder, remove) in [
        (BPFFS, (|path: &Path, _| remove_pins(path)) as fn(&Path, &str)),
        ("/run/netns", |_, name| delete_namespace(name)),
    ] {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if let Some(name) = entry.file_name().to_str().filter(|name| is_left(name)) {
                remove(&entry.path(), name);
            }
        }
    }
}

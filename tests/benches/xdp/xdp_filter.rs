//! xdp-filter of xdp-tools, loaded by its own command.

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use aya::programs::Xdp;
use aya_obj::programs::XdpAttachType;
use limiter_tests::netns::{INTERFACE, TestNet};

/// The source that it is told to deny.
pub(crate) const DENIED: &str = "192.0.2.7";

#[derive(Debug)]
pub(crate) struct XdpFilter {
    program: Xdp,
    /// Holds the mount namespace of its pins.
    holder: Child,
}

impl XdpFilter {
    /// Attaches it to the gateway's interface, with these features, and denies one source address.
    pub(crate) fn start(net: &TestNet, features: &str, denied: &str) -> Self {
        // It pins in /sys/fs/bpf, whatever it is told; one of its own keeps it away from the host's.
        let script = format!(
            "set -e; mount -t bpf bpf /sys/fs/bpf; \
             xdp-filter load --mode native --policy allow --features {features} {INTERFACE}; \
             xdp-filter ip {denied} --mode src; ls /sys/fs/bpf/xdp-filter/programs/{INTERFACE}; exec cat"
        );
        let mut holder = net.gateway(|| {
            let mut command = Command::new("unshare");
            command.args(["--mount", "sh", "-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.spawn().expect("start xdp-filter")
        });
        let mut name = String::new();
        let says = holder.stdout.as_mut().expect("its output is piped");
        BufReader::new(says).read_line(&mut name).expect("read the name of its program");
        let pin = format!("/proc/{}/root/sys/fs/bpf/xdp-filter/programs/{INTERFACE}/{}", holder.id(), name.trim());
        let program = Xdp::from_pin(&pin, XdpAttachType::Interface)
            .unwrap_or_else(|error| panic!("open the program of xdp-filter at {pin}: {error}"));
        Self { program, holder }
    }

    /// Runs it on a frame of the denied source.
    pub(crate) fn run(&self, frame: &[u8], repeat: u32) -> Duration {
        crate::expect(&self.program, frame, repeat, crate::XDP_DROP)
    }
}

impl Drop for XdpFilter {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        self.holder.wait().expect("its holder ends with its input");
    }
}

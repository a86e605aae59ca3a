//! What the machine and the gateway say: CPU time, and packets that came through.

use std::{fs, process::Command};

use limiter_tests::netns::{INTERFACE, TestNet};
use serde_json::Value;

/// Readings of counters; subtract two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    /// Time that a CPU did something, of all CPUs together, in seconds.
    pub(crate) busy: f64,
    /// Packets that came to the gateway's interface.
    pub(crate) received: f64,
    /// Packets of the flood that came as far as the UDP layer.
    pub(crate) let_in: f64,
}

impl Usage {
    pub(crate) fn now(net: &TestNet) -> Self {
        net.gateway(|| Self { busy: busy(), received: received(), let_in: let_in() })
    }

    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            busy: self.busy - earlier.busy,
            received: self.received - earlier.received,
            let_in: self.let_in - earlier.let_in,
        }
    }
}

/// User, nice, system, interrupts and softirqs.
fn busy() -> f64 {
    const TICKS_A_SECOND: f64 = 100.0;
    let text = fs::read_to_string("/proc/stat").expect("read /proc/stat");
    let fields = text.lines().next().expect("the line of all CPUs").split_whitespace().skip(1);
    let fields: Vec<f64> = fields.map(|field| field.parse().expect("a number")).collect();
    let [user, nice, system, _idle, _waiting, interrupt, softirq, ..] = fields[..] else {
        panic!("/proc/stat has another form")
    };
    (user + nice + system + interrupt + softirq) / TICKS_A_SECOND
}

fn received() -> f64 {
    let output = Command::new("ip").args(["-s", "-j", "link", "show", "dev", INTERFACE]).output().expect("start ip");
    let links: Value = serde_json::from_slice(&output.stdout).expect("ip speaks JSON");
    links[0]["stats64"]["rx"]["packets"].as_f64().expect("a count of packets")
}

/// Nobody listens where the flood goes, and nothing else comes for ports where nobody listens.
fn let_in() -> f64 {
    let text = fs::read_to_string("/proc/thread-self/net/snmp").expect("read the counters of UDP");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: ")).map(str::split_whitespace);
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let (_, value) = names.zip(values).find(|(name, _)| *name == "NoPorts").expect("NoPorts");
    value.parse().expect("a number")
}

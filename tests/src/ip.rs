//! iproute2, in whichever network namespace the thread is.

use std::{os::unix::process::CommandExt, process::Command};

/// # Panics
///
/// When `ip` fails, with what it says.
#[track_caller]
pub fn ip(arguments: &str) {
    let output = ip_command().args(arguments.split(' ')).output().expect("start ip (iproute2)");
    let says = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {says}; these tests need root");
}

/// Out of reach of a Ctrl-C, which is for who started it: that then cleans up, with this command.
pub fn ip_command() -> Command {
    let mut command = Command::new("ip");
    command.process_group(0);
    command
}

/// What `ip` tells of XDP on an interface; `None` when nothing is attached, or there is no such interface.
pub fn xdp_of(interface: &str) -> Option<serde_json::Value> {
    let mut ip = Command::new("ip");
    let output = ip.args(["-details", "-json", "link", "show", "dev", interface]).output().expect("start ip");
    let links: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    links.get(0)?.get("xdp").cloned()
}

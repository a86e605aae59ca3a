//! The interfaces of the configuration.

use super::{
    device::Device,
    finding::Seen,
    host::{Host, Interface},
};
use crate::{
    config::XdpMode,
    dataplane::{
        ONE_BUFFER_MTU,
        probe::{RunningProgram, remedy_of_program, running_program},
    },
    exit::Exit,
};

/// Drivers with native XDP, for kernels that do not tell (before 6.3).
const NATIVE_DRIVERS: &[&str] = &[
    "atlantic",
    "bnxt_en",
    "cpsw",
    "dpaa2-eth",
    "dpaa_eth",
    "ena",
    "fsl_dpaa2_eth",
    "fsl_enetc",
    "fsl_enetc_vf",
    "fun",
    "gve",
    "hv_netvsc",
    "i40e",
    "ice",
    "igb",
    "igc",
    "ixgbe",
    "ixgbevf",
    "mana",
    "mlx4_en",
    "mlx5_core",
    "mvneta",
    "mvpp2",
    "netsec",
    "nfp",
    "qede",
    "sfc",
    "stmmac",
    "thunder-nicvf",
    "tsnep",
    "tun",
    "veth",
    "virtio_net",
    "xen-netfront",
];

const OTHER_MODE: &str = "set xdp.mode = \"auto\" or \"generic\"";

pub(super) fn exists(_host: &Host, interface: &Interface) -> Seen {
    let headless = |device: &Device| device.link_type.filter(|kind| !kind.has_ethernet_headers());
    match &interface.device {
        Ok(device) if let Some(kind) = headless(device) => Seen::error(
            Exit::Config,
            format!("its frames have no Ethernet header (link type {kind}), so nothing would be limited there"),
            "name the Ethernet interface that its packets arrive on, or leave it out of xdp.interfaces",
        ),
        Ok(device) => Seen::ok(format!(
            "there, {}, driver {}",
            if device.is_up { "up" } else { "down" },
            device.driver.as_deref().unwrap_or("unknown")
        )),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Seen::error(
            Exit::Config,
            "there is no such interface",
            "name one that \"ip link\" shows in xdp.interfaces, in the network namespace of the agent",
        ),
        Err(error) => Seen::unseen(format!("the kernel tells nothing of it: {error}")),
    }
}

pub(super) fn native(host: &Host, _interface: &Interface, device: &Device) -> Seen {
    let driver = device.driver.as_deref();
    let is_native = match device.xdp {
        Some(xdp) => Some(xdp.native),
        None => driver.map(|driver| NATIVE_DRIVERS.contains(&driver)),
    };
    let told_by = if device.xdp.is_some() { "the driver says so" } else { "by the driver's name" };
    match (is_native, host.mode()) {
        (_, XdpMode::Generic) => Seen::ok("not asked for: xdp.mode is \"generic\""),
        (Some(true), _) => Seen::ok(format!("native XDP, {told_by}")),
        (Some(false), XdpMode::Native) => {
            Seen::error(Exit::Unavailable, format!("no native XDP, {told_by}"), OTHER_MODE)
        }
        (Some(false), XdpMode::Auto) => Seen::warning(
            format!("no native XDP, {told_by}: generic mode will be used"),
            "set xdp.mode = \"generic\" if that is enough, or name the hardware interface below this one",
        ),
        (None, _) => {
            Seen::warning("neither the kernel nor the driver's name tells whether it has native XDP", OTHER_MODE)
        }
    }
}

pub(super) fn mtu(host: &Host, interface: &Interface, device: &Device) -> Seen {
    let mtu = device.mtu;
    if mtu <= ONE_BUFFER_MTU {
        return Seen::ok(format!("{mtu}: a frame fits in one buffer"));
    }
    let is_native = device.xdp.is_none_or(|xdp| xdp.native) && host.mode() != XdpMode::Generic;
    if !is_native {
        return Seen::ok(format!("{mtu}: in generic mode the kernel copies longer frames into one buffer"));
    }
    let remedy = format!("ip link set dev {} mtu {ONE_BUFFER_MTU} # or set xdp.mode = \"generic\"", interface.name);
    match (device.xdp, host.mode()) {
        (Some(xdp), _) if xdp.frags => {
            Seen::ok(format!("{mtu}: frames need several buffers (frags), which driver and program take"))
        }
        (Some(_), XdpMode::Native) => {
            let found = format!("{mtu}: frames need several buffers (frags), which the driver does not take with XDP");
            Seen::error(Exit::Unavailable, found, remedy)
        }
        (Some(_), XdpMode::Auto | XdpMode::Generic) => Seen::warning(
            format!(
                "{mtu}: frames need several buffers (frags), which the driver does not take: generic mode will be used"
            ),
            remedy,
        ),
        (None, _) => Seen::warning(
            format!(
                "{mtu}: frames need several buffers (frags), and this kernel does not tell whether the driver takes them"
            ),
            remedy,
        ),
    }
}

pub(super) fn lro(host: &Host, interface: &Interface, device: &Device) -> Seen {
    let Some(offloads) = device.offloads else { return Seen::unseen("the kernel does not tell the offloads") };
    let joined: Vec<_> = [("lro", offloads.lro), ("rx-gro-hw", offloads.gro_hw)]
        .iter()
        .filter_map(|(name, is_on)| is_on.then_some(*name))
        .collect();
    if joined.is_empty() {
        return Seen::ok("LRO and hardware GRO are off");
    }
    if host.mode() == XdpMode::Generic {
        return Seen::ok(format!("{} on, which the kernel switches off for generic mode", joined.join(" and ")));
    }
    let off: Vec<_> = joined.iter().map(|name| format!("{name} off")).collect();
    Seen::warning(format!("{} on", joined.join(" and ")), format!("ethtool -K {} {}", interface.name, off.join(" ")))
}

pub(super) fn vlan(_host: &Host, _interface: &Interface, device: &Device) -> Seen {
    match device.offloads {
        None => Seen::unseen("the kernel does not tell the offloads"),
        Some(offloads) if offloads.vlan => Seen::ok(
            "rx-vlan-hw-parse is on: the outer tag is taken off first, and packets of all VLANs are limited alike",
        ),
        Some(_) => Seen::ok("rx-vlan-hw-parse is off: the program reads the tags itself, and limits all VLANs alike"),
    }
}

pub(super) fn queues(host: &Host, interface: &Interface, device: &Device) -> Seen {
    if device.is_virtual {
        return Seen::ok("a virtual interface: packets are judged on the CPU that sends them or takes them over");
    }
    let Some(channels) = device.channels else { return Seen::ok("the driver has one queue, or does not tell") };
    let cpus = super::memory::possible_cpus().unwrap_or(1);
    judge_queues(&interface.name, channels.now, channels.most, cpus, host.mode())
}

fn judge_queues(interface: &str, now: u32, most: u32, cpus: u32, mode: XdpMode) -> Seen {
    let useful = most.min(cpus);
    if now >= useful || mode == XdpMode::Generic {
        return Seen::ok(format!("{now} receive queues (at most {most}), {cpus} CPUs"));
    }
    Seen::warning(
        format!("{now} receive queues for {cpus} CPUs, and {most} are possible"),
        format!("ethtool -L {interface} combined {useful}"),
    )
}

pub(super) fn other_program(host: &Host, interface: &Interface, _device: &Device) -> Seen {
    let name = &interface.name;
    match running_program(name, host.pin_dir()) {
        Err(error) => Seen::unseen(format!("the kernel does not tell: {error}")),
        Ok(None) => Seen::ok("none is attached"),
        Ok(Some(RunningProgram { id, is_ours: Some(true), .. })) => {
            Seen::ok(format!("program {id}, which is the limiter's own, pinned in {}", host.pin_dir().display()))
        }
        Ok(Some(RunningProgram { id, is_ours: None, .. })) => {
            Seen::unseen(format!("program {id}; this process may not see whether it is the limiter's"))
        }
        Ok(Some(RunningProgram { id, name: program, is_ours: Some(false), .. })) => {
            let named = program.map_or("a program".to_owned(), |program| format!("the program \"{program}\""));
            Seen::error(
                Exit::Unavailable,
                format!("{named} of another owner is attached (id {id})"),
                remedy_of_program(name),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn queues_are_compared_with_what_is_possible() {
        let status = |now, most, cpus, mode| judge_queues("eth0", now, most, cpus, mode).status;
        assert_eq!(status(8, 8, 8, XdpMode::Auto), Status::Ok);
        assert_eq!(status(1, 1, 8, XdpMode::Native), Status::Ok);
        assert_eq!(status(64, 64, 8, XdpMode::Auto), Status::Ok);
        assert_eq!(status(2, 16, 8, XdpMode::Generic), Status::Ok);
        let seen = judge_queues("eth0", 2, 16, 8, XdpMode::Auto);
        assert_eq!((seen.status, seen.remedy.as_deref()), (Status::Warning, Some("ethtool -L eth0 combined 8")));
    }
}

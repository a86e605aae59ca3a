//! What of this host would not work, and the remedy. Looks, and changes nothing.
//!
//! Every check is declared in `CHECKS`; what it looks at is in the file of its topic.

mod bpffs;
mod capabilities;
mod configuration;
mod device;
mod finding;
mod host;
mod interface;
mod kernel;
pub mod memory;
mod store;

use std::path::Path;

pub use self::finding::{Finding, Status};
use self::{
    device::Device,
    finding::Seen,
    host::{Host, Interface},
};
use crate::exit::Exit;

struct Check {
    name: &'static str,
    /// Why it matters.
    why: &'static str,
    look: Look,
}

enum Look {
    /// Whatever is configured.
    Always(fn(&Host) -> Seen),
    /// When packets are limited.
    Packets(fn(&Host) -> Seen),
    /// At each interface that is configured.
    Interface(fn(&Host, &Interface) -> Seen),
    /// At each of them that exists.
    Device(fn(&Host, &Interface, &Device) -> Seen),
    /// When anything is in Redis.
    Redis(fn(&Host) -> Seen),
    /// When API keys are in Redis.
    KeyStore(fn(&Host) -> Seen),
}

const CHECKS: &[Check] = &[
    Check {
        name: "config",
        why: "the agent does not start with a configuration, policy or key file that is wrong",
        look: Look::Always(configuration::valid),
    },
    Check {
        name: "config.key_file",
        why: "whoever can write the key file can add keys to plans and disable those of others",
        look: Look::Always(configuration::key_file),
    },
    Check {
        name: "config.key_copy",
        why: "a start without Redis knows only the API keys of the copy that an earlier run has written",
        look: Look::KeyStore(configuration::key_copy),
    },
    Check {
        name: "api",
        why: "the API that gateways ask has no password: it believes whoever reaches it",
        look: Look::Always(configuration::api),
    },
    Check {
        name: "packets",
        why: "packets are limited on the interfaces of xdp.interfaces alone",
        look: Look::Always(configuration::packet_layer),
    },
    Check {
        name: "kernel.version",
        why: "the program uses what older kernels do not have",
        look: Look::Packets(kernel::version),
    },
    Check {
        name: "kernel.btf",
        why: "with type information the kernel names map fields and lines of the program in what it refuses",
        look: Look::Packets(kernel::btf),
    },
    Check {
        name: "kernel.program",
        why: "no packet is limited unless the kernel makes the maps and its verifier accepts the program",
        look: Look::Packets(kernel::program),
    },
    Check {
        name: "kernel.jit",
        why: "a program that is interpreted costs several times as much a packet",
        look: Look::Packets(kernel::jit),
    },
    Check {
        name: "capabilities",
        why: "the kernel lets a process load and attach the program only with all of them",
        look: Look::Packets(capabilities::capabilities),
    },
    Check {
        name: "capabilities.user_namespace",
        why: "capabilities of another user namespace do not count for BPF",
        look: Look::Packets(capabilities::user_namespace),
    },
    Check {
        name: "bpffs",
        why: "pins on a BPF file system keep the limits in force while no agent runs",
        look: Look::Packets(bpffs::mounted),
    },
    Check {
        name: "bpffs.writable",
        why: "the agent pins its maps and links below xdp.pin_dir",
        look: Look::Packets(bpffs::writable),
    },
    Check {
        name: "bpffs.schema",
        why: "an agent does not take over maps whose contents it would misread",
        look: Look::Packets(bpffs::schema),
    },
    Check {
        name: "memory",
        why: "the kernel makes maps for xdp.max_sources at the start, or not at all",
        look: Look::Packets(memory::memory),
    },
    Check {
        name: "interface",
        why: "an agent does not start for an interface that is not there, or whose frames have no Ethernet header",
        look: Look::Interface(interface::exists),
    },
    Check {
        name: "interface.native",
        why: "native XDP drops a packet before the kernel allocates anything for it; generic mode costs several times as much",
        look: Look::Device(interface::native),
    },
    Check {
        name: "interface.mtu",
        why: "a driver refuses native XDP when frames may be longer than it can hand to a program",
        look: Look::Device(interface::mtu),
    },
    Check {
        name: "interface.lro",
        why: "many drivers refuse native XDP while they join received packets, and joined packets are counted as one",
        look: Look::Device(interface::lro),
    },
    Check {
        name: "interface.vlan",
        why: "with the offload, the outer VLAN tag is not in the packet that the program sees",
        look: Look::Device(interface::vlan),
    },
    Check {
        name: "interface.queues",
        why: "one CPU serves a queue, so a flood is dropped by as many CPUs as there are queues",
        look: Look::Device(interface::queues),
    },
    Check {
        name: "interface.program",
        why: "an interface runs one XDP program, and the agent does not take the place of another owner's",
        look: Look::Device(interface::other_program),
    },
    Check {
        name: "redis",
        why: "without Redis each node limits by what it has seen itself",
        look: Look::Redis(store::reachable),
    },
    Check {
        name: "redis.topology",
        why: "the servers of a cluster refuse keys of each other",
        look: Look::Redis(store::topology),
    },
    Check {
        name: "redis.eviction",
        why: "a counter that Redis evicts gives its client a fresh limit",
        look: Look::Redis(store::eviction),
    },
    Check {
        name: "redis.key_store",
        why: "API keys are recognised by hashes with one secret, and a key that Redis loses has to be given back to it",
        look: Look::KeyStore(store::key_store),
    },
    Check {
        name: "redis.permissions",
        why: "counters are shared by scripts, which the user of the connection has to be allowed",
        look: Look::Redis(store::permissions),
    },
    Check {
        name: "redis.clock",
        why: "windows follow Redis' clock, so clients see X-RateLimit-Reset by it, and logs by this host's",
        look: Look::Redis(store::clock),
    },
];

/// Looks at everything, in the order of the table.
pub fn examine(config_path: &Path) -> Vec<Finding> {
    let host = Host::read(config_path);
    CHECKS.iter().flat_map(|check| check.look(&host)).collect()
}

impl Check {
    fn look(&self, host: &Host) -> Vec<Finding> {
        let seen: Vec<Seen> = match self.look {
            Look::Always(look) => vec![look(host)],
            Look::Packets(look) if host.wants_packets() => vec![look(host)],
            Look::Redis(look) if host.redis_config().is_some() => vec![look(host)],
            Look::KeyStore(look) if host.has_keys_in_redis() => vec![look(host)],
            Look::Packets(_) | Look::Redis(_) | Look::KeyStore(_) => Vec::new(),
            Look::Interface(look) => {
                host.interfaces.iter().map(|interface| look(host, interface).about(&interface.name)).collect()
            }
            Look::Device(look) => {
                let devices = host.interfaces.iter().filter_map(|at| Some((at, at.device.as_ref().ok()?)));
                devices.map(|(interface, device)| look(host, interface, device).about(&interface.name)).collect()
            }
        };
        let finding = |seen: Seen| {
            let Seen { status, found, remedy } = seen;
            Finding { check: self.name, status, found, why: self.why, remedy }
        };
        seen.into_iter().map(finding).collect()
    }
}

/// How the command ends: by what has to be put right first.
pub fn exit(findings: &[Finding]) -> Exit {
    const ORDER: [Exit; 3] = [Exit::Config, Exit::NoPermission, Exit::Unavailable];
    let has = |exit: &Exit| findings.iter().any(|finding| finding.status == Status::Error(*exit));
    ORDER.into_iter().find(has).unwrap_or(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::{exit as exit_of, *};

    #[test]
    fn checks_have_names_of_their_own_and_a_reason() {
        for (index, check) in CHECKS.iter().enumerate() {
            assert!(CHECKS[..index].iter().all(|other| other.name != check.name), "{}", check.name);
            assert!(!check.why.is_empty() && !check.why.ends_with('.'), "{}", check.name);
        }
    }

    #[test]
    fn the_exit_is_that_of_what_comes_first() {
        let finding = |status| Finding { check: "c", status, found: String::new(), why: "", remedy: None };
        let exit = |statuses: &[Status]| exit_of(&statuses.iter().copied().map(finding).collect::<Vec<_>>());
        assert_eq!(exit(&[Status::Ok, Status::Warning]), Exit::Ok);
        assert_eq!(exit(&[Status::Error(Exit::Unavailable), Status::Ok]), Exit::Unavailable);
        let (unavailable, no_permission) = (Status::Error(Exit::Unavailable), Status::Error(Exit::NoPermission));
        assert_eq!(exit(&[unavailable, no_permission]), Exit::NoPermission);
        assert_eq!(exit(&[unavailable, no_permission, Status::Error(Exit::Config)]), Exit::Config);
    }

    #[test]
    fn a_finding_has_a_stable_shape() {
        let finding =
            Finding { check: "c", status: Status::Error(Exit::Config), found: "f".into(), why: "w", remedy: None };
        let json = serde_json::to_string(&finding).unwrap();
        assert_eq!(json, r#"{"check":"c","status":"error","found":"f","why":"w","remedy":null}"#);
    }
}

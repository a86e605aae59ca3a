//! The kernel: its age, what it can do, and whether it takes the program.

use std::{fs, path::Path};

use super::{finding::Seen, host::Host};
use crate::{
    dataplane::{ErrorKind, chain},
    exit::Exit,
};

/// Kernel versions, as in 5.18.
pub(super) type Version = (u32, u32);

struct Feature {
    name: &'static str,
    since: Version,
}

/// What the program and the agent use that not every kernel has.
const FEATURES: [Feature; 7] = [
    Feature { name: "LRU hash maps", since: (4, 10) },
    Feature { name: "XDP links", since: (5, 9) },
    Feature { name: "ring buffers", since: (5, 8) },
    Feature { name: "the coarse clock", since: (5, 11) },
    Feature { name: "maps charged to the cgroup instead of RLIMIT_MEMLOCK", since: (5, 11) },
    Feature { name: "atomic compare-and-swap", since: (5, 12) },
    Feature { name: "multi-buffer frames", since: NEEDED },
];

/// The newest of [`FEATURES`].
const NEEDED: Version = (5, 18);

const UPGRADE: &str = "upgrade to Linux 5.18 or newer, or set xdp.interfaces = [] to limit requests only";

pub(super) fn version(_host: &Host) -> Seen {
    let release = match nix::sys::utsname::uname() {
        Ok(name) => name.release().to_string_lossy().into_owned(),
        Err(error) => return Seen::unseen(format!("the kernel does not tell its version: {error}")),
    };
    judge_version(&release)
}

fn judge_version(release: &str) -> Seen {
    match parse_version(release) {
        Some(version) if version >= NEEDED => {
            let names: Vec<_> = FEATURES.iter().map(|feature| feature.name).collect();
            Seen::ok(format!("Linux {release}, which has {}", names.join(", ")))
        }
        Some(version) => {
            let lacking = FEATURES.iter().filter(|feature| feature.since > version);
            let lacking: Vec<_> = lacking
                .map(|Feature { name, since: (major, minor) }| format!("{name} (since {major}.{minor})"))
                .collect();
            Seen::error(Exit::Unavailable, format!("Linux {release}, which lacks {}", lacking.join(", ")), UPGRADE)
        }
        None => Seen::warning(format!("Linux \"{release}\", a version that says nothing"), UPGRADE),
    }
}

fn parse_version(release: &str) -> Option<Version> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

pub(super) fn btf(_host: &Host) -> Seen {
    const BTF: &str = "/sys/kernel/btf/vmlinux";
    if Path::new(BTF).exists() {
        Seen::ok(format!("{BTF} is there"))
    } else {
        Seen::warning(
            format!("{BTF} is not there"),
            "use a kernel that is built with CONFIG_DEBUG_INFO_BTF=y, as distributions' are",
        )
    }
}

/// Says more than the version: vendors take features back, and configurations leave them out.
pub(super) fn program(host: &Host) -> Seen {
    match host.program() {
        Ok(accepted) => {
            let instructions = accepted.verified_instructions;
            let instructions = instructions.map_or(String::new(), |count| format!(", after {count} instructions"));
            Seen::ok(format!("the verifier accepts the XDP program{instructions}"))
        }
        Err(_) if host.capabilities.as_ref().is_ok_and(|capabilities| !capabilities.missing().is_empty()) => {
            Seen::unseen("not tried: this process may not load programs")
        }
        Err(error) => {
            let (exit, remedy) = if error.kind() == ErrorKind::Permission {
                (Exit::NoPermission, "run on the host, outside of containers that keep BPF from their processes")
            } else {
                (Exit::Unavailable, UPGRADE)
            };
            Seen::error(exit, chain(error), remedy)
        }
    }
}

pub(super) fn jit(host: &Host) -> Seen {
    const SWITCH: &str = "/proc/sys/net/core/bpf_jit_enable";
    const REMEDY: &str = "sysctl -w net.core.bpf_jit_enable=1";
    // The program that was tried knows best; the switch is not to be seen in every network namespace.
    let tried = host.program().as_ref().ok().and_then(|accepted| accepted.compiled);
    match (tried, fs::read_to_string(SWITCH).as_deref().map(str::trim)) {
        (Some(true), _) => Seen::ok("programs are compiled to machine code"),
        (Some(false), _) | (None, Ok("0")) => Seen::warning("programs are interpreted", REMEDY),
        (None, Ok(value)) => Seen::ok(format!("net.core.bpf_jit_enable is {value}")),
        (None, Err(error)) => Seen::unseen(format!("{SWITCH}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn versions_are_compared_as_numbers() {
        for (release, version) in [
            ("6.18.44-fc-v669", Some((6, 18))),
            ("5.4.0-150-generic", Some((5, 4))),
            ("5.18", Some((5, 18))),
            ("6.1-rc3", Some((6, 1))),
            ("next", None),
            ("", None),
        ] {
            assert_eq!(parse_version(release), version, "{release}");
        }
    }

    #[test]
    fn an_old_kernel_is_told_what_it_lacks() {
        let seen = judge_version("5.10.0-28-amd64");
        assert_eq!(seen.status, Status::Error(Exit::Unavailable));
        for lacking in ["the coarse clock (since 5.11)", "compare-and-swap (since 5.12)", "frames (since 5.18)"] {
            assert!(seen.found.contains(lacking), "{}", seen.found);
        }
        assert!(!seen.found.contains("XDP links"), "{}", seen.found);
        assert_eq!(judge_version("5.18.0").status, Status::Ok);
        assert_eq!(judge_version("next").status, Status::Warning);
    }
}

//! The capabilities that the packet layer needs, and which of them this process has.

use std::{fmt, fs, io};

/// A capability of capabilities(7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capability {
    pub name: &'static str,
    /// As `setpriv` and `capsh` know it.
    pub lower: &'static str,
    bit: u8,
    /// What fails without it.
    pub what_for: &'static str,
}

/// Each is proved to be needed by a test that leaves it out.
pub const NEEDED: [Capability; 3] = [
    Capability { name: "CAP_BPF", lower: "bpf", bit: 39, what_for: "make maps, load programs and open pins" },
    Capability {
        name: "CAP_NET_ADMIN",
        lower: "net_admin",
        bit: 12,
        what_for: "load and attach programs that see packets",
    },
    Capability {
        name: "CAP_PERFMON",
        lower: "perfmon",
        bit: 38,
        what_for: "let the verifier accept arithmetic on pointers into a packet",
    },
];

/// The kernel takes it for any of [`NEEDED`]. Alone it names the programs of others, and mounts a BPF file system.
pub const SYS_ADMIN: Capability =
    Capability { name: "CAP_SYS_ADMIN", lower: "sys_admin", bit: 21, what_for: "mount file systems, name any program" };

/// The effective capabilities of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(u64);

impl Capabilities {
    pub fn of_process() -> io::Result<Self> {
        let status = fs::read_to_string("/proc/self/status")?;
        Self::parse(&status).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn parse(status: &str) -> Option<Self> {
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
        u64::from_str_radix(effective.trim(), 16).ok().map(Self)
    }

    pub const fn has(self, capability: Capability) -> bool {
        self.0 & (1 << capability.bit) != 0
    }

    /// Those of [`NEEDED`] that are not there.
    pub fn missing(self) -> Vec<Capability> {
        if self.has(SYS_ADMIN) {
            return Vec::new();
        }
        NEEDED.into_iter().filter(|capability| !self.has(*capability)).collect()
    }
}

/// "CAP_BPF (make maps, …) and CAP_PERFMON (…)", for errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing(pub Vec<Capability>);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Capability { name, what_for, .. }) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(" and ")?;
            }
            write!(f, "{name} (to {what_for})")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_status() {
        let of = |text: &str| Capabilities::parse(&format!("CapPrm:\tffff\nCapEff:\t{text}\n"));
        let names = |text| of(text).unwrap().missing().iter().map(|missing| missing.name).collect::<Vec<_>>();
        assert_eq!(names("0000000000000000"), ["CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON"]);
        assert_eq!(names("000000c000001000"), [""; 0]);
        assert_eq!(names("0000008000001000"), ["CAP_PERFMON"]);
        assert_eq!(names("000001ffffffffff"), [""; 0]);
        assert_eq!((of("x"), Capabilities::parse("")), (None, None));
        assert!(Capabilities::of_process().is_ok());
    }

    #[test]
    fn missing_ones_are_named_with_what_they_are_for() {
        let text = Missing(Capabilities(0).missing()).to_string();
        assert!(text.starts_with("CAP_BPF (to make maps, ") && text.contains(" and CAP_PERFMON (to let"), "{text}");
    }
}

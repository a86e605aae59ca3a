//! Where maps and links are pinned.

use nix::unistd::{AccessFlags, access};

use super::{finding::Seen, host::Host};
use crate::{
    dataplane::{
        chain,
        probe::{OWN_MOUNTS_REMEDY, PINS_VERSION, PinPlace, nearest_existing, pin_place},
    },
    exit::Exit,
};

const MOUNT: &str = "mount -t bpf bpf /sys/fs/bpf";

pub(super) fn mounted(host: &Host) -> Seen {
    let pin_dir = host.pin_dir().display();
    match pin_place(host.pin_dir()) {
        Ok(PinPlace::Bpffs { .. }) => Seen::ok(format!("{pin_dir} is on a BPF file system")),
        Ok(PinPlace::Mountable { for_itself: true }) => Seen::warning(
            "/sys/fs/bpf is not mounted in the mount namespace of this process, which is its own, as \"ip netns exec\" makes \
             one: what is pinned there ends with the agent",
            OWN_MOUNTS_REMEDY,
        ),
        Ok(PinPlace::Mountable { .. }) if host.can_mount() => {
            Seen::ok("/sys/fs/bpf is not mounted yet: the agent mounts it at its start")
        }
        Ok(PinPlace::Mountable { .. }) => {
            Seen::error(Exit::NoPermission, "/sys/fs/bpf is not mounted, and this process may not", MOUNT)
        }
        Ok(PinPlace::Elsewhere) => Seen::error(
            Exit::Unavailable,
            format!("{pin_dir} is not on a BPF file system"),
            format!("set xdp.pin_dir to a folder below a BPF file system, such as /sys/fs/bpf/limiter ({MOUNT})"),
        ),
        Err(error) => Seen::unseen(chain(&error)),
    }
}

pub(super) fn writable(host: &Host) -> Seen {
    // On another file system the remedy is another.
    if !matches!(pin_place(host.pin_dir()), Ok(PinPlace::Bpffs { .. })) {
        return Seen::ok("not looked at: there is no BPF file system to write to");
    }
    let folder = nearest_existing(host.pin_dir());
    match access(&folder, AccessFlags::R_OK | AccessFlags::W_OK | AccessFlags::X_OK) {
        Ok(()) => Seen::ok(format!("this process may write to {}", folder.display())),
        Err(error) => Seen::error(
            Exit::NoPermission,
            format!("this process may not write to {}: {}", folder.display(), error.desc()),
            "run as root, or give the agent's user a BPF file system: mount -t bpf -o mode=0700 bpf DIR && chown USER DIR, and xdp.pin_dir = \"DIR/limiter\"",
        ),
    }
}

pub(super) fn schema(host: &Host) -> Seen {
    match pin_place(host.pin_dir()) {
        Ok(PinPlace::Bpffs { other_versions }) if !other_versions.is_empty() => {
            let versions: Vec<_> = other_versions.iter().map(u32::to_string).collect();
            let (place, versions) = (host.pin_dir().display(), versions.join(" and "));
            if other_versions.iter().all(|version| *version < PINS_VERSION) {
                return Seen::ok(format!("pins in {place} use schema {versions}: the next start takes them over"));
            }
            Seen::error(
                Exit::Unavailable,
                format!("pins in {place} use schema {versions}, this agent needs {PINS_VERSION}"),
                "limiter unpin",
            )
        }
        Ok(_) => Seen::ok(format!("no pins of another schema than {PINS_VERSION}")),
        Err(error) => Seen::unseen(chain(&error)),
    }
}

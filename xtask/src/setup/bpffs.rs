//! The BPF file system, where the agent pins maps and links.

use std::{fs, process::Command};

use anyhow::{Context as _, Result, bail};

use super::{Item, apt::Apt};
use crate::{privilege, process};

const MOUNT_POINT: &str = "/sys/fs/bpf";

#[derive(Debug)]
pub(super) struct Bpffs;

impl Item for Bpffs {
    fn name(&self) -> String {
        "bpffs".into()
    }

    fn check(&self) -> Result<String> {
        let mounts = fs::read_to_string("/proc/self/mounts").context("read /proc/self/mounts")?;
        if !has_bpffs(&mounts) {
            bail!("not mounted at {MOUNT_POINT}");
        }
        Ok(format!("mounted at {MOUNT_POINT}"))
    }

    fn install(&self, _: &mut Apt) -> Result<()> {
        if !privilege::is_root() {
            bail!("mounting needs root");
        }
        process::run(Command::new("mount").args(["-t", "bpf", "bpf", MOUNT_POINT]), "mount the BPF file system")
    }

    fn remedy(&self) -> Vec<String> {
        vec![format!("sudo mount -t bpf bpf {MOUNT_POINT}")]
    }
}

fn has_bpffs(mounts: &str) -> bool {
    mounts.lines().any(|line| {
        let mut fields = line.split(' ').skip(1);
        fields.next() == Some(MOUNT_POINT) && fields.next() == Some("bpf")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_bpffs_among_the_mounts() {
        assert!(has_bpffs("sysfs /sys sysfs rw 0 0\nbpf /sys/fs/bpf bpf rw,mode=700 0 0\n"));
        assert!(!has_bpffs("tmpfs /sys/fs/bpf tmpfs rw 0 0\nbpf /run/other bpf rw 0 0\n"));
    }
}

//! The kernel and busybox of Debian, downloaded as packages and unpacked under target/vm.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{process, workspace::Workspace};

const VERSION: &str = "6.1.";
/// Depends on the newest kernel of a release.
const META_PACKAGE: &str = "linux-image-amd64";
const BUSYBOX_PACKAGE: &str = "busybox-static";

#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) image: PathBuf,
    /// Folder of its modules.
    pub(super) modules: PathBuf,
    pub(super) busybox: PathBuf,
}

pub(super) fn kernel(workspace: &Workspace) -> Result<Kernel> {
    let folder = workspace.target().join("vm");
    let unpacked = folder.join("kernel");
    if !unpacked.exists() {
        let package = kernel_package()?;
        println!("downloading {package}, for {}", unpacked.display());
        unpack(&package, &unpacked)?;
    }
    let busybox = folder.join("busybox");
    if !busybox.exists() {
        unpack(BUSYBOX_PACKAGE, &busybox)?;
    }
    let image = only_entry(&unpacked.join("boot"), &format!("vmlinuz-{VERSION}"))?;
    let modules = only_entry(&unpacked.join("lib/modules"), VERSION)?;
    Ok(Kernel { image, modules: modules.join("kernel"), busybox: busybox.join("bin/busybox") })
}

fn kernel_package() -> Result<String> {
    let mut command = Command::new("apt-cache");
    let operation = "find the kernel of Debian 12";
    let depends = process::output(command.args(["depends", META_PACKAGE]), operation)?;
    let prefix = format!("linux-image-{VERSION}");
    let mut packages = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let package = packages.find(|package| package.starts_with(&prefix));
    package.map(str::to_owned).with_context(|| {
        format!(
            "{operation}: {META_PACKAGE} of this system's package lists is no {VERSION}x; unpack one with \
             `dpkg-deb --extract linux-image-{VERSION}….deb target/vm/kernel`"
        )
    })
}

/// Downloads a package, which apt checks against the signed lists, and unpacks it without installing it. The folder is
/// there when all of it is.
fn unpack(package: &str, folder: &Path) -> Result<()> {
    let operation = format!("download {package}");
    let partial = folder.with_extension("partial");
    if partial.exists() {
        fs::remove_dir_all(&partial).with_context(|| format!("remove {}", partial.display()))?;
    }
    fs::create_dir_all(&partial).with_context(|| format!("make {}", partial.display()))?;
    // As root, apt otherwise downloads as a user who may have no access to a clone.
    let arguments = ["-qq", "-o", "APT::Sandbox::User=root", "download", package];
    process::run(Command::new("apt-get").current_dir(&partial).args(arguments), &operation)?;
    let archive = only_entry(&partial, package)?;
    let tree = partial.join("tree");
    let mut dpkg = Command::new("dpkg-deb");
    process::run(dpkg.arg("--extract").arg(&archive).arg(&tree), &format!("unpack {package}"))?;
    fs::rename(&tree, folder).with_context(|| format!("rename {} to {}", tree.display(), folder.display()))?;
    fs::remove_dir_all(&partial).with_context(|| format!("remove {}", partial.display()))
}

/// The entry of a folder whose name starts so.
fn only_entry(folder: &Path, prefix: &str) -> Result<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            found.push(entry.path());
        }
    }
    match &*found {
        [only] => Ok(only.clone()),
        _ => bail!("{} has {} entries named {prefix}…, and should have one", folder.display(), found.len()),
    }
}

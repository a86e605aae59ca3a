//! Debian packages, as root and without questions.

use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use crate::{privilege, process};

/// Remembers that the lists have been refreshed: once for all that one setup installs.
#[derive(Debug, Default)]
pub(super) struct Apt {
    refreshed: bool,
}

impl Apt {
    pub(super) fn install(&mut self, packages: &[&str]) -> Result<()> {
        if are_installed(packages) {
            return Ok(());
        }
        if process::find_program("apt-get").is_none() {
            bail!("apt-get is not on this system");
        }
        if !privilege::is_root() {
            bail!("apt-get needs root");
        }
        if !self.refreshed {
            println!("apt-get update");
            process::run(quiet_apt_get().arg("update"), "refresh the package lists")?;
            self.refreshed = true;
        }
        println!("{}", apt_command(packages));
        let mut apt_get = quiet_apt_get();
        apt_get.args(["install", "--yes", "--no-install-recommends"]).args(packages);
        process::run(&mut apt_get, "install Debian packages")
    }
}

/// Spares the refresh of the lists where another part of a requirement is what is missing.
fn are_installed(packages: &[&str]) -> bool {
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat=${db:Status-Status}\n"]).args(packages);
    process::output(&mut query, "ask for the state of Debian packages")
        .is_ok_and(|states| states.lines().all(|state| state == "installed"))
}

/// What a person would type.
pub(super) fn apt_command(packages: &[&str]) -> String {
    format!("apt-get install --no-install-recommends {}", packages.join(" "))
}

fn quiet_apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command
        // Another installation may hold the lock for a while, at boot above all.
        .args(["-qq", "-o", "DPkg::Lock::Timeout=300", "-o", "Dpkg::Use-Pty=0"])
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

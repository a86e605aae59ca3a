//! The files of the agent.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use nix::unistd::{AccessFlags, access};

use super::{finding::Seen, host::Host};
use crate::{cli::validate::open_to_others, config::KeyStoreKind, dataplane::probe::left_over, exit::Exit};

pub(super) fn valid(host: &Host) -> Seen {
    match &host.checked {
        Ok(checked) => Seen::ok(format!(
            "{} and {} are valid",
            checked.config.path.display(),
            checked.config.policy.file.display()
        )),
        Err(errors) => {
            let remedy = if errors.exit() == Exit::NoPermission {
                "run as root or as the agent's user, or let this user read the file"
            } else {
                "correct what is named, until \"limiter validate\" is content"
            };
            Seen::error(errors.exit(), errors.to_string(), remedy)
        }
    }
}

/// The secret itself is refused when others may read it; whoever may write the key file can let himself in, or lock
/// others out.
pub(super) fn key_file(host: &Host) -> Seen {
    const GROUP_OR_OTHERS_WRITE: u32 = 0o022;
    let Some(config) = &host.config else { return Seen::ok("not looked at: the configuration is not known") };
    let file = &config.identity.key_file;
    if config.identity.key_store != KeyStoreKind::File {
        return Seen::ok("not in use: identity.key_store is \"redis\"");
    }
    match fs::metadata(file) {
        Ok(metadata) if metadata.permissions().mode() & GROUP_OR_OTHERS_WRITE != 0 => Seen::warning(
            format!(
                "{} can be written to by others (mode {:04o})",
                file.display(),
                metadata.permissions().mode() & 0o7777
            ),
            format!("chmod go-w {}", file.display()),
        ),
        Ok(_) => Seen::ok(format!("{} is written to by its owner alone", file.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Seen::ok(format!("{} is not there: there are no API keys", file.display()))
        }
        Err(error) => Seen::unseen(format!("{}: {error}", file.display())),
    }
}

/// Whether there is, or can be, a copy of the keys in Redis.
pub(super) fn key_copy(host: &Host) -> Seen {
    let Some(config) = &host.config else { return Seen::ok("not looked at: the configuration is not known") };
    if config.identity.key_store == KeyStoreKind::File {
        return Seen::ok("not in use: identity.key_store is \"file\"");
    }
    let file = &config.identity.key_copy_file;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match (fs::metadata(file), access(folder, AccessFlags::W_OK | AccessFlags::X_OK)) {
        (_, Err(error)) => Seen::warning(
            format!("{} cannot be written: {}: {}", file.display(), folder.display(), error.desc()),
            format!("mkdir -p -m 0700 {} # owned by the agent's user", folder.display()),
        ),
        (Ok(_), Ok(())) => Seen::ok(format!("{} is there", file.display())),
        (Err(_), Ok(())) => Seen::ok(format!("{} is not there yet: the agent writes it", file.display())),
    }
}

/// Who may ask for decisions.
pub(super) fn api(host: &Host) -> Seen {
    let Some(config) = &host.config else { return Seen::ok("not looked at: the configuration is not known") };
    match open_to_others(&config.api.http) {
        None => Seen::ok(format!("api.http = \"{}\" is for this host alone", config.api.http)),
        Some(found) => {
            Seen::warning(found, "set api.http = \"127.0.0.1:7070\", or let only gateways through a firewall")
        }
    }
}

pub(super) fn packet_layer(host: &Host) -> Seen {
    if let Some(config) = &host.config
        && let Some(left) = left_over(&config.xdp.pin_dir, &config.xdp.interfaces)
        && !left.is_empty()
    {
        return Seen::warning(
            format!(
                "the limits of an earlier configuration are in force, by what is pinned in {} for {}, which xdp.interfaces does not name",
                config.xdp.pin_dir.display(),
                left.join(" and ")
            ),
            "restart the agent, which detaches there; without one, run: limiter unpin",
        );
    }
    if host.wants_packets() {
        Seen::ok("wanted")
    } else {
        Seen::ok("off: xdp.interfaces is empty, so requests alone are limited, and the kernel is not looked at")
    }
}

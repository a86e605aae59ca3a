//! What this process may do.

use std::fs;

use super::{finding::Seen, host::Host};
use crate::{
    capability::{Missing, NEEDED},
    exit::Exit,
};

pub(super) fn capabilities(host: &Host) -> Seen {
    let capabilities = match &host.capabilities {
        Ok(capabilities) => capabilities,
        Err(error) => return Seen::unseen(format!("/proc/self/status: {error}")),
    };
    let missing = capabilities.missing();
    let names = |capabilities: &[crate::capability::Capability]| {
        let names: Vec<_> = capabilities.iter().map(|capability| capability.name).collect();
        names.join(" ")
    };
    if missing.is_empty() {
        return Seen::ok(format!("this process has {}, or what stands for them", names(&NEEDED)));
    }
    let remedy = format!(
        "run as root, or with AmbientCapabilities={} in the unit; this command looks at its own capabilities",
        names(&NEEDED)
    );
    Seen::error(Exit::NoPermission, format!("this process lacks {}", Missing(missing)), remedy)
}

/// Capabilities of a user namespace are not those of the host.
pub(super) fn user_namespace(_host: &Host) -> Seen {
    const MAP: &str = "/proc/self/uid_map";
    match fs::read_to_string(MAP) {
        Ok(map) if is_initial(&map) => Seen::ok("the host's"),
        Ok(_) => Seen::error(
            Exit::NoPermission,
            "this process runs in a user namespace of its own",
            "run on the host, or in a container that shares the host's user namespace (\"--userns=host\")",
        ),
        Err(error) => Seen::unseen(format!("{MAP}: {error}")),
    }
}

fn is_initial(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_told_apart() {
        assert!(is_initial("         0          0 4294967295\n"));
        assert!(!is_initial("         0       1000          1\n"));
        assert!(!is_initial("0 0 4294967295\n1 1 1\n"));
    }
}

//! Names the XDP program of somebody else that keeps this one from an interface, and says how it goes.

use aya::programs::{loaded_links, loaded_programs};

use super::{AttachedMode, link_state};

/// What the programs of libxdp run under: xdp-loader, xdp-filter and others.
const DISPATCHER: &str = "xdp_dispatcher";
/// The program of an agent.
const OURS: &str = "limiter";

/// The program, as in "… is attached", and what to do about it.
pub(super) fn describe(interface: &str) -> (String, String) {
    match link_state::running(interface).ok().flatten() {
        // Gone between two looks, or not told.
        None => ("another XDP program is attached there".to_owned(), remedy(interface, None, Link::Unknown, None)),
        Some(running) => {
            let name = program_name(running.program_id);
            let link = link_of(running.program_id);
            let id = running.program_id;
            let program = match &name {
                Some(name) => format!("another XDP program (\"{name}\", id {id}) is attached there"),
                None => format!("another XDP program (id {id}) is attached there"),
            };
            let mode =
                running.mode.map_or("in the device itself".to_owned(), |mode| format!("in {} mode", mode.as_str()));
            let by = match link {
                Link::Held(link) => format!(" by a BPF link (id {link})"),
                Link::None | Link::Unknown => String::new(),
            };
            (format!("{program} {mode}{by}"), remedy(interface, name.as_deref(), link, running.mode))
        }
    }
}

/// What keeps a program attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Held(u32),
    /// It was attached by rtnetlink.
    None,
    /// To list links takes more than an agent needs otherwise (`CAP_SYS_ADMIN`).
    Unknown,
}

fn remedy(interface: &str, name: Option<&str>, link: Link, mode: Option<AttachedMode>) -> String {
    if name == Some(DISPATCHER) {
        return format!("unload what libxdp has loaded with \"xdp-loader unload {interface} --all\"");
    }
    // As an agent that has got another xdp.pin_dir finds its earlier program.
    if name == Some(OURS) && matches!(link, Link::Held(_)) {
        return "stop the agent that it belongs to, if one runs, and run \"limiter unpin\" with the xdp.pin_dir of its \
                configuration"
            .to_owned();
    }
    // The kernel lets nobody else end a link.
    let end_link = "stop the program that holds the link, or remove its pin";
    if let Link::Held(_) = link {
        return end_link.to_owned();
    }
    let kind = match mode {
        Some(AttachedMode::Generic) => "xdpgeneric",
        Some(AttachedMode::Native) => "xdpdrv",
        None => "xdp",
    };
    let detach = format!("remove it with \"ip link set dev {interface} {kind} off\"");
    if link == Link::Unknown { format!("{detach}; if it is held by a BPF link, {end_link}") } else { detach }
}

/// The name of a loaded program, if it has one and this process may look.
pub(super) fn program_name(id: u32) -> Option<String> {
    let program = loaded_programs().flatten().find(|program| program.id() == id)?;
    program.name_as_str().filter(|name| !name.is_empty()).map(str::to_owned)
}

fn link_of(program_id: u32) -> Link {
    // A link that ends while the kernel lists them is an error of that list, and not of the next one.
    const LISTS: usize = 5;
    let mut lists = std::iter::repeat_with(|| link_in_list(program_id)).take(LISTS);
    lists.find(|link| !matches!(link, Link::Unknown)).unwrap_or(Link::Unknown)
}

fn link_in_list(program_id: u32) -> Link {
    let mut link = Link::None;
    for found in loaded_links() {
        match found {
            Ok(found) if found.program_id() == program_id => return Link::Held(found.id()),
            Ok(_) => {}
            Err(_) => link = Link::Unknown,
        }
    }
    link
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_is_the_one_that_works() {
        let (native, generic) = (Some(AttachedMode::Native), Some(AttachedMode::Generic));
        for (name, link, mode, expected) in [
            (Some("x"), Link::None, native, "\"ip link set dev eth0 xdpdrv off\""),
            (Some("x"), Link::None, generic, "\"ip link set dev eth0 xdpgeneric off\""),
            (None, Link::Unknown, None, "\"ip link set dev eth0 xdp off\"; if it is held by a BPF link, stop"),
            (Some("x"), Link::Held(7), native, "stop the program that holds the link"),
            (Some("limiter"), Link::Held(7), native, "run \"limiter unpin\" with the xdp.pin_dir of its"),
            (Some("xdp_dispatcher"), Link::Unknown, native, "\"xdp-loader unload eth0 --all\""),
            (Some("xdp_dispatcher"), Link::Held(7), generic, "\"xdp-loader unload eth0 --all\""),
        ] {
            let remedy = remedy("eth0", name, link, mode);
            assert!(remedy.contains(expected), "{name:?} {link:?} {mode:?}: {remedy}");
        }
    }
}

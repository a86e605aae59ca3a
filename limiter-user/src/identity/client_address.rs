//! Which address a request comes from, when gateways and proxies stand between.
//!
//! Headers are believed only when a gateway sent them, and in `X-Forwarded-For` and `Forwarded` only as far from the right
//! as each hop is one that is trusted to have named the next. Which of several headers is the gateway's and which the
//! client's own cannot be told: `X-Forwarded-For` comes first, unless the configuration names another.

use std::{
    iter::Peekable,
    net::{IpAddr, Ipv6Addr},
};

use ipnet::IpNet;

use super::forwarded::{elements_from_right, node};

/// Hops of `X-Forwarded-For` that are looked at.
pub const MAX_HOPS: usize = 64;

/// Where a request comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientAddress {
    /// Canonical: IPv4-mapped IPv6 is IPv4.
    pub address: IpAddr,
    /// Whether packets of this client come to this host from that address: no proxy of another host stands between. Only
    /// such an address can be acted on in the kernel. Whether it *may* be is another matter (`trusted_proxies`, allow
    /// prefixes, the host's own addresses).
    pub packet_source: bool,
}

/// What is known of how a request came.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'h> {
    /// Whom the connection is from; `None` for a Unix socket, whose peer is a gateway on this host.
    pub peer: Option<IpAddr>,
    /// Values of all `X-Forwarded-For` lines, in order.
    pub forwarded_for: &'h [&'h [u8]],
    /// Values of all `Forwarded` lines, in order: count only where there is no `X-Forwarded-For`.
    pub forwarded: &'h [&'h [u8]],
    /// `X-Real-IP`: counts only where there is neither.
    pub real_ip: Option<&'h [u8]>,
    /// The one header that counts, where the configuration says which.
    pub header: Option<AddressHeader>,
}

/// A header that names clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressHeader {
    XForwardedFor,
    Forwarded,
    XRealIp,
}

/// The client's address; `None` when a Unix socket's gateway did not name it.
///
/// `is_local` knows loopback and the host's own addresses.
pub fn client_address(
    arrival: &Arrival<'_>,
    trusted_proxies: &[IpNet],
    is_local: impl Fn(IpAddr) -> bool,
) -> Option<ClientAddress> {
    let is_trusted = |address: IpAddr| trusted_proxies.iter().any(|prefix| prefix.contains(&address));
    let peer = arrival.peer.map(|peer| peer.to_canonical());
    let itself = peer.map(|address| ClientAddress { address, packet_source: true });
    let peer_is_local = peer.is_none_or(&is_local);
    if !peer_is_local && !peer.is_some_and(is_trusted) {
        return itself;
    }

    let is_named = |header: AddressHeader| arrival.header.is_none_or(|named| named == header);
    let mut x_forwarded_for =
        hops(arrival.forwarded_for.iter().rev().flat_map(|line| line.rsplit(|byte| *byte == b',')));
    let mut forwarded = hops(arrival.forwarded.iter().rev().flat_map(|line| elements_from_right(line)));
    let walk = Walk { is_local: &is_local, is_trusted: &is_trusted, packet_source: peer_is_local };
    let named = if is_named(AddressHeader::XForwardedFor) && x_forwarded_for.peek().is_some() {
        walk.to_client(x_forwarded_for.map(address_in))
    } else if is_named(AddressHeader::Forwarded) && forwarded.peek().is_some() {
        walk.to_client(forwarded.map(|element| address_in(&node(element)?)))
    } else if is_named(AddressHeader::XRealIp) {
        let address = arrival.real_ip.and_then(address_in);
        address.map(|address| ClientAddress { address, packet_source: peer_is_local })
    } else {
        None
    };
    named.or(itself)
}

/// The entries of a header that say something.
fn hops<'h>(entries: impl Iterator<Item = &'h [u8]>) -> Peekable<impl Iterator<Item = &'h [u8]>> {
    entries.map(<[u8]>::trim_ascii).filter(|hop| !hop.is_empty()).take(MAX_HOPS).peekable()
}

/// From the gateway towards the client, as far as each hop is one that is trusted to have named the next.
struct Walk<'w> {
    is_local: &'w dyn Fn(IpAddr) -> bool,
    is_trusted: &'w dyn Fn(IpAddr) -> bool,
    packet_source: bool,
}

impl Walk<'_> {
    /// The last hop that is known.
    fn to_client(&self, hops: impl Iterator<Item = Option<IpAddr>>) -> Option<ClientAddress> {
        let mut packet_source = self.packet_source;
        let mut client = None;
        for hop in hops {
            let Some(address) = hop else { break };
            // The hop before this one is passed by now; a proxy on another host hides whose packets come here.
            if let Some(ClientAddress { address: passed, .. }) = client {
                packet_source &= (self.is_local)(passed);
            }
            client = Some(ClientAddress { address, packet_source });
            if !(self.is_local)(address) && !(self.is_trusted)(address) {
                break;
            }
        }
        client
    }
}

/// The address in one entry: with or without port, brackets, zone and quotes. `None` for anything else.
fn address_in(entry: &[u8]) -> Option<IpAddr> {
    // An IPv6 address with brackets, the longest zone and a port.
    const MAX_LEN: usize = 80;
    let entry = entry.trim_ascii();
    if entry.len() > MAX_LEN {
        return None;
    }
    let text = std::str::from_utf8(entry).ok()?;
    let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
    let address = match text.strip_prefix('[') {
        Some(bracketed) => {
            let (address, after) = bracketed.split_once(']')?;
            if !after.is_empty() && !is_port(after.strip_prefix(':')?) {
                return None;
            }
            IpAddr::V6(ipv6(address)?)
        }
        None => match text.split_once(':') {
            Some((address, port)) if !port.contains(':') => {
                let address = address.parse().ok()?;
                is_port(port).then_some(IpAddr::V4(address))?
            }
            Some(_) => IpAddr::V6(ipv6(text)?),
            None => IpAddr::V4(text.parse().ok()?),
        },
    };
    let address = address.to_canonical();
    (!address.is_unspecified()).then_some(address)
}

fn ipv6(text: &str) -> Option<Ipv6Addr> {
    let address = text.split_once('%').map_or(text, |(address, _zone)| address);
    address.parse().ok()
}

/// A number, or as `Forwarded` has it, a name that begins with an underscore.
fn is_port(text: &str) -> bool {
    if let Some(name) = text.strip_prefix('_') {
        return !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    }
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 127.0.0.0/8, ::1 and 192.0.2.1 are this host; 10.0.0.0/8 and 2001:db8:ffff::/48 are trusted.
    fn decide(peer: &str, forwarded_for: &[&str], real_ip: Option<&str>) -> String {
        decide_by(None, peer, forwarded_for, &[], real_ip)
    }

    fn decide_by(
        header: Option<AddressHeader>,
        peer: &str,
        forwarded_for: &[&str],
        forwarded: &[&str],
        real_ip: Option<&str>,
    ) -> String {
        let lines: Vec<&[u8]> = forwarded_for.iter().map(|line| line.as_bytes()).collect();
        let forwarded: Vec<&[u8]> = forwarded.iter().map(|line| line.as_bytes()).collect();
        let arrival = Arrival {
            peer: (peer != "unix").then(|| peer.parse().unwrap()),
            forwarded_for: &lines,
            forwarded: &forwarded,
            real_ip: real_ip.map(str::as_bytes),
            header,
        };
        let trusted = ["10.0.0.0/8".parse().unwrap(), "2001:db8:ffff::/48".parse().unwrap()];
        let is_local = |address: IpAddr| address.is_loopback() || address.to_string() == "192.0.2.1";
        match client_address(&arrival, &trusted, is_local) {
            Some(ClientAddress { address, packet_source: true }) => format!("{address} source"),
            Some(ClientAddress { address, packet_source: false }) => format!("{address} behind"),
            None => "none".into(),
        }
    }

    #[test]
    fn client_addresses() {
        let many = |last: &str| format!("{last}{}", ", 10.0.0.1".repeat(200));
        for (what, peer, forwarded_for, real_ip, expected) in [
            ("a direct client", "203.0.113.9", &[][..], None, "203.0.113.9 source"),
            ("its headers are ignored", "203.0.113.9", &["198.51.100.1"], Some("198.51.100.1"), "203.0.113.9 source"),
            ("IPv4-mapped is IPv4", "::ffff:203.0.113.9", &[], None, "203.0.113.9 source"),
            ("a gateway on this host", "127.0.0.1", &["203.0.113.9"], None, "203.0.113.9 source"),
            ("by its outer address", "192.0.2.1", &["203.0.113.9"], None, "203.0.113.9 source"),
            ("by a mapped loopback", "::ffff:127.0.0.1", &["203.0.113.9"], None, "203.0.113.9 source"),
            ("by a Unix socket", "unix", &["203.0.113.9"], None, "203.0.113.9 source"),
            ("a spoofed hop to the left", "unix", &["198.51.100.1, 203.0.113.9"], None, "203.0.113.9 source"),
            ("in a line of its own", "unix", &["198.51.100.1", "203.0.113.9"], None, "203.0.113.9 source"),
            ("a spoofed trusted hop", "unix", &["10.0.0.1, 203.0.113.9"], None, "203.0.113.9 source"),
            ("behind a trusted proxy", "unix", &["203.0.113.9, 10.0.0.1"], None, "203.0.113.9 behind"),
            ("behind two", "unix", &["203.0.113.9, 10.0.0.2", "10.0.0.1"], None, "203.0.113.9 behind"),
            ("spoofed behind one", "unix", &["6.6.6.6, 203.0.113.9, 10.0.0.1"], None, "203.0.113.9 behind"),
            ("a trusted proxy itself", "unix", &["10.0.0.1"], None, "10.0.0.1 source"),
            ("two gateways on this host", "unix", &["203.0.113.9, 127.0.0.1"], None, "203.0.113.9 source"),
            ("a remote gateway", "10.0.0.1", &["203.0.113.9"], None, "203.0.113.9 behind"),
            ("a remote gateway without headers", "10.0.0.1", &[], None, "10.0.0.1 source"),
            ("IPv6 hops", "unix", &["2001:db8::9, 2001:db8:ffff::1"], None, "2001:db8::9 behind"),
            ("a mapped hop", "unix", &["203.0.113.9, ::ffff:10.0.0.1"], None, "203.0.113.9 behind"),
            ("a mapped client", "unix", &["::ffff:203.0.113.9"], None, "203.0.113.9 source"),
            ("a port", "unix", &["203.0.113.9:567"], None, "203.0.113.9 source"),
            ("an IPv6 port", "unix", &["[2001:db8::1]:443"], None, "2001:db8::1 source"),
            ("brackets", "unix", &["[2001:db8::1]"], None, "2001:db8::1 source"),
            ("a zone", "unix", &["fe80::1%eth0"], None, "fe80::1 source"),
            ("a zone in brackets", "unix", &["[fe80::1%25eth0]:80"], None, "fe80::1 source"),
            ("quotes", "unix", &["\"[2001:db8::1]:443\""], None, "2001:db8::1 source"),
            ("spaces", "unix", &["  203.0.113.9\t"], None, "203.0.113.9 source"),
            ("empty entries", "unix", &["203.0.113.9, , ", ""], None, "203.0.113.9 source"),
            ("garbage to the left", "unix", &["unknown, 10.0.0.1"], None, "10.0.0.1 source"),
            ("garbage between", "unix", &["203.0.113.9, _hidden, 10.0.0.1"], None, "10.0.0.1 source"),
            ("garbage on the right", "127.0.0.1", &["203.0.113.9, unknown"], None, "127.0.0.1 source"),
            ("and a Unix socket", "unix", &["203.0.113.9, unknown"], None, "none"),
            ("garbage does not fall to X-Real-IP", "unix", &["unknown"], Some("203.0.113.9"), "none"),
            ("X-Real-IP", "unix", &[], Some("203.0.113.9"), "203.0.113.9 source"),
            ("from a remote gateway", "10.0.0.1", &[], Some("203.0.113.9"), "203.0.113.9 behind"),
            ("is second to X-Forwarded-For", "unix", &["203.0.113.9"], Some("198.51.100.1"), "203.0.113.9 source"),
            ("with an empty one", "unix", &[""], Some("203.0.113.9"), "203.0.113.9 source"),
            ("garbage in X-Real-IP", "127.0.0.1", &[], Some("x"), "127.0.0.1 source"),
            ("no name from a Unix socket", "unix", &[], None, "none"),
            ("too many hops", "unix", &[many("203.0.113.9").as_str()], None, "10.0.0.1 behind"),
        ] {
            assert_eq!(decide(peer, forwarded_for, real_ip), expected, "{what}");
        }
    }

    #[test]
    fn clients_of_forwarded() {
        let many = vec!["for=10.0.0.1"; 200].join(", ");
        let far = format!("for=203.0.113.9, {many}");
        let lines: Vec<&str> = std::iter::once("for=203.0.113.9").chain([many.as_str(); 50]).collect();
        for (what, peer, forwarded, expected) in [
            ("an address", "unix", &["for=203.0.113.9"][..], "203.0.113.9 source"),
            ("headers of a client", "203.0.113.9", &["for=198.51.100.1"], "203.0.113.9 source"),
            ("other parameters", "unix", &["proto=https;FOR=203.0.113.9;by=_x;host=a"], "203.0.113.9 source"),
            ("a port", "unix", &["for=\"203.0.113.9:4711\""], "203.0.113.9 source"),
            ("a port without quotes", "unix", &["for=203.0.113.9:4711"], "203.0.113.9 source"),
            ("a port with a name", "unix", &["for=\"[2001:db8::9]:_a.b-c\""], "2001:db8::9 source"),
            ("IPv6", "unix", &["for=\"[2001:db8::9]:4711\""], "2001:db8::9 source"),
            ("IPv6 with a zone", "unix", &["for=\"[fe80::1%25eth0]\""], "fe80::1 source"),
            ("IPv6 without quotes", "unix", &["for=[2001:db8::9]"], "2001:db8::9 source"),
            ("a mapped client", "unix", &["for=\"[::ffff:203.0.113.9]\""], "203.0.113.9 source"),
            ("an escaped address", "unix", &["for=\"203\\.0.113.9\""], "203.0.113.9 source"),
            ("a spoofed hop", "unix", &["for=198.51.100.1, for=203.0.113.9"], "203.0.113.9 source"),
            ("in a line of its own", "unix", &["for=198.51.100.1", "for=203.0.113.9"], "203.0.113.9 source"),
            ("behind a trusted proxy", "unix", &["for=203.0.113.9, for=10.0.0.1"], "203.0.113.9 behind"),
            ("behind two", "10.0.0.9", &["for=6.6.6.6,for=203.0.113.9", "for=10.0.0.1"], "203.0.113.9 behind"),
            ("a quote left open", "unix", &["for=\", for=203.0.113.9"], "203.0.113.9 source"),
            ("and a backslash", "unix", &["for=\"\\, for=\"203.0.113.9\""], "203.0.113.9 source"),
            ("commas in quotes", "unix", &["for=203.0.113.9;by=\"a, for=6.6.6.6\""], "203.0.113.9 source"),
            ("hidden", "unix", &["for=_hidden, for=10.0.0.1"], "10.0.0.1 source"),
            ("unknown", "unix", &["for=203.0.113.9, for=unknown, for=10.0.0.1"], "10.0.0.1 source"),
            ("hidden at once", "127.0.0.1", &["for=203.0.113.9, for=_hidden"], "127.0.0.1 source"),
            ("and a Unix socket", "unix", &["for=203.0.113.9, for=unknown"], "none"),
            ("nobody", "unix", &["for=203.0.113.9, proto=http"], "none"),
            ("two at once", "unix", &["for=203.0.113.9;for=203.0.113.8"], "none"),
            ("garbage", "unix", &["for=203.0.113.9, \u{e9}=;;\""], "none"),
            ("empty elements", "unix", &["for=203.0.113.9, ,", ""], "203.0.113.9 source"),
            ("too many hops", "unix", &[far.as_str()], "10.0.0.1 behind"),
            ("too many lines", "unix", &lines, "10.0.0.1 behind"),
        ] {
            assert_eq!(decide_by(None, peer, &[], forwarded, Some("198.51.100.7")), expected, "{what}");
            let only = Some(AddressHeader::Forwarded);
            assert_eq!(decide_by(only, peer, &["6.6.6.6"], forwarded, None), expected, "{what}");
        }
    }

    #[test]
    fn one_of_several_headers_is_believed() {
        let all = (&["203.0.113.1"][..], &["for=203.0.113.2"][..], Some("203.0.113.3"));
        let (none, no_lines) = ((&[][..], &[][..], None), &[""][..]);
        for (header, (x_forwarded_for, forwarded, real_ip), expected) in [
            (None, all, "203.0.113.1 source"),
            (None, (no_lines, all.1, all.2), "203.0.113.2 source"),
            (None, (&[], no_lines, all.2), "203.0.113.3 source"),
            (None, none, "127.0.0.1 source"),
            (Some(AddressHeader::XForwardedFor), all, "203.0.113.1 source"),
            (Some(AddressHeader::XForwardedFor), (&[], all.1, all.2), "127.0.0.1 source"),
            (Some(AddressHeader::Forwarded), all, "203.0.113.2 source"),
            (Some(AddressHeader::Forwarded), (all.0, &[], all.2), "127.0.0.1 source"),
            (Some(AddressHeader::XRealIp), all, "203.0.113.3 source"),
            (Some(AddressHeader::XRealIp), (all.0, all.1, None), "127.0.0.1 source"),
        ] {
            let found = decide_by(header, "127.0.0.1", x_forwarded_for, forwarded, real_ip);
            assert_eq!(found, expected, "{header:?} {x_forwarded_for:?} {forwarded:?} {real_ip:?}");
        }
    }

    #[test]
    fn garbage_is_not_an_address() {
        for entry in [
            "",
            "unknown",
            "_hidden",
            "203.0.113",
            "203.0.113.9:",
            "203.0.113.9:x",
            "203.0.113.9:+1",
            "203.0.113.9:99999",
            "203.0.113.09",
            "203.0.113.9/24",
            "[203.0.113.9]",
            "[2001:db8::1",
            "2001:db8::1]",
            "[2001:db8::1]x",
            "[2001:db8::1]:",
            "[2001:db8::1]443",
            "0.0.0.0",
            "::",
            "::ffff:0.0.0.0",
            "for=203.0.113.9",
            "1::2::3",
        ] {
            assert_eq!(address_in(entry.as_bytes()), None, "{entry}");
        }
        assert_eq!(address_in(b"\xff\xfe"), None);
        assert_eq!(address_in(&[b'1'; 10_000]), None);
    }
}

//! Address prefixes as operators write them.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrefixError {
    #[error("\"{0}\" is not a prefix such as \"192.0.2.0/24\" or \"2001:db8::/32\"")]
    Malformed(String),
    #[error("{given} has bits set beyond its length: did you mean {right}?")]
    HostBits { given: IpNet, right: IpNet },
    #[error("{given} is an IPv4-mapped prefix: write {right}")]
    Mapped { given: IpNet, right: IpNet },
    #[error("{0} is an IPv4-mapped prefix that holds more than IPv4 addresses")]
    MappedTooShort(IpNet),
}

/// A prefix, or an address that stands for itself.
pub fn prefix(text: &str) -> Result<IpNet, PrefixError> {
    let given = match text.parse::<IpAddr>() {
        Ok(address) => IpNet::from(address),
        Err(_) => text.parse::<IpNet>().ok().ok_or_else(|| PrefixError::Malformed(text.into()))?,
    };
    if given.trunc() != given {
        return Err(PrefixError::HostBits { given, right: given.trunc() });
    }
    let IpNet::V6(v6) = given else { return Ok(given) };
    let mapped = v6.network().to_ipv4_mapped();
    match (mapped, v6.prefix_len().checked_sub(96)) {
        (Some(v4), Some(len)) => match Ipv4Net::new(v4, len) {
            Ok(right) => Err(PrefixError::Mapped { given, right: right.into() }),
            Err(_) => Err(PrefixError::Malformed(text.into())),
        },
        (Some(_), None) => Err(PrefixError::MappedTooShort(given)),
        (None, _) if v6.contains(&Ipv6Addr::from(0xffff_0000_0000u128)) && v6.prefix_len() >= 80 => {
            Err(PrefixError::MappedTooShort(given))
        }
        (None, _) => Ok(given),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes() {
        for (text, right) in [
            ("192.0.2.0/24", "192.0.2.0/24"),
            ("192.0.2.1", "192.0.2.1/32"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("2001:db8::/32", "2001:db8::/32"),
            ("2001:db8::1", "2001:db8::1/128"),
            ("::/0", "::/0"),
        ] {
            assert_eq!(prefix(text), Ok(right.parse().unwrap()), "{text}");
        }
        for (text, message) in [
            ("192.0.2.1/24", "192.0.2.1/24 has bits set beyond its length: did you mean 192.0.2.0/24?"),
            ("2001:db8::1/64", "did you mean 2001:db8::/64?"),
            ("192.0.2.0/33", "\"192.0.2.0/33\" is not a prefix"),
            ("192.0.2/24", "\"192.0.2/24\" is not a prefix"),
            ("example.com", "\"example.com\" is not a prefix"),
            ("", "\"\" is not a prefix"),
            ("::ffff:192.0.2.0/120", "is an IPv4-mapped prefix: write 192.0.2.0/24"),
            ("::ffff:192.0.2.1", "is an IPv4-mapped prefix: write 192.0.2.1/32"),
            ("::ffff:0:0/96", "write 0.0.0.0/0"),
            ("::ffff:0:0/95", "did you mean ::fffe:0:0/95?"),
            ("::fffe:0:0/95", "holds more than IPv4 addresses"),
        ] {
            let error = prefix(text).expect_err(text).to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}

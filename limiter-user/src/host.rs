//! The addresses of this host.

use std::{collections::HashSet, io, net::IpAddr};

use arc_swap::ArcSwap;
use foldhash::fast::RandomState;

/// Refreshed in the background, read on every check.
#[derive(Debug, Default)]
pub struct HostAddresses(ArcSwap<Addresses>);

// Only the host decides what is in it, so that the hash need not withstand an adversary.
type Addresses = HashSet<IpAddr, RandomState>;

impl HostAddresses {
    pub fn read() -> io::Result<Self> {
        let addresses = Self::default();
        addresses.refresh()?;
        Ok(addresses)
    }

    /// Looks at the interfaces again.
    pub fn refresh(&self) -> io::Result<()> {
        let found: Addresses = nix::ifaddrs::getifaddrs()?
            .filter_map(|interface| {
                let address = interface.address?;
                let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
                v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
            })
            .collect();
        if **self.0.load() != found {
            self.0.store(found.into());
        }
        Ok(())
    }

    /// Whether `address` is loopback or one of this host's.
    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.0.load().contains(&address)
    }
}

//! What the kernel did, as the agent's `/v1/status` tells it.

use std::{collections::BTreeMap, fmt, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result};
use ipnet::IpNet;
use limiter_user::status::{Status, XdpStatus};

use super::screen::grouped;
use crate::http::{self, Address};

/// Dropped packets by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Drops(BTreeMap<String, u64>);

impl Drops {
    pub(super) fn of(&self, reason: &str) -> u64 {
        self.0.get(reason).copied().unwrap_or_default()
    }
}

impl fmt::Display for Drops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reasons = self.0.iter().map(|(reason, packets)| format!("{reason} {}", grouped(*packets)));
        let text = reasons.collect::<Vec<_>>().join(", ");
        f.write_str(if text.is_empty() { "nothing" } else { &text })
    }
}

#[cfg(test)]
impl<const N: usize> From<[(&str, u64); N]> for Drops {
    fn from(drops: [(&str, u64); N]) -> Self {
        Self(drops.map(|(reason, packets)| (reason.to_owned(), packets)).into())
    }
}

pub(super) fn read(admin: &Address) -> Result<Drops> {
    let mut drops = BTreeMap::new();
    for counter in status(admin)?.counters {
        if counter.verdict == "drop" && counter.packets > 0 {
            *drops.entry(counter.reason).or_default() += counter.packets;
        }
    }
    Ok(Drops(drops))
}

/// How the XDP program is attached, as in "gw0, native".
pub(super) fn mode(admin: &Address) -> Result<String> {
    let interfaces = status(admin)?.interfaces;
    let interface = interfaces.first().context("the agent names no interface")?;
    Ok(format!("{}, {}", interface.name, interface.mode))
}

/// How much longer `address` is blocked, if it is.
pub(super) fn blocked_for(admin: &Address, address: IpAddr) -> Result<Option<Duration>> {
    let budget = status(admin)?.budgets.into_iter().find(|budget| {
        let prefix = budget.prefix.parse::<IpNet>();
        prefix.is_ok_and(|prefix| prefix.contains(&address))
    });
    Ok(budget.and_then(|budget| budget.remaining_ms).map(Duration::from_millis))
}

fn status(admin: &Address) -> Result<XdpStatus> {
    let answer = http::get(admin, "/v1/status", &[]).context("asking the agent for its status")?;
    let status: Status = serde_json::from_str(&answer.body).context("reading the agent's status")?;
    status.xdp.context("the agent runs without XDP")
}

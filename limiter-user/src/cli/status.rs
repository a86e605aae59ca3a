//! `limiter status`.

use std::fmt::{self, Write};

use anyhow::{Context, Result};
use axum::http::Method;
use limiter_common::time::UnixMicros;

use super::{StatusArgs, client, print};
use crate::identity::key_file;
use crate::status::{AdaptiveStatus, Entry, EventStatus, KeysStatus, Status, XdpStatus};

pub(super) async fn status(arguments: &StatusArgs) -> Result<()> {
    let config = arguments.config.load()?;
    let answer = client::ask(&config.api.admin, Method::GET, "/v1/status", None).await?;
    if arguments.json {
        return print(String::from_utf8_lossy(&answer));
    }
    let status: Status = serde_json::from_slice(&answer).context("reading the agent's status")?;
    let mut text = String::new();
    describe(&status, &mut text)?;
    print(text.trim_end())
}

fn describe(status: &Status, out: &mut String) -> fmt::Result {
    let state = match (status.ready, status.degraded) {
        (false, _) => "starting",
        (true, false) => "ready",
        (true, true) => "degraded",
    };
    writeln!(out, "limiter {} on {}: {state}, up {} s", status.version, status.node, status.uptime_seconds)?;
    for cause in &status.degraded_by {
        writeln!(out, "degraded: {cause}")?;
    }
    let policy = &status.policy;
    let since = key_file::date(UnixMicros::new(policy.loaded_at.saturating_mul(1_000_000)));
    writeln!(out, "policy: {}, in force since {since}", policy.file)?;
    for (what, error) in [
        ("policy: not in force, as it was last read", &policy.error),
        ("configuration: not in force, as it was last read", &status.configuration_error),
        ("API keys: the last known ones stay in force", &status.key_file_error),
        ("keys of tokens: the last known ones stay in force", &status.token_keys_error),
    ] {
        for line in error.iter().flat_map(|error| error.lines()) {
            writeln!(out, "{what}: {line}")?;
        }
    }
    for note in &status.notes {
        writeln!(out, "note: {note}")?;
    }
    if !policy.needs_restart.is_empty() {
        writeln!(out, "configuration: changed, and needs a restart: {}", policy.needs_restart.join(", "))?;
    }
    let store = &status.store;
    write!(out, "store: {}, {} of {} counters in memory", store.kind, store.counters, store.capacity)?;
    if store.evicted > 0 {
        write!(out, ", {} given up for want of room", store.evicted)?;
    }
    if let (Some(state), Some(lag_ms)) = (&store.state, store.lag_ms) {
        write!(out, ", {state}, {lag_ms} ms behind")?;
    }
    if let Some(live_nodes) = store.live_nodes {
        write!(out, ", shared by {live_nodes} nodes")?;
    }
    writeln!(out)?;
    for shard in store.shards.iter().filter(|shard| shard.breaker != "closed") {
        writeln!(out, "redis {}: breaker {}", shard.name, shard.breaker)?;
    }
    for shard in &store.shards {
        if let Some(policy) = &shard.may_evict {
            writeln!(out, "redis {}: maxmemory-policy {policy} may evict counters", shard.name)?;
        }
    }
    if let Some(KeysStatus { keys, connected, unreadable, losses }) = &status.keys {
        let state = if *connected { "connected" } else { "Redis does not answer" };
        writeln!(out, "keys: {keys} in Redis, {state}, {unreadable} unreadable, lost and given back {losses} times")?;
    }
    for rule in &status.rules {
        writeln!(
            out,
            "rule {} ({}, {}): decided {} allowed and {} denied requests, would deny {}",
            rule.id, rule.scope, rule.mode, rule.allowed, rule.denied, rule.shadow_denied
        )?;
        if let Some(adaptive) = rule.adaptive.as_ref().filter(|adaptive| adaptive.share < 1.0) {
            writeln!(out, "rule {} gives way to pressure: {}", rule.id, describe_adaptive(adaptive))?;
        }
    }
    match (status.pressure.level, status.pressure.latency_ms) {
        (None, None) => {}
        (Some(level), None) => writeln!(out, "pressure: level {level:.2}")?,
        (None, Some(latency_ms)) => writeln!(out, "pressure: latency {latency_ms} ms")?,
        (Some(level), Some(latency_ms)) => writeln!(out, "pressure: level {level:.2}, latency {latency_ms} ms")?,
    }
    match &status.xdp {
        None => writeln!(out, "xdp: off, no interfaces are configured")?,
        Some(xdp) => describe_xdp(xdp, out)?,
    }
    Ok(())
}

fn describe_adaptive(adaptive: &AdaptiveStatus) -> String {
    let now = match (adaptive.effective_ceiling, adaptive.ceiling) {
        (Some(effective), Some(ceiling)) => format!(", {effective} of {ceiling}"),
        (_, None) | (None, _) => String::new(),
    };
    format!("share {:.3}{now}, the floor is {}", adaptive.share, adaptive.floor)
}

fn describe_xdp(xdp: &XdpStatus, out: &mut String) -> fmt::Result {
    if xdp.interfaces.is_empty() && xdp.missing.is_empty() {
        writeln!(out, "xdp: off, all interfaces were taken out of xdp.interfaces: no packet is limited")?;
    }
    for interface in &xdp.interfaces {
        writeln!(out, "interface {}: {} mode, program {}", interface.name, interface.mode, interface.program_id)?;
    }
    for interface in &xdp.missing {
        writeln!(out, "interface {}: nothing is limited there: {}", interface.name, interface.reason)?;
    }
    for counter in &xdp.counters {
        writeln!(
            out,
            "packets {:<11} {:<24} {:>12} {:>15} bytes  {}",
            counter.verdict,
            counter.reason,
            counter.packets,
            counter.bytes,
            counter.rule.as_deref().unwrap_or("-")
        )?;
    }
    for entry in &xdp.budgets {
        writeln!(out, "budget {}", describe_entry(entry))?;
    }
    describe_list("allow", &xdp.allow, xdp.more_allow, out)?;
    describe_list("deny", &xdp.deny, xdp.more_deny, out)?;
    for events in &xdp.events {
        let EventStatus { class, sent, rate_limited, ring_full } = events;
        writeln!(
            out,
            "events of {class}: {sent} sent, lost: {rate_limited} to the rate limit, {ring_full} to a full ring"
        )?;
    }
    for error in &xdp.errors {
        writeln!(out, "xdp: {error}")?;
    }
    Ok(())
}

/// What operators have put there, and the beginning of what the policy file has, where anybody can read the rest.
fn describe_list(name: &str, entries: &[Entry], left_out: u64, out: &mut String) -> fmt::Result {
    const SHOWN: usize = 20;
    let (of_policy, of_operators): (Vec<_>, Vec<_>) = entries.iter().partition(|entry| entry.reason == "policy");
    for entry in of_policy.iter().take(SHOWN).chain(&of_operators) {
        writeln!(out, "{name} {}", describe_entry(entry))?;
    }
    match of_policy.len().saturating_sub(SHOWN) as u64 + left_out {
        0 => Ok(()),
        more => writeln!(out, "{name} {more} more prefixes (policy)"),
    }
}

fn describe_entry(entry: &Entry) -> String {
    let mut text = format!("{} ({}", entry.prefix, entry.reason);
    if let Some(rule) = &entry.rule {
        text.push_str(&format!(", rule {rule}"));
    }
    match entry.remaining_ms {
        Some(remaining_ms) => text.push_str(&format!(") for {} s more", remaining_ms.div_ceil(1000))),
        None => text.push(')'),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_the_policy_are_cut_and_those_of_operators_are_not() {
        let entry = |n: usize, reason: &str| Entry {
            prefix: format!("192.0.2.{n}/32"),
            remaining_ms: None,
            reason: reason.to_owned(),
            rule: None,
        };
        let list = |policy, operator| -> Vec<Entry> {
            (0..policy).map(|n| entry(n, "policy")).chain((0..operator).map(|n| entry(n, "operator"))).collect()
        };
        let mut text = String::new();
        describe_list("deny", &list(23, 30), 5, &mut text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines.len(), lines[0]), (20 + 30 + 1, "deny 192.0.2.0/32 (policy)"));
        assert_eq!(lines[49..], ["deny 192.0.2.29/32 (operator)", "deny 8 more prefixes (policy)"]);
        text.clear();
        describe_list("deny", &list(20, 0), 0, &mut text).unwrap();
        assert_eq!(text.lines().count(), 20);
    }
}

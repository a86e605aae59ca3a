//! `limiter top`.

use std::{
    fmt::{self, Write},
    io::{self, IsTerminal},
    time::Duration,
};

use anyhow::{Context, Result};
use axum::http::Method;

use super::{TopArgs, client, print};
use crate::top::{TopReport, TopSource, Totals};

/// How often the screen is drawn anew.
const REFRESH: Duration = Duration::from_secs(1);
/// To the upper left corner; then everything below goes.
const CLEAR: &str = "\x1b[H\x1b[2J";

pub(super) async fn top(arguments: &TopArgs) -> Result<()> {
    let config = arguments.config.load()?;
    let path = format!("/v1/top?rows={}", arguments.rows);
    let once = arguments.once || arguments.json || !io::stdout().is_terminal();
    let mut before = None;
    loop {
        let answer = client::ask(&config.api.admin, Method::GET, &path, None).await?;
        if arguments.json {
            return print(String::from_utf8_lossy(&answer));
        }
        let report: TopReport = serde_json::from_slice(&answer).context("reading the agent's answer")?;
        let mut text = String::new();
        describe(&report, before, &mut text)?;
        if once {
            return print(text.trim_end());
        }
        print(format_args!("{CLEAR}{text}\nCtrl-C ends"))?;
        before = report.packets;
        tokio::time::sleep(REFRESH).await;
    }
}

/// `before` is what the totals were a second ago.
fn describe(report: &TopReport, before: Option<Totals>, out: &mut String) -> fmt::Result {
    match (report.packets, before) {
        (None, _) => writeln!(out, "xdp: off, no interfaces are configured")?,
        (Some(Totals { passed, dropped, would_drop }), None) => {
            writeln!(out, "packets: {passed} passed, {dropped} dropped, {would_drop} would be dropped")?;
        }
        (Some(now), Some(before)) => writeln!(
            out,
            "packets a second: {} passed, {} dropped, {} would be dropped",
            now.passed.saturating_sub(before.passed),
            now.dropped.saturating_sub(before.dropped),
            now.would_drop.saturating_sub(before.would_drop)
        )?,
    }
    for (title, sources) in [("busiest sources", &report.busiest), ("most dropped", &report.most_dropped)] {
        writeln!(
            out,
            "\n{title:<43} {:>11} {:>13} {:>11} {:>11}  why",
            "packets/s", "bytes/s", "dropped/s", "would drop"
        )?;
        for source in sources {
            describe_source(source, out)?;
        }
    }
    if !report.keys.is_empty() {
        writeln!(out, "\n{:<43} {:>11} {:>13}", "busiest API keys", "requests/s", "denied/s")?;
        for key in &report.keys {
            writeln!(out, "{:<43} {:>11} {:>13}", key.key, key.requests_per_second, key.denied_per_second)?;
        }
    }
    Ok(())
}

fn describe_source(source: &TopSource, out: &mut String) -> fmt::Result {
    write!(
        out,
        "{:<43} {:>11} {:>13} {:>11} {:>11}",
        source.source,
        source.packets_per_second,
        source.bytes_per_second,
        source.dropped_per_second,
        source.would_drop_per_second
    )?;
    match (&source.reason, &source.rule) {
        (Some(reason), Some(rule)) => writeln!(out, "  {reason} by {rule}"),
        (Some(reason), None) => writeln!(out, "  {reason}"),
        (None, _) => writeln!(out),
    }
}

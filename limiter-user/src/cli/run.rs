//! `limiter run`.

use anyhow::Result;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::{agent::Agent, config::Config};

/// Runs the agent until it is told to stop.
pub async fn run(config: Config) -> Result<()> {
    let shutdown = CancellationToken::new();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let agent = Agent::build(config).await?;
    let stop = shutdown.clone();
    tokio::spawn(async move {
        let name = tokio::select! {
            _ = interrupt.recv() => "SIGINT",
            _ = terminate.recv() => "SIGTERM",
        };
        tracing::info!(target: "limiter", signal = name, "stopping");
        stop.cancel();
    });
    agent.run(shutdown).await
}

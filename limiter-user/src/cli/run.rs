//! `limiter run`.

use std::sync::Arc;

use anyhow::Result;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::Notify,
};
use tokio_util::sync::CancellationToken;

use super::{ConfigArg, validate};
use crate::{agent::Agent, config::Environment, telemetry};

/// Runs the agent until it is told to stop.
pub(super) fn run(arguments: &ConfigArg) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    // Before anything else, since a process that asks to be told of no signal is ended by it, also by a SIGHUP.
    let (mut interrupt, mut terminate, mut hangup) = {
        let _entered = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, signal(SignalKind::hangup())?)
    };
    let checked = validate::check(&arguments.config, Environment::of_process())?;
    telemetry::init(&checked.environment);
    for note in &checked.notes {
        tracing::warn!(target: "limiter", "{note}");
    }
    allow_many_connections();
    runtime.block_on(async {
        let agent = Agent::build(checked).await?;
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone();
        let reload = Arc::new(Notify::new());
        let reloads = Arc::clone(&reload);
        tokio::spawn(async move {
            let signal = loop {
                tokio::select! {
                    _ = interrupt.recv() => break "SIGINT",
                    _ = terminate.recv() => break "SIGTERM",
                    _ = hangup.recv() => reloads.notify_one(),
                }
            };
            tracing::info!(target: "limiter", signal, "stopping");
            stop.cancel();
        });
        agent.run(reload, shutdown).await
    })
}

/// As many open files as the system lets this process have: the usual 1024 are fewer than the connections of a busy
/// gateway, and whoever uses them up takes away Redis, the key file and the admin API as well.
fn allow_many_connections() {
    let raised =
        getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(error) = raised {
        tracing::warn!(target: "limiter", %error, "raising the limit of open files failed");
    }
}

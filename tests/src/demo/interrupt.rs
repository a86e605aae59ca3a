//! Signals that ask to stop. What was made is then removed on the usual way out.

use std::{io, sync::Arc, thread};

use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
};

use super::pace::Stop;

/// From here on, until the process ends.
pub(super) fn watch(stop: Arc<Stop>) -> io::Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let within = runtime.enter();
    let [mut interrupt, mut terminate, mut hangup] =
        [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, signal(SignalKind::hangup())?];
    drop(within);
    thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
        });
        stop.interrupt();
    });
    Ok(())
}

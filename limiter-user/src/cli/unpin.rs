//! `limiter unpin`.

use anyhow::Result;

use super::{UnpinArgs, print};
use crate::{
    dataplane::{self, DataplaneError},
    exit::Unavailable,
};

pub(super) fn unpin(arguments: &UnpinArgs) -> Result<()> {
    let config = arguments.config.load()?;
    let pin_dir = &config.xdp.pin_dir;
    // Kept until everything is removed, so that no agent starts meanwhile.
    let _idle = match dataplane::lock_idle(pin_dir) {
        Err(DataplaneError::InUse { .. }) if arguments.force => Vec::new(),
        Err(DataplaneError::InUse { path }) => {
            let path = path.display();
            let message = format!("an agent runs on {path}: stop it first, or detach in spite of it with --force");
            return Err(Unavailable(message).into());
        }
        locked => locked?,
    };
    let removed = dataplane::unpin(pin_dir)?;
    print(format_args!(
        "detached {} and removed {} from {}",
        counted(removed.links, "link"),
        counted(removed.maps, "map"),
        pin_dir.display()
    ))?;
    if removed.still_attached.is_empty() {
        return Ok(());
    }
    let interfaces = removed.still_attached.join(", ");
    Err(Unavailable(format!("another process still holds the link of {interfaces}: stop the agent first")).into())
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

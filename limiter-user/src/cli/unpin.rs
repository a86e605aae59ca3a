//! `limiter unpin`.

use anyhow::Result;

use super::{ConfigArg, print};
use crate::{dataplane, exit::Unavailable};

pub(super) fn unpin(arguments: &ConfigArg) -> Result<()> {
    let config = arguments.load()?;
    let removed = dataplane::unpin(&config.xdp.pin_dir)?;
    let links = removed.links;
    print(format_args!(
        "detached {links} links and removed {} maps from {}",
        removed.maps,
        config.xdp.pin_dir.display()
    ))?;
    if removed.still_attached.is_empty() {
        return Ok(());
    }
    let interfaces = removed.still_attached.join(", ");
    Err(Unavailable(format!("another process still holds the link of {interfaces}: stop the agent first")).into())
}

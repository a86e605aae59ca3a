//! `limiter unpin`.

use anyhow::Result;

use super::{ConfigArg, print};
use crate::dataplane;

pub(super) fn unpin(arguments: &ConfigArg) -> Result<()> {
    let config = arguments.load()?;
    let removed = dataplane::unpin(&config.xdp.pin_dir)?;
    print(removed)
}

//! One reading of everything that is shown and judged.

use std::time::Duration;

use super::{impatient::Story, kernel::Drops, tally::Counts};

#[derive(Clone, Debug)]
pub(super) struct Frame {
    /// Since the clients began.
    pub(super) elapsed: Duration,
    /// How long they are to send.
    pub(super) duration: Duration,
    pub(super) good: Counts,
    pub(super) flood: Counts,
    pub(super) key: Counts,
    pub(super) impatient: Counts,
    pub(super) story: Story,
    pub(super) kernel: Drops,
}

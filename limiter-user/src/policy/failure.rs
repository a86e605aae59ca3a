//! What a rule does while its counters cannot be shared.

/// In the order of strictness: of several that a request's endpoint groups have, the last one holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FailurePolicy {
    /// Lets everything pass.
    Open,
    /// Decides from what is known of all nodes' counts, and lets this node admit its share of the limit at most.
    #[default]
    Local,
    /// Denies everything.
    Closed,
}

impl FailurePolicy {
    pub const ALL: &[Self] = &[Self::Open, Self::Local, Self::Closed];

    /// The name in policy files and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Local => "local",
            Self::Closed => "closed",
        }
    }
}

//! How exactly the nodes of a fleet count together.

/// What a rule's counters promise when several nodes use them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Decided from memory; nodes tell each other every sync interval.
    #[default]
    Async,
    /// Decided from memory, out of units that were taken from the shared counter before. Never above the ceiling.
    Leased,
    /// Decided in Redis, one round trip a request. Exact.
    Strict,
    /// Decided from memory alone; Redis keeps what another node has to know when it takes over.
    Local,
}

impl Precision {
    pub const ALL: &[Self] = &[Self::Async, Self::Leased, Self::Strict, Self::Local];

    /// The name in policy files.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Async => "async",
            Self::Leased => "leased",
            Self::Strict => "strict",
            Self::Local => "local",
        }
    }

    /// Whether memory alone may not be able to decide.
    pub const fn asks_redis(self) -> bool {
        matches!(self, Self::Leased | Self::Strict)
    }
}

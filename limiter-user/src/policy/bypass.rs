//! Requests that are never limited: of prefixes, of API keys, for paths.

use std::collections::BTreeSet;

use super::{Endpoints, PrefixSet};
use crate::store::ApiKeyId;

#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Bypass {
    pub cidrs: PrefixSet,
    pub key_ids: BTreeSet<ApiKeyId>,
    /// At most one group, with all patterns. Asked by [`Endpoints::covers`].
    pub paths: Endpoints,
}

/// Why a request is not limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BypassKind {
    Cidr,
    KeyId,
    Path,
}

impl BypassKind {
    pub const ALL: &[Self] = &[Self::Cidr, Self::KeyId, Self::Path];

    /// The name in policy files and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cidr => "cidr",
            Self::KeyId => "key_id",
            Self::Path => "path",
        }
    }
}

impl Bypass {
    pub fn is_empty(&self) -> bool {
        self.cidrs.is_empty() && self.key_ids.is_empty() && self.paths.is_empty()
    }
}

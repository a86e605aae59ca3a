//! Answers to a packet. Every answer has a reason, and the reason is the index of its counter.

/// Declares a reason enum: the variants in order, their names outside, and what they mean.
macro_rules! reasons {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name in metrics, logs and `limiter status`.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }
    };
}

reasons! {
    /// Why a packet is passed.
    PassReason {
        /// Neither IPv4 nor IPv6.
        NotIp = "not_ip",
        /// ARP, IPv6 neighbour discovery and MLD.
        Control = "control",
        /// Not for a protected port.
        NotProtected = "not_protected",
        /// In an allow prefix.
        Allowed = "allowed",
        /// Within its bucket.
        Conforming = "conforming",
        /// No packet rule and no budget for this source, or the rule is off.
        Unlimited = "unlimited",
    }
}

reasons! {
    /// Why a packet is dropped, or would be by a rule in shadow mode.
    DropReason {
        /// Truncated or contradictory headers.
        Malformed = "malformed",
        /// In a deny prefix.
        Denied = "denied",
        /// A pushed budget drops everything of this source until its deadline.
        Blocked = "blocked",
        /// Over the packet rate.
        RateLimitedPackets = "rate_limited_packets",
        /// Over the byte rate.
        RateLimitedBytes = "rate_limited_bytes",
        /// Over the rate of new TCP connections.
        RateLimitedConnections = "rate_limited_connections",
        /// A source without a bucket of its own, while too many sources are new, over the bucket of its neighbourhood.
        NewSources = "new_sources",
        /// The bucket changed under every attempt to update it.
        Contended = "contended",
    }
}

/// The answer to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    Pass(PassReason),
    Drop(DropReason),
    /// Passed, and counted as what an enforced rule would have dropped.
    ShadowDrop(DropReason),
}

impl Verdict {
    #[expect(clippy::cast_possible_truncation, reason = "a count of variants")]
    const DROPS: u32 = PassReason::ALL.len() as u32;
    #[expect(clippy::cast_possible_truncation, reason = "a count of variants")]
    const SHADOW_DROPS: u32 = Self::DROPS + DropReason::ALL.len() as u32;
    /// How many counters there are.
    #[expect(clippy::cast_possible_truncation, reason = "a count of variants")]
    pub const COUNT: u32 = Self::SHADOW_DROPS + DropReason::ALL.len() as u32;

    /// Index of the counter.
    #[inline(always)]
    pub const fn index(self) -> u32 {
        match self {
            Self::Pass(reason) => reason as u32,
            Self::Drop(reason) => Self::DROPS + reason as u32,
            Self::ShadowDrop(reason) => Self::SHADOW_DROPS + reason as u32,
        }
    }

    /// All verdicts, in the order of their indices.
    pub fn all() -> impl Iterator<Item = Self> {
        let passes = PassReason::ALL.iter().map(|&reason| Self::Pass(reason));
        let drops = DropReason::ALL.iter().map(|&reason| Self::Drop(reason));
        passes.chain(drops).chain(DropReason::ALL.iter().map(|&reason| Self::ShadowDrop(reason)))
    }

    /// The name of the verdict without its reason.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pass(_) => "pass",
            Self::Drop(_) => "drop",
            Self::ShadowDrop(_) => "shadow_drop",
        }
    }

    pub const fn reason(self) -> &'static str {
        match self {
            Self::Pass(reason) => reason.as_str(),
            Self::Drop(reason) | Self::ShadowDrop(reason) => reason.as_str(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_count_up() {
        for (position, verdict) in Verdict::all().enumerate() {
            assert_eq!(verdict.index() as usize, position, "{verdict:?}");
        }
        assert_eq!(Verdict::all().count(), Verdict::COUNT as usize);
    }
}

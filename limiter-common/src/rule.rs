//! Packet rules and the buckets they fill.

use crate::gcra::GcraParams;

/// What holds for a rule's verdict. Shadow counts and passes.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EnforcementMode {
    Off = 0,
    Shadow = 1,
    Enforce = 2,
}

impl EnforcementMode {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Shadow => "shadow",
            Self::Enforce => "enforce",
        }
    }
}

/// The limits of one packet rule. Map value: host byte order, no padding.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PacketRule {
    mode: u32,
    /// Which of the limits are set: bits of [`Dimension::bit`].
    limits: u32,
    /// Where the rule's counters are, see [`crate::stats::RULE_SLOTS`].
    slot: u32,
    reserved: u32,
    packets: GcraParams,
    bytes: GcraParams,
    connections: GcraParams,
}

const _: () = assert!(size_of::<PacketRule>() == 4 * 4 + 3 * size_of::<GcraParams>());

/// What a bucket can count.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dimension {
    Packets = 0,
    /// Bytes of the frame, from the Ethernet header on, without the frame check sequence.
    Bytes = 1,
    /// TCP segments with SYN and without ACK.
    Connections = 2,
}

impl Dimension {
    #[inline(always)]
    pub const fn bit(self) -> u32 {
        1 << self as u32
    }
}

impl PacketRule {
    pub const fn new(mode: EnforcementMode, slot: u32) -> Self {
        const NONE: GcraParams = match GcraParams::from_interval(1, 1) {
            Some(params) => params,
            None => unreachable!(),
        };
        Self { mode: mode as u32, limits: 0, slot, reserved: 0, packets: NONE, bytes: NONE, connections: NONE }
    }

    #[must_use]
    pub const fn with_limit(mut self, dimension: Dimension, params: GcraParams) -> Self {
        self.limits |= dimension.bit();
        match dimension {
            Dimension::Packets => self.packets = params,
            Dimension::Bytes => self.bytes = params,
            Dimension::Connections => self.connections = params,
        }
        self
    }

    #[inline(always)]
    pub const fn limit(&self, dimension: Dimension) -> Option<&GcraParams> {
        if self.limits & dimension.bit() == 0 { None } else { Some(self.params(dimension)) }
    }

    /// Bits of the dimensions that are limited.
    #[inline(always)]
    pub const fn limits(&self) -> u32 {
        self.limits
    }

    /// The parameters of a dimension, which mean nothing unless it is limited.
    #[inline(always)]
    pub const fn params(&self, dimension: Dimension) -> &GcraParams {
        match dimension {
            Dimension::Packets => &self.packets,
            Dimension::Bytes => &self.bytes,
            Dimension::Connections => &self.connections,
        }
    }

    #[inline(always)]
    pub const fn slot(&self) -> u32 {
        self.slot
    }

    #[inline(always)]
    pub const fn is_shadow(&self) -> bool {
        self.mode == EnforcementMode::Shadow as u32
    }

    #[inline(always)]
    pub const fn is_off(&self) -> bool {
        self.mode == EnforcementMode::Off as u32 || self.limits == 0
    }
}

/// State of one source: the theoretical arrival time of each dimension, in ticks. Map value, updated in place by
/// compare-and-swap on each number.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    pub packets_tat: u64,
    pub bytes_tat: u64,
    pub connections_tat: u64,
}

const _: () = assert!(size_of::<Bucket>() == 3 * 8);

impl Bucket {
    /// A bucket that is full in every dimension.
    #[inline(always)]
    pub const fn full(now_ticks: u64) -> Self {
        let tat = crate::gcra::full(now_ticks);
        Self { packets_tat: tat, bytes_tat: tat, connections_tat: tat }
    }
}

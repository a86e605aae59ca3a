//! Every `unsafe impl Pod`. JUSTIFICATION: aya copies map keys and values as bytes, and the trait is how it is told
//! that a type allows this.

use aya::Pod;

use crate::{
    acl::{AclEntry, Listed},
    addr::{SrcKeyV4, SrcKeyV6, SrcMaskV4, SrcMaskV6},
    budget::{Budget, BudgetEntry},
    event::{Event, EventCounts, EventMeter},
    gcra::GcraParams,
    prefix_filter::PrefixFilter,
    rule::{Bucket, PacketRule},
    stats::{Counter, Counters, RuleName},
};

macro_rules! pod {
    ($($ty:ty),* $(,)?) => {
        $(
            // SAFETY: `repr(C)` with integer and byte-array fields only, so every bit pattern is valid, and without
            // padding, which the type's own module asserts.
            unsafe impl Pod for $ty {}
        )*
    };
}

pod!(
    AclEntry,
    Bucket,
    Budget,
    BudgetEntry,
    Counter,
    Counters,
    Event,
    EventCounts,
    EventMeter,
    GcraParams,
    Listed,
    PacketRule,
    PrefixFilter,
    RuleName,
    SrcKeyV4,
    SrcKeyV6,
    SrcMaskV4,
    SrcMaskV6,
);

//! Protected ports: everything else on the host passes, whatever the policy says.

use limiter_common::{packet::Transport, schema};

use crate::{globals, maps};

#[inline(always)]
pub(crate) fn protects(transport: Transport) -> bool {
    if globals::is_on(&globals::PROTECT_ALL) {
        return true;
    }
    if !globals::is_on(&globals::PROTECT_PORTS) {
        return false;
    }
    match transport {
        Transport::Tcp { destination_port, .. } => is_set(schema::tcp_port_bit(destination_port)),
        Transport::Udp { destination_port } => is_set(schema::udp_port_bit(destination_port)),
        // The rest of the packet may be for a protected port; better limited than a way around the limit.
        Transport::Unreadable { .. } => true,
        Transport::Other => false,
    }
}

#[inline(always)]
fn is_set(bit: u32) -> bool {
    if globals::is_on(&globals::HAS_FEW_PORTS) {
        return globals::FEW_PORTS.iter().any(|two| is_one_of(bit, two.load()));
    }
    maps::port_word(bit / u64::BITS) >> (bit % u64::BITS) & 1 != 0
}

/// Whether `bit` is one of two that are packed in a number.
#[inline(always)]
fn is_one_of(bit: u32, two: u64) -> bool {
    let bit = u64::from(bit);
    two >> 32 == bit || two & u64::from(u32::MAX) == bit
}

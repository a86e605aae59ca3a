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
        Transport::Unreadable => true,
        Transport::Other => false,
    }
}

#[inline(always)]
fn is_set(bit: u32) -> bool {
    maps::port_word(bit / u64::BITS) >> (bit % u64::BITS) & 1 != 0
}

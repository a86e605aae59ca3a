//! The XDP program: drops what is over budget before the kernel allocates a socket buffer.
//!
//! Glue only. The parser, the arithmetic and every map type are those of `limiter-common`; here are the maps, the
//! clock and the order of the stages (`pipeline.rs`).
//!
//! Architecture invariant: this crate contains no rate arithmetic, only `packet.rs` reads packet memory, only `maps.rs`
//! dereferences map values, and nothing is logged per packet, but for diagnosis.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(target_arch = "bpf", expect(internal_features, reason = "the BPF target has no CAS in core::sync::atomic"))]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch, core_intrinsics))]

mod acl;
mod budget;
mod clock;
mod diagnosis;
mod events;
mod globals;
mod maps;
mod newcomer;
mod packet;
mod pipeline;
mod ports;
mod rate_limit;
mod source;
mod stats;

use aya_ebpf::{bindings::xdp_action, macros::xdp, programs::XdpContext};
use limiter_common::verdict::Verdict;

use crate::packet::Frame;

// In the entry itself: a call of its own would cost every packet a nanosecond.
#[xdp(frags)]
#[inline(always)]
fn limiter(ctx: XdpContext) -> u32 {
    let frame = Frame::new(&ctx);
    let ruling = pipeline::run(&frame);
    let count = stats::record(ruling, frame.len());
    events::report(&ctx, ruling, count);
    match ruling.verdict {
        Verdict::Pass(_) | Verdict::ShadowDrop(_) => xdp_action::XDP_PASS,
        Verdict::Drop(_) => xdp_action::XDP_DROP,
    }
}

/// The verifier refuses a program in which this loop could be reached.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The kernel lets only programs of a compatible licence call its helpers.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

/// Lets editors and clippy check the crate for the host.
#[cfg(not(target_arch = "bpf"))]
fn main() {}

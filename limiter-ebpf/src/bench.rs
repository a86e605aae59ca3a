//! What the benchmarks `xdp` and `flood` measure with, as an object of its own: nothing of this is in the agent.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

use aya_ebpf::{
    Global,
    bindings::xdp_action,
    helpers::generated::bpf_redirect,
    macros::{map, xdp},
    maps::ProgramArray,
    programs::XdpContext,
};
use limiter_common::walk::{SOURCE_OFFSET, STATE_OFFSET, Walk};

/// The program that `walk` goes on with.
#[map]
static NEXT: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// The least that a program can do.
#[xdp(frags)]
fn drop_all(_: XdpContext) -> u32 {
    xdp_action::XDP_DROP
}

/// The interface that `forward` sends from.
#[unsafe(no_mangle)]
static FORWARD_TO: Global<u32> = Global::new(0);

/// Sends every frame on from another interface, bare, without a socket buffer.
#[xdp]
fn forward(_: XdpContext) -> u32 {
    // SAFETY: the helper takes two numbers.
    let action = unsafe { bpf_redirect(FORWARD_TO.load(), 0) };
    u32::try_from(action).unwrap_or(xdp_action::XDP_ABORTED)
}

/// Makes the frame come from the next source of its walk. BPF_PROG_TEST_RUN keeps the frame from one run to the next.
#[xdp(frags)]
fn walk(ctx: XdpContext) -> u32 {
    let frame = ctx.data();
    if frame + STATE_OFFSET + Walk::LEN > ctx.data_end() {
        return xdp_action::XDP_ABORTED;
    }
    let state = (frame + STATE_OFFSET) as *mut Walk;
    // SAFETY: the state ends before `data_end`, any bytes are a state, and alignment does not matter to this call.
    let (source, next) = unsafe { state.read_unaligned() }.step();
    // SAFETY: as above; nothing else refers to the frame.
    unsafe { state.write_unaligned(next) };
    // SAFETY: the source lies before the state.
    unsafe { ((frame + SOURCE_OFFSET) as *mut [u8; 4]).write(source.to_be_bytes()) };
    // SAFETY: the index is that of the only entry. The call returns only when there is no program to go on with.
    unsafe { NEXT.tail_call(&ctx, 0) };
    xdp_action::XDP_ABORTED
}

/// The verifier refuses a program in which this loop could be reached.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// As that of the limiter, so that one can call the other.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

/// Lets editors and clippy check the crate for the host.
#[cfg(not(target_arch = "bpf"))]
fn main() {}

//! The frame as the parser sees it. The only pointer arithmetic of the program.

use aya_ebpf::{helpers::generated::bpf_xdp_get_buff_len, programs::XdpContext};
use limiter_common::packet::{MAX_READ_OFFSET, PacketRead};

/// Bounds of the linear part, which holds the headers, and the length of all buffers together.
#[derive(Clone, Copy)]
pub(crate) struct Frame {
    data: usize,
    data_end: usize,
    len: u64,
}

impl Frame {
    #[inline(always)]
    pub(crate) fn new(ctx: &XdpContext) -> Self {
        // SAFETY: `ctx.ctx` is the context that the kernel called the program with.
        let len = unsafe { bpf_xdp_get_buff_len(ctx.ctx) };
        Self { data: ctx.data(), data_end: ctx.data_end(), len }
    }

    /// Bytes from the Ethernet header on, in all buffers.
    #[inline(always)]
    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

impl PacketRead for Frame {
    #[inline(always)]
    fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        // The verifier wants the offset bounded before it is added to a packet pointer.
        if offset > MAX_READ_OFFSET {
            return None;
        }
        let start = self.data + offset;
        if start + N > self.data_end {
            return None;
        }
        // SAFETY: the `N` bytes from `start` end before `data_end`, byte arrays have alignment 1, and nothing writes
        // to the packet.
        Some(unsafe { core::ptr::read_unaligned(start as *const [u8; N]) })
    }

    #[inline(always)]
    fn has(&self, len: usize) -> bool {
        len as u64 <= self.len
    }

    #[inline(always)]
    fn forget(&self, number: usize) -> usize {
        forget(number, self.len)
    }
}

/// Mixes a number that the verifier does not know in and out again: two instructions.
#[cfg(target_arch = "bpf")]
#[inline(always)]
pub(crate) fn forget(mut number: usize, unknown: u64) -> usize {
    // SAFETY: the instructions touch nothing but the register.
    unsafe {
        core::arch::asm!(
            "{number} ^= {unknown}",
            "{number} ^= {unknown}",
            number = inout(reg) number,
            unknown = in(reg) unknown,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    number
}

#[cfg(not(target_arch = "bpf"))]
pub(crate) fn forget(number: usize, _: u64) -> usize {
    number
}

//! The frame as the parser sees it. The only pointer arithmetic of the program.

use aya_ebpf::{helpers::generated::bpf_xdp_get_buff_len, programs::XdpContext};
use limiter_common::{
    addr::{AddressV4, AddressV6},
    packet::{Header, MAX_READ_OFFSET, PacketRead},
};

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
    type Header<'a, const N: usize> = Readable<N>;

    #[inline(always)]
    fn read<const N: usize>(&self, offset: usize) -> Option<Readable<N>> {
        // The verifier wants the offset bounded before it is added to a packet pointer.
        if offset > MAX_READ_OFFSET {
            return None;
        }
        let start = self.data + offset;
        if start + N > self.data_end { None } else { Some(Readable { start }) }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the machine has 64 bits")]
    #[inline(always)]
    fn frame_len(&self) -> usize {
        self.len as usize
    }

    #[inline(always)]
    fn has(&self, len: usize) -> bool {
        // Of the length of the frame, the verifier would learn here what differs from path to path.
        self.forget(len) as u64 <= self.len
    }

    #[inline(always)]
    fn forget(&self, number: usize) -> usize {
        forget(number, self.len)
    }
}

/// `N` bytes of the linear part, which the constructor has compared with its end.
#[derive(Clone, Copy)]
pub(crate) struct Readable<const N: usize> {
    start: usize,
}

/// Loads a word by one instruction. The compiler would take it apart: it does not count on loads that are not aligned,
/// which the kernel allows in a packet on every machine that the program is built for.
#[cfg(target_arch = "bpf")]
macro_rules! load {
    ($width:literal, $start:expr, $at:expr) => {{
        let word: u64;
        // SAFETY: the caller has seen that the word ends before `data_end`, and nothing writes to the packet.
        unsafe {
            core::arch::asm!(
                concat!("{word} = *(", $width, " *)({start} + {at})"),
                word = lateout(reg) word,
                start = in(reg) $start,
                at = const $at,
                options(pure, readonly, nostack, preserves_flags),
            );
        }
        word
    }};
}

#[cfg(not(target_arch = "bpf"))]
macro_rules! load {
    ($width:literal, $start:expr, $at:expr) => {
        ($start + $at) as u64
    };
}

#[expect(clippy::cast_possible_truncation, reason = "as wide as what was loaded")]
impl<const N: usize> Header<N> for Readable<N> {
    #[inline(always)]
    fn byte<const AT: usize>(self) -> u8 {
        const { assert!(AT < N) };
        load!("u8", self.start, AT) as u8
    }

    #[inline(always)]
    fn be16<const AT: usize>(self) -> u16 {
        const { assert!(AT + 2 <= N) };
        u16::from_be(load!("u16", self.start, AT) as u16)
    }

    #[inline(always)]
    fn be32<const AT: usize>(self) -> u32 {
        const { assert!(AT + 4 <= N) };
        u32::from_be(load!("u32", self.start, AT) as u32)
    }

    #[inline(always)]
    fn address_v4<const AT: usize>(self) -> AddressV4 {
        const { assert!(AT + 4 <= N) };
        AddressV4::new((load!("u32", self.start, AT) as u32).to_ne_bytes())
    }

    #[inline(always)]
    fn address_v6<const AT: usize>(self) -> AddressV6 {
        const { assert!(AT + 16 <= N) };
        let (first, last) = (load!("u64", self.start, AT), load!("u64", self.start, AT + 8));
        AddressV6::from_halves([first.to_ne_bytes(), last.to_ne_bytes()])
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

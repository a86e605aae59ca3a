//! Log lines about single packets, for whoever looks for a fault on a host of little traffic. The level is a read-only
//! global (`AYA_LOG_LEVEL`), 0 unless the configuration asks, and the verifier then removes all of this.

use aya_ebpf::{bindings::xdp_md, programs::XdpContext};
use aya_log_ebpf::{
    log,
    macro_support::{Level, level_enabled},
};
use limiter_common::{
    event::News,
    packet::{Source, source_of},
    stats::is_pass,
};

use crate::packet::Frame;

#[inline(always)]
pub(crate) fn is_on() -> bool {
    level_enabled(Level::Info)
}

#[inline(always)]
pub(crate) fn log(ctx: &XdpContext, news: News, index: u32) {
    if is_on() {
        line(ctx.ctx, news.bits(), index);
    }
}

/// News at info, drops at debug, everything at trace. Numbers only: the agent puts the names in their place.
#[inline(never)]
fn line(ctx: *mut xdp_md, news: u32, index: u32) {
    let level = if !News::from_bits(news).is_none() {
        Level::Info
    } else if is_pass(index) {
        Level::Trace
    } else {
        Level::Debug
    };
    if !level_enabled(level) {
        return;
    }
    let frame = Frame::new(&XdpContext::new(ctx));
    let bytes = frame.len();
    match source_of(&frame) {
        Some(Source::V4(address)) => {
            log!((), target: "limiter::ebpf", level, "counter {} bytes {} src {:i}", index, bytes, address.octets());
        }
        Some(Source::V6(address)) => {
            log!((), target: "limiter::ebpf", level, "counter {} bytes {} src {:i}", index, bytes, address.octets());
        }
        None => {
            log!((), target: "limiter::ebpf", level, "counter {} bytes {}", index, bytes);
        }
    }
}

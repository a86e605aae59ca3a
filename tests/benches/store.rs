//! `cargo xtask bench store [-- --only memory|scripts|calls]`: what sharing costs a Redis, by what the server says itself.
//!
//! Memory of a million counters that two nodes have written, beside the classic schema; time of scripts, beside the command of
//! the module redis-cell; calls of agents that share a hundred keys, or one.

#[path = "store/calls.rs"]
mod calls;
#[path = "store/memory.rs"]
mod memory;
#[path = "store/scripts.rs"]
mod scripts;

use limiter_tests::{
    bench::{Row, only, report},
    random::Random,
};

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let rows = runtime.expect("a runtime").block_on(measure());
    report("store", &rows);
}

async fn measure() -> Vec<Row> {
    let only = only();
    let is_wanted = |part: &str| only.as_ref().is_none_or(|only| only == part);
    let mut rows = Vec::new();
    if is_wanted("memory") {
        rows.extend(memory::measure().await);
    }
    if is_wanted("scripts") {
        rows.extend(scripts::measure().await);
    }
    if is_wanted("calls") {
        rows.extend(calls::measure().await);
    }
    rows
}

/// Client ids of twelve characters, the same ones each time.
fn ids(count: usize) -> Vec<String> {
    let mut random = Random::new(12);
    (0..count).map(|_| format!("{:012x}", random.below(1u64 << 48))).collect()
}

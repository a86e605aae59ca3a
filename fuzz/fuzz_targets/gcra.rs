//! Any parameters and arrivals at a bucket.
#![no_main]

#[path = "../properties/gcra.rs"]
mod gcra;

libfuzzer_sys::fuzz_target!(|input: &[u8]| gcra::check(input));

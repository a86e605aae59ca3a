//! Any bytes as a frame.
#![no_main]

#[path = "../properties/parse.rs"]
mod parse;

libfuzzer_sys::fuzz_target!(|input: &[u8]| parse::check(input));

//! Any two addresses and prefix lengths.
#![no_main]

#[path = "../properties/address.rs"]
mod address;

libfuzzer_sys::fuzz_target!(|input: &[u8]| address::check(input));

//! The XDP object under test.

use std::{env, fs, sync::OnceLock};

/// The object that `cargo xtask test` has built.
///
/// # Panics
///
/// When there is none.
pub fn xdp_object() -> &'static [u8] {
    static OBJECT: OnceLock<Vec<u8>> = OnceLock::new();
    OBJECT.get_or_init(|| {
        let Some(path) = env::var_os("LIMITER_BPF_OBJECT") else {
            panic!("LIMITER_BPF_OBJECT is not set: these tests need the XDP object; run \"cargo xtask test\"");
        };
        fs::read(&path).unwrap_or_else(|error| {
            panic!("read the XDP object {} (LIMITER_BPF_OBJECT): {error}; run \"cargo xtask test\"", path.display())
        })
    })
}

//! Embeds the XDP object that `cargo xtask build` names in LIMITER_BPF_OBJECT. Without it the crate builds all the same,
//! for editors and plain `cargo check`, and the agent says that it cannot attach.

use std::{env, fs, path::PathBuf};

fn main() {
    println!("cargo:rustc-check-cfg=cfg(limiter_bpf_object)");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=LIMITER_BPF_OBJECT");
    let Some(object) = env::var_os("LIMITER_BPF_OBJECT").filter(|object| !object.is_empty()).map(PathBuf::from) else {
        return;
    };
    println!("cargo:rerun-if-changed={}", object.display());
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR for build scripts"));
    if let Err(error) = fs::copy(&object, out_dir.join("limiter.bpf.o")) {
        panic!("embed the XDP object {} (LIMITER_BPF_OBJECT): {error}; run: cargo xtask build", object.display());
    }
    println!("cargo:rustc-cfg=limiter_bpf_object");
}

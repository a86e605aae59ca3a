//! The cases that every sliding-window counter and every bucket is held to.

use std::{fs, path::PathBuf};

use serde::{Deserialize, de::DeserializeOwned};

#[derive(Debug, Deserialize)]
pub struct SlidingCase {
    pub name: String,
    pub window_us: u64,
    pub ceiling: u64,
    pub steps: Vec<SlidingStep>,
}

#[derive(Debug, Deserialize)]
pub struct SlidingStep {
    pub now_us: u64,
    pub cost: u64,
    pub allowed: bool,
    pub previous: u64,
    pub current: u64,
    pub remaining: u64,
    pub reset_us: u64,
    pub retry_after_us: Option<u64>,
    pub never: bool,
}

#[derive(Debug, Deserialize)]
pub struct GcraCase {
    pub name: String,
    pub emission_interval_ns: u64,
    pub burst: u64,
    pub steps: Vec<GcraStep>,
}

#[derive(Debug, Deserialize)]
pub struct GcraStep {
    pub now_ns: u64,
    pub cost: u64,
    pub conforming: bool,
    pub never: bool,
    pub tat_ns: u64,
    pub remaining: u64,
    pub retry_after_ns: Option<u64>,
}

pub fn sliding_window() -> Vec<SlidingCase> {
    read("sliding_window.json")
}

pub fn gcra() -> Vec<GcraCase> {
    read("gcra.json")
}

/// From the folder in `LIMITER_VECTORS`, else the one beside a checkout, else the copy in the repository.
fn read<T: DeserializeOwned>(file: &str) -> Vec<T> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let beside = root.join("../shared/vectors");
    let folder = match std::env::var_os("LIMITER_VECTORS") {
        Some(folder) => folder.into(),
        None if beside.is_dir() => beside,
        None => root.join("tests/vectors"),
    };
    let path = folder.join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("reading {}: {error}", path.display()));
    let cases: Vec<T> = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(!cases.is_empty(), "{} has no cases", path.display());
    cases
}

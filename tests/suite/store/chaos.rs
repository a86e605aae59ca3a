//! Random faults, by one seed: what `cargo xtask chaos` runs for minutes.

mod exactly_once;
mod precisions;

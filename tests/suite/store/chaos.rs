//! Random faults, by one seed: what `cargo xtask chaos` runs for minutes.

mod exactly_once;
mod partition;
mod precisions;

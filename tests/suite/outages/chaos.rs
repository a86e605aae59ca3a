//! Random deaths, by one seed: what `cargo xtask chaos` runs for minutes.

mod kills;

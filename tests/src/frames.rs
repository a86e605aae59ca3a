//! Frames by the million, and the verdict that each must get: what the parser says on the host, and what the policy of
//! a scenario makes of that, against what the program in the kernel does and counts.

mod corpus;
mod generator;
mod judge;
mod mutation;
mod random;
mod scenario;

pub use corpus::parser_corpus;
pub use generator::{Generator, templates};
pub use judge::{Judge, Tally, from_hex};
pub use scenario::{Scenario, scenarios};

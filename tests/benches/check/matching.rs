//! The endpoint groups of a path, for few and for many groups.

use std::sync::Arc;

use limiter_tests::{bench::Case, random::Random};
use limiter_user::policy::{
    Scratch,
    endpoints::{Endpoints, Pattern},
};

use crate::threads;

const REPEAT: u32 = 5_000;

pub(crate) struct Paths {
    endpoints: Endpoints,
    groups: u32,
    paths: Vec<String>,
    /// Of paths, and the number of those that are asked for.
    order: Vec<u32>,
    asked: u32,
}

impl Paths {
    /// Requests are for `asked` of the groups.
    pub(crate) fn new(groups: u32, asked: u32) -> Self {
        let pattern = |text: String| Pattern::parse(&text).expect("a pattern");
        let named = (0..groups).map(|group| {
            let patterns = vec![
                pattern(format!("GET,POST /api/v1/service{group}/items/*")),
                pattern(format!("/internal/service{group}/**")),
            ];
            (Arc::from(format!("group{group}")), patterns)
        });
        let endpoints = Endpoints::new(named.collect()).expect("the patterns fit");
        let mut random = Random::new(2);
        let order = (0..REPEAT).map(|_| random.below(asked)).collect();
        let paths = (0..groups).map(|group| format!("/api/v1/service{group}/items/4711?page=2"));
        Self { endpoints, groups, paths: paths.collect(), order, asked }
    }

    pub(crate) fn case(&self) -> Case<'_> {
        let name = format!("matching a path, {} endpoints, requests to {}", self.groups, self.asked);
        Case::new(name, REPEAT, move |_| {
            let turns = 0..self.order.len();
            threads::over(1, turns, || self.scratch(), |scratch, turn| self.find(self.order[turn] as usize, scratch))
        })
    }

    fn find(&self, path: usize, scratch: &mut Scratch) {
        let found = self.endpoints.find("GET", &self.paths[path], scratch);
        assert_eq!(found.matches[0].group, path);
    }

    /// Grown to its use.
    fn scratch(&self) -> Scratch {
        let mut scratch = Scratch::default();
        self.find(0, &mut scratch);
        scratch
    }
}

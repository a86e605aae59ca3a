//! The endpoint groups of a path, for few and for many groups.

use std::sync::Arc;

use limiter_tests::{bench::Case, random::Random};
use limiter_user::policy::{
    Scratch,
    endpoints::{Endpoints, Pattern},
};

use crate::threads;

const REPEAT: u32 = 10_000;

pub(crate) struct Paths {
    endpoints: Endpoints,
    groups: u32,
    paths: Vec<String>,
    /// Of paths.
    order: Vec<u32>,
}

impl Paths {
    pub(crate) fn new(groups: u32) -> Self {
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
        let order = (0..REPEAT).map(|_| random.below(groups)).collect();
        let paths = (0..groups).map(|group| format!("/api/v1/service{group}/items/4711?page=2"));
        Self { endpoints, groups, paths: paths.collect(), order }
    }

    pub(crate) fn case(&self) -> Case<'_> {
        Case::new(format!("matching a path, {} endpoints", self.groups), REPEAT, move |_| {
            threads::over(1, &self.order, || self.scratch(), |scratch, path| self.find(path, scratch))
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

//! A list of named steps: each is printed with its time, and the first that fails ends the list.

use std::time::Instant;

use anyhow::{Context as _, Result};

pub(crate) struct Step<'a> {
    name: &'static str,
    action: Box<dyn FnOnce() -> Result<()> + 'a>,
}

pub(crate) fn step<'a>(name: &'static str, action: impl FnOnce() -> Result<()> + 'a) -> Step<'a> {
    Step { name, action: Box::new(action) }
}

pub(crate) fn run(steps: Vec<Step<'_>>) -> Result<()> {
    let count = steps.len();
    for (index, step) in steps.into_iter().enumerate() {
        println!("== {}/{count} {}", index + 1, step.name);
        let started = now();
        (step.action)().with_context(|| format!("step {:?} failed", step.name))?;
        println!("== {}/{count} {}: passed in {:.1?}", index + 1, step.name, started.elapsed());
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "the duration is shown to a person; no decision depends on it")]
fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn stops_at_the_first_failure_and_names_it() {
        let reached = Cell::new(0);
        let count = || {
            reached.set(reached.get() + 1);
            Ok(())
        };
        let error = run(vec![step("first", count), step("second", || anyhow::bail!("no")), step("third", count)])
            .expect_err("the second step fails");
        assert_eq!(reached.get(), 1);
        assert_eq!(format!("{error:#}"), "step \"second\" failed: no");
    }
}

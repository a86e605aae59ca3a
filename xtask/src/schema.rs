//! `cargo xtask schema`: the map schema of limiter-common against the golden file in the repository. A difference is
//! allowed only together with a new SCHEMA_VERSION, since pinned maps of a running host are told apart by it.

use std::{fmt::Write as _, fs, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use limiter_common::schema::{Lifetime, MAPS, SCHEMA_VERSION};

use crate::workspace::Workspace;

#[derive(Clone, Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Action {
    /// Fail when the golden file differs
    #[arg(long)]
    check: bool,
    /// Write the golden file; refused while SCHEMA_VERSION is that of a file that differs
    #[arg(long)]
    write: bool,
}

pub(crate) fn run(workspace: &Workspace, action: &Action) -> Result<()> {
    if action.write { write(workspace) } else { check(workspace) }
}

pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    let path = golden_path(workspace);
    let committed = fs::read_to_string(&path).with_context(|| {
        format!("read the map schema {}; to make it, run: cargo xtask schema --write", path.display())
    })?;
    match compare(&committed, &golden()) {
        Comparison::Same => Ok(()),
        Comparison::NewVersion => {
            bail!("{} is of an older version; run: cargo xtask schema --write", path.display())
        }
        Comparison::UnmarkedChange { lines } => bail!("{}", unmarked(&lines)),
    }
}

fn write(workspace: &Workspace) -> Result<()> {
    let path = golden_path(workspace);
    if let Ok(committed) = fs::read_to_string(&path)
        && let Comparison::UnmarkedChange { lines } = compare(&committed, &golden())
    {
        bail!("{}", unmarked(&lines));
    }
    fs::write(&path, golden()).with_context(|| format!("write the map schema {}", path.display()))
}

fn unmarked(lines: &[String]) -> String {
    format!(
        "the maps differ from the golden schema, but SCHEMA_VERSION is {SCHEMA_VERSION} in both; raise SCHEMA_VERSION in \
         limiter-common/src/schema.rs, then run: cargo xtask schema --write\n{}",
        lines.join("\n")
    )
}

fn golden_path(workspace: &Workspace) -> PathBuf {
    workspace.root().join("tests/golden/map_schema.txt")
}

fn golden() -> String {
    let mut text = format!("schema {SCHEMA_VERSION}\n");
    for map in MAPS {
        let lifetime = match map.lifetime {
            Lifetime::Shared => "shared",
            Lifetime::WhenUsed => "when_used",
            Lifetime::Policy => "policy",
        };
        let line = writeln!(
            text,
            "{} {} key={} value={} capacity={} {lifetime}",
            map.name,
            map.kind.as_str(),
            map.key_size,
            map.value_size,
            map.capacity
        );
        line.expect("writing to a String cannot fail");
    }
    text
}

#[derive(Debug, PartialEq, Eq)]
enum Comparison {
    Same,
    NewVersion,
    UnmarkedChange { lines: Vec<String> },
}

fn compare(committed: &str, current: &str) -> Comparison {
    if committed == current {
        return Comparison::Same;
    }
    if committed.lines().next() != current.lines().next() {
        return Comparison::NewVersion;
    }
    let gone = committed.lines().filter(|line| !current.lines().any(|other| other == *line));
    let come = current.lines().filter(|line| !committed.lines().any(|other| other == *line));
    let mut lines: Vec<String> = gone.map(|line| format!("- {line}")).collect();
    lines.extend(come.map(|line| format!("+ {line}")));
    if lines.is_empty() {
        lines.push("the order of the lines".into());
    }
    Comparison::UnmarkedChange { lines }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_without_a_new_version_names_the_lines() {
        let comparison = compare("schema 1\nSTATS array\nPORTS array\n", "schema 1\nSTATS hash\nPORTS array\n");
        let lines = vec!["- STATS array".to_owned(), "+ STATS hash".to_owned()];
        assert_eq!(comparison, Comparison::UnmarkedChange { lines });
    }

    #[test]
    fn a_change_with_a_new_version_is_told_apart() {
        assert_eq!(compare("schema 1\nSTATS array\n", "schema 2\nSTATS hash\n"), Comparison::NewVersion);
    }

    #[test]
    fn every_map_has_a_line() {
        assert_eq!(golden().lines().count(), MAPS.len() + 1);
        assert_eq!(compare(&golden(), &golden()), Comparison::Same);
    }

    #[test]
    fn the_committed_schema_is_current() {
        let workspace = Workspace::find().expect("the workspace of this crate");
        check(&workspace).expect("the golden file is current");
    }
}

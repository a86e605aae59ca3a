//! Rules of this repository that no compiler checks: each is a function from one file to what breaks it there.

mod bpf_names;
mod lua_header;
mod ownership;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

use crate::workspace::Workspace;

const RULES: &[fn(&SourceFile) -> Vec<Violation>] = &[bpf_names::check, lua_header::check, ownership::check];

const FOLDERS: [&str; 7] = ["fuzz", "limiter-common", "limiter-ebpf", "limiter-user", "lua", "tests", "xtask"];

#[derive(Debug)]
struct SourceFile {
    /// From the root of the repository, with `/`.
    path: String,
    text: String,
}

#[derive(Debug, PartialEq, Eq)]
struct Violation {
    path: String,
    line: usize,
    message: String,
}

impl SourceFile {
    fn violation(&self, line_index: usize, message: impl Into<String>) -> Violation {
        Violation { path: self.path.clone(), line: line_index + 1, message: message.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}: {}", self.path, self.line, self.message)
    }
}

pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    let mut violations = Vec::new();
    for file in source_files(workspace.root())? {
        violations.extend(RULES.iter().flat_map(|rule| rule(&file)));
    }
    if violations.is_empty() {
        return Ok(());
    }
    for violation in &violations {
        println!("{violation}");
    }
    bail!("the repository breaks {} of its rules; they are above", violations.len());
}

fn source_files(root: &Path) -> Result<Vec<SourceFile>> {
    let mut folders: Vec<PathBuf> =
        FOLDERS.iter().map(|folder| root.join(folder)).filter(|folder| folder.exists()).collect();
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                // A fuzzing crate inside tests has a target folder of its own.
                if path.file_name().is_none_or(|name| name != "target") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "lua") {
                let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
                let relative = path.strip_prefix(root).unwrap_or(&path).display().to_string();
                files.push(SourceFile { path: relative, text });
            }
        }
    }
    files.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_repository_keeps_its_rules() {
        let workspace = Workspace::find().expect("the workspace of this crate");
        check(&workspace).expect("no rule is broken");
    }
}

//! `cargo xtask bench NAME`: one benchmark, with the agent and the XDP objects built and named to it.

use std::{ffi::OsString, fs, path::Path};

use anyhow::{Context as _, Result, bail};

use crate::{
    bpf, build, privilege, process, redis_cell,
    setup::{self, Requirement},
    test,
    workspace::Workspace,
};

pub(crate) fn run(workspace: &Workspace, name: Option<&str>, arguments: &[OsString]) -> Result<()> {
    let available = available(&workspace.root().join("tests/benches"))?;
    let Some(name) = name else {
        for name in available {
            println!("{name}");
        }
        return Ok(());
    };
    if !available.iter().any(|known| known == name) {
        bail!("there is no benchmark {name:?}; tests/benches has: {}", available.join(", "));
    }
    privilege::require_root("bench")?;
    setup::ensure(&Requirement::TESTS)?;
    setup::ensure(&Requirement::BENCHES)?;
    build::build(workspace)?;
    let mut cargo = workspace.cargo();
    cargo.args(["bench", "--package", "limiter-tests", "--bench", name, "--"]).args(arguments);
    cargo.env("LIMITER_BENCH_OBJECT", bpf::build_bench(workspace)?);
    if name == "store" {
        cargo.env("LIMITER_BENCH_REDIS_CELL", redis_cell::build(workspace)?);
    }
    process::run(test::with_environment(workspace, &mut cargo), &format!("run the benchmark {name}"))
}

fn available(folder: &Path) -> Result<Vec<String>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("list the benchmarks in {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_source_files_by_name() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for name in ["xdp.rs", "decide.rs", "notes.md"] {
            fs::write(folder.path().join(name), "").expect("write a file");
        }
        assert_eq!(available(folder.path()).expect("the folder is readable"), ["decide", "xdp"]);
    }
}

//! `cargo xtask package`: one archive with everything that a gateway host needs.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    build, process,
    setup::{self, Requirement},
    workspace::Workspace,
};

/// From the root of the repository; they keep their folders in the archive, where the README says they are, but for the
/// licence of the XDP program.
const FILES: [(&str, &str); 7] = [
    ("README.md", "README.md"),
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("LICENSE-MIT", "LICENSE-MIT"),
    ("LICENSE-APACHE", "LICENSE-APACHE"),
    ("limiter-ebpf/LICENSE-GPL2", "LICENSE-GPL2"),
    ("packaging/limiter.service", "packaging/limiter.service"),
    ("packaging/unprivileged.conf", "packaging/unprivileged.conf"),
];

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    setup::ensure(&[Requirement::BpfToolchain])?;
    build::build(workspace)?;
    let limiter = workspace.limiter();
    let version = process::output(Command::new(&limiter).arg("--version"), "ask the agent for its version")?;
    require_object(&version)?;

    let name = format!("edge-limiter-{}-{}", env!("CARGO_PKG_VERSION"), env::consts::ARCH);
    let packages = workspace.target().join("package");
    let folder = packages.join(&name);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("remove the former package {}", folder.display()))?;
    }
    copy(&limiter, &folder.join("limiter"))?;
    for (from, to) in FILES {
        copy(&workspace.root().join(from), &folder.join(to))?;
    }
    for example in examples(&workspace.root().join("examples"))? {
        let file_name = example.file_name().context("an example has a file name")?;
        copy(&example, &folder.join("examples").join(file_name))?;
    }

    let archive = packages.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    // Names and owners that do not depend on who made the package, and where.
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "-czf"]);
    tar.arg(&archive).arg("-C").arg(&packages).arg(&name);
    process::run(&mut tar, "pack the archive")?;
    println!("packed {}", archive.display());
    Ok(())
}

/// An agent without the object answers requests, and drops no packet: it must not reach a gateway unnoticed.
fn require_object(version: &str) -> Result<()> {
    let state = version.lines().find_map(|line| line.trim().strip_prefix("xdp object:")).map(str::trim);
    match state {
        Some("embedded") => Ok(()),
        Some(state) => bail!("refuse to package: the agent says its XDP object is {state}; run: cargo xtask build"),
        None => bail!("refuse to package: `limiter --version` does not say whether the XDP object is embedded"),
    }
}

fn examples(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("list the example configuration in {}", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            files.push(path);
        }
    }
    if files.is_empty() {
        bail!("there is no example configuration in {}", folder.display());
    }
    Ok(files)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).with_context(|| format!("make the folder {}", folder.display()))?;
    }
    fs::copy(from, to).with_context(|| format!("copy {} into the package", from.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_readme_names_of_packaging_is_in_the_archive() {
        let readme = include_str!("../../README.md");
        let named = readme.match_indices("packaging/").map(|(at, _)| {
            let rest = &readme[at..];
            rest.split(|c: char| !(c.is_ascii_alphanumeric() || "/._-".contains(c))).next().unwrap_or(rest)
        });
        let mut count = 0;
        for name in named.map(|name| name.trim_end_matches('.')) {
            assert!(FILES.iter().any(|(_, to)| *to == name), "{name}");
            count += 1;
        }
        assert!(count >= 2, "{count}");
    }

    #[test]
    fn packages_only_an_agent_with_the_object() {
        require_object("limiter 0.1.0\nxdp object: embedded\n").expect("it is embedded");
        for version in ["limiter 0.1.0\nxdp object: absent\n", "limiter 0.1.0\n"] {
            require_object(version).expect_err("it is not embedded");
        }
    }
}

//! A subcommand of cargo, built from its crate into cargo's own folder.

use std::process::Command;

use anyhow::{Context as _, Result};

use super::{Item, apt::Apt};
use crate::{process, workspace};

#[derive(Debug)]
pub(super) struct CargoTool {
    pub(super) name: &'static str,
    /// What is built where none is found; any version that is found serves.
    pub(super) version: &'static str,
}

impl CargoTool {
    fn arguments(&self) -> [String; 3] {
        ["install".into(), "--locked".into(), format!("{}@{}", self.name, self.version)]
    }
}

impl Item for CargoTool {
    fn name(&self) -> String {
        self.name.into()
    }

    fn check(&self) -> Result<String> {
        let path = process::find_program(self.name).context("not in PATH")?;
        Ok(path.display().to_string())
    }

    fn install(&self, _: &mut Apt) -> Result<()> {
        let mut cargo = Command::new(workspace::host_cargo());
        cargo.args(self.arguments()).env_remove("CARGO_TARGET_DIR").env_remove("RUSTFLAGS");
        process::run(&mut cargo, &format!("build {}", self.name))
    }

    fn remedy(&self) -> Vec<String> {
        vec![format!("cargo {}", self.arguments().join(" "))]
    }
}

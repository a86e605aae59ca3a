//! A program that a Debian package brings.

use anyhow::{Context as _, Result};

use super::{
    Item,
    apt::{Apt, apt_command},
};
use crate::process;

#[derive(Debug)]
pub(super) struct Program {
    pub(super) name: &'static str,
    pub(super) package: &'static str,
}

impl Item for Program {
    fn name(&self) -> String {
        self.name.into()
    }

    fn check(&self) -> Result<String> {
        let path = process::find_program(self.name).context("not in PATH")?;
        Ok(path.display().to_string())
    }

    fn install(&self, apt: &mut Apt) -> Result<()> {
        apt.install(&[self.package])
    }

    fn remedy(&self) -> Vec<String> {
        vec![format!("sudo {}", apt_command(&[self.package]))]
    }
}

//! Running other programs, with errors that name the command and what it was for.

use std::{
    env,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

/// Runs a command with the terminal of this process; fails when the command does.
pub(crate) fn run(command: &mut Command, operation: &str) -> Result<()> {
    let status = command.status().with_context(|| format!("{operation}: cannot start {}", shown(command)))?;
    if !status.success() {
        bail!("{operation}: {} ended with {status}", shown(command));
    }
    Ok(())
}

/// What a command prints on standard output; the rest of it has the terminal.
pub(crate) fn captured(command: &mut Command, operation: &str) -> Result<String> {
    let child = command.stdout(Stdio::piped()).spawn();
    let child = child.with_context(|| format!("{operation}: cannot start {}", shown(command)))?;
    let output = child.wait_with_output().with_context(|| format!("{operation}: wait for {}", shown(command)))?;
    if !output.status.success() {
        bail!("{operation}: {} ended with {}", shown(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("{operation}: {} printed no UTF-8", shown(command)))
}

/// What a command prints on standard output, when it succeeds.
pub(crate) fn output(command: &mut Command, operation: &str) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{operation}: cannot start {}", shown(command)))?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        bail!("{operation}: {} ended with {}: {}", shown(command), output.status, complaint.trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{operation}: {} printed no UTF-8", shown(command)))
}

/// Where `program` is in PATH. The administrator's folders are looked through as well: Debian leaves
/// them out of an ordinary user's PATH, and `ip` lives there.
pub(crate) fn find_program(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    format!("`{}`", words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" "))
}

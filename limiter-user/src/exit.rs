//! The one table of exit codes (as in sysexits.h).

use std::process::{ExitCode, Termination};

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[must_use]
pub enum Exit {
    Ok = 0,
    /// The command line is wrong.
    Usage = 64,
    /// A service that is needed does not answer, or a port is taken.
    Unavailable = 69,
    /// A defect of the program.
    Internal = 70,
    /// The user may not do this.
    NoPermission = 77,
    /// A configuration, policy or key file is wrong or missing.
    Config = 78,
}

impl Exit {
    pub const fn code(self) -> u8 {
        self as u8
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}

impl Termination for Exit {
    fn report(self) -> ExitCode {
        self.into()
    }
}

//! The one table of exit codes (as in sysexits.h).

use std::{
    io,
    process::{ExitCode, Termination},
};

use crate::{
    api::serve::BindError,
    config::ConfigErrors,
    dataplane::{DataplaneError, ErrorKind},
};

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[must_use]
pub enum Exit {
    Ok = 0,
    /// The command line is wrong, or asks for what cannot be.
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

/// A service that is needed and does not answer.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

/// What the agent understood and will not do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

impl From<&anyhow::Error> for Exit {
    /// The one place that knows which error ends the program how.
    fn from(error: &anyhow::Error) -> Self {
        if let Some(errors) = error.downcast_ref::<ConfigErrors>() {
            return errors.exit();
        }
        if let Some(error) = error.downcast_ref::<DataplaneError>() {
            return match error.kind() {
                ErrorKind::Permission => Self::NoPermission,
                ErrorKind::Unavailable => Self::Unavailable,
                ErrorKind::Configuration => Self::Config,
                ErrorKind::Internal => Self::Internal,
            };
        }
        if let Some(error) = error.downcast_ref::<BindError>() {
            let kind = error.source.kind();
            return if kind == io::ErrorKind::PermissionDenied {
                Self::NoPermission
            } else if [io::ErrorKind::NotFound, io::ErrorKind::AddrNotAvailable].contains(&kind) {
                Self::Config
            } else {
                Self::Unavailable
            };
        }
        if error.downcast_ref::<Refused>().is_some() {
            return Self::Usage;
        }
        if error.downcast_ref::<Unavailable>().is_some() { Self::Unavailable } else { Self::Internal }
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

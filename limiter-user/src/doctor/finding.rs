//! What a check says.

use serde::{Serialize, Serializer};

use crate::exit::Exit;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Ok,
    /// Works, and not as it should; or could not be looked at.
    Warning,
    /// The agent would not start, or not limit, and end like this.
    Error(Exit),
}

impl Status {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error(_) => "error",
        }
    }
}

impl Serialize for Status {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// A line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    pub check: &'static str,
    pub status: Status,
    pub found: String,
    /// Why it matters.
    pub why: &'static str,
    /// A command or a setting; `None` when there is nothing to do.
    pub remedy: Option<String>,
}

/// What a check has seen; the table in [`super`] makes a [`Finding`] of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) status: Status,
    pub(super) found: String,
    pub(super) remedy: Option<String>,
}

impl Seen {
    pub(super) fn ok(found: impl Into<String>) -> Self {
        Self { status: Status::Ok, found: found.into(), remedy: None }
    }

    pub(super) fn warning(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { status: Status::Warning, found: found.into(), remedy: Some(remedy.into()) }
    }

    pub(super) fn error(exit: Exit, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { status: Status::Error(exit), found: found.into(), remedy: Some(remedy.into()) }
    }

    /// A check that this process may not make.
    pub(super) fn unseen(found: impl Into<String>) -> Self {
        Self::warning(found, "run as root: sudo limiter doctor")
    }

    pub(super) fn about(mut self, subject: &str) -> Self {
        self.found = format!("{subject}: {}", self.found);
        self
    }
}

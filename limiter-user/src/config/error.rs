//! Mistakes in files, all of them at once.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::exit::Exit;

/// Where a mistake is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    File {
        path: Arc<Path>,
        /// From 1; `None` when it is about the whole file.
        line: Option<usize>,
    },
    /// An environment variable.
    Variable(String),
    /// The key store in the Redis of this address.
    Redis(Arc<str>),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line: Some(line) } => write!(f, "{}:{line}", path.display()),
            Self::File { path, line: None } => path.display().fmt(f),
            Self::Variable(name) => write!(f, "environment variable {name}"),
            Self::Redis(address) => write!(f, "API keys in Redis at {address}"),
        }
    }
}

/// One mistake: `file:line: key: message`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    pub origin: Origin,
    /// As in `store.redis.urls` or `rules[2].window`; empty when it is about the whole file.
    pub key: String,
    pub message: String,
    /// Whether the user was not allowed to read something.
    pub no_permission: bool,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

/// Every mistake that was found, in the order of the files' lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigErrors(Vec<ConfigError>);

impl ConfigErrors {
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    pub fn push(&mut self, error: ConfigError) {
        self.0.push(error);
    }

    pub fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> std::slice::Iter<'_, ConfigError> {
        self.0.iter()
    }

    /// Puts mistakes of one file in the order of its lines.
    #[must_use]
    pub fn sorted(mut self) -> Self {
        self.0.sort_by(|a, b| a.origin.cmp(&b.origin));
        self
    }

    /// `value`, unless there were mistakes.
    pub fn or<T>(self, value: Option<T>) -> Result<T, Self> {
        match value {
            Some(value) if self.is_empty() => Ok(value),
            Some(_) | None => Err(self.sorted()),
        }
    }

    /// That `path` could not be read or written, and what to do about it.
    pub fn of_io(operation: &str, path: &Path, key: &str, error: &io::Error) -> Self {
        let no_permission = error.kind() == io::ErrorKind::PermissionDenied;
        let message = if error.kind() == io::ErrorKind::NotFound {
            format!("cannot {operation}: no such file")
        } else {
            format!("cannot {operation}: {error}")
        };
        Self::of_file(path, key, message, no_permission)
    }

    /// A mistake about a whole file.
    pub fn of_file(path: &Path, key: &str, message: impl Into<String>, no_permission: bool) -> Self {
        let origin = Origin::File { path: PathBuf::from(path).into(), line: None };
        Self(vec![ConfigError { origin, key: key.into(), message: message.into(), no_permission }])
    }

    /// A mistake in an environment variable.
    pub fn of_variable(name: &str, message: impl Into<String>) -> Self {
        let (origin, message) = (Origin::Variable(name.to_owned()), message.into());
        Self(vec![ConfigError { origin, key: String::new(), message, no_permission: false }])
    }

    /// A mistake about the key store in Redis.
    pub fn of_redis(address: &str, message: impl Into<String>) -> Self {
        let (origin, message) = (Origin::Redis(address.into()), message.into());
        Self(vec![ConfigError { origin, key: String::new(), message, no_permission: false }])
    }

    pub fn exit(&self) -> Exit {
        if self.0.iter().any(|error| error.no_permission) { Exit::NoPermission } else { Exit::Config }
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            error.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

impl<'a> IntoIterator for &'a ConfigErrors {
    type Item = &'a ConfigError;
    type IntoIter = std::slice::Iter<'a, ConfigError>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

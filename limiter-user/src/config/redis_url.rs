//! Where Redis is, and as whom to speak to it.

use std::{borrow::Cow, fmt, path::PathBuf};

use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use url::Url;

use super::secret::Secret;

/// A parsed URL. Neither `Debug` nor `Display` shows the password.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisUrl {
    pub address: RedisAddress,
    pub database: u32,
    pub username: Option<String>,
    pub password: Option<Secret>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedisAddress {
    Tcp {
        /// A name or an address, an IPv6 one without brackets.
        host: String,
        port: u16,
        /// By TLS.
        encrypted: bool,
    },
    Unix(PathBuf),
}

/// Says nothing of what was written, since a password may be in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedisUrlError {
    #[error("is not a URL: {0}")]
    Malformed(#[from] url::ParseError),
    #[error("is neither redis://HOST[:PORT][/DATABASE], with TLS rediss://, nor unix:///PATH")]
    Scheme,
    #[error("names no host")]
    NoHost,
    #[error("has an absolute path to the socket only after unix://, as in unix:///run/redis.sock")]
    NoPath,
    #[error("the database is not a number")]
    Database,
    #[error("a part is not UTF-8: {0}")]
    NotUtf8(#[from] std::str::Utf8Error),
    #[error("has a parameter that is not known: unix URLs take db, user and pass, redis URLs none")]
    Parameter,
}

const DEFAULT_PORT: u16 = 6379;

impl RedisUrl {
    /// `redis://[user[:password]@]host[:port][/database]`, or `unix:///path[?db=N&user=U&pass=P]`.
    pub fn parse(text: &str) -> Result<Self, RedisUrlError> {
        let url = Url::parse(text)?;
        match url.scheme() {
            "redis" => Self::tcp(&url, false),
            "rediss" => Self::tcp(&url, true),
            "unix" | "redis+unix" => Self::unix(&url),
            _ => Err(RedisUrlError::Scheme),
        }
    }

    fn tcp(url: &Url, encrypted: bool) -> Result<Self, RedisUrlError> {
        let host = url.host_str().filter(|host| !host.is_empty()).ok_or(RedisUrlError::NoHost)?;
        if url.query().is_some() || url.fragment().is_some() {
            return Err(RedisUrlError::Parameter);
        }
        let database = match url.path().trim_start_matches('/') {
            "" => 0,
            number => database(number)?,
        };
        Ok(Self {
            address: RedisAddress::Tcp {
                host: host.trim_matches(['[', ']']).to_owned(),
                port: url.port().unwrap_or(DEFAULT_PORT),
                encrypted,
            },
            database,
            username: Some(decoded(url.username())?).filter(|name| !name.is_empty()),
            password: url.password().map(decoded).transpose()?.map(Secret::new),
        })
    }

    fn unix(url: &Url) -> Result<Self, RedisUrlError> {
        if url.host_str().is_some_and(|host| !host.is_empty()) || !url.path().starts_with('/') || url.path() == "/" {
            return Err(RedisUrlError::NoPath);
        }
        let path = PathBuf::from(decoded(url.path())?);
        let mut parsed = Self { address: RedisAddress::Unix(path), database: 0, username: None, password: None };
        for (name, value) in url.query_pairs() {
            match &*name {
                "db" => parsed.database = database(&value)?,
                "user" => parsed.username = Some(value.into_owned()),
                "pass" => parsed.password = Some(Secret::new(value.into_owned())),
                _ => return Err(RedisUrlError::Parameter),
            }
        }
        Ok(parsed)
    }

    pub const fn is_encrypted(&self) -> bool {
        matches!(self.address, RedisAddress::Tcp { encrypted: true, .. })
    }

    /// Everything as one URL, for whoever connects: the password is in it.
    pub fn expose(&self) -> String {
        let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let credentials = match (&self.username, &self.password) {
            (None, None) => None,
            (username, password) => {
                let password = password.as_ref().map(|password| format!(":{}", encoded(password.expose())));
                Some((encoded(username.as_deref().unwrap_or_default()), password.unwrap_or_default()))
            }
        };
        match &self.address {
            RedisAddress::Tcp { .. } => {
                let user = credentials.map(|(name, password)| format!("{name}{password}@")).unwrap_or_default();
                let address = self.to_string_without_database();
                let (scheme, host) = address.split_once("://").unwrap_or(("redis", &address));
                format!("{scheme}://{user}{host}/{}", self.database)
            }
            RedisAddress::Unix(path) => {
                let mut url = format!("unix://{}?db={}", path.display(), self.database);
                if let Some(username) = &self.username {
                    url.push_str("&user=");
                    url.push_str(&encoded(username));
                }
                if let Some(password) = &self.password {
                    url.push_str("&pass=");
                    url.push_str(&encoded(password.expose()));
                }
                url
            }
        }
    }

    fn to_string_without_database(&self) -> String {
        let scheme = if self.is_encrypted() { "rediss" } else { "redis" };
        match &self.address {
            RedisAddress::Tcp { host, port, .. } if host.contains(':') => format!("{scheme}://[{host}]:{port}"),
            RedisAddress::Tcp { host, port, .. } => format!("{scheme}://{host}:{port}"),
            RedisAddress::Unix(path) => format!("unix://{}", path.display()),
        }
    }
}

fn database(text: &str) -> Result<u32, RedisUrlError> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten().ok_or(RedisUrlError::Database)
}

fn decoded(text: &str) -> Result<String, RedisUrlError> {
    Ok(percent_decode_str(text).decode_utf8().map(Cow::into_owned)?)
}

/// Without credentials: for messages.
impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_string_without_database())?;
        if self.database > 0 { write!(f, " (database {})", self.database) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> RedisAddress {
        RedisAddress::Tcp { host: host.into(), port, encrypted: false }
    }

    #[test]
    fn urls() {
        for (text, address, database, username, password) in [
            ("redis://127.0.0.1", tcp("127.0.0.1", 6379), 0, None, None),
            ("redis://redis.example:7000/3", tcp("redis.example", 7000), 3, None, None),
            ("redis://[::1]:7000", tcp("::1", 7000), 0, None, None),
            ("redis://limiter:p%40ss@redis/", tcp("redis", 6379), 0, Some("limiter"), Some("p@ss")),
            ("redis://:pass@redis", tcp("redis", 6379), 0, None, Some("pass")),
            ("unix:///run/redis.sock", RedisAddress::Unix("/run/redis.sock".into()), 0, None, None),
            (
                "redis+unix:///run/redis.sock?db=2&user=u&pass=p",
                RedisAddress::Unix("/run/redis.sock".into()),
                2,
                Some("u"),
                Some("p"),
            ),
        ] {
            let right = RedisUrl {
                address,
                database,
                username: username.map(str::to_owned),
                password: password.map(|password| Secret::new(password.to_owned())),
            };
            assert_eq!(RedisUrl::parse(text), Ok(right), "{text}");
        }
    }

    #[test]
    fn bad_urls_are_refused_without_being_repeated() {
        for (text, message) in [
            ("", "is not a URL"),
            ("hunter2", "is not a URL"),
            ("http://hunter2@redis", "is neither"),
            ("redisss://:hunter2@redis", "is neither"),
            ("redis:///hunter2", "names no host"),
            ("redis://:hunter2@redis/hunter2", "the database is not a number"),
            ("redis://:hunter2@redis/-1", "the database is not a number"),
            ("redis://:hunter2@redis?timeout=1", "has a parameter that is not known"),
            ("redis://:hunter2@redis:99999", "is not a URL"),
            ("redis://:%ff@redis", "a part is not UTF-8"),
            ("unix://run/redis.sock", "absolute path"),
            ("unix:///run/redis.sock?password=hunter2", "has a parameter that is not known"),
        ] {
            let error = RedisUrl::parse(text).expect_err(text).to_string();
            assert!(error.contains(message) && !error.contains("hunter2"), "{text}: {error}");
        }
    }

    #[test]
    fn a_password_is_never_printed() {
        let url = RedisUrl::parse("redis://limiter:hunter2@redis:7000/1").unwrap();
        for text in [format!("{url:?}"), format!("{url:#?}"), format!("{url}")] {
            assert!(!text.contains("hunter2"), "{text}");
        }
        assert_eq!(url.to_string(), "redis://redis:7000 (database 1)");
    }
}

//! The table `[store.redis]`.

use std::{path::Path, time::Duration};

use super::{
    RedisAddress, RedisUrl, Secret, Value, duration_within, identifier,
    raw::{RawRedis, RawTls},
    relative_to,
};
use crate::{
    file::read_text,
    store::redis::{Certificates, Topology},
};

#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisConfig {
    /// At least one; several of sentinels and clusters. What they say of user and password is for the servers that they
    /// name.
    pub urls: Vec<RedisUrl>,
    pub topology: Topology,
    /// Beats the URLs; of the servers that hold counters, not of sentinels.
    pub username: Option<String>,
    pub password: Option<Secret>,
    pub certificates: Certificates,
    /// How long any call may take.
    pub timeout: Duration,
    pub sync_interval: Duration,
    /// How often a node says that it is alive.
    pub heartbeat: Duration,
    /// How long a start may take for learning the counts that are in Redis.
    pub recover: Duration,
}

impl RedisConfig {
    /// The addresses, without credentials: for messages.
    pub fn name(&self) -> String {
        self.urls.iter().map(RedisUrl::to_string).collect::<Vec<_>>().join(", ")
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Standalone,
    Sentinel,
    Cluster,
}

pub(super) fn redis(raw: &RawRedis<'_>, folder: &Path, needed: bool) -> Option<RedisConfig> {
    let modes = [("standalone", Mode::Standalone), ("sentinel", Mode::Sentinel), ("cluster", Mode::Cluster)];
    let mode = raw.mode.as_ref().and_then(|mode| mode.one_of(&modes)).unwrap_or(Mode::Standalone);
    let service = raw.service.as_ref().and_then(|service| service.parsed("a name", identifier));
    let topology = match (mode, &raw.service) {
        (Mode::Standalone, None) => Topology::Standalone,
        (Mode::Cluster, None) => Topology::Cluster,
        (Mode::Sentinel, _) => Topology::Sentinel { service: service.unwrap_or_else(|| "mymaster".to_owned()) },
        (Mode::Standalone | Mode::Cluster, Some(service)) => {
            service.error("is what sentinels call a primary: set mode = \"sentinel\", or remove it");
            Topology::Standalone
        }
    };
    let timeout = raw.timeout.as_ref();
    let timeout = timeout.and_then(|value| duration_within(value, Duration::from_millis(1)..=Duration::from_secs(1)));
    let interval = raw.sync_interval.as_ref();
    let interval =
        interval.and_then(|value| duration_within(value, Duration::from_millis(20)..=Duration::from_millis(100)));
    let heartbeat = raw.heartbeat.as_ref();
    let heartbeat =
        heartbeat.and_then(|value| duration_within(value, Duration::from_millis(100)..=Duration::from_secs(10)));
    let recover = raw.recover.as_ref();
    let recover = recover.and_then(|value| duration_within(value, Duration::from_millis(1)..=Duration::from_secs(60)));
    let username = raw.username.as_ref().and_then(|name| name.text("a name")).map(str::to_owned);
    let password = raw.password_file.as_ref().and_then(|file| password(file, folder));
    let certificates = certificates(&raw.tls, folder);
    let urls = match &raw.urls {
        Some(urls) => urls_of(urls, mode),
        None => {
            if needed {
                raw.place.error_in(
                    "urls",
                    "is missing, and store.kind is \"redis\": name one, as in [\"redis://127.0.0.1\"]",
                );
            }
            None
        }
    }?;
    if certificates != Certificates::default() && !urls.iter().any(RedisUrl::is_encrypted) {
        raw.tls.place.error("has certificates that nothing uses: write rediss:// in store.redis.urls");
    }
    Some(RedisConfig {
        urls,
        topology,
        username,
        password,
        certificates,
        timeout: timeout.unwrap_or(Duration::from_millis(5)),
        sync_interval: interval.unwrap_or(Duration::from_millis(50)),
        heartbeat: heartbeat.unwrap_or(Duration::from_secs(1)),
        recover: recover.unwrap_or(Duration::from_secs(2)),
    })
}

fn urls_of(value: &Value<'_>, mode: Mode) -> Option<Vec<RedisUrl>> {
    let given = value.list()?;
    let parse = |url: &Value<'_>| url.parsed("a URL such as \"redis://127.0.0.1:6379\"", RedisUrl::parse);
    let urls = given.iter().map(parse).collect::<Option<Vec<_>>>()?;
    let Some(first) = urls.first() else {
        value.error("is empty: name one, as in [\"redis://127.0.0.1\"]");
        return None;
    };
    if mode == Mode::Standalone && urls.len() > 1 {
        value.error("has more than one, and store.redis.mode is \"standalone\": set \"sentinel\" or \"cluster\"");
        return None;
    }
    let mut is_right = true;
    for (url, value) in urls.iter().zip(&given) {
        let mut refuse = |message: &str| {
            value.error(message);
            is_right = false;
        };
        if mode != Mode::Standalone && matches!(url.address, RedisAddress::Unix(_)) {
            refuse("is a socket of this host, and store.redis.mode is of several servers: name hosts");
        }
        if mode == Mode::Cluster && url.database != 0 {
            refuse("names a database, and a cluster has none but 0");
        }
        if (url.database, url.is_encrypted()) != (first.database, first.is_encrypted()) {
            refuse("has another database or scheme than the first: all servers of one deployment have the same");
        }
    }
    is_right.then_some(urls)
}

fn password(file: &Value<'_>, folder: &Path) -> Option<Secret> {
    let path = relative_to(folder, file, "the name of a file")?;
    let text = read(file, &path)?;
    let password = text.trim_end_matches(['\n', '\r']);
    if password.is_empty() {
        file.error(format_args!("{} is empty", path.display()));
        return None;
    }
    Some(Secret::new(password.to_owned()))
}

fn certificates(raw: &RawTls<'_>, folder: &Path) -> Certificates {
    let pem = |file: &Option<Value<'_>>| {
        let file = file.as_ref()?;
        read(file, &relative_to(folder, file, "the name of a file")?)
    };
    let (authorities, certificate, key) = (pem(&raw.ca_file), pem(&raw.cert_file), pem(&raw.key_file));
    match (&raw.cert_file, &raw.key_file) {
        (Some(_), None) => raw.place.error_in("key_file", "is missing, and cert_file is given"),
        (None, Some(_)) => raw.place.error_in("cert_file", "is missing, and key_file is given"),
        (None, None) | (Some(_), Some(_)) => {}
    }
    Certificates {
        authorities: authorities.map(String::into_bytes),
        client: certificate.zip(key).map(|(certificate, key)| (certificate.into_bytes(), Secret::new(key))),
    }
}

fn read(value: &Value<'_>, path: &Path) -> Option<String> {
    let text = read_text(path);
    text.map_err(|error| value.place().io_error(format_args!("cannot read {}", path.display()), &error)).ok()
}

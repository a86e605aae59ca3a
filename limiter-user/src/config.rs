//! The agent's configuration, in two stages: `config/raw.rs` says which fields there are, this file what they mean.
//!
//! [`Config::load`] reports every mistake at once, with file, line and key.

pub(crate) mod difference;
mod document;
pub mod error;
pub mod jwt;
pub mod prefix;
mod raw;
pub mod redis_url;
pub mod secret;
mod store_redis;
pub mod units;

use std::{
    collections::BTreeSet,
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use ipnet::IpNet;
use limiter_common::{addr::SrcPrefixes, schema::DEFAULT_MAX_SOURCES};

pub(crate) use self::document::{Context, Place, Table, Value, nearest, raw_table};
use self::raw::{
    RawApi, RawBreaker, RawConfig, RawHeaders, RawIdentity, RawNode, RawPolicySource, RawPressure, RawPush, RawStore,
    RawXdp,
};
pub use self::{
    document::Environment,
    error::{ConfigError, ConfigErrors, Origin},
    jwt::{JwtAlgorithm, JwtConfig},
    redis_url::{RedisAddress, RedisUrl},
    secret::Secret,
    store_redis::RedisConfig,
};
pub use crate::dataplane::{
    Diagnosis,
    config::{OnExit, Protect, Transport, XdpMode},
};
use crate::file::read_text;
pub use crate::identity::AddressHeader;
pub use crate::store::breaker::BreakerConfig;

/// Where `--config` points unless it is given.
pub const DEFAULT_PATH: &str = "/etc/limiter/limiter.toml";

/// Everything that the configuration file and the environment say, checked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// The file that this was read from.
    pub path: PathBuf,
    pub node: NodeConfig,
    pub xdp: XdpConfig,
    pub api: ApiConfig,
    pub store: StoreConfig,
    pub identity: IdentityConfig,
    pub policy: PolicyConfig,
    pub push: PushConfig,
}

#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NodeConfig {
    /// The host's name unless configured.
    pub id: String,
    /// A label.
    pub region: Option<String>,
}

/// The packet layer. Without interfaces it is off, and the request layer works alone.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct XdpConfig {
    pub interfaces: Vec<String>,
    pub mode: XdpMode,
    pub protect: Protect,
    pub on_exit: OnExit,
    pub pin_dir: PathBuf,
    /// Buckets of each address family.
    pub max_sources: u32,
    /// Whether truncated or contradictory packets are dropped.
    pub drop_malformed: bool,
    /// Lines about single packets, for diagnosis only.
    pub diagnosis: Diagnosis,
}

#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ApiConfig {
    pub http: Listen,
    /// Loopback or a Unix socket.
    pub admin: Listen,
    pub headers: HeaderFamilies,
    pub pressure: PressureConfig,
}

/// How reports of load are taken, and how often limits follow them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PressureConfig {
    /// Whether `X-Limiter-Pressure` of a check counts. Where the gateway does not set it, it is a client's.
    pub header: bool,
    pub interval: Duration,
    /// How long the last report holds.
    pub expires: Duration,
}

/// Which rate-limit headers answers carry. `Retry-After` belongs to none and is always there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderFamilies {
    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`, in epoch seconds.
    pub x_ratelimit: bool,
    /// `RateLimit-Policy` and `RateLimit`.
    pub draft_10: bool,
    /// `RateLimit-Limit`, `-Remaining` and `-Reset`, in seconds from now.
    pub draft_03: bool,
}

impl Default for HeaderFamilies {
    fn default() -> Self {
        Self { x_ratelimit: true, draft_10: true, draft_03: false }
    }
}

/// Where an API listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreConfig {
    /// Most counters that are held in memory.
    pub max_counters: usize,
    pub kind: StoreKind,
    /// When a Redis that fails is left alone.
    pub breaker: BreakerConfig,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreKind {
    Memory,
    Redis(Box<RedisConfig>),
}

#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct IdentityConfig {
    /// The first that a request has is its identity.
    pub order: Vec<IdentityKind>,
    /// In lower case. `Authorization: Bearer` is always read beside it.
    pub api_key_header: String,
    /// The parameter of a query that may hold an API key.
    pub api_key_query: Option<String>,
    /// The cookie whose value names a session.
    pub session_cookie: Option<String>,
    pub jwt: Option<JwtConfig>,
    pub key_store: KeyStoreKind,
    pub key_file: PathBuf,
    pub key_secret_file: PathBuf,
    /// Of the keys in Redis, for a start without it.
    pub key_copy_file: PathBuf,
    pub trusted_proxies: Vec<IpNet>,
    /// The one header that names the client's address; `None` believes each of them where there is none before it.
    pub client_address_header: Option<AddressHeader>,
    pub prefixes: SrcPrefixes,
}

/// Where API keys are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyStoreKind {
    File,
    Redis(Box<RedisConfig>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityKind {
    ApiKey,
    /// The subject of a verified token.
    Jwt,
    /// A session cookie.
    Session,
    /// The address with the User-Agent.
    UserAgent,
    Ip,
}

impl IdentityKind {
    /// Names in the configuration, and the shorter or longer ones that are understood as well; the order is that of
    /// a configuration without one.
    const NAMES: &[(&str, Self)] = &[
        ("api_key", Self::ApiKey),
        ("jwt", Self::Jwt),
        ("session_cookie", Self::Session),
        ("user_agent", Self::UserAgent),
        ("ip", Self::Ip),
    ];
    const ALIASES: &[(&str, Self)] =
        &[("session", Self::Session), ("ip_user_agent", Self::UserAgent), ("address", Self::Ip)];

    fn read(value: &Value<'_>) -> Option<Self> {
        let alias = Self::ALIASES.iter().find(|(alias, _)| value.as_str() == Some(alias));
        alias.map(|(_, kind)| *kind).or_else(|| value.one_of(Self::NAMES))
    }
}

#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PolicyConfig {
    pub file: PathBuf,
}

/// Which denials become drops in the kernel, and for how long.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PushConfig {
    pub enabled: bool,
    pub max_block: Duration,
    /// Denials of one address by a rule of one endpoint group before the address is pushed.
    pub after_denials: u32,
}

/// A configuration as far as it could be read: what a check of everything needs.
#[derive(Debug)]
pub struct Checked {
    /// `None` when there were mistakes.
    pub config: Option<Config>,
    /// The policy file, where that much could be read.
    pub policy_file: Option<PathBuf>,
    pub errors: ConfigErrors,
}

impl Config {
    /// The Redis that anything is in.
    pub fn redis(&self) -> Option<&RedisConfig> {
        match (&self.store.kind, &self.identity.key_store) {
            (StoreKind::Redis(redis), _) | (StoreKind::Memory, KeyStoreKind::Redis(redis)) => Some(redis),
            (StoreKind::Memory, KeyStoreKind::File) => None,
        }
    }

    /// Reads the file at `path`, with variables of `environment` in place of its fields.
    pub fn load(path: &Path, environment: Environment) -> Result<Self, ConfigErrors> {
        let checked = Self::check(path, environment);
        checked.errors.or(checked.config)
    }

    /// Like [`Self::load`], and keeps what is known in spite of mistakes.
    pub fn check(path: &Path, environment: Environment) -> Checked {
        match read_file("read the configuration", path) {
            Ok(text) => Self::check_text(path, &text, environment),
            Err(errors) => Checked { config: None, policy_file: None, errors },
        }
    }

    /// Like [`Self::load`], of a text that stands for the file at `path`.
    pub fn parse(path: &Path, text: &str, environment: Environment) -> Result<Self, ConfigErrors> {
        let checked = Self::check_text(path, text, environment);
        checked.errors.or(checked.config)
    }

    fn check_text(path: &Path, text: &str, environment: Environment) -> Checked {
        let context = Context::new(path, text, environment);
        let document = match context.parse(text) {
            Ok(document) => document,
            Err(errors) => return Checked { config: None, policy_file: None, errors },
        };
        let raw = RawConfig::read(Table::root(&context, &document));
        context.finish_environment(raw::TABLES);
        let config = interpret(&raw, path);
        let policy_file = Some(config.policy.file.clone());
        let errors = context.take_errors().sorted();
        Checked { config: errors.is_empty().then_some(config), policy_file, errors }
    }
}

/// Reads a file as text; the mistake names `operation` and the file.
pub(crate) fn read_file(operation: &str, path: &Path) -> Result<String, ConfigErrors> {
    read_text(path).map_err(|error| ConfigErrors::of_io(operation, path, "", &error))
}

/// What the fields mean. Mistakes are in the context; where there is one the default stands in, so that the rest is
/// checked too.
fn interpret(raw: &RawConfig<'_>, path: &Path) -> Config {
    let folder = path.parent().unwrap_or(Path::new(""));
    let (store, redis) = store(&raw.store, folder);
    let config = Config {
        path: path.to_owned(),
        node: node(&raw.node),
        xdp: xdp(&raw.xdp),
        api: api(&raw.api),
        store,
        identity: identity(&raw.identity, redis, raw.store.redis.urls.is_some(), folder),
        policy: policy(&raw.policy, folder),
        push: push(&raw.push),
    };
    if config.api.http == config.api.admin && !matches!(config.api.http, Listen::Tcp(address) if address.port() == 0) {
        raw.api.place.error_in("admin", format_args!("is the address of api.http as well: {}", config.api.http));
    }
    config
}

/// 1 to 64 bytes that are safe in file names, labels and the names of counters.
pub(crate) fn identifier(text: &str) -> Result<String, String> {
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    if text.is_empty() || text.len() > 64 || !text.bytes().all(is_safe) {
        return Err(format!("\"{text}\" is not 1 to 64 of the characters A-Z a-z 0-9 _ . -"));
    }
    Ok(text.to_owned())
}

fn relative_to(folder: &Path, value: &Value<'_>, expected: &str) -> Option<PathBuf> {
    let path = value.text(expected)?;
    if path.is_empty() {
        value.error("is empty");
        return None;
    }
    Some(folder.join(path))
}

fn duration_within(value: &Value<'_>, bounds: std::ops::RangeInclusive<Duration>) -> Option<Duration> {
    let duration = value.parsed("a duration such as \"50ms\"", units::duration)?;
    if !bounds.contains(&duration) {
        value.error(format_args!("{duration:?} is outside {:?} to {:?}", bounds.start(), bounds.end()));
        return None;
    }
    Some(duration)
}

fn node(raw: &RawNode<'_>) -> NodeConfig {
    let id = match &raw.id {
        Some(id) => id.parsed("a name", identifier),
        None => {
            let host = nix::unistd::gethostname().ok().and_then(|host| host.into_string().ok());
            let id = host.and_then(|host| identifier(&host).ok());
            if id.is_none() {
                raw.place.error_in("id", "is missing, and the host's name cannot stand in for it");
            }
            id
        }
    };
    let region = raw.region.as_ref().and_then(|region| region.parsed("a name", identifier));
    NodeConfig { id: id.unwrap_or_default(), region }
}

fn xdp(raw: &RawXdp<'_>) -> XdpConfig {
    const PORTS: &[(Transport, u16)] = &[(Transport::Tcp, 80), (Transport::Tcp, 443)];
    XdpConfig {
        interfaces: raw.interfaces.as_ref().map(interfaces).unwrap_or_default(),
        mode: raw
            .mode
            .as_ref()
            .and_then(|mode| {
                mode.one_of(&[("auto", XdpMode::Auto), ("native", XdpMode::Native), ("generic", XdpMode::Generic)])
            })
            .unwrap_or(XdpMode::Auto),
        protect: raw.protect.as_ref().and_then(protect).unwrap_or_else(|| Protect::Ports(PORTS.to_vec())),
        on_exit: raw
            .on_exit
            .as_ref()
            .and_then(|on_exit| on_exit.one_of(&[("keep", OnExit::Keep), ("detach", OnExit::Detach)]))
            .unwrap_or(OnExit::Keep),
        pin_dir: raw.pin_dir.as_ref().and_then(pin_dir).unwrap_or_else(|| "/sys/fs/bpf/limiter".into()),
        max_sources: raw
            .max_sources
            .as_ref()
            .and_then(|sources| sources.within(1024..=1 << 24))
            .unwrap_or(DEFAULT_MAX_SOURCES),
        drop_malformed: raw.drop_malformed.as_ref().and_then(Value::boolean).unwrap_or(true),
        diagnosis: raw
            .diagnosis
            .as_ref()
            .and_then(|level| {
                level.one_of(&Diagnosis::ALL.iter().map(|level| (level.as_str(), *level)).collect::<Vec<_>>())
            })
            .unwrap_or_default(),
    }
}

fn interfaces(value: &Value<'_>) -> Vec<String> {
    let mut names = Vec::new();
    for element in value.list().unwrap_or_default() {
        let Some(name) = element.text("the name of an interface") else { continue };
        // The kernel's own rule: at most 15 bytes, no slash, no colon, no white space, not a dot or two.
        let is_safe = |c: char| c != '/' && c != ':' && !c.is_whitespace() && !c.is_control();
        if name.is_empty() || name.len() > 15 || !name.chars().all(is_safe) || [".", ".."].contains(&name) {
            element.error(format_args!("\"{name}\" cannot be the name of an interface"));
        } else if names.iter().any(|known| known == name) {
            element.error(format_args!("\"{name}\" is named twice"));
        } else {
            names.push(name.to_owned());
        }
    }
    names
}

fn protect(value: &Value<'_>) -> Option<Protect> {
    match value.as_str() {
        Some("all") => return Some(Protect::All),
        Some(text) if !text.contains('/') => {
            value.error(format_args!("\"{text}\" is neither \"all\" nor a list such as [\"tcp/443\"]"));
            return None;
        }
        Some(_) | None => {}
    }
    let elements = value.list()?;
    if elements.is_empty() {
        value.error("is empty, so nothing would be protected: name a port, or remove the interfaces");
    }
    let ports: BTreeSet<(Transport, u16)> =
        elements.iter().filter_map(|element| element.parsed("a port such as \"tcp/443\"", protected_port)).collect();
    Some(Protect::Ports(ports.into_iter().collect()))
}

fn protected_port(text: &str) -> Result<(Transport, u16), String> {
    let wrong = || format!("\"{text}\" is not a port such as \"tcp/443\", \"udp/53\" or \"quic/443\"");
    let (transport, port) = text.split_once('/').ok_or_else(wrong)?;
    let transport = match transport {
        "tcp" => Transport::Tcp,
        // QUIC runs over UDP.
        "udp" | "quic" => Transport::Udp,
        _ => return Err(wrong()),
    };
    match port.parse() {
        Ok(port) if port > 0 && !text.contains('+') => Ok((transport, port)),
        Ok(_) | Err(_) => Err(wrong()),
    }
}

fn pin_dir(value: &Value<'_>) -> Option<PathBuf> {
    let path = Path::new(value.text("a folder")?);
    if !path.is_absolute() {
        value.error("is not an absolute path");
        return None;
    }
    Some(path.to_owned())
}

fn api(raw: &RawApi<'_>) -> ApiConfig {
    let read = |value: &Option<Value<'_>>| value.as_ref().and_then(|value| value.parsed(LISTEN, listen));
    let local = |port| Listen::Tcp(SocketAddr::from(([127, 0, 0, 1], port)));
    let admin = read(&raw.admin).unwrap_or_else(|| local(7073));
    if let (Listen::Tcp(address), Some(value)) = (&admin, &raw.admin)
        && !address.ip().to_canonical().is_loopback()
    {
        value.error(format_args!("{address} is not a loopback address: use one, or \"unix:/path\""));
    }
    ApiConfig {
        http: read(&raw.http).unwrap_or_else(|| local(7070)),
        admin,
        headers: headers(&raw.headers),
        pressure: pressure(&raw.pressure),
    }
}

fn pressure(raw: &RawPressure<'_>) -> PressureConfig {
    let within = |value: &Option<Value<'_>>, most, default| {
        let value = value.as_ref().and_then(|value| duration_within(value, Duration::from_millis(100)..=most));
        value.unwrap_or(default)
    };
    let interval = within(&raw.interval, Duration::from_secs(60), Duration::from_secs(1));
    let expires = within(&raw.expires, Duration::from_secs(3600), Duration::from_secs(10));
    if expires < interval {
        raw.place.error_in("expires", format_args!("is {expires:?}, less than the interval of {interval:?}"));
    }
    PressureConfig { header: raw.header.as_ref().and_then(Value::boolean).unwrap_or(false), interval, expires }
}

fn headers(raw: &RawHeaders<'_>) -> HeaderFamilies {
    let is_on = |value: &Option<Value<'_>>, default| value.as_ref().and_then(Value::boolean).unwrap_or(default);
    let default = HeaderFamilies::default();
    HeaderFamilies {
        x_ratelimit: is_on(&raw.x_ratelimit, default.x_ratelimit),
        draft_10: is_on(&raw.draft_10, default.draft_10),
        draft_03: is_on(&raw.draft_03, default.draft_03),
    }
}

const LISTEN: &str = "an address such as \"127.0.0.1:7070\" or \"unix:/run/limiter/http.sock\"";

fn listen(text: &str) -> Result<Listen, String> {
    // `sun_path` holds 108 bytes with its closing zero.
    const MAX_SOCKET_PATH: usize = 107;
    match text.strip_prefix("unix:") {
        Some(path) if !Path::new(path).is_absolute() => Err(format!("\"{text}\" has no absolute path")),
        Some(path) if path.len() > MAX_SOCKET_PATH => {
            Err(format!("the path of a Unix socket has at most {MAX_SOCKET_PATH} bytes"))
        }
        Some(path) => Ok(Listen::Unix(path.into())),
        None => text.parse().ok().map(Listen::Tcp).ok_or_else(|| format!("\"{text}\" is not {LISTEN}")),
    }
}

fn breaker(raw: &RawBreaker<'_>) -> BreakerConfig {
    const HOUR: Duration = Duration::from_secs(3600);
    let default = BreakerConfig::default();
    let within = |value: &Option<Value<'_>>, least, default| {
        value.as_ref().and_then(|value| duration_within(value, Duration::from_millis(least)..=HOUR)).unwrap_or(default)
    };
    BreakerConfig::new(
        raw.failures.as_ref().and_then(|value| value.within(1..=1000)).unwrap_or(default.failures),
        within(&raw.within, 100, default.within),
        within(&raw.probe, 50, default.probe),
    )
}

/// The store, and the Redis that is named, whether counters are in it or not.
fn store(raw: &RawStore<'_>, folder: &Path) -> (StoreConfig, Option<RedisConfig>) {
    #[derive(Clone, Copy)]
    enum Kind {
        Memory,
        Redis,
    }
    let kind = raw.kind.as_ref().and_then(|kind| kind.one_of(&[("memory", Kind::Memory), ("redis", Kind::Redis)]));
    // Checked whichever store is in use, so that switching between them holds no surprise.
    let redis = store_redis::redis(&raw.redis, folder, matches!(kind, Some(Kind::Redis)));
    let max_counters = raw.max_counters.as_ref().and_then(|counters| counters.within(1..=100_000_000));
    let store = StoreConfig {
        max_counters: max_counters.unwrap_or(1_000_000),
        breaker: breaker(&raw.breaker),
        kind: match (kind, &redis) {
            (Some(Kind::Redis), Some(redis)) => StoreKind::Redis(Box::new(redis.clone())),
            (Some(Kind::Redis), None) | (Some(Kind::Memory) | None, _) => StoreKind::Memory,
        },
    };
    (store, redis)
}

fn identity(raw: &RawIdentity<'_>, redis: Option<RedisConfig>, has_urls: bool, folder: &Path) -> IdentityConfig {
    let path = |value: &Option<Value<'_>>, default: &str| {
        value
            .as_ref()
            .and_then(|value| relative_to(folder, value, "the name of a file"))
            .unwrap_or_else(|| default.into())
    };
    let proxies = raw.trusted_proxies.as_ref().and_then(Value::list).unwrap_or_default();
    let prefix_len = |value: &Option<Value<'_>>, bounds, default| {
        value.as_ref().and_then(|value| value.within(bounds)).unwrap_or(default)
    };
    let default = SrcPrefixes::default();
    IdentityConfig {
        order: identity_order(raw),
        api_key_header: raw
            .api_key_header
            .as_ref()
            .and_then(|header| header.parsed("the name of a header", header_name))
            .unwrap_or_else(|| "x-api-key".into()),
        api_key_query: raw
            .api_key_query
            .as_ref()
            .and_then(|name| name.parsed("the name of a parameter", |text| token(text, "a parameter"))),
        client_address_header: raw.client_address_header.as_ref().and_then(|header| {
            header.one_of(&[
                ("x-forwarded-for", AddressHeader::XForwardedFor),
                ("forwarded", AddressHeader::Forwarded),
                ("x-real-ip", AddressHeader::XRealIp),
            ])
        }),
        session_cookie: raw
            .session_cookie
            .as_ref()
            .and_then(|cookie| cookie.parsed("the name of a cookie", |text| token(text, "a cookie"))),
        jwt: jwt::jwt(&raw.jwt, folder),
        key_store: key_store(raw, redis, has_urls),
        key_file: path(&raw.key_file, "/etc/limiter/keys.toml"),
        key_secret_file: path(&raw.key_secret_file, "/etc/limiter/keys.secret"),
        key_copy_file: path(&raw.key_copy_file, "/var/lib/limiter/keys.json"),
        trusted_proxies: proxies.iter().filter_map(|proxy| proxy.parsed("a prefix", prefix::prefix)).collect(),
        prefixes: SrcPrefixes {
            ipv4: prefix_len(&raw.ipv4_prefix, 24..=32, default.ipv4),
            ipv6: prefix_len(&raw.ipv6_prefix, 48..=128, default.ipv6),
        },
    }
}

fn key_store(raw: &RawIdentity<'_>, redis: Option<RedisConfig>, has_urls: bool) -> KeyStoreKind {
    let is_in_redis = |kind: &Value<'_>| kind.one_of(&[("file", false), ("redis", true)]);
    let Some(value) = raw.key_store.as_ref().filter(|kind| is_in_redis(kind) == Some(true)) else {
        return KeyStoreKind::File;
    };
    match redis {
        Some(redis) => KeyStoreKind::Redis(Box::new(redis)),
        // What is wrong with those that are named has been said.
        None if has_urls => KeyStoreKind::File,
        None => {
            value.error("is \"redis\", and store.redis.urls names none: write urls = [\"redis://127.0.0.1\"]");
            KeyStoreKind::File
        }
    }
}

/// The configured order, or all kinds that can be present.
fn identity_order(raw: &RawIdentity<'_>) -> Vec<IdentityKind> {
    let order = raw.order.as_ref().and_then(|value| {
        let elements = value.list()?;
        if elements.is_empty() {
            value.error("is empty: a request has to be somebody's");
        }
        let mut order = Vec::new();
        for element in elements {
            let Some(kind) = IdentityKind::read(&element) else { continue };
            if order.contains(&kind) {
                element.error("is named twice");
            } else if order.contains(&IdentityKind::Ip) {
                element.error("would never be looked at: every request has an address, so \"ip\" comes last");
            } else if kind == IdentityKind::Session && raw.session_cookie.is_none() {
                element.error("needs the name of the cookie in identity.session_cookie");
            } else if kind == IdentityKind::Jwt && !raw.jwt.is_configured() {
                element.error("needs the keys of tokens in [identity.jwt]");
            }
            order.push(kind);
        }
        Some(order)
    });
    let Some(order) = order else { return IdentityKind::NAMES.iter().map(|(_, kind)| *kind).collect() };
    let settings = [
        (&raw.api_key_query, IdentityKind::ApiKey, "api_key"),
        (&raw.key_store, IdentityKind::ApiKey, "api_key"),
        (&raw.session_cookie, IdentityKind::Session, "session_cookie"),
        (&raw.jwt.public_key_file, IdentityKind::Jwt, "jwt"),
        (&raw.jwt.jwks_file, IdentityKind::Jwt, "jwt"),
        (&raw.jwt.secret_file, IdentityKind::Jwt, "jwt"),
    ];
    for (value, kind, name) in settings {
        if let Some(value) = value.as_ref().filter(|_| !order.contains(&kind)) {
            value.error(format_args!("would never be looked at: identity.order has no \"{name}\""));
        }
    }
    order
}

/// A name as HTTP has it for headers and cookies.
fn token(text: &str, of: &str) -> Result<String, String> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if text.is_empty() || text.len() > 64 || !text.bytes().all(is_token) {
        return Err(format!("\"{text}\" cannot be the name of {of}"));
    }
    Ok(text.to_owned())
}

fn header_name(text: &str) -> Result<String, String> {
    match token(text, "a header")?.to_ascii_lowercase() {
        name if name == "authorization" => {
            Err("Authorization: Bearer is always read: name another header or none".into())
        }
        name => Ok(name),
    }
}

fn policy(raw: &RawPolicySource<'_>, folder: &Path) -> PolicyConfig {
    let file = raw.file.as_ref().and_then(|file| relative_to(folder, file, "the name of a file"));
    PolicyConfig { file: file.unwrap_or_else(|| "/etc/limiter/policy.toml".into()) }
}

fn push(raw: &RawPush<'_>) -> PushConfig {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let max_block = raw.max_block.as_ref();
    PushConfig {
        enabled: raw.enabled.as_ref().and_then(Value::boolean).unwrap_or(true),
        max_block: max_block
            .and_then(|value| duration_within(value, Duration::from_secs(1)..=30 * DAY))
            .unwrap_or(Duration::from_secs(600)),
        after_denials: raw.after_denials.as_ref().and_then(|value| value.within(1..=1_000_000)).unwrap_or(5),
    }
}

#[cfg(test)]
mod tests;

//! How to reach Redis: where, as whom, and how encrypted.

use std::time::Duration;

use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisResult, TlsCertificates,
};

use crate::{config::Secret, store::breaker::BreakerConfig};

/// How to reach Redis.
#[derive(Clone)]
#[non_exhaustive]
pub struct RedisConfig {
    /// Each `redis://host:port/db`, `rediss://host:port/db`, or `unix:///path?db=0`; several of sentinels and clusters.
    pub urls: Vec<String>,
    pub topology: Topology,
    /// Beats what the URL says. Of sentinels, that is theirs alone.
    pub username: Option<String>,
    pub password: Option<Secret>,
    /// For `rediss://`.
    pub certificates: Certificates,
    /// How long a call may take, waiting for a connection included.
    pub timeout: Duration,
    /// How long an attempt to connect may take. No call waits for it longer than its own time.
    pub connect_timeout: Duration,
    /// When a server that fails is left alone; `None`: never, since nobody would probe it.
    pub breaker: Option<BreakerConfig>,
}

/// What stands behind the addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topology {
    /// One server.
    Standalone,
    /// Sentinels, which know the primary by this name.
    Sentinel { service: String },
    /// Some nodes of a cluster.
    Cluster,
}

/// Each in PEM.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Certificates {
    /// Of the authorities that servers' certificates are signed by; those of the system if there are none.
    pub authorities: Option<Vec<u8>>,
    /// The certificate and its key that this node shows to servers.
    pub client: Option<(Vec<u8>, Secret)>,
}

impl std::fmt::Debug for Certificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let own_authorities = self.authorities.is_some();
        let client = self.client.is_some();
        f.debug_struct("Certificates").field("authorities", &own_authorities).field("client", &client).finish()
    }
}

/// An address that cannot be one, or a certificate. The address is not shown: it may hold a password.
#[derive(Debug, thiserror::Error)]
#[error("not the address of a Redis server: {reason}")]
pub struct RedisConfigError {
    pub(super) reason: String,
}

impl RedisConfig {
    /// One server.
    pub fn new(url: impl Into<String>) -> Self {
        Self::of(vec![url.into()], Topology::Standalone)
    }

    pub fn of(urls: Vec<String>, topology: Topology) -> Self {
        Self {
            urls,
            topology,
            username: None,
            password: None,
            certificates: Certificates::default(),
            timeout: Duration::from_millis(5),
            connect_timeout: Duration::from_secs(1),
            breaker: None,
        }
    }

    /// Of each URL.
    pub(super) fn addresses(&self) -> Result<Vec<ConnectionInfo>, RedisConfigError> {
        let parse = |url: &String| {
            url.as_str().into_connection_info().map_err(|error| RedisConfigError { reason: error.to_string() })
        };
        let addresses = self.urls.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        if addresses.is_empty() {
            return Err(RedisConfigError { reason: "none is given".to_owned() });
        }
        Ok(addresses)
    }

    /// As whom to speak to the servers that hold counters, wherever they are.
    pub(super) fn access(&self) -> Result<Access, RedisConfigError> {
        let addresses = self.addresses()?;
        let first = &addresses[0];
        let mut settings = match &self.topology {
            Topology::Standalone | Topology::Cluster => first.redis_settings().clone(),
            // What these URLs say is for the sentinels.
            Topology::Sentinel { .. } => redis::RedisConnectionInfo::default().set_db(first.redis_settings().db()),
        };
        if let Some(username) = &self.username {
            settings = settings.set_username(username);
        }
        if let Some(password) = &self.password {
            settings = settings.set_password(password.expose());
        }
        let access = Access { info: first.clone().set_redis_settings(settings), certificates: self.tls_certificates() };
        // So that a wrong certificate is found now, and not at every attempt.
        access.first().map_err(|error| RedisConfigError { reason: error.to_string() })?;
        Ok(access)
    }

    /// As whom to speak to each of the servers that the URLs name.
    pub(super) fn access_to_each(&self) -> Result<Vec<Access>, RedisConfigError> {
        let of = |info| Access { info, certificates: self.tls_certificates() };
        Ok(self.addresses()?.into_iter().map(of).collect())
    }

    fn tls_certificates(&self) -> TlsCertificates {
        let client_tls = self.certificates.client.as_ref().map(|(certificate, key)| ClientTlsConfig {
            client_cert: certificate.clone(),
            client_key: key.expose().as_bytes().to_vec(),
        });
        TlsCertificates { client_tls, root_cert: self.certificates.authorities.clone() }
    }
}

impl std::fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URLs may hold passwords.
        let addresses = self.addresses().map(|infos| infos.iter().map(|info| info.addr().to_string()).collect());
        f.debug_struct("RedisConfig")
            .field("addresses", &addresses.unwrap_or_else(|_| vec!["invalid".to_owned()]))
            .field("topology", &self.topology)
            .field("username", &self.username)
            .field("password", &self.password)
            .field("certificates", &self.certificates)
            .field("timeout", &self.timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("breaker", &self.breaker)
            .finish()
    }
}

/// Makes clients for servers of one deployment: all with the same credentials, and all encrypted or none.
#[derive(Clone)]
pub(super) struct Access {
    info: ConnectionInfo,
    certificates: TlsCertificates,
}

impl Access {
    /// For the server that the URL names.
    pub(super) fn first(&self) -> RedisResult<Client> {
        self.open(self.info.clone())
    }

    /// For another one.
    pub(super) fn client(&self, host: &str, port: u16) -> RedisResult<Client> {
        let addr = if self.is_encrypted() {
            ConnectionAddr::TcpTls { host: host.to_owned(), port, insecure: false, tls_params: None }
        } else {
            ConnectionAddr::Tcp(host.to_owned(), port)
        };
        self.open(self.info.clone().set_addr(addr))
    }

    pub(super) fn name(&self) -> String {
        self.info.addr().to_string()
    }

    /// `None` of a socket in the file system.
    pub(super) fn host_and_port(&self) -> Option<(String, u16)> {
        if let ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } = self.info.addr() {
            Some((host.clone(), *port))
        } else {
            None
        }
    }

    fn is_encrypted(&self) -> bool {
        matches!(self.info.addr(), ConnectionAddr::TcpTls { .. })
    }

    fn open(&self, info: ConnectionInfo) -> RedisResult<Client> {
        if self.is_encrypted() {
            // The first one stays; whoever else installs one installs the same.
            drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
            return Client::build_with_tls(info, self.certificates.clone());
        }
        Client::open(info)
    }
}

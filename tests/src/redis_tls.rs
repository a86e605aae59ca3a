//! A `redis-server` that speaks TLS alone, and only to who shows a certificate.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;

use crate::redis_server::RedisServer;

/// An authority of the test's own, and what it has signed.
#[derive(Debug)]
pub struct Authority {
    folder: TempDir,
}

impl Authority {
    pub fn new() -> Self {
        let authority = Self { folder: TempDir::new().expect("a temporary folder") };
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        // Two of one name would each be taken for the issuer of the other.
        params.distinguished_name.push(DnType::CommonName, "authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("an authority");
        fs::write(authority.ca(), issuer.pem()).expect("write the authority");
        for name in ["server", "client"] {
            let key = KeyPair::generate().expect("a key");
            let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
            let mut params = CertificateParams::new(names).expect("parameters");
            params.distinguished_name.push(DnType::CommonName, name);
            let certificate = params.signed_by(&key, &issuer).expect("a certificate");
            fs::write(authority.certificate(name), certificate.pem()).expect("write a certificate");
            fs::write(authority.key(name), key.serialize_pem()).expect("write a key");
        }
        authority
    }

    pub fn ca(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// Of "server" or "client".
    pub fn certificate(&self, name: &str) -> PathBuf {
        self.folder.path().join(name).with_extension("pem")
    }

    pub fn key(&self, name: &str) -> PathBuf {
        self.folder.path().join(name).with_extension("key")
    }

    /// The port for TLS is beside the one without, which only the test uses.
    pub async fn start_redis(&self, tls_port: u16) -> RedisServer {
        let text = |path: &Path| path.display().to_string();
        let arguments = [
            ("--tls-port", tls_port.to_string()),
            ("--tls-ca-cert-file", text(&self.ca())),
            ("--tls-cert-file", text(&self.certificate("server"))),
            ("--tls-key-file", text(&self.key("server"))),
            ("--tls-auth-clients", "yes".to_owned()),
        ];
        let arguments: Vec<&str> = arguments.iter().flat_map(|(name, value)| [*name, value.as_str()]).collect();
        RedisServer::start_with(&arguments).await
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

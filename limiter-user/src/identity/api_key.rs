//! API keys, and the keyed hash that stands for them everywhere but in the request itself.

use std::{fmt, fs, io::ErrorKind, net::IpAddr, os::unix::fs::PermissionsExt, path::Path};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::{
    config::{ConfigErrors, Secret},
    file::read_text,
    store::{ApiKeyId, SessionId},
};

/// A presented key that is longer is none of ours, and is not worth hashing.
pub const MAX_KEY_LEN: usize = 256;
const KEY_PREFIX: &str = "lk_";
/// 62^43 is more than 2^256.
const KEY_DIGITS: usize = 43;
const BASE_62: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Whether this may be a key that `limiter keys` has made.
pub(super) fn has_form_of_key(text: &str) -> bool {
    let digits = text.strip_prefix(KEY_PREFIX).unwrap_or_default();
    digits.len() == KEY_DIGITS && digits.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// No random numbers from the kernel.
#[derive(Debug, thiserror::Error)]
#[error("cannot get random numbers: {0}")]
pub struct RandomError(#[from] getrandom::Error);

/// What API keys and sessions are hashed with. Never printed.
///
/// Ids are looked up, not compared with what a client sends: whoever does not have the secret cannot choose an id, so the
/// time of a look-up tells nothing about stored ones.
#[derive(Clone)]
pub struct KeySecret {
    /// Has the secret already, so that an id costs two blocks of SHA-256 for a key of ordinary length.
    keyed: Hmac<Sha256>,
}

impl fmt::Debug for KeySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeySecret")
    }
}

impl KeySecret {
    pub const LEN: usize = 32;

    pub fn new(secret: &[u8; Self::LEN]) -> Self {
        // HMAC pads a key that is shorter than a block with zeros.
        let mut block = [0; 64];
        block[..Self::LEN].copy_from_slice(secret);
        Self { keyed: Hmac::new(&block.into()) }
    }

    /// Reads the file: 64 hexadecimal digits. `None` when there is no such file.
    pub fn load(path: &Path) -> Result<Option<Self>, ConfigErrors> {
        const KEY: &str = "identity.key_secret_file";
        let text = match read_text(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(ConfigErrors::of_io("read the secret of API keys", path, KEY, &error)),
        };
        let mode = fs::metadata(path).map_or(0, |metadata| metadata.permissions().mode());
        if mode & 0o007 != 0 {
            let message = format!("everybody may use it (mode {:04o}): run chmod 600", mode & 0o7777);
            return Err(ConfigErrors::of_file(path, KEY, message, false));
        }
        match hex_bytes(text.trim_end()) {
            Some(secret) => Ok(Some(Self::new(&secret))),
            None => Err(ConfigErrors::of_file(path, KEY, "is not 64 hexadecimal digits", false)),
        }
    }

    /// The text of a new secret file.
    pub(super) fn generate() -> Result<Secret, RandomError> {
        let mut secret = [0; Self::LEN];
        getrandom::fill(&mut secret)?;
        Ok(Secret::new(hex(&secret)))
    }

    /// A secret of this process alone.
    pub fn random() -> Result<Self, RandomError> {
        let mut secret = [0; Self::LEN];
        getrandom::fill(&mut secret)?;
        Ok(Self::new(&secret))
    }

    /// What stands for a key.
    pub fn id_of(&self, key: &str) -> ApiKeyId {
        ApiKeyId(self.hash(&[key.as_bytes()]))
    }

    /// What stands for a session. No header can hold the zero byte, so no API key has the hash of a session.
    pub fn session_of(&self, cookie: &[u8]) -> SessionId {
        SessionId(self.hash(&[b"session\0", cookie]))
    }

    /// What stands for whoever has no session: the address, cut to its prefix, with the User-Agent.
    pub fn session_of_agent(&self, address: IpAddr, user_agent: &[u8]) -> SessionId {
        let address = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        SessionId(self.hash(&[b"agent\0", &address.octets(), user_agent]))
    }

    /// What tells whether another host has the same secret, and nothing about it. No header can hold the zero byte, so it
    /// stands for no key.
    pub fn fingerprint(&self) -> String {
        hex(&self.hash(&[b"fingerprint\0"]))
    }

    fn hash(&self, parts: &[&[u8]]) -> [u8; 16] {
        let mut mac = self.keyed.clone();
        for part in parts {
            mac.update(part);
        }
        let hash: [u8; 32] = mac.finalize().into_bytes().into();
        let mut id = [0; 16];
        id.copy_from_slice(&hash[..16]);
        id
    }
}

/// A new key: 256 random bits that begin with `lk_`, so that scanners of leaked secrets can know it.
pub(super) fn generate_key() -> Result<Secret, RandomError> {
    Ok(Secret::new(format!("{KEY_PREFIX}{}", random_digits(KEY_DIGITS)?)))
}

/// Random digits of base 62, each as likely as any other.
pub(super) fn random_digits(count: usize) -> Result<String, RandomError> {
    // The largest multiple of 62 that a byte can hold: bytes from there on would favour the first digits.
    const FAIR: u8 = 248;
    let mut digits = String::with_capacity(count);
    let mut bytes = [0; 64];
    while digits.len() < count {
        getrandom::fill(&mut bytes)?;
        let fair = bytes.iter().filter(|byte| **byte < FAIR);
        digits.extend(fair.map(|byte| char::from(BASE_62[usize::from(*byte % 62)])).take(count - digits.len()));
    }
    Ok(digits)
}

/// The hexadecimal form of an id: what files and logs show of a key.
pub fn id_to_hex(id: ApiKeyId) -> String {
    hex(&id.0)
}

pub fn id_from_hex(text: &str) -> Option<ApiKeyId> {
    hex_bytes(text).map(ApiKeyId)
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

fn hex_bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; N];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_the_first_half_of_hmac_sha_256() {
        // RFC 4231, test case 1. Its key is shorter, and HMAC pads keys with zeros.
        let mut secret = [0; 32];
        secret[..20].fill(0x0b);
        let id = KeySecret::new(&secret).id_of("Hi There");
        assert_eq!(id_to_hex(id), "b0344c61d8db38535ca8afceaf0bf12b");
        assert_eq!(id_from_hex("b0344c61d8db38535ca8afceaf0bf12b"), Some(id));
        assert_eq!(id_from_hex("b0344c61d8db38535ca8afceaf0bf12"), None);
        assert_eq!(id_from_hex("+0344c61d8db38535ca8afceaf0bf12b"), None);
    }

    #[test]
    fn no_two_kinds_of_caller_share_a_hash() {
        let secret = KeySecret::new(&[7; 32]);
        let (v4, v6): (IpAddr, IpAddr) = ("192.0.2.1".parse().unwrap(), "2001:db8::".parse().unwrap());
        let ids = [
            secret.id_of("x").0,
            secret.session_of(b"x").0,
            secret.session_of(b"y").0,
            secret.session_of_agent(v4, b"x").0,
            secret.session_of_agent(v4, b"y").0,
            secret.session_of_agent(v6, b"x").0,
            KeySecret::new(&[8; 32]).session_of(b"x").0,
            secret.id_of("fingerprint").0,
            hex_bytes(&secret.fingerprint()).unwrap(),
        ];
        assert_eq!(ids.iter().collect::<std::collections::HashSet<_>>().len(), ids.len());
    }

    #[test]
    fn generated_keys_differ_and_look_alike() {
        let keys: Vec<_> = (0..100).map(|_| generate_key().unwrap().expose().to_owned()).collect();
        for key in &keys {
            assert_eq!(key.len(), 46);
            assert!(key.starts_with("lk_") && key[3..].bytes().all(|byte| byte.is_ascii_alphanumeric()), "{key}");
        }
        assert_eq!(keys.iter().collect::<std::collections::HashSet<_>>().len(), keys.len());
    }
}

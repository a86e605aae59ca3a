//! Keys that tokens are verified with: from PEM, a JWK set (RFC 7517), or a secret.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use jsonwebtoken::{
    Algorithm, AlgorithmFamily, DecodingKey,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, PublicKeyUse},
};
use serde::Deserialize;

use crate::{
    config::{ConfigErrors, JwtAlgorithm, JwtConfig},
    file::read_text,
};

/// A token without a key id is tried with each.
const MAX_KEYS: usize = 16;
/// RFC 7518, section 3.2: no shorter than the hash.
const MIN_SECRET_LEN: usize = 32;
/// Of an uncompressed point of P-256.
const P256_POINT_LEN: usize = 65;

#[derive(Debug)]
pub(super) struct VerifyingKey {
    pub(super) id: Option<String>,
    pub(super) of: JwtAlgorithm,
    pub(super) key: DecodingKey,
}

impl VerifyingKey {
    pub(super) const fn algorithm(&self) -> Algorithm {
        match self.of {
            JwtAlgorithm::Hs256 => Algorithm::HS256,
            JwtAlgorithm::Rs256 => Algorithm::RS256,
            JwtAlgorithm::Es256 => Algorithm::ES256,
            JwtAlgorithm::EdDsa => Algorithm::EdDSA,
        }
    }
}

#[derive(Deserialize)]
struct JwkSet {
    keys: Vec<serde_json::Value>,
}

/// Everything that is wrong with any of the files.
pub(super) fn load(config: &JwtConfig) -> Result<Vec<VerifyingKey>, ConfigErrors> {
    type Read = fn(&str, &Path) -> Result<Vec<VerifyingKey>, String>;
    let sources: [(_, &str, Read); 3] = [
        (&config.public_key_file, "identity.jwt.public_key_file", |text, _| public_keys(text)),
        (&config.jwks_file, "identity.jwt.jwks_file", key_set),
        (&config.secret_file, "identity.jwt.secret_file", secret),
    ];
    let mut errors = ConfigErrors::new();
    let mut keys = Vec::new();
    for (path, field, read) in sources {
        let Some(path) = path else { continue };
        let text = match read_text(path) {
            Ok(text) => text,
            Err(error) => {
                errors.extend(ConfigErrors::of_io("read the keys of tokens", path, field, &error));
                continue;
            }
        };
        match read(&text, path).and_then(|found| allowed(found, config)) {
            Ok(found) => keys.extend(found),
            Err(message) => errors.extend(ConfigErrors::of_file(path, field, message, false)),
        }
        if keys.len() > MAX_KEYS {
            let message = format!("{} keys of tokens in all: at most {MAX_KEYS} are tried", keys.len());
            errors.extend(ConfigErrors::of_file(path, field, message, false));
        }
    }
    errors.or(Some(keys))
}

fn allowed(mut keys: Vec<VerifyingKey>, config: &JwtConfig) -> Result<Vec<VerifyingKey>, String> {
    let of = keys.first().map_or("any algorithm", |key| key.of.as_str());
    keys.retain(|key| config.algorithms.contains(&key.of));
    match keys.is_empty() {
        true => Err(format!("has no key that identity.jwt.algorithms allows (it has one of {of})")),
        false => Ok(keys),
    }
}

fn public_keys(text: &str) -> Result<Vec<VerifyingKey>, String> {
    const BEGIN: &str = "-----BEGIN ";
    if text.contains("PRIVATE KEY-----") {
        return Err("is a private key: the agent needs the public one alone (openssl pkey -pubout)".into());
    }
    let starts: Vec<usize> = text.match_indices(BEGIN).map(|(at, _)| at).collect();
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    let keys: Option<Vec<_>> = starts.iter().zip(ends).map(|(start, end)| public_key(&text[*start..end])).collect();
    keys.filter(|keys| !keys.is_empty())
        .ok_or_else(|| "is not PEM with public keys of RSA, P-256 or Ed25519 (BEGIN PUBLIC KEY)".into())
}

fn public_key(pem: &str) -> Option<VerifyingKey> {
    let pem = pem.as_bytes();
    let key = [DecodingKey::from_rsa_pem, DecodingKey::from_ec_pem, DecodingKey::from_ed_pem];
    let key = key.iter().find_map(|read| read(pem).ok())?;
    Some(VerifyingKey { id: None, of: algorithm_of(&key)?, key })
}

/// The one algorithm that a key is used for.
fn algorithm_of(key: &DecodingKey) -> Option<JwtAlgorithm> {
    match key.family() {
        AlgorithmFamily::Hmac => Some(JwtAlgorithm::Hs256),
        AlgorithmFamily::Rsa => Some(JwtAlgorithm::Rs256),
        AlgorithmFamily::Ec => {
            key.try_get_as_bytes().is_ok_and(|point| point.len() == P256_POINT_LEN).then_some(JwtAlgorithm::Es256)
        }
        AlgorithmFamily::Ed => Some(JwtAlgorithm::EdDsa),
    }
}

/// The keys that are for signatures of ours; a set may have others.
fn key_set(text: &str, path: &Path) -> Result<Vec<VerifyingKey>, String> {
    let set: JwkSet = serde_json::from_str(text).map_err(|error| format!("is not a JWK set: {error}"))?;
    let keys: Vec<_> = set.keys.into_iter().filter_map(jwk).collect();
    if keys.is_empty() {
        return Err("has no key for signatures of HS256, RS256, ES256 or EdDSA".into());
    }
    if keys.iter().any(|key| key.of == JwtAlgorithm::Hs256) {
        secret_mode(path)?;
    }
    Ok(keys)
}

fn jwk(value: serde_json::Value) -> Option<VerifyingKey> {
    let jwk: Jwk = serde_json::from_value(value).ok()?;
    if jwk.common.public_key_use.as_ref().is_some_and(|of| *of != PublicKeyUse::Signature) {
        return None;
    }
    let is_other_curve = matches!(&jwk.algorithm, AlgorithmParameters::EllipticCurve(key) if key.curve != EllipticCurve::P256)
        || matches!(&jwk.algorithm, AlgorithmParameters::OctetKeyPair(key) if key.curve != EllipticCurve::Ed25519);
    let key = DecodingKey::from_jwk(&jwk).ok().filter(|_| !is_other_curve)?;
    let of = algorithm_of(&key)?;
    let says_other = jwk.common.key_algorithm.is_some_and(|algorithm| algorithm.to_string() != of.as_str());
    let is_short =
        of == JwtAlgorithm::Hs256 && key.try_get_as_bytes().is_ok_and(|secret| secret.len() < MIN_SECRET_LEN);
    (!says_other && !is_short).then_some(VerifyingKey { id: jwk.common.key_id, of, key })
}

fn secret(text: &str, path: &Path) -> Result<Vec<VerifyingKey>, String> {
    let secret = text.trim_end_matches(['\n', '\r']);
    if secret.contains("-----BEGIN ") {
        return Err("is a key in PEM, and no secret: name it in public_key_file".into());
    }
    if secret.len() < MIN_SECRET_LEN {
        return Err(format!("has {} bytes: a secret of HS256 has at least {MIN_SECRET_LEN}", secret.len()));
    }
    secret_mode(path)?;
    let key = DecodingKey::from_secret(secret.as_bytes()).map_err(|error| error.to_string())?;
    Ok(vec![VerifyingKey { id: None, of: JwtAlgorithm::Hs256, key }])
}

fn secret_mode(path: &Path) -> Result<(), String> {
    let mode = fs::metadata(path).map_or(0, |metadata| metadata.permissions().mode());
    match mode & 0o007 {
        0 => Ok(()),
        _ => Err(format!("holds a secret, and everybody may use it (mode {:04o}): run chmod 600", mode & 0o7777)),
    }
}

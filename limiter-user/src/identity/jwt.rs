//! JSON Web Tokens (RFC 7519): verified here, and issued by others.
//!
//! The key says the algorithm, never the token: a token whose header names another than its key's is not valid, so there is
//! no `none`, and a public key is no secret of HS256.

mod cache;
mod keys;
mod watch;

use std::sync::Arc;

use jsonwebtoken::{Validation, decode, decode_header};
use limiter_common::time::UnixMicros;
use serde_json::{Map, Value};

pub use self::watch::JwtWatch;
use self::{
    cache::{Cache, Cached},
    keys::VerifyingKey,
};
use crate::{
    config::{ConfigErrors, JwtConfig},
    store::Name,
};

/// A longer token is none of ours, and is not worth verifying.
const MAX_TOKEN_LEN: usize = 8192;
/// Longest `sub` and plan, in bytes.
const MAX_NAME_LEN: usize = 256;

type Claims = Map<String, Value>;

/// Verifies tokens with the keys of the configuration's files.
#[derive(Debug)]
pub struct Jwt {
    config: JwtConfig,
    keys: Vec<VerifyingKey>,
    cache: Cache,
}

/// What a valid token says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Hashed once, and not for each request.
    pub user: Name,
    pub plan: Option<Arc<str>>,
}

impl Jwt {
    pub fn load(config: &JwtConfig) -> Result<Self, ConfigErrors> {
        Ok(Self { keys: keys::load(config)?, config: config.clone(), cache: Cache::default() })
    }

    pub fn key_count(&self) -> usize {
        self.keys.len()
    }

    /// Whether a Bearer token has the form of a JWT. The API keys of `limiter keys` never have.
    pub fn has_form_of(token: &str) -> bool {
        token.bytes().filter(|byte| *byte == b'.').count() == 2
    }

    /// `None` when the token is not valid at `now`, for whatever reason.
    pub fn verify(&self, token: &str, now: UnixMicros) -> Option<Verified> {
        if token.len() > MAX_TOKEN_LEN {
            return None;
        }
        let now_s = i64::try_from(now.get() / 1_000_000).unwrap_or(i64::MAX);
        let hash = Cache::hash(token);
        if let Some(cached) = self.cache.get(&hash) {
            return (now_s < cached.expires_s).then_some(cached.verified);
        }
        let header = decode_header(token).ok()?;
        // A key without an id may be any; a token without one may be of any key.
        let may_be = |key: &&VerifyingKey| key.id.is_none() || header.kid.is_none() || key.id == header.kid;
        let claims = self.keys.iter().filter(may_be).find_map(|key| {
            let mut validation = Validation::new(key.algorithm());
            // Claims are looked at below, by the agent's own clock.
            validation.required_spec_claims.clear();
            validation.validate_exp = false;
            validation.validate_aud = false;
            decode::<Claims>(token, &key.key, &validation).ok()
        })?;
        let (verified, expires_s) = self.read(&claims.claims, now_s)?;
        self.cache.insert(hash, Cached { verified: verified.clone(), expires_s });
        Some(verified)
    }

    /// What verified claims say, and until when; `None` when they are not for us, or not now.
    fn read(&self, claims: &Claims, now_s: i64) -> Option<(Verified, i64)> {
        let leeway_s = i64::try_from(self.config.leeway.as_secs()).unwrap_or(i64::MAX);
        let expires_s = seconds(claims.get("exp")?)?.saturating_add(leeway_s);
        let begins_s = claims.get("nbf").map_or(Some(i64::MIN), seconds)?.saturating_sub(leeway_s);
        if now_s >= expires_s || now_s < begins_s {
            return None;
        }
        let accepted = |wanted: &[String], given: Option<&Value>| {
            let is_wanted =
                |value: &Value| value.as_str().is_some_and(|text| wanted.iter().any(|wanted| wanted == text));
            match given {
                _ if wanted.is_empty() => true,
                None => false,
                Some(Value::Array(values)) => values.iter().any(is_wanted),
                Some(value) => is_wanted(value),
            }
        };
        if !accepted(&self.config.audience, claims.get("aud"))
            || !accepted(&self.config.issuer, claims.get("iss").filter(|issuer| issuer.is_string()))
        {
            return None;
        }
        let user = name(claims.get("sub")?)?.into();
        let plan = match self.config.plan_claim.as_ref().and_then(|claim| claims.get(claim)) {
            None | Some(Value::Null) => None,
            Some(plan) => Some(name(plan)?),
        };
        Some((Verified { user, plan }, expires_s))
    }
}

fn name(value: &Value) -> Option<Arc<str>> {
    value.as_str().filter(|text| (1..=MAX_NAME_LEN).contains(&text.len())).map(Into::into)
}

/// A date of a token, which may have decimals.
fn seconds(value: &Value) -> Option<i64> {
    let Value::Number(number) = value else { return None };
    match number.as_i64() {
        Some(seconds) => Some(seconds),
        None => number.to_string().split_once('.')?.0.parse().ok(),
    }
}

#[cfg(test)]
mod tests;

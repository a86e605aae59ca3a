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
use super::refusal::{Refusal, Refusals};
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
    refusals: Arc<Refusals>,
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
        Self::counted_by(config, Arc::default())
    }

    /// What is refused is counted together with what was refused before, by other keys.
    fn counted_by(config: &JwtConfig, refusals: Arc<Refusals>) -> Result<Self, ConfigErrors> {
        Ok(Self { keys: keys::load(config)?, config: config.clone(), cache: Cache::default(), refusals })
    }

    pub fn key_count(&self) -> usize {
        self.keys.len()
    }

    /// Whether a Bearer token has the form of a JWT. The API keys of `limiter keys` never have.
    pub fn has_form_of(token: &str) -> bool {
        token.bytes().filter(|byte| *byte == b'.').count() == 2
    }

    /// `None` when the token is not valid at `now`, for whatever reason: that is for operators, and whoever tries tokens
    /// does not learn it.
    pub fn verify(&self, token: &str, now: UnixMicros) -> Option<Verified> {
        self.check(token, now).map_err(|refusal| self.refusals.count(refusal)).ok()
    }

    fn check(&self, token: &str, now: UnixMicros) -> Result<Verified, Refusal> {
        if token.len() > MAX_TOKEN_LEN {
            return Err(Refusal::Malformed);
        }
        let now_s = i64::try_from(now.get() / 1_000_000).unwrap_or(i64::MAX);
        let hash = Cache::hash(token);
        if let Some(cached) = self.cache.get(&hash) {
            return if now_s < cached.expires_s { Ok(cached.verified) } else { Err(Refusal::Expired) };
        }
        let header = decode_header(token).map_err(|_not_one| Refusal::Malformed)?;
        // A key without an id may be any; a token without one may be of any key.
        let may_be = |key: &&VerifyingKey| key.id.is_none() || header.kid.is_none() || key.id == header.kid;
        let mut keys = self.keys.iter().filter(may_be).peekable();
        if keys.peek().is_none() {
            return Err(Refusal::UnknownKey);
        }
        let claims = keys.find_map(|key| {
            let mut validation = Validation::new(key.algorithm());
            // Claims are looked at below, by the agent's own clock.
            validation.required_spec_claims.clear();
            validation.validate_exp = false;
            validation.validate_aud = false;
            decode::<Claims>(token, &key.key, &validation).ok()
        });
        let (verified, expires_s) = self.read(&claims.ok_or(Refusal::Signature)?.claims, now_s)?;
        self.cache.insert(hash, Cached { verified: verified.clone(), expires_s });
        Ok(verified)
    }

    /// What verified claims say, and until when.
    fn read(&self, claims: &Claims, now_s: i64) -> Result<(Verified, i64), Refusal> {
        let leeway_s = i64::try_from(self.config.leeway.as_secs()).unwrap_or(i64::MAX);
        let expires_s = claims.get("exp").and_then(seconds).ok_or(Refusal::Claims)?.saturating_add(leeway_s);
        let begins_s =
            claims.get("nbf").map_or(Some(i64::MIN), seconds).ok_or(Refusal::Claims)?.saturating_sub(leeway_s);
        if now_s >= expires_s {
            return Err(Refusal::Expired);
        }
        if now_s < begins_s {
            return Err(Refusal::NotYetValid);
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
        if !accepted(&self.config.audience, claims.get("aud")) {
            return Err(Refusal::Audience);
        }
        if !accepted(&self.config.issuer, claims.get("iss").filter(|issuer| issuer.is_string())) {
            return Err(Refusal::Issuer);
        }
        let user = claims.get("sub").and_then(name).ok_or(Refusal::Claims)?.into();
        let plan = match self.config.plan_claim.as_ref().and_then(|claim| claims.get(claim)) {
            None | Some(Value::Null) => None,
            Some(plan) => Some(name(plan).ok_or(Refusal::Claims)?),
        };
        Ok((Verified { user, plan }, expires_s))
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

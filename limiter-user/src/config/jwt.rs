//! `[identity.jwt]`: which tokens are believed.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use super::{Value, duration_within, raw::RawJwt, relative_to};

/// Which tokens are believed, and what they say.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JwtConfig {
    /// PEM: one or more public keys.
    pub public_key_file: Option<PathBuf>,
    pub jwks_file: Option<PathBuf>,
    /// What tokens of HS256 are signed with.
    pub secret_file: Option<PathBuf>,
    /// Keys of others are not used.
    pub algorithms: Vec<JwtAlgorithm>,
    /// One of these has to be in `aud`; any will do where there is none.
    pub audience: Vec<String>,
    /// One of these has to be `iss`; any will do where there is none.
    pub issuer: Vec<String>,
    /// How far clocks may be apart.
    pub leeway: Duration,
    /// The claim with the name of the plan.
    pub plan_claim: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JwtAlgorithm {
    Hs256,
    Rs256,
    Es256,
    EdDsa,
}

impl JwtAlgorithm {
    const NAMES: &[(&str, Self)] =
        &[("HS256", Self::Hs256), ("RS256", Self::Rs256), ("ES256", Self::Es256), ("EdDSA", Self::EdDsa)];

    /// The name in tokens.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hs256 => "HS256",
            Self::Rs256 => "RS256",
            Self::Es256 => "ES256",
            Self::EdDsa => "EdDSA",
        }
    }
}

impl JwtConfig {
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        [&self.public_key_file, &self.jwks_file, &self.secret_file].into_iter().flatten().map(PathBuf::as_path)
    }
}

/// `None` where no token is believed.
pub(super) fn jwt(raw: &RawJwt<'_>, folder: &Path) -> Option<JwtConfig> {
    const MAX_LEEWAY: Duration = Duration::from_secs(600);
    let file = |value: &Option<Value<'_>>| relative_to(folder, value.as_ref()?, "the name of a file");
    let config = JwtConfig {
        public_key_file: file(&raw.public_key_file),
        jwks_file: file(&raw.jwks_file),
        secret_file: file(&raw.secret_file),
        algorithms: raw
            .algorithms
            .as_ref()
            .and_then(algorithms)
            .unwrap_or_else(|| JwtAlgorithm::NAMES.iter().map(|(_, algorithm)| *algorithm).collect()),
        audience: raw.audience.as_ref().map(texts).unwrap_or_default(),
        issuer: raw.issuer.as_ref().map(texts).unwrap_or_default(),
        leeway: raw
            .leeway
            .as_ref()
            .and_then(|value| duration_within(value, Duration::from_secs(1)..=MAX_LEEWAY))
            .unwrap_or(Duration::from_secs(30)),
        plan_claim: raw.plan_claim.as_ref().and_then(|value| value.text("the name of a claim")).map(str::to_owned),
    };
    if raw.is_configured() {
        return Some(config);
    }
    for value in [&raw.algorithms, &raw.audience, &raw.issuer, &raw.leeway, &raw.plan_claim].into_iter().flatten() {
        value.error("there is no key to verify tokens with: set public_key_file, jwks_file or secret_file");
    }
    None
}

impl RawJwt<'_> {
    /// Whether a key is named.
    pub(super) fn is_configured(&self) -> bool {
        [&self.public_key_file, &self.jwks_file, &self.secret_file].iter().any(|value| value.is_some())
    }
}

fn algorithms(value: &Value<'_>) -> Option<Vec<JwtAlgorithm>> {
    let elements = value.list()?;
    if elements.is_empty() {
        value.error("is empty, so no token would ever be valid");
    }
    Some(elements.iter().filter_map(|element| element.one_of(JwtAlgorithm::NAMES)).collect())
}

/// One text, or a list of them.
fn texts(value: &Value<'_>) -> Vec<String> {
    if let Some(text) = value.as_str() {
        if text.is_empty() {
            value.error("is empty");
        }
        return vec![text.to_owned()];
    }
    let elements = value.list_or("a text or a list of texts").unwrap_or_default();
    if elements.is_empty() {
        value.error("is empty: remove it to accept any");
    }
    elements.iter().filter_map(|element| element.text("a text")).map(str::to_owned).collect()
}

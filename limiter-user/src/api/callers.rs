//! Who a request comes from: the first of the configured kinds that it presents.

use std::{
    borrow::Cow,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use arc_swap::ArcSwap;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use limiter_common::addr::SrcPrefixes;
use percent_encoding::percent_decode_str;

use crate::{
    active::Active,
    clock::Clock,
    config::{IdentityConfig, IdentityKind},
    identity::{
        ClientAddress, Foreseen, Jwt, KeyOwner, KeySecret, KeyStore, KnownKeys, Refusal, Refusals, Verified,
        api_key::RandomError,
    },
    limiter::Caller,
    store::SessionId,
};

/// RFC 6750, section 2.1; schemes are compared without regard to case.
const BEARER: &[u8] = b"bearer ";

/// Knows callers by what they present.
pub struct Callers {
    order: Vec<IdentityKind>,
    api_key_header: HeaderName,
    api_key_query: Option<String>,
    session_cookie: Option<String>,
    keys: KnownKeys,
    /// `None` where tokens are the upstream's own.
    jwt: Option<ArcSwap<Jwt>>,
    clock: Arc<dyn Clock>,
    /// There is a key file, or was one; or keys are in Redis.
    keys_in_use: AtomicBool,
    /// What sessions are hashed with where no file says.
    own_secret: KeySecret,
    prefixes: SrcPrefixes,
    refusals: Arc<Refusals>,
}

impl fmt::Debug for Callers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callers").field("order", &self.order).finish_non_exhaustive()
    }
}

/// What a request has of one kind.
#[derive(Debug, PartialEq, Eq)]
enum Presented<'h> {
    One(Cow<'h, str>),
    /// Several that differ: which of them others on the way believe cannot be told here.
    Several,
}

/// Callers cannot be told apart.
#[derive(Debug, thiserror::Error)]
pub enum CallersError {
    #[error("identity.api_key_header: {0}")]
    Header(#[from] header::InvalidHeaderName),
    #[error(transparent)]
    Random(#[from] RandomError),
}

impl Callers {
    /// `keys_in_use`: there is a key store, even if no key is in it.
    pub fn new(
        config: &IdentityConfig,
        keys: KeyStore,
        keys_in_use: bool,
        jwt: Option<Jwt>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, CallersError> {
        Ok(Self {
            order: config.order.clone(),
            api_key_header: HeaderName::try_from(&*config.api_key_header)?,
            api_key_query: config.api_key_query.clone(),
            session_cookie: config.session_cookie.clone(),
            keys: KnownKeys::new(keys)?,
            jwt: jwt.map(ArcSwap::from_pointee),
            clock,
            keys_in_use: AtomicBool::new(keys_in_use),
            own_secret: KeySecret::random()?,
            prefixes: config.prefixes,
            refusals: Arc::default(),
        })
    }

    /// Counts what is refused together with what others refuse.
    #[must_use]
    pub fn counted_by(mut self, refusals: Arc<Refusals>) -> Self {
        self.refusals = refusals;
        self
    }

    fn refuse(&self, refusal: Refusal) -> Caller {
        self.refusals.count(refusal);
        Caller::Unauthenticated
    }

    /// The keys in force, from here on as well.
    pub fn keys(&self) -> KnownKeys {
        self.keys.clone()
    }

    /// Makes changed keys effective.
    pub fn replace_keys(&self, keys: KeyStore) {
        self.keys.replace(keys);
        self.keys_in_use.store(true, Ordering::Relaxed);
    }

    /// Makes changed keys of tokens effective. What was verified with the old ones is forgotten.
    pub fn replace_jwt(&self, jwt: Jwt) {
        if let Some(current) = &self.jwt {
            current.store(Arc::new(jwt));
        }
    }

    fn identifies_by(&self, kind: IdentityKind) -> bool {
        self.order.contains(&kind)
    }

    /// Where nobody is limited by key and no key exists, a Bearer token is the upstream's own and no business of ours.
    fn uses_keys(&self, active: &Active) -> bool {
        self.identifies_by(IdentityKind::ApiKey) && (self.keys_in_use.load(Ordering::Relaxed) || active.limits_keys)
    }

    /// Begins to look for the key that a request seems to have.
    pub fn foresee<'h>(&self, headers: &'h HeaderMap, active: &Active) -> Option<Foreseen<'h>> {
        let text = headers.get(&self.api_key_header).filter(|_| self.uses_keys(active))?;
        self.keys.seek(text.as_bytes())
    }

    /// By a request's headers, and the queries that its URL may have. `foreseen` is of the same request.
    pub fn of_headers<'q>(
        &self,
        headers: &'q HeaderMap,
        queries: impl Iterator<Item = &'q str>,
        address: Option<ClientAddress>,
        active: &Active,
        mut foreseen: Option<Foreseen<'q>>,
    ) -> Caller {
        let mut queries = Some(queries);
        let first = self.order.iter().find_map(|kind| match kind {
            IdentityKind::ApiKey if !self.uses_keys(active) => None,
            IdentityKind::ApiKey => self.api_key(headers, queries.take()).map(|presented| match presented {
                Presented::One(api_key) => self.of_used_key(&api_key, foreseen.take()),
                Presented::Several => self.refuse(Refusal::KeySeveral),
            }),
            IdentityKind::Jwt => self.of_token(headers),
            IdentityKind::Session => {
                let cookie = cookie(headers, self.session_cookie.as_deref()?)?;
                Some(session(active, || self.secret(|secret| secret.session_of(cookie))))
            }
            IdentityKind::UserAgent => {
                let user_agent = headers.get(header::USER_AGENT)?.as_bytes();
                let address = self.prefixes.cut(address?.address);
                Some(session(active, || self.secret(|secret| secret.session_of_agent(address, user_agent))))
            }
            IdentityKind::Ip => Some(Caller::Anonymous),
        });
        first.unwrap_or(Caller::Anonymous)
    }

    pub fn of_key(&self, api_key: &str, active: &Active) -> Caller {
        if self.uses_keys(active) { self.of_used_key(api_key, None) } else { self.refuse(Refusal::KeyUnknown) }
    }

    fn of_used_key(&self, api_key: &str, foreseen: Option<Foreseen<'_>>) -> Caller {
        let is_over = |owner: &KeyOwner| owner.has_ended(self.clock.now());
        self.keys.find(api_key, foreseen, is_over).map_or_else(|refusal| self.refuse(refusal), Caller::Key)
    }

    /// Whom a token names, where one is presented.
    fn of_token(&self, headers: &HeaderMap) -> Option<Caller> {
        let jwt = self.jwt.as_ref()?;
        match presented(bearer_tokens(headers))? {
            Presented::One(token) if !Jwt::has_form_of(&token) => None,
            Presented::One(token) => Some(match jwt.load().verify(&token, self.clock.now()) {
                Some(Verified { user, plan }) => Caller::User { user, plan },
                None => Caller::Unauthenticated,
            }),
            Presented::Several => Some(self.refuse(Refusal::Several)),
        }
    }

    /// The session that the cookie with this value would name.
    pub fn of_session(&self, value: &str) -> Caller {
        Caller::Session(self.secret(|secret| secret.session_of(value.as_bytes())))
    }

    fn secret(&self, hash: impl FnOnce(&KeySecret) -> SessionId) -> SessionId {
        self.keys.with_store(|keys| hash(keys.secret().unwrap_or(&self.own_secret)))
    }

    fn api_key<'h>(
        &self,
        headers: &'h HeaderMap,
        queries: Option<impl Iterator<Item = &'h str>>,
    ) -> Option<Presented<'h>> {
        let in_header = headers.get_all(&self.api_key_header).iter().map(HeaderValue::as_bytes);
        presented(in_header)
            .or_else(|| match presented(bearer_tokens(headers)) {
                // What has the form of a token is one, where tokens are believed.
                Some(Presented::One(token)) if self.jwt.is_some() && Jwt::has_form_of(&token) => None,
                bearer => bearer,
            })
            .or_else(|| in_queries(queries?, self.api_key_query.as_deref()?))
    }
}

/// Where no rule is about sessions, nobody needs to know which one it is.
fn session(active: &Active, id: impl FnOnce() -> SessionId) -> Caller {
    if active.limits_sessions { Caller::Session(id()) } else { Caller::Anonymous }
}

fn presented<'h>(mut values: impl Iterator<Item = &'h [u8]>) -> Option<Presented<'h>> {
    let first = values.next()?;
    if values.any(|value| value != first) {
        return Some(Presented::Several);
    }
    // Lossy: a key with other bytes than ours have is unknown, not absent. What is text, as most are, is sooner seen so.
    let text = std::str::from_utf8(first).map_or_else(|_| String::from_utf8_lossy(first), Cow::Borrowed);
    Some(Presented::One(text))
}

fn bearer_tokens(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    headers.get_all(header::AUTHORIZATION).iter().filter_map(|value| {
        let (scheme, credentials) = value.as_bytes().split_at_checked(BEARER.len())?;
        scheme.eq_ignore_ascii_case(BEARER).then(|| credentials.trim_ascii())
    })
}

/// What the parameter of that name says, however it is encoded.
fn in_queries<'q>(queries: impl Iterator<Item = &'q str>, name: &str) -> Option<Presented<'q>> {
    let decoded = |text: &'q str| percent_decode_str(text).decode_utf8_lossy();
    let pairs = queries.flat_map(|query| query.split('&')).filter_map(|pair| pair.split_once('='));
    let mut values = pairs.filter(|(of, _)| decoded(of) == name).map(|(_, value)| decoded(value));
    let first = values.next()?;
    Some(if values.any(|value| value != first) { Presented::Several } else { Presented::One(first) })
}

/// Value of the first cookie of that name that has one.
fn cookie<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h [u8]> {
    let lines = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes);
    let mut pairs = lines.flat_map(|line| line.split(|byte| *byte == b';')).map(<[u8]>::trim_ascii);
    pairs.find_map(|pair| {
        let value = pair.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        (!value.is_empty()).then_some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn cookies() {
        for (lines, expected) in [
            (&[][..], None),
            (&["sid=1"][..], Some("1")),
            (&["a=b; sid=1; c=d"], Some("1")),
            (&["a=b;sid=1"], Some("1")),
            (&["a=b", "c=d; sid=1"], Some("1")),
            (&["sid=1; sid=2"], Some("1")),
            (&["sid=; sid=2"], Some("2")),
            (&["sid=a=b=="], Some("a=b==")),
            (&["sid", "xsid=1", "SID=1", "sid2=1", "sid =1"], None),
            (&["sid="], None),
            (&["; ;;sid=1;"], Some("1")),
        ] {
            let lines: Vec<_> = lines.iter().map(|line| ("cookie", *line)).collect();
            let found = cookie(&headers(&lines), "sid").map(|value| String::from_utf8_lossy(value).into_owned());
            assert_eq!(found.as_deref(), expected, "{lines:?}");
        }
    }

    #[test]
    fn keys_in_queries() {
        for (queries, expected) in [
            (&[][..], None),
            (&["a=b&key2=x&xkey=y&key"][..], None),
            (&["key=lk_1"], Some(Presented::One("lk_1".into()))),
            (&["a=b&key=lk_1&c"], Some(Presented::One("lk_1".into()))),
            (&["%6bey=lk%5F1"], Some(Presented::One("lk_1".into()))),
            (&["key=a&key=a", "key=a"], Some(Presented::One("a".into()))),
            (&["key=a&key=b"], Some(Presented::Several)),
            (&["key=a", "key=b"], Some(Presented::Several)),
            (&["key="], Some(Presented::One("".into()))),
            (&["key=%ff"], Some(Presented::One("\u{fffd}".into()))),
        ] {
            assert_eq!(in_queries(queries.iter().copied(), "key"), expected, "{queries:?}");
        }
    }

    #[test]
    fn bearer_tokens_of_all_lines() {
        for (lines, expected) in [
            (&[][..], None),
            (&["Basic eDp5"][..], None),
            (&["Bearer a"], Some(Presented::One("a".into()))),
            (&["bEARER  a "], Some(Presented::One("a".into()))),
            (&["Basic eDp5", "Bearer a"], Some(Presented::One("a".into()))),
            (&["Bearer a", "Bearer a"], Some(Presented::One("a".into()))),
            (&["Bearer a", "Bearer b"], Some(Presented::Several)),
            (&["Bearer"], None),
            (&["Bearer "], Some(Presented::One("".into()))),
        ] {
            let lines: Vec<_> = lines.iter().map(|line| ("authorization", *line)).collect();
            assert_eq!(presented(bearer_tokens(&headers(&lines))), expected, "{lines:?}");
        }
    }
}

//! What every API does with a request: who is it, may it pass, and what of that the kernel should know.

use std::{
    borrow::Cow,
    cell::RefCell,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use arc_swap::ArcSwap;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use ipnet::IpNet;
use smallvec::SmallVec;

use super::serve::Peer;
use crate::{
    clock::Stopwatch,
    config::{ConfigErrors, HeaderFamilies},
    host::HostAddresses,
    identity::{Arrival, ClientAddress, KeyLookup, KeyStore, client_address},
    limiter::{Caller, Decision, Limiter, Request, Subject},
    metrics::Metrics,
    policy::{Policy, Scratch},
    pressure::{Pressure, Report},
    push::Pusher,
    store::Charge,
    top::Top,
};

const X_FORWARDED_FOR: &str = "x-forwarded-for";
const X_REAL_IP: &str = "x-real-ip";
/// RFC 6750, section 2.1; schemes are compared without regard to case.
const BEARER: &[u8] = b"bearer ";

/// Identity, decision and push, for every API alike.
#[derive(Debug)]
pub struct Gate {
    limiter: Limiter,
    keys: ArcSwap<KeyStore>,
    key_use: KeyUse,
    trusted_proxies: Vec<IpNet>,
    host: Arc<HostAddresses>,
    pusher: Pusher,
    metrics: Arc<Metrics>,
    header_families: HeaderFamilies,
    /// Who wants to know how loaded the origin is.
    pressure: Option<Arc<Pressure>>,
    /// Who wants to know who asks most.
    top: Option<Arc<Top>>,
}

/// Where API keys are looked for.
#[derive(Debug)]
pub struct KeyUse {
    /// Whether the configuration identifies requests by API keys.
    pub enabled: bool,
    pub header: HeaderName,
    /// There is a key file, or was one.
    pub has_file: AtomicBool,
}

thread_local! {
    /// Room for a normalised path, one a thread, so that a check allocates nothing.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Gate {
    pub fn new(
        limiter: Limiter,
        keys: KeyStore,
        key_use: KeyUse,
        trusted_proxies: Vec<IpNet>,
        host: Arc<HostAddresses>,
        pusher: Pusher,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            limiter,
            keys: ArcSwap::from_pointee(keys),
            key_use,
            trusted_proxies,
            host,
            pusher,
            metrics,
            header_families: HeaderFamilies::default(),
            pressure: None,
            top: None,
        }
    }

    /// Shows `top` every request.
    #[must_use]
    pub fn observed_by(mut self, top: Arc<Top>) -> Self {
        self.top = Some(top);
        self
    }

    /// Has answers carry these headers.
    #[must_use]
    pub fn with_headers(mut self, families: HeaderFamilies) -> Self {
        self.header_families = families;
        self
    }

    /// Tells `pressure` what is reported.
    #[must_use]
    pub fn reporting_to(mut self, pressure: Arc<Pressure>) -> Self {
        self.pressure = Some(pressure);
        self
    }

    pub fn pressure(&self) -> Option<&Pressure> {
        self.pressure.as_deref()
    }

    /// Whether what `peer` says of others is believed: it is of this host, or a trusted proxy.
    pub fn believes(&self, peer: Peer) -> bool {
        let is_trusted = |peer: IpAddr| self.trusted_proxies.iter().any(|prefix| prefix.contains(&peer));
        peer.0.is_none_or(|peer| self.host.contains(peer) || is_trusted(peer))
    }

    /// Takes a report of load, if `peer` is believed.
    pub fn report(&self, report: Report, peer: Peer) {
        let Some(pressure) = &self.pressure else { return };
        if self.believes(peer) {
            pressure.report(report);
        } else {
            pressure.refuse();
        }
    }

    pub fn header_families(&self) -> HeaderFamilies {
        self.header_families
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Makes a changed key file effective.
    pub fn replace_keys(&self, keys: KeyStore) {
        self.keys.store(Arc::new(keys));
        self.key_use.has_file.store(true, Ordering::Relaxed);
    }

    /// Whether every plan of a key is in `policy`.
    pub fn check_plans(&self, policy: &Policy) -> Result<(), ConfigErrors> {
        if self.key_use.enabled { self.keys.load().check_plans(policy).or(Some(())) } else { Ok(()) }
    }

    /// Where nobody is limited by key and no key exists, a Bearer token is the upstream's own and no business of ours.
    fn uses_keys(&self) -> bool {
        self.key_use.enabled && (self.key_use.has_file.load(Ordering::Relaxed) || self.limiter.active().limits_keys)
    }

    pub fn decide(&self, request: &Request<'_>) -> Decision {
        let stopwatch = Stopwatch::start();
        let decision = SCRATCH.with_borrow_mut(|scratch| self.limiter.decide(request, scratch));
        self.metrics.observe_check(stopwatch.elapsed().as_secs_f64());
        if let Some(top) = &self.top {
            top.saw_request(&request.subject.caller, decision.kind);
        }
        if decision.answer.is_none() {
            self.metrics.decided_without_rule(decision.kind);
        }
        if let (Some(denial), Some(client)) = (&decision.address_denial, request.subject.address)
            && client.packet_source
            // Neither a question, nor a request of a size of its own, says that the address cannot send another one.
            && request.charge == Charge::Commit
            && request.cost == 1
            && !self.host.contains(client.address)
        {
            self.pusher.denied(client.address, denial);
        }
        decision
    }

    pub fn subject_of_headers(&self, headers: &HeaderMap, peer: Peer) -> Subject {
        let caller = self.api_key(headers).map_or(Caller::Anonymous, |api_key| self.caller_of_key(&api_key));
        let forwarded_for: SmallVec<[&[u8]; 4]> =
            headers.get_all(X_FORWARDED_FOR).iter().map(HeaderValue::as_bytes).collect();
        let arrival = Arrival {
            peer: peer.0,
            forwarded_for: &forwarded_for,
            real_ip: headers.get(X_REAL_IP).map(HeaderValue::as_bytes),
        };
        let address = client_address(&arrival, &self.trusted_proxies, |address| self.host.contains(address));
        Subject { caller, address }
    }

    fn api_key<'a>(&self, headers: &'a HeaderMap) -> Option<Cow<'a, str>> {
        if !self.uses_keys() {
            return None;
        }
        // Lossy: a key with other bytes than ours have is unknown, not absent.
        let key = |bytes: &'a [u8]| String::from_utf8_lossy(bytes);
        headers.get(&self.key_use.header).map(|value| key(value.as_bytes())).or_else(|| {
            let credentials = headers.get(header::AUTHORIZATION)?.as_bytes();
            let (scheme, credentials) = credentials.split_at_checked(BEARER.len())?;
            scheme.eq_ignore_ascii_case(BEARER).then(|| key(credentials.trim_ascii()))
        })
    }

    pub fn caller_of_key(&self, api_key: &str) -> Caller {
        if !self.uses_keys() {
            return Caller::Unauthenticated;
        }
        match self.keys.load().lookup(api_key) {
            KeyLookup::Known { id, client, plan } => Caller::Key { id, client, plan },
            KeyLookup::Disabled(_) | KeyLookup::Unknown => Caller::Unauthenticated,
        }
    }

    /// A client that a program names. Its packets come to this host only if the program runs here, as a gateway does.
    pub fn named_client(&self, address: IpAddr, peer: Peer) -> ClientAddress {
        let address = address.to_canonical();
        let is_proxy = self.trusted_proxies.iter().any(|prefix| prefix.contains(&address));
        let is_local = peer.0.is_none_or(|peer| self.host.contains(peer));
        ClientAddress { address, packet_source: is_local && !is_proxy }
    }

    pub fn has_plan(&self, name: &str) -> bool {
        self.limiter.plan(name).is_some()
    }
}

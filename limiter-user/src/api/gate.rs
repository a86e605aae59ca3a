//! What every API does with a request: who is it, may it pass, and what of that the kernel should know.

use std::{cell::RefCell, net::IpAddr, sync::Arc};

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use ipnet::IpNet;
use smallvec::SmallVec;

use super::{callers::Callers, serve::Peer};
use crate::{
    clock::Stopwatch,
    config::HeaderFamilies,
    host::HostAddresses,
    identity::{AddressHeader, Arrival, ClientAddress, Jwt, KeyStore, client_address},
    limiter::{Caller, Decision, Limiter, Request, Subject},
    metrics::Metrics,
    policy::Scratch,
    pressure::{Pressure, Report},
    push::Pusher,
    store::Charge,
    top::Top,
};

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// Identity, decision and push, for every API alike.
#[derive(Debug)]
pub struct Gate {
    limiter: Limiter,
    callers: Callers,
    trusted_proxies: Vec<IpNet>,
    address_header: Option<AddressHeader>,
    host: Arc<HostAddresses>,
    pusher: Pusher,
    metrics: Arc<Metrics>,
    header_families: HeaderFamilies,
    /// Who wants to know how loaded the origin is.
    pressure: Option<Arc<Pressure>>,
    /// Who wants to know who asks most.
    top: Option<Arc<Top>>,
}

thread_local! {
    /// Room for a normalised path, one a thread, so that a check allocates nothing.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Gate {
    pub fn new(
        limiter: Limiter,
        callers: Callers,
        trusted_proxies: Vec<IpNet>,
        host: Arc<HostAddresses>,
        pusher: Pusher,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            limiter,
            callers,
            trusted_proxies,
            address_header: None,
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

    /// Believes this header alone when it says whose a request is.
    #[must_use]
    pub fn naming_clients_by(mut self, header: Option<AddressHeader>) -> Self {
        self.address_header = header;
        self
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Makes a changed key file effective.
    pub fn replace_keys(&self, keys: KeyStore) {
        self.callers.replace_keys(keys);
    }

    /// Makes changed keys of tokens effective.
    pub fn replace_jwt(&self, jwt: Jwt) {
        self.callers.replace_jwt(jwt);
    }

    /// Waits only where a rule wants Redis to be asked.
    pub async fn decide(&self, request: &Request<'_>) -> Decision {
        let stopwatch = Stopwatch::start();
        let at_once = SCRATCH.with_borrow_mut(|scratch| self.limiter.decide_since(stopwatch, request, scratch));
        let decision = match at_once {
            Some(decision) => decision,
            // On the heap, so that requests which need not wait carry nothing of it around.
            None => Box::pin(self.limiter.ask(request)).await,
        };
        self.note(request, decision, &stopwatch)
    }

    fn note(&self, request: &Request<'_>, decision: Decision, stopwatch: &Stopwatch) -> Decision {
        self.metrics.observe_check(stopwatch.elapsed());
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

    /// `queries` are what the URL of the client's request may have behind its path.
    pub fn subject_of_headers<'q>(
        &self,
        headers: &'q HeaderMap,
        queries: impl Iterator<Item = &'q str>,
        peer: Peer,
    ) -> Subject {
        let active = self.limiter.active();
        let foreseen = self.callers.foresee(headers, &active);
        let lines = |name: &HeaderName| {
            headers.get_all(name).iter().map(HeaderValue::as_bytes).collect::<SmallVec<[&[u8]; 4]>>()
        };
        let (forwarded_for, forwarded) = (lines(&X_FORWARDED_FOR), lines(&header::FORWARDED));
        let arrival = Arrival {
            peer: peer.0,
            forwarded_for: &forwarded_for,
            forwarded: &forwarded,
            // Where there are several, the last is of whoever is nearest.
            real_ip: headers.get_all(&X_REAL_IP).iter().next_back().map(HeaderValue::as_bytes),
            header: self.address_header,
        };
        let address = client_address(&arrival, &self.trusted_proxies, |address| self.host.contains(address));
        Subject { caller: self.callers.of_headers(headers, queries, address, &active, foreseen), address }
    }

    /// Whom an API key is of.
    pub fn caller_of_key(&self, api_key: &str) -> Caller {
        self.callers.of_key(api_key, &self.limiter.active())
    }

    /// Whom the session cookie with this value names.
    pub fn caller_of_session(&self, session: &str) -> Caller {
        self.callers.of_session(session)
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

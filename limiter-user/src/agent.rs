//! The agent: everything is read, bound and loaded first, and only then does anything act.

use std::{net::IpAddr, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use axum::{Router, http::HeaderName, routing};
use tokio::time::MissedTickBehavior;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    api::{
        admin::{self, Admin},
        check, decide,
        gate::Gate,
        serve::Listener,
    },
    clock::{Clock, SharedClock, Stopwatch},
    config::{Config, IdentityKind, RedisConfig, StoreKind},
    dataplane::{self, Dataplane, DataplaneConfig, KernelDataplane},
    identity::{client_address::Gateways, keys::KeyFile},
    limiter::Limiter,
    metrics::Metrics,
    policy::Policy,
    push::{
        PushWorker, Pusher,
        policy::{PushPolicy, PushSettings},
    },
    status::StatusSource,
    store::{memory::MemoryStore, redis::RedisStore, sync::SyncWorker},
};

/// Permission of the socket that gateways ask: any local user may, as with a port on loopback.
const HTTP_SOCKET_MODE: u32 = 0o666;
/// Permission of the socket that changes things.
const ADMIN_SOCKET_MODE: u32 = 0o600;
/// How often what has run out is removed, and files are looked at.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// An agent that is ready to run.
#[derive(Debug)]
pub struct Agent {
    http: Listener,
    admin: Listener,
    gate: Arc<Gate>,
    admin_state: Arc<Admin>,
    clock: Arc<SharedClock>,
    counters: Arc<MemoryStore>,
    dataplane: Option<Arc<dyn Dataplane>>,
    push: Option<PushWorker>,
    sync: Option<SyncWorker>,
    keys: Option<KeyFile>,
}

impl Agent {
    /// Reads the policy and the keys, binds the sockets, and then loads and attaches the XDP program: whatever is
    /// wrong is found before a packet is touched.
    pub async fn build(config: Config) -> Result<Self> {
        let policy = Policy::load(&config.policy.file)?;
        let mut keys = key_file(&config)?;
        let http = Listener::bind("api.http", &config.api.http, HTTP_SOCKET_MODE).await?;
        let admin = Listener::bind("api.admin", &config.api.admin, ADMIN_SOCKET_MODE).await?;

        let clock = Arc::new(SharedClock::new());
        let counters = Arc::new(match &config.store.kind {
            StoreKind::Memory => MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, config.store.max_counters),
            StoreKind::Redis(_) => MemoryStore::shared(Arc::clone(&clock) as Arc<dyn Clock>, config.store.max_counters),
        });
        let sync = match &config.store.kind {
            StoreKind::Memory => None,
            StoreKind::Redis(redis) => Some(sync_worker(redis, &counters, &clock).await),
        };

        let mut metrics = Metrics::new();
        let dataplane = if config.xdp.interfaces.is_empty() {
            None
        } else {
            let dataplane = KernelDataplane::start(&dataplane_config(&config), &policy)?;
            Some(Arc::new(dataplane) as Arc<dyn Dataplane>)
        };
        let status = Arc::new(StatusSource::new(
            &config,
            &policy,
            Arc::clone(&counters),
            dataplane.clone(),
            sync.as_ref().map(SyncWorker::stats),
        ));
        metrics.register_source(Arc::clone(&status));
        let metrics = Arc::new(metrics);

        let gateways = Gateways::new(config.identity.trusted_proxies.clone(), own_addresses()?);
        let (pusher, push) = match &dataplane {
            Some(_) if config.push.enabled => {
                let (pusher, worker) = Pusher::with_worker(push_policy(&config, &policy)?, Arc::clone(&metrics));
                (pusher, Some(worker))
            }
            Some(_) | None => (Pusher::disabled(Arc::clone(&metrics)), None),
        };
        let prefixes = config.identity.prefixes;
        let limiter =
            Limiter::new(policy, Arc::clone(&counters), Arc::clone(&clock) as Arc<dyn Clock>, prefixes, &metrics);
        let header = HeaderName::try_from(&*config.identity.api_key_header).context("identity.api_key_header")?;
        let store = keys.as_mut().map(KeyFile::take);
        let gate = Arc::new(Gate::new(limiter, store, header, gateways, pusher, Arc::clone(&metrics)));
        let admin_state = Arc::new(Admin { metrics, status, dataplane: dataplane.clone() });
        Ok(Self { http, admin, gate, admin_state, clock, counters, dataplane, push, sync, keys })
    }

    /// Serves until `shutdown`, then answers what is open, hands over what Redis does not have yet, and does with the
    /// XDP program what the configuration says.
    pub async fn run(self, shutdown: CancellationToken) -> Result<()> {
        let tasks = TaskTracker::new();
        let http = Router::new()
            .route(check::ROUTE, routing::any(check::check))
            .route(&format!("{}/{{*path}}", check::ROUTE), routing::any(check::check))
            .route("/v1/decide", routing::post(decide::decide))
            .with_state(Arc::clone(&self.gate));
        tracing::info!(target: "limiter::api", http = %self.http.address(), admin = %self.admin.address(), "ready");
        tasks.spawn(self.http.serve(http, shutdown.clone()));
        tasks.spawn(self.admin.serve(admin::router(Arc::clone(&self.admin_state)), shutdown.clone()));
        if let (Some(push), Some(dataplane)) = (self.push, &self.dataplane) {
            tasks.spawn(push.run(Arc::clone(dataplane), Arc::clone(&self.clock) as Arc<dyn Clock>, shutdown.clone()));
        }
        if let Some(sync) = self.sync {
            // Ends with a last batch after everything is answered.
            tasks.spawn(sync.run(shutdown.clone()));
        }
        tasks.spawn(housekeeping(
            self.gate,
            self.keys,
            self.counters,
            self.clock,
            self.dataplane.clone(),
            shutdown.clone(),
        ));
        tasks.close();
        tasks.wait().await;
        if let Some(dataplane) = self.dataplane {
            dataplane.stop()?;
        }
        Ok(())
    }
}

/// Removes what has run out, and makes a changed key file effective.
async fn housekeeping(
    gate: Arc<Gate>,
    mut keys: Option<KeyFile>,
    counters: Arc<MemoryStore>,
    clock: Arc<SharedClock>,
    dataplane: Option<Arc<dyn Dataplane>>,
    shutdown: CancellationToken,
) {
    let mut ticks = tokio::time::interval(HOUSEKEEPING);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = shutdown.cancelled() => return,
        }
        counters.sweep(clock.now());
        if let Some(Err(error)) = dataplane.as_ref().map(|dataplane| dataplane.expire()) {
            tracing::warn!(target: "limiter::dataplane", %error, "removing expired entries failed");
        }
        match keys.as_mut().map(KeyFile::reload) {
            Some(Ok(Some(store))) => gate.replace_keys(store),
            Some(Err(error)) => tracing::warn!(target: "limiter::api", %error, "the key file is wrong; the old keys stay"),
            Some(Ok(None)) | None => {}
        }
        match own_addresses() {
            Ok(addresses) => gate.set_own_addresses(addresses),
            Err(error) => tracing::warn!(target: "limiter::dataplane", %error, "reading this host's addresses failed"),
        }
    }
}

fn own_addresses() -> Result<Vec<IpAddr>> {
    let interfaces = nix::ifaddrs::getifaddrs().context("reading the addresses of this host")?;
    let address = |interface: nix::ifaddrs::InterfaceAddress| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    };
    Ok(interfaces.filter_map(address).collect())
}

//! The agent: everything is read, bound and loaded first, and only then does anything act.

mod notes;

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use axum::{Router, middleware::from_fn_with_state, routing};
use limiter_common::addr::SrcPrefixes;
use tokio::{sync::Notify, time::MissedTickBehavior};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::notes::Notes;
use crate::{
    active::Active,
    api::{
        admin::{self, Admin},
        callers::Callers,
        check, decide,
        gate::Gate,
        pressure,
        serve::Listener,
    },
    cli::validate::Checked,
    clock::{Clock, SharedClock},
    config::{self, Config, IdentityConfig, IdentityKind, KeyStoreKind, RedisUrl, StoreKind},
    dataplane::{self, Dataplane, DataplaneConfig, DataplaneError, KernelDataplane, Tuning},
    events::EventWorker,
    host::HostAddresses,
    identity::{JwtWatch, KeyFollower, KeyStore, KeyWatch, key_follower::KeyUser},
    limiter::{Limiter, Precise},
    metrics::Metrics,
    policy::Policy,
    pressure::Pressure,
    push::{
        PushWorker, Pusher,
        policy::{PushPolicy, PushSettings},
    },
    reload::{Asked, Reloader, live_settings},
    status::StatusSource,
    store::{
        lease::{LeaseConfig, Leases},
        memory::{Crowding, MemoryStore},
        recovery::{Recovery, recover},
        redis::{RedisConfig, RedisStore},
        sync::{SyncConfig, SyncState, SyncWorker},
    },
    top::Top,
};

/// Permission of the socket that gateways ask: any local user may, as with a port on loopback.
const HTTP_SOCKET_MODE: u32 = 0o666;
/// Permission of the socket that changes things.
const ADMIN_SOCKET_MODE: u32 = 0o600;
/// How long a start waits for Redis.
const FIRST_ROUND: Duration = Duration::from_secs(1);
/// How often what has run out is removed.
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// How often files of keys are looked at. They are read after two looks that found the same change: within a second.
const LOOK: Duration = Duration::from_millis(400);

/// An agent that is ready to run.
#[derive(Debug)]
pub struct Agent {
    http: Listener,
    admin: Listener,
    admin_state: Arc<Admin>,
    keeper: Keeper,
    reloader: Reloader,
    pressure: Arc<Pressure>,
    push: Option<PushWorker>,
    events: Option<EventWorker>,
    sync: Option<SyncWorker>,
    leases: Option<Leases>,
    /// Of API keys in Redis.
    keys: Option<KeyFollower>,
}

impl Agent {
    /// Binds the sockets, and then loads and attaches the XDP program: whatever is wrong is found before a packet is
    /// touched.
    pub async fn build(checked: Checked) -> Result<Self> {
        let Checked { config, environment, policy, policy_watch, keys, watch, jwt, notes: checked_notes } = checked;
        let http = Listener::bind("api.http", &config.api.http, HTTP_SOCKET_MODE).await?;
        let admin = Listener::bind("api.admin", &config.api.admin, ADMIN_SOCKET_MODE).await?;
        let host = Arc::new(HostAddresses::read().context("reading the addresses of this host")?);

        let clock = Arc::new(SharedClock::new());
        let window_clock = Arc::clone(&clock) as Arc<dyn Clock>;
        let counters = Arc::new(match &config.store.kind {
            StoreKind::Memory => MemoryStore::new(Arc::clone(&window_clock), config.store.max_counters),
            StoreKind::Redis(_) => MemoryStore::shared(Arc::clone(&window_clock), config.store.max_counters),
        });
        let (sync, shared, precise) = match &config.store.kind {
            StoreKind::Memory => (None, None, None),
            StoreKind::Redis(redis) => {
                let mut access = redis_config(redis);
                access.breaker = Some(config.store.breaker);
                let store = RedisStore::connect(&access)?;
                let precise = precise(&store, &access, redis.sync_interval, &clock)?;
                let (interval, heartbeat) = (redis.sync_interval, redis.heartbeat);
                let sync_config = SyncConfig { interval, heartbeat, ..SyncConfig::default() };
                let worker = SyncWorker::new(Arc::clone(&counters), store.clone(), Arc::clone(&clock), sync_config);
                let mut worker = worker.of_node(&config.node.id).probing(precise.redis.clone());
                // Windows are Redis' from the first request on, if Redis is there.
                worker.first_round(FIRST_ROUND).await;
                if worker.status().get().state == SyncState::Connected {
                    let recovery = recover(&store, &counters, &policy, &*clock, redis.recover).await;
                    tell_recovery(&recovery);
                }
                let status = worker.status();
                (Some(worker), Some((status, store)), Some(precise))
            }
        };

        let dataplane = match config.xdp.interfaces.is_empty() {
            true => {
                leave_interfaces(&config);
                None
            }
            false => Some(start_dataplane(&config, &policy)?),
        };
        let mut follower = key_follower(&config.identity, &keys)?;
        if let Some(follower) = &mut follower {
            follower.start().await;
        }

        let mut metrics = Metrics::new();
        let pressure = Arc::new(Pressure::new(config.api.pressure));
        let proxies = &config.identity.trusted_proxies;
        let active = Active::derive(policy, proxies, &metrics, &pressure, clock.local()).share();
        let redis = shared.as_ref().map(|(_, redis)| redis.clone());
        let sync = sync.map(|sync| {
            let (of_local, of_strict) = (Arc::clone(&active), Arc::clone(&active));
            sync.with_local(Box::new(move |key| of_local.load().is_local(key)))
                .with_strict(Box::new(move |key| of_strict.load().is_strict(key)))
        });
        let status = StatusSource::new(
            &config,
            Arc::clone(&active),
            Arc::clone(&counters),
            dataplane.clone(),
            shared,
            Arc::clone(&pressure),
        );
        let leases = precise.as_ref().map(|precise| precise.leases.clone());
        let status = status.with_leases(leases.clone());
        let refusals = jwt.as_ref().map(|(_, watch)| watch.refusals()).unwrap_or_default();
        let status = status.with_refusals(Arc::clone(&refusals));
        let status = Arc::new(status.with_keys(follower.as_ref().map(KeyFollower::status)));
        metrics.register_source(Arc::clone(&status));
        let metrics = Arc::new(metrics);
        let changed = Arc::new(Notify::new());
        let (pusher, push) = match &dataplane {
            Some(dataplane) if config.push.enabled => {
                let rules = push_policy(&config, &active.load());
                lift_exempt(&**dataplane, &rules, &host)?;
                let (pusher, worker) =
                    Pusher::with_worker(rules, Arc::clone(&metrics), Arc::clone(&active), Arc::clone(&changed));
                (pusher, Some(worker))
            }
            Some(_) | None => (Pusher::disabled(Arc::clone(&metrics)), None),
        };
        let prefixes = config.identity.prefixes;
        let top = Arc::new(Top::new(prefixes));
        let events = match &dataplane {
            Some(dataplane) => event_worker(dataplane, prefixes, &metrics, &top)?,
            None => None,
        };
        let mut limiter = Limiter::new(Arc::clone(&active), Arc::clone(&counters), window_clock, prefixes);
        if let (Some(redis), Some(precise)) = (redis, precise) {
            limiter = limiter.sharing_through(redis).with_precise(precise);
        }
        let (identity, families) = (config.identity.clone(), config.api.headers);
        let is_in_file = identity.order.contains(&IdentityKind::ApiKey) && identity.key_store == KeyStoreKind::File;
        let watch = is_in_file.then_some(watch);
        // Whoever puts keys into Redis says so in the configuration.
        let uses_keys = follower.is_some() || watch.as_ref().is_some_and(KeyWatch::is_in_use);
        let keys = follower.as_ref().map_or(keys, KeyFollower::keys);
        let (jwt, jwt_watch) = jwt.unzip();
        let callers = Callers::new(&identity, keys, uses_keys, jwt, Arc::clone(&clock) as Arc<dyn Clock>)?;
        let callers = callers.counted_by(refusals);
        let known_keys = callers.keys();
        let gate = Gate::new(
            limiter,
            callers,
            identity.trusted_proxies.clone(),
            Arc::clone(&host),
            pusher,
            Arc::clone(&metrics),
        );
        let gate = gate.with_headers(families).reporting_to(Arc::clone(&pressure)).observed_by(Arc::clone(&top));
        let gate = Arc::new(gate.naming_clients_by(identity.client_address_header));
        let notes =
            Notes::new(config.clone(), Arc::clone(&active), known_keys.clone(), Arc::clone(&status), checked_notes);
        let reloader = Reloader {
            live: live_settings(&config.xdp),
            config,
            environment,
            watch: policy_watch,
            trusted_proxies: identity.trusted_proxies,
            active: Arc::clone(&active),
            keys: known_keys,
            pressure: Arc::clone(&pressure),
            dataplane: dataplane.clone(),
            metrics: Arc::clone(&metrics),
            status: Arc::clone(&status),
            clock: Arc::clone(&clock),
            changed,
        };
        let admin_state = Arc::new(Admin {
            metrics,
            status,
            active,
            dataplane: dataplane.clone(),
            top: Arc::clone(&top),
            counters: Arc::clone(&counters),
        });
        let keeper = Keeper {
            gate,
            keys: watch,
            jwt: jwt_watch,
            notes,
            counters,
            clock,
            dataplane,
            host,
            top,
            mend_error: None,
            crowding: Crowding::default(),
        };
        Ok(Self { http, admin, admin_state, keeper, reloader, pressure, push, events, sync, leases, keys: follower })
    }

    /// Where it serves, and what it limits; "ready" only where requests are decided from now on.
    fn tell_start(&self, knows_keys: bool) {
        let state = if knows_keys { "ready" } else { "serving, and not ready" };
        let attached = self.keeper.dataplane.as_ref().and_then(|dataplane| dataplane.interfaces().ok());
        let names: Vec<_> = attached.unwrap_or_default().into_iter().map(|interface| interface.name).collect();
        let interfaces = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        tracing::info!(
            target: "limiter",
            http = %self.http.address(),
            admin = %self.admin.address(),
            interfaces,
            "{state}"
        );
    }

    /// Serves until `shutdown`, then answers what is open, hands over what Redis does not have yet, and does with the
    /// XDP program what the configuration says.
    ///
    /// `reload` reads the configuration and the policy at once, changed or not.
    pub async fn run(self, reload: Arc<Notify>, shutdown: CancellationToken) -> Result<()> {
        let tasks = TaskTracker::new();
        let http = Router::new()
            .route(check::ROUTE, routing::any(check::check))
            // A wildcard does not match an empty rest: the client's request for "/".
            .route(&format!("{}/", check::ROUTE), routing::any(check::check))
            .route(&format!("{}/{{*path}}", check::ROUTE), routing::any(check::check))
            .route("/v1/decide", routing::post(decide::decide))
            .route(pressure::ROUTE, routing::post(pressure::report))
            .with_state(Arc::clone(&self.keeper.gate));
        let status = Arc::clone(&self.admin_state.status);
        let knows_keys = self.keys.as_ref().is_none_or(KeyFollower::is_loaded);
        let http =
            if knows_keys { http } else { http.layer(from_fn_with_state(Arc::clone(&status), admin::until_ready)) };
        self.tell_start(knows_keys);
        tasks.spawn(self.http.serve(http, shutdown.clone()));
        tasks.spawn(self.admin.serve(admin::router(self.admin_state), shutdown.clone()));
        if knows_keys {
            status.set_ready();
        } else {
            tracing::error!(target: "limiter::api", "no API keys are known yet: requests are answered with 503 until Redis tells them");
        }
        let dataplane = self.keeper.dataplane.clone();
        if let (Some(push), Some(dataplane)) = (self.push, &dataplane) {
            let clock = Arc::clone(&self.keeper.clock) as Arc<dyn Clock>;
            tasks.spawn(push.run(Arc::clone(dataplane), clock, shutdown.clone()));
        }
        if let Some(events) = self.events {
            tasks.spawn(events.run(shutdown.clone()));
        }
        tasks.spawn(self.pressure.run(Arc::clone(&self.reloader.active), shutdown.clone()));
        let asked = Asked { everything: reload, ..Asked::default() };
        if let Some(keys) = self.keys {
            let gate = Arc::clone(&self.keeper.gate);
            let user = FollowedUser { gate, status: Arc::clone(&status), reload: Arc::clone(&asked.policy) };
            tasks.spawn(keys.run(user, shutdown.clone()));
        }
        tasks.spawn(self.keeper.run(Arc::clone(&status), Arc::clone(&asked.policy), shutdown.clone()));
        tasks.spawn(self.reloader.run(asked, shutdown.clone()));
        // Goes on while open requests are answered, so that what they are charged is shared too.
        let answered = CancellationToken::new();
        let sync = self.sync.map(|sync| tokio::spawn(sync.run(answered.clone())));
        let leases = self.leases.map(|leases| tokio::spawn(leases.run(answered.clone())));
        tasks.close();
        tasks.wait().await;
        answered.cancel();
        if let Some(leases) = leases {
            leases.await.context("giving unused leases back to Redis")?;
        }
        if let Some(sync) = sync {
            sync.await.context("handing the last counts over to Redis")?;
        }
        if let Some(dataplane) = dataplane {
            dataplane.stop()?;
        }
        Ok(())
    }
}

/// Requests have connections of their own, so that they do not stand behind a batch of counters.
fn precise(
    store: &RedisStore,
    config: &RedisConfig,
    sync_interval: Duration,
    clock: &Arc<SharedClock>,
) -> Result<Precise> {
    let redis = store.connect_beside(config)?;
    let leases = Leases::new(redis.clone(), Arc::clone(clock), LeaseConfig::with_sync_interval(sync_interval));
    Ok(Precise { redis, leases })
}

/// Removes what has run out, and makes changed files and addresses effective.
#[derive(Debug)]
struct Keeper {
    gate: Arc<Gate>,
    /// `None` when requests are not identified by API keys.
    keys: Option<KeyWatch>,
    /// `None` when tokens are not believed.
    jwt: Option<JwtWatch>,
    notes: Notes,
    counters: Arc<MemoryStore>,
    clock: Arc<SharedClock>,
    dataplane: Option<Arc<dyn Dataplane>>,
    host: Arc<HostAddresses>,
    top: Arc<Top>,
    /// What was said of interfaces that could not be looked at: said once, and not each second.
    mend_error: Option<String>,
    crowding: Crowding,
}

impl Keeper {
    async fn run(mut self, status: Arc<StatusSource>, reload: Arc<Notify>, shutdown: CancellationToken) {
        let mut ticks = tokio::time::interval(HOUSEKEEPING);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => self.tidy(),
                _ = looks.tick() => {
                    let seen = self.look();
                    let (key_file, token_keys) = (&self.keys, &self.jwt);
                    status.set_key_errors(
                        key_file.as_ref().and_then(KeyWatch::error),
                        token_keys.as_ref().and_then(JwtWatch::error),
                    );
                    if seen == Seen::NewKeys && status.policy_error().is_some() {
                        // A policy may have been refused for the secret, which was not there.
                        reload.notify_one();
                    }
                },
                () = shutdown.cancelled() => return,
            }
        }
    }

    fn tidy(&mut self) {
        self.counters.sweep(self.clock.now());
        match self.crowding.look(&self.counters.stats()) {
            Some(true) => {
                let max_counters = self.counters.capacity();
                tracing::warn!(target: "limiter::store", max_counters, "memory is full: counters that still count are \
                    given up, and their clients limited less; raise store.max_counters");
            }
            Some(false) => {
                tracing::info!(target: "limiter::store", "no counter was given up for a minute: there is room again");
            }
            None => {}
        }
        self.notes.refresh();
        self.top.fade();
        if let Some(Err(error)) = self.dataplane.as_ref().map(|dataplane| dataplane.expire()) {
            tracing::warn!(target: "limiter::dataplane", %error, "removing expired entries failed");
        }
        let mended =
            self.dataplane.as_ref().and_then(|dataplane| dataplane.mend().err()).map(|error| error.to_string());
        if mended != self.mend_error {
            if let Some(error) = &mended {
                tracing::warn!(target: "limiter::dataplane", error, "looking at the interfaces fails");
            }
            self.mend_error = mended;
        }
        if let Err(error) = self.host.refresh() {
            tracing::warn!(target: "limiter", %error, "reading the addresses of this host failed");
        }
    }

    /// Makes changed keys effective.
    fn look(&mut self) -> Seen {
        match self.jwt.as_mut().map(JwtWatch::changed) {
            Some(Ok(Some(jwt))) => {
                tracing::info!(target: "limiter::api", keys = jwt.key_count(), "read the changed keys of tokens");
                self.gate.replace_jwt(jwt);
            }
            Some(Err(errors)) => {
                tracing::warn!(target: "limiter::api", %errors, "the old keys of tokens stay in force")
            }
            Some(Ok(None)) | None => {}
        }
        match self.keys.as_mut().map(KeyWatch::changed) {
            Some(Ok(Some(keys))) => {
                tracing::info!(target: "limiter::api", keys = keys.len(), "read the changed key file");
                self.gate.replace_keys(keys);
                Seen::NewKeys
            }
            Some(Err(errors)) => {
                tracing::warn!(target: "limiter::api", %errors, "the old keys stay in force");
                Seen::Nothing
            }
            Some(Ok(None)) | None => Seen::Nothing,
        }
    }
}

/// Makes keys from Redis effective.
struct FollowedUser {
    gate: Arc<Gate>,
    status: Arc<StatusSource>,
    reload: Arc<Notify>,
}

impl KeyUser for FollowedUser {
    fn replace(&mut self, keys: KeyStore) {
        tracing::info!(target: "limiter::api", keys = keys.len(), "API keys have changed in Redis");
        self.gate.replace_keys(keys);
        if self.status.policy_error().is_some() {
            // A policy may have been refused for the secret, which was not there.
            self.reload.notify_one();
        }
    }

    fn known(&mut self) {
        if !self.status.is_ready() {
            self.status.set_ready();
            tracing::info!(target: "limiter::api", "ready: the API keys are known");
        }
    }
}

/// `None` where keys are in a file, or nobody is asked for one. `keys` has the secret.
fn key_follower(config: &IdentityConfig, keys: &KeyStore) -> Result<Option<KeyFollower>> {
    match &config.key_store {
        KeyStoreKind::Redis(redis) if config.order.contains(&IdentityKind::ApiKey) => {
            let (secret_file, copy_file) = (config.key_secret_file.clone(), config.key_copy_file.clone());
            Ok(Some(KeyFollower::new(&redis_config(redis), secret_file, keys.secret().cloned(), copy_file)?))
        }
        KeyStoreKind::Redis(_) | KeyStoreKind::File => Ok(None),
    }
}

/// What somebody else should know of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Nothing,
    NewKeys,
}

fn tell_recovery(recovery: &Recovery) {
    let (counters, took_ms) = (recovery.counters, recovery.took.as_millis());
    match &recovery.incomplete {
        None => tracing::info!(target: "limiter::store", counters, took_ms, "took over the counters in Redis"),
        Some(reason) => tracing::warn!(
            target: "limiter::store",
            counters,
            took_ms,
            %reason,
            "took over some of the counters in Redis: the others are learnt when they are first used"
        ),
    }
}

fn start_dataplane(config: &Config, policy: &Policy) -> Result<Arc<dyn Dataplane>> {
    let object = dataplane::embedded_object()?;
    let dataplane = KernelDataplane::start(object, dataplane_config(config), policy, Tuning::default())?;
    Ok(Arc::new(dataplane))
}

/// What an earlier agent has left in force, this configuration does not want: nobody would change it or tell of it.
fn leave_interfaces(config: &Config) {
    let pin_dir = &config.xdp.pin_dir;
    match dataplane::detach_pinned(pin_dir) {
        Ok(interfaces) => {
            for interface in interfaces {
                tracing::info!(
                    target: "limiter::dataplane",
                    "nothing is limited any more on {interface}: xdp.interfaces is empty",
                );
            }
        }
        // Its interfaces are its own.
        Err(error @ DataplaneError::InUse { .. }) => {
            tracing::info!(target: "limiter::dataplane", %error, "another agent's interfaces stay limited");
        }
        // An agent that limits requests alone need not be allowed to look.
        Err(error) if error.kind() == dataplane::ErrorKind::Permission => {
            tracing::info!(
                target: "limiter::dataplane",
                %error,
                "what is pinned in {} stays as it is",
                pin_dir.display(),
            );
        }
        Err(error) => tracing::error!(
            target: "limiter::dataplane",
            %error,
            "what an earlier agent has left in force stays: run \"limiter unpin\"",
        ),
    }
}

/// `None` where nothing is told.
fn event_worker(
    dataplane: &Arc<dyn Dataplane>,
    prefixes: SrcPrefixes,
    metrics: &Arc<Metrics>,
    top: &Arc<Top>,
) -> Result<Option<EventWorker>> {
    let Some(reader) = dataplane.events()? else { return Ok(None) };
    let reader = reader.into_async().context("waiting for events of the XDP program")?;
    let (dataplane, metrics, top) = (Arc::clone(dataplane), Arc::clone(metrics), Arc::clone(top));
    Ok(Some(EventWorker { reader, dataplane, prefixes, metrics, top }))
}

/// An earlier agent, with another configuration, may have pushed what this one never would.
fn lift_exempt(dataplane: &dyn Dataplane, policy: &PushPolicy, host: &HostAddresses) -> Result<()> {
    for budget in dataplane.budgets() {
        let source = budget.source.addr();
        if policy.is_exempt(source) || host.contains(source) {
            dataplane.remove_budget(source)?;
        }
    }
    Ok(())
}

fn dataplane_config(config: &Config) -> DataplaneConfig {
    let xdp = &config.xdp;
    DataplaneConfig {
        interfaces: xdp.interfaces.clone(),
        mode: xdp.mode,
        protect: xdp.protect.clone(),
        pin_dir: xdp.pin_dir.clone(),
        max_sources: xdp.max_sources,
        on_exit: xdp.on_exit,
        drop_malformed: xdp.drop_malformed,
        src_prefixes: config.identity.prefixes,
        budgets: config.push.enabled,
        diagnosis: xdp.diagnosis,
    }
}

pub(crate) fn redis_config(config: &config::RedisConfig) -> RedisConfig {
    let urls = config.urls.iter().map(RedisUrl::expose).collect();
    let mut redis = RedisConfig::of(urls, config.topology.clone());
    redis.username.clone_from(&config.username);
    redis.password.clone_from(&config.password);
    redis.certificates = config.certificates.clone();
    redis.timeout = config.timeout;
    redis
}

fn push_policy(config: &Config, active: &Active) -> PushPolicy {
    PushPolicy::new(PushSettings {
        max_block: config.push.max_block,
        after_denials: config.push.after_denials,
        prefixes: config.identity.prefixes,
        never: active.never_pushed.clone(),
    })
}

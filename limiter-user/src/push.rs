//! From decisions to budgets: which denials become drops in the kernel.
//!
//! [`policy`] decides, without clocks or maps; the worker here feeds it and writes what it says.

pub mod policy;

use std::{net::IpAddr, sync::Arc, time::Duration};

use limiter_common::budget::BudgetReason;
use parking_lot::Mutex;
use policy::{Denial, PushPolicy};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{clock::Clock, dataplane::Dataplane, identity::client_address::ClientAddress, limiter::AddressDenial, metrics::Metrics};

/// Denials that wait for the worker. More are not pushed; the next denial of the same address is.
const QUEUE: usize = 4096;

/// The request path's end: hands denials over and never waits.
#[derive(Clone, Debug)]
pub struct Pusher {
    /// `None` where there is no data plane to push to.
    queue: Option<mpsc::Sender<Denial>>,
    metrics: Arc<Metrics>,
}

/// The other end: runs the policy and writes budgets.
#[derive(Debug)]
pub struct PushWorker {
    queue: mpsc::Receiver<Denial>,
    policy: PushPolicy,
    metrics: Arc<Metrics>,
}

impl Pusher {
    pub fn disabled(metrics: Arc<Metrics>) -> Self {
        Self { queue: None, metrics }
    }

    pub fn with_worker(policy: PushPolicy, metrics: Arc<Metrics>) -> (Self, PushWorker) {
        let (sender, queue) = mpsc::channel(QUEUE);
        (Self { queue: Some(sender), metrics: Arc::clone(&metrics) }, PushWorker { queue, policy, metrics })
    }

    /// Reports that an enforced rule denied `client`'s own address.
    pub fn denied(&self, client: ClientAddress, denial: &AddressDenial) {
        let Some(queue) = &self.queue else { return };
        if !client.packet_source {
            return;
        }
        let denial = Denial {
            address: client.address,
            rule: Arc::clone(&denial.rule),
            retry_after_us: denial.retry_after_us,
            covers_all: denial.covers_all,
        };
        if queue.try_send(denial).is_err() {
            self.metrics.pushed("", "queue_full");
        }
    }
}

impl PushWorker {
    /// Runs until `shutdown`, or until every [`Pusher`] is gone.
    pub async fn run(mut self, dataplane: Arc<Mutex<dyn Dataplane>>, clock: Arc<dyn Clock>, shutdown: CancellationToken) {
        loop {
            let denial = tokio::select! {
                denial = self.queue.recv() => denial,
                () = shutdown.cancelled() => None,
            };
            let Some(denial) = denial else { return };
            if let Some(push) = self.policy.decide(&denial, clock.now()) {
                let written = dataplane.lock().push_budget(denial.address, push.block_for, push.reason, &denial.rule);
                self.account(&denial, push.block_for, push.reason, written.map_err(|error| error.to_string()));
            }
        }
    }

    fn account(&mut self, denial: &Denial, block_for: Duration, reason: BudgetReason, written: Result<(), String>) {
        match written {
            Ok(()) => {
                self.metrics.pushed(reason.as_str(), "ok");
                tracing::debug!(
                    target: "limiter::dataplane", src = %denial.address, rule = %denial.rule,
                    reason = reason.as_str(), block_ms = block_for.as_millis(), "pushed a block"
                );
            }
            Err(error) => {
                self.policy.forget(denial.address);
                self.metrics.pushed(reason.as_str(), "error");
                tracing::warn!(target: "limiter::dataplane", rule = %denial.rule, %error, "pushing a block failed");
            }
        }
    }

    /// Addresses of this host, which are never pushed.
    pub fn set_own_addresses(&mut self, addresses: Vec<IpAddr>) {
        self.policy.set_own_addresses(addresses);
    }
}

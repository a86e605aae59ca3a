//! From decisions to budgets: which denials become drops in the kernel.
//!
//! [`policy`] decides, without clocks or maps; the worker here feeds it and writes what it says.

pub mod policy;

use std::{collections::HashSet, net::IpAddr, sync::Arc, time::Duration};

use limiter_common::{budget::BudgetReason, rule::EnforcementMode};
use policy::{Denial, PushPolicy};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use crate::{
    active::SharedActive, clock::Clock, dataplane::Dataplane, limiter::AddressDenial, metrics::Metrics, policy::Policy,
};

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
    active: SharedActive,
    /// Told after `active` has changed.
    changed: Arc<Notify>,
}

impl Pusher {
    pub fn disabled(metrics: Arc<Metrics>) -> Self {
        Self { queue: None, metrics }
    }

    pub fn with_worker(
        policy: PushPolicy,
        metrics: Arc<Metrics>,
        active: SharedActive,
        changed: Arc<Notify>,
    ) -> (Self, PushWorker) {
        let (sender, queue) = mpsc::channel(QUEUE);
        let pusher = Self { queue: Some(sender), metrics: Arc::clone(&metrics) };
        (pusher, PushWorker { queue, policy, metrics, active, changed })
    }

    /// Reports that an enforced rule denied an address of its own.
    /// `address` must be the source of the client's packets, and not one of this host.
    pub fn denied(&self, address: IpAddr, denial: &AddressDenial) {
        let Some(queue) = &self.queue else { return };
        let denial = Denial {
            address,
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
    pub async fn run(mut self, dataplane: Arc<dyn Dataplane>, clock: Arc<dyn Clock>, shutdown: CancellationToken) {
        let mut active = self.active.load_full();
        // An earlier agent may have pushed by another policy.
        lift_stale(&*dataplane, None, &active.policy, &self.policy);
        loop {
            let denial = tokio::select! {
                denial = self.queue.recv() => denial,
                () = self.changed.notified() => {
                    let before = std::mem::replace(&mut active, self.active.load_full());
                    self.policy.renew(active.never_pushed.clone());
                    lift_stale(&*dataplane, Some(&before.policy), &active.policy, &self.policy);
                    continue;
                }
                () = shutdown.cancelled() => None,
            };
            let Some(denial) = denial else { return };
            if let Some(push) = self.policy.decide(&denial, clock.now()) {
                let written = dataplane.push_budget(denial.address, push.block_for, push.reason, &denial.rule);
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
}

/// Takes back what was pushed for a rule that does not hold any more, or not as it was, and for a source that is exempt
/// by now.
fn lift_stale(dataplane: &dyn Dataplane, before: Option<&Policy>, policy: &Policy, push: &PushPolicy) {
    let rules = policy.rules.iter().filter(|rule| rule.mode == EnforcementMode::Enforce);
    let rules = rules.filter(|rule| before.is_none_or(|before| before.rules.contains(rule)));
    let holding: HashSet<&str> = rules.map(|rule| &*rule.id).collect();
    for budget in dataplane.budgets() {
        let source = budget.source.addr();
        let is_stale = |rule: &&str| !holding.contains(rule) || push.is_exempt(source);
        let Some(rule) = budget.rule.as_deref().filter(is_stale) else { continue };
        match dataplane.remove_budget(source) {
            Ok(_) => {
                tracing::debug!(target: "limiter::dataplane", src = %budget.source, rule, "lifted: the policy changed")
            }
            Err(error) => tracing::warn!(target: "limiter::dataplane", rule, %error, "lifting a block failed"),
        }
    }
}

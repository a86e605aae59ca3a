//! The servers that have what this node sent: whether they still have it, and whether they will keep it.

use std::collections::BTreeSet;

use super::SyncWorker;
use crate::{clock::Stopwatch, store::redis::Run};

/// Runs of servers that are told apart.
const MOST_RUN_IDS: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Servers {
    /// Generation of connections when their runs were asked for; 0 before that.
    met: u64,
    run_ids: BTreeSet<String>,
    looked_for_losses: Option<Stopwatch>,
    /// One knew less of a counter than it had confirmed.
    pub(super) seem_emptied: bool,
}

impl SyncWorker {
    /// What servers have lost, they are sent again: also while clients are quiet, so that no answer says what is missing.
    pub(super) async fn look_at_servers(&mut self) {
        let mut lost = Vec::new();
        let is_due = self.servers.looked_for_losses.is_none_or(|looked| looked.elapsed() >= self.config.heartbeat);
        if std::mem::take(&mut self.servers.seem_emptied) || is_due || self.has_other_connections() {
            self.servers.looked_for_losses = Some(Stopwatch::start());
            lost = self.redis.find_losses(self.config.batch_deadline).await;
        }
        // That may have been the first call to one of them.
        if self.has_other_connections() {
            self.meet_servers(lost).await;
        } else if !lost.is_empty() {
            self.refill("redis has lost its counters", Some(lost));
        }
    }

    fn has_other_connections(&self) -> bool {
        self.servers.met != self.redis.generation()
    }

    /// A new connection may lead to a server that knows nothing: one that was restarted, or another one. `lost` are those of
    /// which that is known.
    async fn meet_servers(&mut self, mut lost: Vec<String>) {
        let generation = self.redis.generation();
        let runs = self.redis.runs(self.config.batch_deadline).await;
        let met_before = std::mem::replace(&mut self.servers.met, generation) != 0;
        let (known, new): (Vec<&Run>, Vec<&Run>) = runs.iter().partition(|run| self.servers.run_ids.contains(&run.id));
        self.see_evictions(&known, &new);
        if self.servers.run_ids.len() > MOST_RUN_IDS {
            self.servers.run_ids.clear();
        }
        let new: Vec<String> = new.into_iter().map(|run| run.server.clone()).collect();
        // Of a cluster, some may not answer now and come back: they stay known.
        self.servers.run_ids.extend(runs.iter().map(|run| run.id.clone()));
        if !met_before {
            return;
        }
        if runs.is_empty() {
            // Those that do not tell which run they are may be any.
            self.refill("redis was restarted or replaced", None);
        } else if !new.is_empty() {
            let unseen: Vec<String> = new.into_iter().filter(|server| !lost.contains(server)).collect();
            // Their marks may be seen later, and say nothing new then.
            self.redis.forget_marks(&unseen);
            lost.extend(unseen);
            self.refill("redis was restarted or replaced", Some(lost));
        } else if !lost.is_empty() {
            self.refill("redis has lost its counters", Some(lost));
        }
    }

    /// A counter that is evicted gives its client a fresh limit. Each run of a server is told once.
    fn see_evictions(&self, known: &[&Run], new: &[&Run]) {
        let policy = |run: &Run| run.maxmemory_policy.clone().filter(|policy| policy != "noeviction");
        for run in new {
            if let Some(policy) = policy(run) {
                tracing::warn!(
                    target: "limiter::store",
                    redis = run.server,
                    maxmemory_policy = policy,
                    "this Redis may evict counters when its memory ends, which gives their clients a fresh limit: \
                     set maxmemory-policy to noeviction"
                );
            }
        }
        let used: Vec<String> = self.redis.shards().into_iter().map(|shard| shard.name).collect();
        let may_evict = &mut self.status.0.lock().stats.may_evict;
        may_evict.retain(|server, _| used.contains(server));
        for run in known.iter().chain(new) {
            match policy(run) {
                Some(policy) => drop(may_evict.insert(run.server.clone(), policy)),
                None => drop(may_evict.remove(&run.server)),
            }
        }
    }
}

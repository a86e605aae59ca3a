//! Who is alive, and who can be shared with again: what a node asks servers beside sending its counts.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use redis::{Cmd, Pipeline, Value};

use super::{
    CLOCK_SLOT, Manner, RedisStore, ScriptCalls, Servers,
    breakers::Probe,
    cluster::{Call, Exchange as _},
    connection::Connection,
    key::LIVE_NODES,
    only,
    script::Script,
    slot::{SLOTS, slot},
};
use crate::{
    clock::Stopwatch,
    store::{StoreError, breaker::BreakerState, fleet::Fleet},
};

/// What a heartbeat was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    pub now_us: u64,
    /// Nodes that are alive.
    pub live_nodes: u32,
}

impl RedisStore {
    /// How many nodes shared counters through this Redis when it last said so; 1 before that.
    #[inline]
    pub fn live_nodes(&self) -> u32 {
        self.0.fleet.live_nodes()
    }

    /// Where that is kept.
    pub fn fleet(&self) -> &Fleet {
        &self.0.fleet
    }

    /// Reckons with so many until Redis says otherwise.
    pub fn set_live_nodes(&self, live_nodes: u32) {
        self.0.fleet.heard(live_nodes);
    }

    /// Says that `node` is alive for so long; no time at all: that it leaves. Of a server that is left alone this is the probe,
    /// if one is due, since it does what counting needs.
    pub(in crate::store) async fn beat(
        &self,
        node: &str,
        lasts: Duration,
        deadline: Duration,
    ) -> Result<Heard, StoreError> {
        const OPERATION: &str = "say that this node is alive";
        let watch = Stopwatch::start();
        let server = match &self.0.servers {
            Servers::One(server) => Arc::clone(server),
            Servers::Cluster(cluster) => {
                cluster.probe(OPERATION, deadline).await;
                cluster.node(OPERATION, CLOCK_SLOT, deadline).await?
            }
        };
        let script = &self.0.heartbeat;
        let mut command = script.call(1);
        command.arg(LIVE_NODES).arg(node).arg(u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX));
        let left = deadline.saturating_sub(watch.elapsed());
        let reply = match server.breaker().begin_probe() {
            Some(probe) => self.call_anyway(OPERATION, &server, probe, script, command, left).await?,
            None => {
                let calls = vec![Call { slot: CLOCK_SLOT, command }];
                let reply = self.run(OPERATION, script, calls, left).await?.pop();
                reply.unwrap_or_else(|| Err(self.bad_reply(OPERATION, "no reply".to_owned())))?
            }
        };
        let (now_us, live_nodes) = redis::from_redis_value(reply)
            .map_err(|misfit: redis::ParsingError| self.bad_reply(OPERATION, misfit.to_string()))?;
        Ok(Heard { now_us, live_nodes })
    }

    /// Tries the servers that are left alone and are due for that, all at once. `beats` says that the one with the heartbeats is
    /// tried by those.
    pub(in crate::store) async fn probe(&self, deadline: Duration, beats: bool) {
        const OPERATION: &str = "try whether it works again";
        if self.0.breakers.are_closed() {
            return;
        }
        let (mut nodes, of_clock) = match &self.0.servers {
            Servers::One(server) => {
                server.look_for_successor();
                (vec![(Arc::clone(server), 0)], Some(Arc::clone(server)))
            }
            Servers::Cluster(cluster) => {
                if !beats {
                    cluster.probe(OPERATION, deadline).await;
                }
                cluster.look_for_successors();
                (cluster.first_slots(), cluster.known_node(CLOCK_SLOT).flatten())
            }
        };
        let of_clock = of_clock.filter(|_| beats);
        nodes.retain(|(node, _)| {
            node.breaker().state() == BreakerState::Open
                && of_clock.as_ref().is_none_or(|clock| !Arc::ptr_eq(clock, node))
        });
        let script = &self.0.probe;
        join_all(nodes.iter().map(async |(node, first)| {
            if let Some(probe) = node.breaker().begin_probe() {
                let mut call = script.call(1);
                call.arg(key_in(*first, "none"));
                // How it ended is known by the probe.
                drop(self.call_anyway(OPERATION, node, probe, script, call, deadline).await);
            }
        }))
        .await;
    }

    /// Calls a script of one server in spite of its breaker, which is told how that ended.
    async fn call_anyway(
        &self,
        operation: &'static str,
        node: &Arc<Connection>,
        probe: Probe<'_>,
        script: &Script,
        call: Cmd,
        deadline: Duration,
    ) -> Result<Value, StoreError> {
        node.renew();
        let watch = Stopwatch::start();
        let exchange = ScriptCalls { operation, script, deadline, watch, calls: &self.0.calls, manner: Manner::Probe };
        let mut pipeline = Pipeline::with_capacity(1);
        pipeline.ignore_errors().add_command(call);
        let sent = exchange.exchange(node, &pipeline).await;
        let result = sent.and_then(|replies| only(operation, node, replies));
        self.0.calls.record(&result, watch.elapsed());
        probe.ended(&result);
        if let (Err(_), Servers::Cluster(cluster)) = (&result, &self.0.servers) {
            // It may be there again, and be no primary any more.
            cluster.look_again();
        }
        result
    }
}

/// A name in a slot, which no counter has: its tag has no colon.
pub(super) fn key_in(wanted: u16, what: &str) -> String {
    let name = |number: u32| format!("rl:{{server-{number}}}:{what}");
    // One in so many is there; a few times as many are enough for all of them.
    (0..u32::from(SLOTS) * 32).map(name).find(|name| slot(name.as_bytes()) == wanted).unwrap_or_else(|| name(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_that_of_the_server_with_the_heartbeats() {
        assert_eq!(slot(LIVE_NODES.as_bytes()), CLOCK_SLOT);
    }

    #[test]
    fn every_slot_can_be_tried() {
        for wanted in (0..SLOTS).step_by(1021).chain([SLOTS - 1]) {
            assert_eq!(slot(key_in(wanted, "none").as_bytes()), wanted);
        }
    }
}

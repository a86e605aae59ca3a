//! A real Redis Cluster on free ports of this host.

use std::time::Duration;

use limiter_user::clock::Stopwatch;

use crate::{
    eventually::eventually,
    redis_server::{RedisServer, free_port},
};

/// As long as a failover and what comes before it may take.
const WAIT: Duration = Duration::from_secs(30);
const SLOTS: usize = 16384;

#[derive(Debug)]
pub struct RedisCluster {
    pub primaries: Vec<RedisServer>,
    /// One of each primary, or none.
    pub replicas: Vec<RedisServer>,
}

impl RedisCluster {
    pub async fn start(primaries: usize) -> Self {
        Self::form(primaries, 0).await
    }

    /// Each primary with a replica, which takes its place within a second or two.
    pub async fn start_with_replicas(primaries: usize) -> Self {
        Self::form(primaries, primaries).await
    }

    async fn form(primary_count: usize, replica_count: usize) -> Self {
        let mut primaries = Vec::new();
        let mut replicas = Vec::new();
        for number in 0..primary_count + replica_count {
            let node = start_node().await;
            if number < primary_count { primaries.push(node) } else { replicas.push(node) }
        }
        let cluster = Self { primaries, replicas };
        for (number, primary) in cluster.primaries.iter().enumerate() {
            let slots = number * SLOTS / primary_count..(number + 1) * SLOTS / primary_count;
            let [first, last] = [slots.start, slots.end - 1].map(|slot| slot.to_string());
            let () = primary.run(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]).await;
            let () = primary.run(&["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()]).await;
        }
        let [first, others @ ..] = &cluster.nodes()[..] else { panic!("a cluster has nodes") };
        for other in others {
            let bus: Vec<String> = other.run(&["CONFIG", "GET", "cluster-port"]).await;
            let () = first.run(&["CLUSTER", "MEET", "127.0.0.1", &other.port().to_string(), &bus[1]]).await;
        }
        let count = cluster.nodes().len();
        for node in cluster.nodes() {
            until(node, &["CLUSTER", "INFO"], &format!("cluster_known_nodes:{count}")).await;
        }
        for (primary, replica) in cluster.primaries.iter().zip(&cluster.replicas) {
            let id: String = primary.run(&["CLUSTER", "MYID"]).await;
            // The replica may not have heard of the primary's role yet.
            eventually(WAIT, async || replica.try_run::<()>(&["CLUSTER", "REPLICATE", &id]).await).await;
        }
        cluster.until_well().await;
        for replica in &cluster.replicas {
            replica.until_info("replication", "master_link_status:up").await;
        }
        cluster
    }

    fn nodes(&self) -> Vec<&RedisServer> {
        self.primaries.iter().chain(&self.replicas).collect()
    }

    /// Of the first node alone: the others are found.
    pub fn urls(&self) -> Vec<String> {
        vec![self.primaries[0].url()]
    }

    /// As the table `[store.redis]` names it.
    pub fn access(&self) -> String {
        format!("urls = {:?}\nmode = \"cluster\"\n", self.urls())
    }

    /// Names of all counters in the cluster.
    pub async fn keys(&self) -> Vec<String> {
        let mut keys = Vec::new();
        for primary in &self.primaries {
            keys.extend(primary.counters().await);
        }
        keys
    }

    /// Which of the primaries has the slot of a key.
    pub async fn owner(&self, key: &str) -> usize {
        let mut slot = Err(anyhow::anyhow!("no nodes"));
        // Whoever is alive knows.
        for node in self.nodes() {
            slot = node.try_run::<usize>(&["CLUSTER", "KEYSLOT", key]).await;
            if slot.is_ok() {
                break;
            }
        }
        let slot = slot.expect("a node that answers");
        (0..self.primaries.len()).find(|number| slot < (number + 1) * SLOTS / self.primaries.len()).expect("an owner")
    }

    /// Moves the slot of a key from one primary to another, key by key; `between` runs while it is on its way.
    pub async fn migrate(&self, key: &str, to: usize, between: impl AsyncFnOnce()) {
        let from = self.owner(key).await;
        let (source, target) = (&self.primaries[from], &self.primaries[to]);
        let slot: u16 = source.run(&["CLUSTER", "KEYSLOT", key]).await;
        let slot = slot.to_string();
        let source_id: String = source.run(&["CLUSTER", "MYID"]).await;
        let target_id: String = target.run(&["CLUSTER", "MYID"]).await;
        let () = target.run(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source_id]).await;
        let () = source.run(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target_id]).await;
        let keys: Vec<String> = source.run(&["CLUSTER", "GETKEYSINSLOT", &slot, "1000"]).await;
        for key in &keys {
            let port = target.port().to_string();
            let () = source.run(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]).await;
        }
        between().await;
        // Who gets it first, so that nobody is sent to and fro.
        let others = (0..self.primaries.len()).filter(|number| *number != to && *number != from);
        for number in [to, from].into_iter().chain(others) {
            let () = self.primaries[number].run(&["CLUSTER", "SETSLOT", &slot, "NODE", &target_id]).await;
        }
    }

    /// Kills all nodes and starts them again, which know of each other and of nothing else.
    pub async fn restart(&mut self) {
        for node in self.primaries.iter_mut().chain(&mut self.replicas) {
            node.kill();
        }
        for node in self.primaries.iter_mut().chain(&mut self.replicas) {
            node.restart().await;
        }
        self.until_well().await;
    }

    /// Waits until every node says that every slot is served.
    pub async fn until_well(&self) {
        for node in self.nodes() {
            until(node, &["CLUSTER", "INFO"], "cluster_state:ok").await;
        }
    }

    /// Lets the replica of a primary take its place while both are well, and waits until it has.
    pub async fn promote(&self, number: usize) {
        let () = self.replicas[number].run(&["CLUSTER", "FAILOVER"]).await;
        self.replicas[number].until_info("replication", "role:master").await;
        self.primaries[number].until_info("replication", "role:slave").await;
    }

    /// Kills a primary and waits until its replica has taken its place.
    pub async fn fail_over(&mut self, number: usize) -> Duration {
        self.primaries[number].kill();
        let watch = Stopwatch::start();
        self.replicas[number].until_info("replication", "role:master").await;
        until(&self.replicas[number], &["CLUSTER", "INFO"], "cluster_state:ok").await;
        watch.elapsed()
    }

    /// After a replica has taken the place of its primary, which is its replica by now: calls them by these names from here on,
    /// and waits until they could change places again.
    pub async fn rename(&mut self, number: usize) {
        std::mem::swap(&mut self.primaries[number], &mut self.replicas[number]);
        self.until_well().await;
        self.replicas[number].until_info("replication", "master_link_status:up").await;
    }
}

async fn start_node() -> RedisServer {
    let bus = free_port().to_string();
    RedisServer::start_with(&[
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        &bus,
        "--cluster-node-timeout",
        "1000",
        "--cluster-require-full-coverage",
        "no",
        // A replica may take over however long its primary has been silent: on a busy machine a test takes its time.
        "--cluster-replica-validity-factor",
        "0",
    ])
    .await
}

async fn until(server: &RedisServer, question: &[&str], answer: &str) {
    eventually(WAIT, async || {
        let text: String = server.try_run(question).await?;
        if text.contains(answer) { Ok(()) } else { Err(anyhow::anyhow!("{question:?}: {text}")) }
    })
    .await;
}

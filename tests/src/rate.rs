//! Load on few keys, over several agents, at a rate.

use std::{sync::Arc, time::Duration};

use limiter_user::{clock::Stopwatch, limiter::Subject};

use crate::fleet_node::FleetNode;

const TICK: Duration = Duration::from_millis(2);

/// What was asked, and how long it took.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub requests: u64,
    pub allowed: u64,
    pub took: Duration,
}

/// Asks all nodes together `rate` times a second for as long as `time`, evenly and for one subject after the other. A node that
/// does not keep up asks later what it owes: every request is made.
///
/// # Panics
///
/// When a client has.
pub async fn ask_at_rate(nodes: &[Arc<FleetNode>], subjects: &[Subject], rate: u64, time: Duration) -> Asked {
    let watch = Stopwatch::start();
    let each = rate * u64::try_from(time.as_micros()).unwrap_or(u64::MAX) / 1_000_000 / nodes.len() as u64;
    let clients = nodes.iter().map(|node| {
        let (node, subjects) = (Arc::clone(node), subjects.to_vec());
        tokio::spawn(async move {
            let (mut asked, mut allowed) = (0, 0);
            let mut next = subjects.iter().cycle();
            while asked < each {
                let elapsed = watch.elapsed().min(time).as_micros();
                let due = u64::try_from(u128::from(each) * elapsed / time.as_micros()).unwrap_or(each);
                for _ in asked..due {
                    let subject = next.next().expect("a subject");
                    allowed += u64::from(node.allows(subject).await);
                }
                asked = due;
                tokio::time::sleep(TICK).await;
            }
            (asked, allowed)
        })
    });
    let mut all = Asked { requests: 0, allowed: 0, took: Duration::ZERO };
    for client in clients.collect::<Vec<_>>() {
        let (requests, allowed) = client.await.expect("a client");
        all.requests += requests;
        all.allowed += allowed;
    }
    all.took = watch.elapsed();
    all
}

//! Whether servers still have what they had.
//!
//! Each has a mark, which nodes keep alive together and which goes when the server loses what it has. Who finds none puts
//! another one there. So every node can tell, also while its clients are quiet, and whichever node comes first.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use parking_lot::Mutex;

use super::{CLOCK_SLOT, RedisStore, Servers, cluster::Call, heartbeat::key_in};

/// Much longer than nodes are silent. Who was away for longer tells servers what they may know, which harms nobody.
const LASTS: Duration = Duration::from_secs(600);

/// By slot, since a mark moves with its slot.
#[derive(Debug, Default)]
pub(super) struct Marks(Mutex<BTreeMap<u16, Mark>>);

#[derive(Debug)]
struct Mark {
    key: String,
    /// As it was last seen.
    seen: Option<String>,
}

impl RedisStore {
    /// Looks at the mark of every server. Names those that have lost what they had since they were looked at last.
    pub(in crate::store) async fn find_losses(&self, deadline: Duration) -> Vec<String> {
        const OPERATION: &str = "see whether counters are still there";
        let slots = self.marked_slots();
        if slots.is_empty() {
            return Vec::new();
        }
        let script = &self.0.mark;
        let new = format!("{:016x}", RandomState::new().hash_one(LASTS));
        let calls = {
            let mut marks = self.0.marks.0.lock();
            marks.retain(|slot, _| slots.contains(slot));
            let call = |slot: &u16| {
                let mark = marks.entry(*slot).or_insert_with(|| Mark { key: key_in(*slot, "mark"), seen: None });
                let mut command = script.call(1);
                command.arg(&mark.key).arg(&new).arg(LASTS.as_secs() * 1000);
                Call { slot: *slot, command }
            };
            slots.iter().map(call).collect()
        };
        // Of a server that does not answer nothing is known, and others say so.
        let replies = self.run(OPERATION, script, calls, deadline).await.unwrap_or_default();
        let mut lost = Vec::new();
        let mut marks = self.0.marks.0.lock();
        for (slot, reply) in slots.iter().zip(replies) {
            let found = reply.ok().and_then(|reply| redis::from_redis_value::<String>(reply).ok());
            if let (Some(found), Some(mark)) = (found, marks.get_mut(slot)) {
                if mark.seen.as_ref().is_some_and(|seen| *seen != found) {
                    lost.extend(self.server_at(*slot));
                }
                mark.seen = Some(found);
            }
        }
        lost
    }

    /// It is known that these have lost what they had: their marks say nothing new.
    pub(in crate::store) fn forget_marks(&self, servers: &[String]) {
        let is_one = matches!(self.0.servers, Servers::One(_));
        let is_forgotten = |slot| is_one || self.server_at(slot).is_none_or(|server| servers.contains(&server));
        for (slot, mark) in &mut *self.0.marks.0.lock() {
            if is_forgotten(*slot) {
                mark.seen = None;
            }
        }
    }

    /// One of each server.
    fn marked_slots(&self) -> Vec<u16> {
        match &self.0.servers {
            Servers::One(_) => vec![CLOCK_SLOT],
            Servers::Cluster(cluster) => cluster.first_slots().into_iter().map(|(_, slot)| slot).collect(),
        }
    }
}

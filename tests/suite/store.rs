//! Counters: one suite over every store, then what only Redis can get wrong, then sharing between nodes.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod store {
    pub(crate) mod behaviour;
    mod chaos;
    mod clock_steps;
    mod emptied;
    mod failures;
    mod goodbyes;
    mod hot_key;
    mod leased;
    mod local;
    mod near;
    mod reconnects;
    mod redis_only;
    mod remembered;
    mod shared_buckets;
    mod strict;
    mod sync_worker;
    mod topologies;
    mod ttl;
}

//! Counters: one suite over every store, then what only Redis can get wrong, then sharing between nodes.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod store {
    pub(crate) mod behaviour;
    mod emptied;
    mod exactly_once;
    mod failures;
    mod leased;
    mod local;
    mod near;
    mod redis_only;
    mod remembered;
    mod strict;
    mod sync_worker;
    mod topologies;
}

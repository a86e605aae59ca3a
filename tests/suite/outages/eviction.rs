//! A Redis that may evict counters gives their clients fresh limits. It is told loudly, before anybody is limited by it.

use limiter_tests::{eventually::until, redis_server::RedisServer};
use limiter_user::store::redis::ACL_RULES;
use serde_json::{Value, json};

use crate::{POLICY, WAIT, node, runtime, until_whole};

#[test]
fn a_redis_that_may_evict_counters_is_told_once_a_run() {
    let runtime = runtime();
    let mut server = runtime.block_on(RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]));
    // With no more rights than the documentation asks for.
    runtime.block_on(server.set_user("limiter", "pw", ACL_RULES));
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("password");
    std::fs::write(&file, "pw").expect("write the password");
    let access = format!("urls = [\"{}\"]\nusername = \"limiter\"\npassword_file = {file:?}\n", server.url());
    let setup = node("a", &access, POLICY);
    let told = || setup.log().lines().filter(|line| line.contains("may evict counters")).count();
    let agent = setup.start();
    let shown = || agent.status()["store"]["shards"][0]["may_evict"].clone();
    let log = setup.log();
    let line = log.lines().find(|line| line.contains("may evict counters")).unwrap_or_else(|| panic!("{log}"));
    assert!(
        line.contains("WARN") && line.contains("allkeys-lru") && line.contains(&server.port().to_string()),
        "{line}"
    );
    assert_eq!(shown(), json!("allkeys-lru"));
    let output = setup.run(&["status"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("maxmemory-policy allkeys-lru may evict counters"), "{text}");

    // The same run by another connection: shown as it is by then, and not told again.
    for (policy, expected) in [("volatile-ttl", json!("volatile-ttl")), ("noeviction", Value::Null)] {
        let () = runtime.block_on(server.run(&["CONFIG", "SET", "maxmemory-policy", policy]));
        let () = runtime.block_on(server.run(&["CLIENT", "KILL", "USER", "limiter"]));
        until(policy, WAIT, || (shown() == expected).then_some(()));
        assert_eq!(told(), 1, "{}", setup.log());
    }
    // Another run.
    runtime.block_on(server.restart());
    runtime.block_on(server.set_user("limiter", "pw", ACL_RULES));
    until("another run is told", WAIT, || (told() == 2).then_some(()));
    until_whole(&agent);
    assert_eq!(shown(), json!("allkeys-lru"));
    drop(agent);

    let () = runtime.block_on(server.run(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]));
    let agent = setup.start();
    until_whole(&agent);
    assert_eq!(told(), 2, "{}", setup.log());
    assert_eq!(agent.status()["store"]["shards"][0]["may_evict"], Value::Null);
}

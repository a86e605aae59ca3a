//! API keys, in a file and in Redis: added, replaced and ended while two agents run, and what becomes of them when Redis is
//! away, forgets, or is used by several hosts at once. Against the real binary and a real redis-server; no root, no XDP.

use std::{collections::BTreeSet, fs, os::unix::fs::PermissionsExt, process::Output, thread, time::Duration};

use limiter_tests::{
    agent::{Agent, START, Setup},
    eventually::until,
    http,
    redis_cluster::RedisCluster,
    redis_server::RedisServer,
};
use limiter_user::{
    clock::Stopwatch,
    store::redis::{ACL_RULES, KEY_STORE_ACL_RULES, KeyChange, KeyCondition, RedisConfig, RedisKeys},
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

const POLICY: &str = "[plans.free]\n[plans.pro]\n[[rules]]\nid = \"user\"\nscope = \"user\"\n\
                      plans = { free = 100000, pro = 200000 }\nwindow = \"1d\"\n";
const SECRET: &str = "abababababababababababababababababababababababababababababababab";
const UNKNOWN_ID: &str = "00000000000000000000000000000000";
/// That Redis writes everything down before it answers.
const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

fn in_redis(redis: &RedisServer) -> String {
    format!(
        "[identity]\nkey_store = \"redis\"\nkey_secret_file = \"keys.secret\"\nkey_copy_file = \"keys.json\"\n\
         [store.redis]\nurls = [\"{}\"]\n",
        redis.url()
    )
}

fn write_secret(setup: &Setup, secret: &str) {
    setup.write("keys.secret.next", &format!("{secret}\n"));
    fs::set_permissions(setup.path("keys.secret.next"), fs::Permissions::from_mode(0o600)).expect("a mode");
    fs::rename(setup.path("keys.secret.next"), setup.path("keys.secret")).expect("the file in its place");
}

/// A host with the secret of the others, and its keys in Redis.
fn host(redis: &RedisServer) -> Setup {
    let setup = Setup::new(&in_redis(redis), POLICY);
    write_secret(&setup, SECRET);
    setup
}

fn runtime() -> Runtime {
    Runtime::new().expect("a runtime")
}

fn status(agent: &Agent<'_>, key: &str) -> u16 {
    agent.check(&[("X-API-Key", key)]).status
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text").trim().to_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn list(setup: &Setup) -> String {
    let output = setup.run(&["keys", "list"]);
    assert!(output.status.success(), "{output:?}");
    stdout(&output)
}

/// The id of the only key of a client in a state.
fn id_of(setup: &Setup, client: &str, state: &str) -> String {
    let list = list(setup);
    let is_it = |line: &&str| line.contains(client) && line.contains(state);
    let line = list.lines().find(is_it).unwrap_or_else(|| panic!("{client} {state} in {list}"));
    line.split(' ').next().expect("an id").to_owned()
}

/// Everything that Redis holds, names and values.
fn dump(runtime: &Runtime, redis: &RedisServer) -> String {
    runtime.block_on(async {
        let mut text = String::new();
        for name in redis.run::<Vec<String>>(&["KEYS", "*"]).await {
            let kind: String = redis.run(&["TYPE", &name]).await;
            let value: Vec<String> = match kind.as_str() {
                "hash" => redis.run(&["HGETALL", &name]).await,
                "zset" => redis.run(&["ZRANGE", &name, "0", "-1", "WITHSCORES"]).await,
                "string" => {
                    let bytes: Vec<u8> = redis.run(&["GET", &name]).await;
                    vec![String::from_utf8_lossy(&bytes).into_owned()]
                }
                other => panic!("{name} is a {other}"),
            };
            text.push_str(&format!("{name} {kind} {value:?}\n"));
        }
        text
    })
}

/// The number of keys in Redis.
fn stored(runtime: &Runtime, redis: &RedisServer) -> u64 {
    runtime.block_on(redis.run(&["HLEN", "rl:{keys}:entries"]))
}

#[test]
fn a_key_lives_the_same_life_in_a_file_and_in_redis() {
    let runtime = runtime();
    let redis = runtime.block_on(RedisServer::start());
    let shared = Setup::new("", "");
    let (file, secret) = (shared.path("keys.toml"), shared.path("keys.secret"));
    let in_file =
        format!("[identity]\nkey_file = \"{}\"\nkey_secret_file = \"{}\"\n", file.display(), secret.display());
    // By a user who may do what the documentation says.
    let cluster = runtime.block_on(RedisCluster::start(3));
    let rights = format!("{ACL_RULES} +cluster|slots {KEY_STORE_ACL_RULES}");
    for primary in &cluster.primaries {
        runtime.block_on(primary.set_user("limiter", "pw", &rights));
    }
    let url = cluster.urls()[0].replace("//", "//limiter:pw@");
    let in_cluster = in_redis(&redis).replace(&redis.url(), &url) + "mode = \"cluster\"\n";
    let of_cluster = || {
        let setup = Setup::new(&in_cluster, POLICY);
        write_secret(&setup, SECRET);
        setup
    };
    for (store, setups) in [
        ("file", [(); 2].map(|()| Setup::new(&in_file, POLICY))),
        ("redis", [(); 2].map(|()| host(&redis))),
        ("cluster", [(); 2].map(|()| of_cluster())),
    ] {
        let mut keys = vec![setups[0].add_key("c_1", "free")];
        let agents = setups.each_ref().map(Setup::start);
        let mut took = Vec::new();
        let mut both = |what: &str, key: &str, expected: u16| {
            let since = Stopwatch::start();
            until(&format!("{store}: {what}"), START, || {
                agents.iter().all(|agent| status(agent, key) == expected).then_some(())
            });
            took.push(since.elapsed());
        };
        both("the first key is known at the start", &keys[0], 200);
        // Added here and there: each node knows both.
        for (setup, plan) in setups.iter().zip(["free", "pro"]) {
            let key = setup.add_key("c_2", plan);
            both("an added key is known", &key, 200);
            keys.push(key);
        }
        let left = agents[1].check(&[("X-API-Key", &keys[2])]);
        assert_eq!(left.header("x-ratelimit-limit"), Some("200000"), "{store}: the plan of the key");

        let old = id_of(&setups[1], "c_1", "active");
        let rotated = setups[1].run(&["keys", "rotate", &old, "--grace", "1h"]);
        assert!(rotated.status.success(), "{rotated:?}");
        keys.push(stdout(&rotated));
        both("the new key is known", &keys[3], 200);
        both("the old one is valid until its time is over", &keys[0], 200);
        assert_eq!(id_of(&setups[0], "c_1", "active until"), old);
        let left = agents[0].check(&[("X-API-Key", &keys[3])]);
        assert_eq!(left.header("x-ratelimit-limit"), Some("100000"), "{store}: plan and client are the old one's");
        // A second time: its end is not put off.
        let until_when = list(&setups[0]).lines().find(|line| line.starts_with(&old)).map(str::to_owned);
        let again = setups[0].run(&["keys", "rotate", &old, "--grace", "100h"]);
        assert!(again.status.success(), "{again:?}");
        keys.push(stdout(&again));
        assert_eq!(list(&setups[1]).lines().find(|line| line.starts_with(&old)).map(str::to_owned), until_when);

        for message in ["disabled the key", "was disabled already"] {
            let disabled = setups[0].run(&["keys", "disable", &old]);
            assert!(disabled.status.success() && stderr(&disabled).contains(message), "{store}: {disabled:?}");
        }
        both("a disabled key is refused", &keys[0], 401);
        both("the others are not", &keys[3], 200);
        let pro = id_of(&setups[0], "c_2  ", "pro ");
        let short = setups[0].run(&["keys", "rotate", &pro, "--grace", "1s"]);
        assert!(short.status.success(), "{short:?}");
        keys.push(stdout(&short));
        both("a time that is over ends a key", &keys[2], 401);
        both("and the key in its place is valid", &keys[5], 200);
        for (arguments, message) in [
            (["keys", "rotate", &*old], "has ended: make another with \"limiter keys add\""),
            (["keys", "rotate", &*pro], "has ended"),
            (["keys", "rotate", UNKNOWN_ID], "there is no key"),
            (["keys", "disable", UNKNOWN_ID], "\"limiter keys list\" shows them"),
        ] {
            let output = setups[1].run(&arguments);
            assert_eq!(output.status.code(), Some(78), "{store}: {output:?}");
            assert!(stderr(&output).contains(message), "{store}: {output:?}");
        }
        assert_eq!(list(&setups[0]), list(&setups[1]));
        assert_eq!(list(&setups[0]).lines().count(), 1 + keys.len());

        // Half of the changes at least: the machine may be busy in between.
        took.sort();
        assert!(took[took.len() / 2] < Duration::from_secs(1), "{store}: {took:?}");

        let mut written = dump(&runtime, &redis) + &fs::read_to_string(&file).expect("the key file");
        for (setup, agent) in setups.iter().zip(agents) {
            for page in ["/metrics", "/v1/status", "/v1/top"] {
                written += &http::get(&setup.admin(), page, &[]).expect("an answer").body;
            }
            assert!(agent.stop().success());
            written += &setup.log();
            written += &fs::read_to_string(setup.path("keys.json")).unwrap_or_default();
        }
        if store == "redis" {
            assert!(written.contains("rl:{keys}:entries") && written.contains(&old), "{written}");
        }
        for key in &keys {
            assert!(key.len() == 46 && !written.contains(key.as_str()) && !written.contains(&key[3..]), "{written}");
        }
        assert!(!written.contains(SECRET));
    }
}

#[test]
fn what_redis_forgets_ends_no_key_and_is_given_back() {
    let runtime = runtime();
    let mut redis = runtime.block_on(RedisServer::start());
    let (a, b) = (host(&redis), host(&redis));
    let (good, bad) = (a.add_key("c_1", "free"), a.add_key("c_2", "free"));
    let bad_id = id_of(&a, "c_2", "active");
    let (agent_a, agent_b) = (a.start(), b.start());
    assert!(a.run(&["keys", "disable", &bad_id]).status.success());
    let agents = [&agent_a, &agent_b];
    until("the key has ended", START, || agents.iter().all(|agent| status(agent, &bad) == 401).then_some(()));

    redis.kill();
    until("both agents have noticed", START, || {
        agents.iter().all(|agent| agent.metric("limiter_key_store_connected") == 0.0).then_some(())
    });
    let degraded = agent_a.status();
    assert_eq!((&degraded["degraded"], &degraded["ready"]), (&json!(true), &json!(true)));
    assert!(degraded["degraded_by"].to_string().contains("the 2 last known ones are in force"), "{degraded}");
    for agent in agents {
        assert_eq!((status(agent, &good), status(agent, &bad), status(agent, "lk_guess")), (200, 401, 401));
    }
    let output = a.run(&["keys", "list"]);
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    assert!(stderr(&output).contains("limiter doctor"), "{output:?}");

    // Empty, and somebody adds a key before anybody has noticed, or after.
    runtime.block_on(redis.restart());
    let new = b.add_key("c_3", "pro");
    until("Redis has all keys again", START, || (stored(&runtime, &redis) == 3).then_some(()));
    for agent in agents {
        until("the agent knows all keys, and is well", START, || {
            let well = agent.status()["degraded"] == json!(false);
            ((status(agent, &good), status(agent, &bad), status(agent, &new)) == (200, 401, 200) && well).then_some(())
        });
    }
    assert_eq!(id_of(&b, "c_2", "disabled"), bad_id, "nothing brings an ended key back");
    let losses: f64 = agents.iter().map(|agent| agent.metric("limiter_key_store_losses_total")).sum();
    assert!(losses >= 1.0, "{losses}");
    let said = (a.log() + &b.log()).matches("Redis has lost API keys").count();
    assert!((1..=2).contains(&said), "at most once an agent: {said}");
    // Who has no copy and knew nothing learns all of it from Redis.
    let c = host(&redis);
    let agent_c = c.start();
    assert_eq!((status(&agent_c, &good), status(&agent_c, &bad), status(&agent_c, &new)), (200, 401, 200));

    // Parts that are lost, each in its turn.
    for name in ["rl:{keys}:meta", "rl:{keys}:order", "rl:{keys}:entries"] {
        let _: u64 = runtime.block_on(redis.run(&["DEL", name]));
        until(&format!("{name} is there again"), START, || {
            let names: Vec<String> = runtime.block_on(redis.run(&["KEYS", "rl:{keys}:*"]));
            let order: u64 = runtime.block_on(redis.run(&["ZCARD", "rl:{keys}:order"]));
            (names.len() == 3 && order == 3 && stored(&runtime, &redis) == 3).then_some(())
        });
        for agent in [&agent_a, &agent_b, &agent_c] {
            assert_eq!((status(agent, &good), status(agent, &bad), status(agent, &new)), (200, 401, 200), "{name}");
        }
    }

    // Nobody is there who knew them, and the order is lost: the records are all that is needed.
    drop((agent_a, agent_b, agent_c));
    let _: u64 = runtime.block_on(redis.run(&["DEL", "rl:{keys}:order"]));
    let d = host(&redis);
    let agent_d = d.start();
    assert_eq!((status(&agent_d, &good), status(&agent_d, &bad), status(&agent_d, &new)), (200, 401, 200));
}

#[test]
fn a_redis_that_comes_back_with_its_data_or_an_older_state_of_it_changes_nothing() {
    let runtime = runtime();
    let mut redis = runtime.block_on(RedisServer::start_with(&DURABLE));
    let (a, b) = (host(&redis), host(&redis));
    let first = a.add_key("c_1", "free");
    let (agent_a, agent_b) = (a.start(), b.start());
    runtime.block_on(redis.restart());
    let second = b.add_key("c_2", "free");
    for agent in [&agent_a, &agent_b] {
        until("the second key is known", START, || (status(agent, &second) == 200).then_some(()));
        assert_eq!(status(agent, &first), 200);
        assert_eq!(agent.metric("limiter_key_store_losses_total"), 0.0, "nothing was lost");
    }

    // As from a snapshot of before the second key, and before the first was disabled.
    let id = id_of(&a, "c_1", "active");
    let second_id = id_of(&a, "c_2", "active");
    let record: String = runtime.block_on(redis.run(&["HGET", "rl:{keys}:entries", &id]));
    assert!(a.run(&["keys", "disable", &id]).status.success());
    for agent in [&agent_a, &agent_b] {
        until("the first key has ended", START, || (status(agent, &first) == 401).then_some(()));
    }
    let _: String = runtime.block_on(async {
        let mut connection = redis.connection().await;
        redis::pipe()
            .atomic()
            .cmd("HSET")
            .arg("rl:{keys}:entries")
            .arg(&id)
            .arg(&record)
            .ignore()
            .cmd("HDEL")
            .arg("rl:{keys}:entries")
            .arg(&second_id)
            .ignore()
            .cmd("ZREM")
            .arg("rl:{keys}:order")
            .arg(&second_id)
            .ignore()
            .cmd("ZADD")
            .arg("rl:{keys}:order")
            .arg(1)
            .arg(&id)
            .ignore()
            .cmd("HSET")
            .arg("rl:{keys}:meta")
            .arg("position")
            .arg(1)
            .ignore()
            .cmd("PING")
            .query_async::<(String,)>(&mut connection)
            .await
            .expect("an older state")
            .0
    });
    until("Redis has what was lost", START, || (stored(&runtime, &redis) == 2).then_some(()));
    until("the first key is disabled there", START, || list(&b).contains("disabled").then_some(()));
    for agent in [&agent_a, &agent_b] {
        assert_eq!((status(agent, &first), status(agent, &second)), (401, 200));
    }
}

#[test]
fn a_record_that_somebody_takes_away_or_breaks_is_one_key_alone() {
    let runtime = runtime();
    let redis = runtime.block_on(RedisServer::start());
    let setup = host(&redis);
    let (kept, taken, broken) =
        (setup.add_key("c_1", "free"), setup.add_key("c_2", "free"), setup.add_key("c_3", "free"));
    let agent = setup.start();
    let ids = ["c_2", "c_3"].map(|client| id_of(&setup, client, "active"));
    let _: u64 = runtime.block_on(redis.run(&["HDEL", "rl:{keys}:entries", &ids[0]]));
    until("the key that was taken away is unknown", START, || (status(&agent, &taken) == 401).then_some(()));
    assert_eq!((status(&agent, &kept), status(&agent, &broken)), (200, 200));

    // Found by a whole pass, as after a new connection.
    let _: u64 = runtime.block_on(redis.run(&["HSET", "rl:{keys}:entries", &ids[1], "{\"client\":7}"]));
    let _: u64 = runtime.block_on(redis.run(&["CLIENT", "KILL", "TYPE", "normal"]));
    until("the broken record is noticed", START, || {
        (agent.metric("limiter_key_store_unreadable") == 1.0).then_some(())
    });
    assert_eq!((status(&agent, &kept), status(&agent, &broken)), (200, 200), "what was known of it holds");
    assert_eq!(agent.metric("limiter_key_store_losses_total"), 0.0);
    let output = setup.run(&["keys", "list"]);
    assert!(stderr(&output).contains(&ids[1]) && stdout(&output).contains("c_1"), "{output:?}");
}

#[test]
fn a_start_without_redis_knows_the_keys_of_the_copy_or_waits() {
    let runtime = runtime();
    let mut redis = runtime.block_on(RedisServer::start_with(&DURABLE));
    let (with_copy, without) = (host(&redis), host(&redis));
    let key = with_copy.add_key("c_1", "free");
    let agent = with_copy.start();
    until("the copy is written", START, || with_copy.path("keys.json").exists().then_some(()));
    let copy = fs::metadata(with_copy.path("keys.json")).expect("the copy");
    assert_eq!(copy.permissions().mode() & 0o777, 0o600);
    // What changes last is in the copy that a stop writes.
    let ended = with_copy.add_key("c_2", "free");
    let id = id_of(&with_copy, "c_2", "active");
    assert!(with_copy.run(&["keys", "disable", &id]).status.success());
    until("the second key has ended", START, || (status(&agent, &ended) == 401).then_some(()));
    until("both are known", START, || (agent.metric("limiter_key_store_keys") == 2.0).then_some(()));
    assert!(agent.stop().success());
    redis.kill();

    // `limiter validate` comes before each start, and must not hinder one.
    let valid = with_copy.run(&["validate"]);
    assert!(valid.status.success(), "{valid:?}");
    assert!(stderr(&valid).contains("note: the API keys in Redis are not checked"), "{valid:?}");
    let agent = with_copy.start();
    assert_eq!((status(&agent, &key), status(&agent, &ended)), (200, 401));
    assert!(agent.status()["degraded_by"].to_string().contains("the 2 last known ones"), "{}", agent.status());

    let waiting = without.spawn();
    until("the agent without a copy answers", START, || {
        http::get(&without.admin(), "/readyz", &[]).is_ok_and(|answer| answer.status == 503).then_some(())
    });
    let answer = waiting.check(&[("X-API-Key", &key)]);
    assert_eq!(answer.status, 503, "neither let in nor turned away: {answer:?}");
    assert!(answer.body.contains("not_ready"), "{answer:?}");
    let asked = without.run(&["check", "--user", "u_1"]);
    assert_eq!(asked.status.code(), Some(69), "what is not there yet is no mistake of who asks: {asked:?}");
    assert!(waiting.status()["degraded_by"].to_string().contains("none are known yet"), "{}", waiting.status());

    runtime.block_on(redis.restart());
    until("the agent is ready", START, || waiting.is_ready().then_some(()));
    assert_eq!((status(&waiting, &key), status(&waiting, &ended)), (200, 401));
    until("both are well", START, || {
        [&agent, &waiting].iter().all(|agent| agent.status()["degraded"] == json!(false)).then_some(())
    });

    // Redis and the agent restarted together, and Redis has nothing: one host and its reboot.
    drop(agent);
    drop(waiting);
    let _: String = runtime.block_on(redis.run(&["FLUSHALL"]));
    let agent = with_copy.start();
    assert_eq!((status(&agent, &key), status(&agent, &ended)), (200, 401));
    until("Redis has the keys of the copy", START, || (stored(&runtime, &redis) == 2).then_some(()));
}

#[test]
fn hosts_that_change_keys_at_the_same_time_lose_nothing() {
    let runtime = runtime();
    let redis = runtime.block_on(RedisServer::start());
    // Nobody has a secret yet: one makes it, and the other is told.
    let hosts = [(); 2].map(|()| Setup::new(&in_redis(&redis), POLICY));
    let firsts = thread::scope(|scope| {
        let adds = hosts.each_ref().map(|host| scope.spawn(|| host.run(&["keys", "add", "--client", "c_0"])));
        adds.map(|add| add.join().expect("an output"))
    });
    let made: Vec<bool> = firsts.iter().map(|output| output.status.success()).collect();
    assert!(made.contains(&true), "{firsts:?}");
    for (output, _) in firsts.iter().zip(&made).filter(|(_, made)| !**made) {
        assert_eq!(output.status.code(), Some(78), "{output:?}");
        assert!(stderr(output).contains("copy it from a node that has it"), "{output:?}");
    }
    let (with, without) = if made[0] { (&hosts[0], &hosts[1]) } else { (&hosts[1], &hosts[0]) };
    if made != [true, true] {
        write_secret(without, fs::read_to_string(with.path("keys.secret")).expect("the secret").trim());
    }

    let before = stored(&runtime, &redis);
    thread::scope(|scope| {
        for (number, host) in hosts.iter().enumerate() {
            for lane in 0..2 {
                scope.spawn(move || {
                    for add in 0..5 {
                        host.add_key(&format!("c_{number}_{lane}_{add}"), "free");
                    }
                });
            }
        }
    });
    assert_eq!(stored(&runtime, &redis), before + 20);
    // Both end the same key, in two ways, at once.
    let id = id_of(&hosts[0], "c_0_0_0", "active");
    thread::scope(|scope| {
        scope.spawn(|| assert!(hosts[0].run(&["keys", "disable", &id]).status.success()));
        scope.spawn(|| {
            let rotated = hosts[1].run(&["keys", "rotate", &id]);
            assert!(rotated.status.success() || stderr(&rotated).contains("has ended"), "{rotated:?}");
        });
    });
    assert_eq!(id_of(&hosts[1], "c_0_0_0", "disabled"), id);
}

#[test]
fn a_host_with_another_secret_turns_nobody_away_and_says_so() {
    let runtime = runtime();
    let redis = runtime.block_on(RedisServer::start());
    let good = host(&redis);
    let key = good.add_key("c_1", "free");
    for (what, secret) in [("another", Some("cd".repeat(32))), ("none", None)] {
        let setup = Setup::new(&in_redis(&redis), POLICY);
        if let Some(secret) = &secret {
            write_secret(&setup, secret);
        }
        let agent = setup.spawn();
        let reason = until(what, START, || {
            let page = http::get(&setup.admin(), "/readyz", &[]).ok()?;
            (page.status == 503).then(|| page.json()["degraded_by"].to_string())
        });
        assert!(reason.contains("keys.secret") && reason.contains("copy it from a node"), "{what}: {reason}");
        assert_eq!(status(&agent, &key), 503, "{what}");
        let add = setup.run(&["keys", "add", "--client", "c_2"]);
        assert_eq!(add.status.code(), Some(78), "{what}: {add:?}");
        assert!(stderr(&add).contains("copy it from a node that has it"), "{what}: {add:?}");
        let validated = setup.run(&["validate"]);
        assert!(validated.status.success() && stderr(&validated).contains("copy it from a node"), "{validated:?}");

        // Put right while the agent runs.
        write_secret(&setup, SECRET);
        until("the agent is ready", START, || agent.is_ready().then_some(()));
        assert_eq!(status(&agent, &key), 200, "{what}");
    }
    assert_eq!(stored(&runtime, &redis), 1);
}

#[test]
fn a_hundred_thousand_keys_are_read_in_pages_and_one_change_alone() {
    const KEYS: u64 = 100_000;
    let runtime = runtime();
    let redis = runtime.block_on(RedisServer::start_with(&["--slowlog-log-slower-than", "20000"]));
    let setup = host(&redis);
    let key = setup.add_key("c_1", "free");
    runtime.block_on(async {
        let keys = RedisKeys::connect(&RedisConfig::new(redis.url())).expect("an address");
        let record = |number| format!("{{\"client\":\"c_{number}\",\"plan\":\"free\",\"created\":1767225600}}");
        let all: Vec<KeyChange> = (1..KEYS)
            .map(|number| KeyChange {
                condition: KeyCondition::New,
                // As evenly spread as hashes are.
                id: format!("{:016x}{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15), number),
                record: record(number),
            })
            .collect();
        for changes in all.chunks(500) {
            keys.merge("", None, 0, changes, Duration::from_secs(10)).await.expect("an answer").expect("no refusal");
        }
    });
    assert_eq!(stored(&runtime, &redis), KEYS);
    let sent = || runtime.block_on(redis.number("stats", "total_net_output_bytes"));
    let _: String = runtime.block_on(redis.run(&["SLOWLOG", "RESET"]));
    let before = sent();
    let starting = Stopwatch::start();
    let agent = setup.start();
    let (started, whole) = (starting.elapsed(), sent() - before);
    assert_eq!(agent.metric("limiter_key_store_keys"), 100_000.0);
    assert_eq!(status(&agent, &key), 200);
    let slow: Vec<redis::Value> = runtime.block_on(redis.run(&["SLOWLOG", "GET"]));
    assert!(slow.is_empty(), "no call holds Redis for 20 ms: {slow:?}");

    let before = sent();
    let changing = Stopwatch::start();
    let added = setup.add_key("c_new", "free");
    let (made, known) = (changing.elapsed(), Stopwatch::start());
    until("the added key is known", START, || (status(&agent, &added) == 200).then_some(()));
    let (known, one) = (known.elapsed(), sent() - before);
    println!(
        "100,000 keys: started in {started:?}, {whole} bytes from Redis; one added in {made:?}, in force {known:?} later, \
         {one} bytes"
    );
    assert!(one * 100 < whole, "{one} bytes for one change, {whole} for all");
    assert_eq!(agent.metric("limiter_key_store_keys"), 100_001.0);
}

#[test]
fn a_key_file_moves_into_redis() {
    let runtime = runtime();
    let redis = runtime.block_on(RedisServer::start());
    let setup = Setup::new("[identity]\nkey_secret_file = \"keys.secret\"\nkey_file = \"keys.toml\"\n", POLICY);
    write_secret(&setup, SECRET);
    let (kept, ended) = (setup.add_key("c_1", "pro"), setup.add_key("c_2", "free"));
    assert!(setup.run(&["keys", "disable", &id_of(&setup, "c_2", "active")]).status.success());
    let refused = setup.run(&["keys", "import"]);
    assert_eq!(refused.status.code(), Some(64), "{refused:?}");
    assert!(stderr(&refused).contains("set it to \"redis\""), "{refused:?}");
    let of_file = list(&setup);

    setup.configure(&in_redis(&redis).replace("key_copy_file", "key_file = \"keys.toml\"\nkey_copy_file"));
    let import = |arguments: &[&str]| setup.run(&[&["keys", "import"], arguments].concat());
    let missing = import(&["/nonexistent/keys.toml"]);
    assert!(!missing.status.success() && stderr(&missing).contains("/nonexistent/keys.toml"), "{missing:?}");
    write_secret(&setup, &"cd".repeat(32));
    setup.add_key("c_3", "free");
    write_secret(&setup, SECRET);
    assert_eq!(import(&[]).status.code(), Some(78), "keys of another secret are there");
    assert!(!list(&setup).contains("c_1"));
    let () = runtime.block_on(redis.run(&["FLUSHALL"]));

    let imported = import(&[]);
    assert!(stdout(&imported).contains(": 2 new or changed"), "{imported:?}");
    let sorted = |list: &str| list.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(sorted(&list(&setup)), sorted(&of_file));
    let agent = setup.start();
    assert_eq!((status(&agent, &kept), status(&agent, &ended)), (200, 401));
    // What has ended since stays ended, and a second time changes nothing.
    assert!(setup.run(&["keys", "disable", &id_of(&setup, "c_1", "active")]).status.success());
    assert!(stdout(&import(&[])).contains(": 0 new or changed"));
    until("the key is refused", START, || (status(&agent, &kept) == 401).then_some(()));
}

#[test]
fn doctor_and_configuration_know_the_key_store() {
    let runtime = runtime();
    let redis =
        runtime.block_on(RedisServer::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]));
    let setup = host(&redis);
    let finding = |setup: &Setup, check: &str| -> Value {
        let output = setup.run(&["doctor", "--json"]);
        let findings: Value = serde_json::from_slice(&output.stdout).expect("findings");
        let found = findings.as_array().expect("a list").iter().find(|finding| finding["check"] == check).cloned();
        found.unwrap_or_else(|| panic!("{check} in {findings}"))
    };
    setup.add_key("c_1", "free");
    let key_store = finding(&setup, "redis.key_store");
    assert_eq!(key_store["status"], "warning", "{key_store}");
    assert!(key_store["found"].as_str().is_some_and(|found| found.contains("allkeys-lru")), "{key_store}");
    let _: String = runtime.block_on(redis.run(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]));
    let key_store = finding(&setup, "redis.key_store");
    assert_eq!(
        (&key_store["status"], &key_store["found"]),
        (&json!("ok"), &json!("1 API keys, hashed with the secret of this host"))
    );
    write_secret(&setup, &"cd".repeat(32));
    let key_store = finding(&setup, "redis.key_store");
    assert_eq!(key_store["status"], "error", "{key_store}");
    assert_eq!(finding(&setup, "config.key_copy")["status"], "ok");
    write_secret(&setup, SECRET);

    // A user with the rights of counters alone.
    runtime.block_on(redis.set_user("counters", "pw", &format!("{ACL_RULES} +info")));
    setup.write("redis.password", "pw");
    setup.configure(
        &in_redis(&redis)
            .replace("[store.redis]\n", "[store.redis]\nusername = \"counters\"\npassword_file = \"redis.password\"\n"),
    );
    let permissions = finding(&setup, "redis.permissions");
    assert_eq!(permissions["status"], "error", "{permissions}");
    let found = permissions["found"].as_str().expect("what was found");
    assert!(["HGET: ", "HDEL: ", "ZREM: "].iter().all(|command| found.contains(command)), "{permissions}");
    assert!(permissions["remedy"].as_str().is_some_and(|remedy| remedy.contains(KEY_STORE_ACL_RULES)), "{permissions}");
    runtime.block_on(redis.set_user("counters", "pw", &format!("{ACL_RULES} +info {KEY_STORE_ACL_RULES}")));
    assert_eq!(finding(&setup, "redis.permissions")["status"], "ok");
    setup.configure(&in_redis(&redis));

    // Keys of plans that the policy does not have are noted, and hinder no start.
    let of_pro = setup.add_key("c_2", "pro");
    setup.write("policy.toml", &POLICY.replace("[plans.pro]\n", "").replace(", pro = 200000", ""));
    let validated = setup.run(&["validate"]);
    assert!(validated.status.success(), "{validated:?}");
    assert!(stderr(&validated).contains("the policy has no plan \"pro\""), "{validated:?}");
    assert!(stdout(&validated).contains("2 API keys"), "{validated:?}");

    // Nor a reload of an agent that runs.
    setup.write("policy.toml", POLICY);
    let agent = setup.start();
    assert_eq!(agent.check(&[("X-API-Key", &*of_pro)]).header("x-ratelimit-limit"), Some("200000"));
    agent.reload(&POLICY.replace("[plans.pro]\n", "").replace(", pro = 200000", ""));
    assert_eq!(agent.check(&[("X-API-Key", &*of_pro)]).header("x-ratelimit-limit"), Some("100000"));
    until("it is noted", START, || agent.status()["notes"].to_string().contains("no plan").then_some(()));
    drop(agent);

    setup.configure("[identity]\nkey_store = \"redis\"\n");
    let refused = setup.run(&["validate"]);
    assert_eq!(refused.status.code(), Some(78), "{refused:?}");
    assert!(
        stderr(&refused).contains("identity.key_store: is \"redis\", and store.redis.urls names none"),
        "{refused:?}"
    );

    setup.configure(&in_redis(&redis).replace("keys.json", "nowhere/keys.json"));
    let copy = finding(&setup, "config.key_copy");
    assert_eq!(copy["status"], "warning", "{copy}");
}

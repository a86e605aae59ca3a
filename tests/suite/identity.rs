//! Who a request comes from, asked of the real binary as gateways and programs ask.

use std::{fs, os::unix::fs::PermissionsExt};

use limiter_tests::{
    agent::{Agent, START, Setup},
    eventually::until,
    http,
    redis_server::RedisServer,
};
use serde_json::json;
use tokio::runtime::Runtime;

const KEYS: &str = "[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"keys.secret\"\n";

/// A rule of each scope, and none that denies: what is left says who was counted.
const EVERY_SCOPE: &str = r#"
[[rules]]
id = "key"
scope = "key"
limit = 1000
window = "1d"

[[rules]]
id = "user"
scope = "user"
limit = 900
window = "1d"

[[rules]]
id = "session"
scope = "session"
limit = 800
window = "1d"

[[rules]]
id = "ip"
scope = "ip"
limit = 5000
window = "1d"
"#;

/// Status, rule and remainder, as in `200 session 799`. The rule with the least remainder is the most specific.
fn ask(agent: &Agent<'_>, headers: &[(&str, &str)]) -> String {
    let response = agent.check(headers);
    let rule = response.header("ratelimit-policy").and_then(|policy| policy.split('"').nth(1)).unwrap_or("-");
    let remaining = response.header("x-ratelimit-remaining").unwrap_or("-");
    format!("{} {rule} {remaining}", response.status)
}

#[test]
fn the_first_kind_of_the_order_that_is_present_says_who_asks() {
    let address = ("X-Forwarded-For", "192.0.2.1");
    let other_address = ("X-Forwarded-For", "192.0.2.2");
    let agent_a = ("User-Agent", "a/1.0");
    let agent_b = ("User-Agent", "b/1.0");
    let (cookie, other_cookie) = (("Cookie", "theme=dark; sid=s_1"), ("Cookie", "sid=s_2"));
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a str);
    let key = "KEY";
    let tables: [(&str, &[Case<'_>]); 5] = [
        (
            // The order unless configured.
            "session_cookie = \"sid\"\n",
            &[
                (&[address], "200 ip 4999"),
                (&[address, agent_a], "200 session 799"),
                (&[address, agent_a], "200 session 798"),
                (&[address, agent_b], "200 session 799"),
                (&[other_address, agent_a], "200 session 799"),
                (&[address, agent_a, cookie], "200 session 799"),
                (&[other_address, agent_b, cookie], "200 session 798"),
                (&[address, other_cookie], "200 session 799"),
                (&[address, ("Cookie", "sid=")], "200 ip 4993"),
                (&[address, agent_a, cookie, ("X-API-Key", key)], "200 user 899"),
                (&[address, agent_a, cookie, ("Authorization", "Bearer KEY")], "200 user 898"),
                (&[address, cookie], "200 session 797"),
                (&[address, cookie, ("X-API-Key", "guess")], "401 ip 4989"),
            ],
        ),
        (
            "order = [\"session\", \"api_key\", \"address\"]\nsession_cookie = \"sid\"\n",
            &[
                (&[address, cookie, ("X-API-Key", key)], "200 session 799"),
                // Not looked at.
                (&[address, cookie, ("X-API-Key", "guess")], "200 session 798"),
                (&[address, agent_a, ("X-API-Key", key)], "200 user 899"),
                (&[address, agent_a], "200 ip 4996"),
                (&[address, agent_a, ("X-API-Key", "guess")], "401 ip 4995"),
            ],
        ),
        (
            "order = [\"api_key\", \"ip_user_agent\"]\n",
            &[
                (&[address, cookie, agent_a], "200 session 799"),
                (&[address, other_cookie, agent_a], "200 session 798"),
                (&[address, cookie], "200 ip 4997"),
                // Without an address nobody is counted at all.
                (&[agent_a], "200 - -"),
            ],
        ),
        (
            "ipv6_prefix = 48\n",
            &[
                (&[("X-Forwarded-For", "2001:db8:1:2::3"), agent_a], "200 session 799"),
                (&[("X-Forwarded-For", "2001:db8:1:3::4"), agent_a], "200 session 798"),
            ],
        ),
        (
            // Which of two the upstream believes is not known here.
            "",
            &[
                (&[address, ("X-API-Key", key), ("X-API-Key", "guess")], "401 ip 4999"),
                (&[address, ("Authorization", "Bearer KEY"), ("Authorization", "Bearer guess")], "401 ip 4998"),
                (&[address, ("X-API-Key", key), ("X-API-Key", key)], "200 user 899"),
            ],
        ),
    ];
    for (configuration, cases) in tables {
        let setup = Setup::new(&format!("{KEYS}{configuration}"), &format!("[plans.free]\n{EVERY_SCOPE}"));
        let key = setup.add_key("c_1", "free");
        let agent = setup.start();
        for (number, (headers, expected)) in cases.iter().enumerate() {
            let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.replace("KEY", &key))).collect();
            let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, &**value)).collect();
            assert_eq!(ask(&agent, &headers), *expected, "{configuration}, case {number}");
        }
    }
}

#[test]
fn a_session_is_one_for_gateways_and_programs_and_its_value_is_nowhere() {
    let setup = Setup::new(&format!("{KEYS}session_cookie = \"sid\"\n"), EVERY_SCOPE);
    let agent = setup.start();
    let value = "a-secret-session-value";
    let cookie = format!("sid={value}");
    assert_eq!(ask(&agent, &[("Cookie", &cookie)]), "200 session 799");
    assert_eq!(agent.decide(json!({ "session": value }))["remaining"], 798);
    let output = setup.run(&["check", "--session", value, "--json"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("\"remaining\":797"), "{output:?}");
    for page in ["/metrics", "/v1/status", "/v1/top"] {
        let page = http::get(&setup.admin(), page, &[]).expect("an answer").body;
        assert!(!page.contains(value), "{page}");
    }
    assert!(!setup.log().contains(value));
    for (question, message) in [
        (json!({ "session": "" }), "1 to 4096 bytes"),
        (json!({ "session": "x".repeat(4097) }), "1 to 4096 bytes"),
        (json!({ "session": "x", "user": "y" }), "user and session are both given"),
        (json!({ "session": "x", "api_key": "y" }), "api_key and session are both given"),
    ] {
        let response = http::post(&setup.http(), "/v1/decide", &question).expect("an answer");
        assert_eq!(response.status, 400, "{question}");
        assert!(response.body.contains(message), "{question}: {}", response.body);
    }
}

#[test]
fn nodes_with_one_secret_count_a_session_together() {
    let runtime = Runtime::new().expect("a runtime");
    let redis = runtime.block_on(RedisServer::start());
    let configuration = format!(
        "{KEYS}session_cookie = \"sid\"\n[store]\nkind = \"redis\"\n[store.redis]\nurls = [\"{}\"]\n\
         sync_interval = \"20ms\"\n",
        redis.url()
    );
    let setups = [(); 2].map(|()| {
        let setup = Setup::new(&configuration, EVERY_SCOPE);
        setup.write("keys.secret", &format!("{}\n", "ab".repeat(32)));
        fs::set_permissions(setup.path("keys.secret"), fs::Permissions::from_mode(0o600)).expect("a mode");
        setup
    });
    let agents = setups.each_ref().map(Setup::start);
    let remaining = |agent: &Agent<'_>| agent.decide(json!({ "session": "s_1", "peek": true }))["remaining"].clone();
    // A node learns of counters that it has charged itself.
    assert_eq!(agents[1].check(&[("Cookie", "sid=s_1")]).status, 200);
    for _ in 0..10 {
        assert_eq!(agents[0].check(&[("Cookie", "sid=s_1")]).status, 200);
    }
    until("the other node knows", START, || (remaining(&agents[1]) == 789).then_some(()));
    let names = runtime.block_on(redis.run::<Vec<String>>(&["KEYS", "rl:{session:*"]));
    let [name] = &names[..] else { panic!("one counter expected: {names:?}") };
    let hash = name.strip_prefix("rl:{session:").and_then(|name| name.strip_suffix("}:session")).expect("a hash");
    assert!(hash.len() == 32 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");
}

//! Who a request comes from, asked of the real binary as gateways and programs ask.

use std::{fs, os::unix::fs::PermissionsExt};

use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use limiter_tests::{
    agent::{Agent, START, Setup},
    eventually::until,
    http,
    redis_server::RedisServer,
};
use limiter_user::clock::{Clock, SharedClock};
use serde_json::{Value, json};
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
    for _ in 0..10 {
        assert_eq!(agents[0].check(&[("Cookie", "sid=s_1")]).status, 200);
    }
    // A node learns of counters that it charges itself.
    let mut own = 0;
    until("the other node knows", START, || {
        own += 1;
        let left = agents[1].decide(json!({ "session": "s_1" }))["remaining"].as_u64().expect("a rule applies");
        (left == 790 - own).then_some(())
    });
    let names = runtime.block_on(redis.run::<Vec<String>>(&["KEYS", "rl:{session:*"]));
    let [name] = &names[..] else { panic!("one counter expected: {names:?}") };
    let hash = name.strip_prefix("rl:{session:").and_then(|name| name.strip_suffix("}:session")).expect("a hash");
    assert!(hash.len() == 32 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");
}

const SECRET: &str = "0123456789abcdef0123456789abcdef";

fn token(secret: &str, claims: &Value) -> String {
    let key = EncodingKey::from_secret(secret.as_bytes()).expect("a secret");
    encode(&Header::new(Algorithm::HS256), claims, &key).expect("a token")
}

fn now_s() -> u64 {
    SharedClock::new().now().get() / 1_000_000
}

#[test]
fn a_token_names_its_subject_and_a_bad_one_counts_against_its_address() {
    let policy = "[plans.free]\n[plans.pro]\n[[rules]]\nid = \"user\"\nscope = \"user\"\nplans = { free = 100, pro = 200 }\n\
                  window = \"1d\"\n[[rules]]\nid = \"ip\"\nscope = \"ip\"\nlimit = 500\nwindow = \"1d\"\n";
    let configuration = format!(
        "{KEYS}[identity.jwt]\nsecret_file = \"jwt.secret\"\naudience = \"api\"\nissuer = \"us\"\nplan_claim = \"plan\"\n"
    );
    let setup = Setup::new(&configuration, policy);
    let secret = |text: &str| {
        setup.write("jwt.next", text);
        fs::set_permissions(setup.path("jwt.next"), fs::Permissions::from_mode(0o600)).expect("a mode");
        fs::rename(setup.path("jwt.next"), setup.path("jwt.secret")).expect("the file in its place");
    };
    secret(SECRET);
    let key = setup.add_key("c_1", "free");
    let agent = setup.start();
    let address = ("X-Forwarded-For", "192.0.2.1");
    let ask = |token: &str| ask(&agent, &[("Authorization", &format!("Bearer {token}")), address]);
    let claims = |user: &str, plan: &str, expires_s: u64| json!({ "sub": user, "exp": expires_s, "aud": ["api"], "iss": "us", "plan": plan });
    let soon = now_s() + 3600;
    let good = token(SECRET, &claims("u_1", "pro", soon));
    assert_eq!(ask(&good), "200 user 199");
    assert_eq!(ask(&good), "200 user 198");
    // Another token of the same subject, with another plan; what programs name is the same user.
    assert_eq!(ask(&token(SECRET, &claims("u_1", "free", soon))), "200 user 97");
    assert_eq!(agent.decide(json!({ "user": "u_1", "plan": "pro" }))["remaining"], 196);
    assert_eq!(ask(&token(SECRET, &claims("u_2", "pro", soon))), "200 user 199");
    assert_eq!(ask(&key), "200 user 99", "an API key beside tokens");
    for (bad, what) in [
        (token(&"x".repeat(32), &claims("u_1", "pro", soon)), "of another secret"),
        (token(SECRET, &claims("u_1", "pro", now_s() - 31)), "expired"),
        (token(SECRET, &json!({ "sub": "u_1", "exp": soon, "iss": "us", "aud": "web" })), "of another audience"),
        (token(SECRET, &json!({ "sub": "u_1", "exp": soon, "iss": "them", "aud": "api" })), "of another issuer"),
        (format!("eyJhbGciOiJub25lIn0.{}.", good.split('.').nth(1).expect("claims")), "unsigned"),
        ("a.b.c".into(), "garbage"),
        ("neither-key-nor-token".into(), "an unknown key"),
    ] {
        assert!(ask(&bad).starts_with("401 ip "), "{what}");
    }
    assert_eq!(
        agent.check(&[address]).header("x-ratelimit-remaining"),
        Some("487"),
        "each of 12 has cost its address one"
    );

    // Another secret, while the agent runs.
    let other = SECRET.replace('0', "z");
    secret(&other);
    let renewed = token(&other, &claims("u_3", "pro", soon));
    until("the changed secret is read", START, || ask(&renewed).starts_with("200").then_some(()));
    assert!(ask(&good).starts_with("401"), "what was verified with the old one");
    secret("short");
    until("the mistake is said", START, || setup.log().contains("a secret of HS256 has at least 32").then_some(()));
    assert!(ask(&renewed).starts_with("200"));
    let log = setup.log();
    assert!(!log.contains(&good) && !log.contains(&renewed) && !log.contains(SECRET), "{log}");
}

#[test]
fn keys_of_tokens_are_checked_before_the_agent_starts() {
    let setup = Setup::new(&format!("{KEYS}[identity.jwt]\nsecret_file = \"jwt.secret\"\n"), "");
    setup.write("jwt.secret", "hunter2");
    let output = setup.run(&["validate"]);
    assert_eq!(output.status.code(), Some(78));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("identity.jwt.secret_file: has 7 bytes") && !message.contains("hunter2"), "{message}");
}

#[test]
fn a_key_in_the_query_is_read_where_it_is_configured_and_never_written() {
    for (configuration, with_key, with_unknown) in
        [("api_key_query = \"api_key\"\n", "200 user 899", "401 ip 4998"), ("", "200 ip 4999", "200 ip 4998")]
    {
        let setup = Setup::new(&format!("{KEYS}{configuration}"), &format!("[plans.free]\n{EVERY_SCOPE}"));
        let key = setup.add_key("c_1", "free");
        let agent = setup.start();
        let address = ("X-Forwarded-For", "192.0.2.1");
        let by = |header: &str, query: &str| ask(&agent, &[(header, &format!("/x?{query}")), address]);
        assert_eq!(by("X-Original-URI", &format!("a=b&api_key={key}")), with_key);
        assert_eq!(by("X-Forwarded-Uri", "api_key=guess"), with_unknown);
        if !configuration.is_empty() {
            let appended = format!("/v1/check/x?api%5fkey={key}&deny_status=none");
            let response = http::get(&setup.http(), &appended, &[address]).expect("an answer");
            assert_eq!((response.status, response.header("x-ratelimit-remaining")), (200, Some("898")));
            // Our own options are no query of the client's, and two keys are none.
            let own = format!("/v1/check?api_key={key}");
            let response = http::get(&setup.http(), &own, &[address]).expect("an answer");
            assert_eq!(response.header("x-ratelimit-remaining"), Some("4996"));
            assert_eq!(by("X-Original-URI", &format!("api_key={key}&api_key=other")), "401 ip 4995");
        }
        let metrics = http::get(&setup.admin(), "/metrics", &[]).expect("an answer").body;
        assert!(!setup.log().contains(&key) && !metrics.contains(&key));
    }
}

#[test]
fn forwarded_names_clients_beside_x_forwarded_for() {
    let x_forwarded_for = ("X-Forwarded-For", "203.0.113.5, 198.51.100.11, 10.0.0.7");
    let forwarded = ("Forwarded", "for=203.0.113.5, for=198.51.100.22;proto=https, for=\"10.0.0.7:_p\"");
    let cases: [(&str, &[(&str, &str)]); 3] = [
        ("", &[("198.51.100.11", "both"), ("198.51.100.22", "forwarded")]),
        ("client_address_header = \"forwarded\"\n", &[("198.51.100.22", "both"), ("198.51.100.22", "forwarded")]),
        ("client_address_header = \"x-forwarded-for\"\n", &[("198.51.100.11", "both"), ("198.51.100.11", "x")]),
    ];
    for (configuration, asked) in cases {
        let setup = Setup::new(&format!("{KEYS}trusted_proxies = [\"10.0.0.0/8\"]\n{configuration}"), EVERY_SCOPE);
        let agent = setup.start();
        for (client, headers) in asked {
            let left =
                || agent.decide(json!({ "ip": client, "peek": true }))["remaining"].as_u64().expect("a rule applies");
            let before = left();
            let headers: &[_] = match *headers {
                "both" => &[x_forwarded_for, forwarded],
                "x" => &[x_forwarded_for],
                _ => &[forwarded],
            };
            assert_eq!(agent.check(headers).status, 200);
            assert_eq!(left(), before - 1, "{configuration}{client}");
        }
    }
}

#[test]
fn a_key_is_replaced_and_ended_while_the_agent_runs() {
    let setup = Setup::new(KEYS, &format!("[plans.free]\n{EVERY_SCOPE}"));
    let old = setup.add_key("c_1", "free");
    let agent = setup.start();
    let status = |key: &str| agent.check(&[("X-API-Key", key)]).status;
    let id_of = |state: &str| {
        let list = setup.run(&["keys", "list"]);
        let list = String::from_utf8(list.stdout).expect("text");
        let line = list.lines().find(|line| line.contains(state)).unwrap_or_else(|| panic!("{state} in {list}"));
        line.split(' ').next().expect("an id").to_owned()
    };
    let id = id_of("active");
    let rotated = setup.run(&["keys", "rotate", &id, "--grace", "1h"]);
    let new = String::from_utf8(rotated.stdout.clone()).expect("text").trim().to_owned();
    assert!(rotated.status.success() && new.starts_with("lk_"), "{rotated:?}");
    until("the new key is known", START, || (status(&new) == 200).then_some(()));
    assert_eq!(status(&old), 200, "until its time is over");
    assert_eq!(id_of("active until"), id);
    let user = agent.check(&[("X-API-Key", &new)]);
    assert_eq!(user.header("ratelimit-policy").map(|policy| policy.starts_with("\"user\"")), Some(true), "{user:?}");

    assert!(setup.run(&["keys", "disable", &id]).status.success());
    until("the old key is refused", START, || (status(&old) == 401).then_some(()));
    assert_eq!(status(&new), 200);
    // A time that is over, without anybody's doing.
    let new_id = id_of("active");
    assert!(setup.run(&["keys", "rotate", &new_id, "--grace", "1s"]).status.success());
    until("the time is over", START, || (status(&new) == 401).then_some(()));
    assert_eq!(id_of("ended"), new_id);
    for (arguments, message) in [
        (["keys", "rotate", &*new_id], "has ended"),
        (["keys", "disable", "00000000000000000000000000000000"], "there is no key"),
    ] {
        let output = setup.run(&arguments);
        assert_eq!(output.status.code(), Some(78), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(message), "{output:?}");
    }
    assert!(!setup.log().contains(&new) && !setup.log().contains(&old));
}

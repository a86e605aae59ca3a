//! Requests against the real binary with the memory store: no root, no XDP.

use std::time::Duration;

use limiter_tests::{
    agent::Setup,
    http::{self, Address, Connection},
};
use limiter_user::clock::Stopwatch;
use serde_json::{Value, json};

const KEYS: &str = "[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"keys.secret\"\n";

const POLICY: &str = r#"
[[endpoints]]
name = "search"
match = ["GET /api/v1/search"]

[plans.free]
[plans.pro]

[[rules]]
id = "per-key"
scope = "key"
limit = 5
plans = { free = 3, pro = 10 }
window = "1h"

[[rules]]
id = "per-user"
scope = "user"
limit = 12
window = "1h"

[[rules]]
id = "search"
scope = "user"
endpoint = "search"
limit = 2
window = "1d"

[[rules]]
id = "per-address"
scope = "ip"
limit = 30
window = "1h"
"#;

fn statuses(count: usize, mut ask: impl FnMut() -> u16) -> Vec<u16> {
    (0..count).map(|_| ask()).collect()
}

#[test]
fn a_key_is_held_to_its_plan_and_told_so_in_every_header() {
    let setup = Setup::new(KEYS, POLICY);
    let key = setup.add_key("c_1", "free");
    let agent = setup.start();
    let ask = || agent.check(&[("X-API-Key", &key), ("X-Forwarded-For", "192.0.2.1")]);

    let allowed = ask();
    assert_eq!(allowed.status, 200);
    assert_eq!(allowed.header("x-ratelimit-limit"), Some("3"));
    assert_eq!(allowed.header("x-ratelimit-remaining"), Some("2"));
    assert_eq!(allowed.header("ratelimit-policy"), Some("\"per-key\";q=3;w=3600"));
    assert!(allowed.header("ratelimit").is_some_and(|value| value.starts_with("\"per-key\";r=2;t=")), "{allowed:?}");
    assert_eq!(allowed.header("retry-after"), None);
    assert_eq!(statuses(2, || ask().status), [200, 200]);

    let denied = ask();
    assert_eq!(denied.status, 429);
    assert_eq!(denied.header("x-ratelimit-remaining"), Some("0"));
    let wait: u64 = denied.header("retry-after").expect("Retry-After").parse().expect("seconds");
    assert!((1..=7200).contains(&wait), "{denied:?}");
    assert_eq!(denied.header("ratelimit"), Some(&*format!("\"per-key\";r=0;t={wait}")));
    let body = denied.json();
    assert_eq!((&body["error"], &body["retry_after_seconds"]), (&json!("rate_limit_exceeded"), &json!(wait)));

    let problem = agent.check(&[("Authorization", &format!("Bearer {key}")), ("Accept", "application/problem+json")]);
    assert_eq!((problem.status, problem.header("content-type")), (429, Some("application/problem+json")));
    assert_eq!(problem.json()["violated-policies"], json!(["per-key"]));

    let target = "/v1/check?deny_status=403";
    let forbidden = http::get(&setup.http(), target, &[("X-API-Key", &key)]).expect("an answer");
    assert_eq!(forbidden.status, 403);
    assert_eq!(http::get(&setup.http(), "/v1/check?deny_status=200", &[]).expect("an answer").status, 400);

    assert_eq!(agent.metric("limiter_checks_total{rule=\"per-key\",decision=\"denied\",source=\"memory\"}"), 3.0);
    assert_eq!(
        agent.metric("limiter_remembered_denials_total"),
        1.0,
        "the second in a row is the first to be remembered"
    );
    for text in [agent.setup().log(), http::get(&setup.admin(), "/metrics", &[]).expect("an answer").body] {
        assert!(!text.contains(&key), "an API key is never written");
    }
}

#[test]
fn unknown_keys_are_refused_and_count_against_their_address_alone() {
    let setup = Setup::new(KEYS, POLICY);
    let agent = setup.start();
    let ask = |n: usize| agent.check(&[("X-API-Key", &format!("guess-{n}")), ("X-Forwarded-For", "192.0.2.9")]);
    for n in 0..30 {
        let response = ask(n);
        assert_eq!(response.status, 401, "{n}: {response:?}");
        assert_eq!(response.header("www-authenticate"), Some("Bearer"));
    }
    assert_eq!(ask(30).status, 429);
    // An id with other bytes is unknown too, and a client's own query is no option of ours.
    let strange = [("Authorization", "BEARER \u{e9}"), ("X-Forwarded-For", "192.0.2.10")];
    assert_eq!(agent.check(&strange).status, 401);
    let appended = http::get(&setup.http(), "/v1/check/x?deny_status=none", &[]).expect("an answer");
    assert_eq!(appended.status, 200);
    assert_eq!(agent.check(&[("X-Forwarded-For", "192.0.2.9")]).status, 429);
    assert_eq!(agent.check(&[("X-Forwarded-For", "192.0.2.10")]).status, 200);
    let ours = format!("lk_{}", "0".repeat(43));
    for keys in [&[("X-API-Key", &*ours)][..], &[("X-API-Key", "a"), ("X-API-Key", "b")]] {
        assert_eq!(http::get(&setup.http(), "/v1/check", keys).expect("an answer").status, 401);
    }
    for (reason, count) in [("malformed", 32.0), ("unknown", 1.0), ("several", 1.0), ("disabled", 0.0)] {
        let series = format!("limiter_credentials_refused_total{{credential=\"api_key\",reason=\"{reason}\"}}");
        assert_eq!(agent.metric(&series), count, "{reason}");
    }
}

#[test]
fn a_denied_request_costs_nobody_anything() {
    let setup = Setup::new(KEYS, POLICY);
    let agent = setup.start();
    let question = json!({ "user": "u_1", "ip": "192.0.2.1", "path": "/api/v1/search" });
    let other = json!({ "user": "u_1", "ip": "192.0.2.1", "path": "/other" });
    assert_eq!(agent.decide(question.clone())["remaining"], 1);
    assert_eq!(agent.decide(question.clone())["remaining"], 0);
    for _ in 0..50 {
        let denied = agent.decide(question.clone());
        assert_eq!((&denied["allowed"], &denied["rule"]), (&json!(false), &json!("search")));
    }
    // Two of twelve were charged to the user, and nothing for the fifty.
    assert_eq!(agent.decide(other)["remaining"], 9);
}

#[test]
fn paths_cannot_be_spelled_around_their_limit() {
    let setup = Setup::new(KEYS, POLICY);
    let agent = setup.start();
    let spellings = ["/api/v1/search", "/api//v1/%73earch?q=1", "/api/x/../v1/./search", "/api/v1/search/"];
    for (number, path) in spellings.iter().enumerate() {
        let answer = agent.decide(json!({ "user": "u_1", "path": path }));
        assert_eq!(answer["allowed"], json!(number < 2), "{path}: {answer}");
    }
    let forwarded = |path| agent.check(&[("X-Forwarded-Uri", path), ("X-Forwarded-Method", "GET")]).status;
    assert_eq!(forwarded("/api/v1/search"), 200, "a request without a user has no limit for users");
}

#[test]
fn a_header_of_the_clients_own_takes_no_rule_away() {
    let setup = Setup::new(KEYS, POLICY);
    let key = setup.add_key("c_1", "pro");
    let agent = setup.start();
    let ask = |more: &[(&str, &str)]| {
        let gateway = [("X-API-Key", &*key), ("X-Forwarded-Uri", "/api/v1/search"), ("X-Forwarded-Method", "GET")];
        agent.check(&[&gateway, more].concat()).status
    };
    assert_eq!(statuses(3, || ask(&[])), [200, 200, 429]);
    assert_eq!(ask(&[("X-Original-URI", "/healthz")]), 429);
    assert_eq!(ask(&[("X-Original-Method", "PURGE")]), 429);
    // Lines that are there twice, and the client's own first: a gateway may append its own.
    let twice = |name: &'static str, first: &'static str, second: &'static str| {
        http::get(&setup.http(), "/v1/check", &[("X-API-Key", &*key), (name, first), (name, second)])
            .expect("an answer")
            .status
    };
    assert_eq!(twice("X-Original-URI", "/healthz", "/api/v1/search"), 429);
    assert_eq!(twice("X-Original-URI", "/api/v1/search", "/healthz"), 429);
    assert_eq!(twice("X-Original-URI", "/elsewhere", "/healthz"), 200);
    let many: Vec<String> = (0..17).map(|number| format!("/{number}")).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|path| ("X-Original-URI", &**path)).collect();
    let too_many = http::get(&setup.http(), "/v1/check", &many).expect("an answer");
    assert_eq!(too_many.status, 400);
    assert!(too_many.body.contains("let the gateway set one of x-original-method"), "{too_many:?}");
    // What is said twice is no further request.
    let same = [&many[..15], &[("X-Original-URI", "/api/v1/search"), ("X-Original-Method", "GET")]].concat();
    let target = "/v1/check/api/v1/search";
    assert_eq!(http::get(&setup.http(), target, &same).expect("an answer").status, 200, "a request of nobody's");
    let appended = |more: &[(&str, &str)]| {
        let headers = [&[("X-API-Key", &*key)], more].concat();
        http::get(&setup.http(), "/v1/check/api/v1/search", &headers).expect("an answer").status
    };
    assert_eq!((appended(&[]), appended(&[("X-Original-URI", "/healthz")])), (429, 429));
    let root = http::get(&setup.http(), "/v1/check/", &[("X-API-Key", &*key)]).expect("an answer");
    assert_eq!(root.status, 200, "the client asks for the root");
}

#[test]
fn cost_peek_and_batch() {
    let setup = Setup::new(KEYS, POLICY);
    let agent = setup.start();
    let ask = |cost: u64, peek: bool| agent.decide(json!({ "user": "u_2", "cost": cost, "peek": peek }));
    assert_eq!(ask(10, false)["remaining"], 2);
    assert_eq!(ask(2, true)["allowed"], true);
    assert_eq!(ask(0, false)["remaining"], 2, "a peek writes nothing");
    let denied = ask(3, false);
    assert_eq!(denied["allowed"], false);
    assert!(denied["retry_after_ms"].as_u64().is_some_and(|wait| wait > 0));
    let never = ask(13, false);
    assert_eq!((&never["reason"], &never["retry_after_ms"]), (&json!("cost_exceeds_limit"), &Value::Null));
    assert_eq!(ask(u64::MAX, false)["reason"], "cost_exceeds_limit");

    let batch = json!([{ "user": "u_3" }, { "user": "u_3", "cost": 12 }, { "ip": "2001:db8::1" }, {}]);
    let answers = http::post(&setup.http(), "/v1/decide", &batch).expect("an answer").json();
    let fields = |name: &str| answers.as_array().expect("a list").iter().map(|a| a[name].clone()).collect::<Vec<_>>();
    assert_eq!(fields("allowed"), [json!(true), json!(false), json!(true), json!(true)]);
    assert_eq!(fields("rule"), [json!("per-user"), json!("per-user"), json!("per-address"), Value::Null]);
}

#[test]
fn what_cannot_be_understood_changes_nothing_and_says_why() {
    let setup = Setup::new(KEYS, POLICY);
    let agent = setup.start();
    for (body, message) in [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[{}, {\"cost\": 1.5}]", "request 1 of the batch"),
        ("{\"cost\": -1, \"peek\": true}", "giving back is no question"),
        ("{\"cots\": 1}", "unknown field `cots`"),
        ("{\"ip\": \"nowhere\"}", "IP address"),
        ("{\"user\": \"a\", \"api_key\": \"b\"}", "both given"),
        ("{\"user\": \"\"}", "1 to 256 bytes"),
        ("{\"user\": \"a\", \"plan\": \"gold\"}", "no plan"),
        ("{\"api_key\": \"a\", \"plan\": \"pro\"}", "plan is given without user"),
        ("{\"plan\": \"pro\"}", "give user, or leave plan out"),
    ] {
        let response = http::request(&setup.http(), "POST", "/v1/decide", &[], body).expect("an answer");
        assert_eq!(response.status, 400, "{body}");
        assert!(response.body.contains(message), "{body}: {}", response.body);
    }
    assert_eq!(agent.metric("limiter_bad_requests_total"), 11.0);
    assert_eq!(agent.decide(json!({ "ip": "192.0.2.1" }))["remaining"], 29);
}

#[test]
fn the_client_is_who_the_gateway_names_not_who_a_header_claims() {
    let setup = Setup::new(&format!("{KEYS}trusted_proxies = [\"10.0.0.0/8\"]\n"), POLICY);
    let agent = setup.start();
    let remaining = |forwarded: &str| {
        let response = agent.check(&[("X-Forwarded-For", forwarded)]);
        response.header("x-ratelimit-remaining").map(str::to_owned).expect("a rule applies")
    };
    assert_eq!(remaining("192.0.2.1"), "29");
    assert_eq!(remaining("203.0.113.5, 192.0.2.1"), "28", "the right-most hop is not a proxy");
    assert_eq!(remaining("203.0.113.5, 192.0.2.1, 10.0.0.7"), "27");
    assert_eq!(remaining("::ffff:192.0.2.1"), "26");
    assert_eq!(remaining("2001:db8:1:2::1"), "29");
    assert_eq!(remaining("2001:db8:1:2:ffff::9"), "28", "one /64 is one client");
}

#[test]
fn both_apis_answer_over_tcp_and_keep_connections_open() {
    let setup = Setup::new(KEYS, POLICY);
    let port = |_| std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
    let [http, admin] = [(); 2].map(port);
    setup.write(
        "limiter.toml",
        &format!("[api]\nhttp = \"{http}\"\nadmin = \"{admin}\"\n[policy]\nfile = \"policy.toml\"\n{KEYS}"),
    );
    let _agent = setup.spawn();
    let ready = || http::get(&Address::Tcp(admin), "/readyz", &[]).ok().filter(|r| r.status == 200);
    limiter_tests::eventually::until("ready", limiter_tests::agent::START, ready);
    let mut connection = Connection::open(&Address::Tcp(http)).expect("a connection");
    for n in 1..=20 {
        let response =
            connection.request("HEAD", "/v1/check", &[("X-Forwarded-For", "192.0.2.1")], "").expect("an answer");
        assert_eq!(response.header("x-ratelimit-remaining"), Some(&*(30 - n).to_string()));
    }
    let output = setup.run(&["check", "--ip", "192.0.2.1", "--path", "/x"]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("per-address"), "{output:?}");
}

#[test]
fn a_peer_that_sends_slowly_is_sent_away() {
    use std::io::{Read, Write};
    let setup = Setup::new(KEYS, POLICY);
    let _agent = setup.start();
    let mut peer = std::os::unix::net::UnixStream::connect(setup.path("http.sock")).expect("a connection");
    peer.set_read_timeout(Some(Duration::from_secs(30))).expect("a time-out");
    peer.write_all(b"POST /v1/decide HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n[").expect("a head");
    let mut answer = String::new();
    peer.read_to_string(&mut answer).expect("the end of the connection");
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
}

/// One rule of each algorithm, each for requests of its own path.
fn policy_of_all_algorithms() -> String {
    let rule = |name: &str, fields: &str| {
        format!(
            "[[endpoints]]\nname = \"{name}\"\nmatch = [\"/{name}\"]\n[[rules]]\nid = \"{name}\"\nscope = \"user\"\n\
             endpoint = \"{name}\"\nlimit = 10\nwindow = \"1h\"\nalgorithm = \"{name}\"\n{fields}\n"
        )
    };
    let leaky = rule("leaky_bucket", "burst = 9\nmax_delay = \"1s\"\nmode = \"shadow\"");
    [
        rule("sliding_window", ""),
        rule("fixed_window", ""),
        rule("sliding_log", ""),
        rule("token_bucket", "burst_factor = 1.5"),
        leaky,
    ]
    .concat()
}

#[test]
fn every_algorithm_limits_and_says_what_is_left() {
    let setup = Setup::new(KEYS, &policy_of_all_algorithms());
    let agent = setup.start();
    for (name, ceiling) in [("sliding_window", 10), ("fixed_window", 10), ("sliding_log", 10), ("token_bucket", 15)] {
        let ask = |cost: i64| agent.decide(json!({ "user": "u_1", "path": format!("/{name}"), "cost": cost }));
        for used in 1..=ceiling {
            let answer = ask(1);
            assert_eq!((&answer["allowed"], &answer["limit"]), (&json!(true), &json!(ceiling)), "{name}: {answer}");
            assert_eq!(answer["remaining"], json!(ceiling - used), "{name}: {answer}");
        }
        let denied = ask(1);
        assert_eq!((&denied["allowed"], &denied["rule"]), (&json!(false), &json!(name)), "{denied}");
        let wait = denied["retry_after_ms"].as_u64().expect("a wait");
        assert!((1..=2 * 3_600_000).contains(&wait), "{name}: {denied}");
        // What did not happen is given back, and is never denied.
        let back = ask(-3);
        assert_eq!((&back["allowed"], &back["remaining"]), (&json!(true), &json!(3)), "{name}: {back}");
        assert_eq!(ask(i64::MIN)["remaining"], json!(ceiling), "{name}");
        assert_eq!(ask(ceiling)["remaining"], 0, "{name}");
        assert_eq!(ask(0)["allowed"], false, "{name}");
    }
    // In shadow mode a leaky bucket holds nothing, and says what it would have denied.
    let ask = || agent.decide(json!({ "user": "u_1", "path": "/leaky_bucket" }));
    assert_eq!(ask()["shadow"], json!([]));
    assert_eq!(ask()["shadow"], json!(["leaky_bucket"]));
}

#[test]
fn a_rule_that_changes_its_algorithm_grants_nobody_a_fresh_start() {
    let policy = |algorithm: &str| {
        format!("[[rules]]\nid = \"r\"\nscope = \"user\"\nlimit = 10\nwindow = \"1d\"\nalgorithm = \"{algorithm}\"\n")
    };
    let setup = Setup::new(KEYS, &policy("fixed_window"));
    let agent = setup.start();
    assert_eq!(agent.decide(json!({ "user": "u_1", "cost": 6 }))["remaining"], 4);
    for (algorithm, remaining) in [("token_bucket", 3), ("sliding_log", 2), ("sliding_window", 1), ("fixed_window", 0)]
    {
        agent.reload(&policy(algorithm));
        assert_eq!(agent.decide(json!({ "user": "u_1" }))["remaining"], remaining, "{algorithm}");
    }
    assert_eq!(agent.decide(json!({ "user": "u_1" }))["allowed"], false);
}

fn shaping(limit: u64, burst: u64, max_delay: &str) -> String {
    format!(
        "[[rules]]\nid = \"shape\"\nscope = \"global\"\nlimit = {limit}\nwindow = \"1s\"\nalgorithm = \"leaky_bucket\"\n\
         burst = {burst}\nmax_delay = \"{max_delay}\"\n"
    )
}

#[test]
fn thousands_of_held_answers_cost_memory_only_and_clients_that_go_free_their_places() {
    use std::{io::Write, os::unix::net::UnixStream};
    const CLIENTS: usize = 3000;
    // One every 20 ms, and more places than clients.
    let policy = shaping(1, 60, "60s").replace("\"1s\"", "\"1ms\"");
    let policy = policy.replace("limit = 1\n", "limit = 1\ncost = 20\n").replace("burst = 60", "burst = 100000");
    let setup = Setup::new(KEYS, &policy);
    let agent = setup.start();
    let number = |field: &str| -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).expect("the status of the agent");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field");
        line.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number")
    };
    let held = || agent.metric("limiter_held_answers");
    let (threads, memory_kb) = (number("Threads:"), number("VmRSS:"));
    let clients: Vec<UnixStream> = (0..CLIENTS)
        .map(|_| {
            let mut client = UnixStream::connect(setup.path("http.sock")).expect("a connection");
            client.write_all(b"GET /v1/check HTTP/1.1\r\nHost: x\r\n\r\n").expect("a request");
            client
        })
        .collect();
    // Some leave while others come.
    limiter_tests::eventually::until("most are held", limiter_tests::agent::START, || {
        (held() >= CLIENTS as f64 / 2.0).then_some(())
    });
    let grown_kb = number("VmRSS:").saturating_sub(memory_kb);
    assert!(grown_kb < 16 * CLIENTS, "{grown_kb} KiB for {CLIENTS} answers");
    assert_eq!(number("Threads:"), threads);
    // Others are answered as ever.
    assert!(setup.run(&["status"]).status.success());
    let left = || agent.decide(json!({ "peek": true }))["remaining"].as_u64().expect("a number");
    let before = left();
    drop(clients);
    limiter_tests::eventually::until("nobody is held", limiter_tests::agent::START, || (held() == 0.0).then_some(()));
    // All places are free but perhaps that of whose turn it was.
    limiter_tests::eventually::until("places are free", limiter_tests::agent::START, || {
        (left() > 59_900).then_some(())
    });
    assert!(left() > before);
}

#[test]
fn an_agent_that_stops_lets_held_answers_go() {
    let setup = Setup::new(KEYS, &shaping(1, 10, "60s").replace("\"1s\"", "\"1m\"").replace("burst = 10", "burst = 1"));
    let agent = setup.start();
    assert_eq!(agent.check(&[]).status, 200);
    let mut connection = Connection::open(&setup.http()).expect("a connection");
    std::thread::scope(|scope| {
        let held = scope.spawn(move || connection.request("GET", "/v1/check", &[], "").expect("an answer").status);
        limiter_tests::eventually::until("it is held", limiter_tests::agent::START, || {
            (agent.metric("limiter_held_answers") == 1.0).then_some(())
        });
        agent.stop();
        assert_eq!(held.join().expect("a thread"), 200);
    });
}

/// Names that cost nothing, in ever new headers: keys that nobody has, sessions, addresses.
#[test]
fn strangers_push_out_no_client_s_counters() {
    const STRANGERS: usize = 20_000;
    let configuration = format!("[store]\nmax_counters = 4000\n{KEYS}session_cookie = \"sid\"\n");
    let policy = "[plans.free]\n[[rules]]\nid = \"per-user\"\nscope = \"user\"\nlimit = 50\nwindow = \"1h\"\n\
                  [[rules]]\nid = \"per-session\"\nscope = \"session\"\nlimit = 50\nwindow = \"1d\"\n\
                  [[rules]]\nid = \"per-address\"\nscope = \"ip\"\nlimit = 1000000\nwindow = \"1d\"\n";
    let setup = Setup::new(&configuration, policy);
    let key = setup.add_key("c_1", "free");
    let agent = setup.start();
    let remaining = || {
        let question = serde_json::json!({ "api_key": key, "peek": true });
        agent.decide(question)["remaining"].as_u64().expect("a number")
    };
    for _ in 0..5 {
        assert_eq!(agent.check(&[("X-API-Key", &key)]).status, 200);
    }
    assert_eq!(remaining(), 45);

    let mut connection = Connection::open(&setup.http()).expect("a connection");
    let mut check =
        |headers: &[(&str, &str)]| connection.request("GET", "/v1/check", headers, "").expect("an answer").status;
    let before = agent.metric("limiter_counters");
    for stranger in 0..STRANGERS {
        let guess = format!("lk_{stranger:043}");
        assert_eq!(check(&[("X-API-Key", &guess), ("X-Forwarded-For", "192.0.2.9")]), 401);
    }
    assert_eq!(agent.metric("limiter_counters"), before + 1.0, "the one of their address");
    for stranger in 0..STRANGERS {
        let (cookie, address) =
            (format!("sid={stranger}"), format!("10.0.{}.{}", stranger / 250 % 250, stranger % 250));
        assert_eq!(check(&[("Cookie", &cookie), ("X-Forwarded-For", &address)]), 200);
    }
    assert!(agent.metric("limiter_counters") <= 4000.0);
    assert!(agent.metric("limiter_counters_evicted_total") >= 30_000.0);
    assert_eq!(remaining(), 45);
}

/// How many find their turn is a matter of how long asking takes.
mod alone {
    use super::*;

    #[test]
    fn answers_are_held_until_their_turn() {
        // One every 50 ms.
        let setup = Setup::new(KEYS, &shaping(20, 100, "500ms"));
        let agent = setup.start();
        let begin = Stopwatch::start();
        let answers: Vec<_> = std::thread::scope(|scope| {
            let asked: Vec<_> = (0..20)
                .map(|client| {
                    let agent = &agent;
                    scope.spawn(move || {
                        let response = if client % 2 == 0 {
                            agent.check(&[])
                        } else {
                            http::post(&agent.setup().http(), "/v1/decide", &json!({})).expect("an answer")
                        };
                        let allowed = response.status == 200 && !response.body.contains("\"allowed\":false");
                        (begin.elapsed(), allowed, response.header("retry-after").map(str::to_owned))
                    })
                })
                .collect();
            asked.into_iter().map(|asked| asked.join().expect("a thread")).collect()
        });
        let mut turns: Vec<_> = answers.iter().filter(|(_, allowed, _)| *allowed).map(|(at, _, _)| *at).collect();
        turns.sort();
        // One at once and ten within 500 ms; more if asking took its time.
        assert!((11..20).contains(&turns.len()), "{answers:?}");
        for (number, at) in turns.iter().enumerate() {
            let due = Duration::from_millis(50) * u32::try_from(number).expect("few");
            assert!(*at >= due, "answer {number} at {at:?} in {turns:?}");
        }
        for (_, allowed, retry_after) in &answers {
            assert_eq!(retry_after.is_none(), *allowed, "{answers:?}");
        }
        assert_eq!(agent.metric("limiter_held_answers"), 0.0);
    }
}

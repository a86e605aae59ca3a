//! What rules say of a request: which apply to whom, and which never do. Against the real binary; no root, no XDP.

use limiter_tests::{agent::Setup, http};
use serde_json::{Value, json};

const KEYS: &str = "[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"keys.secret\"\n";

/// The ids of all keys, as the operator sees them.
fn key_ids(setup: &Setup) -> Vec<String> {
    let output = setup.run(&["keys", "list"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let is_id = |word: &&str| word.len() == 32 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    text.split_whitespace().filter(is_id).map(str::to_owned).collect()
}

/// Fields of an answer.
fn fields<const N: usize>(answer: &Value, names: [&str; N]) -> [Value; N] {
    names.map(|name| answer[name].clone())
}

mod bypass {
    use super::*;

    /// One request an hour, whoever asks.
    const STRICT: &str = r#"
[plans.free]

[[rules]]
id = "address"
scope = "ip"
limit = 1
window = "1h"

[[rules]]
id = "all-keys"
scope = "key"
limit = 1
window = "1h"
"#;

    fn bypassed(agent: &limiter_tests::agent::Agent<'_>, kind: &str) -> f64 {
        agent.metric(&format!("limiter_bypassed_total{{kind=\"{kind}\"}}"))
    }

    #[test]
    fn what_is_named_is_never_limited_and_yet_counted() {
        let setup = Setup::new(KEYS, "[plans.free]\n");
        let (known, other) = (setup.add_key("c_1", "free"), setup.add_key("c_2", "free"));
        let ids = key_ids(&setup);
        assert_eq!(ids.len(), 2);
        let policy = format!(
            "{STRICT}[[bypass]]\ncidr = [\"203.0.113.0/24\", \"2001:db8:5::/48\"]\n[[bypass]]\nkey_id = \"{}\"\n\
             [[bypass]]\npath = [\"GET,HEAD /healthz\", \"/hooks/**\"]\n",
            ids[0]
        );
        setup.write("policy.toml", &policy);
        let agent = setup.start();
        let before = agent.metric("limiter_checks_total{rule=\"address\",decision=\"allowed\",source=\"memory\"}");
        for (question, kind) in [
            (json!({ "ip": "203.0.113.9" }), "cidr"),
            (json!({ "ip": "::ffff:203.0.113.9" }), "cidr"),
            (json!({ "ip": "2001:db8:5:1::1" }), "cidr"),
            (json!({ "api_key": known, "ip": "192.0.2.77" }), "key_id"),
            (json!({ "ip": "192.0.2.77", "path": "/healthz?x=1" }), "path"),
            (json!({ "ip": "192.0.2.77", "path": "//hooks/a/b", "method": "POST" }), "path"),
            // The prefix is looked at first.
            (json!({ "api_key": known, "ip": "203.0.113.9", "path": "/healthz" }), "cidr"),
        ] {
            let counted = bypassed(&agent, kind);
            for _ in 0..3 {
                let answer = agent.decide(question.clone());
                let [allowed, rule, remaining, reason] = fields(&answer, ["allowed", "rule", "remaining", "reason"]);
                assert_eq!((allowed, rule, remaining), (json!(true), Value::Null, Value::Null), "{question}: {answer}");
                assert_eq!(reason, "bypass", "{question}");
            }
            assert_eq!(bypassed(&agent, kind) - counted, 3.0, "{question}");
            let mut peek = question.clone();
            peek["peek"] = json!(true);
            assert_eq!(agent.decide(peek)["reason"], "bypass");
            assert_eq!(bypassed(&agent, kind) - counted, 3.0, "a question is not counted: {question}");
        }
        let after = agent.metric("limiter_checks_total{rule=\"address\",decision=\"allowed\",source=\"memory\"}");
        assert_eq!(before, after, "no rule was asked");

        // Nobody else is let through, and nothing was charged to the address.
        for (question, rule) in [
            (json!({ "ip": "192.0.2.77", "path": "/healthz", "method": "POST" }), "address"),
            (json!({ "ip": "198.51.100.1", "path": "/static/../healthz" }), "address"),
            (json!({ "ip": "198.51.100.2", "path": "/hooks/..%2fapi" }), "address"),
            (json!({ "ip": "203.0.114.1" }), "address"),
            (json!({ "api_key": other }), "all-keys"),
        ] {
            let [first, second] = [(); 2].map(|()| agent.decide(question.clone()));
            assert_eq!(fields(&first, ["allowed", "reason"]), [json!(true), json!("allowed")], "{question}");
            assert_eq!(fields(&second, ["allowed", "rule"]), [json!(false), json!(rule)], "{question}");
        }
    }

    #[test]
    fn guessing_keys_counts_wherever_it_is_done() {
        let policy = format!("{STRICT}[[bypass]]\npath = \"/healthz\"\n[[bypass]]\ncidr = \"203.0.113.0/24\"\n");
        let setup = Setup::new(KEYS, &policy);
        setup.add_key("c_1", "free");
        let agent = setup.start();
        let guess = |n: usize, ip: &str| {
            let key = format!("guess-{n}");
            let headers = [("X-API-Key", &*key), ("X-Forwarded-For", ip), ("X-Original-URI", "/healthz")];
            agent.check(&headers).status
        };
        assert_eq!([0, 1, 2].map(|n| guess(n, "192.0.2.1")), [401, 429, 429]);
        // A bypass lifts limits; it makes no key valid.
        assert_eq!([0, 1, 2].map(|n| guess(n, "203.0.113.1")), [401, 401, 401]);
        // Without a key the path is let through from anywhere.
        let probe = || agent.check(&[("X-Forwarded-For", "192.0.2.1"), ("X-Original-URI", "/healthz")]);
        for response in [probe(), probe()] {
            assert_eq!((response.status, response.header("ratelimit")), (200, None));
        }
    }

    #[test]
    fn a_header_of_the_clients_own_is_no_way_into_a_bypass() {
        let setup = Setup::new(KEYS, &format!("{STRICT}[[bypass]]\npath = \"/healthz\"\n"));
        let agent = setup.start();
        let ask =
            |headers: &[(&str, &str)]| agent.check(&[&[("X-Forwarded-For", "192.0.2.1")], headers].concat()).status;
        assert_eq!(ask(&[("X-Forwarded-Uri", "/api")]), 200);
        // Which of two headers is the gateway's cannot be told.
        assert_eq!(ask(&[("X-Forwarded-Uri", "/api"), ("X-Original-URI", "/healthz")]), 429);
        assert_eq!(ask(&[("X-Original-URI", "/healthz"), ("X-Forwarded-Uri", "/healthz")]), 200);
        let appended = http::get(
            &setup.http(),
            "/v1/check/api",
            &[("X-Forwarded-For", "192.0.2.1"), ("X-Original-URI", "/healthz")],
        );
        assert_eq!(appended.expect("an answer").status, 429);
    }

    #[test]
    fn a_key_that_nobody_has_is_noted() {
        let policy = format!("[[bypass]]\nkey_id = \"{}\"\n", "0".repeat(32));
        let setup = Setup::new(KEYS, &policy);
        let output = setup.run(&["validate"]);
        assert!(output.status.success(), "{output:?}");
        let notes = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(notes.contains(&format!("note: bypass names the API key {}, which", "0".repeat(32))), "{notes}");

        setup.configure(&format!("{KEYS}order = [\"ip\"]\n"));
        let output = setup.run(&["validate"]);
        assert_eq!(output.status.code(), Some(78));
        assert!(String::from_utf8_lossy(&output.stderr).contains("bypass.key_id: names API keys, and identity.order"));
    }

    #[test]
    fn a_reload_takes_a_bypass_away_and_brings_it_back() {
        let setup = Setup::new(KEYS, STRICT);
        let agent = setup.start();
        let ask = || agent.decide(json!({ "ip": "192.0.2.1" }))["reason"].clone();
        let with = format!("{STRICT}[[bypass]]\ncidr = \"192.0.2.0/24\"\n");
        assert_eq!([ask(), ask()], ["allowed", "rate_limit_exceeded"]);
        agent.reload(&with);
        assert_eq!([ask(), ask()], ["bypass", "bypass"]);
        agent.reload(STRICT);
        assert_eq!(ask(), "rate_limit_exceeded");
        assert_eq!(bypassed(&agent, "cidr"), 2.0);
    }
}

//! What rules say of a request: which apply to whom, and which never do. Against the real binary; no root, no XDP.

use std::time::Duration;

use limiter_tests::{agent::Setup, eventually::until, http};
use serde_json::{Value, json};

/// How long a reload may take.
const WAIT: Duration = Duration::from_secs(30);
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
            (json!({ "ip": "192.0.2.77", "path": "/hooks//a/b", "method": "POST" }), "path"),
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
        assert_eq!(ask(&[("X-Forwarded-Uri", "https://example.org/healthz?x")]), 200);
        // Where the host ends can be read otherwise.
        assert_eq!(ask(&[("X-Forwarded-Uri", "https://example.org\\api/healthz")]), 429);
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

mod whose {
    use super::*;

    const PLANS: &str = r#"
[plans.free]

[plans.pro]
inherits = "free"

[plans.enterprise]
inherits = "pro"

[[rules]]
id = "search"
scope = "user"
limit = 2
plans = { free = 3, enterprise = 9 }
window = "1h"

[[rules]]
id = "bucket"
scope = "user"
limit = 50
window = "1h"
algorithm = "token_bucket"

[[overrides]]
client = "acme"
rule = "search"
limit = 5

[[overrides]]
client = "zoo"
rule = "search"
limit = "unlimited"
"#;

    /// How many of one user's requests pass.
    fn admitted(agent: &limiter_tests::agent::Agent<'_>, question: &Value) -> usize {
        (0..60).take_while(|_| agent.decide(question.clone())["allowed"] == json!(true)).count()
    }

    #[test]
    fn plans_inherit_and_clients_have_limits_of_their_own() {
        let setup = Setup::new(KEYS, PLANS);
        let acme = setup.add_key("acme", "enterprise");
        let agent = setup.start();
        for (question, expected, rule) in [
            (json!({ "user": "a" }), 2, "search"),
            (json!({ "user": "b", "plan": "free" }), 3, "search"),
            (json!({ "user": "c", "plan": "pro" }), 3, "search"),
            (json!({ "user": "d", "plan": "enterprise" }), 9, "search"),
            (json!({ "api_key": acme }), 5, "search"),
            (json!({ "user": "zoo", "plan": "free" }), 50, "bucket"),
            // Not the client, however it is spelled.
            (json!({ "user": "Acme" }), 2, "search"),
        ] {
            assert_eq!(admitted(&agent, &question), expected, "{question}");
            let denied = agent.decide(question.clone());
            assert_eq!(fields(&denied, ["allowed", "rule", "remaining"]), [json!(false), json!(rule), json!(0)]);
        }
        // Counters stay: more for a client that has used five, and less.
        agent.reload(&PLANS.replace("limit = 5\n", "limit = 7\n"));
        assert_eq!(admitted(&agent, &json!({ "user": "acme" })), 2);
        agent.reload(&PLANS.replace("limit = 5\n", "limit = 1\n"));
        let denied = agent.decide(json!({ "user": "acme" }));
        assert_eq!(fields(&denied, ["allowed", "limit", "remaining"]), [json!(false), json!(1), json!(0)]);
    }

    #[test]
    fn attributes_are_counted_by_value_and_only_where_they_are_given() {
        let policy = "[[rules]]\nid = \"tenant\"\nscope = \"attribute:tenant\"\nlimit = 2\nwindow = \"1h\"\n\
                      [[rules]]\nid = \"region\"\nscope = \"attribute:region\"\nlimit = 3\nwindow = \"1h\"\n\
                      [[rules]]\nid = \"both\"\nscope = \"attribute:tenant\"\nlimit = 5\nwindow = \"1h\"\nmode = \"shadow\"\n";
        let setup = Setup::new(KEYS, policy);
        let agent = setup.start();
        let ask = |attributes: Value| agent.decide(json!({ "attributes": attributes }));
        let decided = |attributes: Value| fields(&ask(attributes), ["allowed", "rule"]);
        let [yes, no] = [true, false].map(|allowed| json!(allowed));
        assert_eq!(decided(json!({ "tenant": "x" })), [yes.clone(), json!("tenant")]);
        assert_eq!(decided(json!({ "tenant": "x" })), [yes.clone(), json!("tenant")]);
        assert_eq!(decided(json!({ "tenant": "x" })), [no.clone(), json!("tenant")]);
        // Another value, the same value of another attribute, and values that differ in what separates.
        for attributes in
            [json!({ "tenant": "X" }), json!({ "region": "x" }), json!({ "tenant": "x:" }), json!({ "tenant": ":x" })]
        {
            assert_eq!(decided(attributes.clone())[0], yes, "{attributes}");
        }
        // Without it the rule does not apply; an attribute that no rule counts by changes nothing.
        for attributes in [json!({}), json!({ "other": "x" })] {
            assert_eq!(decided(attributes), [yes.clone(), Value::Null]);
        }
        // A tenant that is over costs its region nothing.
        for _ in 0..10 {
            assert_eq!(decided(json!({ "tenant": "x", "region": "eu" })), [no.clone(), json!("tenant")]);
        }
        assert_eq!(ask(json!({ "region": "eu" }))["remaining"], 2);
        let unknown_key = agent.decide(json!({ "api_key": "guess", "attributes": { "tenant": "y" } }));
        assert_eq!(unknown_key["reason"], "unauthenticated");
        assert_eq!(ask(json!({ "tenant": "y" }))["remaining"], 1, "a request without a valid key is charged to nobody");

        let many: serde_json::Map<String, Value> = (0..17).map(|n| (format!("a{n}"), json!("x"))).collect();
        for (attributes, message) in [
            (json!({ "tenant": "" }), "must have 1 to 256 bytes"),
            (json!({ "tenant": "x".repeat(257) }), "must have 1 to 256 bytes"),
            (json!({ "a b": "x" }), "the name of an attribute"),
            (json!({ "tenant": 5 }), "expected a string"),
            (Value::from(many), "at most 16"),
        ] {
            let question = json!({ "attributes": attributes });
            let response = http::post(&setup.http(), "/v1/decide", &question).expect("an answer");
            assert!(response.status == 400 && response.body.contains(message), "{question}: {response:?}");
        }
        let output = setup.run(&["check", "--ip", "192.0.2.1", "--attribute", "tenant=z"]);
        assert!(String::from_utf8_lossy(&output.stdout).contains("by rule tenant: 1 of 2 left"), "{output:?}");
    }
}

mod endpoints {
    use super::*;

    /// A rule a group, all of one scope, with limits that tell them apart.
    fn policy(rules: &[(&str, &str, &str)]) -> String {
        let rule = |(number, (id, pattern, fields)): (usize, &(&str, &str, &str))| {
            let endpoint = match *pattern {
                "" => (String::new(), String::new()),
                pattern => {
                    let group = format!("[[endpoints]]\nname = \"{id}\"\nmatch = [\"{pattern}\"]\n");
                    (group, format!("endpoint = \"{id}\"\n"))
                }
            };
            let limit = 100 + number;
            format!(
                "{}[[rules]]\nid = \"{id}\"\nscope = \"user\"\nwindow = \"1h\"\nlimit = {limit}\n{}{fields}\n",
                endpoint.0, endpoint.1
            )
        };
        rules.iter().enumerate().map(rule).collect()
    }

    const SPECIFIC: &str = "match = \"most_specific\"";

    /// The rules that apply to a request: those that deny it once they are too low for it.
    fn charged(rules: &[(&str, &str, &str)], path: &str) -> Vec<String> {
        let setup = Setup::new(KEYS, &policy(rules));
        let agent = setup.start();
        let mut charged = Vec::new();
        for (number, (id, ..)) in rules.iter().enumerate() {
            let limit = 100 + number;
            let low = policy(rules).replace(&format!("limit = {limit}\n"), "limit = 1\n");
            agent.reload(&low);
            let answer = agent.decide(json!({ "user": "u", "path": path, "cost": 2, "peek": true }));
            let shadow = answer["shadow"].as_array().expect("a list").iter().any(|rule| *rule == json!(id));
            if answer["rule"] == json!(id) && answer["allowed"] == json!(false) || shadow {
                charged.push((*id).to_owned());
            }
        }
        charged
    }

    #[test]
    fn all_rules_apply_or_the_most_specific() {
        let all = "";
        for (name, rules, path, expected) in [
            (
                "all",
                &[("api", "/api/**", all), ("search", "/api/search", all)][..],
                "/api/search",
                &["api", "search"][..],
            ),
            (
                "one gives way",
                &[("api", "/api/**", SPECIFIC), ("search", "/api/search", SPECIFIC)],
                "/api/search",
                &["search"],
            ),
            ("elsewhere", &[("api", "/api/**", SPECIFIC), ("search", "/api/search", SPECIFIC)], "/api/x", &["api"]),
            (
                "only the marked",
                &[("api", "/api/**", all), ("search", "/api/search", SPECIFIC)],
                "/api/search",
                &["api", "search"],
            ),
            (
                "no endpoint is the least",
                &[("rest", "", SPECIFIC), ("search", "/api/search", SPECIFIC)],
                "/api/search",
                &["search"],
            ),
            ("and the rest", &[("rest", "", SPECIFIC), ("search", "/api/search", SPECIFIC)], "/x", &["rest"]),
            ("equals", &[("a", "/api/*", SPECIFIC), ("b", "/api/*", SPECIFIC)], "/api/x", &["a", "b"]),
            (
                "four kinds",
                &[
                    ("rest", "/**", SPECIFIC),
                    ("one", "/*/x", SPECIFIC),
                    ("prefix", "/a*/x", SPECIFIC),
                    ("exact", "/ab/x", SPECIFIC),
                ],
                "/ab/x",
                &["exact"],
            ),
            ("a method", &[("any", "/x", SPECIFIC), ("get", "GET /x", SPECIFIC)], "/x", &["get"]),
            // A server may read it as either, so it is limited as both.
            (
                "no way around",
                &[("api", "/api/**", SPECIFIC), ("health", "/health", SPECIFIC)],
                "/api/x%2F..%2F..%2Fhealth",
                &["api", "health"],
            ),
            (
                "no way around the rest",
                &[("rest", "", SPECIFIC), ("health", "/health", SPECIFIC)],
                "/api/x%2F..%2F..%2Fhealth",
                &["rest", "health"],
            ),
            // What only counts takes no limit away.
            (
                "shadow",
                &[
                    ("api", "/api/**", SPECIFIC),
                    ("search", "/api/search", "match = \"most_specific\"\nmode = \"shadow\""),
                ],
                "/api/search",
                &["api", "search"],
            ),
            (
                "shadow gives way",
                &[
                    ("api", "/api/**", "match = \"most_specific\"\nmode = \"shadow\""),
                    ("search", "/api/search", SPECIFIC),
                ],
                "/api/search",
                &["search"],
            ),
            (
                "off",
                &[("api", "/api/**", SPECIFIC), ("search", "/api/search", "match = \"most_specific\"\nmode = \"off\"")],
                "/api/search",
                &["api"],
            ),
        ] {
            assert_eq!(charged(rules, path), expected, "{name}");
        }
    }

    #[test]
    fn scopes_do_not_give_way_to_each_other() {
        let policy = "[[endpoints]]\nname = \"api\"\nmatch = [\"/api/**\"]\n[[endpoints]]\nname = \"search\"\nmatch = [\"/api/search\"]\n\
                      [[rules]]\nid = \"by-address\"\nscope = \"ip\"\nendpoint = \"api\"\nmatch = \"most_specific\"\nlimit = 1\nwindow = \"1h\"\n\
                      [[rules]]\nid = \"by-user\"\nscope = \"user\"\nendpoint = \"search\"\nmatch = \"most_specific\"\nlimit = 5\nwindow = \"1h\"\n";
        let setup = Setup::new(KEYS, policy);
        let agent = setup.start();
        let ask = || agent.decide(json!({ "user": "u", "ip": "192.0.2.1", "path": "/api/search" }));
        assert_eq!(ask()["allowed"], true);
        assert_eq!(fields(&ask(), ["allowed", "rule"]), [json!(false), json!("by-address")]);
    }
}

mod modes {
    use super::*;

    /// Rules that press in different ways, each in the mode that is asked for.
    fn policy(mode: &str) -> String {
        format!(
            "[[rules]]\nid = \"base\"\nscope = \"user\"\nlimit = 40\nwindow = \"1h\"\n\
             [[endpoints]]\nname = \"api\"\nmatch = [\"/api/**\"]\n\
             [[rules]]\nid = \"window\"\nscope = \"user\"\nlimit = 6\nwindow = \"1h\"\nmode = \"{mode}\"\n\
             [[rules]]\nid = \"everybody\"\nscope = \"global\"\nlimit = 1000\nwindow = \"1h\"\nmode = \"{mode}\"\n\
             [[rules]]\nid = \"bucket\"\nscope = \"ip\"\nlimit = 9\nwindow = \"1h\"\nalgorithm = \"token_bucket\"\nendpoint = \"api\"\nmode = \"{mode}\"\n\
             [[rules]]\nid = \"log\"\nscope = \"attribute:tenant\"\nlimit = 4\nwindow = \"1h\"\nalgorithm = \"sliding_log\"\nmode = \"{mode}\"\n"
        )
    }

    fn questions() -> Vec<Value> {
        let question = |n: usize| {
            json!({
                "user": format!("u{}", n % 3),
                "ip": format!("192.0.2.{}", n % 2),
                "path": (["/api/x", "/y"][n / 2 % 2]),
                "cost": ([1, 1, 2, 0, 1, -1][n % 6]),
                "attributes": { "tenant": format!("t{}", n % 4) },
            })
        };
        (0..120).map(question).collect()
    }

    #[test]
    fn shadow_and_off_change_no_answer() {
        let [without, shadow] = ["off", "shadow"].map(|mode| {
            let setup = Setup::new(KEYS, &policy(mode));
            let agent = setup.start();
            questions().into_iter().map(|question| agent.decide(question)).collect::<Vec<_>>()
        });
        let mut would_deny = 0;
        for (question, (without, shadow)) in questions().iter().zip(without.iter().zip(&shadow)) {
            let names = ["allowed", "rule", "limit", "remaining", "reason"];
            assert_eq!(fields(without, names), fields(shadow, names), "{question}");
            assert_eq!(without["shadow"], json!([]));
            would_deny += usize::from(shadow["shadow"] != json!([]));
        }
        assert!((30..120).contains(&would_deny), "{would_deny}");
    }

    /// Two rules that differ in their mode alone, side by side in one agent, asked the same of different users.
    #[test]
    fn a_shadow_rule_counts_what_its_enforced_twin_denies() {
        for fields in [
            "limit = 5\nwindow = \"1h\"",
            "limit = 5\nwindow = \"1h\"\nalgorithm = \"fixed_window\"",
            "limit = 5\nwindow = \"1h\"\nalgorithm = \"token_bucket\"\nburst_factor = 1.5",
            "limit = 5\nwindow = \"1h\"\nalgorithm = \"sliding_log\"\ncost = 2",
            "limit = 1\nwindow = \"1h\"\nalgorithm = \"leaky_bucket\"\nburst = 3\nmax_delay = \"1ms\"",
        ] {
            let rule = |id: &str, mode: &str| {
                format!(
                    "[[endpoints]]\nname = \"{id}\"\nmatch = [\"/{id}\"]\n[[rules]]\nid = \"{id}\"\nscope = \"user\"\n\
                     endpoint = \"{id}\"\nmode = \"{mode}\"\n{fields}\n"
                )
            };
            let policy = rule("enforced", "enforce") + &rule("shadowed", "shadow");
            let setup = Setup::new(KEYS, &policy);
            let agent = setup.start();
            let mut denied = 0;
            for n in 0..60 {
                let ask = |id: &str| {
                    let question = json!({ "user": format!("u{}", n % 3), "path": format!("/{id}"), "cost": ([1, 1, 2, 0, -1][n % 5]) });
                    agent.decide(question)
                };
                let (enforced, shadowed) = (ask("enforced"), ask("shadowed"));
                assert_eq!(shadowed["allowed"], true, "{fields}");
                let would_deny = shadowed["shadow"] == json!(["shadowed"]);
                assert_eq!(enforced["allowed"] == json!(false), would_deny, "{fields} {n}: {enforced} {shadowed}");
                denied += usize::from(would_deny);
            }
            assert!(denied > 10, "{fields}: {denied}");
            let count = |rule: &str, decision: &str| {
                agent.metric(&format!(
                    "limiter_checks_total{{rule=\"{rule}\",decision=\"{decision}\",source=\"memory\"}}"
                ))
            };
            let of_enforced = count("enforced", "denied") + count("enforced", "unsatisfiable");
            assert!(of_enforced > 0.0, "{fields}");
            assert_eq!(count("shadowed", "shadow_denied"), of_enforced, "{fields}");
        }
    }

    #[test]
    fn a_twin_counts_what_a_rule_denies_whichever_rule_decides() {
        let policy = "[[rules]]\nid = \"own\"\nscope = \"user\"\nlimit = 2\nwindow = \"1h\"\n\
                      [[rules]]\nid = \"twin\"\nscope = \"user\"\nlimit = 2\nwindow = \"1h\"\nmode = \"shadow\"\n\
                      [[rules]]\nid = \"all\"\nscope = \"global\"\nlimit = 5\nwindow = \"30d\"\n";
        let setup = Setup::new(KEYS, policy);
        let agent = setup.start();
        let mut shadowed = 0.0;
        // Most of it is remembered.
        for n in 0..60 {
            let answer = agent.decide(json!({ "user": format!("u{}", n / 4 % 3), "path": "/" }));
            shadowed += if answer["shadow"] == json!(["twin"]) { 1.0 } else { 0.0 };
        }
        let count = |rule: &str, decision: &str| {
            agent.metric(&format!("limiter_checks_total{{rule=\"{rule}\",decision=\"{decision}\",source=\"memory\"}}"))
        };
        let (decided, beside) = (count("own", "denied"), count("own", "also_denied"));
        assert!(decided > 0.0 && beside > 0.0, "{decided} {beside}");
        assert_eq!((count("twin", "shadow_denied"), shadowed), (decided + beside, decided + beside));
    }
}

mod difference {
    use super::*;

    const BEFORE: &str = "[[rules]]\nid = \"search\"\nscope = \"user\"\nlimit = 10\nwindow = \"1h\"\n\
                          [[rules]]\nid = \"old\"\nscope = \"ip\"\nlimit = 10\nwindow = \"1h\"\n\
                          [[rules]]\nid = \"same\"\nscope = \"global\"\nlimit = 1000\nwindow = \"1h\"\n";

    #[test]
    fn says_what_would_change_and_for_how_many_clients() {
        let setup = Setup::new(KEYS, BEFORE);
        let after = BEFORE.replacen("limit = 10", "limit = 5", 1).replace("\"old\"", "\"new\"");
        setup.write("after.toml", &after);
        let file = setup.path("after.toml").display().to_string();
        let diff = |arguments: &[&str]| {
            let output = setup.run(&[&["policy", "diff", file.as_str()], arguments].concat());
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            (output.status.code(), text(&output.stdout), text(&output.stderr))
        };
        // Without an agent.
        let changes = |search: &str, old: &str| {
            format!(
                "+ rule new\n- rule old{old}\n~ rule search{search}\n    limit: 10 by sliding_window -> 5 by sliding_window\n"
            )
        };
        let (code, text, note) = diff(&[]);
        assert_eq!((code, text), (Some(0), changes("", "")));
        assert!(note.starts_with("note: no agent runs"), "{note}");

        let agent = setup.start();
        for n in 0..7 {
            assert_eq!(agent.decide(json!({ "user": format!("u{n}"), "ip": "192.0.2.1" }))["allowed"], true);
        }
        let (code, text, note) = diff(&[]);
        assert_eq!((code, text), (Some(0), changes("  (7 known clients)", "  (1 known client)")));
        assert_eq!(note, "");
        let (code, text, _) = diff(&["--json"]);
        let report: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((code, &report["differs"], &report["agent"]), (Some(0), &json!(true), &json!(true)));
        let search = &report["changes"][2];
        assert_eq!(
            fields(search, ["kind", "name", "change", "clients"]),
            [json!("rule"), json!("search"), json!("changed"), json!(7)]
        );
        assert_eq!(search["fields"][0]["after"], "5 by sliding_window");

        // Nothing was changed by asking, and then nothing differs.
        assert_eq!(agent.decide(json!({ "user": "u0" }))["limit"], 10);
        setup.write("after.toml", BEFORE);
        let (code, text, _) = diff(&[]);
        let in_force = format!("no difference from the policy in force of {}\n", setup.path("policy.toml").display());
        assert_eq!((code, text), (Some(0), in_force));

        // What the agent has refused is not what is in force.
        setup.write("policy.toml", &BEFORE[..BEFORE.len() / 2]);
        agent.hang_up();
        until("it is refused", WAIT, || (agent.reloads("invalid") == 1.0).then_some(()));
        setup.write("after.toml", &after);
        let (code, text, _) = diff(&[]);
        assert_eq!((code, text), (Some(0), changes("  (7 known clients)", "  (1 known client)")));

        // Mistakes of the file are said as at a start, also those that only the configuration makes one.
        for (wrong, says) in [
            ("alow = []\n", "after.toml:1: alow: unknown field"),
            (
                "[[packet_rules]]\nid = \"p\"\ncidr = \"2001:db8::1/128\"\npackets = { rate = \"9/s\", burst = 9 }\n",
                "packet_rules.cidr: the rule \"p\" limits 2001:db8::1/128",
            ),
        ] {
            setup.write("after.toml", wrong);
            let (code, _, errors) = diff(&[]);
            assert_eq!(code, Some(78), "{wrong}");
            assert!(errors.contains(says), "{errors}");
        }
    }
}

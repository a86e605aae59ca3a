//! What answers look like: headers as other programs read them, and bodies as clients ask for them.

use limiter_tests::{
    agent::{Agent, Setup},
    http::{self, Connection, Response},
};
use serde_json::{Value, json};
use sfv::{BareItem, List, ListEntry, Parser};

const KEYS: &str = "[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"keys.secret\"\n";
const PROBLEM: &str = "application/problem+json";
const CLIENT: (&str, &str) = ("X-Forwarded-For", "192.0.2.1");

/// A rule of scope `ip` for the path that is its name.
fn rule(name: &str, fields: &str) -> String {
    format!(
        "[[endpoints]]\nname = \"{name}\"\nmatch = [\"/{name}\"]\n\
         [[rules]]\nid = \"{name}\"\nscope = \"ip\"\nendpoint = \"{name}\"\n{fields}\n"
    )
}

fn ask(agent: &Agent<'_>, path: &str, headers: &[(&str, &str)]) -> Response {
    agent.check(&[&[CLIENT, ("X-Original-URI", path)], headers].concat())
}

/// The one member of a field: its name and its parameters.
fn parsed(response: &Response, field: &str) -> (String, Vec<(String, i64)>) {
    let text = response.header(field).unwrap_or_else(|| panic!("{field} is missing: {response:?}"));
    let list: List = Parser::new(text).parse().unwrap_or_else(|error| panic!("{field}: {text}: {error}"));
    let [ListEntry::Item(item)] = &list[..] else { panic!("{field}: {text} is not one item") };
    let BareItem::String(name) = &item.bare_item else { panic!("{field}: {text} does not begin with a string") };
    let parameters = item.params.iter().map(|(key, value)| {
        let BareItem::Integer(number) = value else { panic!("{field}: {key} is {value:?}") };
        (key.as_str().to_owned(), i64::from(*number))
    });
    (name.as_str().to_owned(), parameters.collect())
}

fn number(response: &Response, header: &str) -> i64 {
    let text = response.header(header).unwrap_or_else(|| panic!("{header} is missing: {response:?}"));
    text.parse().unwrap_or_else(|error| panic!("{header}: {text}: {error}"))
}

fn names(parameters: &[(String, i64)]) -> Vec<&str> {
    parameters.iter().map(|(name, _)| name.as_str()).collect()
}

#[test]
fn every_family_says_the_same_whatever_the_algorithm() {
    // Name, fields, ceiling, window that is told, requests that pass.
    let table = [
        ("sliding", "limit = 3\nwindow = \"1h\"", 3, Some(3600), 3),
        ("fixed", "limit = 3\nwindow = \"1h\"\nalgorithm = \"fixed_window\"", 3, Some(3600), 3),
        ("log", "limit = 3\nwindow = \"1h\"\nalgorithm = \"sliding_log\"", 3, Some(3600), 3),
        ("token", "limit = 2\nwindow = \"1h\"\nalgorithm = \"token_bucket\"\nburst_factor = 1.5", 3, Some(3600), 3),
        // Four every 40 seconds; of the ten that wait, those beyond a second are denied.
        (
            "leaky",
            "limit = 4\nwindow = \"40s\"\nalgorithm = \"leaky_bucket\"\nburst = 9\nmax_delay = \"1s\"",
            10,
            Some(100),
            1,
        ),
        ("odd", "limit = 1\nwindow = \"3599999ms\"", 1, None, 1),
    ];
    let policy: String = table.iter().map(|(name, fields, ..)| rule(name, fields)).collect();
    let setup = Setup::new("[api.headers]\ndraft_03 = true\n", &policy);
    let agent = setup.start();
    for (name, _, ceiling, window, passing) in table {
        for request in 0..=passing {
            let response = ask(&agent, &format!("/{name}"), &[]);
            let is_denied = request == passing;
            assert_eq!(response.status, if is_denied { 429 } else { 200 }, "{name} {request}: {response:?}");

            let (policy_name, policy) = parsed(&response, "ratelimit-policy");
            let mut expected = vec![("q".to_owned(), ceiling)];
            expected.extend(window.map(|seconds| ("w".to_owned(), seconds)));
            assert_eq!((&*policy_name, policy), (name, expected), "{response:?}");

            let (limit_name, limit) = parsed(&response, "ratelimit");
            assert_eq!((&*limit_name, names(&limit)), (name, vec!["r", "t"]), "{response:?}");
            let (remaining, seconds) = (limit[0].1, limit[1].1);
            assert!((0..=ceiling).contains(&remaining) && (0..=7200).contains(&seconds), "{response:?}");
            if is_denied {
                assert_eq!(remaining, 0, "{response:?}");
                let retry_after = number(&response, "retry-after");
                assert!(retry_after >= seconds && retry_after >= 1, "{response:?}");
            } else {
                assert_eq!(response.header("retry-after"), None, "{response:?}");
            }

            for (family, reset) in [("x-ratelimit", None), ("ratelimit", Some(seconds))] {
                assert_eq!(number(&response, &format!("{family}-limit")), ceiling, "{response:?}");
                assert_eq!(number(&response, &format!("{family}-remaining")), remaining, "{response:?}");
                let got = number(&response, &format!("{family}-reset"));
                match reset {
                    Some(seconds) => assert_eq!(got, seconds, "{response:?}"),
                    // The end of a window, in epoch seconds.
                    None => assert!(got > 1_700_000_000, "{response:?}"),
                }
            }
        }
    }
}

#[test]
fn families_can_be_switched_off_and_retry_after_stays() {
    let policy = rule("a", "limit = 1\nwindow = \"1h\"");
    for (families, present) in [
        ("", [true, true, false]),
        ("x_ratelimit = false", [false, true, false]),
        ("draft_10 = false", [true, false, false]),
        ("x_ratelimit = false\ndraft_10 = false\ndraft_03 = true", [false, false, true]),
    ] {
        let setup = Setup::new(&format!("[api.headers]\n{families}\n"), &policy);
        let agent = setup.start();
        ask(&agent, "/a", &[]);
        let decided = http::post(&setup.http(), "/v1/decide", &json!({ "ip": "192.0.2.1", "path": "/a" }));
        for response in [ask(&agent, "/a", &[]), decided.expect("an answer")] {
            let found =
                ["x-ratelimit-limit", "ratelimit-policy", "ratelimit-limit"].map(|h| response.header(h).is_some());
            assert_eq!(found, present, "{families}: {response:?}");
            assert!(response.header("retry-after").is_some(), "{families}: {response:?}");
        }
    }
}

#[test]
fn the_largest_limit_fits_a_structured_field() {
    let setup = Setup::new("", &rule("huge", "limit = 9007199254740992\nwindow = \"366d\""));
    let agent = setup.start();
    let response = ask(&agent, "/huge", &[]);
    let (_, policy) = parsed(&response, "ratelimit-policy");
    assert_eq!(policy, [("q".to_owned(), 999_999_999_999_999), ("w".to_owned(), 366 * 86_400)]);
    let (_, limit) = parsed(&response, "ratelimit");
    assert_eq!(limit[0], ("r".to_owned(), 999_999_999_999_999));
    assert_eq!(response.header("x-ratelimit-limit"), Some("9007199254740992"));
    assert_eq!(response.header("x-ratelimit-remaining"), Some("9007199254740991"));
}

#[test]
fn refusals_are_problem_details_for_who_would_rather_have_them() {
    let setup = Setup::new(KEYS, &format!("[plans.free]\n{}", rule("a", "limit = 1\nwindow = \"1h\"")));
    let key = setup.add_key("c_1", "free");
    let agent = setup.start();
    assert_eq!(ask(&agent, "/a", &[("X-API-Key", &key)]).status, 200);
    for (accept, kind) in [
        (None, "application/json"),
        (Some("*/*"), "application/json"),
        (Some("text/html,application/xhtml+xml,*/*;q=0.8"), "application/json"),
        (Some("application/problem+json;q=0.4, application/json;q=0.5"), "application/json"),
        (Some("application/problem+json;q=0"), "application/json"),
        (Some("application/json, application/problem+json"), PROBLEM),
        (Some("application/problem+json;q=0.5, */*;q=0.4"), PROBLEM),
    ] {
        let headers: Vec<_> = accept.map(|accept| ("Accept", accept)).into_iter().collect();
        let denied = ask(&agent, "/a", &headers);
        assert_eq!((denied.status, denied.header("content-type")), (429, Some(kind)), "{accept:?}");
        assert_eq!(denied.header("vary"), Some("accept"));
        let (body, wait) = (denied.json(), number(&denied, "retry-after"));
        let expected = match kind {
            PROBLEM => json!({
                "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
                "title": "Quota Exceeded",
                "status": 429,
                "detail": "Too many requests",
                "violated-policies": ["a"],
                "error": "rate_limit_exceeded",
                "retry_after_seconds": wait,
            }),
            _ => json!({
                "error": "rate_limit_exceeded", "message": "Too many requests", "retry_after_seconds": wait,
            }),
        };
        assert_eq!(body, expected, "{accept:?}");
    }

    // The status that a gateway asks for is the one in the body.
    let target = "/v1/check/a?x=y";
    let appended = http::get(&setup.http(), target, &[CLIENT, ("Accept", PROBLEM)]).expect("an answer");
    assert_eq!((appended.status, &appended.json()["status"]), (429, &json!(429)));
    let headers = [CLIENT, ("X-Original-URI", "/a"), ("Accept", PROBLEM)];
    for status in [401, 403] {
        let target = format!("/v1/check?deny_status={status}");
        let denied = http::get(&setup.http(), &target, &headers).expect("an answer");
        assert_eq!((denied.status, &denied.json()["status"]), (status, &json!(status)));
        assert_eq!(denied.json()["violated-policies"], json!(["a"]));
    }

    // Who tries one key after the other is told so; a key that is not valid is no quota's business.
    let guess =
        |key: &str| ask(&agent, "/a", &[("X-API-Key", key), ("X-Forwarded-For", "192.0.2.9"), ("Accept", PROBLEM)]);
    let (unknown, guessing) = (guess("first"), guess("second"));
    assert_eq!((unknown.status, unknown.header("www-authenticate")), (401, Some("Bearer")));
    let body = unknown.json();
    assert_eq!((&body["type"], &body["title"]), (&json!("about:blank"), &json!("Unauthorized")));
    assert_eq!((&body["violated-policies"], &body["status"]), (&Value::Null, &json!(401)));
    assert_eq!(guessing.status, 429);
    let body = guessing.json();
    assert_eq!(body["type"], "https://iana.org/assignments/http-problem-types#abnormal-usage-detected");
    assert_eq!((&body["title"], &body["violated-policies"]), (&json!("Abnormal Usage Detected"), &json!(["a"])));
}

#[test]
fn a_head_has_the_headers_alone_and_does_not_escape_the_limit_of_get() {
    let policy = "[[endpoints]]\nname = \"a\"\nmatch = [\"GET /a\"]\n\
                  [[rules]]\nid = \"a\"\nscope = \"ip\"\nendpoint = \"a\"\nlimit = 4\nwindow = \"1h\"\n";
    let setup = Setup::new("", policy);
    let _agent = setup.start();
    let mut connection = Connection::open(&setup.http()).expect("a connection");
    let mut ask = |method: &str, target: &str, headers: &[(&str, &str)]| {
        connection.request(method, target, &[&[CLIENT], headers].concat(), "").expect("an answer")
    };
    // By the call's own method, by a header, and as a GET.
    let uri = ("X-Original-URI", "/a");
    assert_eq!(number(&ask("HEAD", "/v1/check/a", &[]), "x-ratelimit-remaining"), 3);
    let by_header = ask("GET", "/v1/check", &[uri, ("X-Original-Method", "HEAD")]);
    assert_eq!(number(&by_header, "x-ratelimit-remaining"), 2);
    assert_eq!(number(&ask("GET", "/v1/check", &[uri]), "x-ratelimit-remaining"), 1);
    // A preflight is an OPTIONS, of which this rule says nothing.
    let preflight = [uri, ("Origin", "https://example.org"), ("Access-Control-Request-Method", "GET")];
    let options = ask("OPTIONS", "/v1/check", &preflight);
    assert_eq!((options.status, options.header("x-ratelimit-remaining")), (200, None));
    assert_eq!(number(&ask("HEAD", "/v1/check/a", &[]), "x-ratelimit-remaining"), 0);

    // The connection stays in step, so nothing came after the head.
    let head = ask("HEAD", "/v1/check/a", &[]);
    let get = ask("GET", "/v1/check/a", &[]);
    assert_eq!((head.status, get.status), (429, 429));
    assert_eq!((head.body.as_str(), head.header("content-type")), ("", get.header("content-type")));
    assert!(head.header("retry-after").is_some() && head.header("ratelimit").is_some(), "{head:?}");
    assert_eq!(head.header("content-length"), get.header("content-length"));
    assert!(!get.body.is_empty());
}

#[test]
fn options_count_where_a_rule_is_for_every_method() {
    let setup = Setup::new("", "[[rules]]\nid = \"all\"\nscope = \"ip\"\nlimit = 2\nwindow = \"1h\"\n");
    let _agent = setup.start();
    let preflight = [CLIENT, ("Origin", "https://example.org"), ("Access-Control-Request-Method", "GET")];
    let statuses = [(); 3]
        .map(|()| http::request(&setup.http(), "OPTIONS", "/v1/check", &preflight, "").expect("an answer").status);
    assert_eq!(statuses, [200, 200, 429]);
}

#[test]
fn a_rule_answers_in_its_own_words() {
    let policy = [
        "[responses.page]\nstatus = 503\ncontent_type = \"text/html; charset=utf-8\"\n\
         body = \"<p>{rule}: {remaining} of {limit}, again in {retry_after_seconds} s, at {reset}</p>\"\n\
         headers = { Cache-Control = \"no-store\", X-Rule = \"{rule};{limit}\" }\n"
            .to_owned(),
        rule("page", "limit = 1\nwindow = \"1h\"\nresponse = \"page\""),
        rule(
            "json",
            "limit = 1\nwindow = \"1h\"\nalgorithm = \"token_bucket\"\n\
             response = { content_type = \"application/json\", body = '{\"r\":\"{rule}\",\"s\":{retry_after_seconds}}' }",
        ),
        rule("status", "limit = 1\nwindow = \"1h\"\nresponse = { status = 420, headers = { X-A = \"b\" } }"),
        rule("shadow", "limit = 1\nwindow = \"1h\"\nmode = \"shadow\"\nresponse = \"page\""),
    ];
    let setup = Setup::new("", &policy.concat());
    let agent = setup.start();
    for path in ["/page", "/json", "/status", "/shadow"] {
        let allowed = ask(&agent, path, &[("Accept", PROBLEM)]);
        assert_eq!((allowed.status, &*allowed.body, allowed.header("x-rule")), (200, "", None), "{path}");
    }
    assert_eq!(ask(&agent, "/shadow", &[]).status, 200, "shadow mode words nothing");

    let page = ask(&agent, "/page", &[("Accept", PROBLEM)]);
    assert_eq!((page.status, page.header("content-type")), (503, Some("text/html; charset=utf-8")));
    let (wait, reset) = (number(&page, "retry-after"), number(&page, "x-ratelimit-reset"));
    assert_eq!(page.body, format!("<p>page: 0 of 1, again in {wait} s, at {reset}</p>"));
    assert_eq!((page.header("cache-control"), page.header("x-rule")), (Some("no-store"), Some("page;1")));
    let headers = [CLIENT, ("X-Original-URI", "/page")];
    let asked = http::get(&setup.http(), "/v1/check?deny_status=403", &headers).expect("an answer");
    assert_eq!((asked.status, asked.header("x-rule")), (403, Some("page;1")), "{asked:?}");
    assert!(asked.body.starts_with("<p>page:"), "{asked:?}");
    let head = http::request(&setup.http(), "HEAD", "/v1/check/page", &[CLIENT], "").expect("an answer");
    assert_eq!((head.status, head.header("content-type")), (503, Some("text/html; charset=utf-8")));

    let json = ask(&agent, "/json", &[]);
    assert_eq!((json.status, json.header("content-type")), (429, Some("application/json")));
    assert_eq!(json.json(), json!({ "r": "json", "s": number(&json, "retry-after") }));

    // Without a body of its own, the usual one with the rule's status.
    let status = ask(&agent, "/status", &[("Accept", PROBLEM)]);
    assert_eq!((status.status, status.header("content-type"), status.header("x-a")), (420, Some(PROBLEM), Some("b")));
    assert_eq!(status.json()["status"], 420);

    // A mistake leaves the old words in force, and says where it is.
    setup.write("policy.toml", &policy.concat().replace("{remaining}", "{left}"));
    agent.hang_up();
    limiter_tests::eventually::until("the policy is refused", limiter_tests::agent::START, || {
        (agent.reloads("invalid") > 0.0).then_some(())
    });
    let error = agent.status()["policy"]["error"].to_string();
    assert!(error.contains("responses.page.body: {left} is not a placeholder"), "{error}");
    assert!(ask(&agent, "/page", &[]).body.starts_with("<p>page: 0 of 1"));
}

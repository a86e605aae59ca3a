//! Limits that give way to the load of the origin, and come back.

use std::net::SocketAddr;

use limiter_tests::{
    agent::{Agent, START, Setup},
    eventually::until,
    http::{self, Address, Response},
    netns::{CLIENT_V4, GATEWAY_V4, TestNet},
};
use serde_json::{Value, json};

const FAST: &str = "[api.pressure]\ninterval = \"100ms\"\nexpires = \"1s\"\n";
/// All limits are 1000, and 100 at the floor; the whole way back takes ten steps.
const ADAPTIVE: &str =
    "adaptive = { floor = 100, target = 0.8, target_latency = \"200ms\", decrease = 0.5, recover = \"1s\" }";

fn rule(id: &str, fields: &str) -> String {
    format!(
        "[[endpoints]]\nname = \"{id}\"\nmatch = [\"/{id}\"]\n\
         [[rules]]\nid = \"{id}\"\nscope = \"user\"\nendpoint = \"{id}\"\nwindow = \"1h\"\n{fields}\n"
    )
}

fn report(setup: &Setup, load: Value) -> Response {
    http::post(&setup.http(), "/v1/pressure", &load).expect("an answer")
}

fn peek(agent: &Agent<'_>, id: &str) -> Value {
    agent.decide(json!({ "user": "u_1", "path": format!("/{id}"), "peek": true }))
}

fn limit(agent: &Agent<'_>, id: &str) -> u64 {
    peek(agent, id)["limit"].as_u64().expect("a number")
}

fn adaptive(agent: &Agent<'_>, index: usize) -> Value {
    agent.status()["rules"][index]["adaptive"].clone()
}

/// Has `say` said until a limit is `expected`; every limit on the way is within the bounds, and moves one way.
fn moves_to(agent: &Agent<'_>, id: &str, expected: u64, mut say: impl FnMut()) {
    let mut last = limit(agent, id);
    until(&format!("the limit of {id} is {expected}"), START, || {
        say();
        let now = limit(agent, id);
        assert!((100..=1000).contains(&now), "{now}");
        assert!(now == last || (now > last) == (expected > last), "{last}, then {now}, on the way to {expected}");
        last = now;
        (now == expected).then_some(())
    });
}

#[test]
fn limits_give_way_to_the_floor_and_recover_whatever_the_algorithm() {
    let table = [
        ("sliding", "limit = 1000"),
        ("fixed", "limit = 1000\nalgorithm = \"fixed_window\""),
        ("log", "limit = 1000\nalgorithm = \"sliding_log\""),
        ("token", "limit = 1000\nalgorithm = \"token_bucket\""),
    ];
    let mut policy: String = table.iter().map(|(id, fields)| rule(id, &format!("{fields}\n{ADAPTIVE}"))).collect();
    policy.push_str(&rule("steady", "limit = 1000"));
    let setup = Setup::new(FAST, &policy);
    let agent = setup.start();
    for (id, _) in table {
        moves_to(&agent, id, 100, || assert_eq!(report(&setup, json!({ "level": 0.95 })).status, 204));
        assert_eq!(limit(&agent, "steady"), 1000, "a rule that has not opted in stays");

        // It is enforced, and told in every way.
        let ask = |cost: u64| {
            report(&setup, json!({ "level": 1 }));
            agent.decide(json!({ "user": "u_2", "path": format!("/{id}"), "cost": cost }))
        };
        assert_eq!(ask(100)["remaining"], 0, "{id}");
        let denied = ask(1);
        assert_eq!((&denied["allowed"], &denied["limit"]), (&json!(false), &json!(100)), "{id}: {denied}");
        assert!(denied["retry_after_ms"].as_u64().is_some_and(|wait| wait > 0), "{id}: {denied}");
        // More than is left, and not more than there is when the pressure is gone.
        let later = agent.decide(json!({ "user": "u_3", "path": format!("/{id}"), "cost": 1000 }));
        assert_eq!((&later["reason"], &later["retry_after_ms"]), (&json!("rate_limit_exceeded"), &json!(1000)));
        let never = agent.decide(json!({ "user": "u_3", "path": format!("/{id}"), "cost": 1001 }));
        assert_eq!((&never["reason"], &never["retry_after_ms"]), (&json!("cost_exceeds_limit"), &Value::Null));

        moves_to(&agent, id, 1000, || assert_eq!(report(&setup, json!({ "level": 0.1 })).status, 204));
        let used = agent.decide(json!({ "user": "u_2", "path": format!("/{id}") }));
        if id == "token" {
            // A bucket that was empty is empty, and fills at its whole rate again: a unit every 3.6 seconds.
            let wait_ms = used["retry_after_ms"].as_u64().unwrap_or(0);
            assert!(wait_ms <= 3600, "{used}");
        } else {
            assert_eq!((&used["allowed"], &used["remaining"]), (&json!(true), &json!(899)), "{id}: {used}");
        }
    }
}

#[test]
fn a_shaping_rule_lets_requests_leave_more_slowly() {
    let fields = "limit = 3600\nalgorithm = \"leaky_bucket\"\nburst = 9\nadaptive = { floor = 36, decrease = 0.1, recover = \"1s\" }";
    let setup = Setup::new(FAST, &rule("shape", fields));
    let _agent = setup.start();
    let window = || {
        let question = json!({ "user": "u_1", "path": "/shape", "peek": true });
        let response = http::post(&setup.http(), "/v1/decide", &question).expect("an answer");
        response.header("ratelimit-policy").expect("a policy").to_owned()
    };
    assert_eq!(window(), "\"shape\";q=10;w=10", "one a second");
    until("it is at its floor", START, || {
        report(&setup, json!({ "level": 1 }));
        (window() == "\"shape\";q=10;w=1000").then_some(())
    });
    until("it is as fast as ever", START, || {
        report(&setup, json!({ "level": 0 }));
        (window() == "\"shape\";q=10;w=10").then_some(())
    });
}

#[test]
fn reports_expire_and_what_they_did_is_seen() {
    let setup = Setup::new(FAST, &rule("a", &format!("limit = 1000\n{ADAPTIVE}")));
    let agent = setup.start();
    let share = || agent.metric("limiter_adaptive_share{rule=\"a\"}");
    assert_eq!(share(), 1.0);
    assert_eq!(agent.status()["pressure"], json!({ "level": null, "latency_ms": null }));
    // By latency alone; the mean of what was said.
    moves_to(&agent, "a", 100, || {
        report(&setup, json!({ "latency_ms": 400.5 }));
    });
    let status = agent.status();
    assert_eq!(status["pressure"], json!({ "level": null, "latency_ms": 401 }));
    assert_eq!(
        status["rules"][0]["adaptive"],
        json!({
            "share": 0.1, "floor": 100, "ceiling": 1000, "effective_ceiling": 100,
        })
    );
    assert_eq!(share(), 0.1);
    assert_eq!(agent.metric("limiter_pressure_latency_seconds"), 0.4005);
    assert!(agent.metric("limiter_pressure_reports_total{kind=\"latency\"}") >= 1.0);
    let told = String::from_utf8(setup.run(&["status"]).stdout).expect("text");
    assert!(told.contains("rule a gives way to pressure: share 0."), "{told}");
    assert!(told.contains("pressure: latency 401 ms"), "{told}");

    // Another policy keeps the share of a rule that stays.
    agent.reload(&rule("a", &format!("limit = 2000\n{ADAPTIVE}")));
    assert!(share() < 1.0);
    agent.reload(&rule("a", &format!("limit = 1000\n{ADAPTIVE}")));

    // Nobody says anything any more.
    moves_to(&agent, "a", 1000, || {});
    assert_eq!(agent.status()["pressure"], json!({ "level": null, "latency_ms": null }));
    assert_eq!(adaptive(&agent, 0)["share"], 1.0);
}

#[test]
fn a_denial_for_pressure_is_called_so() {
    let policy = format!("[[rules]]\nid = \"a\"\nscope = \"ip\"\nlimit = 1000\nwindow = \"1h\"\n{ADAPTIVE}\n");
    let setup = Setup::new(FAST, &policy);
    let agent = setup.start();
    let spend = json!({ "ip": "192.0.2.1", "cost": 500 });
    assert_eq!(agent.decide(spend)["allowed"], true);
    let headers = [("X-Forwarded-For", "192.0.2.1"), ("Accept", "application/problem+json")];
    let denied = until("500 are too many", START, || {
        report(&setup, json!({ "level": 1 }));
        let response = agent.check(&headers);
        (response.status == 429).then_some(response)
    });
    let problem = denied.json();
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity");
    assert_eq!(problem["violated-policies"], json!(["a"]));
    let told: u64 = denied.header("x-ratelimit-limit").expect("a limit").parse().expect("a number");
    assert!((100..=500).contains(&told), "{denied:?}");
    assert_eq!(denied.header("ratelimit-policy"), Some(&*format!("\"a\";q={told};w=3600")));
    until("they are not any more", START, || (agent.check(&headers).status == 200).then_some(()));
}

#[test]
fn load_is_told_by_header_and_with_a_decision_where_that_is_believed() {
    let policy = rule("a", &format!("limit = 1000\n{ADAPTIVE}"));
    // Whatever a client sends, without the operator's word.
    let setup = Setup::new(FAST, &policy);
    let agent = setup.start();
    let pressed = [("X-Limiter-Pressure", "1")];
    for _ in 0..20 {
        assert_eq!(agent.check(&pressed).status, 200);
    }
    for kind in ["level", "latency", "refused"] {
        assert_eq!(agent.metric(&format!("limiter_pressure_reports_total{{kind=\"{kind}\"}}")), 0.0);
    }
    moves_to(&agent, "a", 100, || {
        agent.decide(json!({ "user": "u_9", "path": "/a", "peek": true, "latency_ms": 900 }));
    });
    for (load, message) in [
        (json!({}), "neither level nor latency_ms"),
        (json!({ "level": 1.5 }), "not a number from 0 to 1"),
        (json!({ "level": 0.5, "latency_ms": -1 }), "latency_ms is not a number"),
        (json!({ "levle": 0.5 }), "unknown field"),
    ] {
        let response = report(&setup, load);
        assert_eq!(response.status, 400, "{response:?}");
        assert!(response.body.contains(message), "{response:?}");
    }
    let question = json!({ "user": "u_1", "latency_ms": "x" });
    assert_eq!(http::post(&setup.http(), "/v1/decide", &question).expect("an answer").status, 400);
    assert_eq!(agent.metric("limiter_pressure_reports_total{kind=\"refused\"}"), 4.0);
    drop(agent);

    let setup = Setup::new(&format!("{FAST}header = true\n"), &policy);
    let agent = setup.start();
    agent.check(&[("X-Limiter-Pressure", "much")]);
    assert_eq!(agent.metric("limiter_pressure_reports_total{kind=\"refused\"}"), 1.0);
    moves_to(&agent, "a", 100, || {
        agent.check(&[("X-Limiter-Pressure", " 0.9 ")]);
    });
    assert_eq!(agent.metric("limiter_pressure_level"), 0.9);
}

#[test]
fn load_is_believed_of_this_host_and_of_trusted_proxies_alone() {
    let net = TestNet::new();
    let http = SocketAddr::new(GATEWAY_V4, 7070);
    let rule = rule("a", &format!("limit = 1000\n{ADAPTIVE}"));
    for (trusted, status, kind) in [("", 403, "refused"), ("\"192.0.2.0/24\", \"CLIENT/32\"", 204, "level")] {
        let setup = Setup::new("", &rule);
        let trusted = trusted.replace("CLIENT", &CLIENT_V4[0].to_string());
        setup.write(
            "limiter.toml",
            &format!(
                "[api]\nhttp = \"{http}\"\nadmin = \"unix:{}\"\n[policy]\nfile = \"policy.toml\"\n{FAST}header = true\n\
                 [identity]\ntrusted_proxies = [{trusted}]\n",
                setup.path("admin.sock").display(),
            ),
        );
        let agent = net.gateway(|| setup.start());
        let address = Address::TcpFrom(CLIENT_V4[0], http);
        let count = || agent.metric(&format!("limiter_pressure_reports_total{{kind=\"{kind}\"}}"));
        let post = |target: &str, body: &Value| net.client(|| http::post(&address, target, body)).expect("an answer");
        assert_eq!(post("/v1/pressure", &json!({ "level": 1 })).status, status);
        assert_eq!(count(), 1.0);
        let check = net.client(|| http::get(&address, "/v1/check", &[("X-Limiter-Pressure", "1")])).expect("an answer");
        assert_eq!((check.status, count()), (200, 2.0));
        if kind == "refused" {
            assert_eq!(post("/v1/decide", &json!({ "latency_ms": 900 })).status, 200, "the question is answered");
            assert_eq!(count(), 3.0);
        }
        // From this host it is.
        let own = net.gateway(|| http::post(&Address::Tcp(http), "/v1/pressure", &json!({ "level": 0.5 })));
        assert_eq!(own.expect("an answer").status, 204);
        assert!(agent.stop().success());
    }
}

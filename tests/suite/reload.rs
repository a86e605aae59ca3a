//! A policy and a configuration that change while the agent runs, through the real binary.

use std::{
    collections::BTreeSet,
    fs,
    net::{SocketAddr, UdpSocket},
    os::unix::fs::symlink,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use aya::{
    maps::loaded_maps,
    programs::{loaded_links, loaded_programs},
};
use limiter_common::schema::SCHEMA_VERSION;
use limiter_tests::{
    agent::{Agent, START, Setup},
    eventually::until,
    fixture::World,
    http,
    ip::{ip, xdp_of},
    netns::{CLIENT_V4, GATEWAY_V4, INTERFACE, SECOND_INTERFACE, TestNet, TestPins},
    object::xdp_object,
    ping_pong::{DENIED, GOOD, PingPong},
};
use limiter_user::{clock::Stopwatch, dataplane::KernelDataplane};
use serde_json::{Value, json};

const WAIT: Duration = Duration::from_secs(30);

fn rule(id: &str, limit: u64) -> String {
    format!("[[rules]]\nid = \"{id}\"\nscope = \"user\"\nlimit = {limit}\nwindow = \"1h\"\n")
}

fn ask(agent: &Agent<'_>, user: &str) -> Value {
    agent.decide(json!({ "user": user }))
}

/// The limit that holds for a user, without taking from it.
fn limit(agent: &Agent<'_>) -> Value {
    agent.decide(json!({ "user": "peeks", "peek": true }))["limit"].clone()
}

fn xdp(net: &TestNet, interfaces: &[&str], more: &str) -> String {
    let pin_dir = net.pin_dir().display();
    format!(
        "[xdp]\ninterfaces = {interfaces:?}\nprotect = [\"udp/80\"]\npin_dir = \"{pin_dir}\"\nmax_sources = 1024\n{more}"
    )
}

fn start<'a>(net: &TestNet, setup: &'a Setup) -> Agent<'a> {
    net.gateway(|| setup.start())
}

#[test]
fn every_way_to_change_the_file_is_noticed_once() {
    let setup = Setup::new("", &rule("r", 1));
    let agent = setup.start();
    let path = |name: &str| setup.path(name);
    let half = || {
        let text = rule("r", 4);
        setup.write("policy.toml", &text[..text.len() / 2]);
        until("half a policy is refused", WAIT, || (agent.reloads("invalid") == 1.0).then_some(()));
        assert_eq!(limit(&agent), 3);
        setup.write("policy.toml", &text);
    };
    // As a disk that is full leaves it.
    let empty = || {
        setup.write("policy.toml", "");
        let error =
            until("an empty policy is refused", WAIT, || agent.status()["policy"]["error"].as_str().map(str::to_owned));
        assert!(error.contains("the file is empty"), "{error}");
        assert_eq!(limit(&agent), 8);
        setup.write("policy.toml", "# nothing is limited\n");
    };
    // As Kubernetes mounts a ConfigMap: a link to a file in a folder that is itself a link.
    let link = || {
        for (folder, limit) in [("v5", 5), ("v6", 6)] {
            fs::create_dir(path(folder)).expect("a folder");
            setup.write(&format!("{folder}/policy.toml"), &rule("r", limit));
        }
        symlink("v5", path("data")).expect("a link");
        symlink("data/policy.toml", path("next")).expect("a link");
        fs::rename(path("next"), path("policy.toml")).expect("rename");
    };
    let swap = || {
        symlink("v6", path("next")).expect("a link");
        fs::rename(path("next"), path("data")).expect("rename");
        fs::remove_dir_all(path("v5")).expect("removing the old folder");
    };
    let delete_folder = || {
        fs::remove_dir_all(path("v6")).expect("removing the folder");
        until("the policy is missed", WAIT, || agent.status()["policy"]["error"].as_str().map(str::to_owned));
        assert_eq!(limit(&agent), 6);
        fs::create_dir(path("v6")).expect("a folder");
        setup.write("v6/policy.toml", &rule("r", 7));
    };
    let changes: [(&str, &dyn Fn()); 6] = [
        ("rename", &|| setup.replace("policy.toml", &rule("r", 2))),
        ("write in place", &|| setup.write("policy.toml", &rule("r", 3))),
        ("half a write", &half),
        ("a link in its place", &link),
        ("the link swings", &swap),
        ("the folder is deleted and made again", &delete_folder),
    ];
    for (number, (name, change)) in (1u32..).zip(changes) {
        change();
        until(name, WAIT, || (agent.reloads("ok") == f64::from(number)).then_some(()));
        assert_eq!(limit(&agent), number + 1, "{name}");
        assert_eq!(agent.status()["policy"]["error"], Value::Null, "{name}");
    }
    setup.replace("policy.toml", &rule("r", 8));
    until("the last rule", WAIT, || (agent.reloads("ok") == 7.0).then_some(()));
    empty();
    until("no rule", WAIT, || (agent.reloads("ok") == 8.0).then_some(()));
    assert_eq!(limit(&agent), Value::Null);
    assert_eq!((agent.reloads("ok"), agent.reloads("invalid"), agent.reloads("failed")), (8.0, 3.0, 0.0));
}

#[test]
fn a_signal_reloads_at_once_and_a_stop_does_not_wait() {
    let setup = Setup::new("", &rule("r", 1));
    let agent = setup.start();
    let reload = |limit_now| {
        let started = Stopwatch::start();
        agent.reload(&rule("r", limit_now));
        assert_eq!(limit(&agent), limit_now);
        started.elapsed()
    };
    reload(2);
    // The file is looked at every half second, so all of these would have taken as long; one that a busy machine does not delay
    // is enough to tell.
    let quickest = (3..9).map(reload).min().expect("some");
    assert!(quickest < Duration::from_millis(400), "{quickest:?}: not without waiting for a look at the file");
    agent.hang_up();
    assert!(agent.stop().success());
}

#[test]
fn request_rules_change_on_the_next_request_and_keep_their_counters() {
    let both = |limit| rule("r", limit) + &rule("other", 1000);
    let setup = Setup::new("", &both(10));
    let agent = setup.start();
    for _ in 0..4 {
        assert_eq!(ask(&agent, "u")["allowed"], true);
    }
    let allowed = "limiter_checks_total{rule=\"r\",decision=\"allowed\",source=\"memory\"}";
    let denied = allowed.replace("allowed", "denied");
    assert_eq!(agent.metric(allowed), 4.0);

    agent.reload(&both(3));
    let answer = ask(&agent, "u");
    assert_eq!((&answer["allowed"], &answer["remaining"], &answer["limit"]), (&json!(false), &json!(0), &json!(3)));
    assert!(answer["retry_after_ms"].as_u64().is_some_and(|wait| wait > 0), "{answer}");

    agent.reload(&both(20));
    let answer = ask(&agent, "u");
    assert_eq!((&answer["allowed"], &answer["remaining"]), (&json!(true), &json!(15)), "4 were counted");

    agent.reload(&both(20).replace("\"user\"\nlimit = 20", "\"user\"\nmode = \"shadow\"\nlimit = 1"));
    let answer = ask(&agent, "u");
    assert_eq!(
        (&answer["allowed"], &answer["rule"], &answer["shadow"]),
        (&json!(true), &json!("other"), &json!(["r"]))
    );

    agent.reload(&rule("other", 1000));
    assert_eq!(ask(&agent, "u")["rule"], "other");
    let rules: Vec<Value> = agent.status()["rules"].as_array().expect("rules").clone();
    assert_eq!(rules.iter().map(|rule| &rule["id"]).collect::<Vec<_>>(), ["other"]);
    assert_eq!((agent.metric(allowed), agent.metric(&denied)), (5.0, 1.0), "metrics of a rule that is gone stay");

    agent.reload("# no rule\n");
    let answer = ask(&agent, "u");
    assert_eq!((&answer["allowed"], &answer["reason"]), (&json!(true), &json!("no_rule")));
    agent.reload(&both(20));
    assert_eq!(ask(&agent, "u")["remaining"], 14, "what was counted still counts");
}

#[test]
fn api_keys_follow_the_policy() {
    let setup = Setup::new("[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"secret\"\n", "");
    let agent = setup.start();
    let bearer = [("Authorization", "Bearer a-token-of-the-upstream")];
    assert_eq!(agent.check(&bearer).status, 200, "nobody is limited by key: no business of ours");
    agent.reload(&(rule("r", 5) + "[plans.pro]\n"));
    assert_eq!(agent.check(&bearer).status, 401);

    let key = setup.add_key("c_1", "pro");
    let header = [("X-API-Key", &*key)];
    until("the key is known", WAIT, || (agent.check(&header).status == 200).then_some(()));
    // A plan is retired: whoever has it goes on with the limits of those without one, and it is noted.
    let note = |agent: &Agent<'_>| agent.status()["notes"].to_string();
    setup.replace("policy.toml", &rule("r", 5));
    agent.hang_up();
    until("a plan that a key has can go, and it is noted", WAIT, || {
        note(&agent).contains("has no plan \\\"pro\\\"").then_some(())
    });
    let shown = String::from_utf8(setup.run(&["status"]).stdout).expect("text");
    assert!(shown.contains("note: ") && shown.contains("keys.toml:1: keys.plan: the policy has no plan"), "{shown}");
    assert!(setup.log().contains("the policy has no plan \"pro\""), "{}", setup.log());
    assert_eq!(agent.check(&header).status, 200);
    for arguments in [&["validate"][..], &["policy", "diff"]] {
        let output = setup.run(arguments);
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("has no plan \"pro\""), "{output:?}");
    }
    assert!(agent.stop().success());
    let agent = setup.start();
    assert_eq!(agent.check(&header).status, 200, "a start takes it as well");
    setup.replace("keys.toml", "# none\n");
    until("the key is gone", WAIT, || (agent.check(&header).status == 401).then_some(()));
    until("and the note", WAIT, || (!note(&agent).contains("no plan")).then_some(()));
}

#[test]
fn a_file_that_a_start_would_refuse_is_seen_while_the_agent_runs() {
    const FREE: &str = "[plans.free]\n";
    let jwt = "[identity.jwt]\nsecret_file = \"jwt.secret\"\n";
    let setup = Setup::new(&format!("[identity]\nkey_file = \"keys.toml\"\nkey_secret_file = \"secret\"\n{jwt}"), FREE);
    let secret = "0123456789abcdef0123456789abcdef";
    setup.write("jwt.secret", secret);
    fs::set_permissions(setup.path("jwt.secret"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("a mode");
    setup.add_key("c_1", "free");
    let keys = fs::read_to_string(setup.path("keys.toml")).expect("the keys");
    let agent = setup.start();
    for (file, wrong, right, metric, says) in [
        ("policy.toml", "alow = []\n", FREE, "policy", "alow: unknown field"),
        ("keys.toml", "[[keys]]\nclient = \"c\"\n", &*keys, "api_keys", "keys[0].id: is missing"),
        ("jwt.secret", "short", secret, "token_keys", "a secret of HS256 has at least 32"),
    ] {
        let gauge = || agent.metric(&format!("limiter_file_not_in_force{{file=\"{metric}\"}}"));
        assert_eq!(gauge(), 0.0, "{file}");
        setup.write(file, wrong);
        until(&format!("{file} is seen to be wrong"), WAIT, || (gauge() == 1.0).then_some(()));
        assert_eq!(setup.run(&["validate"]).status.code(), Some(78), "{file}");
        let shown = String::from_utf8(setup.run(&["status"]).stdout).expect("text");
        assert!(shown.contains(says) && shown.contains(": degraded, up"), "{file}: {shown}");
        let ready = http::get(&setup.admin(), "/readyz", &[]).expect("an answer");
        assert!(ready.status == 200 && ready.body.contains("a start would fail"), "{file}: {ready:?}");
        setup.write(file, right);
        until(&format!("{file} is right again"), WAIT, || (gauge() == 0.0).then_some(()));
        assert_eq!(agent.status()["degraded"], json!(false), "{file}");
    }
}

#[test]
fn a_wrong_policy_changes_nothing_and_says_everything() {
    let net = TestNet::new();
    let good = format!("deny = [\"198.51.100.0/24\"]\n{}", rule("r", 5));
    let setup = Setup::new(&xdp(&net, &[INTERFACE], ""), &good);
    let agent = start(&net, &setup);
    let program = net.gateway(|| xdp_of(INTERFACE));
    let loaded_at = agent.status()["policy"]["loaded_at"].clone();
    let packet_rule = |id: &str| {
        format!("[[packet_rules]]\nid = \"{id}\"\ncidr = \"0.0.0.0/0\"\npackets = {{ rate = \"1/s\", burst = 1 }}\n")
    };
    for (number, (wrong, says)) in (1u32..).zip([
        (rule("r", 0) + "alow = []\n", &["limit", "unlimited", "alow"][..]),
        ("[[rules]\n".to_owned(), &["policy.toml:1"]),
        (format!("deny = [\"10.0.0.1/8\"]\n{}", rule("", 1)), &["10.0.0.0/8", "id"]),
        // Two rules of one prefix.
        (packet_rule("a") + &packet_rule("b"), &["packet_rules[1]", "\"a\"", "0.0.0.0/0"]),
    ]) {
        setup.replace("policy.toml", &wrong);
        agent.hang_up();
        until("it is refused", WAIT, || (agent.reloads("invalid") == f64::from(number)).then_some(()));
        let status = agent.status();
        let error = status["policy"]["error"].as_str().expect("an error");
        let shown = String::from_utf8(setup.run(&["status"]).stdout).expect("text");
        for word in says {
            assert!(error.contains(word), "{word}: {error}");
            assert!(setup.log().contains(word), "{word}: {}", setup.log());
            assert!(shown.contains(word), "{word}: {shown}");
        }
        assert_eq!(status["policy"]["loaded_at"], loaded_at);
        assert_eq!(status["xdp"]["deny"][0]["prefix"], "198.51.100.0/24");
        assert_eq!(net.gateway(|| xdp_of(INTERFACE)), program);
        assert_eq!(limit(&agent), 5);
    }
    agent.reload(&good);
    assert_eq!(agent.status()["policy"]["error"], Value::Null);
    assert_ne!(net.gateway(|| xdp_of(INTERFACE)), program);
}

#[test]
fn a_block_ends_with_its_rule_and_its_prefix_can_be_exempted() {
    let net = TestNet::new();
    let per_address = |limit| {
        format!("[[rules]]\nid = \"per-address\"\nscope = \"ip\"\nlimit = {limit}\nwindow = \"1h\"\n") + &rule("r", 5)
    };
    let setup = Setup::new(&xdp(&net, &[INTERFACE], ""), &per_address(1));
    let agent = start(&net, &setup);
    let over = || agent.check(&[("X-Forwarded-For", "192.0.2.1")]).status == 429;
    let budgets = || agent.status()["xdp"]["budgets"].as_array().map_or(0, Vec::len);
    let blocked = || until("the address is blocked", WAIT, || (over() && budgets() == 1).then_some(()));
    blocked();
    agent.reload(&(per_address(1) + "[[endpoints]]\nname = \"e\"\nmatch = [\"/e\"]\n"));
    assert_eq!(budgets(), 1, "nothing changed for this rule");
    agent.reload(&per_address(2));
    until("a changed rule lets go", WAIT, || (budgets() == 0).then_some(()));
    blocked();
    agent.reload(&rule("r", 5));
    until("a rule that is gone lets go", WAIT, || (budgets() == 0).then_some(()));
    agent.reload(&per_address(2));
    blocked();
    agent.kill();
    setup.write("policy.toml", &rule("r", 5));
    let agent = start(&net, &setup);
    until("so it does over a restart", WAIT, || {
        (agent.status()["xdp"]["budgets"].as_array().is_some_and(Vec::is_empty)).then_some(())
    });
    agent.reload(&format!("allow = [\"192.0.2.0/24\"]\n{}", per_address(1)));
    let exempt = || agent.check(&[("X-Forwarded-For", "192.0.2.1")]).status;
    assert_eq!(exempt(), 200, "a restart without Redis begins anew");
    assert!((0..20).map(|_| exempt()).all(|status| status == 429));
    let other = || agent.check(&[("X-Forwarded-For", "192.0.3.1")]).status;
    until("another is denied and blocked", WAIT, || {
        let budgets = agent.status()["xdp"]["budgets"].clone();
        (other() == 429 && budgets[0]["prefix"] == "192.0.3.1/32").then_some(())
    });
    assert_eq!(agent.status()["xdp"]["budgets"].as_array().map(Vec::len), Some(1), "and the exempt one never was");
    // The rule stays as it is, and its denials are of no account any more.
    agent.reload(&format!("[[bypass]]\ncidr = \"192.0.3.0/24\"\n{}", per_address(1)));
    until("a bypass lets go", WAIT, || {
        (agent.status()["xdp"]["budgets"].as_array().is_some_and(Vec::is_empty)).then_some(())
    });
    assert!((0..20).map(|_| other()).all(|status| status == 200));
    assert_eq!(agent.status()["xdp"]["budgets"], serde_json::json!([]));
}

fn packets(status: &Value, verdict: &str, reason: &str) -> u64 {
    let counters = status["xdp"]["counters"].as_array().expect("counters").iter();
    let counters = counters.filter(|counter| counter["verdict"] == verdict && counter["reason"] == reason);
    counters.filter_map(|counter| counter["packets"].as_u64()).sum()
}

#[test]
fn no_packet_of_either_kind_is_judged_wrongly_while_policies_change() {
    for mode in ["native", "generic"] {
        let net = TestNet::new();
        let [deny_v4, deny_v6] = DENIED;
        let [good_v4, good_v6] = GOOD;
        let limit = |id: &str, cidr: &str, limit: &str| {
            format!("[[packet_rules]]\nid = \"{id}\"\ncidr = \"{cidr}\"\n{limit}\n")
        };
        let (many, much) =
            ("packets = { rate = \"1000000/s\", burst = 1000000 }", "bytes = { rate = \"1GB/s\", burst = \"1GB\" }");
        // Everything but the verdict on the clients is different: the prefix that denies and its place among others, the
        // rule that the good clients meet, if they meet one, and which lookups the program makes at all.
        let one = format!("deny = [\"{deny_v4}/32\", \"198.51.100.0/24\", \"2001:db8::/32\", \"{deny_v6}/128\"]\n")
            + &limit("one", "0.0.0.0/0", many)
            + &limit("one-six", "::/0", many);
        let two = format!(
            "deny = [\"203.0.113.0/24\", \"{deny_v4}/32\", \"fd00:ec:0:1::/64\"]\nallow = [\"192.0.2.0/24\"]\n"
        ) + &limit("two", "10.0.0.0/8", much)
            + &limit("two-six", "fd00::/8", much);
        let three =
            format!("deny = [\"{deny_v6}/128\", \"{deny_v4}/32\"]\nallow = [\"{good_v4}/32\", \"{good_v6}/128\"]\n")
                + &limit("three", "0.0.0.0/0", "packets = { rate = \"1/h\", burst = 1 }");
        let policies = [&two, &three, &one];
        let setup = Setup::new(&xdp(&net, &[INTERFACE], &format!("mode = \"{mode}\"\n")), &one);
        let agent = start(&net, &setup);
        let traffic = PingPong::new(&net, 80);
        let stop = AtomicBool::new(false);
        let (sent, programs) = std::thread::scope(|scope| {
            let playing = scope.spawn(|| traffic.play_until(&stop));
            let programs: BTreeSet<_> = (0..21)
                .map(|cycle| {
                    agent.reload(policies[cycle % policies.len()]);
                    agent.status()["xdp"]["interfaces"][0]["program_id"].as_u64()
                })
                .collect();
            stop.store(true, Ordering::Relaxed);
            (playing.join().expect("every packet was judged rightly"), programs)
        });
        assert_eq!(programs.len(), 21);
        let status = agent.status();
        assert!(sent > 500, "{sent} rounds, {mode}");
        assert_eq!(packets(&status, "drop", "denied"), 2 * sent, "{mode}");
        let (conforming, allowed) = (packets(&status, "pass", "conforming"), packets(&status, "pass", "allowed"));
        assert!(conforming > 0 && allowed > 0, "{mode}");
        assert_eq!(conforming + allowed, 2 * sent, "{mode}");
        let drops = status["xdp"]["counters"].as_array().expect("counters").iter();
        assert_eq!(drops.filter(|counter| counter["verdict"] == "drop").count(), 1, "{status}");
        let series =
            |rule| format!("limiter_xdp_packets_total{{rule=\"{rule}\",verdict=\"pass\",reason=\"conforming\"}}");
        for rule in ["one", "one-six", "two", "two-six"] {
            assert!(agent.metric(&series(rule)) > 0.0, "{rule} {mode}");
        }
    }
}

fn program_ids() -> BTreeSet<u32> {
    loaded_programs().flatten().map(|program| program.id()).collect()
}

fn maps_of(program: u32) -> BTreeSet<u32> {
    let program = loaded_programs().flatten().find(|loaded| loaded.id() == program).expect("a program");
    program.map_ids().expect("maps").expect("a kernel that tells them").into_iter().collect()
}

/// Half of a hundred cycles in each mode.
fn fifty_cycles(mode: &str) {
    const BURST: u64 = 5;
    let net = TestNet::new();
    let policy = |cycle: u64| {
        // Nothing comes back during the test. Both rules are always there, so that the slots are.
        let limit = |id: &str, cidr: &str| {
            format!(
                "[[packet_rules]]\nid = \"{id}\"\ncidr = \"{cidr}\"\npackets = {{ rate = \"1/h\", burst = {BURST} }}\n"
            )
        };
        format!("deny = [\"{}/32\", \"198.51.{cycle}.0/24\"]\n", CLIENT_V4[1])
            + &limit("limited", "10.203.0.0/24")
            + &limit("other", "192.0.2.0/24")
    };
    let setup = Setup::new(&xdp(&net, &[INTERFACE], &format!("mode = \"{mode}\"\n")), &policy(0));
    let program = |agent: &Agent<'_>| {
        let id = agent.status()["xdp"]["interfaces"][0]["program_id"].as_u64().expect("a program");
        u32::try_from(id).expect("an id")
    };
    let link = |program: u32| loaded_links().flatten().find(|link| link.program_id() == program).map(|link| link.id());
    let pins = || {
        let version = fs::read_dir(net.pin_dir()).expect("pins").flatten().next().expect("a version").path();
        let names = fs::read_dir(version).expect("pins").flatten();
        names.map(|entry| entry.file_name().into_string().expect("text")).collect::<BTreeSet<_>>()
    };
    let sink = net.gateway(|| UdpSocket::bind(SocketAddr::new(GATEWAY_V4, 80))).expect("a socket");
    let [limited, denied] =
        net.client(|| CLIENT_V4.map(|address| UdpSocket::bind(SocketAddr::new(address, 0)).expect("a socket")));
    let send = |socket: &UdpSocket| socket.send_to(b"x", SocketAddr::new(GATEWAY_V4, 80)).expect("sent");

    let mut agent = start(&net, &setup);
    let mut program_now = program(&agent);
    let (link_id, pinned) = (link(program_now), pins());
    assert!(link_id.is_some() && !pinned.iter().any(|pin| pin.ends_with("-next")), "{pinned:?}");
    for _ in 0..20 {
        send(&limited);
    }
    sink.set_read_timeout(Some(WAIT)).expect("a timeout");
    for _ in 0..BURST {
        sink.recv(&mut [0; 8]).expect("a packet of the burst");
    }
    sink.set_nonblocking(true).expect("not blocking");

    let mut ours = BTreeSet::from([program_now]);
    let mut maps = maps_of(program_now);
    let (mut sent_denied, mut sent_limited) = (0, 20);
    for cycle in 1..=50 {
        setup.replace("policy.toml", &policy(cycle));
        let before = program_ids();
        agent.hang_up();
        match cycle % 3 {
            0 => {
                until("it is in force", START, || (agent.reloads("ok") == 1.0).then_some(()));
                ours.insert(program(&agent));
            }
            // While maps are filled, the program exchanged, pins renamed.
            1 => until("a program is loaded", START, || (!program_ids().is_subset(&before)).then_some(())),
            _ => {}
        }
        agent.kill();
        if cycle % 5 == 0 {
            // As if an agent of the schema before had made the pins, of which no layout has changed since.
            let version = |number: u32| net.pin_dir().join(format!("v{number}"));
            fs::rename(version(SCHEMA_VERSION), version(SCHEMA_VERSION - 1)).expect("rename");
        }
        send(&denied);
        send(&limited);
        agent = start(&net, &setup);
        send(&denied);
        send(&limited);
        (sent_denied, sent_limited) = (sent_denied + 2, sent_limited + 2);
        program_now = program(&agent);
        ours.insert(program_now);
        maps.extend(maps_of(program_now));
        assert_eq!(link(program_now), link_id, "cycle {cycle}: the same link");
        assert_eq!(pins(), pinned, "cycle {cycle}");
        assert_eq!(fs::read_dir(net.pin_dir()).expect("pins").count(), 1, "cycle {cycle}: of one schema");
    }
    until("the packets are through", WAIT, || {
        let status = agent.status();
        (packets(&status, "drop", "denied") == sent_denied
            && packets(&status, "drop", "rate_limited_packets") == sent_limited - BURST)
            .then_some(())
    });
    assert!(sink.recv(&mut [0; 8]).is_err(), "no gap, and no bucket was refilled");
    until("of all programs the last is left", WAIT, || {
        let left: Vec<_> = program_ids().intersection(&ours).copied().collect();
        (left == [program_now]).then_some(())
    });
    let last = maps_of(program_now);
    let loaded = || loaded_maps().flatten().map(|map| map.id()).collect::<BTreeSet<_>>();
    until("and its maps", WAIT, || (loaded().intersection(&maps).all(|map| last.contains(map))).then_some(()));
    agent.kill();
    assert!(net.gateway(|| setup.run(&["unpin"])).status.success());
    until("everything is gone", WAIT, || {
        (!program_ids().contains(&program_now) && loaded().is_disjoint(&maps)).then_some(())
    });
    assert!(!net.pin_dir().exists());
}

#[test]
fn fifty_kills_restarts_reloads_and_upgrades_in_native_mode_open_no_gap_and_leak_nothing() {
    fifty_cycles("native");
}

#[test]
fn fifty_kills_restarts_reloads_and_upgrades_in_generic_mode_open_no_gap_and_leak_nothing() {
    fifty_cycles("generic");
}

#[test]
fn interfaces_are_added_and_removed_with_a_restart() {
    let net = TestNet::new();
    let setup = Setup::new(&xdp(&net, &[INTERFACE], ""), "");
    let mut agent = start(&net, &setup);
    for interfaces in [&[INTERFACE, SECOND_INTERFACE][..], &[SECOND_INTERFACE], &[INTERFACE]] {
        setup.configure(&xdp(&net, interfaces, ""));
        assert!(agent.stop().success());
        agent = start(&net, &setup);
        let listed = agent.status()["xdp"]["interfaces"].as_array().expect("interfaces").clone();
        assert_eq!(listed.iter().map(|interface| &interface["name"]).collect::<Vec<_>>(), interfaces);
        for interface in [INTERFACE, SECOND_INTERFACE] {
            let attached = net.gateway(|| xdp_of(interface)).is_some();
            assert_eq!(attached, interfaces.contains(&interface), "{interface} of {interfaces:?}");
        }
    }
}

fn links_of(program: u64) -> usize {
    loaded_links().flatten().filter(|link| u64::from(link.program_id()) == program).count()
}

fn link_pins(net: &TestNet) -> Vec<String> {
    let versions = fs::read_dir(net.pin_dir()).into_iter().flatten().flatten();
    let pins = versions.flat_map(|version| fs::read_dir(version.path()).into_iter().flatten().flatten());
    let names = pins.map(|pin| pin.file_name().into_string().expect("text"));
    let mut links: Vec<_> = names.filter(|name| name.starts_with("link-")).collect();
    links.sort();
    links
}

#[test]
fn interfaces_are_added_and_removed_by_a_reload_and_the_others_never_go_without() {
    for mode in ["native", "generic"] {
        let net = TestNet::new();
        let policy = format!("deny = [\"{}/32\", \"{}/128\"]\n", DENIED[0], DENIED[1]);
        let settings = format!("mode = \"{mode}\"\n");
        let with = |interfaces: &[&str]| xdp(&net, interfaces, &settings);
        let setup = Setup::new(&with(&[INTERFACE]), &policy);
        let agent = start(&net, &setup);
        let traffic = PingPong::new(&net, 80);
        let stop = AtomicBool::new(false);
        let sent = std::thread::scope(|scope| {
            let playing = scope.spawn(|| traffic.play_until(&stop));
            for _ in 0..5 {
                for interfaces in [&[SECOND_INTERFACE, INTERFACE][..], &[INTERFACE]] {
                    setup.configure(&with(interfaces));
                    agent.reload(&policy);
                    let listed = agent.status()["xdp"]["interfaces"].as_array().expect("interfaces").clone();
                    assert_eq!(listed.iter().map(|interface| &interface["name"]).collect::<Vec<_>>(), interfaces);
                    let program = listed[0]["program_id"].as_u64().expect("an id");
                    assert!(listed.iter().all(|interface| interface["program_id"] == program), "{listed:?}");
                    let second = net.gateway(|| xdp_of(SECOND_INTERFACE));
                    assert_eq!(second.is_some(), interfaces.contains(&SECOND_INTERFACE));
                    let mut expected: Vec<_> = interfaces.iter().map(|name| format!("link-{mode}-{name}")).collect();
                    expected.sort();
                    assert_eq!((link_pins(&net), links_of(program)), (expected, interfaces.len()));
                }
            }
            stop.store(true, Ordering::Relaxed);
            playing.join().expect("no packet passed that was to be dropped, and none was dropped that was to pass")
        });
        let status = agent.status();
        assert!(sent > 50, "{sent} rounds, {mode}");
        assert_eq!(packets(&status, "drop", "denied"), 2 * sent, "{mode}: not one without the program");
    }
}

#[test]
fn all_interfaces_can_be_removed_and_added_again() {
    let net = TestNet::new();
    let setup = Setup::new(&xdp(&net, &[INTERFACE], ""), "");
    let agent = start(&net, &setup);
    for interfaces in [&[][..], &[SECOND_INTERFACE], &[INTERFACE, SECOND_INTERFACE]] {
        setup.configure(&xdp(&net, interfaces, ""));
        agent.reload("");
        for interface in [INTERFACE, SECOND_INTERFACE] {
            assert_eq!(net.gateway(|| xdp_of(interface)).is_some(), interfaces.contains(&interface), "{interface}");
        }
        let shown = String::from_utf8(setup.run(&["status"]).stdout).expect("text");
        assert_eq!(shown.contains("xdp: off"), interfaces.is_empty(), "{shown}");
    }
}

#[test]
fn a_start_without_interfaces_detaches_what_an_earlier_one_has_left() {
    let net = TestNet::new();
    let setup = Setup::new(&xdp(&net, &[INTERFACE, SECOND_INTERFACE], ""), "");
    start(&net, &setup).kill();
    setup.configure(&xdp(&net, &[], ""));
    let agent = start(&net, &setup);
    assert_eq!(net.gateway(|| [INTERFACE, SECOND_INTERFACE].map(xdp_of)), [None, None]);
    assert_eq!(link_pins(&net), Vec::<String>::new());
    for interface in [INTERFACE, SECOND_INTERFACE] {
        let says = format!("nothing is limited any more on {interface}");
        assert!(setup.log().contains(&says), "{}", setup.log());
    }
    assert!(agent.stop().success());

    // Those of an agent that runs are its own.
    setup.configure(&xdp(&net, &[INTERFACE], ""));
    let _agent = start(&net, &setup);
    let other = Setup::new(&xdp(&net, &[], ""), "");
    assert!(start(&net, &other).stop().success());
    assert!(net.gateway(|| xdp_of(INTERFACE)).is_some());
    assert!(other.log().contains("another agent"), "{}", other.log());
}

#[test]
fn a_file_in_the_place_of_a_socket_is_refused_and_stays() {
    for key in ["http", "admin"] {
        let setup = Setup::new("", "");
        let file = format!("{key}.sock");
        setup.write(&file, "precious");
        for command in ["validate", "run"] {
            let output = setup.run(&[command]);
            let says = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
            assert_eq!(output.status.code(), Some(78), "{command}: {says}");
            assert!(says.contains(&format!("api.{key}")) && says.contains("is no socket"), "{command}: {says}");
            assert_eq!(fs::read_to_string(setup.path(&file)).expect("the file"), "precious");
        }
        fs::remove_file(setup.path(&file)).expect("removed");
        // What an agent that was killed has left is no hindrance.
        setup.start().kill();
        assert!(setup.start().stop().success());
    }
}

#[test]
fn a_wrong_configuration_changes_nothing_and_says_everything() {
    let net = TestNet::new();
    let setup = Setup::new(&xdp(&net, &[INTERFACE], ""), "");
    let agent = start(&net, &setup);
    let pins = TestPins::new();
    let mut foreign = World::new();
    foreign.config.interfaces = vec!["other0".to_owned()];
    foreign.config.pin_dir = pins.path().to_owned();
    net.gateway(|| ip("link add other0 type veth peer name other1"));
    net.gateway(|| ip("tuntap add dev tun9 mode tun"));
    let foreign = net.gateway(|| KernelDataplane::start(xdp_object(), foreign.config, &foreign.policy, foreign.tuning));
    let before = net.gateway(|| [INTERFACE, SECOND_INTERFACE, "other0"].map(xdp_of));
    let mistakes = xdp(&net, &[INTERFACE, SECOND_INTERFACE], "mod = 1\n[push]\nmax_block = \"x\"\n");
    for (configuration, result, says) in [
        (mistakes, "invalid", &["limiter.toml", "xdp.mod", "push.max_block"][..]),
        ("[[xdp]\n".to_owned(), "invalid", &["limiter.toml:"]),
        // After one that could be added.
        (xdp(&net, &[SECOND_INTERFACE, "nope0"], ""), "invalid", &["attach to nope0: there is no such interface"]),
        (
            xdp(&net, &[SECOND_INTERFACE, "tun9"], ""),
            "invalid",
            &["attach to tun9: its frames have no Ethernet header"],
        ),
        (xdp(&net, &[INTERFACE, SECOND_INTERFACE, "other0"], ""), "failed", &["attach to other0: another XDP program"]),
    ] {
        setup.configure(&configuration);
        let count = agent.reloads(result);
        agent.hang_up();
        until("it is refused", WAIT, || (agent.reloads(result) > count).then_some(()));
        let status = agent.status();
        let error = status["configuration_error"].to_string();
        for word in says {
            assert!(error.contains(word), "{word}: {error}");
            assert!(setup.log().contains(word), "{word}: {}", setup.log());
        }
        let of_file = |file| agent.metric(&format!("limiter_file_not_in_force{{file=\"{file}\"}}"));
        assert_eq!((&status["policy"]["error"], of_file("configuration"), of_file("policy")), (&Value::Null, 1.0, 0.0));
        assert_eq!(net.gateway(|| [INTERFACE, SECOND_INTERFACE, "other0"].map(xdp_of)), before, "{configuration}");
        assert_eq!(link_pins(&net).len(), 1, "{configuration}");
    }
    drop(foreign.expect("the other program"));
    setup.configure(&xdp(&net, &[INTERFACE], ""));
    agent.reload("");
    let status = agent.status();
    assert_eq!((&status["policy"]["error"], &status["configuration_error"]), (&Value::Null, &Value::Null));
}

#[test]
fn settings_take_effect_by_a_reload_or_are_said_to_need_a_restart() {
    let net = TestNet::new();
    let policy = format!("deny = [\"{}/32\", \"{}/128\"]\n", DENIED[0], DENIED[1]);
    let setup = Setup::new(&xdp(&net, &[INTERFACE], ""), &policy);
    let agent = start(&net, &setup);
    let traffic = PingPong::new(&net, 80);
    traffic.play(1);
    setup.configure(&xdp(&net, &[INTERFACE], "on_exit = \"detach\"\n").replace("udp/80", "udp/81"));
    agent.reload(&policy);
    traffic.passes_from_denied();
    assert_eq!(agent.status()["policy"]["needs_restart"], json!([]));
    let read_again = setup.log().lines().rfind(|line| line.contains("were read again")).map(str::to_owned);
    let read_again = read_again.expect("a line of the log");
    for says in ["policy=\"the same\"", "changed_settings=\"xdp.protect, xdp.on_exit\""] {
        assert!(read_again.contains(says), "{read_again}");
    }

    let other = xdp(&net, &[INTERFACE], "mode = \"generic\"\non_exit = \"detach\"\n").replace("1024", "2048");
    setup.configure(&(other + "[push]\nafter_denials = 77\n"));
    agent.reload(&policy);
    let needed = json!(["xdp.mode", "xdp.max_sources (after \"limiter unpin\")", "push.after_denials"]);
    assert_eq!(agent.status()["policy"]["needs_restart"], needed);
    let shown = String::from_utf8(setup.run(&["status"]).stdout).expect("text");
    for setting in needed.as_array().expect("a list").iter().filter_map(Value::as_str) {
        assert!(setup.log().contains(&format!("{setting} has changed in the configuration, which needs a restart")));
        assert!(shown.contains(setting), "{shown}");
    }
    assert_eq!(agent.status()["xdp"]["interfaces"][0]["mode"], "native", "and have not taken effect");
    setup.configure(&xdp(&net, &[INTERFACE], "on_exit = \"detach\"\n"));
    agent.reload(&policy);
    assert_eq!(agent.status()["policy"]["needs_restart"], json!([]), "taken back");
    assert!(agent.stop().success());
    assert_eq!(net.gateway(|| xdp_of(INTERFACE)), None, "on_exit is what it was changed to");
}

#[test]
fn a_packet_layer_that_was_off_at_the_start_is_said_to_need_a_restart() {
    let net = TestNet::new();
    let setup = Setup::new(&xdp(&net, &[], ""), "");
    let agent = start(&net, &setup);
    setup.configure(&xdp(&net, &[INTERFACE], ""));
    agent.reload("");
    assert_eq!(agent.status()["policy"]["needs_restart"], json!(["xdp.interfaces"]));
    assert_eq!(net.gateway(|| xdp_of(INTERFACE)), None);
}

#[test]
fn unpin_is_refused_while_an_agent_runs_unless_it_is_forced() {
    let net = TestNet::new();
    let setup = Setup::new(&xdp(&net, &[INTERFACE], ""), "");
    let agent = start(&net, &setup);
    let unpin = |arguments: &[&str]| {
        let output = net.gateway(|| setup.run(arguments));
        (output.status.code(), String::from_utf8(output.stdout).expect("text"), output.stderr)
    };
    let (code, _, says) = unpin(&["unpin"]);
    let says = String::from_utf8(says).expect("text");
    assert_eq!(code, Some(69), "{says}");
    assert!(says.contains("an agent runs on") && says.contains("--force"), "{says}");
    assert!(net.gateway(|| xdp_of(INTERFACE)).is_some());
    let (code, says, _) = unpin(&["unpin", "--force"]);
    assert!(code == Some(0) && says.starts_with("detached 1 link and removed "), "{says}");
    assert_eq!(net.gateway(|| xdp_of(INTERFACE)), None);
    assert!(agent.stop().success());
    let (code, says, _) = unpin(&["unpin"]);
    assert!(code == Some(0) && says.starts_with("detached 0 links and removed 0 maps"), "{says}");
}

#[test]
fn an_interface_that_comes_back_is_limited_again() {
    let net = TestNet::new();
    let setup = Setup::new(&xdp(&net, &[INTERFACE, SECOND_INTERFACE], ""), "");
    let agent = start(&net, &setup);
    let missing = || agent.status()["xdp"]["missing"].clone();
    assert_eq!(missing(), json!([]));
    let attached = || net.gateway(|| xdp_of(SECOND_INTERFACE));

    net.gateway(|| ip(&format!("link delete {SECOND_INTERFACE}")));
    until("it is missed", WAIT, || (missing()[0]["name"] == SECOND_INTERFACE).then_some(()));
    let limited = |interface| agent.metric(&format!("limiter_xdp_interface_attached{{interface=\"{interface}\"}}"));
    assert_eq!((limited(INTERFACE), limited(SECOND_INTERFACE)), (1.0, 0.0));
    let ready = http::get(&setup.admin(), "/readyz", &[]).expect("an answer");
    assert_eq!(ready.status, 200, "what there is goes on");
    assert_eq!(ready.json()["degraded"], true);
    let cause = ready.json()["degraded_by"][0].to_string();
    assert!(cause.contains(&format!("nothing is limited on {SECOND_INTERFACE}")), "{cause}");
    agent.reload("deny = [\"198.51.100.0/24\"]\n");
    let shown = String::from_utf8(setup.run(&["status"]).stdout).expect("text");
    assert!(shown.contains(&format!("interface {SECOND_INTERFACE}: nothing is limited there")), "{shown}");
    net.gateway(|| ip(&format!("link add {SECOND_INTERFACE} type veth peer name cl1")));
    until("it is limited again", WAIT, || attached().filter(|_| missing() == json!([])));
    let program = |interface: &str| net.gateway(|| xdp_of(interface)).expect("attached")["prog"]["id"].clone();
    assert_eq!(program(SECOND_INTERFACE), program(INTERFACE), "with the policy in force");

    // Gone and back between two looks.
    net.gateway(|| ip(&format!("link delete {SECOND_INTERFACE}")));
    net.gateway(|| ip(&format!("link add {SECOND_INTERFACE} type veth peer name cl1")));
    until("a new one of the same name is limited", WAIT, attached);

    // Back with somebody else's program.
    net.gateway(|| ip(&format!("link delete {SECOND_INTERFACE}")));
    net.gateway(|| ip("link add other0 type veth peer name cl1"));
    let pins = TestPins::new();
    let mut world = World::new();
    world.config.interfaces = vec!["other0".to_owned()];
    world.config.pin_dir = pins.path().to_owned();
    let foreign = net.gateway(|| KernelDataplane::start(xdp_object(), world.config, &world.policy, world.tuning));
    let id = net.gateway(|| xdp_of("other0")).expect("attached")["prog"]["id"].clone();
    net.gateway(|| ip(&format!("link set other0 name {SECOND_INTERFACE}")));
    let holder = format!("another XDP program (\"limiter\", id {id}) is attached there");
    until("the other program is named", WAIT, || {
        missing()[0]["reason"].as_str().filter(|reason| reason.contains(&holder)).map(|_| ())
    });
    drop(foreign.expect("the other program"));
    drop(pins);
    until("it is limited when the other is gone", WAIT, || (missing() == json!([])).then_some(()));

    let log = setup.log();
    let said = |what: &str| log.lines().filter(|line| line.contains(what)).count();
    assert!((1..=3).contains(&said("is gone")), "each time once, unless it was back too soon to see: {log}");
    assert_eq!(said("nothing is limited on"), 1, "{log}");
}

//! Both layers together, over veth: what the agent decides, the kernel enforces.

use std::{
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    time::Duration,
};

use limiter_tests::{
    agent::{Agent, Setup},
    eventually::until,
    gateway::Gateway,
    http::{self, Address, Connection},
    netns::{CLIENT_V4, CLIENT_V6, GATEWAY_V4, GATEWAY_V6, INTERFACE, TestNet},
};
use limiter_user::clock::Stopwatch;
use serde_json::Value;

const WAIT: Duration = Duration::from_secs(30);
/// Long enough for an answer over veth on a busy machine, short enough to see that there is none.
const SILENCE: Duration = Duration::from_millis(700);

const ADDRESS_POLICY: &str = "[[rules]]\nid = \"per-address\"\nscope = \"ip\"\nlimit = 5\nwindow = \"2s\"\n";

fn setup(net: &TestNet, mode: &str, more: &str, policy: &str) -> Setup {
    let pin_dir = net.pin_dir().display();
    let xdp = format!(
        "[xdp]\ninterfaces = [\"{INTERFACE}\"]\nmode = \"{mode}\"\nprotect = [\"tcp/80\", \"udp/80\"]\npin_dir = \"{pin_dir}\"\nmax_sources = 65536\n{more}"
    );
    Setup::new(&xdp, policy)
}

fn start<'a>(net: &TestNet, setup: &'a Setup) -> Agent<'a> {
    net.gateway(|| setup.start())
}

fn serve(net: &TestNet, setup: &Setup, address: IpAddr) -> Gateway {
    net.gateway(|| Gateway::start(SocketAddr::new(address, 80), setup.http())).expect("a gateway")
}

/// A request of its own connection; `None` when nothing comes back.
fn ask(net: &TestNet, from: IpAddr, gateway: &Gateway) -> Option<u16> {
    ask_within(net, from, gateway, SILENCE)
}

/// The same, of who is let in: an answer comes, however long a busy machine takes.
fn answer(net: &TestNet, from: IpAddr, gateway: &Gateway) -> Option<u16> {
    ask_within(net, from, gateway, WAIT)
}

fn ask_within(net: &TestNet, from: IpAddr, gateway: &Gateway, timeout: Duration) -> Option<u16> {
    let address = Address::TcpFrom(from, gateway.address());
    let response = net.client(|| Connection::open_within(&address, timeout)?.request("GET", "/", &[], ""));
    response.ok().map(|response| response.status)
}

fn dropped(agent: &Agent<'_>, reason: &str) -> u64 {
    let status = agent.status();
    let counters = status["xdp"]["counters"].as_array().cloned().unwrap_or_default();
    let counters = counters.iter().filter(|counter| counter["verdict"] == "drop" && counter["reason"] == reason);
    counters.filter_map(|counter| counter["packets"].as_u64()).sum()
}

fn budgets(agent: &Agent<'_>) -> Vec<Value> {
    agent.status()["xdp"]["budgets"].as_array().cloned().unwrap_or_default()
}

#[test]
fn a_denied_address_is_dropped_until_its_retry_after_and_then_served_again() {
    for (mode, client, server) in [("native", CLIENT_V4[0], GATEWAY_V4), ("generic", CLIENT_V6[1], GATEWAY_V6)] {
        let net = TestNet::new();
        let setup = setup(&net, mode, "", ADDRESS_POLICY);
        let agent = start(&net, &setup);
        let gateway = serve(&net, &setup, server);
        let bystander = if client.is_ipv4() { CLIENT_V4[1] } else { CLIENT_V6[0] };

        for request in 0..5 {
            assert_eq!(answer(&net, client, &gateway), Some(200), "request {request}");
        }
        assert_eq!(answer(&net, client, &gateway), Some(429));
        let budget = until("the block is written", WAIT, || budgets(&agent).pop());
        assert_eq!((&budget["reason"], &budget["rule"]), (&"address_over_limit".into(), &"per-address".into()));
        let remaining = Duration::from_millis(budget["remaining_ms"].as_u64().expect("a deadline"));
        assert!(remaining <= Duration::from_secs(4), "{budget}");
        assert_eq!(ask(&net, client, &gateway), None, "the kernel drops");
        assert!(dropped(&agent, "blocked") > 0);
        assert_eq!(answer(&net, bystander, &gateway), Some(200), "another address is not touched");

        until("the kernel itself ends the block", WAIT, || ask(&net, client, &gateway).filter(|status| *status == 200));
        assert_eq!(agent.metric("limiter_pushes_total{reason=\"address_over_limit\",result=\"ok\"}"), 1.0);
        assert!(agent.stop().success());
    }
}

#[test]
fn the_port_of_ssh_is_never_touched() {
    let net = TestNet::new();
    let setup = setup(&net, "auto", "", "");
    let agent = start(&net, &setup);
    let gateway = serve(&net, &setup, GATEWAY_V4);
    let ssh = net.gateway(|| TcpListener::bind(SocketAddr::new(GATEWAY_V4, 22))).expect("a listener");
    let client = CLIENT_V4[0];

    assert!(setup.run(&["block", &client.to_string()]).status.success());
    assert_eq!(ask(&net, client, &gateway), None);
    net.client(|| Connection::open_within(&Address::TcpFrom(client, SocketAddr::new(GATEWAY_V4, 22)), WAIT))
        .expect("port 22 answers");
    drop(ssh);
    assert!(dropped(&agent, "denied") > 0);
    assert!(setup.run(&["unblock", &client.to_string()]).status.success());
    assert_eq!(answer(&net, client, &gateway), Some(200));
}

#[test]
fn a_flood_is_stopped_in_the_kernel_and_the_good_client_is_served() {
    let (v4, v6) = ((CLIENT_V4, GATEWAY_V4, "0.0.0.0/0"), (CLIENT_V6, GATEWAY_V6, "::/0"));
    for (mode, ([good, flooding], server, all)) in [("native", v4), ("generic", v4), ("native", v6), ("generic", v6)] {
        let net = TestNet::new();
        let policy = format!(
            "[[packet_rules]]\nid = \"per-source\"\ncidr = \"{all}\"\npackets = {{ rate = \"1000/s\", burst = 2000 }}\n"
        );
        let setup = setup(&net, mode, "", &policy);
        let agent = start(&net, &setup);
        assert_eq!(agent.status()["xdp"]["interfaces"][0]["mode"], mode);
        let gateway = serve(&net, &setup, server);
        let started = Stopwatch::start();

        let sink = net.gateway(|| UdpSocket::bind(SocketAddr::new(server, 80))).expect("a socket");
        let flood = net.client(|| UdpSocket::bind(SocketAddr::new(flooding, 0))).expect("a socket");
        let served = std::thread::scope(|scope| {
            let flooding = scope.spawn(|| {
                for _ in 0..100_000 {
                    // A full queue of the sender is no concern here.
                    drop(flood.send_to(&[0; 64], SocketAddr::new(server, 80)));
                }
            });
            let mut served = 0;
            while !flooding.is_finished() || served < 20 {
                // The queue of a veth is short: what the flood crowds out there is sent again a second later.
                assert_eq!(ask_within(&net, good, &gateway, WAIT), Some(200), "request {served}, {mode}");
                served += 1;
            }
            served
        });
        let series = |verdict: &str, reason: &str| {
            let labels = format!("rule=\"per-source\",verdict=\"{verdict}\",reason=\"{reason}\"");
            agent.metric(&format!("limiter_xdp_packets_total{{{labels}}}"))
        };
        // What of the flood comes as far as the program depends on the machine; what passes does not.
        let over = series("drop", "rate_limited_packets");
        assert!(over >= 10_000.0, "{over} packets dropped, {served} requests served, {mode}");
        let most = 2.0 * (2000.0 + 1000.0 * started.elapsed().as_secs_f64());
        assert!(series("pass", "conforming") <= most, "two sources of at most {most} packets together, {mode}");
        drop(sink);
    }
}

#[test]
fn enforcement_outlives_the_agent_and_is_taken_over_without_a_refill() {
    let net = TestNet::new();
    // Slow enough that nothing comes back during the test.
    let policy =
        "[[packet_rules]]\nid = \"per-source\"\ncidr = \"10.203.0.3/32\"\npackets = { rate = \"1/h\", burst = 10 }\n";
    let setup = setup(&net, "auto", "", policy);
    let agent = start(&net, &setup);
    let [blocked, limited] = CLIENT_V4;
    assert!(setup.run(&["block", &blocked.to_string(), "--for", "1h"]).status.success());

    let sink = net.gateway(|| UdpSocket::bind(SocketAddr::new(GATEWAY_V4, 80))).expect("a socket");
    sink.set_read_timeout(Some(SILENCE)).expect("a timeout");
    let sender = net.client(|| UdpSocket::bind(SocketAddr::new(limited, 0))).expect("a socket");
    let arrived = |count: u32| {
        for _ in 0..count {
            sender.send_to(b"x", SocketAddr::new(GATEWAY_V4, 80)).expect("sent");
        }
        (0..count + 1).take_while(|_| sink.recv(&mut [0; 8]).is_ok()).count()
    };
    assert_eq!(arrived(25), 10);
    agent.kill();
    assert_eq!(arrived(5), 0, "drops go on without an agent");
    let agent = start(&net, &setup);
    assert_eq!(arrived(5), 0, "a restart refills nothing");
    let status = agent.status();
    assert_eq!(status["xdp"]["deny"][0]["prefix"], format!("{blocked}/32"), "{status}");
    assert!(status["xdp"]["deny"][0]["remaining_ms"].as_u64().is_some_and(|left| left < 3_600_000));
    assert_eq!(dropped(&agent, "rate_limited_packets"), 25, "counters go on");
    assert!(agent.stop().success());
    assert_eq!(arrived(5), 0, "a graceful stop keeps enforcement");
    assert!(setup.run(&["unpin"]).status.success());
    // A veth may lose what it had queued when it leaves native mode.
    until("unpin ends it", WAIT, || (arrived(1) == 1).then_some(()));
    assert!(!limiter_tests::agent::exists(net.pin_dir()), "nothing stays pinned");
}

#[test]
fn no_gap_while_an_agent_restarts_under_traffic() {
    let net = TestNet::new();
    let policy = format!("deny = [\"{}/32\"]\n", CLIENT_V4[1]);
    let setup = setup(&net, "auto", "", &policy);
    let first = start(&net, &setup);
    let sink = net.gateway(|| UdpSocket::bind(SocketAddr::new(GATEWAY_V4, 80))).expect("a socket");
    sink.set_nonblocking(true).expect("not blocking");
    let sender = net.client(|| UdpSocket::bind(SocketAddr::new(CLIENT_V4[1], 0))).expect("a socket");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let agent = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                drop(sender.send_to(b"x", SocketAddr::new(GATEWAY_V4, 80)));
            }
        });
        let agent = (0..5).fold(first, |agent, _| {
            agent.kill();
            start(&net, &setup)
        });
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        agent
    });
    assert!(dropped(&agent, "denied") > 1000);
    assert!(sink.recv(&mut [0; 8]).is_err(), "not one packet came through");
}

#[test]
fn a_peek_and_a_request_too_large_for_what_is_left_push_nothing() {
    let net = TestNet::new();
    let setup = setup(&net, "auto", "", &ADDRESS_POLICY.replace("2s", "1h"));
    let agent = start(&net, &setup);
    let ask = |client: IpAddr, cost: u64, peek: bool| {
        let question = serde_json::json!({ "ip": client, "cost": cost, "peek": peek });
        agent.decide(question)["allowed"].as_bool().expect("an answer")
    };
    let [good, bad] = CLIENT_V4;
    assert_eq!([ask(good, 4, false), ask(good, 3, false), ask(good, 1, false)], [true, false, true]);
    assert!(!ask(good, 1, true), "nothing is left");
    assert_eq!([ask(bad, 5, false), ask(bad, 1, false)], [true, false]);
    // Denials are pushed in their order.
    let budget = until("the block is written", WAIT, || budgets(&agent).pop());
    assert_eq!(budget["prefix"], format!("{bad}/32"));
    assert_eq!(budgets(&agent).len(), 1);

    assert!(setup.run(&["unblock", &bad.to_string()]).status.success(), "an operator can lift it");
    assert_eq!(budgets(&agent).len(), 0);
}

#[test]
fn what_may_not_be_pushed_any_more_is_lifted_at_the_next_start() {
    let net = TestNet::new();
    let setup = setup(&net, "auto", "", &ADDRESS_POLICY.replace("2s", "1h"));
    let agent = start(&net, &setup);
    for client in CLIENT_V4 {
        for cost in [5, 1] {
            agent.decide(serde_json::json!({ "ip": client, "cost": cost }));
        }
    }
    until("the blocks are written", WAIT, || (budgets(&agent).len() == 2).then_some(()));
    agent.kill();
    let configuration = std::fs::read_to_string(setup.path("limiter.toml")).expect("the configuration");
    let proxy = format!("{configuration}[identity]\ntrusted_proxies = [\"{}\"]\n", CLIENT_V4[0]);
    setup.write("limiter.toml", &proxy);
    let agent = start(&net, &setup);
    let left = budgets(&agent);
    assert_eq!(left.iter().map(|budget| &budget["prefix"]).collect::<Vec<_>>(), [&format!("{}/32", CLIENT_V4[1])]);
}

#[test]
fn only_the_source_of_packets_is_pushed() {
    let net = TestNet::new();
    let more = "[identity]\ntrusted_proxies = [\"10.203.0.3/32\"]\n";
    let policy = format!("allow = [\"198.51.100.0/24\"]\n{ADDRESS_POLICY}");
    let setup = setup(&net, "auto", more, &policy);
    let agent = start(&net, &setup);
    let over = |forwarded: &str| {
        let deny = || Some(agent.check(&[("X-Forwarded-For", forwarded)]).status).filter(|status| *status == 429);
        until("the address is denied", WAIT, deny);
    };
    over("203.0.113.7, 10.203.0.3"); // behind a proxy
    over("10.203.0.3"); // the proxy itself
    over("198.51.100.9"); // allowed
    over(&GATEWAY_V4.to_string()); // this host
    over("127.0.0.1");
    over("192.0.2.1"); // a client of this host, and the last that is reported
    let budget = until("the client is blocked", WAIT, || budgets(&agent).pop());
    assert_eq!(budget["prefix"], "192.0.2.1/32");
    assert_eq!(budgets(&agent).len(), 1);
    assert_eq!(agent.metric("limiter_pushes_total{reason=\"address_over_limit\",result=\"ok\"}"), 1.0);
}

#[test]
fn operators_block_and_allow_for_a_time() {
    let net = TestNet::new();
    let setup = setup(&net, "auto", "", "allow = [\"10.203.0.3/32\"]\n");
    let agent = start(&net, &setup);
    let gateway = serve(&net, &setup, GATEWAY_V4);
    let [client, allowed] = CLIENT_V4;
    let run = |arguments: &[&str]| setup.run(arguments);

    let started = Stopwatch::start();
    let blocked = run(&["block", "10.203.0.0/24", "--for", "2s"]);
    assert_eq!(
        String::from_utf8_lossy(&blocked.stdout),
        "packets from 10.203.0.0/24 to what xdp.protect names are dropped, for 2s\n",
        "{blocked:?}"
    );
    assert_eq!(ask(&net, client, &gateway), None);
    assert_eq!(answer(&net, allowed, &gateway), Some(200), "allow goes first");
    until("the block is over", WAIT, || ask(&net, client, &gateway));
    assert!(started.elapsed() >= Duration::from_secs(2));

    assert!(run(&["block", "10.203.0.0/24"]).status.success());
    assert!(run(&["allow", &client.to_string(), "--for", "1h"]).status.success());
    assert_eq!(answer(&net, client, &gateway), Some(200));
    assert!(run(&["unallow", &client.to_string()]).status.success());
    assert_eq!(ask(&net, client, &gateway), None);
    let status = String::from_utf8(run(&["status"]).stdout).expect("text");
    assert!(status.contains("deny 10.203.0.0/24 (operator)"), "{status}");

    // What the policy has holds without an end, whatever an operator says.
    let known = run(&["allow", &allowed.to_string(), "--for", "1m"]);
    assert!(String::from_utf8_lossy(&known.stdout).contains("the policy file says so already"), "{known:?}");
    let behind = format!("allow {allowed}/32 (operator, counts once the policy does not list it) for ");
    let status = || String::from_utf8(run(&["status"]).stdout).expect("text");
    assert!(status().contains(&behind), "{}", status());
    let taken_back = run(&["unallow", &allowed.to_string()]);
    assert!(String::from_utf8_lossy(&taken_back.stdout).contains("the policy file allows it still"), "{taken_back:?}");
    assert!(!status().contains(&behind), "{}", status());
    let refused = run(&["unallow", &allowed.to_string()]);
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("the policy file has it, remove it there"),
        "{refused:?}"
    );

    let refused = run(&["block", &allowed.to_string()]);
    assert_eq!(refused.status.code(), Some(64), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("allow prefix 10.203.0.3/32"), "{refused:?}");
    let refused = run(&["unblock", "192.0.2.0/24"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("not in the deny list"), "{refused:?}");
    drop(agent);
}

#[test]
fn the_fallback_to_generic_mode_is_spoken() {
    let net = TestNet::new();
    let setup = setup(&net, "auto", "", "");
    let configuration = std::fs::read_to_string(setup.path("limiter.toml")).expect("the configuration");
    // Loopback has no native mode.
    setup.write("limiter.toml", &configuration.replace(INTERFACE, "lo"));
    let agent = start(&net, &setup);
    assert_eq!(agent.status()["xdp"]["interfaces"][0]["mode"], "generic");
    assert!(setup.log().lines().any(|line| line.contains("WARN") && line.contains("generic")), "{}", setup.log());
}

#[test]
fn the_agent_needs_no_xdp_to_answer() {
    let setup = Setup::new("", ADDRESS_POLICY);
    let agent = setup.start();
    assert_eq!(agent.status()["xdp"], Value::Null);
    let refused = setup.run(&["block", "192.0.2.1"]);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("without XDP"), "{refused:?}");
    assert_eq!(http::get(&setup.admin(), "/healthz", &[]).expect("an answer").status, 200);
}

use limiter_common::{bucket::Bucket, leaky_bucket::LeakyBucket, quota::Rate, sliding_window::Window};

use super::*;

const FILE: &str = "/etc/limiter/policy.toml";
const SECOND_NS: u64 = 1_000_000_000;

fn parse(text: &str) -> Result<Policy, ConfigErrors> {
    Policy::parse(Path::new(FILE), text)
}

/// A rule with everything that it needs, and what else is given.
fn rule(fields: &str) -> String {
    format!("[plans.free]\n[plans.pro]\n[[rules]]\nid = \"r\"\nscope = \"key\"\nwindow = \"1s\"\n{fields}\n")
}

fn packet_rule(fields: &str) -> String {
    format!("[[packet_rules]]\nid = \"p\"\ncidr = \"0.0.0.0/0\"\n{fields}\n")
}

/// A packet rule with these prefixes.
fn cidrs(value: &str) -> String {
    format!("[[packet_rules]]\nid = \"p\"\ncidr = {value}\npackets = \"unlimited\"\n")
}

fn quota(count: u64, per_ns: u64, burst: u64) -> Option<Quota> {
    Some(Quota { rate: Rate { count, per_ns }, burst })
}

#[test]
fn an_empty_policy_limits_nothing() {
    let policy = parse("").unwrap();
    assert!(policy.rules.is_empty() && policy.packet_rules.is_empty() && policy.endpoints.is_empty());
    assert!(policy.allow.is_empty() && policy.deny.is_empty() && policy.plans.is_empty());
}

#[test]
fn the_example_is_valid() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/policy.toml"));
    let policy = Policy::load(path).unwrap();
    assert_eq!((policy.rules.len(), policy.packet_rules.len()), (5, 3));
    let (free, pro) = (policy.plan("free").unwrap(), policy.plan("pro").unwrap());
    let [total, search, login, export, address] = &policy.rules[..] else { panic!("{policy:?}") };

    assert_eq!(
        (&*total.id, total.scope, total.endpoint, total.window_us),
        ("client-total", Scope::User, None, 60_000_000)
    );
    assert_eq!(total.limit_for(Some(free)).ceiling(), Some(100));
    assert_eq!(total.limit_for(Some(pro)).ceiling(), Some(1000));
    // Without a limit of its own the rule holds everybody else to the strictest plan.
    assert_eq!(total.limit_for(None).ceiling(), Some(100));

    assert_eq!((search.scope, search.endpoint, search.mode), (Scope::Key, Some(0), EnforcementMode::Enforce));
    assert_eq!(search.limit_for(None).ceiling(), Some(25));
    assert_eq!(search.limit_for(Some(free)).ceiling(), Some(25));
    assert_eq!(search.limit_for(Some(pro)), Limit::Unlimited);
    assert_eq!((login.scope, login.endpoint, login.cost), (Scope::Ip, Some(1), 1));
    let bucket = LeakyBucket::new(2, 1_000_000, 10, 5_000_000).unwrap();
    assert_eq!(export.limit, Limit::Limited(Algorithm::LeakyBucket { bucket, window_us: 1_000_000 }));
    assert_eq!(address.mode, EnforcementMode::Shadow);

    let matches = |method, path| policy.endpoints.matches(method, path, &mut Scratch::default()).to_vec();
    assert_eq!(matches("GET", "/api//v1/%73earch?q=x"), [0]);
    assert_eq!(matches("POST", "/api/v1/sessions"), [1]);
    assert_eq!(matches("GET", "/login"), [0usize; 0]);

    let [v4, v6, office] = &policy.packet_rules[..] else { panic!("{policy:?}") };
    assert_eq!(v4.packets, quota(10_000, SECOND_NS, 20_000));
    assert_eq!(v4.bytes, quota(25_000_000, SECOND_NS, 50_000_000));
    assert_eq!(v6.bytes, quota(25_000_000, SECOND_NS, 25_000_000));
    assert_eq!(v6.new_connections, quota(100, SECOND_NS, 100));
    assert_eq!((office.packets, office.mode), (None, EnforcementMode::Shadow));
}

#[test]
fn burst_factors_are_exact() {
    for (factor, limit, ceiling) in [
        ("1.001", 1000, 1001),
        ("\"1.001\"", 1000, 1001),
        ("1.1", 10, 11),
        ("1.15", 100, 115),
        ("2", 10, 20),
        ("1.0", 10, 10),
        ("1.999", 1, 1),
        ("1000", 1, 1000),
    ] {
        let policy = parse(&rule(&format!("limit = {limit}\nburst_factor = {factor}"))).expect(factor);
        assert_eq!(policy.rules[0].limit.ceiling(), Some(ceiling), "{factor}");
    }
}

#[test]
fn each_algorithm_has_its_parameters() {
    let window = Window { window_us: 1_000_000, ceiling: 12 };
    let window_us = 1_000_000;
    for (fields, expected) in [
        ("", Algorithm::SlidingWindow(window)),
        ("algorithm = \"sliding_window\"", Algorithm::SlidingWindow(window)),
        ("algorithm = \"fixed_window\"", Algorithm::FixedWindow(window)),
        ("algorithm = \"sliding_log\"", Algorithm::SlidingLog(window)),
        (
            "algorithm = \"token_bucket\"",
            Algorithm::TokenBucket { bucket: Bucket::new(10, window_us, 12).unwrap(), window_us },
        ),
    ] {
        let policy = parse(&rule(&format!("limit = 10\nburst_factor = 1.2\n{fields}"))).expect(fields);
        assert_eq!(policy.rules[0].limit, Limit::Limited(expected), "{fields}");
    }
    for (fields, max_delay_us) in [("", 60_000_000), ("max_delay = \"250ms\"", 250_000)] {
        let fields = format!("limit = 10\nalgorithm = \"leaky_bucket\"\nburst = 3\n{fields}");
        let bucket = LeakyBucket::new(10, window_us, 3, max_delay_us).unwrap();
        let policy = parse(&rule(&fields)).expect(&fields);
        assert_eq!(policy.rules[0].limit, Limit::Limited(Algorithm::LeakyBucket { bucket, window_us }), "{fields}");
    }
}

#[test]
fn a_limit_of_any_size_is_an_error_or_what_it_says() {
    let limits = [0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 1, (1 << 32) + 1, 1 << 53, (1 << 53) + 1];
    let mut accepted = 0;
    for limit in limits.into_iter().chain([u64::MAX >> 1, u64::MAX]) {
        for window in ["1ms", "1s", "1h", "100d", "366d"] {
            for (name, burst) in [
                ("sliding_window", None),
                ("fixed_window", None),
                ("sliding_log", None),
                ("token_bucket", None),
                ("leaky_bucket", Some(5)),
            ] {
                let burst_field = burst.map_or_else(String::new, |burst| format!("burst = {burst}"));
                let text = rule(&format!("limit = {limit}\nalgorithm = \"{name}\"\n{burst_field}"))
                    .replace("\"1s\"", &format!("\"{window}\""));
                match parse(&text) {
                    Ok(policy) => {
                        accepted += 1;
                        let most = burst.map_or(limit, |burst| burst + 1);
                        assert_eq!(policy.rules[0].limit.ceiling(), Some(most), "{text}");
                    }
                    Err(errors) => {
                        let errors = errors.to_string();
                        let is_right = match (limit, name) {
                            (0, _) => errors.contains("limit is 0"),
                            (limit, _) if limit > 1 << 53 => errors.contains("2^53") || errors.contains("too large"),
                            (_, "sliding_log") => limit > 10_000 && errors.contains("10000 at most"),
                            (_, "token_bucket" | "leaky_bucket") => {
                                errors.contains("too high for a bucket") || errors.contains("more than 104 days")
                            }
                            _ => false,
                        };
                        assert!(is_right && errors.contains("rules[0].limit: "), "{text}: {errors}");
                    }
                }
            }
        }
    }
    assert!(accepted >= 100, "{accepted}");
}

#[test]
fn default_bursts_are_a_second_and_at_least_one_packet() {
    for (limit, expected) in [
        ("packets = { rate = \"100/s\" }", quota(100, SECOND_NS, 100)),
        ("packets = { rate = \"30/m\" }", quota(30, 60 * SECOND_NS, 1)),
        ("packets = { rate = \"600/m\" }", quota(600, 60 * SECOND_NS, 10)),
    ] {
        assert_eq!(parse(&packet_rule(limit)).expect(limit).packet_rules[0].packets, expected, "{limit}");
    }
    for (limit, burst) in [
        ("bytes = { rate = \"1kB/s\" }", 65_536),
        ("bytes = { rate = \"1.5MB/s\" }", 1_500_000),
        ("bytes = { rate = \"1.5MB/s\", burst = 1514 }", 1514),
        ("bytes = { rate = \"1.5MB/s\", burst = \"64KiB\" }", 65_536),
    ] {
        let bytes = parse(&packet_rule(limit)).expect(limit).packet_rules[0].bytes;
        assert_eq!(bytes.map(|quota| quota.burst), Some(burst), "{limit}");
    }
    for unlimited in ["packets = \"unlimited\"", "packets = { rate = \"unlimited\" }"] {
        assert_eq!(parse(&packet_rule(unlimited)).expect(unlimited).packet_rules[0].packets, None);
    }
}

#[test]
fn deny_may_hold_more_than_allow() {
    let policy = parse("allow = [\"10.1.0.0/16\", \"10.1.0.0/16\"]\ndeny = [\"10.0.0.0/8\", \"192.0.2.1\"]").unwrap();
    assert_eq!(policy.allow, ["10.1.0.0/16".parse().unwrap()]);
    assert_eq!(policy.deny, ["10.0.0.0/8".parse().unwrap(), "192.0.2.1/32".parse().unwrap()]);
}

/// One mistake each: the text, and the whole message.
#[test]
fn bad_policies_are_refused_with_line_and_key() {
    let two = |a: &str, b: &str| format!("{}{}", packet_rule(a), packet_rule(b));
    let limit = |fields: &str| rule(&format!("limit = 1\n{fields}"));
    let endpoint = |fields: &str| format!("[[endpoints]]\n{fields}\n");
    for (text, message) in [
        ("alow = []".into(), "1: alow: unknown field: did you mean \"allow\"?"),
        ("[[bypass]]\npath = \"/\"".into(), "1: bypass: is not available in this version"),
        ("[rules]\nid = \"r\"".into(), "1: rules: there can be several: write [[rules]]"),
        ("rules = [1]".into(), "1: rules[0]: expected a table, found an integer"),
        (
            "allow = [\"10.0.0.1/8\"]".into(),
            "1: allow[0]: 10.0.0.1/8 has bits set beyond its length: did you mean 10.0.0.0/8?",
        ),
        ("deny = [\n1,\n]".into(), "2: deny[0]: expected a prefix, found an integer"),
        (
            "allow = [\"10.0.0.0/8\"]\ndeny = [\"10.0.0.0/8\"]".into(),
            "2: deny[0]: 10.0.0.0/8 would never be denied: allow has 10.0.0.0/8, and allow wins",
        ),
        (
            "allow = [\"10.0.0.0/8\"]\ndeny = [\"10.1.2.3\"]".into(),
            "2: deny[0]: 10.1.2.3/32 would never be denied: allow has 10.0.0.0/8, and allow wins",
        ),
        (
            "allow = [\"10.0.0.0/8\"]\n[[packet_rules]]\nid = \"p\"\ncidr = \"10.1.0.0/16\"\npackets = { rate = \"1/s\" }".into(),
            "4: packet_rules[0].cidr: 10.1.0.0/16 would never be limited: allow has 10.0.0.0/8, and allow wins",
        ),
        ("[plans.\"a b\"]".into(), "1: plans.a b: \"a b\" is not 1 to 64 of the characters A-Z a-z 0-9 _ . -"),
        ("[plans.free]\ninherits = \"pro\"".into(), "2: plans.free.inherits: unknown field: known are description"),
        ("[plans]\nfree = 5".into(), "2: plans.free: expected a table, found an integer"),
        // Endpoint groups.
        (endpoint("match = [\"/\"]"), "1: endpoints[0].name: is missing"),
        (endpoint("name = \"a\""), "1: endpoints[0].match: is missing"),
        (endpoint("name = \"a\"\nmatch = []"), "3: endpoints[0].match: is empty, so nothing would ever match"),
        (
            endpoint("name = \"a\"\nmatch = [\"login\"]"),
            "3: endpoints[0].match[0]: \"login\" has no path: write \"[METHOD ]/PATH\", as in \"GET /api/v1/search/*\"",
        ),
        (
            endpoint("name = \"a\"\nmatch = [\"/\"]\n[[endpoints]]\nname = \"a\"\nmatch = [\"/\"]"),
            "5: endpoints[1].name: \"a\" is the name of an endpoint group above already",
        ),
        // Rules.
        ("[[rules]]\nscope = \"ip\"\nwindow = \"1s\"\nlimit = 1".into(), "1: rules[0].id: is missing"),
        ("[[rules]]\nid = \"r\"\nwindow = \"1s\"\nlimit = 1".into(), "1: rules[0].scope: is missing"),
        ("[[rules]]\nid = \"r\"\nscope = \"ip\"\nlimit = 1".into(), "1: rules[0].window: is missing"),
        (rule(""), "3: rules[0].limit: is missing, and there are no plans with limits either"),
        (rule("limit = 0"), "7: rules[0].limit: limit is 0: use \"unlimited\" or remove the entry"),
        (rule("limit = -1"), "7: rules[0].limit: -1 is negative"),
        (rule("limit = 1.5"), "7: rules[0].limit: is neither a whole number nor \"unlimited\""),
        (rule("limit = \"none\""), "7: rules[0].limit: is neither a whole number nor \"unlimited\""),
        (
            rule("limit = 9007199254740993"),
            "7: rules[0].limit: times the burst factor it is above 2^53 (9007199254740992): use \"unlimited\"",
        ),
        (
            rule("limit = 9007199254740992\nburst_factor = 1.001"),
            "7: rules[0].limit: times the burst factor it is above 2^53 (9007199254740992): use \"unlimited\"",
        ),
        (
            rule("plans = { free = 0, pro = 1 }"),
            "7: rules[0].plans.free: limit is 0: use \"unlimited\" or remove the entry",
        ),
        (
            rule("limit = 1\nplans = { pri = 1 }"),
            "8: rules[0].plans.pri: there is no plan \"pri\": did you mean \"pro\"?",
        ),
        (
            rule("limit = 1\nplans = { enterprise = 1 }"),
            "8: rules[0].plans.enterprise: there is no plan \"enterprise\": declared are free, pro",
        ),
        (rule("plans = { pro = 1 }"), "3: rules[0].plans: has no limit for free: add it, or a limit for all others"),
        (limit("endpoint = \"login\""), "8: rules[0].endpoint: there is no endpoint group \"login\": none is declared"),
        (
            format!("{}{}", endpoint("name = \"search\"\nmatch = [\"/\"]"), limit("endpoint = \"login\"")),
            "11: rules[0].endpoint: there is no endpoint group \"login\": declared are search",
        ),
        (
            rule("limit = 10001\nalgorithm = \"sliding_log\""),
            "7: rules[0].limit: sliding_log remembers each admission, 10000 at most: use sliding_window",
        ),
        (
            rule("limit = 5001\nburst_factor = 2\nalgorithm = \"sliding_log\""),
            "7: rules[0].limit: sliding_log remembers each admission, 10000 at most: use sliding_window",
        ),
        (
            limit("algorithm = \"magic\""),
            "8: rules[0].algorithm: \"magic\" is not one of \"sliding_window\", \"token_bucket\", \"fixed_window\", \
             \"sliding_log\", \"leaky_bucket\"",
        ),
        (
            limit("algorithm = \"leaky_bucket\""),
            "3: rules[0].burst: is missing: leaky_bucket needs to know how many requests may wait",
        ),
        (limit("algorithm = \"leaky_bucket\"\nburst = 0"), "9: rules[0].burst: 0 is outside 1 to 9007199254740992"),
        (
            limit("algorithm = \"leaky_bucket\"\nburst = 5\nburst_factor = 2"),
            "10: rules[0].burst_factor: has no meaning for leaky_bucket: burst says how many requests may wait",
        ),
        (
            limit("algorithm = \"leaky_bucket\"\nburst = 5\nmax_delay = \"61s\""),
            "10: rules[0].max_delay: a delay is at least 1 ms and at most 60 s: gateways do not wait longer for an answer",
        ),
        (
            limit("algorithm = \"leaky_bucket\"\nburst = 5\ncost = 7"),
            "7: rules[0].limit: no request could ever pass: each costs 7, and the most is 6",
        ),
        (
            limit("algorithm = \"token_bucket\"\nburst = 5"),
            "9: rules[0].burst: is a field of leaky_bucket: other algorithms have burst_factor",
        ),
        (
            limit("max_delay = \"1s\""),
            "8: rules[0].max_delay: is a field of leaky_bucket: other algorithms hold no answer",
        ),
        (
            rule("limit = 9007199254740992\nalgorithm = \"token_bucket\""),
            "7: rules[0].limit: the rate is too high for a bucket, whose units take whole nanoseconds: use sliding_window",
        ),
        (
            rule("limit = 1\nalgorithm = \"token_bucket\"").replace("1s", "366d"),
            "7: rules[0].limit: an exhausted bucket would take more than 104 days to fill: use sliding_window",
        ),
        (limit("precision = \"strict\""), "8: rules[0].precision: \"strict\" is not available in this version"),
        (limit("on_store_failure = \"open\""), "8: rules[0].on_store_failure: is not available in this version"),
        (limit("region = \"home\""), "8: rules[0].region: is not available in this version"),
        (limit("mode = \"dry\""), "8: rules[0].mode: \"dry\" is not one of \"enforce\", \"shadow\", \"off\""),
        (
            limit("burst_factor = 0.5"),
            "8: rules[0].burst_factor: is not a number from 1 to 1000 with at most three decimals",
        ),
        (
            limit("burst_factor = 1.0001"),
            "8: rules[0].burst_factor: is not a number from 1 to 1000 with at most three decimals",
        ),
        (
            limit("burst_factor = nan"),
            "8: rules[0].burst_factor: is not a number from 1 to 1000 with at most three decimals",
        ),
        (
            limit("burst_factor = 1e1"),
            "8: rules[0].burst_factor: is not a number from 1 to 1000 with at most three decimals",
        ),
        (limit("cost = 0"), "8: rules[0].cost: 0 is outside 1 to 9007199254740992"),
        (limit("cost = 2"), "7: rules[0].limit: no request could ever pass: each costs 2, and the most is 1"),
        (limit("costs = 2"), "8: rules[0].costs: unknown field: did you mean \"cost\"?"),
        (
            "[[rules]]\nid = \"r\"\nscope = \"city\"\nwindow = \"1s\"\nlimit = 1".into(),
            "3: rules[0].scope: \"city\" is not one of \"user\", \"key\", \"session\", \"ip\", \"global\"",
        ),
        (
            "[[rules]]\nid = \"a/b\"\nscope = \"ip\"\nwindow = \"1s\"\nlimit = 1".into(),
            "2: rules[0].id: \"a/b\" is not 1 to 64 of the characters A-Z a-z 0-9 _ . -",
        ),
        (
            "[[rules]]\nid = \"r\"\nscope = \"ip\"\nwindow = 60\nlimit = 1".into(),
            "4: rules[0].window: expected a duration such as \"1m\", found an integer",
        ),
        (
            "[[rules]]\nid = \"r\"\nscope = \"ip\"\nwindow = \"999us\"\nlimit = 1".into(),
            "4: rules[0].window: a window is at least 1 ms and at most 366 days",
        ),
        (
            "[[rules]]\nid = \"r\"\nscope = \"ip\"\nwindow = \"367d\"\nlimit = 1".into(),
            "4: rules[0].window: a window is at least 1 ms and at most 366 days",
        ),
        (
            "[[rules]]\nid = \"r\"\nscope = \"ip\"\nwindow = \"1.0000005s\"\nlimit = 1".into(),
            "4: rules[0].window: a window is a whole number of microseconds",
        ),
        (
            format!("{}{}", limit(""), "[[rules]]\nid = \"r\"\nscope = \"ip\"\nwindow = \"1s\"\nlimit = 1"),
            "10: rules[1].id: \"r\" is the name of a rule above already",
        ),
        (
            format!("{}{}", limit(""), "[[packet_rules]]\nid = \"r\"\ncidr = \"::/0\"\npackets = \"unlimited\""),
            "10: packet_rules[0].id: \"r\" is the name of a rule above already",
        ),
        // Packet rules.
        (
            packet_rule(""),
            "1: packet_rules[0]: limits nothing: give packets, bytes or new_connections, or say \"unlimited\"",
        ),
        ("[[packet_rules]]\nid = \"p\"\npackets = \"unlimited\"".into(), "1: packet_rules[0].cidr: is missing"),
        (packet_rule("packets = 100"), "4: packet_rules[0].packets: expected a table, found an integer"),
        (packet_rule("packets = {}"), "4: packet_rules[0].packets.rate: is missing"),
        (
            packet_rule("packets = { rate = \"0/s\" }"),
            "4: packet_rules[0].packets.rate: rate is 0: use \"unlimited\" or remove the entry",
        ),
        (
            packet_rule("packets = { rate = 100 }"),
            "4: packet_rules[0].packets.rate: expected a rate such as \"100/s\", found an integer",
        ),
        (
            packet_rule("packets = { rate = \"1/s\", burst = 0 }"),
            "4: packet_rules[0].packets.burst: burst is 0, so nothing could ever pass: use at least 1",
        ),
        (
            packet_rule("packets = { rate = \"1/d\", burst = 31 }"),
            "4: packet_rules[0].packets.burst: an exhausted bucket would take more than 30 days to fill: lower the burst or \
             raise the rate",
        ),
        (
            packet_rule("packets = { rate = \"200000000000/s\" }"),
            "4: packet_rules[0].packets.rate: rate is above 100000000000 a second: use \"unlimited\"",
        ),
        (
            packet_rule("packets = { rate = \"unlimited\", burst = 1 }"),
            "4: packet_rules[0].packets.burst: has no meaning where the rate is \"unlimited\"",
        ),
        (
            packet_rule("bytes = { rate = \"1MB/s\", burst = 1513 }"),
            "4: packet_rules[0].bytes.burst: 1513 bytes never let a packet of full size pass: use at least 1514",
        ),
        (
            packet_rule("bytes = { rate = \"100/s\" }"),
            "4: packet_rules[0].bytes.rate: \"100\" has no unit: write a rate of bytes such as \"10MB/s\" (/s, /m, /h, /d)",
        ),
        (
            two("packets = \"unlimited\"", "packets = \"unlimited\"").replacen("\"p\"", "\"q\"", 1),
            "7: packet_rules[1].cidr: the packet rules \"q\" and \"p\" both have the prefix 0.0.0.0/0",
        ),
        (cidrs("[]"), "3: packet_rules[0].cidr: is empty, so nothing would ever be limited: name a prefix, or remove the rule"),
        (cidrs("5"), "3: packet_rules[0].cidr: expected a prefix, or a list of prefixes, found an integer"),
        (cidrs("[\"::/0\", 5]"), "3: packet_rules[0].cidr[1]: expected a prefix, found an integer"),
        (cidrs("[\"::/0\", \"192.0.2.1\", \"::/0\"]"), "3: packet_rules[0].cidr[2]: ::/0 is named twice"),
        (
            format!("{}{}", cidrs("[\"::/0\", \"10.0.0.0/8\"]").replacen("\"p\"", "\"q\"", 1), cidrs("[\n\"10.0.0.0/8\"]")),
            "8: packet_rules[1].cidr[0]: the packet rules \"q\" and \"p\" both have the prefix 10.0.0.0/8",
        ),
        (
            format!("allow = [\"10.0.0.0/8\"]\n{}", cidrs("[\"::/0\", \"10.1.2.3\"]")),
            "4: packet_rules[0].cidr[1]: 10.1.2.3/32 would never be limited: allow has 10.0.0.0/8, and allow wins",
        ),
    ] {
        let errors = parse(&text).expect_err(&text);
        assert_eq!(errors.to_string(), format!("{FILE}:{message}"), "{text}");
    }
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let text = "[[endpoints]]\nname = \"a\"\nmach = [\"/\"]\n[[rules]]\nid = \"r\"\nscope = \"ipp\"\nendpoint = \"b\"\n\
                limit = 0\nwindow = \"1x\"\nextra = 1\n[[packet_rules]]\nid = \"r\"\ncidr = \"::1/64\"\nbytes = 5\n";
    let errors = parse(text).unwrap_err().to_string();
    let expected = [
        "1: endpoints[0].match: is missing",
        "3: endpoints[0].mach: unknown field: did you mean \"match\"?",
        "6: rules[0].scope: \"ipp\" is not one of \"user\", \"key\", \"session\", \"ip\", \"global\"",
        "7: rules[0].endpoint: there is no endpoint group \"b\": declared are a",
        "8: rules[0].limit: limit is 0: use \"unlimited\" or remove the entry",
        "9: rules[0].window: \"1x\" is not a duration such as \"50ms\" (us, ms, s, m, h, d)",
        "10: rules[0].extra: unknown field: known are id, scope, endpoint, limit, plans, window, algorithm, burst_factor, burst, \
         max_delay, cost, precision, mode, on_store_failure, region",
        "12: packet_rules[0].id: \"r\" is the name of a rule above already",
        "13: packet_rules[0].cidr: ::1/64 has bits set beyond its length: did you mean ::/64?",
        "14: packet_rules[0].bytes: expected a table, found an integer",
    ];
    let expected: Vec<String> = expected.iter().map(|line| format!("{FILE}:{line}")).collect();
    assert_eq!(errors.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn rules_of_both_kinds_share_the_kernels_slots() {
    let rules = |count: usize| -> String {
        let rule = |n| format!("[[rules]]\nid = \"r{n}\"\nscope = \"ip\"\nlimit = 1\nwindow = \"1s\"\n");
        (0..count).map(rule).collect::<String>() + &packet_rule("packets = \"unlimited\"")
    };
    assert!(parse(&rules(32_766)).is_ok());
    let errors = parse(&rules(32_767)).unwrap_err().to_string();
    assert!(errors.ends_with("packet_rules: 32768 rules and packet rules together: at most 32767 fit"), "{errors}");
}

#[test]
fn a_packet_rule_can_have_several_prefixes() {
    let policy = parse(&cidrs("[\"192.0.2.0/24\", \"::/0\", \"203.0.113.7\"]")).unwrap();
    let expected = ["192.0.2.0/24", "::/0", "203.0.113.7/32"].map(|prefix| prefix.parse().unwrap());
    assert_eq!(policy.packet_rules[0].cidrs, expected);
}

#[test]
fn prefixes_of_packet_rules_over_the_maps_capacity_are_refused() {
    let list: String = (0..=16_384u32).map(|n| format!("\"{}\",", std::net::Ipv4Addr::from(n << 8))).collect();
    let errors = parse(&cidrs(&format!("[{list}\"::1\"]"))).unwrap_err().to_string();
    assert_eq!(errors, format!("{FILE}:1: packet_rules: 16385 IPv4 prefixes: at most 16384 fit"));
}

#[test]
fn prefixes_over_the_maps_capacity_are_refused() {
    let list: String = (0..=131_072u32).map(|n| format!("\"{}\",", std::net::Ipv4Addr::from(n))).collect();
    let errors = parse(&format!("deny = [{list}\"::1\"]")).unwrap_err().to_string();
    assert_eq!(errors, format!("{FILE}:1: deny: 131073 IPv4 prefixes: at most 131072 fit"));
}

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
fn a_policy_to_begin_with_limits_nothing() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/starter.toml"));
    let policy = Policy::load(path).unwrap();
    let modes = policy.rules.iter().map(|rule| rule.mode).chain(policy.packet_rules.iter().map(|rule| rule.mode));
    assert_eq!(modes.collect::<Vec<_>>(), [EnforcementMode::Shadow; 4]);
    assert!(policy.deny.is_empty() && policy.plan("free").is_some());
}

#[test]
fn the_example_is_valid() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/policy.toml"));
    let policy = Policy::load(path).unwrap();
    assert_eq!((policy.rules.len(), policy.packet_rules.len()), (9, 3));
    let (free, pro) = (policy.plan("free").unwrap(), policy.plan("pro").unwrap());
    let [total, search, login, export, address, everything, precise @ ..] = &policy.rules[..] else {
        panic!("{policy:?}")
    };
    let precisions: Vec<_> = precise.iter().map(|rule| rule.precision).collect();
    assert_eq!(precisions, [Precision::Strict, Precision::Leased, Precision::Local]);
    assert_eq!(search.precision, Precision::Async);

    assert_eq!(
        (&*total.id, total.scope, total.endpoint, total.window_us),
        ("client-total", Scope::User, None, 60_000_000)
    );
    assert_eq!(total.limit_for(None, Some(free)).ceiling(), Some(100));
    assert_eq!(total.limit_for(None, Some(pro)).ceiling(), Some(1000));
    // Without a limit of its own the rule holds everybody else to the strictest plan.
    assert_eq!(total.limit_for(None, None).ceiling(), Some(100));
    assert_eq!(total.limit_for(None, policy.plan("partner")).ceiling(), Some(1000));
    assert_eq!(total.limit_for(Some("acme"), Some(free)).ceiling(), Some(5000));
    assert_eq!((policy.bypass.cidrs.iter().count(), policy.bypass.paths.len()), (1, 1));

    assert_eq!((search.scope, search.endpoint, search.mode), (Scope::Key, Some(0), EnforcementMode::Enforce));
    assert_eq!(search.limit_for(None, None).ceiling(), Some(25));
    assert_eq!(search.limit_for(None, Some(free)).ceiling(), Some(25));
    assert_eq!(search.limit_for(None, Some(pro)), Limit::Unlimited);
    let adaptive = everything.adaptive.unwrap();
    assert_eq!((adaptive.floor, adaptive.target, adaptive.decrease), (5000, 800_000, 700_000));
    assert_eq!((adaptive.target_latency_us, adaptive.recover_us), (Some(250_000), 60_000_000));
    assert!(login.response.as_ref().is_some_and(|response| response.body.is_some()));
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
        // What is never limited.
        ("[bypass]\npath = \"/\"".into(), "1: bypass: there can be several: write [[bypass]]"),
        (
            "[[bypass]]".into(),
            "1: bypass[0]: an entry has either cidr or key_id or path: write several entries",
        ),
        (
            "[[bypass]]\npath = \"/\"\ncidr = \"::/0\"".into(),
            "1: bypass[0]: an entry has either cidr or key_id or path: write several entries",
        ),
        ("[[bypass]]\nkey_ids = \"k\"\npath = \"/\"".into(), "2: bypass[0].key_ids: unknown field: did you mean \"key_id\"?"),
        ("[[bypass]]\npath = []".into(), "2: bypass[0].path: is empty, so nothing would be let through"),
        ("[[bypass]]\npath = 5".into(), "2: bypass[0].path: expected a pattern, or a list of patterns, found an integer"),
        (
            "[[bypass]]\npath = [\"/a\", \"GET /b\", \"//a/\"]".into(),
            "2: bypass[0].path[2]: is named twice",
        ),
        (
            "[[bypass]]\npath = \"healthz\"".into(),
            "2: bypass[0].path: \"healthz\" has no path: write \"[METHOD ]/PATH\", as in \"GET /api/v1/search/*\"",
        ),
        (
            "[[bypass]]\nkey_id = \"lk_secret\"".into(),
            "2: bypass[0].key_id: is not 32 hexadecimal digits: \"limiter keys list\" shows the ids of keys",
        ),
        (
            "[[bypass]]\ncidr = \"10.0.0.1/8\"".into(),
            "2: bypass[0].cidr: 10.0.0.1/8 has bits set beyond its length: did you mean 10.0.0.0/8?",
        ),
        (
            "[[bypass]]\ncidr = \"::/0\"\n[[bypass]]\ncidr = [\"::/0\"]".into(),
            "4: bypass[1].cidr[0]: is named twice",
        ),
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
        (
            "[plans.free]\n[plans.pro]\ninherits = \"fre\"".into(),
            "3: plans.pro.inherits: there is no plan \"fre\": did you mean \"free\"?",
        ),
        ("[plans.free]\ninherits = 5".into(), "2: plans.free.inherits: expected the name of a plan, found an integer"),
        (
            "[plans.free]\ninherits = \"free\"".into(),
            "2: plans.free.inherits: the plan inherits from itself: free -> free",
        ),
        (
            "[plans.x]\ninherits = \"a\"\n[plans.a]\ninherits = \"b\"\n[plans.b]\ninherits = \"c\"\n[plans.c]\n\
             inherits = \"a\"".into(),
            "4: plans.a.inherits: the plan inherits from itself: a -> b -> c -> a",
        ),
        // Single clients.
        (format!("{}[[overrides]]\nrule = \"r\"\nlimit = 1", limit("")), "9: overrides[0].client: is missing"),
        (format!("{}[[overrides]]\nclient = \"c\"\nlimit = 1", limit("")), "9: overrides[0].rule: is missing"),
        (format!("{}[[overrides]]\nclient = \"c\"\nrule = \"r\"", limit("")), "9: overrides[0].limit: is missing"),
        (
            format!("{}[[overrides]]\nclient = \"\"\nrule = \"r\"\nlimit = 1", limit("")),
            "10: overrides[0].client: a client has 1 to 256 bytes",
        ),
        (
            format!("{}[[overrides]]\nclient = \"c\"\nrule = \"q\"\nlimit = 1", limit("")),
            "11: overrides[0].rule: there is no rule \"q\": declared are r",
        ),
        (
            format!("{}[[overrides]]\nclient = \"c\"\nrule = \"r\"\nlimit = 0", limit("")),
            "12: overrides[0].limit: limit is 0: use \"unlimited\" or remove the entry",
        ),
        (
            format!("{}[[overrides]]\nclient = \"c\"\nrule = \"r\"\nlimit = 10001", limit("algorithm = \"sliding_log\"")),
            "12: overrides[0].limit: sliding_log remembers each admission, 10000 at most: use sliding_window",
        ),
        (
            format!(
                "{}[[overrides]]\nclient = \"c\"\nrule = \"r\"\nlimit = 2\n[[overrides]]\nclient = \"c\"\nrule = \"r\"\nlimit = 3",
                limit("")
            ),
            "15: overrides[1].rule: the client \"c\" has a limit for \"r\" above already",
        ),
        // Attributes and the most specific.
        (
            limit("").replace("\"key\"", "\"attribute:\""),
            "5: rules[0].scope: the name of the attribute \"\" is not 1 to 64 of the characters A-Z a-z 0-9 _ . -",
        ),
        (
            limit("").replace("\"key\"", "\"attribute:a:b\""),
            "5: rules[0].scope: the name of the attribute \"a:b\" is not 1 to 64 of the characters A-Z a-z 0-9 _ . -",
        ),
        (limit("match = \"best\""), "8: rules[0].match: \"best\" is not one of \"all\", \"most_specific\""),
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
        (
            limit("on_store_failure = \"shut\""),
            "8: rules[0].on_store_failure: \"shut\" is not one of \"open\", \"local\", \"closed\"",
        ),
        (
            "[[endpoints]]\nname = \"e\"\nmatch = [\"/a\"]\non_store_failure = 1".to_owned(),
            "4: endpoints[0].on_store_failure: expected a word, found an integer",
        ),
        (
            limit("precision = \"exact\""),
            "8: rules[0].precision: \"exact\" is not one of \"async\", \"leased\", \"strict\", \"local\"",
        ),
        (
            limit("precision = \"leased\"\nalgorithm = \"token_bucket\""),
            "8: rules[0].precision: \"leased\" is for windows: a unit of a token_bucket that is used later than it was taken lets \
             more pass than the limit; token_bucket has \"async\", \"strict\" and \"local\"",
        ),
        (
            limit("precision = \"leased\"\nalgorithm = \"sliding_log\""),
            "8: rules[0].precision: \"leased\" is for windows: a unit of a sliding_log that is used later than it was taken lets \
             more pass than the limit; sliding_log has \"async\", \"strict\" and \"local\"",
        ),
        (
            limit("precision = \"leased\"\nalgorithm = \"leaky_bucket\"\nburst = 5"),
            "8: rules[0].precision: \"leased\" is for windows: a unit of a leaky_bucket that is used later than it was taken lets \
             more pass than the limit; leaky_bucket has \"async\", \"strict\" and \"local\"",
        ),
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
            "3: rules[0].scope: \"city\" is not one of \"user\", \"key\", \"session\", \"ip\", \"global\", \"attribute:NAME\"",
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
        "6: rules[0].scope: \"ipp\" is not one of \"user\", \"key\", \"session\", \"ip\", \"global\", \"attribute:NAME\"",
        "7: rules[0].endpoint: there is no endpoint group \"b\": declared are a",
        "8: rules[0].limit: limit is 0: use \"unlimited\" or remove the entry",
        "9: rules[0].window: \"1x\" is not a duration such as \"50ms\" (us, ms, s, m, h, d)",
        "10: rules[0].extra: unknown field: known are id, scope, endpoint, match, limit, plans, window, algorithm, burst_factor, burst, \
         max_delay, cost, precision, mode, response, adaptive, on_store_failure, region",
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
    let list: String = (0..=114_688u32).map(|n| format!("\"{}\",", std::net::Ipv4Addr::from(n))).collect();
    let errors = parse(&format!("deny = [{list}\"::1\"]")).unwrap_err().to_string();
    assert_eq!(errors, format!("{FILE}:1: deny: 114689 IPv4 prefixes: at most 114688 fit"));
}

#[test]
fn plans_inherit_what_a_rule_does_not_say_of_them() {
    // The child before its parent: the order of the file does not matter.
    let plans =
        "[plans.enterprise]\ninherits = \"pro\"\n[plans.pro]\ninherits = \"free\"\n[plans.free]\n[plans.other]\n";
    let rule = |fields: &str| format!("{plans}[[rules]]\nid = \"r\"\nscope = \"key\"\nwindow = \"1s\"\n{fields}");
    for (fields, [enterprise, pro, free, other, none]) in [
        ("limit = 7\nplans = { free = 1, pro = 2, enterprise = 3 }", [3, 2, 1, 7, 7]),
        ("limit = 7\nplans = { free = 1, pro = 2 }", [2, 2, 1, 7, 7]),
        ("limit = 7\nplans = { free = 1 }", [1, 1, 1, 7, 7]),
        ("limit = 7\nplans = { free = 1, enterprise = 3 }", [3, 1, 1, 7, 7]),
        ("limit = 7\nplans = { pro = 2 }", [2, 2, 7, 7, 7]),
        ("plans = { free = 2, other = 1 }", [2, 2, 2, 1, 1]),
    ] {
        let policy = parse(&rule(fields)).expect(fields);
        let limit = |name: &str| policy.rules[0].limit_for(None, policy.plan(name)).ceiling();
        let expected = [enterprise, pro, free, other].map(Some);
        assert_eq!(["enterprise", "pro", "free", "other"].map(limit), expected, "{fields}");
        assert_eq!(policy.rules[0].limit_for(None, None).ceiling(), Some(none), "{fields}");
    }
    let errors = parse(&rule("plans = { free = 2 }")).unwrap_err().to_string();
    assert!(errors.ends_with("rules[0].plans: has no limit for other: add it, or a limit for all others"), "{errors}");
}

#[test]
fn an_override_comes_before_every_plan() {
    let overrides = "[[overrides]]\nclient = \"acme\"\nrule = \"r\"\nlimit = 500\n[[overrides]]\nclient = \"zero\"\n\
                     rule = \"r\"\nlimit = \"unlimited\"\n";
    let policy = parse(&format!("{}{overrides}", rule("limit = 5\nplans = { pro = 9 }\nburst_factor = 2"))).unwrap();
    let pro = policy.plan("pro");
    for (client, plan, ceiling) in [
        (Some("acme"), None, Some(1000)),
        (Some("acme"), pro, Some(1000)),
        (Some("zero"), pro, None),
        (Some("Acme"), pro, Some(18)),
        (Some("other"), None, Some(10)),
        (None, pro, Some(18)),
    ] {
        assert_eq!(policy.rules[0].limit_for(client, plan).ceiling(), ceiling, "{client:?} {plan:?}");
    }
}

#[test]
fn responses_are_named_or_stand_in_the_rule() {
    let policy = parse(
        "[responses.page]\nstatus = 503\ncontent_type = \"text/html\"\nbody = \"<p>{retry_after_seconds}</p>\"\n\
         [[rules]]\nid = \"a\"\nscope = \"ip\"\nlimit = 1\nwindow = \"1s\"\nresponse = \"page\"\n\
         [[rules]]\nid = \"b\"\nscope = \"ip\"\nlimit = 1\nwindow = \"1s\"\n\
         response = { headers = { X-Reason = \"{rule}\" } }\n\
         [[rules]]\nid = \"c\"\nscope = \"ip\"\nlimit = 1\nwindow = \"1s\"\n",
    )
    .unwrap();
    let [page, inline, none] = [0, 1, 2].map(|index| policy.rules[index].response.as_deref());
    let page = page.unwrap();
    assert_eq!(page.status.map(|status| status.as_u16()), Some(503));
    let body = page.body.as_ref().unwrap();
    assert_eq!(body.content_type, "text/html");
    assert_eq!(body.text.filled(&response::Values::SAMPLE), "<p>1</p>");
    let inline = inline.unwrap();
    assert_eq!((inline.status, &inline.body, inline.headers.len()), (None, &None, 1));
    assert_eq!(inline.headers[0].1.filled(&response::Values::SAMPLE), "rule");
    assert_eq!(none, None);
}

#[test]
fn wrong_responses_are_refused() {
    let many: String = (0..33).map(|n| format!("x{n} = \"\", ")).collect();
    for (fields, message) in [
        ("response = 5", "8: rules[0].response: expected a table, found an integer"),
        ("response = \"page\"", "8: rules[0].response: there is no response \"page\": none is declared"),
        ("response = {}", "8: rules[0].response: changes nothing: give a status, a body or headers"),
        ("response = { status = 399 }", "8: rules[0].response.status: 399 is outside 400 to 599"),
        ("response = { status = 600 }", "8: rules[0].response.status: 600 is outside 400 to 599"),
        ("response = { sttus = 429, body = \"\" }", "unknown field: did you mean \"status\"?"),
        (
            "response = { body = \"{name}\" }",
            "8: rules[0].response.body: {name} is not a placeholder: known are {rule}, ",
        ),
        (
            "response = { content_type = \"application/json\", body = \"{ \\\"a\\\": }\" }",
            "8: rules[0].response.body: is not JSON when it is filled in",
        ),
        (
            "response = { content_type = \"application/json\", body = \"{retry_after_seconds}0\" }",
            "8: rules[0].response.body: is not JSON when it is filled in (null0)",
        ),
        ("response = { status = 429, content_type = \"text/html\" }", "content_type: says nothing without a body"),
        ("response = { content_type = \"html\", body = \"\" }", "\"html\" is not a media type such as"),
        ("response = { content_type = \"text/html\\r\\nX: y\", body = \"\" }", "is not a media type such as"),
        ("response = { headers = { Retry-After = \"1\" } }", "\"Retry-After\" cannot be set here: the agent sets it"),
        ("response = { headers = { X-RateLimit-Limit = \"1\" } }", "cannot be set here: see [api.headers]"),
        ("response = { headers = { Content-Type = \"a/b\" } }", "cannot be set here: give it as content_type"),
        ("response = { headers = { Content-Length = \"1\" } }", "cannot be set here: it follows from the body"),
        ("response = { headers = { \"a b\" = \"1\" } }", "\"a b\" cannot be the name of a header"),
        ("response = { headers = { a = \"1\", A = \"2\" } }", "\"A\" is named twice"),
        ("response = { headers = { a = \"x\\ny\" } }", "which a header cannot carry"),
        ("response = { headers = { a = \"{x}\" } }", "{x} is not a placeholder"),
    ] {
        let errors = parse(&rule(&format!("limit = 1\n{fields}"))).unwrap_err().to_string();
        assert!(errors.contains(message) && errors.lines().count() == 1, "{fields}: {errors}");
    }
    for (fields, message) in [
        (format!("response = {{ body = \"{}\" }}", "x".repeat(65_537)), "could become 65537 bytes"),
        (format!("response = {{ headers = {{ a = \"{}\" }} }}", "{rule}".repeat(65)), "could become 4160 bytes"),
        (format!("response = {{ headers = {{ {} }} }}", many.trim_end_matches(", ")), "33 headers: at most 32"),
    ] {
        let errors = parse(&rule(&format!("limit = 1\n{fields}"))).unwrap_err().to_string();
        assert!(errors.contains(message), "{errors}");
    }
    // A mistake in a response that no rule names is one all the same.
    let errors = parse("[responses.a]\nstatus = 200\n[responses.\"b c\"]\nstatus = 429\n").unwrap_err().to_string();
    assert!(errors.contains("2: responses.a.status: 200 is outside 400 to 599"), "{errors}");
    assert!(errors.contains("\"b c\" is not 1 to 64 of the characters"), "{errors}");
}

#[test]
fn rules_that_give_way_to_pressure_say_how_far() {
    let adaptive = |fields: &str| parse(&rule(fields)).map(|policy| policy.rules[0].adaptive.unwrap());
    let read = adaptive("limit = 10\nburst_factor = 1.5\nadaptive = { floor = 3 }").unwrap();
    let defaults = Adaptive {
        floor: 3,
        floor_ceiling: 4,
        target: 800_000,
        target_latency_us: None,
        decrease: 700_000,
        recover_us: 60_000_000,
    };
    assert_eq!(read, defaults);
    let read = adaptive(
        "plans = { free = 2, pro = 10 }\n\
         adaptive = { floor = 4, target = 0.5, target_latency = \"250ms\", decrease = 0.25, recover = \"1s\" }",
    );
    let given = Adaptive {
        floor: 4,
        floor_ceiling: 4,
        target: 500_000,
        target_latency_us: Some(250_000),
        decrease: 250_000,
        recover_us: 1_000_000,
    };
    assert_eq!(read.unwrap(), given);
    for (fields, message) in [
        ("adaptive = 5", "8: rules[0].adaptive: expected a table, found an integer"),
        ("adaptive = {}", "rules[0].adaptive.floor: is missing"),
        ("adaptive = { floor = 0 }", "8: rules[0].adaptive.floor: 0 is outside 1 to "),
        ("adaptive = { floor = 10 }", "8: rules[0].adaptive: tightens nothing: the floor of 10 is not below any limit"),
        ("adaptive = { floor = 1, flor = 1 }", "unknown field: did you mean \"floor\"?"),
        ("adaptive = { floor = 1, target = 1 }", "adaptive.target: is not a number between 0 and 1"),
        ("adaptive = { floor = 1, target = 0.0 }", "adaptive.target: is not a number between 0 and 1"),
        ("adaptive = { floor = 1, decrease = 1.5 }", "adaptive.decrease: is not a number between 0 and 1"),
        ("adaptive = { floor = 1, recover = \"100ms\" }", "adaptive.recover: 100ms is outside 1s to 86400s"),
        (
            "adaptive = { floor = 1, target_latency = \"500us\" }",
            "adaptive.target_latency: 500µs is outside 1ms to 3600s",
        ),
        (
            "cost = 5\nadaptive = { floor = 4 }",
            "9: rules[0].adaptive: at the floor of 4 no request could pass: each costs 5, and the most is 4",
        ),
    ] {
        let errors = parse(&rule(&format!("limit = 10\n{fields}"))).unwrap_err().to_string();
        assert!(errors.contains(message) && errors.lines().count() == 1, "{fields}: {errors}");
    }
    let errors = adaptive("limit = \"unlimited\"\nadaptive = { floor = 4 }").unwrap_err().to_string();
    assert!(errors.contains("tightens nothing"), "{errors}");
    let slow = "[[rules]]\nid = \"r\"\nscope = \"ip\"\nlimit = 1000\nwindow = \"366d\"\n\
                algorithm = \"leaky_bucket\"\nburst = 9\nadaptive = { floor = 1 }\n";
    let errors = parse(slow).unwrap_err().to_string();
    assert!(errors.contains("at the floor of 1: an exhausted bucket would take more than 104 days"), "{errors}");
}

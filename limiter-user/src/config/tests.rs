use std::{fs, os::unix::fs::PermissionsExt};

use super::*;
use crate::{
    exit::Exit,
    store::redis::{Certificates, Topology},
};

const FILE: &str = "/etc/limiter/limiter.toml";

fn parse(text: &str) -> Result<Config, ConfigErrors> {
    Config::parse(Path::new(FILE), text, Environment::default())
}

fn parse_with(text: &str, variables: &[(&str, &str)]) -> Result<Config, ConfigErrors> {
    Config::parse(Path::new(FILE), text, variables.iter().copied().collect())
}

fn redis(config: &Config) -> &RedisConfig {
    match &config.store.kind {
        StoreKind::Redis(redis) => redis,
        StoreKind::Memory => panic!("the store is memory"),
    }
}

fn port(transport: Transport, port: u16) -> (Transport, u16) {
    (transport, port)
}

#[test]
fn an_empty_file_is_all_defaults() {
    let config = parse("").unwrap();
    assert!(!config.node.id.is_empty());
    assert!(config.xdp.interfaces.is_empty());
    assert_eq!(config.xdp.mode, XdpMode::Auto);
    assert_eq!(config.xdp.protect, Protect::Ports(vec![port(Transport::Tcp, 80), port(Transport::Tcp, 443)]));
    assert_eq!(config.xdp.on_exit, OnExit::Keep);
    assert_eq!(config.xdp.pin_dir, Path::new("/sys/fs/bpf/limiter"));
    assert_eq!(config.xdp.max_sources, DEFAULT_MAX_SOURCES);
    assert!(config.xdp.drop_malformed);
    assert_eq!(config.api.http.to_string(), "127.0.0.1:7070");
    assert_eq!(config.api.admin.to_string(), "127.0.0.1:7073");
    assert_eq!(config.api.headers, HeaderFamilies { x_ratelimit: true, draft_10: true, draft_03: false });
    let (interval, expires) = (Duration::from_secs(1), Duration::from_secs(10));
    assert_eq!(config.api.pressure, PressureConfig { header: false, interval, expires });
    assert!(matches!(config.store.kind, StoreKind::Memory));
    assert_eq!(config.store.max_counters, 1_000_000);
    assert_eq!(config.identity.order, IdentityKind::NAMES.iter().map(|(_, kind)| *kind).collect::<Vec<_>>());
    assert_eq!(config.identity.session_cookie, None);
    assert_eq!((config.identity.api_key_query, config.identity.client_address_header), (None, None));
    assert_eq!(config.identity.api_key_header, "x-api-key");
    assert_eq!(config.identity.key_file, Path::new("/etc/limiter/keys.toml"));
    assert_eq!(config.identity.key_secret_file, Path::new("/etc/limiter/keys.secret"));
    assert_eq!(config.identity.prefixes, SrcPrefixes { ipv4: 32, ipv6: 64 });
    assert_eq!(config.policy.file, Path::new("/etc/limiter/policy.toml"));
    assert!(config.push.enabled);
    assert_eq!(config.push.max_block, Duration::from_secs(600));
    assert_eq!(config.push.after_denials, 5);
}

#[test]
fn every_field_is_read() {
    let config = parse(
        r#"
        node = { id = "gw-1", region = "eu" }
        [xdp]
        interfaces = ["eth0", "eth1.100"]
        mode = "generic"
        protect = ["udp/443", "tcp/8443", "quic/443", "tcp/8443"]
        on_exit = "detach"
        pin_dir = "/sys/fs/bpf/test"
        max_sources = 4096
        drop_malformed = false
        [api]
        http = "unix:/run/limiter/http.sock"
        admin = "[::1]:9000"
        headers = { x_ratelimit = false, draft_10 = false, draft_03 = true }
        pressure = { header = true, interval = "200ms", expires = "1m" }
        [store]
        kind = "redis"
        max_counters = 50_000
        [store.redis]
        urls = ["redis://:sentinels@a:7000/2", "redis://[::1]/2"]
        mode = "sentinel"
        service = "counters"
        username = "limiter"
        timeout = "10ms"
        sync_interval = "20ms"
        [identity]
        order = ["session", "address"]
        session_cookie = "sid"
        client_address_header = "forwarded"
        api_key_header = "X-Key"
        key_file = "keys.toml"
        key_secret_file = "secret/keys"
        trusted_proxies = ["10.0.0.0/8", "2001:db8::1"]
        ipv4_prefix = 24
        ipv6_prefix = 48
        [policy]
        file = "policies/a.toml"
        [push]
        enabled = false
        max_block = "1h"
        after_denials = 1
        "#,
    )
    .unwrap();
    assert_eq!((config.node.id.as_str(), config.node.region.as_deref()), ("gw-1", Some("eu")));
    assert_eq!(config.xdp.interfaces, ["eth0", "eth1.100"]);
    assert_eq!(config.xdp.mode, XdpMode::Generic);
    assert_eq!(config.xdp.protect, Protect::Ports(vec![port(Transport::Tcp, 8443), port(Transport::Udp, 443)]));
    assert_eq!(config.xdp.on_exit, OnExit::Detach);
    assert_eq!(config.xdp.pin_dir, Path::new("/sys/fs/bpf/test"));
    assert_eq!(config.xdp.max_sources, 4096);
    assert!(!config.xdp.drop_malformed);
    assert_eq!(config.api.http, Listen::Unix("/run/limiter/http.sock".into()));
    assert_eq!(config.api.admin, Listen::Tcp("[::1]:9000".parse().unwrap()));
    assert_eq!(config.api.headers, HeaderFamilies { x_ratelimit: false, draft_10: false, draft_03: true });
    let (interval, expires) = (Duration::from_millis(200), Duration::from_secs(60));
    assert_eq!(config.api.pressure, PressureConfig { header: true, interval, expires });
    assert_eq!(config.store.max_counters, 50_000);
    let redis = redis(&config);
    let address = |host: &str, port| RedisAddress::Tcp { host: host.into(), port, encrypted: false };
    let addresses: Vec<_> = redis.urls.iter().map(|url| (url.address.clone(), url.database)).collect();
    assert_eq!(addresses, [(address("a", 7000), 2), (address("::1", 6379), 2)]);
    assert_eq!(redis.topology, Topology::Sentinel { service: "counters".to_owned() });
    assert_eq!((redis.username.as_deref(), &redis.certificates), (Some("limiter"), &Certificates::default()));
    assert_eq!((redis.timeout, redis.sync_interval), (Duration::from_millis(10), Duration::from_millis(20)));
    assert_eq!(config.identity.order, [IdentityKind::Session, IdentityKind::Ip]);
    assert_eq!(config.identity.session_cookie.as_deref(), Some("sid"));
    assert_eq!(config.identity.client_address_header, Some(AddressHeader::Forwarded));
    assert_eq!(config.identity.api_key_header, "x-key");
    assert_eq!(config.identity.key_file, Path::new("/etc/limiter/keys.toml"));
    assert_eq!(config.identity.key_secret_file, Path::new("/etc/limiter/secret/keys"));
    assert_eq!(config.identity.trusted_proxies, ["10.0.0.0/8".parse().unwrap(), "2001:db8::1/128".parse().unwrap()]);
    assert_eq!(config.identity.prefixes, SrcPrefixes { ipv4: 24, ipv6: 48 });
    assert_eq!(config.policy.file, Path::new("/etc/limiter/policies/a.toml"));
    assert!(!config.push.enabled);
    assert_eq!((config.push.max_block, config.push.after_denials), (Duration::from_secs(3600), 1));
}

#[test]
fn the_example_is_valid_and_shows_the_defaults() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/limiter.toml"));
    let example = Config::load(path, Environment::default()).unwrap();
    let mut defaults = Config::parse(path, "", Environment::default()).unwrap();
    assert_eq!(example.policy.file, path.with_file_name("policy.toml"));
    defaults.policy.file.clone_from(&example.policy.file);
    assert_eq!(format!("{example:#?}"), format!("{defaults:#?}"));
}

/// One mistake each: the text, and the whole message.
#[test]
fn bad_values_are_refused_with_line_and_key() {
    for (text, message) in [
        ("[node]\nid = \"a b\"", "2: node.id: \"a b\" is not 1 to 64 of the characters A-Z a-z 0-9 _ . -"),
        ("[node]\nid = 5", "2: node.id: expected a name, found an integer"),
        ("node = 5", "1: node: expected a table, found an integer"),
        ("[api.headers]\ndraft_10 = 1", "2: api.headers.draft_10: expected true or false, found an integer"),
        ("[api.headers]\ndraft_3 = true", "2: api.headers.draft_3: unknown field: did you mean \"draft_03\"?"),
        ("[api.pressure]\ninterval = \"50ms\"", "2: api.pressure.interval: 50ms is outside 100ms to 60s"),
        ("[api.pressure]\ninterval = \"11s\"", "1: api.pressure.expires: is 10s, less than the interval of 11s"),
        ("[nod]\nid = \"a\"", "1: nod: unknown field: did you mean \"node\"?"),
        ("[metrics]\n", "1: metrics: unknown field: known are node, xdp, api, store, identity, policy, push"),
        ("[xdp]\ninterfaces = \"eth0\"", "2: xdp.interfaces: expected a list, found a string"),
        (
            "[xdp]\ninterfaces = [\n\"eth0\",\n7]",
            "4: xdp.interfaces[1]: expected the name of an interface, found an integer",
        ),
        (
            "[xdp]\ninterfaces = [\"an-interface-name\"]",
            "2: xdp.interfaces[0]: \"an-interface-name\" cannot be the name of an interface",
        ),
        ("[xdp]\ninterfaces = [\"a/b\"]", "2: xdp.interfaces[0]: \"a/b\" cannot be the name of an interface"),
        ("[xdp]\ninterfaces = [\"a\", \"a\"]", "2: xdp.interfaces[1]: \"a\" is named twice"),
        ("[xdp]\nmode = \"fast\"", "2: xdp.mode: \"fast\" is not one of \"auto\", \"native\", \"generic\""),
        ("[xdp]\non_exit = \"stay\"", "2: xdp.on_exit: \"stay\" is not one of \"keep\", \"detach\""),
        ("[xdp]\nprotect = \"http\"", "2: xdp.protect: \"http\" is neither \"all\" nor a list such as [\"tcp/443\"]"),
        (
            "[xdp]\nprotect = []",
            "2: xdp.protect: is empty, so nothing would be protected: name a port, or remove the interfaces",
        ),
        (
            "[xdp]\nprotect = [\"tcp/0\"]",
            "2: xdp.protect[0]: \"tcp/0\" is not a port such as \"tcp/443\", \"udp/53\" or \"quic/443\"",
        ),
        (
            "[xdp]\nprotect = [\"sctp/1\"]",
            "2: xdp.protect[0]: \"sctp/1\" is not a port such as \"tcp/443\", \"udp/53\" or \"quic/443\"",
        ),
        (
            "[xdp]\nprotect = [\"tcp/65536\"]",
            "2: xdp.protect[0]: \"tcp/65536\" is not a port such as \"tcp/443\", \"udp/53\" or \"quic/443\"",
        ),
        ("[xdp]\npin_dir = \"bpf\"", "2: xdp.pin_dir: is not an absolute path"),
        ("[xdp]\nmax_sources = 0", "2: xdp.max_sources: 0 is outside 1024 to 16777216"),
        ("[xdp]\nmax_sources = -1", "2: xdp.max_sources: -1 is negative"),
        (
            "[xdp]\nmax_sources = 99999999999999999999999999",
            "2: xdp.max_sources: 99999999999999999999999999 is too large",
        ),
        ("[xdp]\nmax_sources = 1.5", "2: xdp.max_sources: expected a whole number, found a decimal number"),
        ("[xdp]\ndrop_malformed = \"yes\"", "2: xdp.drop_malformed: expected true or false, found a string"),
        (
            "[api]\nhttp = \"localhost:7070\"",
            "2: api.http: \"localhost:7070\" is not an address such as \"127.0.0.1:7070\" or \"unix:/run/limiter/http.sock\"",
        ),
        ("[api]\nhttp = \"unix:http.sock\"", "2: api.http: \"unix:http.sock\" has no absolute path"),
        (
            "[api]\nadmin = \"0.0.0.0:7073\"",
            "2: api.admin: 0.0.0.0:7073 is not a loopback address: use one, or \"unix:/path\"",
        ),
        ("[api]\nadmin = \"127.0.0.1:7070\"", "1: api.admin: is the address of api.http as well: 127.0.0.1:7070"),
        ("[api]\ngrpc = \"127.0.0.1:7071\"", "2: api.grpc: is not available in this version"),
        ("[api]\nspop = \"127.0.0.1:7072\"", "2: api.spop: is not available in this version"),
        ("[api]\nadmin_token_file = \"t\"", "2: api.admin_token_file: is not available in this version"),
        (
            "[identity]\nkey_store = \"redis\"",
            "2: identity.key_store: is \"redis\", and store.redis.urls names none: write urls = [\"redis://127.0.0.1\"]",
        ),
        ("[identity]\nkey_store = \"etcd\"", "2: identity.key_store: \"etcd\" is not one of \"file\", \"redis\""),
        ("[store]\nkind = \"etcd\"", "2: store.kind: \"etcd\" is not one of \"memory\", \"redis\""),
        ("[store]\nmax_counters = 0", "2: store.max_counters: 0 is outside 1 to 100000000"),
        ("[store.breaker]\nfailures = 0", "2: store.breaker.failures: 0 is outside 1 to 1000"),
        ("[store.breaker]\nprobe = \"1ms\"", "2: store.breaker.probe: 1ms is outside 50ms to 3600s"),
        ("[store.breaker]\nwithin = \"2h\"", "2: store.breaker.within: 7200s is outside 100ms to 3600s"),
        ("[store.redis]\nrecover = \"2m\"", "2: store.redis.recover: 120s is outside 1ms to 60s"),
        (
            "[store]\nkind = \"redis\"",
            "1: store.redis.urls: is missing, and store.kind is \"redis\": name one, as in [\"redis://127.0.0.1\"]",
        ),
        (
            "[store]\nkind = \"redis\"\n[store.redis]\nurls = []",
            "4: store.redis.urls: is empty: name one, as in [\"redis://127.0.0.1\"]",
        ),
        (
            "[store.redis]\nurls = [\"redis://a\", \"redis://b\"]",
            "2: store.redis.urls: has more than one, and store.redis.mode is \"standalone\": set \"sentinel\" or \"cluster\"",
        ),
        (
            "[store.redis]\nurls = [\"redis://a\", \"redis://b\"]\n[identity]\nkey_store = \"redis\"",
            "2: store.redis.urls: has more than one, and store.redis.mode is \"standalone\": set \"sentinel\" or \"cluster\"",
        ),
        (
            "[store.redis]\nmode = \"sentinel\"\nurls = [\"rediss://:hunter2@a\", \"redis://:hunter2@b\"]",
            "3: store.redis.urls[1]: has another database or scheme than the first: all servers of one deployment have the same",
        ),
        (
            "[store.redis]\nmode = \"cluster\"\nurls = [\"redis://a/1\"]",
            "3: store.redis.urls[0]: names a database, and a cluster has none but 0",
        ),
        (
            "[store.redis]\nmode = \"cluster\"\nurls = [\"unix:///a\"]",
            "3: store.redis.urls[0]: is a socket of this host, and store.redis.mode is of several servers: name hosts",
        ),
        (
            "[store.redis]\nservice = \"a\"",
            "2: store.redis.service: is what sentinels call a primary: set mode = \"sentinel\", or remove it",
        ),
        (
            "[store.redis]\nurls = [\"rediss://a\"]\n[store.redis.tls]\ncert_file = \"/dev/null\"",
            "3: store.redis.tls.key_file: is missing, and cert_file is given",
        ),
        (
            "[store.redis.tls]\nca_file = \"/nonexistent/ca\"",
            "2: store.redis.tls.ca_file: cannot read /nonexistent/ca: No such file or directory (os error 2)",
        ),
        (
            "[store.redis]\nurls = [\"redis://a\"]\n[store.redis.tls]\nca_file = \"/dev/null\"",
            "3: store.redis.tls: has certificates that nothing uses: write rediss:// in store.redis.urls",
        ),
        (
            "[store.redis]\nmode = \"single\"",
            "2: store.redis.mode: \"single\" is not one of \"standalone\", \"sentinel\", \"cluster\"",
        ),
        ("[store.redis]\ntls = true", "2: store.redis.tls: expected a table, found a boolean"),
        (
            "[store.redis]\ntimeout = 5",
            "2: store.redis.timeout: expected a duration such as \"50ms\", found an integer",
        ),
        (
            "[store.redis]\ntimeout = \"0ms\"",
            "2: store.redis.timeout: \"0ms\" is 0: use a longer time or remove the entry",
        ),
        ("[store.redis]\ntimeout = \"2s\"", "2: store.redis.timeout: 2s is outside 1ms to 1s"),
        ("[store.redis]\nsync_interval = \"1s\"", "2: store.redis.sync_interval: 1s is outside 20ms to 100ms"),
        (
            "[store.redis]\npassword_file = \"/nonexistent/p\"",
            "2: store.redis.password_file: cannot read /nonexistent/p: No such file or directory (os error 2)",
        ),
        ("[identity]\norder = []", "2: identity.order: is empty: a request has to be somebody's"),
        (
            "[identity]\norder = [\"name\"]",
            "2: identity.order[0]: \"name\" is not one of \"api_key\", \"jwt\", \"session_cookie\", \"user_agent\", \"ip\"",
        ),
        (
            "[identity]\norder = [\"ip\", \"api_key\"]",
            "2: identity.order[1]: would never be looked at: every request has an address, so \"ip\" comes last",
        ),
        (
            "[identity]\norder = [\"session_cookie\"]",
            "2: identity.order[0]: needs the name of the cookie in identity.session_cookie",
        ),
        (
            "[identity]\norder = [\"ip\"]\nsession_cookie = \"sid\"",
            "3: identity.session_cookie: would never be looked at: identity.order has no \"session_cookie\"",
        ),
        (
            "[identity]\nclient_address_header = \"via\"",
            "2: identity.client_address_header: \"via\" is not one of \"x-forwarded-for\", \"forwarded\", \"x-real-ip\"",
        ),
        ("[identity]\napi_key_query = \"a=b\"", "2: identity.api_key_query: \"a=b\" cannot be the name of a parameter"),
        (
            "[identity]\norder = [\"ip\"]\napi_key_query = \"k\"",
            "3: identity.api_key_query: would never be looked at: identity.order has no \"api_key\"",
        ),
        ("[identity]\nsession_cookie = \"a b\"", "2: identity.session_cookie: \"a b\" cannot be the name of a cookie"),
        ("[identity]\norder = [\"ip\", \"ip\"]", "2: identity.order[1]: is named twice"),
        (
            "[identity.jwt]\nkey = 1",
            "2: identity.jwt.key: unknown field: known are public_key_file, jwks_file, secret_file, algorithms, audience, \
             issuer, leeway, plan_claim",
        ),
        (
            "[identity.jwt]\nsecret_file = \"s\"\nalgorithms = [\"none\"]",
            "3: identity.jwt.algorithms[0]: \"none\" is not one of \"HS256\", \"RS256\", \"ES256\", \"EdDSA\"",
        ),
        (
            "[identity.jwt]\nsecret_file = \"s\"\nalgorithms = []",
            "3: identity.jwt.algorithms: is empty, so no token would ever be valid",
        ),
        (
            "[identity.jwt]\nissuer = \"i\"",
            "2: identity.jwt.issuer: there is no key to verify tokens with: set public_key_file, jwks_file or secret_file",
        ),
        (
            "[identity.jwt]\nsecret_file = \"s\"\naudience = []",
            "3: identity.jwt.audience: is empty: remove it to accept any",
        ),
        ("[identity.jwt]\nsecret_file = \"s\"\nleeway = \"1h\"", "3: identity.jwt.leeway: 3600s is outside 1s to 600s"),
        ("[identity]\norder = [\"jwt\"]", "2: identity.order[0]: needs the keys of tokens in [identity.jwt]"),
        (
            "[identity]\norder = [\"ip\"]\njwt = { jwks_file = \"j\" }",
            "3: identity.jwt.jwks_file: would never be looked at: identity.order has no \"jwt\"",
        ),
        (
            "[identity]\napi_key_header = \"X Key\"",
            "2: identity.api_key_header: \"X Key\" cannot be the name of a header",
        ),
        ("[identity]\nkey_file = \"\"", "2: identity.key_file: is empty"),
        (
            "[identity]\ntrusted_proxies = [\"10.0.0.1/8\"]",
            "2: identity.trusted_proxies[0]: 10.0.0.1/8 has bits set beyond its length: did you mean 10.0.0.0/8?",
        ),
        ("[identity]\nipv4_prefix = 16", "2: identity.ipv4_prefix: 16 is outside 24 to 32"),
        ("[identity]\nipv6_prefix = 129", "2: identity.ipv6_prefix: 129 is outside 48 to 128"),
        ("[policy]\nredis = true", "2: policy.redis: is not available in this version"),
        ("[push]\nmax_block = \"1ms\"", "2: push.max_block: 1ms is outside 1s to 2592000s"),
        ("[push]\nafter_denials = 0", "2: push.after_denials: 0 is outside 1 to 1000000"),
        ("[push]\nafter = 0", "2: push.after: unknown field: known are enabled, max_block, after_denials"),
    ] {
        let errors = parse(text).expect_err(text);
        assert_eq!(errors.to_string(), format!("{FILE}:{message}"), "{text}");
        assert_eq!(errors.exit(), Exit::Config);
    }
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let text = "[xdp]\nmod = \"auto\"\nmax_sources = 0\n\n[store]\nkinds = \"memory\"\n[store.redis]\nurl = 1\n[push]\nenabled = 1\n";
    let errors = parse_with(text, &[("LIMITER_API_HTTP", "nowhere"), ("LIMITER_NODE_NAME", "x")]).unwrap_err();
    let expected = format!(
        "{FILE}:2: xdp.mod: unknown field: did you mean \"mode\"?\n\
         {FILE}:3: xdp.max_sources: 0 is outside 1024 to 16777216\n\
         {FILE}:6: store.kinds: unknown field: did you mean \"kind\"?\n\
         {FILE}:8: store.redis.url: unknown field: did you mean \"urls\"?\n\
         {FILE}:10: push.enabled: expected true or false, found an integer\n\
         environment variable LIMITER_API_HTTP: api.http: \"nowhere\" is not an address such as \"127.0.0.1:7070\" or \
         \"unix:/run/limiter/http.sock\"\n\
         environment variable LIMITER_NODE_NAME: names no field of the configuration"
    );
    assert_eq!(errors.to_string(), expected);
}

#[test]
fn broken_toml_is_reported_with_line_and_key() {
    for (text, place) in [
        ("[xdp]\ninterfaces = [\"eth0\"\nmode = \"auto\"", "3: xdp.mode: missing comma"),
        ("[xdp]\nmode = auto", "2: xdp.mode: "),
        ("[xdp]\nmode = \"auto\"\nmode = \"native\"", "3: xdp.mode: duplicate key"),
        ("[xdp\nmode = \"auto\"", "1: xdp: "),
        ("[xdp]\n[xdp]", "2: xdp: duplicate key"),
        ("[store]\nkind", "2: store.kind: "),
        ("[store]\nkind = \"memory", "2: store.kind: "),
    ] {
        let errors = parse(text).expect_err(text).to_string();
        assert!(errors.starts_with(&format!("{FILE}:{place}")), "{text}: {errors}");
    }
}

#[test]
fn the_environment_stands_in_for_fields() {
    let config = parse_with(
        "[store]\nkind = \"memory\"\n[api]\nhttp = \"127.0.0.1:1\"\n",
        &[
            ("LIMITER_STORE_KIND", "redis"),
            ("LIMITER_STORE_REDIS_URLS", "redis://127.0.0.1:7000"),
            ("LIMITER_API_HTTP", "unix:/run/http.sock"),
            ("LIMITER_XDP_INTERFACES", "eth0, eth1"),
            ("LIMITER_XDP_PROTECT", "tcp/80,udp/443"),
            ("LIMITER_XDP_MAX_SOURCES", "2048"),
            ("LIMITER_PUSH_ENABLED", "false"),
            // Not configuration.
            ("LIMITER_BIN", "x"),
            ("LIMITER_BPF_OBJECT", "x"),
            ("LIMITER_VECTORS", "x"),
            ("LIMITER_TEST_NO_SKIP", "1"),
            ("LIMITER_LOG", "debug"),
            ("LIMITER_CONFIG", "x"),
            ("PATH", "/bin"),
        ],
    )
    .unwrap();
    assert_eq!(redis(&config).name(), "redis://127.0.0.1:7000");
    assert_eq!(config.api.http, Listen::Unix("/run/http.sock".into()));
    assert_eq!(config.xdp.interfaces, ["eth0", "eth1"]);
    assert_eq!(config.xdp.protect, Protect::Ports(vec![port(Transport::Tcp, 80), port(Transport::Udp, 443)]));
    assert_eq!(config.xdp.max_sources, 2048);
    assert!(!config.push.enabled);
    let config = parse_with("", &[("LIMITER_XDP_PROTECT", "all"), ("LIMITER_XDP_INTERFACES", "")]).unwrap();
    assert_eq!(config.xdp.protect, Protect::All);
    assert!(config.xdp.interfaces.is_empty());
    let error = parse_with("", &[("LIMITER_API_GRPC", "127.0.0.1:7071")]).unwrap_err().to_string();
    assert_eq!(error, "environment variable LIMITER_API_GRPC: api.grpc: is not available in this version");
}

#[test]
fn passwords_are_read_and_never_printed() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("password"), "hunter2\n").unwrap();
    let path = folder.path().join("limiter.toml");
    let text = "[store]\nkind = \"redis\"\n[store.redis]\nurls = [\"redis://:hunter1@redis\"]\n";
    for (text, password) in [(text.to_owned(), None), (format!("{text}password_file = \"password\""), Some("hunter2"))]
    {
        fs::write(&path, text).unwrap();
        let config = Config::load(&path, Environment::default()).unwrap();
        let redis = redis(&config);
        let exposed = |password: &Option<Secret>| password.as_ref().map(|password| password.expose().to_owned());
        assert_eq!(exposed(&redis.urls[0].password).as_deref(), Some("hunter1"));
        assert_eq!(exposed(&redis.password).as_deref(), password);
        assert_eq!(RedisUrl::parse(&redis.urls[0].expose()).as_ref(), Ok(&redis.urls[0]));
        let printed = format!("{config:?}{config:#?}{}{}", redis.urls[0], redis.name());
        assert!(!printed.contains("hunter"), "{printed}");
    }
}

#[test]
fn an_unreadable_file_is_told_from_a_missing_one() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("limiter.toml");
    let errors = Config::load(&missing, Environment::default()).unwrap_err();
    let message = format!("{}: cannot read the configuration: no such file", missing.display());
    assert_eq!((errors.to_string(), errors.exit()), (message, Exit::Config));

    fs::write(&missing, "").unwrap();
    fs::set_permissions(&missing, fs::Permissions::from_mode(0o0)).unwrap();
    if fs::read(&missing).is_ok() {
        // Root reads everything: what the kernel would say stands in.
        let denied = std::io::ErrorKind::PermissionDenied.into();
        let errors = ConfigErrors::of_io("read the configuration", &missing, "", &denied);
        assert_eq!(errors.exit(), Exit::NoPermission);
        return;
    }
    assert_eq!(Config::load(&missing, Environment::default()).unwrap_err().exit(), Exit::NoPermission);
}

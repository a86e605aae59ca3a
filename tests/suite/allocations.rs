//! What a check takes from the heap, counted by the allocator: nothing, and for each counter no more than was promised.

use std::{fmt::Write as _, fs, os::unix::fs::PermissionsExt as _, sync::Arc};

use allocation_counter::measure;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use jsonwebtoken::{EncodingKey, Header, encode};
use limiter_tests::in_process;
use limiter_user::{
    clock::{Clock, ManualClock},
    limiter::Kind,
    store::{Algorithm, CellRef, Charge, IdentityRef, Name, memory::MemoryStore},
};

const START_US: u64 = 1_800_000_000_000_000;
/// Between two requests: ten of them are in a window.
const STEP_US: u64 = 100_000;
/// After so many, every log has been as long as it gets.
const WARM: usize = 50;
const COUNTED: usize = 20;
const API_KEY: &str = "lk_0123456789012345678901234567890123456789abc";
const PATH: &str = "/api//v1/%73earch/./items?page=2";

/// What a request says of who sends it.
#[derive(Clone, Copy, Debug)]
enum By {
    ApiKey,
    Token,
    Address,
}

impl By {
    fn scopes(self) -> [&'static str; 2] {
        match self {
            Self::ApiKey => ["user", "key"],
            Self::Token => ["user", "user"],
            Self::Address => ["ip", "global"],
        }
    }
}

/// As many rules, all of which apply; every second by an endpoint group of its own.
fn policy(algorithm: &str, by: By, rules: usize, allows: bool) -> String {
    let mut text = String::new();
    for rule in 0..rules {
        let scope = by.scopes()[rule / 2 % 2];
        let (limit, window) = if allows { (1000, "1s") } else { (1, "1d") };
        let shape = match algorithm {
            "leaky_bucket" if allows => "burst = 5\n",
            "leaky_bucket" => "max_delay = \"1ms\"\nburst = 1\n",
            _ => "",
        };
        writeln!(text, "[[endpoints]]\nname = \"g{rule}\"\nmatch = [\"/api/v1/search/**\"]").expect("text");
        let endpoint = if rule % 2 == 1 { format!("endpoint = \"g{rule}\"\n") } else { String::new() };
        write!(text, "[[rules]]\nid = \"r{rule}\"\nscope = \"{scope}\"\nalgorithm = \"{algorithm}\"\n").expect("text");
        writeln!(text, "limit = {limit}\nwindow = \"{window}\"\n{shape}{endpoint}").expect("text");
    }
    text
}

fn headers(by: By) -> HeaderMap {
    let identity = match by {
        By::ApiKey => ("x-api-key", API_KEY.to_owned()),
        By::Token => {
            let claims = serde_json::json!({ "sub": "u_1", "exp": START_US / 1_000_000 + 100_000 });
            let key = EncodingKey::from_secret(&[b'k'; 32]).expect("a key");
            let token = encode(&Header::default(), &claims, &key).expect("a token");
            ("authorization", format!("Bearer {token}"))
        }
        By::Address => ("user-agent", "curl/8.5.0".to_owned()),
    };
    let lines = [identity, ("x-forwarded-for", "203.0.113.9".to_owned()), ("host", "example.org".to_owned())];
    let lines = lines.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::try_from(value).expect("text")));
    lines.into_iter().collect()
}

#[test]
fn a_check_from_memory_allocates_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let secret = folder.path().join("jwt_secret");
    fs::write(&secret, "k".repeat(32)).expect("write the secret");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).expect("make the secret one");
    let configuration = format!("[identity.jwt]\nsecret_file = \"{}\"\nalgorithms = [\"HS256\"]\n", secret.display());
    for algorithm in ["sliding_window", "fixed_window", "token_bucket", "leaky_bucket", "sliding_log"] {
        for by in [By::ApiKey, By::Token, By::Address] {
            for (rules, allows) in [(1, true), (5, true), (20, true), (1, false), (5, false), (20, false)] {
                let clock = Arc::new(ManualClock::at(START_US));
                let counters = MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, 100_000);
                let configuration = if matches!(by, By::Token) { &*configuration } else { "" };
                let gate = in_process::gate(
                    configuration,
                    &policy(algorithm, by, rules, allows),
                    in_process::key_store([(API_KEY, "c_1")]),
                    Arc::clone(&clock) as Arc<dyn Clock>,
                    Arc::new(counters),
                );
                let headers = headers(by);
                let ask = || {
                    clock.advance(STEP_US);
                    in_process::check(&gate, &headers, PATH)
                };
                for _ in 0..WARM {
                    ask();
                }
                let mut kinds = [Kind::Unauthenticated; COUNTED];
                let counts = measure(|| kinds = [(); COUNTED].map(|()| ask()));
                let what = format!("{algorithm} {by:?}, {rules} rules");
                assert_eq!(kinds, [if allows { Kind::Allowed } else { Kind::Denied }; COUNTED], "{what}");
                assert_eq!(counts.count_total, 0, "{what}, allowed: {allows}");
            }
        }
    }
}

/// Resident memory of this process.
fn resident_bytes() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").expect("the kernel tells");
    let pages: u64 = pages.split(' ').nth(1).expect("the second number").parse().expect("a number");
    pages * 4096
}

/// With names of twelve characters, which count, and whatever the tables need while they grow.
#[test]
fn a_million_keys_with_a_counter_each_fit_into_256_megabytes() {
    const KEYS: u64 = 1_000_000;
    const MOST: u64 = 256_000_000;
    let clock = Arc::new(ManualClock::at(START_US));
    let before = resident_bytes();
    let mut store = None;
    let counts = measure(|| {
        // A little more than there are keys: not all shards get the same number.
        let counters = MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, 1_100_000);
        let rule = Name::from("requests");
        for key in 0..KEYS {
            let name = Name::from(format!("c{key:011}"));
            let algorithm = Algorithm::sliding_window(60_000_000, 100);
            let cell = CellRef { identity: IdentityRef::User(&name), rule: &rule, algorithm, cost: 1, enforced: true };
            counters.decide_one(clock.now(), Charge::Commit, &cell);
        }
        store = Some(counters);
    });
    let stats = store.as_ref().expect("it was made").stats();
    assert_eq!((stats.counters, stats.evicted), (1_000_000, 0));
    let resident = resident_bytes() - before;
    assert!(counts.bytes_max <= MOST, "{} bytes at most were allocated at a time", counts.bytes_max);
    assert!(resident <= MOST, "{resident} bytes are resident");
}

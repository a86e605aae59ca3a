//! A server that comes back is not run over: one attempt at a time, the longer apart the more have failed, and never in step with
//! other nodes.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::future::join_all;
use limiter_tests::eventually::eventually;
use limiter_user::{
    clock::Stopwatch,
    config::Secret,
    store::{
        At, Charge, Store as _, StoreError,
        redis::{RedisConfig, RedisStore},
    },
};
use tokio::net::{TcpListener, TcpStream};

use super::behaviour::{cell, user};

const WAIT: Duration = Duration::from_secs(60);
/// The longest waits after the first failures in a row, of which up to half may be taken off at random.
const WAITS: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
];

/// Something that takes connections, and is no Redis.
struct Listener {
    url: String,
    /// When each connection was taken.
    taken: Arc<Mutex<Vec<Duration>>>,
}

impl Listener {
    /// With each connection does as `then` says.
    async fn start(watch: Stopwatch, then: impl Fn(TcpStream) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let taken = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&taken);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                told.lock().unwrap().push(watch.elapsed());
                then(stream);
            }
        });
        Self { url, taken }
    }

    fn store(&self, timeout: Duration) -> RedisStore {
        let mut config = RedisConfig::new(self.url.clone());
        // So that a connection is none before the server has answered.
        config.password = Some(Secret::new("pw".to_owned()));
        config.timeout = timeout;
        config.connect_timeout = WAIT;
        RedisStore::connect(&config).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_callers_make_one_attempt_to_connect() {
    let kept = Mutex::new(Vec::new());
    let silent = Listener::start(Stopwatch::start(), move |stream| kept.lock().unwrap().push(stream)).await;
    let store = silent.store(Duration::from_millis(50));
    for _ in 0..5 {
        let cells: Vec<_> = (0..32).map(|number| [cell(user(&format!("u{number}"), "r"), 10)]).collect();
        let calls = cells.iter().map(|cells| store.check(At::StoreClock, Charge::Commit, cells));
        for answer in join_all(calls).await {
            assert!(matches!(answer, Err(StoreError::Timeout { .. })), "{answer:?}");
        }
    }
    assert_eq!(silent.taken.lock().unwrap().len(), 1, "the attempt is still being made");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_that_fail_are_apart_and_no_two_nodes_keep_step() {
    const NODES: usize = 24;
    // By then all of the waits are over.
    const ATTEMPTS: usize = WAITS.len() + 1;
    let longest: Duration = WAITS.iter().sum();
    let node = async || {
        let useless = Listener::start(Stopwatch::start(), drop).await;
        let store = useless.store(WAIT);
        let cells = [cell(user("u", "r"), 10)];
        // Asked for without a pause, it tries when it may.
        eventually(WAIT, async || {
            let answer = store.check(At::StoreClock, Charge::Commit, &cells).await;
            assert!(matches!(answer, Err(StoreError::Unavailable { .. })), "{answer:?}");
            let made = useless.taken.lock().unwrap().len();
            if made >= ATTEMPTS { Ok(()) } else { Err(made) }
        })
        .await;
        let taken = useless.taken.lock().unwrap();
        let mut earliest = Duration::ZERO;
        for (wait, at) in WAITS.iter().zip(&taken[1..]) {
            earliest += *wait / 2;
            assert!(*at >= earliest, "{taken:?}");
        }
        taken[ATTEMPTS - 1]
    };
    let ends: BTreeSet<Duration> = join_all((0..NODES).map(|_| node())).await.into_iter().collect();
    let (first, last) = (*ends.first().unwrap(), *ends.last().unwrap());
    // Without chance, all would take the same time.
    assert!(last - first >= longest / 16, "all at once, from {first:?} to {last:?}");
}

//! Buckets of several nodes, which hear of each other late: the script itself and the nodes' memory, by a clock of the test's
//! own, so that hours pass in no time and messages come when they are told to.

use limiter_common::{bucket::Bucket, leaky_bucket::LeakyBucket, sliding_window::Outcome, time::UnixMicros};
use limiter_tests::{random::Random, redis_server::RedisServer};
use limiter_user::{
    clock::ManualClock,
    store::{
        Algorithm, Cell, Charge,
        counter::{Adopts, OwnState, OwnTotals, SharedCounts},
        memory::MemoryStore,
    },
};
use redis::{Script, aio::MultiplexedConnection};

use super::behaviour::{T0, cell, user};

const MS: u64 = 1000;
const SECOND: u64 = 1_000_000;

/// Before the text of a script: time is what the last argument says, and nothing expires by another.
const CLOCK: &str = "
local real, clock_us = redis, tonumber(table.remove(ARGV))
local redis = { pcall = real.pcall, call = function(name, ...)
  if name == 'TIME' then return { math.floor(clock_us / 1000000), clock_us % 1000000 } end
  if name == 'PTTL' or name == 'PEXPIRE' then return 1 end
  if name == 'SET' then
    local key, value = ...
    return real.call('SET', key, value)
  end
  return real.call(name, ...)
end }
";

/// What all nodes share.
struct Shared {
    _server: RedisServer,
    connection: MultiplexedConnection,
    sync: Script,
}

impl Shared {
    async fn start() -> Self {
        let server = RedisServer::start().await;
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../lua");
        let read = |file: &str| std::fs::read_to_string(format!("{folder}/{file}")).unwrap();
        let sync = Script::new(&format!("{CLOCK}{}\n{}", read("lib/counter.lua"), read("sync.lua")));
        let connection = server.connection().await;
        Self { _server: server, connection, sync }
    }

    /// What `sync.lua` answers at `now_us`, and what it does not tell: the units that are lacking, begun ones counted whole.
    async fn exchange(&mut self, key: &str, number: u64, sent: &OwnTotals, now_us: u64) -> (SharedCounts, u64) {
        let OwnState::Bucket { interval_ns, fill_ns, total, acknowledged, tat_ns } = sent.state else {
            panic!("{sent:?}")
        };
        let numbers = [number, u64::from(sent.tag), 2, sent.window_us, interval_ns, fill_ns / interval_ns];
        let mut call = self.sync.key(key);
        for number in numbers.into_iter().chain([total, acknowledged, tat_ns / 1000, tat_ns % 1000, now_us]) {
            call.arg(number);
        }
        let (reply,): (Vec<u64>,) = call.invoke_async(&mut self.connection).await.unwrap();
        let [at_us, 0, 0, _, tat_us, tat_ns, own_total] = reply[..] else { panic!("{reply:?}") };
        assert_eq!(at_us, now_us);
        let tat_ns = tat_us * 1000 + tat_ns;
        let lacks = tat_ns.saturating_sub(now_us * 1000).div_ceil(interval_ns);
        (SharedCounts::Bucket { tat_ns, own_total }, lacks)
    }
}

/// One exchange, at the latest moment that it has come to.
struct UnderWay {
    number: u64,
    sent: Vec<OwnTotals>,
    arrives_us: u64,
    answered_us: u64,
    /// What it was answered, and when.
    answer: Option<(SharedCounts, u64)>,
    is_lost: bool,
}

struct Node {
    memory: MemoryStore,
    under_way: Option<UnderWay>,
    number: u64,
    /// The most that it told of at once.
    told: u64,
    /// Units that it took, less those that it gave back.
    own: u64,
}

impl Node {
    fn new() -> Self {
        let memory = MemoryStore::shared(std::sync::Arc::new(ManualClock::at(T0)), 1000);
        Self { memory, under_way: None, number: 0, told: 0, own: 0 }
    }

    fn decide(&self, cell: &Cell, charge: Charge, cost: u64, now_us: u64) -> limiter_user::store::CellOutcome {
        let cells = [Cell { cost, ..cell.clone() }];
        self.memory.decide(UnixMicros::new(now_us), charge, &cells)[0]
    }

    fn send(&mut self, now_us: u64, there_us: u64, back_us: u64, is_lost: bool) {
        let mut sent = Vec::new();
        self.memory.take_dirty(UnixMicros::new(now_us), usize::MAX, &mut sent);
        for totals in &sent {
            if let OwnState::Bucket { total, acknowledged, .. } = totals.state {
                self.told = self.told.max(total.saturating_sub(acknowledged));
            }
        }
        self.number += 1;
        let arrives_us = now_us + there_us;
        let answered_us = arrives_us + back_us;
        self.under_way = Some(UnderWay { number: self.number, sent, arrives_us, answered_us, answer: None, is_lost });
    }

    /// Lets what is under way come as far as it has at `now_us`.
    async fn go_on(&mut self, shared: &mut Shared, key: &str, now_us: u64) {
        let Some(way) = &mut self.under_way else { return };
        if way.answer.is_none() && now_us >= way.arrives_us {
            for totals in &way.sent {
                let (counts, _) = shared.exchange(key, way.number, totals, now_us).await;
                way.answer = Some((counts, now_us));
            }
        }
        if now_us >= way.answered_us {
            let way = self.under_way.take().unwrap();
            for totals in &way.sent {
                match &way.answer {
                    Some((counts, at_us)) if !way.is_lost => {
                        self.memory.apply(totals, counts, UnixMicros::new(*at_us), Adopts::Always);
                    }
                    Some(_) | None => self.memory.requeue(&totals.key),
                }
            }
        }
    }

    /// Tells what there is, and hears of the others.
    async fn catch_up(&mut self, shared: &mut Shared, key: &str, cell: &Cell, now_us: u64) {
        if let Some(way) = &mut self.under_way {
            (way.arrives_us, way.answered_us, way.is_lost) = (now_us.min(way.arrives_us), now_us, false);
        }
        self.go_on(shared, key, now_us).await;
        self.memory.requeue(&cell.key);
        self.send(now_us, 0, 0, false);
        self.go_on(shared, key, now_us).await;
    }
}

struct Load {
    nodes: usize,
    algorithm: Algorithm,
    sync_us: u64,
    /// Requests in a millisecond, of which each node gets its part at random.
    asked: u64,
    /// Of each second, for how long they come.
    busy_us: u64,
}

impl Load {
    /// Another one for each seed.
    fn of(random: &mut Random) -> Self {
        const INTERVALS_US: [u64; 3] = [500, 2 * MS, 10 * MS];
        const BURSTS: [u64; 5] = [1, 4, 20, 100, 400];
        let interval_us = INTERVALS_US[random.below(3usize)];
        let burst = BURSTS[random.below(5usize)];
        let bucket = Bucket::from_interval(interval_us * 1000, burst).unwrap();
        let leaky = LeakyBucket::new(1, interval_us, burst - 1, 3600 * SECOND).unwrap();
        let window_us = interval_us * burst;
        Self {
            nodes: 1 + random.below(5usize),
            algorithm: match random.below(3) {
                0 => Algorithm::LeakyBucket { bucket: leaky, window_us },
                _ => Algorithm::TokenBucket { bucket, window_us },
            },
            sync_us: [20, 50, 100][random.below(3usize)] * MS,
            asked: 1 + random.below(12u64),
            busy_us: [SECOND, 60 * MS, 400 * MS][random.below(3usize)],
        }
    }
}

/// Whatever the load, what all admit is the burst, the rate, and at most what each admits until the others have heard of it;
/// and when it is over, nobody owes anything any more.
#[tokio::test]
async fn nodes_admit_no_more_than_the_rate_however_long_they_are_asked() {
    const LASTS_US: u64 = 4 * SECOND;
    let mut shared = Shared::start().await;
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let load = Load::of(&mut random);
        let bucket = *load.algorithm.bucket().unwrap();
        let key = format!("rl:{{user:u{seed}}}:shared");
        let what = |said: &str| {
            let Load { nodes, sync_us, asked, busy_us, .. } = load;
            format!("seed {seed}, {nodes} nodes, {:?}, {sync_us} {asked} {busy_us}: {said}", load.algorithm)
        };
        let cell = Cell { algorithm: load.algorithm, ..cell(user("u", "shared"), 0) };
        let mut nodes: Vec<Node> = (0..load.nodes).map(|_| Node::new()).collect();
        let mut due: Vec<u64> = nodes.iter().map(|_| T0 + random.below(load.sync_us)).collect();
        let (mut admitted, mut most, mut seen) = (0, 0, 0);
        for now_us in (T0..T0 + LASTS_US).step_by(1000) {
            for (node, due) in nodes.iter_mut().zip(&mut due) {
                node.go_on(&mut shared, &key, now_us).await;
                if now_us >= *due && node.under_way.is_none() {
                    node.send(now_us, random.below(4u64) * MS, random.below(4u64) * MS, false);
                    *due += load.sync_us;
                }
            }
            if (now_us - T0) % SECOND >= load.busy_us {
                continue;
            }
            for _ in 0..load.asked {
                let node = random.below(load.nodes);
                let outcome = nodes[node].decide(&cell, Charge::Commit, 1, now_us);
                match outcome.outcome {
                    Outcome::Allowed => admitted += 1,
                    Outcome::Denied { retry_after_us } => {
                        assert!(retry_after_us > 0 && outcome.remaining == 0, "{}", what(&format!("{outcome:?}")));
                        seen = seen.max(outcome.over);
                    }
                    Outcome::Never => panic!("{}", what("never")),
                }
            }
            let by_rate = bucket.burst() + (now_us - T0) * 1000 / bucket.interval_ns();
            most = u64::max(most, u64::saturating_sub(admitted, by_rate));
        }
        let told = nodes.iter().map(|node| node.told).max().unwrap();
        let bound = told * load.nodes as u64;
        // One more for each, since rates and turns of the test are whole numbers.
        let above = format!("{most} above, seen {seen}, bound {bound}");
        assert!(most <= bound + load.nodes as u64 && seen <= bound, "{}", what(&above));
        assert!(load.nodes > 1 || most == 0, "{}", what(&above));
        // Nobody pays for more than was taken: who is asked for more than the rate admits about the rate.
        let asked = load.asked * LASTS_US / MS;
        let rate = LASTS_US * 1000 / bucket.interval_ns();
        if load.busy_us == SECOND && asked > 2 * rate && bucket.fill_ns() > 2 * load.sync_us * 1000 {
            assert!(admitted * 100 >= 95 * rate, "{}", what(&format!("{admitted} of {rate}")));
        }
        // Told at last, and paid with time: no longer than all of it takes to come back.
        let end_us = T0 + LASTS_US;
        for node in &mut nodes {
            node.catch_up(&mut shared, &key, &cell, end_us).await;
        }
        let paid_us = end_us + (bucket.fill_ns() + bound * bucket.interval_ns()) / 1000 + MS;
        for node in &mut nodes {
            node.catch_up(&mut shared, &key, &cell, paid_us).await;
            let outcome = node.decide(&cell, Charge::Peek, 1, paid_us);
            assert_eq!(outcome.remaining, load.algorithm.ceiling(), "{}", what(&format!("{outcome:?}")));
        }
    }
}

/// Nothing comes back while this runs, so what all have is to the unit what was taken and not given back, whatever was lost
/// on the way and however much more it is than the bucket holds.
#[tokio::test]
async fn what_is_taken_and_given_back_meanwhile_is_never_forgotten() {
    const BURST: u64 = 30;
    let day = 24 * 3600 * SECOND;
    let bucket = Bucket::new(BURST, 10 * day, BURST).unwrap();
    let algorithm = Algorithm::TokenBucket { bucket, window_us: 10 * day };
    let cell = Cell { algorithm, ..cell(user("u", "exact"), 0) };
    let mut shared = Shared::start().await;
    let mut above = 0;
    for seed in 0..120 {
        let mut random = Random::new(seed);
        let key = format!("rl:{{user:u{seed}}}:exact");
        let mut nodes: Vec<Node> = (0..1 + seed % 4).map(|_| Node::new()).collect();
        let mut now_us = T0;
        for _ in 0..400 {
            now_us += random.below(5u64) * MS;
            let at = random.below(nodes.len());
            let node = &mut nodes[at];
            node.go_on(&mut shared, &key, now_us).await;
            let cost = 1 + random.below(4u64);
            match random.below(8u64) {
                0..3 => {
                    let outcome = node.decide(&cell, Charge::Commit, cost, now_us).outcome;
                    node.own += if outcome == Outcome::Allowed { cost } else { 0 };
                }
                // Often enough that all of it is given back, when a counter has nothing to say but that.
                3..6 => {
                    node.decide(&cell, Charge::Refund, cost, now_us);
                    node.own = node.own.saturating_sub(cost);
                }
                6 => drop(node.memory.sweep(UnixMicros::new(now_us))),
                _ if node.under_way.is_none() => {
                    let (there, back) = (random.below(20u64) * MS, random.below(20u64) * MS);
                    node.send(now_us, there, back, random.below(4u64) == 0);
                }
                _ => {}
            }
        }
        let mut all = 0;
        for node in &mut nodes {
            node.catch_up(&mut shared, &key, &cell, now_us).await;
            all += node.own;
        }
        above = above.max(all.saturating_sub(BURST));
        for node in &mut nodes {
            node.catch_up(&mut shared, &key, &cell, now_us).await;
            // One that has nothing of its own is not asked to tell anything, and hears of the others with its first request.
            if node.own > 0 {
                let outcome = node.decide(&cell, Charge::Peek, 1, now_us);
                assert_eq!(outcome.remaining, BURST.saturating_sub(all), "seed {seed}: {outcome:?} {all}");
            }
        }
        let stranger = OwnTotals {
            key: cell.key.clone(),
            tag: 7,
            window_us: 10 * day,
            state: OwnState::Bucket {
                interval_ns: bucket.interval_ns(),
                fill_ns: bucket.fill_ns(),
                total: 0,
                acknowledged: 0,
                tat_ns: 0,
            },
        };
        let (_, lacks) = shared.exchange(&key, 1, &stranger, now_us).await;
        assert_eq!(lacks, all, "seed {seed}");
    }
    assert!(above > 10, "no seed took much more than there was: {above}");
}

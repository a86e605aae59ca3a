use std::collections::HashMap;

use limiter_common::{
    bucket::Bucket,
    leaky_bucket::LeakyBucket,
    sliding_window::{Counts, Outcome, Window},
};
use proptest::prelude::*;

use super::*;
use crate::{
    clock::ManualClock,
    store::{
        Algorithm, CellRef, Identity, IdentityRef, Name, Outcomes, SessionId, algorithm::View, counter::OwnState,
        passes,
    },
};

const T0: u64 = 1_704_067_200_000_000;
const SECOND: u64 = 1_000_000;

fn key(name: &str) -> CounterKey {
    CounterKey { identity: Identity::User(name.into()), rule: "r".into() }
}

fn cell(name: &str, window_us: u64, ceiling: u64) -> Cell {
    Cell { key: key(name), algorithm: Algorithm::sliding_window(window_us, ceiling), cost: 1, enforced: true }
}

fn store(max_counters: usize, shared: bool) -> MemoryStore {
    MemoryStore::build(Arc::new(ManualClock::at(T0)), max_counters, shared)
}

fn decide(store: &MemoryStore, now_us: u64, cells: &[Cell]) -> Outcomes {
    store.decide(UnixMicros::new(now_us), Charge::Commit, cells)
}

fn take(store: &MemoryStore, now_us: u64, max: usize) -> Vec<OwnTotals> {
    let mut out = Vec::new();
    store.take_dirty(UnixMicros::new(now_us), max, &mut out);
    out
}

/// What Redis would say if this node were alone.
fn alone(sent: &OwnTotals) -> SharedCounts {
    let (counts, _) = windows(sent);
    SharedCounts::Windows { counts, own_previous: counts.previous, own_current: counts.current }
}

/// What is sent of a window, and what was confirmed of it.
fn windows(sent: &OwnTotals) -> (Counts, u64) {
    match sent.state {
        OwnState::Windows { counts, acknowledged_current } => (counts, acknowledged_current),
        OwnState::Bucket { .. } | OwnState::Log { .. } => panic!("{sent:?}"),
    }
}

#[test]
fn holds_at_most_max_counters_whatever_comes() {
    for max in [1, 10, 63, 64, 100, 1000] {
        for shared in [false, true] {
            let store = store(max, shared);
            for client in 0..4 * max.max(500) {
                // Several new counters in one request, also where only one fits.
                let names = [format!("a{client}"), format!("b{client}"), format!("c{client}")];
                let cells = names.each_ref().map(|name| cell(name, 60_000_000, 10));
                assert!(decide(&store, T0, &cells).iter().all(|answer| answer.outcome == Outcome::Allowed));
            }
            let stats = store.stats();
            assert!(stats.counters <= max && stats.capacity <= max, "{stats:?}");
            assert!(stats.queued <= max, "{stats:?}");
            assert!(stats.evicted > 0, "{stats:?}");
            assert_eq!(stats.evicted_unconfirmed_units > 0, shared, "{stats:?}");
        }
    }
}

#[test]
fn gives_up_what_has_expired_before_what_counts() {
    let store = store(64, false);
    for client in 0..32 {
        decide(&store, T0, &[cell(&format!("old{client}"), 1_000_000, 10)]);
    }
    for client in 0..32 {
        decide(&store, T0 + 5_000_000, &[cell(&format!("live{client}"), 60_000_000, 10)]);
    }
    for client in 0..32 {
        decide(&store, T0 + 5_000_000, &[cell(&format!("new{client}"), 60_000_000, 10)]);
    }
    let stats = store.stats();
    assert_eq!((stats.counters, stats.expired + stats.evicted), (64, 32));
    assert!(stats.evicted <= 4, "{stats:?}");
}

#[test]
fn a_flood_of_new_clients_does_not_refill_a_heavy_one() {
    let store = store(1000, false);
    let heavy = [cell("heavy", 60_000_000, 100)];
    while decide(&store, T0, &heavy)[0].outcome == Outcome::Allowed {}
    for client in 0..100_000 {
        decide(&store, T0, &[cell(&client.to_string(), 60_000_000, 100)]);
    }
    assert_ne!(decide(&store, T0, &heavy)[0].outcome, Outcome::Allowed);
}

/// Strangers come once under each name: by sessions, addresses and users, all of them identities that count.
#[test]
fn ten_million_strangers_push_out_nobody_who_has_come_back() {
    const CLIENTS: u64 = 20_000;
    let store = store(100_000, false);
    // Some expire long before what the strangers bring, and have less in them.
    let of = |client: u64| {
        let (window_us, ceiling) = if client.is_multiple_of(2) { (60_000_000, 100) } else { (86_400_000_000, 100) };
        [cell(&format!("client{client}"), window_us, ceiling)]
    };
    let taken = |client: u64| 2 + client % 50;
    for client in 0..CLIENTS {
        (0..taken(client)).for_each(|_| drop(decide(&store, T0, &of(client))));
    }
    let rule = Name::from("strangers");
    let algorithm = Algorithm::sliding_window(86_400_000_000, 1000);
    for stranger in 0..10_000_000u128 {
        let (id, name);
        let identity = match stranger % 3 {
            0 => IdentityRef::Ip(((0x2001_0db8u128 << 96) | (stranger << 64)).to_be_bytes().into()),
            1 => {
                id = SessionId(stranger.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835).to_be_bytes());
                IdentityRef::Session(id)
            }
            _ => {
                name = Name::from(stranger.to_string());
                IdentityRef::User(&name)
            }
        };
        let cell = CellRef { identity, rule: &rule, algorithm, cost: 40, enforced: true };
        assert_eq!(store.decide_one(UnixMicros::new(T0), Charge::Commit, &cell).outcome, Outcome::Allowed);
    }
    for client in 0..CLIENTS {
        let left = store.decide(UnixMicros::new(T0), Charge::Peek, &of(client))[0].remaining;
        assert_eq!(left, 100 - taken(client), "client{client}");
    }
    let stats = store.stats();
    assert!(stats.counters <= 100_000 && stats.evicted >= 9_900_000, "{stats:?}");
}

/// A store that is full of clients who have come back limits those who come later as well: were each newcomer pushed out by
/// the next, none would ever be denied.
#[test]
fn a_full_store_limits_newcomers_who_come_back() {
    const LIMIT: u64 = 10;
    for (max, residents, strangers) in [(20_000, 22_000, 0), (20_000, 22_000, 3000), (1000, 5000, 100), (8, 20, 0)] {
        let store = store(max, false);
        let ask = |name: String| {
            let asked = decide(&store, T0, &[cell(&name, 86_400_000_000, LIMIT)]);
            u64::from(asked[0].outcome == Outcome::Allowed)
        };
        for resident in 0..residents {
            ask(format!("resident{resident}"));
            ask(format!("resident{resident}"));
        }
        let clients = (max / 400).max(1);
        let mut admitted = vec![0; clients];
        for round in 0..40 {
            for (client, admitted) in admitted.iter_mut().enumerate() {
                *admitted += ask(format!("client{client}"));
            }
            for stranger in 0..strangers {
                ask(format!("stranger{round}-{stranger}"));
            }
        }
        // Where strangers come between, a counter may be given up before its client is known to come back, once or twice.
        let most = if strangers == 0 { LIMIT } else { LIMIT * 3 / 2 };
        let is_limited = |admitted: &u64| (LIMIT..=most).contains(admitted);
        assert!(admitted.iter().all(is_limited), "{max} counters, {strangers} strangers: {admitted:?}");
    }
}

#[test]
fn sweeps_away_what_has_expired() {
    let store = store(100_000, false);
    for client in 0..20_000 {
        decide(&store, T0, &[cell(&client.to_string(), 1_000_000, 10)]);
    }
    let live = [cell("live", 60_000_000, 10)];
    decide(&store, T0, &live);
    assert_eq!(store.sweep(UnixMicros::new(T0 + 1_999_999)), 0);
    let removed: usize = (0..SWEEPS_PER_ROUND).map(|_| store.sweep(UnixMicros::new(T0 + 2_000_000))).sum();
    assert_eq!((removed, store.stats().counters), (20_000, 1));
    assert_eq!(decide(&store, T0, &live)[0].remaining, 8);
}

#[test]
fn counts_by_rule_what_has_not_expired() {
    let clock = Arc::new(ManualClock::at(T0));
    let store = MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, 1_000_000);
    assert_eq!(store.count_by_rule(), BTreeMap::new());
    // More than one lock is held for at a time.
    let of = |rule: &str, cell: Cell| Cell { key: CounterKey { rule: rule.into(), ..cell.key }, ..cell };
    for client in 0..SWEEP_STEPS * 130 {
        let name = client.to_string();
        decide(&store, T0, &[of("long", cell(&name, 60_000_000, 10)), of("short", cell(&name, 1_000_000, 10))]);
    }
    decide(&store, T0, &[of("one", cell("0", 60_000_000, 10))]);
    let expected = |counts: &[(&str, u64)]| counts.iter().map(|(rule, count)| (Arc::from(*rule), *count)).collect();
    let all = u64::try_from(SWEEP_STEPS * 130).unwrap();
    assert_eq!(store.count_by_rule(), expected(&[("long", all), ("one", 1), ("short", all)]));
    clock.advance(2_000_000);
    assert_eq!(store.count_by_rule(), expected(&[("long", all), ("one", 1)]));
}

#[test]
fn a_denied_request_and_a_peek_create_no_counter() {
    let store = store(100, true);
    let never = Cell { cost: 5, ..cell("never", 1_000_000, 1) };
    decide(&store, T0, &[cell("fresh", 1_000_000, 10), never]);
    store.decide(UnixMicros::new(T0), Charge::Peek, &[cell("fresh", 1_000_000, 10)]);
    assert_eq!((store.stats().counters, store.stats().queued), (0, 0));
}

#[test]
fn a_counter_is_queued_once_and_again_after_what_was_not_confirmed() {
    let store = store(1000, true);
    let cells = [cell("u", 60_000_000, 100)];
    for _ in 0..3 {
        decide(&store, T0, &cells);
    }
    let sent = take(&store, T0, 10);
    assert_eq!(sent.len(), 1);
    assert_eq!(windows(&sent[0]).0.current, 3);
    assert_eq!(take(&store, T0, 10), []);
    // More arrives while the message is under way.
    decide(&store, T0, &cells);
    store.apply(&sent[0], &alone(&sent[0]), UnixMicros::new(T0), Adopts::Always);
    let sent = take(&store, T0, 10);
    assert_eq!((windows(&sent[0]).0.current, windows(&sent[0]).1), (4, 3));
    // No answer: it is to be sent again, in full.
    store.requeue(&sent[0].key);
    let sent = take(&store, T0, 10);
    assert_eq!(windows(&sent[0]).0.current, 4);
    store.apply(&sent[0], &alone(&sent[0]), UnixMicros::new(T0), Adopts::Always);
    assert_eq!(take(&store, T0, 10), []);
    assert_eq!(store.queue_live(UnixMicros::new(T0), &|_| true), 1);
    assert_eq!(windows(&take(&store, T0 + 60_000_000, 10)[0]).0.previous, 4);
    assert_eq!(store.queue_live(UnixMicros::new(T0 + 180_000_000), &|_| true), 0);
}

#[test]
fn takes_at_most_what_was_asked_for() {
    let store = store(10_000, true);
    for client in 0..100 {
        decide(&store, T0, &[cell(&client.to_string(), 60_000_000, 100)]);
    }
    let (first, rest) = (take(&store, T0, 30), take(&store, T0, 100));
    assert_eq!((first.len(), rest.len()), (30, 70));
}

#[test]
fn totals_of_windows_that_are_over_are_counted_and_not_sent() {
    let store = store(1000, true);
    for _ in 0..5 {
        decide(&store, T0, &[cell("u", 1_000_000, 100)]);
    }
    assert_eq!(take(&store, T0 + 2_000_000, 10), []);
    assert_eq!(store.stats().late_units, 5);
}

#[test]
fn others_counts_deny_here() {
    let store = store(1000, true);
    let cells = [cell("u", 60_000_000, 100)];
    decide(&store, T0, &cells);
    let sent = take(&store, T0, 10);
    let counts = Counts { current: 100, ..windows(&sent[0]).0 };
    let shared = SharedCounts::Windows { counts, own_previous: 0, own_current: 1 };
    store.apply(&sent[0], &shared, UnixMicros::new(T0), Adopts::Always);
    assert!(matches!(decide(&store, T0, &cells)[0].outcome, Outcome::Denied { .. }));
}

#[test]
fn a_refund_creates_no_counter_and_is_shared() {
    let store = store(1000, true);
    let cells = [cell("u", 60_000_000, 100)];
    let refund = |cost| {
        let cells = [Cell { cost, ..cells[0].clone() }];
        store.decide(UnixMicros::new(T0), Charge::Refund, &cells)[0]
    };
    assert_eq!((refund(5).outcome, refund(5).remaining), (Outcome::Allowed, 100));
    assert_eq!((store.stats().counters, store.stats().queued), (0, 0));
    for _ in 0..3 {
        decide(&store, T0, &cells);
    }
    let sent = take(&store, T0, 10);
    store.apply(&sent[0], &alone(&sent[0]), UnixMicros::new(T0), Adopts::Always);
    assert_eq!(refund(2).remaining, 99);
    assert_eq!(windows(&take(&store, T0, 10)[0]), (Counts { index: T0 / 60_000_000, previous: 0, current: 1 }, 3));
    assert_eq!(refund(2).remaining, 100);
}

/// What it had admitted is in the shared store under the tag that it had, and comes back from there as others' counts.
#[test]
fn a_counter_that_was_given_up_comes_back_under_another_tag() {
    let store = store(1, true);
    let mut tags = Vec::new();
    for name in ["u", "v", "u"] {
        decide(&store, T0, &[cell(name, 60_000_000, 100)]);
        let sent = take(&store, T0, 10);
        assert_eq!((sent.len(), windows(&sent[0]).0.current), (1, 1));
        tags.push(sent[0].tag);
        store.apply(&sent[0], &alone(&sent[0]), UnixMicros::new(T0), Adopts::Always);
    }
    assert_eq!(store.stats().evicted, 2);
    assert!(tags[0] != tags[1] && tags[0] != tags[2], "{tags:?}");
}

/// Two nodes must not take each other's parts of a counter for their own.
#[test]
fn no_two_stores_of_a_process_give_the_same_tags() {
    let tag = |store: &MemoryStore| {
        decide(store, T0, &[cell("u", 60_000_000, 100)]);
        take(store, T0, 1)[0].tag
    };
    assert_ne!(tag(&store(1000, true)), tag(&store(1000, true)));
}

/// The definitions, without any of what makes the store fast.
#[derive(Default)]
struct Model(HashMap<CounterKey, View>);

impl Model {
    fn moved(view: Option<View>, algorithm: &Algorithm, now_us: u64) -> View {
        match view {
            None => algorithm.unused(now_us),
            Some(View::Windows(counts)) => View::Windows(counts.at(now_us / algorithm.window_us())),
            Some(other @ (View::Bucket { .. } | View::Log { .. })) => other,
        }
    }

    fn decide(&mut self, now_us: u64, charge: Charge, cells: &[Cell]) -> Vec<CellOutcome> {
        let mut tried = self.0.clone();
        let mut outcomes = Vec::new();
        for cell in cells {
            let view = Self::moved(tried.get(&cell.key).copied(), &cell.algorithm, now_us);
            let (outcome, delay_us) = cell.algorithm.check(view, now_us, cell.cost);
            if outcome == Outcome::Allowed {
                tried.insert(cell.key.clone(), cell.algorithm.taken(view, now_us, cell.cost));
            }
            outcomes.push(CellOutcome { outcome, delay_us, ..CellOutcome::allowed(0) });
        }
        if charge == Charge::Commit && passes(cells, &outcomes) {
            self.0 = tried;
        }
        for (cell, outcome) in cells.iter().zip(&mut outcomes) {
            let view = Self::moved(self.0.get(&cell.key).copied(), &cell.algorithm, now_us);
            outcome.remaining = cell.algorithm.remaining(view, now_us);
            outcome.reset_us = cell.algorithm.reset_us(view, now_us);
            if matches!(outcome.outcome, Outcome::Denied { .. }) {
                outcome.over = cell.algorithm.over(view, now_us);
            }
        }
        outcomes
    }
}

/// A client's counters have one algorithm and window each, as one rule has.
fn algorithm(client: u64, ceiling: u64) -> Algorithm {
    let window_us = 100 * (client + 1);
    let window = Window { window_us, ceiling };
    match client {
        0 | 5 => Algorithm::SlidingWindow(window),
        1 => Algorithm::FixedWindow(window),
        2 | 3 => Algorithm::TokenBucket { bucket: Bucket::new(ceiling, window_us, ceiling).unwrap(), window_us },
        _ => Algorithm::LeakyBucket { bucket: LeakyBucket::new(7, window_us, ceiling, 200).unwrap(), window_us },
    }
}

prop_compose! {
    fn cells()(
        picks in prop::collection::vec((0u64..6, 1u64..4, 0u64..3), 1..5),
    ) -> Vec<Cell> {
        picks.into_iter().map(|(client, cost, ceiling)| Cell {
            key: key(&client.to_string()),
            // Buckets that change their burst are cut, which the model does not know.
            algorithm: algorithm(client, if (2..5).contains(&client) { 7 } else { 3 + 4 * ceiling }),
            cost,
            // The mode is the rule's, so it is one for a counter.
            enforced: client != 5,
        }).collect()
    }
}

proptest! {
    #[test]
    fn decides_as_the_definition_does(
        requests in prop::collection::vec((0u64..150, any::<bool>(), cells()), 1..100),
        shared: bool,
    ) {
        let store = store(1000, shared);
        let mut model = Model::default();
        let mut now_us = T0;
        for (pause, peek, cells) in requests {
            now_us += pause;
            let charge = if peek { Charge::Peek } else { Charge::Commit };
            let outcomes = store.decide(UnixMicros::new(now_us), charge, &cells);
            prop_assert_eq!(outcomes.to_vec(), model.decide(now_us, charge, &cells), "{:?}", cells);
            if now_us.is_multiple_of(3) {
                store.sweep(UnixMicros::new(now_us));
            }
        }
    }
}

#[test]
fn logs_take_no_more_memory_than_they_may() {
    const LIMIT: u64 = 10_000;
    let store = MemoryStore::new(Arc::new(ManualClock::at(T0)), 1000);
    let of = |name: &str, algorithm| Cell {
        key: CounterKey { identity: Identity::User(name.into()), rule: "r".into() },
        algorithm,
        cost: 1,
        enforced: true,
    };
    let log = Algorithm::SlidingLog(Window { window_us: 3600 * SECOND, ceiling: LIMIT });
    let charge = |cell: &Cell, now_us: u64| {
        let outcome = store.decide(UnixMicros::new(now_us), Charge::Commit, std::slice::from_ref(cell))[0].outcome;
        assert_eq!(outcome, Outcome::Allowed);
    };
    let window = of("window", Algorithm::sliding_window(3600 * SECOND, LIMIT));
    let short = of("short", log);
    (0..10).for_each(|number| charge(&short, T0 + number));
    charge(&window, T0);
    // Four logs of ten thousand fit in, whose memory grows by doubling.
    let long: Vec<Cell> = (0..12).map(|number| of(&format!("long {number}"), log)).collect();
    for cell in &long[..4] {
        (0..LIMIT).for_each(|number| charge(cell, T0 + number));
    }
    store.sweep(UnixMicros::new(T0 + LIMIT));
    assert_eq!((store.stats().evicted, store.stats().counters), (0, 6));
    assert!(store.stats().logged >= 40_000, "{:?}", store.stats());
    for cell in &long[4..] {
        (0..LIMIT).for_each(|number| charge(cell, T0 + number));
        store.sweep(UnixMicros::new(T0 + LIMIT));
        assert!(store.stats().logged <= 80_000, "{:?}", store.stats());
    }
    assert!((7..=8).contains(&store.stats().evicted), "{:?}", store.stats());
    // The longest had to go.
    for (cell, used) in [(&window, 1), (&short, 10)] {
        let peek = store.decide(UnixMicros::new(T0 + LIMIT), Charge::Peek, std::slice::from_ref(cell))[0];
        assert_eq!(peek.remaining, LIMIT - used);
    }
    // What is over takes nothing.
    let later = T0 + 3 * 3600 * SECOND;
    for _ in 0..32 {
        store.sweep(UnixMicros::new(later));
    }
    assert_eq!((store.stats().logged, store.stats().counters), (0, 0));
    // What has become a log is one.
    let once_a_window = Cell { algorithm: log, ..window };
    charge(&of("window", Algorithm::sliding_window(3600 * SECOND, LIMIT)), later);
    (0..100).for_each(|number| charge(&once_a_window, later + number));
    store.sweep(UnixMicros::new(later + 100));
    assert!(store.stats().logged >= 100, "{:?}", store.stats());
}

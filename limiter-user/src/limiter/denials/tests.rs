//! A limiter that remembers denials beside one that looks at every counter: whatever happens, both say the same.

use std::{cell::Cell, net::IpAddr, path::Path, time::Duration};

use limiter_common::sliding_window::Counts;
use proptest::{prelude::*, test_runner::TestRunner};

use super::*;
use crate::{
    active::SharedActive,
    clock::{Clock, ManualClock},
    config::PressureConfig,
    identity::{ClientAddress, KeyOwner},
    limiter::{Attribute, Caller, Limiter, Subject, Turn},
    metrics::Metrics,
    policy::{Policy, Scratch},
    pressure::{Pressure, Report},
    store::{
        ApiKeyId, SessionId,
        counter::{Adopts, LoggedAdmission, OwnState, SharedCounts},
    },
};

const START_US: u64 = 1_800_000_000_000_000;

/// Everything that a limiter has, of its own.
struct Side {
    limiter: Limiter,
    counters: Arc<MemoryStore>,
    active: SharedActive,
    metrics: Metrics,
    pressure: Pressure,
    turns: Vec<Turn>,
}

impl Side {
    fn new(clock: &Arc<ManualClock>, policy: &str, remembers: bool) -> Self {
        let interval = Duration::from_secs(1);
        let pressure = Pressure::new(PressureConfig { header: false, interval, expires: 10 * interval });
        let metrics = Metrics::new();
        let active = active(policy, &metrics, &pressure).share();
        let counters = Arc::new(MemoryStore::shared(Arc::clone(clock) as Arc<dyn Clock>, 10_000));
        let clock = Arc::clone(clock) as Arc<dyn Clock>;
        let limiter = Limiter::new(Arc::clone(&active), Arc::clone(&counters), clock, SrcPrefixes::default());
        let limiter = if remembers { limiter } else { limiter.remembering_nothing() };
        Self { limiter, counters, active, metrics, pressure, turns: Vec::new() }
    }

    /// From memory, since there is no Redis.
    fn decide(&self, request: &Request<'_>) -> Decision {
        self.limiter.decide(request, &mut Scratch::default()).expect("decided from memory")
    }

    fn reload(&self, policy: &str) {
        self.active.store(Arc::new(active(policy, &self.metrics, &self.pressure)));
    }

    /// Other nodes admitted or gave back, and what this one sent has arrived.
    fn hear(&self, now_us: u64, more: u64) {
        let mut sent = Vec::new();
        let now = UnixMicros::new(now_us);
        self.counters.take_dirty(now, usize::MAX, &mut sent);
        for sent in sent {
            let shared = match &sent.state {
                OwnState::Windows { counts: own, .. } => SharedCounts::Windows {
                    counts: Counts { current: own.current + more, ..*own },
                    own_previous: own.previous,
                    own_current: own.current,
                },
                // Not by the interval, which is that of whoever was looked at last: plans have their own.
                OwnState::Bucket { total, tat_ns, .. } => {
                    SharedCounts::Bucket { own_total: *total, tat_ns: tat_ns + 300_000_000 * more }
                }
                OwnState::Log { admissions } => {
                    let others = LoggedAdmission { tag: 0, number: 0, at_us: now_us, cost: more };
                    let others = (more > 0).then_some(others);
                    SharedCounts::Log { admissions: admissions.iter().copied().chain(others).collect() }
                }
            };
            self.counters.apply(&sent, &shared, now, Adopts::Always);
        }
    }

    fn counts(&self) -> Vec<Vec<u64>> {
        let metrics =
            self.active.load().policy.rules.iter().map(|rule| self.metrics.rule(&rule.id)).collect::<Vec<_>>();
        let of = |rule: &crate::metrics::RuleMetrics| {
            let kinds = Kind::ALL.iter().map(|kind| rule.decided(*kind));
            kinds.chain([rule.shadow_denied(), rule.also_denied()]).collect()
        };
        metrics.iter().map(of).collect()
    }
}

fn active(policy: &str, metrics: &Metrics, pressure: &Pressure) -> Active {
    let policy = Policy::parse(Path::new("/policy.toml"), policy).unwrap();
    Active::derive(policy, &[], metrics, pressure, UnixMicros::new(0))
}

/// Rules of every algorithm and scope, and what of them the seed picks. All limits are small, so that most is denied.
fn policy(seed: u64) -> String {
    const ALGORITHMS: [&str; 5] = ["sliding_window", "fixed_window", "token_bucket", "sliding_log", "leaky_bucket"];
    const SCOPES: [&str; 6] = ["user", "key", "ip", "global", "session", "attribute:tenant"];
    let mut text = String::from(
        "[plans.free]\n[plans.pro]\ninherits = \"free\"\n\
         [[endpoints]]\nname = \"all\"\nmatch = [\"/a/**\"]\n[[endpoints]]\nname = \"one\"\nmatch = [\"GET /a/b\"]\n",
    );
    let mut random = seed;
    let mut below = |most: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % most
    };
    for rule in 0..2 + below(4) {
        let pick = |list: &[&'static str], number: u64| list[usize::try_from(number).unwrap()];
        let algorithm = pick(&ALGORITHMS, below(5));
        let scope = pick(&SCOPES, below(6));
        let (window, cost) = (pick(&["1s", "3s", "700ms", "60s"], below(4)), 1 + below(2));
        let limit = cost + 1 + below(4);
        let lines = [
            format!("id = \"r{rule}\"\nscope = \"{scope}\"\nalgorithm = \"{algorithm}\"\nlimit = {limit}\n"),
            format!("window = \"{window}\"\ncost = {cost}\n"),
            match algorithm {
                "leaky_bucket" => format!("burst = {}\nmax_delay = \"2s\"\n", cost + below(3)),
                _ => String::new(),
            },
            pick(&["", "", "endpoint = \"all\"\n", "endpoint = \"one\"\n"], below(4)).to_owned(),
            pick(&["", "match = \"most_specific\"\n"], below(2)).to_owned(),
            pick(&["", "", "mode = \"shadow\"\n"], below(3)).to_owned(),
            match below(3) {
                0 => format!("adaptive = {{ floor = {cost}, target = 0.5, recover = \"4s\" }}\n"),
                _ => String::new(),
            },
            pick(&["", "plans = { pro = 7 }\n"], below(2)).to_owned(),
        ];
        text.push_str("[[rules]]\n");
        text.extend(lines);
    }
    text
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Ask {
        caller: u8,
        path: u8,
        address: u8,
        tenant: bool,
        cost: u64,
        charge: Charge,
        leaves: bool,
    },
    /// What was asked last, so many times.
    Again {
        times: u8,
        pause_us: u64,
    },
    Wait(u64),
    /// A clock that is set.
    Back(u64),
    Reload(u64),
    Pressure {
        level: u32,
        steps: u64,
    },
    Hear(u64),
    Sweep,
}

fn step() -> impl Strategy<Value = Step> {
    let charge = prop_oneof![14 => Just(Charge::Commit), 1 => Just(Charge::Peek), 1 => Just(Charge::Refund)];
    let ask =
        (0u8..7, 0u8..3, 0u8..3, any::<bool>(), prop_oneof![9 => Just(1u64), 1 => 2u64..4], charge, any::<bool>());
    let ask = ask.prop_map(|(caller, path, address, tenant, cost, charge, leaves)| Step::Ask {
        caller,
        path,
        address,
        tenant,
        cost,
        charge,
        leaves,
    });
    prop_oneof![
        40 => ask,
        20 => (1u8..6, 0u64..50_000).prop_map(|(times, pause_us)| Step::Again { times, pause_us }),
        10 => (0u64..300_000).prop_map(Step::Wait),
        4 => (0u64..4_000_000).prop_map(Step::Wait),
        1 => (0u64..5_000_000).prop_map(Step::Back),
        1 => (0u64..1000).prop_map(Step::Reload),
        2 => (0u32..=1_000_000, 1u64..4).prop_map(|(level, steps)| Step::Pressure { level, steps }),
        3 => (0u64..3).prop_map(Step::Hear),
        1 => Just(Step::Sweep),
    ]
}

fn caller(number: u8) -> Caller {
    let owner = |id: u8, client: &str, plan: Option<&str>| {
        Caller::Key(KeyOwner::new(ApiKeyId([id; 16]), client, plan.map(Into::into)).into())
    };
    match number {
        0 => owner(1, "c_1", None),
        // The same key after a change of its plan, then another one of the same client.
        1 => owner(1, "c_1", Some("pro")),
        2 => owner(2, "c_1", Some("free")),
        3 => Caller::User { user: "c_1".into(), plan: Some("pro".into()) },
        4 => Caller::Session(SessionId([1; 16])),
        5 => Caller::Anonymous,
        _ => Caller::Unauthenticated,
    }
}

fn told(decision: &Decision) -> impl PartialEq + std::fmt::Debug + use<> {
    let Decision { kind, now, answer, shadow, address_denial, bypass, turn } = decision;
    (*kind, *now, answer.clone(), shadow.clone(), address_denial.clone(), *bypass, turn.is_some())
}

struct Both {
    clock: Arc<ManualClock>,
    sides: [Side; 2],
    pressure_us: u64,
    asked: Option<Step>,
    tenant: Attribute,
}

impl Both {
    fn new(policy: &str) -> Self {
        let clock = Arc::new(ManualClock::at(START_US));
        let sides = [true, false].map(|remembers| Side::new(&clock, policy, remembers));
        Self { clock, sides, pressure_us: 0, asked: None, tenant: Attribute::new("tenant", "t").unwrap() }
    }

    fn take(&mut self, step: Step) -> Result<(), TestCaseError> {
        let now_us = self.clock.now().get();
        match step {
            Step::Again { times, pause_us } => {
                for _ in 0..times {
                    self.clock.advance(pause_us);
                    if let Some(asked) = self.asked {
                        self.take(asked)?;
                    }
                }
            }
            Step::Ask { caller: number, path, address, tenant, cost, charge, leaves } => {
                self.asked = Some(step);
                let address: Option<IpAddr> = match address {
                    0 => None,
                    1 => Some([192, 0, 2, 1].into()),
                    _ => Some([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into()),
                };
                let address = address.map(|address| ClientAddress { address, packet_source: true });
                let subject = Subject { caller: caller(number), address };
                let attributes = [self.tenant.clone()];
                let request = Request {
                    subject: &subject,
                    method: "GET",
                    path: ["/a/b", "/a/c?x=1", "/elsewhere"][usize::from(path)],
                    also: &[],
                    attributes: &attributes[..usize::from(tenant)],
                    cost,
                    charge,
                };
                let [mut one, mut other] = [0, 1].map(|side| self.sides[side].decide(&request));
                prop_assert_eq!(told(&one), told(&other), "{:?} at {}", step, now_us);
                if !leaves {
                    self.sides[0].turns.extend(one.turn.take());
                    self.sides[1].turns.extend(other.turn.take());
                }
            }
            Step::Wait(us) => self.clock.advance(us),
            Step::Back(us) => self.clock.set(now_us - us),
            Step::Reload(seed) => self.sides.iter().for_each(|side| side.reload(&policy(seed))),
            Step::Pressure { level, steps } => {
                self.pressure_us += 1_000_000;
                for side in &self.sides {
                    side.pressure.report(Report::Level(level));
                    for number in 0..steps {
                        side.pressure.step(&side.active.load(), self.pressure_us + number * 1_000_000);
                    }
                }
                self.pressure_us += steps * 1_000_000;
            }
            Step::Hear(more) => self.sides.iter().for_each(|side| side.hear(now_us, more)),
            Step::Sweep => {
                for side in &self.sides {
                    side.counters.sweep(self.clock.now());
                }
            }
        }
        Ok(())
    }
}

#[test]
fn answers_and_metrics_are_those_of_a_limiter_that_remembers_nothing() {
    let remembered = Cell::new(0);
    let config = ProptestConfig { cases: 2000, ..ProptestConfig::with_source_file(file!()) };
    let runs = TestRunner::new(config).run(&(any::<u64>(), prop::collection::vec(step(), 1..150)), |(seed, steps)| {
        let mut both = Both::new(&policy(seed));
        for step in steps {
            both.take(step)?;
        }
        let [one, other] = &both.sides;
        prop_assert_eq!(one.counts(), other.counts());
        prop_assert_eq!(other.metrics.remembered().counted(), 0);
        remembered.set(remembered.get() + one.metrics.remembered().counted());
        Ok(())
    });
    runs.unwrap();
    assert!(remembered.get() > 10_000, "{} answers were from memory", remembered.get());
}

fn request(subject: &Subject) -> Request<'_> {
    Request { subject, method: "GET", path: "/a/b", also: &[], attributes: &[], cost: 1, charge: Charge::Commit }
}

/// One user's limit, and one of everybody that is far away. Both in shadow mode as well.
fn rules(algorithm: &str) -> String {
    let shape = if algorithm == "leaky_bucket" { "burst = 1\n" } else { "" };
    let rule = |id: &str, scope: &str, limit: u32, mode: &str| {
        format!(
            "[[rules]]\nid = \"{id}\"\nscope = \"{scope}\"\nalgorithm = \"{algorithm}\"\nlimit = {limit}\n\
             window = \"1h\"\nmode = \"{mode}\"\n{shape}"
        )
    };
    let of_all =
        "[plans.free]\n[plans.pro]\n[[rules]]\nid = \"all\"\nscope = \"global\"\nlimit = 1000\nwindow = \"1h\"\n";
    [&*rule("own", "user", 2, "enforce"), &rule("shadow", "user", 2, "shadow"), of_all].concat()
}

#[test]
fn whoever_goes_on_asking_is_told_from_memory_as_long_as_nothing_happens() {
    for algorithm in ["sliding_window", "fixed_window", "token_bucket", "sliding_log", "leaky_bucket"] {
        let clock = Arc::new(ManualClock::at(START_US));
        let mut side = Side::new(&clock, &rules(algorithm), true);
        let subject = |number| Subject { caller: caller(number), address: None };
        let (abusive, other) =
            (subject(0), Subject { caller: Caller::User { user: "other".into(), plan: None }, address: None });
        let mut ask = |subject: &Subject| {
            clock.advance(1000);
            let decided = side.limiter.decide(&request(subject), &mut Scratch::default());
            let mut decision = decided.expect("decided from memory");
            side.turns.extend(decision.turn.take());
            (decision.kind, decision.shadow.len())
        };
        let remembered = side.metrics.remembered();
        while ask(&abusive).0 == Kind::Allowed {}
        for again in 1..=100 {
            assert_eq!(ask(&abusive), (Kind::Denied, 1), "{algorithm}");
            // The second denial is looked at as well, and remembered.
            assert_eq!(remembered.counted(), again - 1, "{algorithm}");
            if again == 50 {
                // Takes from the limit of everybody, and leaves enough.
                assert_eq!(ask(&other).0, Kind::Allowed, "{algorithm}");
            }
        }
        let shadow = side.metrics.rule("shadow");
        assert_eq!(shadow.shadow_denied(), side.metrics.rule("own").decided(Kind::Denied), "{algorithm}");
        // Something is given back to it: the next request is looked at, and passes.
        let refund = Request { charge: Charge::Refund, ..request(&abusive) };
        let given = side.decide(&refund);
        assert_eq!(given.kind, Kind::Allowed, "{algorithm}");
        let mut decision = side.decide(&request(&abusive));
        assert_eq!(decision.kind, Kind::Allowed, "{algorithm}");
        side.turns.extend(decision.turn.take());
        assert_eq!(remembered.counted(), 99, "{algorithm}");
    }
}

#[test]
fn a_reload_and_a_changed_key_are_looked_at_anew() {
    let clock = Arc::new(ManualClock::at(START_US));
    let side = Side::new(&clock, &rules("sliding_window"), true);
    let ask = |number| {
        let subject = Subject { caller: caller(number), address: None };
        side.decide(&request(&subject))
    };
    let (kinds, remembered) = ([(); 5].map(|()| ask(0).kind), side.metrics.remembered());
    assert_eq!(kinds, [Kind::Allowed, Kind::Allowed, Kind::Denied, Kind::Denied, Kind::Denied]);
    assert_eq!(remembered.counted(), 1);
    side.reload(&rules("sliding_window").replace("limit = 2", "limit = 3"));
    assert_eq!([(); 3].map(|()| ask(0).kind), [Kind::Allowed, Kind::Denied, Kind::Denied]);
    assert_eq!(remembered.counted(), 2);
    // The key with another plan is another caller, and so is another key of the same client: denied as well, each after
    // looks of its own.
    assert_eq!([1, 2, 2, 1, 2].map(|number| ask(number).kind), [Kind::Denied; 5]);
    assert_eq!(remembered.counted(), 4);
}

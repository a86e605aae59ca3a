//! A packet, the state that it meets, and the verdict that it must get: one table for tests and measurements.

use std::{collections::BTreeMap, path::PathBuf};

use limiter_common::{
    addr::SrcPrefixes,
    quota::{Quota, Rate},
    rule::EnforcementMode,
    schema::SCHEMA_VERSION,
    stats::Counter,
    verdict::Verdict,
};
use limiter_user::{
    dataplane::{Dataplane as _, DataplaneConfig, KernelDataplane, OnExit, Protect, Transport, Tuning, XdpMode},
    policy::{PacketRuleSpec, Policy},
};

use crate::{netns::TestPins, object::xdp_object, packet::Packet};

/// What the program is loaded with.
#[derive(Clone, Debug)]
pub struct World {
    pub config: DataplaneConfig,
    pub policy: Policy,
    pub tuning: Tuning,
}

/// Which limit a test rule has.
#[derive(Clone, Copy, Debug)]
pub enum Limited {
    Packets,
    Bytes,
    Connections,
}

/// So slow that nothing comes back during a test: one unit a day.
pub fn burst_of(burst: u64) -> Quota {
    const DAY_NS: u64 = 24 * 3600 * 1_000_000_000;
    // The rate grows with the burst, so that a full burst takes twenty days at most.
    Quota { rate: Rate { count: burst.div_ceil(20), per_ns: DAY_NS }, burst }
}

pub fn rule(id: &str, cidr: &str, mode: EnforcementMode, limits: &[(Limited, u64)]) -> PacketRuleSpec {
    let mut rule = PacketRuleSpec::new(id, cidr.parse().expect("a prefix"), mode);
    for (limited, burst) in limits {
        let quota = Some(burst_of(*burst));
        match limited {
            Limited::Packets => rule.packets = quota,
            Limited::Bytes => rule.bytes = quota,
            Limited::Connections => rule.new_connections = quota,
        }
    }
    rule
}

impl World {
    /// Protects tcp/80, tcp/443 and udp/443.
    pub fn new() -> Self {
        let config = DataplaneConfig {
            interfaces: Vec::new(),
            mode: XdpMode::Auto,
            protect: Protect::Ports(vec![(Transport::Tcp, 80), (Transport::Tcp, 443), (Transport::Udp, 443)]),
            pin_dir: "/nonexistent".into(),
            max_sources: 1024,
            on_exit: OnExit::Keep,
            drop_malformed: true,
            src_prefixes: SrcPrefixes::default(),
            budgets: true,
        };
        Self { config, policy: Policy::default(), tuning: Tuning::default() }
    }

    #[must_use]
    pub fn rule(mut self, id: &str, cidr: &str, mode: EnforcementMode, limits: &[(Limited, u64)]) -> Self {
        self.policy.packet_rules.push(rule(id, cidr, mode, limits));
        self
    }

    #[must_use]
    pub fn allow(mut self, prefix: &str) -> Self {
        self.policy.allow.push(prefix.parse().expect("a prefix"));
        self
    }

    #[must_use]
    pub fn deny(mut self, prefix: &str) -> Self {
        self.policy.deny.push(prefix.parse().expect("a prefix"));
        self
    }

    #[must_use]
    pub fn protect(mut self, protect: Protect) -> Self {
        self.config.protect = protect;
        self
    }

    /// Loads the program, attached nowhere.
    ///
    /// # Panics
    ///
    /// When it does not load.
    pub fn load(&self) -> Loaded {
        let pins = TestPins::new();
        let dataplane = self.start(&pins);
        Loaded { dataplane, pins }
    }

    fn start(&self, pins: &TestPins) -> KernelDataplane {
        let config = DataplaneConfig { pin_dir: pins.path().to_owned(), ..self.config.clone() };
        KernelDataplane::start(xdp_object(), config, &self.policy, self.tuning.clone())
            .unwrap_or_else(|error| panic!("load the XDP program: {error}"))
    }
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

/// A loaded program and its pins.
#[derive(Debug)]
pub struct Loaded {
    pub dataplane: KernelDataplane,
    pins: TestPins,
}

/// Counters by rule and verdict index.
pub type Counters = BTreeMap<(Option<String>, u32), Counter>;

impl Loaded {
    /// Where the map of this name is pinned.
    pub fn pinned(&self, map: &str) -> PathBuf {
        self.pins.path().join(format!("v{SCHEMA_VERSION}")).join(map)
    }

    /// Ends the agent without a word, and starts one of `world` in its place.
    pub fn restart(self, world: &World) -> Self {
        let Self { dataplane, pins } = self;
        drop(dataplane);
        Self { dataplane: world.start(&pins), pins }
    }

    pub fn counters(&self) -> Counters {
        let counters = self.dataplane.counters().expect("read the counters");
        counters
            .into_iter()
            .map(|row| ((row.rule.map(|rule| rule.to_string()), row.verdict.index()), row.counter))
            .collect()
    }

    /// Packets that got this verdict, of all rules.
    pub fn packets(&self, verdict: Verdict) -> u64 {
        let counters = self.counters();
        counters.iter().filter(|((_, index), _)| *index == verdict.index()).map(|(_, counter)| counter.packets).sum()
    }

    /// Runs one frame and tells its verdict, and the rule whose counter it is in.
    ///
    /// # Panics
    ///
    /// When not exactly one counter has grown by this frame, or when the action does not fit the verdict.
    pub fn judge(&self, frame: &[u8]) -> (Verdict, Option<String>) {
        let before = self.counters();
        let run = self.dataplane.test_run(frame, 1).expect("run the program");
        let after = self.counters();
        let mut grown = after.into_iter().filter(|(key, counter)| before.get(key) != Some(counter));
        let (key, counter) = grown.next().expect("a counter has grown");
        assert_eq!(grown.next(), None, "one counter a packet");
        let earlier = before.get(&key).copied().unwrap_or_default();
        let one = Counter { packets: 1, bytes: frame.len() as u64 };
        assert_eq!(counter, earlier.plus(one), "the counter has grown by this frame");
        let (rule, index) = key;
        let verdict = Verdict::all().nth(index as usize).expect("the index of a verdict");
        assert_eq!(run.dropped, matches!(verdict, Verdict::Drop(_)), "the action of {verdict:?}");
        (verdict, rule)
    }
}

/// One row of the table.
#[derive(Clone, Debug)]
pub struct Fixture {
    pub name: &'static str,
    pub world: World,
    /// What operators and the agent have done.
    pub state: fn(&KernelDataplane),
    /// Frames that came before.
    pub earlier: Vec<Packet>,
    pub packet: Packet,
    pub expect: Verdict,
    /// The rule whose counter it is in.
    pub rule: Option<&'static str>,
}

impl Fixture {
    pub fn new(name: &'static str, world: World, packet: Packet, expect: Verdict) -> Self {
        Self { name, world, state: |_| {}, earlier: Vec::new(), packet, expect, rule: None }
    }

    #[must_use]
    pub fn by(mut self, rule: &'static str) -> Self {
        self.rule = Some(rule);
        self
    }

    #[must_use]
    pub fn after(mut self, packet: Packet, times: usize) -> Self {
        self.earlier.extend(std::iter::repeat_n(packet, times));
        self
    }

    #[must_use]
    pub fn given(mut self, state: fn(&KernelDataplane)) -> Self {
        self.state = state;
        self
    }

    /// Loads the program with the state and the earlier packets of this row.
    pub fn prepare(&self) -> Loaded {
        let loaded = self.world.load();
        (self.state)(&loaded.dataplane);
        for packet in &self.earlier {
            loaded.dataplane.test_run(&packet.build(), 1).expect("run the program");
        }
        loaded
    }
}

mod table;

pub use table::fixtures;

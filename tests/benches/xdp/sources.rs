//! What a packet costs when it comes from one of many sources, each of which has a bucket.

use std::{cell::Cell, time::Duration};

use aya::{
    Ebpf,
    maps::ProgramArray,
    programs::{Xdp, loaded_programs},
};
use limiter_common::{
    rule::EnforcementMode::Enforce,
    walk::{STATE_OFFSET, Walk},
};
use limiter_tests::{
    bench::{Case, Goal, Row},
    fixture::{Limited, World, burst_of},
    netns::{INTERFACE, TestNet},
    packet::Packet,
};
use limiter_user::dataplane::{Dataplane as _, DataplaneConfig, KernelDataplane};

const COUNTS: [u32; 4] = [10, 1_000, 100_000, 1_000_000];
/// Sources whose buckets fit in the nearest cache together.
const GROUP: u32 = 128;
/// Often enough for what the first visit of each source costs to vanish.
const ROUNDS_OF_A_GROUP: u32 = 800;
const FLAT: f64 = 1.3;
const FIRST_SOURCE: u32 = 0x0a00_0000;

pub(crate) struct Sources {
    populations: Vec<Population>,
    /// Walks, and ends in the program that drops everything: what walking costs by itself.
    walk_only: Ebpf,
    _drop_all: Ebpf,
}

/// A limiter that knows this many sources of each family, and the walk through them.
struct Population {
    count: u32,
    walk: Ebpf,
    _dataplane: KernelDataplane,
    _net: TestNet,
}

impl Sources {
    pub(crate) fn new() -> Self {
        let mut drop_all = crate::bench_object();
        crate::program(&mut drop_all, "drop_all");
        let fd = xdp(&drop_all, "drop_all").fd().expect("it is loaded").try_clone().expect("another descriptor");
        let walk_only = walk_into(&fd);
        Self { populations: COUNTS.map(Population::new).into(), walk_only, _drop_all: drop_all }
    }

    pub(crate) fn cases(&self) -> Vec<Case<'_>> {
        let walk = Walk { first: FIRST_SOURCE, count: GROUP, stride: 1, index: 0 };
        let frame = frame(Family::V4, walk);
        let run = move |repeat| crate::expect(xdp(&self.walk_only, "walk"), &frame, repeat, crate::XDP_DROP);
        let mut cases = vec![Case::new("the walk through sources by itself", crate::REPEAT, run)];
        for family in [Family::V4, Family::V6] {
            cases.extend(self.populations.iter().map(|population| population.warm(family)));
        }
        for family in [Family::V4, Family::V6] {
            cases.extend(self.populations.iter().map(|population| population.random(family)));
        }
        cases
    }

    /// The rows of measured cases, without what the walk costs.
    pub(crate) fn rows(&self, cases: &[Case<'_>], drop_all: f64) -> Vec<Row> {
        let walk = cases[0].nanoseconds() - drop_all;
        let mut rows = vec![Row::new("the walk through sources, left out below", "ns/packet", walk)];
        for (kind, of_family) in cases[1..].chunks(COUNTS.len()).enumerate() {
            let few = without(&of_family[0], walk);
            rows.push(few.clone());
            let warm = kind < 2;
            for case in &of_family[1..] {
                let row = without(case, walk).beside(&few);
                rows.push(if warm { row.goal(Goal::AtMost(FLAT)) } else { row });
            }
        }
        rows
    }
}

fn without(case: &Case<'_>, walk: f64) -> Row {
    Row::new(case.name(), "ns/packet", case.nanoseconds() - walk)
}

#[derive(Clone, Copy, Debug)]
enum Family {
    V4,
    V6,
}

impl Family {
    fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

impl Population {
    fn new(count: u32) -> Self {
        let limits = [(Limited::Packets, 1 << 30)];
        let mut world = World::new().rule("four", "0.0.0.0/0", Enforce, &limits).rule("six", "::/0", Enforce, &limits);
        world.tuning.new_sources = Some(burst_of(1 << 30));
        let net = TestNet::new();
        let config = DataplaneConfig {
            budgets: false,
            interfaces: vec![INTERFACE.into()],
            pin_dir: net.pin_dir().to_owned(),
            // With room, so that no CPU is short of free buckets before each source has one.
            max_sources: (count + count / 2).max(16_384),
            ..world.config
        };
        let dataplane = net.gateway(|| {
            KernelDataplane::start(limiter_tests::object::xdp_object(), config, &world.policy, world.tuning)
                .expect("load the XDP program")
        });
        let id = dataplane.interfaces().expect("its interfaces")[0].program_id;
        let program =
            loaded_programs().filter_map(Result::ok).find(|program| program.id() == id).expect("the program is loaded");
        let population =
            Self { count, walk: walk_into(&program.fd().expect("open the program")), _dataplane: dataplane, _net: net };
        for family in [Family::V4, Family::V6] {
            population.visit(family, Walk { first: FIRST_SOURCE, count, stride: 1, index: 0 }, count);
        }
        population.check_usage();
        population
    }

    /// Every source has its bucket.
    fn check_usage(&self) {
        let usage = self._dataplane.map_usage().expect("read the usage");
        for map in usage.iter().filter(|usage| usage.map.starts_with("BUCKETS")) {
            assert_eq!(map.entries, u64::from(self.count), "{}", map.map);
        }
    }

    fn visit(&self, family: Family, walk: Walk, packets: u32) -> Duration {
        crate::expect(xdp(&self.walk, "walk"), &frame(family, walk), packets, crate::XDP_PASS)
    }

    /// Visits one group many times, and another group in the next round.
    fn warm(&self, family: Family) -> Case<'_> {
        let size = GROUP.min(self.count);
        let group = Cell::new(0);
        let groups = self.count / size;
        let run = move |repeat| {
            // Coprime to the number of groups or not: any order will do that does not follow memory.
            group.set((group.get() + 7919) % groups);
            let walk = Walk { first: FIRST_SOURCE + group.get() * size, count: size, stride: 1, index: 0 };
            self.visit(family, walk, repeat)
        };
        let name = format!("{} sources, warm, {}", with_separators(self.count), family.name());
        Case::new(name, GROUP * ROUNDS_OF_A_GROUP, run)
    }

    /// Visits every source once, in an order that no prefetcher foresees.
    fn random(&self, family: Family) -> Case<'_> {
        // A prime, so coprime to the powers of ten.
        let stride = 617_161 % self.count;
        let index = Cell::new(0);
        let run = move |repeat| {
            let walk = Walk { first: FIRST_SOURCE, count: self.count, stride, index: index.get() };
            let moved = u64::from(index.get()) + u64::from(stride) * u64::from(repeat);
            index.set(u32::try_from(moved % u64::from(self.count)).expect("below the count"));
            self.visit(family, walk, repeat)
        };
        let name = format!("{} sources, in random order, {}", with_separators(self.count), family.name());
        Case::new(name, crate::REPEAT, run)
    }
}

fn with_separators(number: u32) -> String {
    let digits = number.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}

/// A frame that begins this walk.
fn frame(family: Family, walk: Walk) -> Vec<u8> {
    let source = match family {
        Family::V4 => "10.0.0.0",
        Family::V6 => "2001:db8::1",
    };
    let mut frame = Packet::udp_of_len(source, 443, 64).build();
    frame[STATE_OFFSET..][..Walk::LEN].copy_from_slice(&walk.to_bytes());
    frame
}

/// The walk, which goes on with this program.
fn walk_into(program: &aya::programs::ProgramFd) -> Ebpf {
    let mut object = crate::bench_object();
    let mut next: ProgramArray<_> = object.map_mut("NEXT").expect("NEXT").try_into().expect("a program array");
    next.set(0, program, 0).expect("put the program in");
    crate::program(&mut object, "walk");
    object
}

fn xdp<'a>(object: &'a Ebpf, name: &str) -> &'a Xdp {
    object.program(name).expect("a program").try_into().expect("an XDP program")
}

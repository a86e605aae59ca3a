//! `cargo xtask bench xdp [-- --rounds N] [--paths]`: nanoseconds a packet of the XDP program, by BPF_PROG_TEST_RUN,
//! beside xdp-filter and a program that drops everything. `--paths` leaves out what takes long, the many sources.
#![expect(clippy::float_arithmetic, reason = "differences of measurements")]

#[path = "xdp/paths.rs"]
mod paths;
#[path = "xdp/sources.rs"]
mod sources;
#[path = "xdp/xdp_filter.rs"]
mod xdp_filter;

use std::{env, fs, time::Duration};

use aya::{
    Ebpf,
    programs::{TestRun as _, TestRunOptions, Xdp},
};
use limiter_tests::{
    bench::{Case, Goal, Row, measure, report, rounds},
    netns::TestNet,
    packet::{self, Packet},
};

use crate::{paths::paths, sources::Sources, xdp_filter::XdpFilter};

/// A few milliseconds.
const REPEAT: u32 = 100_000;

fn main() {
    let filter_net = TestNet::new();
    let filter = XdpFilter::start(&filter_net, "ipv4", xdp_filter::DENIED);
    let whole_filter_net = TestNet::new();
    let whole_filter = XdpFilter::start(&whole_filter_net, "all", xdp_filter::DENIED);
    let mut object = bench_object();
    let drop_all = program(&mut object, "drop_all");
    let syn = Packet::tcp(xdp_filter::DENIED, 443, packet::SYN).build();

    let paths = paths();
    let sources = (!env::args().any(|argument| argument == "--paths")).then(Sources::new);

    let mut cases = vec![
        Case::new("xdp-filter, one denied source", REPEAT, |repeat| filter.run(&syn, repeat)),
        Case::new("xdp-filter with all features, one denied source", REPEAT, |repeat| whole_filter.run(&syn, repeat)),
        Case::new("drop everything", REPEAT, |repeat| expect(drop_all, &syn, repeat, XDP_DROP)),
    ];
    for path in &paths {
        path.check();
        cases.push(Case::new(path.name, REPEAT, |repeat| path.run(repeat)));
    }
    let first_of_sources = cases.len();
    cases.extend(sources.iter().flat_map(Sources::cases));
    measure(&mut cases, rounds(100));

    let mut rows: Vec<Row> = cases[..first_of_sources].iter().map(|case| case.row("ns/packet")).collect();
    let filter = rows[0].clone();
    for row in &mut rows[1..] {
        *row = row.clone().beside(&filter);
    }
    for (row, path) in rows[3..].iter_mut().zip(&paths) {
        if let Some(goal) = path.goal {
            *row = row.clone().goal(Goal::AtMost(goal));
        }
    }
    if let Some(sources) = &sources {
        rows.extend(sources.rows(&cases[first_of_sources..], rows[2].value()));
    }
    report("xdp", &rows);
}

const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;

/// Runs a program, holds its last answer against what it must be, and tells how long a run took by the kernel's clock:
/// the call itself takes milliseconds more, in which the kernel makes its way to the program a direct jump.
fn expect(program: &Xdp, frame: &[u8], repeat: u32, action: u32) -> Duration {
    let options = TestRunOptions { data_in: Some(frame), repeat, ..TestRunOptions::new() };
    let result = program.test_run(options).expect("run the program");
    assert_eq!(result.return_value, action, "what the program does to the packet");
    result.duration
}

/// A new copy of the programs that only benchmarks use.
fn bench_object() -> Ebpf {
    let path = env::var_os("LIMITER_BENCH_OBJECT").expect("LIMITER_BENCH_OBJECT is set; run \"cargo xtask bench xdp\"");
    Ebpf::load(&fs::read(path).expect("read the programs of the benchmark")).expect("load the object of the benchmark")
}

fn program<'a>(object: &'a mut Ebpf, name: &str) -> &'a Xdp {
    let program: &mut Xdp = object.program_mut(name).expect("a program").try_into().expect("an XDP program");
    program.load().expect("the verifier accepts it");
    program
}

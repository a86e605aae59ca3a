//! Benchmarks: measuring side by side, the table on screen and the file for programs.

use std::{env, fmt, fs, path::PathBuf, time::Duration};

use serde::Serialize;

/// One line of a benchmark's table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    name: String,
    unit: &'static str,
    value: f64,
    /// What it was measured against in the same run.
    beside: Option<String>,
    /// `value / beside`.
    ratio: Option<f64>,
    goal: Option<f64>,
    met: Option<bool>,
}

/// What a ratio has to be.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    AtMost(f64),
    AtLeast(f64),
}

impl Row {
    pub fn new(name: impl Into<String>, unit: &'static str, value: f64) -> Self {
        Self { name: name.into(), unit, value, beside: None, ratio: None, goal: None, met: None }
    }

    /// Compares with a row of the same run.
    #[must_use]
    #[expect(clippy::float_arithmetic, reason = "a ratio of two measurements")]
    pub fn beside(mut self, other: &Self) -> Self {
        self.beside = Some(other.name.clone());
        self.ratio = Some(self.value / other.value);
        self
    }

    /// What the ratio has to be. Means nothing without [`Self::beside`].
    #[must_use]
    pub fn goal(mut self, goal: Goal) -> Self {
        let (bound, holds): (f64, fn(f64, f64) -> bool) = match goal {
            Goal::AtMost(bound) => (bound, |ratio, bound| ratio <= bound),
            Goal::AtLeast(bound) => (bound, |ratio, bound| ratio >= bound),
        };
        self.goal = Some(bound);
        self.met = self.ratio.map(|ratio| holds(ratio, bound));
        self
    }

    pub fn value(&self) -> f64 {
        self.value
    }
}

/// The table of a benchmark that takes long: each row is printed as it comes.
#[derive(Debug)]
pub struct Table {
    name: &'static str,
    rows: Vec<Row>,
}

impl Table {
    /// Of the benchmark of this name.
    pub const fn new(name: &'static str) -> Self {
        Self { name, rows: Vec::new() }
    }

    pub fn push(&mut self, row: Row) {
        print(&row, 60);
        self.rows.push(row);
    }

    /// Writes `target/bench/NAME.json`.
    pub fn finish(self) {
        write(self.name, &self.rows);
    }
}

/// Prints the table and writes `target/bench/NAME.json`.
///
/// # Panics
///
/// When the file cannot be written.
pub fn report(name: &str, rows: &[Row]) {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    for row in rows {
        print(row, width);
    }
    write(name, rows);
}

#[expect(clippy::print_stdout, reason = "a command-line program; the table is its result")]
fn print(row: &Row, width: usize) {
    let Row { name, unit, value, beside, ratio, goal, met } = row;
    let mut line = format!("{name:width$}  {value:>10.1} {unit:9}");
    if let (Some(ratio), Some(beside)) = (ratio, beside) {
        line += &format!("  {ratio:>6.2} x {beside}");
    }
    if let (Some(goal), Some(met)) = (goal, met) {
        line += &format!(", goal {goal}: {}", if *met { "met" } else { "MISSED" });
    }
    println!("{line}");
}

#[expect(clippy::print_stdout, reason = "a command-line program; this is where its result is")]
fn write(name: &str, rows: &[Row]) {
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("../target"), PathBuf::from);
    let folder = target.join("bench");
    fs::create_dir_all(&folder).expect("make the folder of results");
    let path = folder.join(name).with_extension("json");
    let text = serde_json::to_string_pretty(rows).expect("rows are JSON");
    fs::write(&path, text + "\n").expect("write the results");
    println!("\nwritten to {}", path.display());
}

/// Something to measure: a call runs it that many times, and tells how long one took on average.
pub struct Case<'a> {
    name: String,
    run: Box<dyn FnMut(u32) -> Duration + 'a>,
    repeat: u32,
    took: Vec<Duration>,
}

impl fmt::Debug for Case<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Case").field("name", &self.name).field("took", &self.took).finish_non_exhaustive()
    }
}

impl<'a> Case<'a> {
    pub fn new(name: impl Into<String>, repeat: u32, run: impl FnMut(u32) -> Duration + 'a) -> Self {
        Self { name: name.into(), run: Box::new(run), repeat, took: Vec::new() }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Nanoseconds that one of the repetitions took in the best tenth of the rounds: a mean, since the kernel tells
    /// whole nanoseconds.
    ///
    /// # Panics
    ///
    /// When it was not measured.
    #[expect(clippy::float_arithmetic, reason = "a mean of measurements")]
    pub fn nanoseconds(&self) -> f64 {
        let mut took = self.took.clone();
        took.sort_unstable();
        let best = &took[..took.len().div_ceil(10)];
        assert!(!best.is_empty(), "{} was not measured", self.name);
        best.iter().map(Duration::as_secs_f64).sum::<f64>() * 1e9 / best.len() as f64
    }

    pub fn row(&self, unit: &'static str) -> Row {
        Row::new(&self.name, unit, self.nanoseconds())
    }
}

/// Runs every case once a round. A round of one is short, so that in many rounds each case has some in which nothing
/// else wants the CPU.
pub fn measure(cases: &mut [Case<'_>], rounds: u32) {
    for _ in 0..rounds {
        for Case { run, repeat, took, .. } in &mut *cases {
            took.push(run(*repeat));
        }
    }
}

/// Like [`measure`], of cases whose memory the others would push out of the caches: each runs once unmeasured, and then a
/// few times.
pub fn measure_warm(cases: &mut [Case<'_>], rounds: u32) {
    const RUNS: u32 = 4;
    for _ in 0..rounds.div_ceil(RUNS) {
        for Case { run, repeat, took, .. } in &mut *cases {
            run(*repeat);
            took.extend((0..RUNS).map(|_| run(*repeat)));
        }
    }
}

/// How many rounds to measure: the argument after `--rounds`.
pub fn rounds(default: u32) -> u32 {
    argument("--rounds").map_or(default, |rounds| rounds.parse().expect("--rounds is followed by a number"))
}

/// A part of the names of the only cases to be measured: the argument after `--only`.
pub fn only() -> Option<String> {
    argument("--only")
}

fn argument(name: &str) -> Option<String> {
    env::args().skip_while(|argument| argument != name).nth(1)
}

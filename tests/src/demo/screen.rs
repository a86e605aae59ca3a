//! What is seen: on a terminal a table that is redrawn in place, elsewhere a row a second; and at the end the summary.

use std::{
    io::{self, IsTerminal, Write},
    net::IpAddr,
    time::Duration,
};

use super::{frame::Frame, scene, summary::Summary};

#[derive(Debug)]
pub(super) struct Screen<W> {
    out: W,
    redraws: bool,
    /// Lines of the frame that the next one replaces.
    drawn: usize,
}

impl<W: Write + IsTerminal> Screen<W> {
    pub(super) fn new(out: W) -> Self {
        let redraws = out.is_terminal() && std::env::var_os("TERM").is_none_or(|terminal| terminal != "dumb");
        Self { out, redraws, drawn: 0 }
    }
}

impl<W: Write> Screen<W> {
    pub(super) fn header(&mut self, interface: &str, duration: Duration) -> io::Result<()> {
        writeln!(
            self.out,
            "edge-limiter: four clients of one gateway for {} s, in network namespaces\n",
            duration.as_secs()
        )?;
        let address_limit = format!("{} in {} s", scene::ADDRESS_LIMIT, scene::ADDRESS_WINDOW.as_secs());
        let plan_limit = format!("{} in {} s", scene::PLAN_LIMIT, scene::PLAN_WINDOW.as_secs());
        for ((name, address), sends, limit) in [
            (GOOD, per_second(1, scene::GOOD_EVERY, "requests"), "within every limit".to_owned()),
            (
                FLOOD,
                per_second(scene::FLOOD_BATCH, scene::FLOOD_EVERY, "packets"),
                format!("XDP ({interface}) passes {}", grouped(scene::PACKETS)),
            ),
            (
                KEY,
                per_second(1, scene::KEYED_EVERY, "requests"),
                format!("plan \"{}\" allows {plan_limit}", scene::PLAN),
            ),
            (IMPATIENT, per_second(1, scene::BURST_EVERY, "requests"), format!("dropped when over {address_limit}")),
        ] {
            writeln!(self.out, "  {name:<NAME$}{address:<ADDRESS$}  {sends}; {limit}")?;
        }
        writeln!(self.out)?;
        if !self.redraws {
            writeln!(self.out, "{}", row_header())?;
        }
        self.out.flush()
    }

    pub(super) fn show(&mut self, frame: &Frame) -> io::Result<()> {
        if self.redraws {
            let table = table(frame);
            if self.drawn > 0 {
                write!(self.out, "\x1b[{}A\x1b[J", self.drawn)?;
            }
            self.drawn = table.lines().count();
            // Without wrapping: a narrow terminal shows as many lines as a wide one.
            write!(self.out, "\x1b[?7l{table}\x1b[?7h")?;
        } else {
            writeln!(self.out, "{}", row(frame))?;
        }
        self.out.flush()
    }

    /// With the frame that the summary is about.
    pub(super) fn summary(&mut self, last: &Frame, summary: &Summary) -> io::Result<()> {
        if self.redraws {
            self.show(last)?;
        }
        write!(self.out, "\n{summary}")?;
        self.out.flush()
    }
}

const GOOD: (&str, IpAddr) = ("well-behaved", scene::GOOD);
const FLOOD: (&str, IpAddr) = ("UDP flood", scene::FLOODING);
const KEY: (&str, IpAddr) = ("API key over plan", scene::KEYED);
const IMPATIENT: (&str, IpAddr) = ("impatient", scene::IMPATIENT);

/// Widths of the columns with these.
const NAME: usize = 18;
const ADDRESS: usize = 10;

fn table(frame: &Frame) -> String {
    let mut text = format!(
        "  {:<width$}{:>10}{:>8}{:>6}{:>10}\n",
        format!("{} s of {} s", rounded(frame.elapsed), frame.duration.as_secs()),
        "sent",
        "let in",
        "429",
        "kept out",
        width = NAME + ADDRESS
    );
    for ((name, address), counts, note) in [
        (GOOD, frame.good, String::new()),
        (FLOOD, frame.flood, String::new()),
        (KEY, frame.key, String::new()),
        (IMPATIENT, frame.impatient, note(frame)),
    ] {
        let line = format!(
            "  {name:<NAME$}{address:<ADDRESS$}{:>10}{:>8}{:>6}{:>10}  {note}",
            grouped(counts.sent),
            grouped(counts.let_in),
            grouped(counts.denied),
            grouped(counts.kept_out()),
        );
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.push_str(&format!("\n  packets dropped in the kernel: {}\n", frame.kernel));
    text
}

fn note(frame: &Frame) -> String {
    let story = &frame.story;
    match (story.blocked, story.returned) {
        (_, Some(_)) => "let in again".to_owned(),
        (Some(block), None) => {
            format!("back in {}", tenths(block.not_after.saturating_sub(frame.elapsed)))
        }
        (None, None) if frame.elapsed < story.begins => {
            format!("due in {}", tenths(story.begins - frame.elapsed))
        }
        (None, None) => "in a hurry".to_owned(),
    }
}

/// Titles and widths of the columns, and of what they belong to.
const COLUMNS: [(&str, usize); 12] = [
    ("time", 6),
    ("200", 7),
    ("not 200", 9),
    ("sent", 10),
    ("let in", 9),
    ("200", 6),
    ("429", 6),
    ("200", 6),
    ("429", 5),
    ("silence", 9),
    ("rate limit", 12),
    ("blocked", 9),
];
const GROUPS: [(&str, usize); 5] =
    [("well-behaved", 22), ("UDP flood", 19), ("API key", 12), ("impatient", 20), ("dropped in kernel", 21)];

fn row_header() -> String {
    let groups: String = GROUPS.map(|(title, width)| format!("{title:>width$}")).concat();
    format!("{groups}\n{}", columns(COLUMNS.map(|(title, _)| title.to_owned())))
}

fn row(frame: &Frame) -> String {
    let Frame { good, flood, key, impatient, kernel, .. } = frame;
    columns([
        format!("{} s", rounded(frame.elapsed)),
        grouped(good.let_in),
        grouped(good.sent - good.let_in),
        grouped(flood.sent),
        grouped(flood.let_in),
        grouped(key.let_in),
        grouped(key.denied),
        grouped(impatient.let_in),
        grouped(impatient.denied),
        grouped(impatient.kept_out()),
        grouped(kernel.of("rate_limited_packets")),
        grouped(kernel.of("blocked")),
    ])
}

fn columns(cells: [String; COLUMNS.len()]) -> String {
    cells.iter().zip(COLUMNS).map(|(cell, (_, width))| format!("{cell:>width$}")).collect()
}

fn per_second(count: u64, every: Duration, what: &str) -> String {
    let beats = Duration::from_secs(1).as_nanos() / every.as_nanos();
    let count = u64::try_from(beats).map_or(u64::MAX, |beats| count.saturating_mul(beats));
    format!("{} {what}/s", grouped(count))
}

/// Digits in groups of three.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Seconds with one decimal.
pub(super) fn tenths(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f32())
}

fn rounded(time: Duration) -> u64 {
    (time + Duration::from_millis(500)).as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_from_the_right() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (65_536, "65,536"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
    }
}

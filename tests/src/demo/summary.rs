//! What happened to each client, in plain words, held against what was promised to it.

use std::{fmt, time::Duration};

use super::{
    frame::Frame,
    impatient::Block,
    scene,
    screen::{grouped, tenths},
};

/// The kernel's clock of deadlines, and this one, are that far apart at most.
const CLOCKS: Duration = Duration::from_millis(20);
/// An address that is let in again notices it this much later at most, on a busy machine.
const NOTICED_WITHIN: Duration = Duration::from_millis(1500);

#[derive(Debug, Default)]
pub(super) struct Summary {
    lines: Vec<String>,
    /// What was not as promised.
    broken: Vec<String>,
}

impl Summary {
    pub(super) fn of(frame: &Frame) -> Self {
        let mut summary = Self::default();
        summary.good(frame);
        summary.flood(frame);
        summary.key(frame);
        summary.impatient(frame);
        summary.say("kernel", format!("dropped packets by reason: {}", frame.kernel));
        summary
    }

    pub(super) fn is_as_expected(&self) -> bool {
        self.broken.is_empty()
    }

    fn say(&mut self, who: &str, text: String) {
        self.lines.push(format!("{who:<18}{text}"));
    }

    fn expect(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.broken.push(otherwise());
        }
    }

    fn good(&mut self, Frame { good, .. }: &Frame) {
        let all = format!("{} of {} requests answered 200", grouped(good.let_in), grouped(good.sent));
        self.say("well-behaved", format!("{all}, the slowest within {} ms", good.slowest.as_millis() + 1));
        self.expect(good.sent > 0 && good.let_in == good.sent, || format!("well-behaved client: only {all}"));
    }

    fn flood(&mut self, Frame { flood, kernel, elapsed, .. }: &Frame) {
        let dropped = kernel.of("rate_limited_packets");
        self.say(
            "UDP flood",
            format!(
                "{} packets sent: {} dropped in the kernel, {} let in",
                grouped(flood.sent),
                grouped(dropped),
                grouped(flood.let_in)
            ),
        );
        let promised = scene::PACKETS * (elapsed.as_secs() + 2);
        self.expect(flood.let_in <= promised, || {
            format!("flood: {} packets let in, more than {}", grouped(flood.let_in), grouped(promised))
        });
        // Some packets may be lost where no one limits: a queue that is full on a busy machine.
        let over = flood.sent.saturating_sub(promised);
        self.expect(over > 0, || format!("flood: this machine sent only {} packets", grouped(flood.sent)));
        self.expect(dropped >= over - over / 10, || {
            format!(
                "flood: only {} packets dropped in the kernel of {} over the limit",
                grouped(dropped),
                grouped(over)
            )
        });
    }

    fn key(&mut self, Frame { key, elapsed, .. }: &Frame) {
        self.say(
            "API key over plan",
            format!("{} requests: {} answered 200, {} answered 429", grouped(key.sent), key.let_in, key.denied),
        );
        // No window holds more than the limit, and a run touches this many windows at most.
        let windows = elapsed.as_secs() / scene::PLAN_WINDOW.as_secs() + 2;
        let promised = scene::PLAN_LIMIT * windows;
        self.expect(key.let_in > 0, || "API key: no request answered 200".to_owned());
        self.expect(key.let_in <= promised, || format!("API key: {} answered 200, more than {promised}", key.let_in));
        self.expect(key.denied > 0, || "API key: no request answered 429".to_owned());
        let rest = key.sent - key.let_in - key.denied;
        self.expect(rest == 0, || format!("API key: {rest} requests answered neither 200 nor 429"));
    }

    fn impatient(&mut self, frame: &Frame) {
        let (story, counts) = (&frame.story, &frame.impatient);
        let Some(allowed_before) = story.allowed_before else {
            self.say("impatient", format!("{} requests: {} answered 200, none 429", counts.sent, counts.let_in));
            self.expect(false, || "impatient address: it was never answered 429".to_owned());
            return;
        };
        let Some(block) = story.blocked else {
            self.say("impatient", format!("answered 429 after {allowed_before} requests"));
            self.expect(false, || "impatient address: its 429 did not become a block in the kernel".to_owned());
            return;
        };
        let blocked = block.not_after.saturating_sub(block.since);
        self.say(
            "impatient",
            format!(
                "429 after {allowed_before} requests, then dropped in the kernel for {} ({} attempts)",
                tenths(blocked),
                counts.kept_out()
            ),
        );
        self.say("", came_back(frame, block));
        self.expect(counts.kept_out() > 0 && frame.kernel.of("blocked") > 0, || {
            "impatient address: nothing was dropped while it was blocked".to_owned()
        });
        self.expect(counts.other == 0, || {
            format!("impatient address: {} requests answered neither 200 nor 429", counts.other)
        });
        match story.returned {
            None => self.expect(false, || "impatient address: it was not let in again".to_owned()),
            Some(returned) => {
                self.expect(returned + CLOCKS >= block.not_before, || {
                    let early = tenths(block.not_before.saturating_sub(returned));
                    format!("impatient address: let in again {early} before its deadline")
                });
                self.expect(returned <= block.not_after + NOTICED_WITHIN, || {
                    let late = tenths(returned.saturating_sub(block.not_after));
                    format!("impatient address: let in again only {late} after its deadline")
                });
            }
        }
    }
}

fn came_back(frame: &Frame, block: Block) -> String {
    match frame.story.returned {
        None => "it has not come back".to_owned(),
        Some(returned) => format!(
            "let in again {} after that deadline, and {} requests answered 200 since",
            tenths(returned.saturating_sub(block.not_after)),
            frame.story.allowed_after
        ),
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.lines {
            writeln!(f, "  {line}")?;
        }
        if self.broken.is_empty() {
            return writeln!(f, "\nEverything was as expected.");
        }
        writeln!(f, "\nNot as expected:")?;
        for broken in &self.broken {
            writeln!(f, "  {broken}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::{impatient::Story, kernel::Drops, tally::Counts};

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn as_promised() -> Frame {
        let counts = |sent, let_in, denied| Counts { sent, let_in, denied, ..Counts::default() };
        Frame {
            elapsed: seconds(12),
            duration: seconds(12),
            good: counts(60, 60, 0),
            flood: counts(120_000, 13_000, 0),
            key: counts(120, 62, 58),
            impatient: counts(60, 48, 1),
            story: Story {
                begins: seconds(1),
                allowed_before: Some(40),
                blocked: Some(Block { since: seconds(2), not_before: seconds(5), not_after: seconds(5) }),
                returned: Some(seconds(5)),
                allowed_after: 7,
            },
            kernel: Drops::from([("blocked", 11), ("rate_limited_packets", 107_000)]),
        }
    }

    #[test]
    fn a_run_as_promised_has_nothing_to_complain_about() {
        let summary = Summary::of(&as_promised());
        assert!(summary.is_as_expected(), "{summary}");
        assert!(summary.to_string().ends_with("as expected.\n"));
        assert!(summary.to_string().lines().all(|line| line.len() < 100), "{summary}");
    }

    /// What the summary then says, and what breaks it.
    type Break = (&'static str, fn(&mut Frame));

    #[test]
    fn each_broken_promise_is_named() {
        let breaks: [Break; 12] = [
            ("only 59 of 60", |frame| frame.good.let_in = 59),
            ("only 0 of 0", |frame| frame.good = Counts::default()),
            ("15,000 packets let in", |frame| frame.flood.let_in = 15_000),
            ("sent only 9 packets", |frame| frame.flood = Counts { sent: 9, let_in: 9, ..Counts::default() }),
            ("only 0 packets dropped", |frame| frame.kernel = Drops::from([("blocked", 11)])),
            ("81 answered 200", |frame| frame.key = Counts { sent: 120, let_in: 81, denied: 39, ..frame.key }),
            ("no request answered 429", |frame| frame.key = Counts { sent: 62, let_in: 62, ..Counts::default() }),
            ("1 requests answered neither", |frame| frame.key.sent += 1),
            ("never answered 429", |frame| frame.story.allowed_before = None),
            ("did not become a block", |frame| frame.story.blocked = None),
            ("not let in again", |frame| frame.story.returned = None),
            ("1.0 s before its deadline", |frame| frame.story.returned = Some(seconds(4))),
        ];
        for (message, breaks) in breaks {
            let mut frame = as_promised();
            breaks(&mut frame);
            let summary = Summary::of(&frame);
            assert_eq!(summary.broken.len(), 1, "{message}: {summary}");
            assert!(summary.broken[0].contains(message), "{message}: {summary}");
        }
    }
}

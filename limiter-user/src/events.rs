//! What becomes of events of the XDP program: counts, log lines, and the lists of `limiter top`.

use std::{sync::Arc, time::Duration};

use limiter_common::{
    addr::SrcPrefixes,
    event::{Event, EventKind},
    verdict::Verdict,
};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::{
    dataplane::{AsyncEventReader, Dataplane},
    metrics::Metrics,
    top::Top,
};

/// How long samples wait in the ring. Each CPU sends a thousand a second at most, and the ring has room for sixteen times
/// as many.
const LOOK: Duration = Duration::from_millis(100);
/// After so many of them come the other things that this task does.
const BATCH: usize = 4096;
/// Lines a second about one kind of event. More are counted, and told in one line.
const LINES: u32 = 10;

/// Reads events for as long as the agent runs.
#[derive(Debug)]
pub struct EventWorker {
    pub(crate) reader: AsyncEventReader,
    pub(crate) dataplane: Arc<dyn Dataplane>,
    pub(crate) prefixes: SrcPrefixes,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) top: Arc<Top>,
}

impl EventWorker {
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut seconds = tokio::time::interval(Duration::from_secs(1));
        seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut lines = Lines::default();
        let mut events = Vec::new();
        loop {
            tokio::select! {
                _ = looks.tick() => {}
                news = self.reader.news() => if let Err(error) = news {
                    tracing::error!(target: "limiter::dataplane", %error, "waiting for events of the XDP program has failed: restart the agent");
                    return;
                },
                _ = seconds.tick() => lines.next_second(),
                () = shutdown.cancelled() => return,
            }
            events.clear();
            events.extend(std::iter::from_fn(|| self.reader.read()).take(BATCH));
            for event in &events {
                self.take(event, &mut lines);
            }
            self.top.saw(&events);
            self.dataplane.flush_diagnosis();
        }
    }

    fn take(&self, event: &Event, lines: &mut Lines) {
        for kind in event.news().kinds() {
            self.metrics.event(kind);
            if kind != EventKind::Sample && lines.allow(kind) {
                self.log(kind, event);
            }
        }
    }

    fn log(&self, kind: EventKind, event: &Event) {
        let source = event.source().map(|address| self.prefixes.cut(address).to_string());
        let source = source.as_deref().unwrap_or("-");
        let rule = event.slot().and_then(|slot| self.dataplane.rule_in(slot));
        let rule = rule.as_deref().unwrap_or("-");
        let verdict = event.verdict();
        let reason = verdict.map_or("-", Verdict::reason);
        let verdict = verdict.map_or("-", Verdict::as_str);
        let event = kind.as_str();
        match kind {
            EventKind::Sample => {}
            EventKind::SourceLimited => {
                tracing::info!(target: "limiter::dataplane", event, src = source, rule, verdict, reason, "a source is over a limit");
            }
            EventKind::BudgetHit => {
                tracing::info!(target: "limiter::dataplane", event, src = source, rule, verdict, reason, "a pushed budget drops packets");
            }
            EventKind::NewSourcesOver => {
                tracing::warn!(target: "limiter::dataplane", event, src = source, "so many sources are new that the rest of them share the buckets of their neighbourhoods: a flood with made-up addresses, or xdp.max_sources is too small");
            }
            EventKind::InsertFailed => {
                tracing::warn!(target: "limiter::dataplane", event, src = source, "the kernel had no room for a bucket: the source shares that of its neighbourhood");
            }
        }
    }
}

/// How many lines were written in this second.
#[derive(Debug, Default)]
struct Lines {
    by_kind: [u32; EventKind::ALL.len()],
}

impl Lines {
    fn allow(&mut self, kind: EventKind) -> bool {
        let lines = &mut self.by_kind[kind as usize];
        *lines = lines.saturating_add(1);
        *lines <= LINES
    }

    fn next_second(&mut self) {
        for (kind, lines) in EventKind::ALL.iter().zip(&mut self.by_kind) {
            let more = lines.saturating_sub(LINES);
            if more > 0 {
                tracing::info!(target: "limiter::dataplane", event = kind.as_str(), more, "events of this kind without a line of their own");
            }
            *lines = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded_by_kind_and_second() {
        let mut lines = Lines::default();
        let allowed = |lines: &mut Lines, kind| (0..100).filter(|_| lines.allow(kind)).count();
        assert_eq!(allowed(&mut lines, EventKind::SourceLimited), LINES as usize);
        assert_eq!(allowed(&mut lines, EventKind::BudgetHit), LINES as usize);
        lines.next_second();
        assert_eq!(allowed(&mut lines, EventKind::SourceLimited), LINES as usize);
    }
}

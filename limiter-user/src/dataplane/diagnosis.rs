//! Lines about single packets, which the program writes only when the configuration asks: for diagnosis, never in
//! ordinary operation. What is not asked for is not in the program.

use std::{fmt, sync::Arc};

use aya::Ebpf;
use aya_log::EbpfLogger;
use limiter_common::stats;
use log::{Log, Metadata, Record};
use parking_lot::Mutex;

use super::{DataplaneError, slots::Slots};

/// The ring that aya-log reads.
pub(super) const MAP: &str = "AYA_LOGS";
/// The read-only global with the level.
pub(super) const LEVEL: &str = aya_log::LEVEL;

/// Which packets the program writes a line about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Diagnosis {
    #[default]
    Off,
    /// The first that a source loses.
    Info,
    /// And all that are dropped, or would be.
    Debug,
    /// All.
    Trace,
}

impl Diagnosis {
    pub const ALL: &[Self] = &[Self::Off, Self::Info, Self::Debug, Self::Trace];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }

    /// As aya-log counts them.
    pub(super) const fn level(self) -> u8 {
        match self {
            Self::Off => 0,
            Self::Info => aya_log::Level::Info as u8,
            Self::Debug => aya_log::Level::Debug as u8,
            Self::Trace => aya_log::Level::Trace as u8,
        }
    }

    /// Size of the ring. The kernel makes it even when nothing is ever written.
    pub(super) const fn log_bytes(self) -> u32 {
        match self {
            Self::Off => 1 << 12,
            Self::Info | Self::Debug | Self::Trace => 1 << 19,
        }
    }
}

/// The names behind the slots of rules.
type RuleNames = Arc<Mutex<Vec<(u32, Arc<str>)>>>;

/// Lines of one loaded program.
pub(super) struct Lines {
    logger: Mutex<EbpfLogger<ToTracing>>,
    rules: RuleNames,
}

impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lines").finish_non_exhaustive()
    }
}

impl Lines {
    /// `None` when the configuration asks for none.
    pub(super) fn open(ebpf: &mut Ebpf, diagnosis: Diagnosis) -> Result<Option<Self>, DataplaneError> {
        if diagnosis == Diagnosis::Off {
            return Ok(None);
        }
        let rules = RuleNames::default();
        let logger = EbpfLogger::init_with_logger(ebpf, ToTracing { rules: Arc::clone(&rules) });
        let logger = logger.map_err(|_only_this_map| DataplaneError::Object { what: MAP })?;
        Ok(Some(Self { logger: Mutex::new(logger), rules }))
    }

    /// Logs what the program has written since.
    pub(super) fn flush(&self, slots: &Slots) {
        let mut logger = self.logger.lock();
        *self.rules.lock() = slots.taken().map(|(slot, rule)| (slot, Arc::clone(rule))).collect();
        logger.flush();
    }
}

/// Puts names in the place of numbers: a program can hardly write a text that it does not know before.
struct ToTracing {
    rules: RuleNames,
}

impl Log for ToTracing {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = with_names(&record.args().to_string(), &self.rules.lock());
        // Whoever asked for lines shall see them, whatever the level of the agent's own log.
        tracing::info!(target: "limiter::ebpf", "{line}");
    }

    fn flush(&self) {}
}

fn with_names(line: &str, rules: &[(u32, Arc<str>)]) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let named = words.chunks(2).map(|pair| {
        let [name, value] = pair else { return pair.join(" ") };
        let number = value.parse::<u32>().ok();
        match (*name, number) {
            ("counter", Some(index)) => {
                let (slot, verdict) = stats::of_index(index);
                let rule = rules.iter().find(|(known, _)| *known == slot).map_or("-", |(_, rule)| rule);
                verdict.map_or_else(
                    || pair.join(" "),
                    |verdict| format!("{} {} rule {rule}", verdict.as_str(), verdict.reason()),
                )
            }
            _ => pair.join(" "),
        }
    });
    named.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use limiter_common::verdict::{DropReason, PassReason, Verdict};

    use super::*;

    #[test]
    fn numbers_become_names() {
        let rules = [(7, Arc::from("web"))];
        let counter = stats::rule_index(7, Verdict::Drop(DropReason::Denied));
        let line = format!("counter {counter} bytes 60 src 192.0.2.7");
        assert_eq!(with_names(&line, &rules), "drop denied rule web bytes 60 src 192.0.2.7");
        let line = format!("counter {} bytes 60", stats::rule_index(0, Verdict::Pass(PassReason::NotIp)));
        assert_eq!(with_names(&line, &rules), "pass not_ip rule - bytes 60");
    }
}

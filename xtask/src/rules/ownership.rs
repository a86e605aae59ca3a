//! Words that belong to one place: `unsafe`, the crates behind a boundary, metric names. This is how the invariants of
//! the architecture are kept.

use super::{SourceFile, Violation};
use crate::source_text;

struct Word {
    word: &'static str,
    /// The rule is about files below this folder.
    within: &'static str,
    /// Files whose path starts with one of these may hold the word.
    owners: &'static [&'static str],
    /// Where the word is looked for.
    part: fn(&str) -> String,
    /// Whether text around an occurrence makes it another word.
    other: fn(before: &str, after: &str) -> bool,
    reason: &'static str,
}

const WORDS: &[Word] = &[
    Word {
        word: "unsafe",
        within: "",
        owners: &[
            "limiter-common/src/pod.rs",
            "limiter-ebpf/src/bench.rs",
            "limiter-ebpf/src/clock.rs",
            "limiter-ebpf/src/events.rs",
            "limiter-ebpf/src/globals.rs",
            "limiter-ebpf/src/main.rs",
            "limiter-ebpf/src/maps.rs",
            "limiter-ebpf/src/packet.rs",
            "tests/src/netns.rs",
        ],
        part: source_text::code,
        other: |before, after| ends_in_word(before) || starts_in_word(after),
        reason: "unsafe code is kept in few files, each listed in xtask/src/rules/ownership.rs",
    },
    Word {
        word: "aya::",
        within: "limiter-user/src/",
        owners: &["limiter-user/src/dataplane"],
        part: source_text::code,
        other: |before, _| ends_in_path(before),
        reason: "only the data plane knows aya",
    },
    Word {
        word: "redis::",
        within: "limiter-user/src/",
        owners: &["limiter-user/src/store/redis"],
        part: source_text::code,
        other: |before, _| ends_in_path(before),
        reason: "only store/redis knows the crate redis",
    },
    Word {
        word: "\"limiter_",
        within: "limiter-user/src/",
        owners: &["limiter-user/src/metrics"],
        part: source_text::code_and_strings,
        // Names of crates, as in log filters.
        other: |_, after| after.starts_with("user") || after.starts_with("common"),
        reason: "metric names are declared in metrics.rs",
    },
];

pub(super) fn check(file: &SourceFile) -> Vec<Violation> {
    // The rules themselves hold every word.
    if !file.path.ends_with(".rs") || file.path.starts_with("xtask/src/rules/") {
        return Vec::new();
    }
    WORDS.iter().filter(|word| word.is_foreign_to(&file.path)).flat_map(|word| word.occurrences(file)).collect()
}

impl Word {
    fn is_foreign_to(&self, path: &str) -> bool {
        path.starts_with(self.within) && !self.owners.iter().any(|owner| path.starts_with(owner))
    }

    fn occurrences(&self, file: &SourceFile) -> Vec<Violation> {
        let text = (self.part)(&file.text);
        let places = text.match_indices(self.word).map(|(at, _)| at);
        let held = places.filter(|&at| !(self.other)(&text[..at], &text[at + self.word.len()..]));
        let lines = held.map(|at| text[..at].matches('\n').count());
        lines.map(|line_index| file.violation(line_index, format!("`{}`: {}", self.word, self.reason))).collect()
    }
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn ends_in_word(text: &str) -> bool {
    text.ends_with(is_word)
}

fn starts_in_word(text: &str) -> bool {
    text.starts_with(is_word)
}

/// `self::redis::` names a module and `myredis::` another crate; `::redis::` names the crate.
fn ends_in_path(text: &str) -> bool {
    ends_in_word(text.strip_suffix("::").unwrap_or(text)) || is_in_use_group(text)
}

/// Inside `use crate::store::{…`, a name belongs to the path before the brace.
fn is_in_use_group(text: &str) -> bool {
    let statement = text.rsplit(';').next().unwrap_or(text);
    let keyword = statement.match_indices("use ").filter(|&(at, _)| !ends_in_word(&statement[..at])).last();
    let Some((at, _)) = keyword else {
        return false;
    };
    statement[at..].matches('{').count() > statement[at..].matches('}').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_broken(path: &str, text: &str) -> Vec<usize> {
        let file = SourceFile { path: path.into(), text: text.into() };
        check(&file).iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn unsafe_is_found_in_code_only() {
        let text = "#![forbid(unsafe_code)]\n// unsafe\nlet x = \"unsafe\";\nunsafe { f() }\n";
        assert_eq!(lines_broken("limiter-user/src/agent.rs", text), [4]);
        assert!(lines_broken("limiter-common/src/pod.rs", text).is_empty());
    }

    #[test]
    fn crates_are_told_from_modules() {
        let text = "use redis::Client;\nuse crate::store::redis::RedisStore;\nuse self::redis::RedisStore;\n";
        assert_eq!(lines_broken("limiter-user/src/store.rs", text), [1]);
        let group = "use crate::{\n    a::{B, C},\n    store::{\n        redis::RedisStore,\n    },\n};\n";
        assert!(lines_broken("limiter-user/src/agent.rs", group).is_empty());
        let call = "use a::{b};\nfn f() -> redis::Client {\n    let x = {\n        redis::cmd()\n    };\n}\n";
        assert_eq!(lines_broken("limiter-user/src/agent.rs", call), [2, 4]);
        assert!(lines_broken("limiter-user/src/store/redis/script.rs", text).is_empty());
        assert!(lines_broken("tests/src/redis_server.rs", text).is_empty());
        assert_eq!(lines_broken("limiter-user/src/agent.rs", "fn f() -> ::aya::Ebpf {}\n"), [1]);
    }

    #[test]
    fn metric_names_are_found_in_strings_and_not_in_comments() {
        let text =
            "// \"limiter_checks_total\"\nlet name = \"limiter_checks_total\";\nlet filter = \"limiter_user=debug\";\n";
        assert_eq!(lines_broken("limiter-user/src/api/admin.rs", text), [2]);
        assert!(lines_broken("limiter-user/src/metrics.rs", text).is_empty());
    }
}

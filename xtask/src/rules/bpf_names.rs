//! The kernel keeps 15 bytes of the name of a map or a program: a longer one is cut, and is then not found by its name.

use super::{SourceFile, Violation};
use crate::source_text;

const LONGEST: usize = 15;
const MARKERS: [&str; 2] = ["map", "xdp"];

pub(super) fn check(file: &SourceFile) -> Vec<Violation> {
    if !file.path.starts_with("limiter-ebpf/src/") {
        return Vec::new();
    }
    // An attribute marks the next item; `#[map(name = "…")]` gives a name of its own.
    let mut marked = false;
    let mut violations = Vec::new();
    for (index, line) in source_text::code_and_strings(&file.text).lines().enumerate() {
        if let Some(attribute) = MARKERS.iter().find_map(|marker| attribute(line, marker)) {
            let given = attribute.split_once("name").and_then(|(_, rest)| rest.split('"').nth(1));
            violations.extend(given.and_then(|name| too_long(file, index, name)));
            marked = given.is_none();
        }
        if marked && let Some(name) = item_name(line) {
            violations.extend(too_long(file, index, name));
            marked = false;
        }
    }
    violations
}

/// What follows the word in `#[word…`.
fn attribute<'a>(line: &'a str, word: &str) -> Option<&'a str> {
    let rest = line.trim_start().strip_prefix("#[")?.strip_prefix(word)?;
    rest.starts_with([']', '(']).then_some(rest)
}

fn item_name(line: &str) -> Option<&str> {
    let mut words = line.split(|character: char| !character.is_alphanumeric() && character != '_');
    words.by_ref().find(|word| matches!(*word, "static" | "fn"))?;
    words.find(|word| !matches!(*word, "" | "mut"))
}

fn too_long(file: &SourceFile, index: usize, name: &str) -> Option<Violation> {
    let message = || format!("the BPF name {name} has {} bytes; the kernel keeps {LONGEST}", name.len());
    (name.len() > LONGEST).then(|| file.violation(index, message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_broken(text: &str) -> Vec<usize> {
        let file = SourceFile { path: "limiter-ebpf/src/maps.rs".into(), text: text.into() };
        check(&file).iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn takes_the_name_of_the_item() {
        assert!(lines_broken("#[map]\npub(crate) static BUCKETS_V4_1234: Map = Map::new();\n").is_empty());
        assert_eq!(lines_broken("#[map]\nstatic mut BUCKETS_V4_12345: Map = Map::new();\n"), [2]);
        assert_eq!(lines_broken("#[xdp(frags)]\npub fn limiter_main_program(ctx: XdpContext) -> u32 {\n"), [2]);
    }

    #[test]
    fn takes_the_name_that_the_attribute_gives() {
        assert_eq!(lines_broken("#[map(name = \"BUCKETS_V4_12345\")]\nstatic A: M = m();\n"), [1]);
        assert!(lines_broken("#[map(name = \"A\")]\nstatic A_LONG_NAME_IN_RUST: M = m();\n").is_empty());
    }

    #[test]
    fn ordinary_items_may_have_long_names() {
        assert!(lines_broken("#[inline(always)]\nfn a_function_with_a_long_name() {}\n").is_empty());
    }
}

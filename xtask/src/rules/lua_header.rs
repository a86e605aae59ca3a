//! Every Redis script starts with its contract: what is in KEYS and ARGV, and what it returns.

use super::{SourceFile, Violation};

pub(super) fn check(file: &SourceFile) -> Vec<Violation> {
    // What is in `lua/lib` is text that scripts begin with, and takes nothing itself.
    if !file.path.ends_with(".lua") || file.path.starts_with("lua/lib") {
        return Vec::new();
    }
    let header: Vec<&str> = file.text.lines().take_while(|line| line.starts_with("--")).collect();
    let lacks = |word: &&str| !header.iter().any(|line| line.contains(*word));
    ["KEYS", "ARGV", "Returns"]
        .into_iter()
        .filter(lacks)
        .map(|word| file.violation(0, format!("the comment at the top of the script does not say {word}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count_broken(text: &str) -> usize {
        check(&SourceFile { path: "lua/a.lua".into(), text: text.into() }).len()
    }

    #[test]
    fn the_contract_is_in_the_comment_at_the_top() {
        assert_eq!(count_broken("-- KEYS[1] the bucket\n-- ARGV[1] cost\n-- Returns { allowed }\nreturn {1}\n"), 0);
        assert_eq!(count_broken("-- KEYS[1] the bucket\nlocal cost = ARGV[1]\n-- Returns { allowed }\n"), 2);
        assert_eq!(count_broken(""), 3);
    }
}

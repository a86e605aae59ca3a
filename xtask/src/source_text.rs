//! Rust source with its comments, or also the inside of its strings, blanked: line and column stay what they were. The
//! repository rules look for words, and a word in a comment breaks no rule.

/// Code alone: comments and the inside of strings are spaces.
pub(crate) fn code(source: &str) -> String {
    blank(source, true)
}

/// Code and strings: comments are spaces.
pub(crate) fn code_and_strings(source: &str) -> String {
    blank(source, false)
}

fn blank(source: &str, blank_strings: bool) -> String {
    let mut kept = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let (token, length) = token(rest, kept.chars().next_back());
        let (head, tail) = rest.split_at(length.max(first.len_utf8()));
        match token {
            Token::Comment => push_blank(&mut kept, head),
            Token::Text if blank_strings => push_blank(&mut kept, head),
            Token::Text | Token::Code => kept.push_str(head),
        }
        rest = tail;
    }
    kept
}

#[derive(Clone, Copy)]
enum Token {
    Comment,
    /// A string or character literal.
    Text,
    Code,
}

/// What starts here, and how many bytes it has.
fn token(rest: &str, before: Option<char>) -> (Token, usize) {
    if rest.starts_with("//") {
        return (Token::Comment, rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return (Token::Comment, block_comment(rest));
    }
    if rest.starts_with('"') {
        return (Token::Text, quoted(rest, '"'));
    }
    let in_word = before.is_some_and(|character| character.is_alphanumeric() || character == '_');
    if rest.starts_with('r')
        && (!in_word || before == Some('b'))
        && let Some(length) = raw_string(rest)
    {
        return (Token::Text, length);
    }
    if rest.starts_with('\'') && is_character(rest) {
        return (Token::Text, quoted(rest, '\''));
    }
    (Token::Code, 0)
}

fn block_comment(rest: &str) -> usize {
    let mut depth = 0_u32;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, character) in rest.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

fn raw_string(rest: &str) -> Option<usize> {
    let hashes = rest[1..].chars().take_while(|&character| character == '#').count();
    let body = 1 + hashes;
    if !rest[body..].starts_with('"') {
        return None;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    let close = rest[body + 1..].find(&end).map(|at| body + 1 + at + end.len());
    Some(close.unwrap_or(rest.len()))
}

/// A character literal, and not a lifetime.
fn is_character(rest: &str) -> bool {
    let mut characters = rest.chars().skip(1);
    match characters.next() {
        Some('\\') => true,
        Some(_) => characters.next() == Some('\''),
        None => false,
    }
}

fn push_blank(kept: &mut String, text: &str) {
    kept.extend(text.chars().map(|character| if character == '\n' { '\n' } else { ' ' }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_comments_and_keeps_lines() {
        let source = "a // unsafe\n/* unsafe /* nested */\n unsafe */ b\n";
        assert_eq!(code(source).split_whitespace().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(code(source).lines().count(), 3);
    }

    #[test]
    fn tells_strings_from_code() {
        for literal in ["\"unsafe \\\" // \"", "r#\"unsafe \" unsafe\"#", "br\"unsafe\"", "'\"'", "'\\''"] {
            let source = format!("let x = {literal}; done");
            assert!(!code(&source).contains("unsafe"), "{literal}");
            assert!(code(&source).ends_with("; done"), "{literal}");
            assert!(code_and_strings(&source).contains(literal), "{literal}");
        }
    }

    #[test]
    fn leaves_lifetimes_and_raw_identifiers_alone() {
        let source = "fn f<'a>(r: &'a str, r#type: u8) -> &'static str { unsafe_name }";
        assert_eq!(code(source), source);
    }
}

//! The header `Forwarded` (RFC 7239), read from the right.
//!
//! Each proxy appends an element, so what is on the left may be a client's own. Lines are taken apart from their end, so that
//! a quote which a client has left open swallows nothing that a proxy has written after it.

use std::borrow::Cow;

/// The elements of a line, the last one first.
pub(super) fn elements_from_right(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(line);
    std::iter::from_fn(move || {
        let line = rest?;
        let mut quoted = false;
        let comma = line.iter().enumerate().rev().find_map(|(at, byte)| {
            match byte {
                b'"' if !is_escaped(line, at) => quoted = !quoted,
                b',' if !quoted => return Some(at),
                _ => {}
            }
            None
        });
        let (before, element) = comma.map_or((None, line), |comma| (Some(&line[..comma]), &line[comma + 1..]));
        rest = before;
        Some(element)
    })
}

/// An odd number of backslashes stands before it.
fn is_escaped(line: &[u8], at: usize) -> bool {
    line[..at].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
}

/// What the one parameter `for` of an element says, without its quotes. `None` when there is none, or several, or when the
/// element is not well-formed.
pub(super) fn node(element: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut node = None;
    let mut rest = element;
    loop {
        let equals = rest.iter().position(|byte| *byte == b'=')?;
        let name = rest[..equals].trim_ascii();
        let (value, after) = value(&rest[equals + 1..])?;
        if name.eq_ignore_ascii_case(b"for") && node.replace(value).is_some() {
            return None;
        }
        match after.trim_ascii_start() {
            [] => return node,
            [b';', next @ ..] => rest = next,
            _ => return None,
        }
    }
}

/// A token or a quoted string, and what follows.
fn value(text: &[u8]) -> Option<(Cow<'_, [u8]>, &[u8])> {
    let Some(quoted) = text.strip_prefix(b"\"") else {
        let end = text.iter().position(|byte| *byte == b';').unwrap_or(text.len());
        let token = text[..end].trim_ascii();
        return (!token.contains(&b'"')).then_some((Cow::Borrowed(token), &text[end..]));
    };
    let end = (0..quoted.len()).find(|at| quoted[*at] == b'"' && !is_escaped(quoted, *at))?;
    let (inner, after) = (&quoted[..end], &quoted[end + 1..]);
    if !inner.contains(&b'\\') {
        return Some((Cow::Borrowed(inner), after));
    }
    let mut unescaped = Vec::with_capacity(inner.len());
    let mut bytes = inner.iter();
    while let Some(byte) = bytes.next() {
        unescaped.push(if *byte == b'\\' { *bytes.next()? } else { *byte });
    }
    Some((Cow::Owned(unescaped), after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_found_from_the_right() {
        for (line, expected) in [
            ("", &[""][..]),
            ("for=a", &["for=a"]),
            ("for=a, for=b", &[" for=b", "for=a"]),
            ("for=\"a,b\";by=c,for=d", &["for=d", "for=\"a,b\";by=c"]),
            ("for=\"a\\\",b\",for=d", &["for=d", "for=\"a\\\",b\""]),
            ("for=\"a\\\\\",for=d", &["for=d", "for=\"a\\\\\""]),
            // A quote that a client has left open.
            ("for=\", for=\"b\"", &[" for=\"b\"", "for=\""]),
            ("for=\"x\\, for=b", &[" for=b", "for=\"x\\"]),
            (",,", &["", "", ""]),
        ] {
            let found: Vec<_> = elements_from_right(line.as_bytes()).map(String::from_utf8_lossy).collect();
            assert_eq!(found, expected, "{line}");
        }
    }

    #[test]
    fn nodes() {
        for (element, expected) in [
            ("for=192.0.2.1", Some("192.0.2.1")),
            (" FOR=192.0.2.1 ; proto=http;by=203.0.113.43", Some("192.0.2.1")),
            ("proto=https;for=\"[2001:db8::1]:4711\"", Some("[2001:db8::1]:4711")),
            ("for=\"192\\.0.2.1\"", Some("192.0.2.1")),
            ("for=_hidden", Some("_hidden")),
            ("by=\"for=1.2.3.4\";for=b", Some("b")),
            ("for=", Some("")),
            ("proto=http", None),
            ("for=a;for=b", None),
            ("for=\"a", None),
            ("for=\"a\"b", None),
            ("for=a\"b", None),
            ("for=\"a\\", None),
            ("for", None),
            ("for=a;", None),
            ("", None),
        ] {
            let found = node(element.as_bytes());
            assert_eq!(found.as_deref().map(String::from_utf8_lossy).as_deref(), expected, "{element}");
        }
    }
}

//! How a path is read where servers differ, and what of a path they differ about.

/// A set of the ways in which servers depart from the plainest reading of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading(u8);

impl Reading {
    /// An encoded slash separates segments, and an encoded backslash where backslashes do.
    pub(super) const ENCODED_SLASH: Self = Self(1);
    /// `..` takes back an empty segment (RFC 3986, section 5.2.4); else empty segments are gone before.
    pub(super) const EMPTY_SEGMENTS: Self = Self(1 << 1);
    /// `#` is of the path, as for servers that expect no fragment in a request target; else it ends there.
    pub(super) const HASH: Self = Self(1 << 2);
    /// A backslash separates segments (URL Standard of WHATWG, "special" schemes).
    pub(super) const BACKSLASH: Self = Self(1 << 3);
    /// `;` begins parameters, which are cut off (servlet containers; RFC 3986, section 3.3, names them).
    pub(super) const PARAMETERS: Self = Self(1 << 4);
    /// `//host/path` is a path on a host (RFC 3986, section 4.2).
    pub(super) const AUTHORITY: Self = Self(1 << 5);

    const OF_TARGET: [Self; 4] = [Self::HASH, Self::BACKSLASH, Self::PARAMETERS, Self::AUTHORITY];

    pub(super) const fn number(self) -> u8 {
        self.0
    }

    pub(super) const fn bit(self) -> u64 {
        1 << self.0
    }

    pub(super) const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    pub(super) const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// What the form of a target alone says that servers may differ about; the rest is seen while it is split.
    pub(super) fn raised_by(target: &[u8]) -> Self {
        let path = path_of(target, Self::HASH);
        let has = |byte| path.contains(&byte);
        let is_separator = |byte: &u8| b"/\\".contains(byte);
        let has_authority = path.len() > 1 && path[..2].iter().all(is_separator);
        let has_encoded_backslash = || path.windows(3).any(|bytes| bytes.eq_ignore_ascii_case(b"%5c"));
        let has_backslash = has(b'\\') || (has(b'%') && has_encoded_backslash());
        let raised = [has(b'#'), has_backslash, has(b';'), has_authority];
        let raised = Self::OF_TARGET.into_iter().zip(raised).filter(|(_, raised)| *raised);
        raised.fold(Self::default(), |all, (way, _)| all.with(way))
    }

    pub(super) const fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Itself, and all that depart in less.
    pub(super) fn subsets(self) -> impl Iterator<Item = Self> {
        (0..=self.0).filter(move |subset| subset & !self.0 == 0).map(Self)
    }

    /// Whether a byte separates segments.
    #[inline]
    pub(super) const fn separates(self, byte: u8, encoded: bool) -> bool {
        self.is_slash(byte) && (!encoded || self.has(Self::ENCODED_SLASH))
    }

    #[inline]
    pub(super) const fn is_slash(self, byte: u8) -> bool {
        byte == b'/' || (byte == b'\\' && self.has(Self::BACKSLASH))
    }
}

/// The path of a request target: without scheme, host, query and, where that is none of it, what follows `#`.
pub(super) fn path_of(target: &[u8], reading: Reading) -> &[u8] {
    let ends = |byte: &u8| *byte == b'?' || (*byte == b'#' && !reading.has(Reading::HASH));
    let target = &target[..target.iter().position(ends).unwrap_or(target.len())];
    if target.starts_with(b"/") {
        return without_authority(target, reading);
    }
    let scheme = target.iter().take_while(|byte| byte.is_ascii_alphanumeric()).count();
    match target[scheme..].strip_prefix(b"://") {
        Some(rest) if scheme > 0 => from_slash(rest, reading),
        Some(_) | None => without_authority(target, reading),
    }
}

fn without_authority(path: &[u8], reading: Reading) -> &[u8] {
    match path {
        [first, second, rest @ ..]
            if reading.has(Reading::AUTHORITY) && reading.is_slash(*first) && reading.is_slash(*second) =>
        {
            from_slash(rest, reading)
        }
        _ => path,
    }
}

fn from_slash(text: &[u8], reading: Reading) -> &[u8] {
    let host = text.iter().position(|byte| reading.is_slash(*byte)).unwrap_or(text.len());
    &text[host..]
}

/// Whether all servers read a path alike.
pub(super) fn is_plain(target: &[u8]) -> bool {
    let path = path_of(target, Reading::HASH);
    let has_dots = |segment: &[u8]| matches!(segment, b"." | b"..");
    if Reading::raised_by(target) != Reading::default() || path.split(|byte| *byte == b'/').any(has_dots) {
        return false;
    }
    let mut rest = path;
    while let Some((byte, encoded, after)) = super::next_byte(rest) {
        rest = after;
        if byte.is_ascii_control() || b";\\#".contains(&byte) || (byte == b'%') || (encoded && b"/.".contains(&byte)) {
            return false;
        }
    }
    true
}

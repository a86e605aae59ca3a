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
    /// `//host/path` is a path on a host (RFC 3986, section 4.2), and so it is behind more separators, as behind those of a
    /// scheme (URL Standard of WHATWG, "special authority ignore slashes state").
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

    /// What the form of a target alone says that servers may differ about; the rest is seen while it is split. Looks at all
    /// before the query: where the host ends, and the path begins, is what they may differ about.
    pub(super) fn raised_by(target: &[u8]) -> Self {
        let target = without_query(target);
        let has = |byte| target.contains(&byte);
        let has_encoded_backslash = || target.windows(3).any(|bytes| bytes.eq_ignore_ascii_case(b"%5c"));
        let has_backslash = has(b'\\') || (has(b'%') && has_encoded_backslash());
        let start = Start::of(target, Self::BACKSLASH);
        // Behind a scheme, two separators are how a host begins.
        let has_scheme = start.rest.len() < target.len();
        let has_authority = start.separators > if has_scheme { 2 } else { 1 };
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

/// How a request target begins.
struct Start<'t> {
    /// What follows a scheme; without one, all.
    rest: &'t [u8],
    /// How many separators that begins with.
    separators: usize,
}

impl<'t> Start<'t> {
    fn of(target: &'t [u8], reading: Reading) -> Self {
        let of = |rest: &'t [u8]| {
            let separators = rest.iter().take_while(|byte| reading.is_slash(**byte)).count();
            Self { rest, separators }
        };
        let is_of_scheme = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
        let scheme = target.iter().take_while(|byte| is_of_scheme(byte)).count();
        let behind = target[scheme..].strip_prefix(b":").filter(|_| scheme > 0).map(of);
        behind.filter(|start| start.separators > 1).unwrap_or_else(|| of(target))
    }
}

fn without_query(target: &[u8]) -> &[u8] {
    &target[..target.iter().position(|byte| *byte == b'?').unwrap_or(target.len())]
}

/// The path of a request target: without scheme, host, query and, where that is none of it, what follows `#`.
pub(super) fn path_of(target: &[u8], reading: Reading) -> &[u8] {
    let ends = |byte: &u8| *byte == b'#' && !reading.has(Reading::HASH);
    let target = without_query(target);
    let target = &target[..target.iter().position(ends).unwrap_or(target.len())];
    let Start { rest, separators } = Start::of(target, reading);
    let has_scheme = rest.len() < target.len();
    let authority = match reading.has(Reading::AUTHORITY) {
        true if separators > 1 => &rest[separators..],
        false if has_scheme => &rest[2..],
        true | false => return target,
    };
    let host = authority.iter().position(|byte| reading.is_slash(*byte)).unwrap_or(authority.len());
    &authority[host..]
}

/// Whether all servers read a path alike.
pub(super) fn is_plain(target: &[u8]) -> bool {
    let path = path_of(target, Reading::HASH);
    let has_dots = |segment: &[u8]| matches!(segment, b"." | b"..");
    if Reading::raised_by(target) != Reading::default() || path.split(|byte| *byte == b'/').any(has_dots) {
        return false;
    }
    // Of the host as well: whoever reads it otherwise reads another path.
    let mut rest = without_query(target);
    while let Some((byte, encoded, after)) = super::next_byte(rest) {
        rest = after;
        if byte.is_ascii_control() || b";\\#".contains(&byte) || (byte == b'%') || (encoded && b"/.".contains(&byte)) {
            return false;
        }
    }
    true
}

//! From method and path to the endpoint groups that a request belongs to: all that match.
//!
//! Patterns are described in `pattern.rs`.
//!
//! # Paths
//!
//! A path is brought into one form first, so that writing it otherwise does not escape a limit: query and fragment are
//! cut off, an absolute URL loses scheme and host, percent-encoding is decoded once, `.` and `..` are resolved, and empty
//! segments count for nothing (`/a//b/` is `/a/b`). Where servers differ on what a path means, it belongs to the groups of
//! every reading: `%2F` is part of a segment and also a separator, and so is a backslash; `/a//../b` is `/b` and also
//! `/a/b`; parameters (`;v=1`) are part of their segment and also nothing; `//a/b` and `///a/b` are `/a/b` and also `/b` on
//! the host `a`; what follows `#` is no part of the path, and also is one.
//!
//! A path of more than [`MAX_PATH_LEN`] bytes, or of a form that raises more than two of the questions that its characters
//! raise (backslashes, parameters, a host, `#`), belongs to every group that has its method: no client that the limits are
//! for would send it, and it must not be a way around them.
//!
//! # Which is more specific
//!
//! Of two patterns that match a path, compared by segment from the left, the first difference decides: a segment exactly is
//! more specific than one by its beginning, a longer beginning than a shorter one, any beginning than `*`, that than the
//! end of the pattern, and that than `**`. So `/a/b` comes before `/a/v*`, `/a/*`, `/a/**` and `/**`, and `/a` before
//! `/a/**`. Of equal paths the one that names methods is more specific. Each reading of an ambiguous path is looked at alone.
//!
//! # Cost
//!
//! Patterns are a trie by segment, walked with the set of all nodes that the path may be at: the number of patterns does
//! not matter, nothing backtracks, and nothing is allocated once a [`Scratch`] has grown to its use.

use std::{collections::HashMap, fmt, sync::Arc};

use foldhash::fast::RandomState;

pub use self::pattern::{Pattern, PatternError};
use self::{
    pattern::{MAX_METHODS, Step, next_byte},
    reading::{Reading, is_plain, path_of},
};

mod pattern;
mod reading;

/// Longer paths belong to every group.
pub const MAX_PATH_LEN: usize = 8192;
/// So do paths whose form alone raises more questions than that about how they are read.
const MAX_RAISED: u32 = 2;

/// Any method, as a bit beside those of the methods that patterns name.
const ANY_METHOD: u64 = 1 << 63;

/// The endpoint groups of a policy.
#[derive(Clone, Default)]
pub struct Endpoints {
    groups: Vec<Group>,
    /// Methods that patterns name; the index is the bit.
    methods: Vec<Box<str>>,
    nodes: Vec<Node>,
}

#[derive(Clone, Debug)]
struct Group {
    name: Arc<str>,
    /// Methods of all its patterns.
    methods: u64,
    /// In the form that [`Pattern`] is shown in.
    patterns: Vec<Box<str>>,
}

#[derive(Clone, Default)]
struct Node {
    // Only the policy decides what is in them, so that the hash need not withstand an adversary.
    exact: Exact,
    prefixes: HashMap<Box<[u8]>, u32, RandomState>,
    /// Lengths that occur in `prefixes`, so that a segment is looked up once for each.
    prefix_lens: Vec<usize>,
    one: Option<u32>,
    rest: Option<u32>,
    /// Whether this node is the `rest` of another: it stays whatever segment comes.
    stays: bool,
    ends: Vec<End>,
}

/// Nodes by the segment that leads to them.
#[derive(Clone, Default)]
enum Exact {
    #[default]
    None,
    /// As most nodes have, and then nothing is hashed.
    One(Box<[u8]>, u32),
    Many(HashMap<Box<[u8]>, u32, RandomState>),
}

impl Exact {
    #[inline]
    fn get(&self, segment: &[u8]) -> Option<u32> {
        match self {
            Self::None => None,
            Self::One(name, node) => (**name == *segment).then_some(*node),
            Self::Many(nodes) => nodes.get(segment).copied(),
        }
    }

    fn get_or_insert(&mut self, name: Box<[u8]>, new: u32) -> u32 {
        if let Some(node) = self.get(&name) {
            return node;
        }
        *self = match std::mem::take(self) {
            Self::None => Self::One(name, new),
            Self::One(other, node) => Self::Many([(other, node), (name, new)].into_iter().collect()),
            Self::Many(mut nodes) => {
                nodes.insert(name, new);
                Self::Many(nodes)
            }
        };
        new
    }
}

/// A pattern ends here.
#[derive(Clone, Copy)]
struct End {
    methods: u64,
    group: usize,
    rank: u32,
}

/// A group that a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Match {
    pub group: usize,
    /// Number of the reading of the path that matches.
    pub reading: u8,
    /// How specific the pattern is that matches, from 1.
    pub rank: u32,
}

/// Groups of a request.
#[derive(Clone, Copy, Debug)]
pub struct Found<'s> {
    /// In the order of the groups.
    pub matches: &'s [Match],
    /// A bit for each reading that was looked at, whether anything matched or not.
    pub readings: u64,
}

impl fmt::Debug for Endpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoints").field("groups", &self.groups).field("nodes", &self.nodes.len()).finish()
    }
}

/// Buffers that matching writes to, kept from request to request.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    decoded: Vec<u8>,
    /// Bounds of the path's segments, in `decoded` or in the path itself.
    segments: Vec<(usize, usize)>,
    at: Vec<u32>,
    next: Vec<u32>,
    /// By node, the round in which it was last reached.
    reached: Vec<u32>,
    round: u32,
    matches: Vec<Match>,
}

/// What a path has that servers read differently.
#[derive(Clone, Copy, Default)]
struct Ambiguity {
    encoded_slash: bool,
    empty_segment: bool,
    dot_dot: bool,
}

impl Endpoints {
    /// Groups by name with their patterns; a group's index is its place here.
    pub fn new(groups: Vec<(Arc<str>, Vec<Pattern>)>) -> Result<Self, PatternError> {
        let mut endpoints = Self { nodes: vec![Node::default()], ..Self::default() };
        let mut ranks: Vec<_> = groups.iter().flat_map(|(_, patterns)| patterns).map(Pattern::specificity).collect();
        ranks.sort_unstable();
        ranks.dedup();
        for (index, (name, patterns)) in groups.into_iter().enumerate() {
            let texts = patterns.iter().map(|pattern| pattern.to_string().into()).collect();
            endpoints.groups.push(Group { name, methods: 0, patterns: texts });
            for pattern in patterns {
                let methods = endpoints.method_bits(&pattern.methods)?;
                endpoints.groups[index].methods |= methods;
                let rank = ranks.binary_search(&pattern.specificity()).unwrap_or(0) + 1;
                let rank = u32::try_from(rank).unwrap_or(u32::MAX);
                let end = pattern.steps.into_iter().fold(0, |node, step| endpoints.child(node, step));
                endpoints.nodes[end as usize].ends.push(End { methods, group: index, rank });
            }
        }
        Ok(endpoints)
    }

    fn method_bits(&mut self, names: &[Box<str>]) -> Result<u64, PatternError> {
        let mut bits = if names.is_empty() { ANY_METHOD } else { 0 };
        for name in names {
            let known = self.methods.iter().position(|known| known == name);
            let index = known.unwrap_or_else(|| {
                self.methods.push(name.clone());
                self.methods.len() - 1
            });
            if index >= MAX_METHODS {
                return Err(PatternError::TooManyMethods);
            }
            bits |= 1 << index;
        }
        Ok(bits)
    }

    fn child(&mut self, parent: u32, step: Step) -> u32 {
        // At most 2^32 nodes: a policy file would have to be larger than memory.
        let new = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
        let stays = step == Step::Rest;
        let node = &mut self.nodes[parent as usize];
        let child = match step {
            Step::Exact(name) => node.exact.get_or_insert(name, new),
            Step::Prefix(prefix) => {
                if !node.prefix_lens.contains(&prefix.len()) {
                    node.prefix_lens.push(prefix.len());
                }
                *node.prefixes.entry(prefix).or_insert(new)
            }
            Step::One => *node.one.get_or_insert(new),
            Step::Rest => *node.rest.get_or_insert(new),
        };
        if child == new {
            self.nodes.push(Node { stays, ..Node::default() });
        }
        child
    }

    pub fn len(&self) -> usize {
        self.groups.len()
    }

    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Name of a group by its index.
    pub fn name(&self, index: usize) -> Option<&Arc<str>> {
        self.groups.get(index).map(|group| &group.name)
    }

    /// The groups by name, with their patterns in one form.
    pub fn groups(&self) -> impl Iterator<Item = (&Arc<str>, &[Box<str>])> {
        self.groups.iter().map(|group| (&group.name, &*group.patterns))
    }

    /// Whether a pattern matches whatever server reads the path. Unlike with [`Self::find`], what could be read otherwise
    /// is not covered, in the path nor in a host before it: dot segments, an encoded slash, dot or percent sign, a percent
    /// sign that encodes nothing, backslashes, parameters, `#`, control characters, more slashes than one at the beginning;
    /// nor is what is too long to be read.
    pub fn covers(&self, method: &str, path: impl AsRef<[u8]>, scratch: &mut Scratch) -> bool {
        let (target, reading) = (path.as_ref(), Reading::default());
        let path = path_of(target, reading);
        if self.groups.is_empty() || path.len() > MAX_PATH_LEN || !is_plain(target) {
            return false;
        }
        scratch.matches.clear();
        self.walk(path, reading, self.bits_of(method), scratch);
        !scratch.matches.is_empty()
    }

    /// Bits of a request's method. `HEAD` belongs to the groups of `GET` as well, since a server answers it by the same
    /// work: it must not be a way around their limits.
    fn bits_of(&self, method: &str) -> u64 {
        let bit = |method: &str| {
            let known = self.methods.iter().position(|known| known.eq_ignore_ascii_case(method));
            known.map_or(0, |index| 1 << index)
        };
        let as_get = if method.eq_ignore_ascii_case("HEAD") { bit("GET") } else { 0 };
        ANY_METHOD | bit(method) | as_get
    }

    /// All groups that the request belongs to. `path` may be a whole request target. Methods are compared without regard
    /// to case.
    pub fn find<'s>(&self, method: &str, path: impl AsRef<[u8]>, scratch: &'s mut Scratch) -> Found<'s> {
        let target = path.as_ref();
        scratch.matches.clear();
        let plainest = Reading::default();
        if self.groups.is_empty() {
            return Found { matches: &scratch.matches, readings: plainest.bit() };
        }
        let methods = self.bits_of(method);
        if scratch.split_plain(target) {
            self.follow(target, plainest, methods, scratch);
            scratch.keep_most_specific();
            return Found { matches: &scratch.matches, readings: plainest.bit() };
        }
        let raised = Reading::raised_by(target);
        if path_of(target, Reading::HASH).len() > MAX_PATH_LEN || raised.count() > MAX_RAISED {
            let with_method = |(_, group): &(usize, &Group)| group.methods & methods != 0;
            let groups = self.groups.iter().enumerate().filter(with_method);
            // None is more specific than another.
            let number = plainest.number();
            scratch.matches.extend(groups.map(|(group, _)| Match { group, reading: number, rank: u32::MAX }));
            return Found { matches: &scratch.matches, readings: plainest.bit() };
        }
        let mut readings = 0;
        for reading in raised.subsets() {
            readings |= self.walk_as(target, reading, methods, scratch);
        }
        scratch.keep_most_specific();
        Found { matches: &scratch.matches, readings }
    }

    /// Adds the groups of one reading, and of those that differ about what is only seen in it; returns their bits.
    fn walk_as(&self, target: &[u8], reading: Reading, methods: u64, scratch: &mut Scratch) -> u64 {
        let mut readings = 0;
        let mut walk = |reading: Reading| {
            readings |= reading.bit();
            self.walk(path_of(target, reading), reading, methods, scratch)
        };
        let seen = walk(reading);
        if seen.encoded_slash {
            let reading = reading.with(Reading::ENCODED_SLASH);
            let seen = walk(reading);
            if seen.empty_segment && seen.dot_dot {
                walk(reading.with(Reading::EMPTY_SEGMENTS));
            }
        }
        if seen.empty_segment && seen.dot_dot {
            walk(reading.with(Reading::EMPTY_SEGMENTS));
        }
        readings
    }

    /// The groups that the request belongs to, each once.
    #[cfg(test)]
    pub(super) fn matches(&self, method: &str, path: impl AsRef<[u8]>, scratch: &mut Scratch) -> Vec<usize> {
        let mut groups: Vec<usize> = self.find(method, path, scratch).matches.iter().map(|found| found.group).collect();
        groups.dedup();
        groups
    }

    /// Adds the groups of one reading of the path.
    fn walk(&self, path: &[u8], reading: Reading, methods: u64, scratch: &mut Scratch) -> Ambiguity {
        let seen = scratch.split(path, reading);
        self.follow(path, reading, methods, scratch);
        seen
    }

    /// Adds the groups that the segments lead to.
    fn follow(&self, path: &[u8], reading: Reading, methods: u64, scratch: &mut Scratch) {
        let Scratch { decoded, segments, at, next, reached, round, matches } = scratch;
        let text: &[u8] = if decoded.is_empty() { path } else { decoded };
        reached.resize(self.nodes.len(), 0);
        at.clear();
        let now = begin_round(round, reached);
        self.enter(0, at, reached, now);
        for &(start, end) in segments.iter() {
            let segment = &text[start..end];
            next.clear();
            let now = begin_round(round, reached);
            for &index in at.iter() {
                let node = &self.nodes[index as usize];
                if node.stays {
                    self.enter(index, next, reached, now);
                }
                if let Some(child) = node.exact.get(segment) {
                    self.enter(child, next, reached, now);
                }
                for &len in &node.prefix_lens {
                    if let Some(&child) = segment.get(..len).and_then(|prefix| node.prefixes.get(prefix)) {
                        self.enter(child, next, reached, now);
                    }
                }
                if let Some(child) = node.one {
                    self.enter(child, next, reached, now);
                }
            }
            std::mem::swap(at, next);
            if at.is_empty() {
                return;
            }
        }
        for &index in at.iter() {
            let ends = self.nodes[index as usize].ends.iter();
            let ends = ends.filter(|end| end.methods & methods != 0);
            matches.extend(ends.map(|end| Match { group: end.group, reading: reading.number(), rank: end.rank }));
        }
    }

    /// Adds a node, and what it reaches without a segment, to the set of a round.
    fn enter(&self, node: u32, set: &mut Vec<u32>, reached: &mut [u32], round: u32) {
        let mut following = Some(node);
        while let Some(index) = following {
            if std::mem::replace(&mut reached[index as usize], round) == round {
                return;
            }
            set.push(index);
            following = self.nodes[index as usize].rest;
        }
    }
}

fn begin_round(round: &mut u32, reached: &mut [u32]) -> u32 {
    *round = round.wrapping_add(1);
    if *round == 0 {
        reached.fill(0);
        *round = 1;
    }
    *round
}

impl Scratch {
    /// Of the patterns of a group that match in one reading, the most specific.
    #[inline]
    fn keep_most_specific(&mut self) {
        if self.matches.len() > 1 {
            self.matches.sort_unstable_by_key(|found| (found.group, found.reading, u32::MAX - found.rank));
            self.matches.dedup_by_key(|found| (found.group, found.reading));
        }
    }

    /// Splits the path of a request target as all servers read it, in one pass: one that begins with one slash, and has no
    /// percent sign, backslash, parameters, `#` nor dot segments, as most have none. `false` for any other, and for one that
    /// is too long.
    fn split_plain(&mut self, target: &[u8]) -> bool {
        self.decoded.clear();
        self.segments.clear();
        if target.first() != Some(&b'/') || target.get(1) == Some(&b'/') {
            return false;
        }
        let (mut start, mut end) = (1, target.len());
        for (at, byte) in target.iter().enumerate().skip(1) {
            match byte {
                b'/' if !self.push_plain(target, (start, at)) => return false,
                b'/' => start = at + 1,
                b'%' | b'#' | b'\\' | b';' => return false,
                b'?' => {
                    end = at;
                    break;
                }
                _ if at > MAX_PATH_LEN => return false,
                _ => {}
            }
        }
        end <= MAX_PATH_LEN && self.push_plain(target, (start, end))
    }

    /// An empty segment counts for nothing; `false` for dots.
    #[inline]
    fn push_plain(&mut self, target: &[u8], (start, end): (usize, usize)) -> bool {
        let segment = &target[start..end];
        if !segment.is_empty() {
            self.segments.push((start, end));
        }
        !matches!(segment, b"." | b"..")
    }

    /// Splits a path into segments as `reading` says, with dots resolved.
    fn split(&mut self, path: &[u8], reading: Reading) -> Ambiguity {
        let mut seen = Ambiguity::default();
        self.decoded.clear();
        self.segments.clear();
        let is_as_written = !reading.has(Reading::BACKSLASH) && !reading.has(Reading::PARAMETERS);
        if is_as_written && !path.contains(&b'%') {
            let mut start = 0;
            for segment in path.split(|byte| *byte == b'/') {
                let end = start + segment.len();
                push_segment(&mut self.segments, path, (start, end), reading, &mut seen);
                start = end + 1;
            }
        } else {
            let (mut start, mut rest, mut in_parameters) = (0, path, false);
            while let Some((byte, encoded, after)) = next_byte(rest) {
                rest = after;
                seen.encoded_slash |= encoded && reading.is_slash(byte);
                if reading.separates(byte, encoded) {
                    let end = self.decoded.len();
                    push_segment(&mut self.segments, &self.decoded, (start, end), reading, &mut seen);
                    (start, in_parameters) = (end, false);
                    continue;
                }
                in_parameters |= byte == b';' && !encoded && reading.has(Reading::PARAMETERS);
                if !in_parameters {
                    self.decoded.push(byte);
                }
            }
            let end = self.decoded.len();
            push_segment(&mut self.segments, &self.decoded, (start, end), reading, &mut seen);
        }
        self.segments.retain(|(start, end)| start < end);
        seen
    }
}

fn push_segment(
    segments: &mut Vec<(usize, usize)>,
    text: &[u8],
    (start, end): (usize, usize),
    reading: Reading,
    seen: &mut Ambiguity,
) {
    match &text[start..end] {
        // What precedes the first separator of a path is no segment.
        b"" => {
            let is_first = start == 0 && segments.is_empty();
            if !is_first {
                seen.empty_segment = true;
                if reading.has(Reading::EMPTY_SEGMENTS) {
                    segments.push((start, end));
                }
            }
        }
        b"." => {}
        b".." => {
            seen.dot_dot = true;
            segments.pop();
        }
        _ => segments.push((start, end)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn endpoints(groups: &[&[&str]]) -> Endpoints {
        let groups = groups.iter().enumerate().map(|(index, patterns)| {
            let patterns = patterns.iter().map(|pattern| Pattern::parse(pattern).expect(pattern)).collect();
            (Arc::from(format!("group{index}")), patterns)
        });
        Endpoints::new(groups.collect()).unwrap()
    }

    fn matched(pattern: &str, method: &str, path: &str) -> bool {
        !endpoints(&[&[pattern]]).matches(method, path, &mut Scratch::default()).is_empty()
    }

    #[test]
    fn patterns() {
        for (pattern, path, expected) in [
            ("/login", "/login", true),
            ("/login", "/login/", true),
            ("/login", "//login", true),
            ("/login", "/Login", false),
            ("/login", "/login/now", false),
            ("/login", "/", false),
            ("/login/", "/login", true),
            ("/", "/", true),
            ("/", "", true),
            ("/", "/a", false),
            ("/api/*", "/api/a", true),
            ("/api/*", "/api/a/b/c", true),
            ("/api/*", "/api", false),
            ("/api/*", "/api/", false),
            ("/*", "/", false),
            ("/*", "/a/b", true),
            ("/api/*/x", "/api/a/x", true),
            ("/api/*/x", "/api/a/b/x", false),
            ("/api/*/x", "/api/x", false),
            ("/api/**", "/api", true),
            ("/api/**", "/api/a/b", true),
            ("/api/**", "/apis", false),
            ("/**", "/", true),
            ("/**/x", "/x", true),
            ("/**/x", "/a/b/x", true),
            ("/**/x", "/a/x/b", false),
            ("/a/**/b/**/c", "/a/b/c", true),
            ("/a/**/b/**/c", "/a/1/b/2/3/c", true),
            ("/a/**/b/**/c", "/a/1/2/3/c", false),
            ("/**/**/x", "/x", true),
            ("/v*/users", "/v1/users", true),
            ("/v*/users", "/v/users", true),
            ("/v*/users", "/w1/users", false),
            ("/file-*", "/file-1", true),
            ("/file-*", "/file-1/2", false),
            ("/caf%C3%A9", "/café", true),
            ("/a%2Ab", "/a*b", true),
        ] {
            assert_eq!(matched(pattern, "GET", path), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn writing_a_path_otherwise_does_not_escape() {
        for path in [
            "/api/v1/search",
            "/api//v1/%73earch",
            "/api/v1/search/",
            "/api/v1/search?q=1",
            "/api/v1/search#top",
            "/api/v1/search?q=/../../x",
            "/./api/v1/search",
            "/api/x/../v1/search",
            "/api/x/%2e%2E/v1/search",
            "/api/v1/%2E/search",
            "/../../api/v1/search",
            "/%61%70%69/v1/search",
            "/api%2Fv1%2fsearch",
            "/api/v1/x%2f..%2fsearch",
            "/api//../v1/search",
            "/x//../api/v1/search",
            "/api%2F/../v1/search",
            "http://example.com/api/v1/search",
            "HTTPS://example.com//api/v1/search?x",
            "svn+a-b.c://host/api/v1/search",
            "/api/v1/search/..//search",
            "/api\\v1\\search",
            "\\api\\v1/search",
            "/api%5Cv1%5csearch",
            "/api\\x\\..\\v1/search",
            "//host/api/v1/search",
            "//host:80/api/x/../v1/search",
            "/\\host\\api/v1/search",
            "///host/api/v1/search",
            "/\\/host/api/v1/search",
            "//\\host/api/v1/search",
            "\\\\\\host/api/v1/search",
            "http:///host/api/v1/search",
            "http://\\host\\api/v1/search",
            "http:\\\\host/api/v1/search",
            "http://host\\api/v1/search",
            "http://host\\x/../api/v1/search",
            "/x#/../api/v1/search",
            "/api/v1/search#/../../../x",
            "/api/v1/search;v=1",
            "/api;a=b/v1;c/search",
            "/api/x/..;/v1/search",
            "/api/v1/search;v=1#top",
            // More questions than anybody asks: any group.
            "//x\\y;z#",
        ] {
            assert!(matched("/api/v1/search", "GET", path), "{path}");
        }
        for path in [
            "/api/v1/search%3Fq",
            "/api/v1/%2573earch",
            "/api/v1/search%3bv=1",
            "/api/v1/search%",
            "//host/x/api/v1/search",
            "///host/x/api/v1/search",
            "http://host/x/api/v1/search",
            "a_b://host/api/v1/search",
            "/x;/api/v1/search",
            "/api/v1/search\\x",
            "*",
            "api://",
        ] {
            assert!(!matched("/api/v1/search", "GET", path), "{path}");
        }
    }

    #[test]
    fn methods() {
        for (pattern, method, expected) in [
            ("GET /x", "GET", true),
            ("GET /x", "get", true),
            ("get /x", "GET", true),
            ("GET /x", "HEAD", true),
            ("get /x", "head", true),
            ("POST /x", "HEAD", false),
            ("HEAD /x", "GET", false),
            ("HEAD /x", "HEAD", true),
            ("GET /x", "OPTIONS", false),
            ("/x", "OPTIONS", true),
            ("GET,POST /x", "POST", true),
            ("GET,POST /x", "PUT", false),
            ("* /x", "BREW", true),
            ("/x", "BREW", true),
            ("BREW   /x", "BREW", true),
        ] {
            assert_eq!(matched(pattern, method, "/x"), expected, "{pattern} {method}");
        }
    }

    #[test]
    fn all_groups_that_match_apply() {
        let endpoints = endpoints(&[&["/api/**"], &["POST /api/*"], &["/api/login", "/login"], &["/other"]]);
        let mut scratch = Scratch::default();
        assert_eq!(endpoints.matches("POST", "/api/login", &mut scratch), [0, 1, 2]);
        assert_eq!(endpoints.matches("GET", "/api/login", &mut scratch), [0, 2]);
        assert_eq!(endpoints.matches("GET", "/other", &mut scratch), [3]);
        assert_eq!(endpoints.matches("GET", "/nothing", &mut scratch), [0usize; 0]);
        assert_eq!(endpoints.name(2).map(|name| &**name), Some("group2"));
    }

    #[test]
    fn only_what_every_server_reads_alike_is_covered() {
        let endpoints = endpoints(&[&["GET /healthz", "/static/**"]]);
        for (path, expected) in [
            ("/healthz", true),
            ("/healthz//?probe=1", true),
            ("//healthz", false),
            ("//host/healthz", false),
            ("/healthz#", false),
            ("/static/x#/../../api", false),
            ("/static/x%23", false),
            ("/%68ealthz", true),
            ("http://example.org/healthz", true),
            ("http://example.org:80/healthz?to=http://h\\x", true),
            ("http://h\\x/healthz", false),
            ("http://h%5Cx/healthz", false),
            ("http://h#/healthz", false),
            ("http://h#x/healthz", false),
            ("http://h;x/healthz", false),
            ("http:///h/healthz", false),
            ("http:///healthz", false),
            ("http:\\\\h\\healthz", false),
            ("///healthz", false),
            ("/\\/h/healthz", false),
            ("/static/a/b", true),
            ("/static/caf%C3%A9", true),
            ("/static/%61", true),
            ("/static/a.b..c/...", true),
            ("/other", false),
            ("/api/../healthz", false),
            ("/./healthz", false),
            ("/static/../api", false),
            ("/static/..", false),
            ("/static/%2e%2e/api", false),
            ("/static/.%2E/api", false),
            ("/static/..%2fapi", false),
            ("/static/..;/api", false),
            ("/static/a;b", false),
            ("/static/..\\api", false),
            ("/static/..%5Capi", false),
            ("/static/%252e%252e/api", false),
            ("/static/%", false),
            ("/static/a%00b", false),
        ] {
            assert_eq!(endpoints.covers("GET", path, &mut Scratch::default()), expected, "{path}");
        }
        assert!(!endpoints.covers("POST", "/healthz", &mut Scratch::default()));
        assert!(!endpoints.covers("GET", format!("/static/{}", "x".repeat(MAX_PATH_LEN)), &mut Scratch::default()));
        assert!(!Endpoints::default().covers("GET", "/", &mut Scratch::default()));
    }

    #[test]
    fn a_path_that_is_too_long_belongs_to_every_group_of_its_method() {
        let endpoints = endpoints(&[&["/a"], &["POST /b"], &["GET /c"]]);
        let path = format!("/{}", "x".repeat(MAX_PATH_LEN));
        let mut scratch = Scratch::default();
        assert_eq!(endpoints.matches("GET", &path, &mut scratch), [0, 2]);
        assert_eq!(endpoints.matches("GET", &path[..MAX_PATH_LEN], &mut scratch), [0usize; 0]);
        let query = format!("/a?{path}");
        assert_eq!(endpoints.matches("GET", &query, &mut scratch), [0]);
    }

    #[test]
    fn hostile_paths_cost_no_more_than_their_length() {
        // Backtracking would take longer than the universe has.
        let pattern = format!("/{}c", "**/a/*/".repeat(20));
        let endpoints = endpoints(&[&[&pattern]]);
        let mut path = "/a".repeat(MAX_PATH_LEN / 2 - 1);
        path.push_str("/b");
        assert_eq!(endpoints.matches("GET", &path, &mut Scratch::default()), [0usize; 0]);
    }

    #[test]
    fn ten_thousand_groups_are_not_searched_one_by_one() {
        let names: Vec<String> = (0..10_000).map(|index| format!("/api/{index}/*")).collect();
        let groups: Vec<[&str; 1]> = names.iter().map(|name| [name.as_str()]).collect();
        let groups: Vec<&[&str]> = groups.iter().map(|group| group.as_slice()).collect();
        let endpoints = endpoints(&groups);
        let mut scratch = Scratch::default();
        assert_eq!(endpoints.matches("GET", "/api/7777/x", &mut scratch), [7777]);
        assert!(scratch.at.len() <= 2, "at {} nodes at once", scratch.at.len());
    }

    #[test]
    fn ten_thousand_groups_are_walked_in_as_many_steps_as_ten() {
        let nodes = |groups: usize| {
            let names: Vec<String> = (0..groups).map(|index| format!("/api/{index}/*")).collect();
            let mut groups: Vec<Vec<&str>> = names.iter().map(|name| vec![name.as_str()]).collect();
            groups.push(vec!["/api/**", "/**/x"]);
            let groups: Vec<&[&str]> = groups.iter().map(Vec::as_slice).collect();
            let endpoints = endpoints(&groups);
            let mut scratch = Scratch::default();
            let found = endpoints.find("GET", "/api/7/y/x", &mut scratch).matches.len();
            // Each node that was looked at, once, and how many could be.
            (found, scratch.reached.iter().filter(|round| **round > 0).count(), scratch.reached.len())
        };
        let (few, many) = (nodes(10), nodes(10_000));
        assert_eq!((few.0, few.1), (many.0, many.1));
        assert!(few.0 == 2 && many.1 < 20 && many.2 > 10_000, "{few:?} {many:?}");
    }

    #[test]
    fn the_more_specific_pattern_has_the_higher_rank() {
        // For each path, the patterns that match it, the most specific first.
        for (path, patterns) in [
            (
                "/a/v1",
                &[
                    "GET /a/v1",
                    "/a/v1",
                    "/a/v1/**",
                    "/a/v*",
                    "/a/v*/**",
                    "/a/*",
                    "/a/**",
                    "/*/v1",
                    "/*",
                    "/**/v1",
                    "/**",
                ][..],
            ),
            ("/a", &["/a", "/a/**", "/*", "/**/a", "/**"]),
            ("/", &["/", "/**"]),
            ("/a/x/b/c", &["/a/x/b/c", "/a/*/b/c", "/a/*", "/a/**/b/c", "/a/**/b/*", "/a/**/c", "/a/**", "/**"]),
        ] {
            for (position, specific) in patterns.iter().enumerate() {
                for general in &patterns[position + 1..] {
                    let endpoints = endpoints(&[&[general], &[specific]]);
                    let mut scratch = Scratch::default();
                    let found = endpoints.find("GET", path, &mut scratch).matches;
                    assert_eq!(found.len(), 2, "{path}: {general} and {specific}");
                    assert!(found[1].rank > found[0].rank, "{path}: {specific} before {general}");
                }
            }
        }
        // Equally specific, and of one group the most specific pattern.
        let endpoints = endpoints(&[&["/**", "/a/b"], &["/a/%62"], &["/a/*"]]);
        let ranks = |path| {
            let mut scratch = Scratch::default();
            endpoints.find("GET", path, &mut scratch).matches.iter().map(|found| found.rank).collect::<Vec<_>>()
        };
        let [whole, same, star] = ranks("/a/b")[..] else { panic!("three groups") };
        assert!(whole == same && same > star);
        let [whole, star] = ranks("/a/c")[..] else { panic!("two groups") };
        assert!(star > whole);
    }

    /// The definition, on text, slowly.
    mod reference {
        pub(super) fn matches(pattern: &str, path: &str) -> bool {
            let path = path.split('?').next().unwrap_or_default();
            let leads = |text: &str| text.chars().take_while(|c| "/\\".contains(*c)).count() > 1;
            let has_backslash = path.contains('\\') || path.contains("%5c");
            let raised = [path.contains('#'), has_backslash, path.contains(';'), leads(path)];
            if raised.iter().filter(|raised| **raised).count() > 2 {
                return true;
            }
            let pattern: Vec<&str> = pattern.split('/').filter(|segment| !segment.is_empty()).collect();
            (0..64).any(|bits| segments_match(&pattern, &segments(path, |bit| bits & 1 << bit != 0)))
        }

        fn decode(text: &str) -> String {
            let mut decoded = text.to_owned();
            for (code, c) in [("%2e", "."), ("%2E", "."), ("%61", "a"), ("%62", "b"), ("%2f", "/"), ("%2F", "/")] {
                decoded = decoded.replace(code, c);
            }
            decoded.replace("%5c", "\\")
        }

        /// One rewriting of the text after the other.
        fn segments(path: &str, is: impl Fn(u32) -> bool) -> Vec<String> {
            let (hash, backslash, parameters, authority, encoded_slash, empty) =
                (is(0), is(1), is(2), is(3), is(4), is(5));
            let mut path = path.to_owned();
            if !hash {
                path.truncate(path.find('#').unwrap_or(path.len()));
            }
            if backslash {
                path = path.replace('\\', "/");
            }
            if authority && path.starts_with("//") {
                let rest = path.trim_start_matches('/');
                path = rest[rest.find('/').unwrap_or(rest.len())..].to_owned();
            }
            if parameters {
                let cut = |segment: &str| segment.split(';').next().unwrap_or_default().to_owned();
                let cut_encoded = |segment: &str| {
                    // An encoded separator ends parameters where it separates.
                    let separated = segment.replace("%2F", "%2f").replace("%5c", if backslash { "%2f" } else { "%5c" });
                    separated.split("%2f").map(cut).collect::<Vec<_>>().join("%2f")
                };
                let cut = |segment| if encoded_slash { cut_encoded(segment) } else { cut(segment) };
                path = path.split('/').map(cut).collect::<Vec<_>>().join("/");
            }
            if encoded_slash {
                path = path.replace("%2F", "/").replace("%2f", "/");
                path = path.replace("%5c", if backslash { "/" } else { "%5c" });
            }
            let mut segments: Vec<String> = Vec::new();
            for segment in path.split('/').skip(1).map(decode) {
                match segment.as_str() {
                    "" if !empty => {}
                    "." => {}
                    ".." => drop(segments.pop()),
                    _ => segments.push(segment),
                }
            }
            segments.retain(|segment| !segment.is_empty());
            segments
        }

        fn segments_match(pattern: &[&str], path: &[String]) -> bool {
            match pattern {
                [] => path.is_empty(),
                ["**", rest @ ..] => (0..=path.len()).any(|skipped| segments_match(rest, &path[skipped..])),
                ["*"] => !path.is_empty(),
                [first, rest @ ..] => {
                    let Some((segment, path)) = path.split_first() else { return false };
                    let fits = match first.strip_suffix('*') {
                        Some(prefix) => segment.starts_with(prefix),
                        None => segment == first,
                    };
                    fits && segments_match(rest, path)
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn agrees_with_the_slow_reference(
            groups in prop::collection::vec(
                prop::collection::vec(
                    prop::collection::vec(prop::sample::select(vec!["a", "b", "ab", "*", "**", "a*", "c"]), 0..5),
                    1..4,
                ),
                1..6,
            ),
            paths in prop::collection::vec(
                prop::collection::vec(
                    prop::sample::select(vec![
                        "/", "/", "/", "/", "a", "b", "c", "ab", ".", "..", "%61", "%62", "%2e", "%2E%2e", "%2F", "%2f",
                        "?a", "\\", ";", "#", "%5c",
                    ]),
                    0..12,
                ),
                1..8,
            ),
        ) {
            let patterns: Vec<Vec<String>> = groups
                .iter()
                .map(|group| group.iter().map(|segments| format!("/{}", segments.join("/"))).collect())
                .collect();
            let as_text: Vec<Vec<&str>> =
                patterns.iter().map(|group| group.iter().map(String::as_str).collect()).collect();
            let endpoints = endpoints(&as_text.iter().map(Vec::as_slice).collect::<Vec<_>>());
            let mut scratch = Scratch::default();
            for path in paths {
                let path = format!("/{}", path.concat());
                let expected: Vec<usize> = (0..patterns.len())
                    .filter(|group| patterns[*group].iter().any(|pattern| reference::matches(pattern, &path)))
                    .collect();
                let found = endpoints.matches("GET", &path, &mut scratch);
                prop_assert_eq!(found, expected, "{} in {:?}", path, patterns);
            }
        }

        #[test]
        fn any_bytes_get_an_answer(path in prop::collection::vec(any::<u8>(), 0..200)) {
            let endpoints = endpoints(&[&["/**"], &["/a/*/b"], &["/%ff*"]]);
            let mut scratch = Scratch::default();
            let found = endpoints.matches("GET", &path, &mut scratch);
            prop_assert!(found.len() <= 3);
        }
    }
}

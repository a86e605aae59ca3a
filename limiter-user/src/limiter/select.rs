//! Who asks, and which counter of a rule that makes it.

use std::sync::Arc;

use limiter_common::{addr::SrcPrefixes, rule::EnforcementMode};
use smallvec::SmallVec;

use crate::{
    active::Active,
    config::identifier,
    identity::{ClientAddress, KnownKey},
    policy::{Bypass, BypassKind, Endpoints, FailurePolicy, Limit, Match, Policy, Scope, Scratch},
    store::{CellRef, Charge, IdentityRef, Name, SessionId, memory::INLINE_CELLS},
};

/// Who a request comes from, as far as it is known.
#[derive(Clone, Debug)]
pub enum Caller {
    /// A known API key.
    Key(KnownKey),
    /// A client that the gateway has authenticated itself, or a verified token names.
    User {
        user: Name,
        plan: Option<Arc<str>>,
    },
    /// Whoever has this cookie, or this address with this User-Agent.
    Session(SessionId),
    Anonymous,
    /// An API key that is unknown or disabled, or a token that is not valid.
    Unauthenticated,
}

#[derive(Clone, Debug)]
pub struct Subject {
    pub caller: Caller,
    /// `None` when the gateway named no address.
    pub address: Option<ClientAddress>,
}

/// What a program says of a request beside its identity, for rules that count by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    /// `NAME:VALUE`, so that a counter's identity is made by counting a reference.
    text: Name,
    name_len: usize,
}

impl Attribute {
    /// Longest value, in bytes.
    pub const MAX_VALUE: usize = 256;

    pub fn new(name: &str, value: &str) -> Result<Self, String> {
        identifier(name).map_err(|error| format!("the name of an attribute {error}"))?;
        if value.is_empty() || value.len() > Self::MAX_VALUE {
            return Err(format!("the attribute {name} must have 1 to {} bytes", Self::MAX_VALUE));
        }
        Ok(Self { text: format!("{name}:{value}").into(), name_len: name.len() })
    }

    pub fn name(&self) -> &str {
        &self.text[..self.name_len]
    }

    pub(super) fn as_text(&self) -> &str {
        &self.text
    }
}

/// One request as the engine sees it.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    pub subject: &'a Subject,
    pub method: &'a str,
    pub path: &'a str,
    /// What else the request may be, by headers of which one may be the client's own: rules for these apply as well.
    pub also: &'a [(&'a str, &'a str)],
    /// Each name once.
    pub attributes: &'a [Attribute],
    /// At least 1.
    pub cost: u64,
    pub charge: Charge,
}

impl Subject {
    pub fn is_unauthenticated(&self) -> bool {
        matches!(self.caller, Caller::Unauthenticated)
    }

    pub(super) fn plan(&self, plans: &[Arc<str>]) -> Option<usize> {
        let plan = match &self.caller {
            Caller::Key(owner) => owner.plan.as_ref()?,
            Caller::User { plan, .. } => plan.as_ref()?,
            Caller::Session(_) | Caller::Anonymous | Caller::Unauthenticated => return None,
        };
        plans.iter().position(|known| known == plan)
    }

    /// The client id of a key, or the user.
    pub(super) fn client(&self) -> Option<&str> {
        match &self.caller {
            Caller::Key(owner) => Some(&owner.client),
            Caller::User { user, .. } => Some(user),
            Caller::Session(_) | Caller::Anonymous | Caller::Unauthenticated => None,
        }
    }
}

fn identity<'a>(
    policy: &Policy,
    scope: Scope,
    request: &Request<'a>,
    prefixes: SrcPrefixes,
) -> Option<IdentityRef<'a>> {
    let subject = request.subject;
    match (scope, &subject.caller) {
        (Scope::Ip, _) => subject.address.map(|client| IdentityRef::Ip(prefixes.cut(client.address))),
        // A flood of unknown keys counts against its addresses alone, never against what others share.
        (_, Caller::Unauthenticated) => None,
        (Scope::Global, _) => Some(IdentityRef::Global),
        (Scope::Attribute(index), _) => {
            let name = policy.attributes.get(usize::from(index))?;
            let attribute = request.attributes.iter().find(|attribute| *attribute.name() == **name)?;
            Some(IdentityRef::Attribute(&attribute.text))
        }
        (Scope::User, Caller::Key(owner)) => Some(IdentityRef::User(&owner.client)),
        (Scope::User, Caller::User { user, .. }) => Some(IdentityRef::User(user)),
        (Scope::Key, Caller::Key(owner)) => Some(IdentityRef::Key(owner.id)),
        (Scope::Session, Caller::Session(id)) => Some(IdentityRef::Session(*id)),
        (Scope::User | Scope::Key | Scope::Session, _) => None,
    }
}

/// Indices of rules. Inline as long as few rules match.
pub(super) type Rules = SmallVec<[usize; INLINE_CELLS]>;

/// The endpoint groups of everything that a request may be.
#[derive(Debug, Default)]
pub(super) struct Matches {
    /// Each with the number of what the request may be, in the order of the groups.
    found: SmallVec<[(Match, usize); INLINE_CELLS]>,
    /// By that number, the readings of its path.
    readings: SmallVec<[u64; 4]>,
}

impl Matches {
    pub(super) fn found(&self) -> &[(Match, usize)] {
        &self.found
    }

    pub(super) fn readings(&self) -> &[u64] {
        &self.readings
    }
}

/// Into what is empty: it is too large to be handed on.
pub(super) fn matches(endpoints: &Endpoints, request: &Request<'_>, scratch: &mut Scratch, matches: &mut Matches) {
    let alternatives = std::iter::once((request.method, request.path)).chain(request.also.iter().copied());
    for (number, (method, path)) in alternatives.enumerate() {
        let found = endpoints.find(method, path, scratch);
        matches.found.extend(found.matches.iter().map(|found| (*found, number)));
        matches.readings.push(found.readings);
    }
    if !request.also.is_empty() {
        matches.found.sort_unstable();
    }
}

/// What the endpoint groups want of rules while counters cannot be shared: the strictest of what they say.
pub(super) fn failure_policy(active: &Active, matches: &Matches) -> Option<FailurePolicy> {
    let policies = &active.policy.endpoint_failures;
    if policies.is_empty() {
        return None;
    }
    matches.found.iter().filter_map(|(found, _)| policies.get(found.group).copied().flatten()).max()
}

/// Indices of the rules that apply to a request with these endpoint groups, each once, into what is empty.
pub(super) fn rules(active: &Active, matches: &Matches, rules: &mut Rules) {
    rules.extend_from_slice(&active.always.all);
    let mut before = None;
    for (found, _) in &matches.found {
        if before.replace(found.group) != Some(found.group) {
            rules.extend_from_slice(&active.by_endpoint[found.group].all);
        }
    }
    if active.narrows {
        let from = rules.len();
        for (number, readings) in matches.readings.iter().enumerate() {
            for reading in (0..64).filter(|reading| readings & 1 << reading != 0) {
                add_most_specific(active, matches, (number, reading), rules);
            }
        }
        rules[from..].sort_unstable();
        let mut last = None;
        let mut position = 0;
        // What applies by several readings applies once.
        rules.retain(|index| {
            position += 1;
            position <= from || last.replace(*index) != Some(*index)
        });
    }
}

/// How specific the most specific rule of a scope is.
struct Top {
    scope: Scope,
    enforced: u32,
    any: u32,
}

/// Adds the most specific rules of each scope for one reading: what a server that reads the path so is limited by, so
/// that no other spelling can take a rule away.
fn add_most_specific(active: &Active, matches: &Matches, (number, reading): (usize, u8), rules: &mut Rules) {
    let of_endpoints = matches.found.iter().filter(|(found, of)| *of == number && found.reading == reading);
    let of_endpoints = of_endpoints
        .flat_map(|(found, _)| active.by_endpoint[found.group].most_specific.iter().map(|index| (*index, found.rank)));
    // Without an endpoint a rule is less specific than any with one.
    let candidates = active.always.most_specific.iter().map(|index| (*index, 0)).chain(of_endpoints);
    let mut tops: SmallVec<[Top; 4]> = SmallVec::new();
    for (index, rank) in candidates.clone() {
        let rule = &active.policy.rules[index];
        let enforced = if rule.mode == EnforcementMode::Enforce { rank } else { 0 };
        match tops.iter_mut().find(|top| top.scope == rule.scope) {
            Some(top) => {
                top.enforced = top.enforced.max(enforced);
                top.any = top.any.max(rank);
            }
            None => tops.push(Top { scope: rule.scope, enforced, any: rank }),
        }
    }
    let applies = |(index, rank): &(usize, u32)| {
        let rule = &active.policy.rules[*index];
        tops.iter().filter(|top| top.scope == rule.scope).all(|top| {
            // A rule in shadow mode gives way as if all were enforced, and makes no enforced one give way.
            *rank >= if rule.mode == EnforcementMode::Enforce { top.enforced } else { top.any }
        })
    };
    rules.extend(candidates.filter(applies).map(|(index, _)| index));
}

/// Why no rule applies to this request, if so.
pub(super) fn bypass(bypass: &Bypass, request: &Request<'_>, scratch: &mut Scratch) -> Option<BypassKind> {
    let subject = request.subject;
    if subject.address.is_some_and(|client| bypass.cidrs.contains(client.address)) {
        return Some(BypassKind::Cidr);
    }
    // Whoever guesses keys is not to do so for nothing where a path is let through.
    if subject.is_unauthenticated() {
        return None;
    }
    if let Caller::Key(owner) = &subject.caller
        && bypass.key_ids.contains(&owner.id)
    {
        return Some(BypassKind::KeyId);
    }
    if bypass.paths.is_empty() {
        return None;
    }
    // Whatever the request may be has to be let through.
    let mut readings = std::iter::once((request.method, request.path)).chain(request.also.iter().copied());
    readings.all(|(method, path)| bypass.paths.covers(method, path, scratch)).then_some(BypassKind::Path)
}

/// The counter of a rule for this request; `None` when the rule does not apply to its caller or sets no limit.
pub(super) fn cell<'a>(
    active: &'a Active,
    index: usize,
    request: &Request<'a>,
    plan: Option<usize>,
    prefixes: SrcPrefixes,
) -> Option<CellRef<'a>> {
    let rule = &active.policy.rules[index];
    let Limit::Limited(mut algorithm) = rule.limit_for(request.subject.client(), plan) else { return None };
    if let (Some(adaptive), Some(tightened)) = (&rule.adaptive, &active.shares[index]) {
        // The floor was tried when the policy was read.
        algorithm = algorithm.tightened(adaptive.floor, adaptive.floor_ceiling, tightened.share()).unwrap_or(algorithm);
    }
    Some(CellRef {
        identity: identity(&active.policy, rule.scope, request, prefixes)?,
        rule: &active.counter_names[index],
        algorithm,
        cost: request.cost.saturating_mul(rule.cost),
        enforced: rule.mode == EnforcementMode::Enforce,
    })
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write, path::Path};

    use limiter_common::time::UnixMicros;

    use super::*;
    use crate::{metrics::Metrics, pressure::Pressure};

    /// How many endpoint groups a request has, and the rules that apply to it.
    fn applying(active: &Active, request: &Request<'_>, scratch: &mut Scratch) -> (usize, Rules) {
        let (mut found, mut applying) = (Matches::default(), Rules::new());
        matches(&active.policy.endpoints, request, scratch, &mut found);
        rules(active, &found, &mut applying);
        (found.found.len(), applying)
    }

    #[test]
    fn of_a_hundred_rules_and_ten_thousand_endpoints_those_that_match_are_looked_at() {
        let mut text = String::new();
        for group in 0..10_000 {
            writeln!(text, "[[endpoints]]\nname = \"g{group}\"\nmatch = [\"GET /api/{group}/*\", \"/v2/{group}\"]")
                .unwrap();
        }
        let fields = "scope = \"user\"\nlimit = 1\nwindow = \"1s\"";
        for rule in 0..100 {
            let matching = ["all", "most_specific"][rule % 2];
            let endpoint = rule * 100;
            writeln!(text, "[[rules]]\nid = \"r{rule}\"\n{fields}\nendpoint = \"g{endpoint}\"\nmatch = \"{matching}\"")
                .unwrap();
        }
        writeln!(text, "[[rules]]\nid = \"always\"\n{fields}").unwrap();
        writeln!(text, "[[rules]]\nid = \"rest\"\n{fields}\nmatch = \"most_specific\"").unwrap();
        let policy = Policy::parse(Path::new("/policy.toml"), &text).unwrap();
        let active = Active::derive(policy, &[], &Metrics::new(), &Pressure::unreported(), UnixMicros::new(0));
        let subject = Subject { caller: Caller::Anonymous, address: None };
        let mut scratch = Scratch::default();
        for (path, found, expected) in [
            ("/api/1400/x", 1, &[100, 14, 101][..]),
            ("/v2/1500", 1, &[100, 15]),
            ("/v2/1501", 1, &[100, 101]),
            ("/elsewhere", 0, &[100, 101]),
        ] {
            let request = Request {
                subject: &subject,
                method: "GET",
                path,
                also: &[],
                attributes: &[],
                cost: 1,
                charge: Charge::Commit,
            };
            let (groups, once) = applying(&active, &request, &mut scratch);
            assert_eq!((groups, &*once), (found, expected), "{path}");
            // The same by two headers, of which the client may have sent one.
            let also = [("GET", "/v2/1500"), ("GET", path)];
            let request = Request { also: &also, ..request };
            let mut both = expected.to_vec();
            both.push(15);
            both.sort_unstable();
            both.dedup();
            let (_, mut twice) = applying(&active, &request, &mut scratch);
            twice.sort_unstable();
            assert_eq!(*twice, both, "{path}");
        }
    }
}

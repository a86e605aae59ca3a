//! Second stage of reading a policy: what the fields mean, with every name resolved.

mod adaptive;
mod bypass;
mod limits;
mod packet;
mod response;
mod shape;

use std::{
    collections::{HashMap, HashSet},
    path::Path,
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use limiter_common::{
    rule::EnforcementMode,
    schema::{MAX_ACL_PREFIXES, MAX_RULE_PREFIXES},
    sliding_window::BurstFactor,
    stats::RULE_SLOTS,
};

use self::{
    limits::{Overrides, Plans},
    response::Responses,
    shape::Shape,
};
use super::{
    Endpoints, Matching, Policy, PrefixSet, Rule, Scope,
    endpoints::Pattern,
    raw::{RawEndpoint, RawPacketRule, RawPolicy, RawRule},
};
use crate::config::{
    ConfigErrors, Context, Environment, Place, Table, Value, identifier, nearest, prefix::prefix, units,
};

/// Rules of both kinds share the slots of the kernel's counters.
const MAX_RULES: usize = RULE_SLOTS as usize - 1;
/// Prefixes of a list that a policy leaves to operators: with their blocks an agent has to start whatever the policy is.
const ROOM_FOR_OPERATORS: u32 = 16_384;
/// Above this, Lua's numbers (and those of JSON readers) are not exact.
const MAX_CEILING: u64 = 1 << 53;
/// Below, the clocks of hosts and the sync interval blur the window; above, a counter is a yearly quota and more.
const MIN_WINDOW: Duration = Duration::from_millis(1);
const MAX_WINDOW: Duration = Duration::from_secs(366 * 24 * 3600);
pub(super) fn compile(path: &Path, text: &str) -> Result<Policy, ConfigErrors> {
    let context = Context::new(path, text, Environment::default());
    let document = context.parse(text)?;
    let raw = RawPolicy::read(Table::root(&context, &document));
    let policy = Policy { text: text.into(), ..interpret(&raw) };
    context.take_errors().or(Some(policy))
}

fn interpret(raw: &RawPolicy<'_>) -> Policy {
    let (allow, deny) = (acl(raw.allow.as_ref()), acl(raw.deny.as_ref()));
    let allowed: PrefixSet = allow.iter().map(|prefix| prefix.cidr).collect();
    check_deny(&allowed, &deny);
    let plans = raw.plans.as_ref().map(Plans::read).unwrap_or_default();
    let overrides = Overrides::read(raw.overrides.as_ref());
    let (endpoints, endpoint_names) = endpoints(raw.endpoints.as_ref());
    let mut ids = Names::new("a rule");
    let responses = Responses::read(raw.responses.as_ref());
    let mut names = RuleNames {
        endpoints: &endpoint_names,
        plans: &plans,
        overrides: &overrides,
        responses: &responses,
        attributes: Vec::new(),
    };
    let rules = tables(raw.rules.as_ref()).map(RawRule::read);
    let rules: Vec<_> = rules.filter_map(|raw| rule(&raw, &mut names, &mut ids)).collect();
    let attributes = names.attributes;
    overrides.check(&ids.all());
    let mut cidrs = HashMap::new();
    let packet_rules = tables(raw.packet_rules.as_ref()).map(RawPacketRule::read);
    let packet_rules: Vec<_> =
        packet_rules.filter_map(|raw| packet::packet_rule(&raw, &mut ids, &mut cidrs, &allowed)).collect();
    if rules.len() + packet_rules.len() > MAX_RULES
        && let Some(value) = raw.packet_rules.as_ref().or(raw.rules.as_ref())
    {
        let count = rules.len() + packet_rules.len();
        value.error(format_args!("{count} rules and packet rules together: at most {MAX_RULES} fit"));
    }
    if let Some(value) = &raw.packet_rules {
        check_capacity(value, packet_rules.iter().flat_map(|rule| rule.cidrs.iter().copied()), MAX_RULE_PREFIXES);
    }
    let prefixes = |acl: Vec<AclPrefix<'_>>| acl.into_iter().map(|prefix| prefix.cidr).collect();
    let bypass = bypass::bypass(raw.bypass.as_ref());
    let Plans { names: plans, parents: plan_parents } = plans;
    Policy {
        rules,
        endpoints,
        plans,
        plan_parents,
        attributes,
        bypass,
        packet_rules,
        allow: prefixes(allow),
        deny: prefixes(deny),
        text: Box::default(),
    }
}

/// Names that may be given once.
struct Names {
    of: &'static str,
    taken: HashSet<String>,
}

impl Names {
    fn new(of: &'static str) -> Self {
        Self { of, taken: HashSet::new() }
    }

    fn take(&mut self, value: Option<&Value<'_>>, place: &Place<'_>, field: &str) -> Option<Arc<str>> {
        let value = required(value, place, field)?;
        let name = value.parsed("a name", identifier)?;
        if !self.taken.insert(name.clone()) {
            value.error(format_args!("\"{name}\" is the name of {} above already", self.of));
        }
        Some(name.into())
    }
}

impl Names {
    /// The names so far, in order.
    fn all(&self) -> Vec<Arc<str>> {
        let mut names: Vec<Arc<str>> = self.taken.iter().map(|name| name.as_str().into()).collect();
        names.sort_unstable();
        names
    }
}

fn required<'v, 'd>(value: Option<&'v Value<'d>>, place: &Place<'_>, field: &str) -> Option<&'v Value<'d>> {
    if value.is_none() {
        place.error_in(field, "is missing");
    }
    value
}

/// A value that stands for itself, or those of a list. `nothing` is the mistake of an empty one.
fn one_or_more<'d>(value: &Value<'d>, expected: &str, nothing: &str) -> Option<Vec<Value<'d>>> {
    if value.as_str().is_some() {
        return Some(vec![value.clone()]);
    }
    let elements = value.list_or(expected)?;
    if elements.is_empty() {
        value.error(nothing);
    }
    Some(elements)
}

fn tables<'d>(value: Option<&Value<'d>>) -> impl Iterator<Item = Table<'d>> {
    value.and_then(Value::tables).unwrap_or_default().into_iter()
}

struct AclPrefix<'d> {
    value: Value<'d>,
    cidr: IpNet,
}

/// Prefixes, each once.
fn acl<'d>(value: Option<&Value<'d>>) -> Vec<AclPrefix<'d>> {
    let mut seen = HashSet::new();
    let mut acl = Vec::new();
    for value in value.and_then(Value::list).unwrap_or_default() {
        if let Some(cidr) = value.parsed("a prefix", prefix)
            && seen.insert(cidr)
        {
            acl.push(AclPrefix { value, cidr });
        }
    }
    if let Some(value) = value {
        check_capacity(value, acl.iter().map(|prefix| prefix.cidr), MAX_ACL_PREFIXES - ROOM_FOR_OPERATORS);
    }
    acl
}

fn check_capacity(value: &Value<'_>, prefixes: impl Iterator<Item = IpNet>, capacity: u32) {
    let mut counts = [("IPv4", 0u32), ("IPv6", 0u32)];
    for cidr in prefixes {
        counts[usize::from(matches!(cidr, IpNet::V6(_)))].1 += 1;
    }
    for (family, count) in counts {
        if count > capacity {
            value.error(format_args!("{count} {family} prefixes: at most {capacity} fit"));
        }
    }
}

/// Allow wins, so a deny prefix within an allowed one would never act.
fn check_deny(allowed: &PrefixSet, deny: &[AclPrefix<'_>]) {
    for AclPrefix { value, cidr } in deny {
        if let Some(around) = allowed.around(*cidr) {
            value.error(format_args!("{cidr} would never be denied: allow has {around}, and allow wins"));
        }
    }
}

/// Names of the groups; `None` for one whose name could not be read.
fn endpoints(value: Option<&Value<'_>>) -> (Endpoints, Vec<Arc<str>>) {
    let mut taken = Names::new("an endpoint group");
    let mut groups = Vec::new();
    for table in tables(value) {
        let raw = RawEndpoint::read(table);
        let name = taken.take(raw.name.as_ref(), &raw.place, "name");
        let list = required(raw.r#match.as_ref(), &raw.place, "match");
        let elements = list.and_then(Value::list);
        if let (Some(list), Some([])) = (list, elements.as_deref()) {
            list.error("is empty, so nothing would ever match");
        }
        let elements = elements.unwrap_or_default();
        let patterns = elements.iter().filter_map(|element| element.parsed("a pattern", Pattern::parse)).collect();
        groups.push((name.unwrap_or_default(), patterns));
    }
    let names = groups.iter().map(|(name, _): &(Arc<str>, _)| name.clone()).collect();
    let endpoints = Endpoints::new(groups).unwrap_or_else(|error| {
        if let Some(value) = value {
            value.error(error);
        }
        Endpoints::default()
    });
    (endpoints, names)
}

/// What rules can name.
struct RuleNames<'a, 'd> {
    endpoints: &'a [Arc<str>],
    plans: &'a Plans,
    overrides: &'a Overrides<'d>,
    responses: &'a Responses,
    /// Attributes that rules have named so far.
    attributes: Vec<Arc<str>>,
}

/// Index of a name, or a mistake that says what the known ones are.
fn index_of(name: &str, known: &[Arc<str>], kind: &str, error: impl FnOnce(String)) -> Option<usize> {
    let index = known.iter().position(|known| &**known == name);
    if index.is_none() {
        let mut names: Vec<&str> = known.iter().map(|name| &**name).filter(|name| !name.is_empty()).collect();
        let hint = match nearest(name, &names) {
            Some(near) => format!("did you mean \"{near}\"?"),
            None if names.is_empty() => "none is declared".into(),
            None => {
                names.truncate(20);
                format!("declared are {}", names.join(", "))
            }
        };
        error(format!("there is no {kind} \"{name}\": {hint}"));
    }
    index
}

fn mode(value: Option<&Value<'_>>) -> EnforcementMode {
    const MODES: &[EnforcementMode] = &[EnforcementMode::Enforce, EnforcementMode::Shadow, EnforcementMode::Off];
    let words: Vec<_> = MODES.iter().map(|mode| (mode.as_str(), *mode)).collect();
    value.and_then(|value| value.one_of(&words)).unwrap_or(EnforcementMode::Enforce)
}

/// `None` when the rule cannot stand; the mistakes are in the context.
fn rule(raw: &RawRule<'_>, names: &mut RuleNames<'_, '_>, ids: &mut Names) -> Option<Rule> {
    let id = ids.take(raw.id.as_ref(), &raw.place, "id");
    let scope = required(raw.scope.as_ref(), &raw.place, "scope").and_then(|value| scope(value, &mut names.attributes));
    let endpoint = raw.endpoint.as_ref().and_then(|value| {
        let name = value.text("the name of an endpoint group")?;
        index_of(name, names.endpoints, "endpoint group", |message| value.error(message))
    });
    let window = required(raw.window.as_ref(), &raw.place, "window").and_then(window_us);
    if let Some(value) = &raw.precision
        && !value.is_later(&["leased", "strict", "local"])
    {
        value.one_of(&[("async", ())]);
    }
    let shape = Shape::read(raw, window);
    let cost = raw.cost.as_ref().and_then(|value| value.within(1..=MAX_CEILING)).unwrap_or(1);
    let response = raw.response.as_ref().and_then(|value| names.responses.of_rule(value));
    let adaptive = raw.adaptive.as_ref().and_then(|value| adaptive::read(value, shape.burst_factor));
    let limits = limits::limits(raw, names.plans, names.overrides, &shape, cost)?;
    if let (Some(value), Some(adaptive), Some(_)) = (&raw.adaptive, &adaptive, window) {
        let all = std::iter::once(&limits.own).chain(limits.plans.values()).chain(limits.clients.values());
        adaptive::check(value, adaptive, all, cost);
    }
    let matching = raw.r#match.as_ref().and_then(|value| value.one_of(Matching::ALL)).unwrap_or_default();
    Some(Rule {
        id: id?,
        scope: scope?,
        endpoint,
        matching,
        window_us: window?,
        burst_factor: shape.burst_factor,
        limit: limits.own,
        plans: limits.plans,
        overrides: limits.clients,
        cost,
        mode: mode(raw.mode.as_ref()),
        response,
        adaptive,
    })
}

/// Most attributes that rules can name.
const MAX_ATTRIBUTES: usize = 64;

fn scope(value: &Value<'_>, attributes: &mut Vec<Arc<str>>) -> Option<Scope> {
    if let Some(name) = value.as_str().and_then(|text| text.strip_prefix("attribute:")) {
        return attribute(value, name, attributes);
    }
    let text = value.text("a word")?;
    let found = Scope::ALL.iter().find(|scope| scope.as_str() == text).copied();
    if found.is_none() {
        let words: Vec<_> = Scope::ALL.iter().map(|scope| format!("\"{}\"", scope.as_str())).collect();
        value.error(format_args!("\"{text}\" is not one of {}, \"attribute:NAME\"", words.join(", ")));
    }
    found
}

fn attribute(value: &Value<'_>, name: &str, attributes: &mut Vec<Arc<str>>) -> Option<Scope> {
    if let Err(error) = identifier(name) {
        value.error(format_args!("the name of the attribute {error}"));
        return None;
    }
    let known = attributes.iter().position(|known| **known == *name);
    let index = known.unwrap_or_else(|| {
        attributes.push(name.into());
        attributes.len() - 1
    });
    if index >= MAX_ATTRIBUTES {
        value.error(format_args!("rules name more than {MAX_ATTRIBUTES} attributes"));
    }
    u16::try_from(index).ok().map(Scope::Attribute)
}

fn window_us(value: &Value<'_>) -> Option<u64> {
    let window = value.parsed("a duration such as \"1m\"", units::duration)?;
    if !(MIN_WINDOW..=MAX_WINDOW).contains(&window) {
        value.error("a window is at least 1 ms and at most 366 days");
        return None;
    }
    if window.subsec_nanos() % 1000 != 0 {
        value.error("a window is a whole number of microseconds");
        return None;
    }
    u64::try_from(window.as_micros()).ok()
}

fn burst_factor(value: &Value<'_>) -> Option<BurstFactor> {
    // The text as written: a binary floating-point number is not what it says.
    let text = value.as_number().or_else(|| value.as_str());
    let thousandths = text.and_then(units::thousandths).and_then(|thousandths| u32::try_from(thousandths).ok());
    let factor = thousandths.and_then(BurstFactor::from_thousandths);
    if factor.is_none() {
        value.error("is not a number from 1 to 1000 with at most three decimals");
    }
    factor
}

//! Second stage of reading a policy: what the fields mean, with every name resolved.

mod shape;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt::Display,
    path::Path,
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use limiter_common::{
    bucket::Bucket,
    quota::{Quota, QuotaError, Rate},
    rule::EnforcementMode,
    schema::{MAX_ACL_PREFIXES, MAX_RULE_PREFIXES},
    sliding_window::BurstFactor,
    stats::RULE_SLOTS,
};

use self::shape::Shape;
use super::{
    Endpoints, Limit, PacketRuleSpec, Policy, Rule, Scope,
    endpoints::Pattern,
    raw::{RawEndpoint, RawPacketLimit, RawPacketRule, RawPlan, RawPolicy, RawRule},
};
use crate::config::{
    ConfigErrors, Context, Environment, Place, Table, Value, identifier, nearest,
    prefix::prefix,
    units::{self, Counted, RateSetting, UNLIMITED},
};

/// Rules of both kinds share the slots of the kernel's counters.
const MAX_RULES: usize = RULE_SLOTS as usize - 1;
/// Above this, Lua's numbers (and those of JSON readers) are not exact.
const MAX_CEILING: u64 = 1 << 53;
/// Below, the clocks of hosts and the sync interval blur the window; above, a counter is a yearly quota and more.
const MIN_WINDOW: Duration = Duration::from_millis(1);
const MAX_WINDOW: Duration = Duration::from_secs(366 * 24 * 3600);
/// An Ethernet frame of 1500 bytes with its header: a smaller burst of bytes would never let it pass.
const MIN_BYTE_BURST: u64 = 1514;
/// Least burst of bytes where none is given: receive offloads merge packets up to this size before a program in generic
/// mode sees them.
const DEFAULT_BYTE_BURST: u64 = 65_536;

pub(super) fn compile(path: &Path, text: &str) -> Result<Policy, ConfigErrors> {
    let context = Context::new(path, text, Environment::default());
    let document = context.parse(text)?;
    let raw = RawPolicy::read(Table::root(&context, &document));
    let policy = interpret(&raw);
    context.take_errors().or(Some(policy))
}

fn interpret(raw: &RawPolicy<'_>) -> Policy {
    let (allow, deny) = (acl(raw.allow.as_ref()), acl(raw.deny.as_ref()));
    let allowed = Allowed::new(allow.iter().map(|prefix| prefix.cidr));
    check_deny(&allowed, &deny);
    let plans = raw.plans.as_ref().map(plans).unwrap_or_default();
    let (endpoints, endpoint_names) = endpoints(raw.endpoints.as_ref());
    let mut ids = Names::new("a rule");
    let names = RuleNames { endpoints: &endpoint_names, plans: &plans };
    let rules = tables(raw.rules.as_ref()).map(RawRule::read);
    let rules: Vec<_> = rules.filter_map(|raw| rule(&raw, &names, &mut ids)).collect();
    let mut cidrs = HashMap::new();
    let packet_rules = tables(raw.packet_rules.as_ref()).map(RawPacketRule::read);
    let packet_rules: Vec<_> =
        packet_rules.filter_map(|raw| packet_rule(&raw, &mut ids, &mut cidrs, &allowed)).collect();
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
    Policy { rules, endpoints, plans, packet_rules, allow: prefixes(allow), deny: prefixes(deny) }
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

fn required<'v, 'd>(value: Option<&'v Value<'d>>, place: &Place<'_>, field: &str) -> Option<&'v Value<'d>> {
    if value.is_none() {
        place.error_in(field, "is missing");
    }
    value
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
        check_capacity(value, acl.iter().map(|prefix| prefix.cidr), MAX_ACL_PREFIXES);
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
fn check_deny(allowed: &Allowed, deny: &[AclPrefix<'_>]) {
    for AclPrefix { value, cidr } in deny {
        if let Some(around) = allowed.around(*cidr) {
            value.error(format_args!("{cidr} would never be denied: allow has {around}, and allow wins"));
        }
    }
}

/// Allow prefixes, to be found by what they contain.
struct Allowed {
    prefixes: HashSet<IpNet>,
    /// The lengths that any of them has, the longest first: there are few, and a search need not try others.
    lengths: Vec<u8>,
}

impl Allowed {
    fn new(prefixes: impl Iterator<Item = IpNet>) -> Self {
        let prefixes: HashSet<_> = prefixes.collect();
        let lengths: BTreeSet<u8> = prefixes.iter().map(IpNet::prefix_len).collect();
        Self { prefixes, lengths: lengths.into_iter().rev().collect() }
    }

    /// The longest that contains all of `cidr`.
    fn around(&self, cidr: IpNet) -> Option<IpNet> {
        let lengths = self.lengths.iter().filter(|len| **len <= cidr.prefix_len());
        let wider = lengths.filter_map(|len| Some(IpNet::new(cidr.addr(), *len).ok()?.trunc()));
        wider.into_iter().find(|net| self.prefixes.contains(net))
    }
}

fn plans(value: &Value<'_>) -> Vec<Arc<str>> {
    let mut names = Vec::new();
    for (name, plan) in value.table().map(Table::named).unwrap_or_default() {
        if let Err(error) = identifier(name) {
            plan.error(error);
        }
        if let Some(table) = plan.table() {
            let raw = RawPlan::read(table);
            if let Some(description) = &raw.description {
                description.text("text");
            }
        }
        names.push(name.into());
    }
    names
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
struct RuleNames<'a> {
    endpoints: &'a [Arc<str>],
    plans: &'a [Arc<str>],
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
fn rule(raw: &RawRule<'_>, names: &RuleNames<'_>, ids: &mut Names) -> Option<Rule> {
    let id = ids.take(raw.id.as_ref(), &raw.place, "id");
    let scope = required(raw.scope.as_ref(), &raw.place, "scope").and_then(scope);
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
    let (limit, plans) = limits(raw, names, &shape, cost)?;
    Some(Rule {
        id: id?,
        scope: scope?,
        endpoint,
        window_us: window?,
        burst_factor: shape.burst_factor,
        limit,
        plans,
        cost,
        mode: mode(raw.mode.as_ref()),
    })
}

fn scope(value: &Value<'_>) -> Option<Scope> {
    let words: Vec<_> = Scope::ALL.iter().map(|scope| (scope.as_str(), *scope)).collect();
    value.one_of(&words)
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

/// The rule's own limit and those by plan.
fn limits(
    raw: &RawRule<'_>,
    names: &RuleNames<'_>,
    shape: &Shape,
    cost: u64,
) -> Option<(Limit, BTreeMap<usize, Limit>)> {
    let own = raw.limit.as_ref().map(|value| limit(value, shape, cost));
    let mut plans = BTreeMap::new();
    let mut is_whole = !matches!(own, Some(None));
    for (name, value) in raw.plans.as_ref().and_then(Value::table).map(Table::named).unwrap_or_default() {
        let plan = index_of(name, names.plans, "plan", |message| value.error(message));
        match (plan, limit(&value, shape, cost)) {
            (Some(plan), Some(limit)) => drop(plans.insert(plan, limit)),
            (None, _) | (_, None) => is_whole = false,
        }
    }
    if !is_whole {
        return None;
    }
    if let Some(Some(own)) = own {
        return Some((own, plans));
    }
    let missing = names.plans.iter().enumerate().filter(|(index, _)| !plans.contains_key(index));
    let missing: Vec<&str> = missing.map(|(_, name)| &**name).collect();
    // Requests without a plan get the strictest limit that any plan has.
    let strictest = plans.values().copied().min_by_key(|limit| match limit {
        // Of queues of one length, the one that moves most slowly.
        Limit::Limited(algorithm) => {
            let interval_ns = algorithm.bucket().map_or(0, Bucket::interval_ns);
            (false, algorithm.ceiling(), u64::MAX - interval_ns)
        }
        Limit::Unlimited => (true, 0, 0),
    });
    match strictest {
        Some(strictest) if missing.is_empty() => Some((strictest, plans)),
        Some(_) => {
            let missing = missing.join(", ");
            raw.place.error_in("plans", format_args!("has no limit for {missing}: add it, or a limit for all others"));
            None
        }
        None => {
            raw.place.error_in("limit", "is missing, and there are no plans with limits either");
            None
        }
    }
}

fn limit(value: &Value<'_>, shape: &Shape, cost: u64) -> Option<Limit> {
    if value.as_str() == Some(UNLIMITED) {
        return Some(Limit::Unlimited);
    }
    if !value.is_integer() {
        value.error("is neither a whole number nor \"unlimited\"");
        return None;
    }
    let limit = value.unsigned()?;
    if limit == 0 {
        value.error("limit is 0: use \"unlimited\" or remove the entry");
        return None;
    }
    let Some(most) = shape.burst_factor.ceiling(limit).filter(|ceiling| *ceiling <= MAX_CEILING) else {
        value.error(format_args!("times the burst factor it is above 2^53 ({MAX_CEILING}): use \"unlimited\""));
        return None;
    };
    // Where the window is a mistake already, there is no rule to make.
    let Some(window_us) = shape.window_us else { return Some(Limit::Unlimited) };
    match shape.algorithm(limit, window_us, most) {
        Ok(algorithm) if cost > algorithm.ceiling() => {
            let most = algorithm.ceiling();
            value.error(format_args!("no request could ever pass: each costs {cost}, and the most is {most}"));
            None
        }
        Ok(algorithm) => Some(Limit::Limited(algorithm)),
        Err(error) => {
            value.error(error);
            None
        }
    }
}

fn packet_rule(
    raw: &RawPacketRule<'_>,
    ids: &mut Names,
    cidrs: &mut HashMap<IpNet, Arc<str>>,
    allowed: &Allowed,
) -> Option<PacketRuleSpec> {
    let id = ids.take(raw.id.as_ref(), &raw.place, "id");
    let own = required(raw.cidr.as_ref(), &raw.place, "cidr").and_then(|value| {
        let prefixes = one_or_more(value)?;
        let own = prefixes.iter().filter_map(|value| packet_rule_prefix(value, id.as_ref(), cidrs, allowed));
        let own: Vec<_> = own.collect();
        (!own.is_empty()).then_some(own)
    });
    let limits =
        [(&raw.packets, Counted::Events), (&raw.bytes, Counted::Bytes), (&raw.new_connections, Counted::Events)];
    if limits.iter().all(|(limit, _)| limit.is_none()) {
        raw.place.error("limits nothing: give packets, bytes or new_connections, or say \"unlimited\"");
    }
    let [packets, bytes, new_connections] =
        limits.map(|(limit, counted)| limit.as_ref().and_then(|limit| packet_limit(limit, counted)));
    Some(PacketRuleSpec { id: id?, cidrs: own?, packets, bytes, new_connections, mode: mode(raw.mode.as_ref()) })
}

/// A value that stands for itself, or those of a list.
fn one_or_more<'d>(value: &Value<'d>) -> Option<Vec<Value<'d>>> {
    if value.as_str().is_some() {
        return Some(vec![value.clone()]);
    }
    let elements = value.list_or("a prefix, or a list of prefixes")?;
    if elements.is_empty() {
        value.error("is empty, so nothing would ever be limited: name a prefix, or remove the rule");
    }
    Some(elements)
}

fn packet_rule_prefix(
    value: &Value<'_>,
    id: Option<&Arc<str>>,
    cidrs: &mut HashMap<IpNet, Arc<str>>,
    allowed: &Allowed,
) -> Option<IpNet> {
    let cidr = value.parsed("a prefix", prefix)?;
    if let Some(id) = id
        && let Some(other) = cidrs.insert(cidr, Arc::clone(id))
    {
        if other == *id {
            value.error(format_args!("{cidr} is named twice"));
        } else {
            value.error(format_args!("the packet rules \"{other}\" and \"{id}\" both have the prefix {cidr}"));
        }
    }
    if let Some(around) = allowed.around(cidr) {
        value.error(format_args!("{cidr} would never be limited: allow has {around}, and allow wins"));
    }
    Some(cidr)
}

/// `None` for "unlimited", and for a mistake.
fn packet_limit(value: &Value<'_>, counted: Counted) -> Option<Quota> {
    if value.as_str() == Some(UNLIMITED) {
        return None;
    }
    let raw = RawPacketLimit::read(value.table()?);
    let rate = required(raw.rate.as_ref(), &raw.place, "rate")
        .and_then(|rate| rate.parsed("a rate such as \"100/s\"", |text| units::rate(text, counted)));
    let burst = raw.burst.as_ref().map(|burst| packet_burst(burst, counted));
    match (rate?, burst) {
        (RateSetting::Unlimited, Some(_)) => {
            raw.place.error_in("burst", "has no meaning where the rate is \"unlimited\"");
            None
        }
        (RateSetting::Unlimited, None) => None,
        (RateSetting::Rate(_), Some(None)) => None,
        (RateSetting::Rate(rate), Some(Some(burst))) => checked(Quota { rate, burst }, &raw.place),
        (RateSetting::Rate(rate), None) => checked(Quota { rate, burst: default_burst(rate, counted) }, &raw.place),
    }
}

/// What a second brings, and at least one packet of any size.
fn default_burst(rate: Rate, counted: Counted) -> u64 {
    let second = u128::from(rate.count) * 1_000_000_000 / u128::from(rate.per_ns);
    let least = match counted {
        Counted::Events => 1,
        Counted::Bytes => DEFAULT_BYTE_BURST,
    };
    u64::try_from(second).unwrap_or(u64::MAX).max(least)
}

fn packet_burst(value: &Value<'_>, counted: Counted) -> Option<u64> {
    let burst = match counted {
        Counted::Bytes if !value.is_integer() => value.parsed("a size such as \"64KiB\"", units::size)?,
        Counted::Bytes | Counted::Events => value.unsigned()?,
    };
    if burst == 0 {
        value.error(QuotaError::ZeroBurst);
        return None;
    }
    if counted == Counted::Bytes && burst < MIN_BYTE_BURST {
        value.error(format_args!("{burst} bytes never let a packet of full size pass: use at least {MIN_BYTE_BURST}"));
        return None;
    }
    Some(burst)
}

fn checked(quota: Quota, place: &Place<'_>) -> Option<Quota> {
    let mistake = |field: &str, error: &dyn Display| place.error_in(field, error);
    match quota.params() {
        Ok(_) => return Some(quota),
        Err(error @ (QuotaError::ZeroRate | QuotaError::TooFast)) => mistake("rate", &error),
        Err(error @ (QuotaError::ZeroBurst | QuotaError::TooSlow)) => mistake("burst", &error),
    }
    None
}

//! What one policy has that another has not, in the words of the policy file.
//!
//! Both are written down as names with fields first, with nothing left that is known by its index, and then the two texts
//! are compared. What is inherited is written out, so a changed plan shows in every rule that it changes.

use std::{collections::BTreeMap, time::Duration};

use limiter_common::{quota::Quota, sliding_window::BurstFactor};
use serde::Serialize;

use super::{BypassKind, Limit, Matching, PacketRuleSpec, Policy, Rule, Scope};
use crate::{identity::api_key::id_to_hex, store::Algorithm};

/// What a policy file holds, by the name of its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Rule,
    Endpoint,
    Plan,
    Bypass,
    PacketRule,
    Allow,
    Deny,
}

impl Kind {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Rule => "rule",
            Self::Endpoint => "endpoint",
            Self::Plan => "plan",
            Self::Bypass => "bypass",
            Self::PacketRule => "packet rule",
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Added,
    Removed,
    Changed,
}

/// One thing that is not what it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Entry {
    pub kind: Kind,
    pub name: String,
    pub change: Change,
    /// Of what has changed.
    pub fields: Vec<FieldChange>,
    /// Of a rule that is changed or removed, the counters that the agent has of it; `None` without an agent.
    pub clients: Option<u64>,
}

/// `None` where the field is not there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FieldChange {
    pub field: String,
    pub before: Option<String>,
    pub after: Option<String>,
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sign = match self.change {
            Change::Added => '+',
            Change::Removed => '-',
            Change::Changed => '~',
        };
        write!(f, "{sign} {} {}", self.kind.as_str(), self.name)?;
        match self.clients {
            None => {}
            Some(1) => write!(f, "  (1 known client)")?,
            Some(clients) => write!(f, "  ({clients} known clients)")?,
        }
        for FieldChange { field, before, after } in &self.fields {
            let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".to_owned());
            write!(f, "\n    {field}: {} -> {}", shown(before), shown(after))?;
        }
        Ok(())
    }
}

type Fields = BTreeMap<String, String>;

/// What has to change in `before` to make `after` of it.
pub fn difference(before: &Policy, after: &Policy) -> Vec<Entry> {
    let (before, after) = (written_down(before), written_down(after));
    let mut entries = Vec::new();
    let entry = |(kind, name): &(Kind, String), change, fields| Entry {
        kind: *kind,
        name: name.clone(),
        change,
        fields,
        clients: None,
    };
    for (key, fields) in &before {
        match after.get(key) {
            None => entries.push(entry(key, Change::Removed, Vec::new())),
            Some(now) if now != fields => entries.push(entry(key, Change::Changed, changed_fields(fields, now))),
            Some(_) => {}
        }
    }
    let added = after.keys().filter(|key| !before.contains_key(*key));
    entries.extend(added.map(|key| entry(key, Change::Added, Vec::new())));
    entries.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
    entries
}

fn changed_fields(before: &Fields, after: &Fields) -> Vec<FieldChange> {
    let mut names: Vec<&String> = before.keys().chain(after.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let names = names.into_iter().filter(|name| before.get(*name) != after.get(*name));
    let change = |field: &String| FieldChange {
        field: field.clone(),
        before: before.get(field).cloned(),
        after: after.get(field).cloned(),
    };
    names.map(change).collect()
}

fn written_down(policy: &Policy) -> BTreeMap<(Kind, String), Fields> {
    // A new part of a policy does not compile until it is decided how it is written down.
    let Policy { rules, endpoints, plans, plan_parents, attributes: _, bypass, packet_rules, allow, deny, text: _ } =
        policy;
    let mut all = BTreeMap::new();
    for rule in rules {
        all.insert((Kind::Rule, rule.id.to_string()), fields_of_rule(policy, rule));
    }
    for (name, patterns) in endpoints.groups() {
        let match_ = sorted(patterns.iter().map(ToString::to_string));
        all.insert((Kind::Endpoint, name.to_string()), Fields::from([("match".to_owned(), match_)]));
    }
    for (index, plan) in plans.iter().enumerate() {
        let parent = plan_parents.get(index).copied().flatten().map(|parent| plans[parent].to_string());
        let inherits = parent.map(|parent| ("inherits".to_owned(), parent));
        all.insert((Kind::Plan, plan.to_string()), inherits.into_iter().collect());
    }
    let mut item = |kind, name: String| drop(all.insert((kind, name), Fields::new()));
    let bypass_item = |kind: BypassKind, what: &dyn std::fmt::Display| format!("{} {what}", kind.as_str());
    bypass.cidrs.iter().for_each(|cidr| item(Kind::Bypass, bypass_item(BypassKind::Cidr, &cidr)));
    bypass.key_ids.iter().for_each(|id| item(Kind::Bypass, bypass_item(BypassKind::KeyId, &id_to_hex(*id))));
    let paths = bypass.paths.groups().flat_map(|(_, patterns)| patterns);
    paths.for_each(|path| item(Kind::Bypass, bypass_item(BypassKind::Path, path)));
    allow.iter().for_each(|prefix| item(Kind::Allow, prefix.to_string()));
    deny.iter().for_each(|prefix| item(Kind::Deny, prefix.to_string()));
    for rule in packet_rules {
        all.insert((Kind::PacketRule, rule.id.to_string()), fields_of_packet_rule(rule));
    }
    all
}

fn sorted(texts: impl Iterator<Item = String>) -> String {
    let mut texts: Vec<String> = texts.collect();
    texts.sort_unstable();
    texts.join(", ")
}

fn fields_of_rule(policy: &Policy, rule: &Rule) -> Fields {
    let Rule {
        id: _,
        scope,
        endpoint,
        matching,
        window_us,
        burst_factor,
        limit,
        plans,
        overrides,
        cost,
        mode,
        response,
        adaptive,
    } = rule;
    let scope = if let Scope::Attribute(index) = scope {
        let name = policy.attributes.get(usize::from(*index));
        format!("attribute:{}", name.map_or("", |name| &**name))
    } else {
        scope.as_str().to_owned()
    };
    let matching = Matching::ALL.iter().find(|(_, known)| known == matching).map_or("", |(word, _)| *word);
    let thousandths = burst_factor.thousandths();
    let mut fields = Fields::from(
        [
            ("scope", scope),
            ("match", matching.to_owned()),
            ("window", duration_us(*window_us)),
            ("burst_factor", format!("{}.{:03}", thousandths / 1000, thousandths % 1000)),
            ("limit", limit_text(limit, *burst_factor)),
            ("cost", cost.to_string()),
            ("mode", mode.as_str().to_owned()),
        ]
        .map(|(field, value)| (field.to_owned(), value)),
    );
    if let Some(name) = endpoint.and_then(|endpoint| policy.endpoints.name(endpoint)) {
        // With its patterns: what they match is what the rule is about.
        let patterns = policy.endpoints.groups().find(|(group, _)| *group == name).map(|(_, patterns)| patterns);
        let patterns = sorted(patterns.unwrap_or_default().iter().map(ToString::to_string));
        fields.insert("endpoint".to_owned(), format!("{name} [{patterns}]"));
    }
    if let Some(response) = response {
        fields.insert("response".to_owned(), format!("{response:?}"));
    }
    if let Some(adaptive) = adaptive {
        fields.insert("adaptive".to_owned(), format!("{adaptive:?}"));
    }
    for (plan, limit) in plans {
        fields.insert(format!("plans.{}", policy.plans[*plan]), limit_text(limit, *burst_factor));
    }
    for (client, limit) in overrides {
        fields.insert(format!("overrides.{client}"), limit_text(limit, *burst_factor));
    }
    fields
}

fn limit_text(limit: &Limit, burst_factor: BurstFactor) -> String {
    let Limit::Limited(algorithm) = limit else { return "unlimited".to_owned() };
    let ceiling = algorithm.ceiling();
    let most = match burst_factor.thousandths() {
        1000 => ceiling.to_string(),
        _ => format!("{ceiling} (with burst_factor)"),
    };
    let every = |interval_ns| format!("{:?}", Duration::from_nanos(interval_ns));
    match algorithm {
        Algorithm::SlidingWindow(_) => format!("{most} by sliding_window"),
        Algorithm::FixedWindow(_) => format!("{most} by fixed_window"),
        Algorithm::SlidingLog(_) => format!("{most} by sliding_log"),
        Algorithm::TokenBucket { bucket, .. } => {
            format!("{most} by token_bucket, one more every {}", every(bucket.interval_ns()))
        }
        Algorithm::LeakyBucket { bucket, .. } => {
            let (interval, longest) = (every(bucket.bucket().interval_ns()), duration_us(bucket.max_delay_us()));
            format!("one every {interval} by leaky_bucket, {} wait for at most {longest}", ceiling.saturating_sub(1))
        }
    }
}

fn duration_us(us: u64) -> String {
    format!("{:?}", Duration::from_micros(us))
}

fn fields_of_packet_rule(rule: &PacketRuleSpec) -> Fields {
    let PacketRuleSpec { id: _, cidrs, packets, bytes, new_connections, mode } = rule;
    let quota = |quota: &Option<Quota>| match quota {
        None => "unlimited".to_owned(),
        Some(Quota { rate, burst }) => {
            format!("{} in {:?}, {burst} at once", rate.count, Duration::from_nanos(rate.per_ns))
        }
    };
    let fields = [
        ("cidr", sorted(cidrs.iter().map(ToString::to_string))),
        ("packets", quota(packets)),
        ("bytes", quota(bytes)),
        ("new_connections", quota(new_connections)),
        ("mode", mode.as_str().to_owned()),
    ];
    fields.map(|(field, value)| (field.to_owned(), value)).into()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const BASE: &str = r#"
allow = ["192.0.2.0/24"]
[[endpoints]]
name = "search"
match = ["GET /a", "/b"]
[plans.free]
[plans.pro]
[[rules]]
id = "r"
scope = "user"
endpoint = "search"
limit = 10
plans = { free = 5 }
window = "1m"
[[packet_rules]]
id = "p"
cidr = ["0.0.0.0/0", "::/0"]
packets = { rate = "100/s" }
"#;

    fn policy(text: &str) -> Policy {
        Policy::parse(Path::new("/policy.toml"), text).expect(text)
    }

    /// What is shown when `from` becomes `to` in the policy.
    fn shown(from: &str, to: &str) -> String {
        assert!(BASE.contains(from), "{from}");
        let entries = difference(&policy(BASE), &policy(&BASE.replacen(from, to, 1)));
        entries.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn each_change_is_named_in_the_words_of_the_file() {
        for (from, to, expected) in [
            ("limit = 10", "limit = 10", ""),
            // Another order, another spelling, the default written down.
            ("\"GET /a\", \"/b\"", "\"/b/\", \"get //a\"", ""),
            ("\"0.0.0.0/0\", \"::/0\"", "\"::/0\", \"0.0.0.0/0\"", ""),
            ("window = \"1m\"", "window = \"60s\"\nmatch = \"all\"\nmode = \"enforce\"\ncost = 1", ""),
            ("limit = 10", "limit = 12", "~ rule r\n    limit: 10 by sliding_window -> 12 by sliding_window"),
            (
                "limit = 10",
                "limit = 10\nalgorithm = \"token_bucket\"",
                "~ rule r\n    limit: 10 by sliding_window -> 10 by token_bucket, one more every 6s\n    \
                 plans.free: 5 by sliding_window -> 5 by token_bucket, one more every 12s",
            ),
            (
                "[plans.pro]",
                "[plans.pro]\ninherits = \"free\"",
                "~ rule r\n    plans.pro: none -> 5 by sliding_window\n~ plan pro\n    inherits: none -> free",
            ),
            (
                "[[packet_rules]]",
                "[[overrides]]\nclient = \"acme\"\nrule = \"r\"\nlimit = \"unlimited\"\n[[packet_rules]]",
                "~ rule r\n    overrides.acme: none -> unlimited",
            ),
            (
                "\"/b\"",
                "\"/c\"",
                "~ rule r\n    endpoint: search [/b, GET /a] -> search [/c, GET /a]\n~ endpoint search\n    \
                 match: /b, GET /a -> /c, GET /a",
            ),
            ("scope = \"user\"", "scope = \"attribute:tenant\"", "~ rule r\n    scope: user -> attribute:tenant"),
            ("id = \"r\"", "id = \"q\"", "+ rule q\n- rule r"),
            ("[plans.pro]", "", "- plan pro"),
            ("window = \"1m\"", "window = \"1m\"\nmode = \"off\"", "~ rule r\n    mode: enforce -> off"),
            ("192.0.2.0/24", "192.0.3.0/24", "- allow 192.0.2.0/24\n+ allow 192.0.3.0/24"),
            (
                "[plans.free]",
                "[[bypass]]\npath = \"/healthz\"\n[[bypass]]\ncidr = \"10.0.0.0/8\"\n[plans.free]",
                "+ bypass cidr 10.0.0.0/8\n+ bypass path /healthz",
            ),
            (
                "\"100/s\"",
                "\"100/s\", burst = 7",
                "~ packet rule p\n    packets: 100 in 1s, 100 at once -> 100 in 1s, 7 at once",
            ),
        ] {
            let shown = shown(from, to);
            let mut lines: Vec<&str> = shown.lines().collect();
            let mut expected: Vec<&str> = expected.lines().collect();
            // What is added, removed and changed of one kind is in the order of the names.
            lines.sort_unstable();
            expected.sort_unstable();
            assert_eq!(lines, expected, "{from} -> {to}");
        }
    }

    #[test]
    fn nothing_differs_from_itself() {
        let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/policy.toml");
        let example = Policy::load(Path::new(example)).unwrap();
        assert_eq!(difference(&example, &example), []);
        let all = difference(&Policy::default(), &example);
        assert!(all.len() > 15 && all.iter().all(|entry| entry.change == Change::Added), "{all:?}");
    }
}

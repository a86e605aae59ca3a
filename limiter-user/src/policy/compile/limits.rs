//! Limits: a rule's own, those of plans and what they inherit, those of single clients.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use foldhash::fast::RandomState;
use limiter_common::bucket::Bucket;

use super::{MAX_CEILING, index_of, required, shape::Shape, tables};
use crate::{
    config::{Table, Value, identifier, units::UNLIMITED},
    policy::{
        Limit,
        raw::{RawOverride, RawPlan, RawRule},
    },
};

/// Longest client id, in bytes: as long as a user that a program can name.
const MAX_CLIENT: usize = 256;

/// The declared plans, in the order of the file.
#[derive(Debug, Default)]
pub(super) struct Plans {
    pub(super) names: Vec<Arc<str>>,
    /// By index, the plan whose limits hold where it has none of its own. Without cycles.
    pub(super) parents: Vec<Option<usize>>,
}

impl Plans {
    pub(super) fn read(value: &Value<'_>) -> Self {
        let mut names: Vec<Arc<str>> = Vec::new();
        let mut inherits = Vec::new();
        for (name, plan) in value.table().map(Table::named).unwrap_or_default() {
            if let Err(error) = identifier(name) {
                plan.error(error);
            }
            let raw = plan.table().map(RawPlan::read);
            if let Some(description) = raw.as_ref().and_then(|raw| raw.description.as_ref()) {
                description.text("text");
            }
            names.push(name.into());
            inherits.push(raw.and_then(|raw| raw.inherits));
        }
        let parent = |value: &Value<'_>| {
            let name = value.text("the name of a plan")?;
            index_of(name, &names, "plan", |message| value.error(message))
        };
        let mut parents: Vec<Option<usize>> = inherits.iter().map(|value| value.as_ref().and_then(parent)).collect();
        for plan in 0..names.len() {
            let mut line = vec![plan];
            while let Some(next) = parents[line[line.len() - 1]].filter(|next| !line[1..].contains(next)) {
                line.push(next);
                if next == plan {
                    break;
                }
            }
            if line.len() > 1 && line.last() == Some(&plan) {
                let line: Vec<&str> = line.iter().map(|plan| &*names[*plan]).collect();
                if let Some(value) = &inherits[plan] {
                    value.error(format_args!("the plan inherits from itself: {}", line.join(" -> ")));
                }
                // Said once for each cycle.
                parents[plan] = None;
            }
        }
        Self { names, parents }
    }

    /// The plan itself, then what it inherits from, the nearest first.
    fn line(&self, plan: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(plan), |plan| self.parents[*plan])
    }
}

/// `[[overrides]]` by the rule that they name.
#[derive(Debug, Default)]
pub(super) struct Overrides<'d> {
    by_rule: HashMap<String, Vec<(Arc<str>, Value<'d>)>>,
    /// Where each rule is named.
    rules: Vec<Value<'d>>,
}

impl<'d> Overrides<'d> {
    pub(super) fn read(value: Option<&Value<'d>>) -> Self {
        let mut overrides = Self::default();
        let mut seen = HashSet::new();
        for table in tables(value) {
            let raw = RawOverride::read(table);
            let client = required(raw.client.as_ref(), &raw.place, "client").and_then(|value| {
                value.parsed("the id of a client", |text| match text.len() {
                    1..=MAX_CLIENT => Ok(Arc::<str>::from(text)),
                    _ => Err(format!("a client has 1 to {MAX_CLIENT} bytes")),
                })
            });
            let rule = required(raw.rule.as_ref(), &raw.place, "rule");
            let limit = required(raw.limit.as_ref(), &raw.place, "limit");
            let name = rule.and_then(|rule| rule.text("the id of a rule"));
            if let (Some(client), Some(rule), Some(name)) = (client, rule, name) {
                if !seen.insert((Arc::clone(&client), name.to_owned())) {
                    rule.error(format_args!("the client \"{client}\" has a limit for \"{name}\" above already"));
                }
                overrides.rules.push(rule.clone());
                if let Some(limit) = limit {
                    overrides.by_rule.entry(name.to_owned()).or_default().push((client, limit.clone()));
                }
            }
        }
        overrides
    }

    /// Reports overrides of rules that do not exist.
    pub(super) fn check(&self, rules: &[Arc<str>]) {
        for value in &self.rules {
            if let Some(name) = value.as_str() {
                index_of(name, rules, "rule", |message| value.error(message));
            }
        }
    }
}

/// Every limit of one rule.
#[derive(Debug)]
pub(super) struct Limits {
    pub(super) own: Limit,
    pub(super) plans: BTreeMap<usize, Limit>,
    pub(super) clients: HashMap<Arc<str>, Limit, RandomState>,
}

/// `None` where one of them is a mistake.
pub(super) fn limits(
    raw: &RawRule<'_>,
    plans: &Plans,
    overrides: &Overrides<'_>,
    shape: &Shape,
    cost: u64,
) -> Option<Limits> {
    let own = raw.limit.as_ref().map(|value| limit(value, shape, cost));
    let mut given = BTreeMap::new();
    let mut is_whole = !matches!(own, Some(None));
    for (name, value) in raw.plans.as_ref().and_then(Value::table).map(Table::named).unwrap_or_default() {
        let plan = index_of(name, &plans.names, "plan", |message| value.error(message));
        match (plan, limit(&value, shape, cost)) {
            (Some(plan), Some(limit)) => drop(given.insert(plan, limit)),
            (None, _) | (_, None) => is_whole = false,
        }
    }
    let mut clients = HashMap::default();
    let overrides = raw.id.as_ref().and_then(Value::as_str).and_then(|id| overrides.by_rule.get(id));
    for (client, value) in overrides.into_iter().flatten() {
        match limit(value, shape, cost) {
            Some(limit) => drop(clients.insert(Arc::clone(client), limit)),
            None => is_whole = false,
        }
    }
    if !is_whole {
        return None;
    }
    let inherited = |plan| plans.line(plan).find_map(|plan| given.get(&plan)).map(|limit| (plan, *limit));
    let by_plan: BTreeMap<usize, Limit> = (0..plans.names.len()).filter_map(inherited).collect();
    let own = match own.flatten() {
        Some(own) => own,
        None => strictest(raw, plans, &by_plan)?,
    };
    Some(Limits { own, plans: by_plan, clients })
}

/// Without a limit of the rule's own, requests without a plan get the strictest that any plan has.
fn strictest(raw: &RawRule<'_>, plans: &Plans, limits: &BTreeMap<usize, Limit>) -> Option<Limit> {
    let missing = plans.names.iter().enumerate().filter(|(index, _)| !limits.contains_key(index));
    let missing: Vec<&str> = missing.map(|(_, name)| &**name).collect();
    let strictest = limits.values().copied().min_by_key(|limit| match limit {
        // Of queues of one length, the one that moves most slowly.
        Limit::Limited(algorithm) => {
            let interval_ns = algorithm.bucket().map_or(0, Bucket::interval_ns);
            (false, algorithm.ceiling(), u64::MAX - interval_ns)
        }
        Limit::Unlimited => (true, 0, 0),
    });
    match strictest {
        Some(_) if missing.is_empty() => {}
        Some(_) => {
            let missing = missing.join(", ");
            raw.place.error_in("plans", format_args!("has no limit for {missing}: add it, or a limit for all others"));
            return None;
        }
        None => raw.place.error_in("limit", "is missing, and there are no plans with limits either"),
    }
    strictest
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

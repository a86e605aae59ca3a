//! Holds the README's table of metrics against what a scrape shows.

use std::collections::BTreeSet;

use super::*;
use crate::{
    limiter::{CheckSource, Kind},
    policy::FailurePolicy,
};

/// Every part of a scrape, whatever is configured.
#[derive(Debug)]
struct Everything;

impl Source for Everything {
    fn snapshot(&self) -> Snapshot {
        let verdict = Verdict::all().next().expect("a verdict");
        Snapshot {
            packets: vec![(None, verdict, stats::Counter::default())],
            maps: vec![MapUsage { map: "STATS", entries: 1, capacity: 1 }],
            interfaces: vec![("eth0".into(), true)],
            events: vec![(EventClass::Sources, EventCounts::default())],
            memory: MemoryStats::default(),
            shares: vec![("r".into(), 1)],
            reports: [("a", 0), ("b", 0), ("c", 0)],
            files_not_in_force: [("a", false), ("b", false), ("c", false), ("d", false)],
            pressure: pressure::Reading { level: Some(1), latency_us: Some(1) },
            shared: Some(Shared {
                sync: SyncStats::default(),
                calls: CallStats::default(),
                shards: vec![Shard { name: "redis".into(), state: BreakerState::Closed }],
                breakers: BreakerCounts::default(),
                live_nodes: 1,
            }),
            overshoot_bounds: vec![("r".into(), 0)],
            leases: Some(LeaseStats::default()),
            keys: Some(FollowedState::default()),
            refused_credentials: vec![(["token", "expired"], 0)],
        }
    }
}

/// `name{label,label}` of every sample; of a histogram, without its parts.
fn scraped() -> BTreeSet<String> {
    let mut metrics = Metrics::new();
    metrics.register_source(Everything);
    let rule = metrics.rule("r");
    rule.count(Kind::Allowed, CheckSource::Memory);
    rule.count_failure(FailurePolicy::Local);
    drop(metrics.bypassed());
    metrics.pushed("reason", "ok");
    let text = metrics.encode().expect("a scrape");
    let histograms: Vec<_> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" histogram")).collect();
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let family = |sample: &str| {
        let (series, _value) = sample.rsplit_once(' ').expect("a value");
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let name =
            histograms.iter().find(|histogram| name.starts_with(**histogram)).map_or(name, |histogram| *histogram);
        let labels = labels.trim_end_matches('}').split(',').filter_map(|label| Some(label.split_once('=')?.0));
        let labels: Vec<_> = labels.filter(|label| *label != "le").collect();
        if labels.is_empty() { name.to_owned() } else { format!("{name}{{{}}}", labels.join(",")) }
    };
    samples.map(family).collect()
}

#[test]
fn the_readme_has_each_metric_and_no_other() {
    let readme = include_str!("../../../README.md");
    let table = readme.split_once("### Metrics\n").expect("the section").1;
    let table = table.split_once("\n### ").map_or(table, |(table, _)| table);
    // In the first column of its rows.
    let first_column =
        table.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" |")).map(|(first, _)| first);
    let documented: BTreeSet<String> = first_column
        .flat_map(|column| column.split('`'))
        .filter(|word| word.starts_with("limiter_"))
        .map(str::to_owned)
        .collect();
    let scraped = scraped();
    let missing: Vec<_> = scraped.difference(&documented).collect();
    let unknown: Vec<_> = documented.difference(&scraped).collect();
    assert!(missing.is_empty() && unknown.is_empty(), "not in the README: {missing:#?}; only there: {unknown:#?}");
    // And elsewhere in it none has another name.
    let names: BTreeSet<_> = scraped.iter().map(|family| family.split('{').next().unwrap_or_default()).collect();
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    for at in readme.match_indices("`limiter_").map(|(at, _)| at + 1) {
        let name = readme[at..].split(|c| !is_of_name(c)).next().unwrap_or_default();
        assert!(names.contains(name), "{name} is in the README and in no scrape");
    }
}

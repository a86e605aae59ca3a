//! What the maps take, and what there is.

use std::{
    fs,
    path::{Path, PathBuf},
};

use limiter_common::{
    schema::{Lifetime, MAPS, MapKind, MapSpec},
    stats::PER_CPU_SLOTS,
};

use super::{finding::Seen, host::Host};
use crate::{exit::Exit, policy::Policy};

const MB: u64 = 1_000_000;

pub(super) fn memory(host: &Host) -> Seen {
    let max_sources = host.config.as_ref().map(|config| config.xdp.max_sources);
    let policy = host.checked.as_ref().ok().map(|checked| &checked.policy);
    let Some(cpus) = possible_cpus() else { return Seen::unseen("/sys/devices/system/cpu/possible cannot be read") };
    let needed: u64 = MAPS.iter().map(|map| bytes(map, max_sources, policy, cpus)).sum();
    let Some(available) = available() else {
        return Seen::unseen(format!("the maps take {} MB; /proc/meminfo cannot be read", needed.div_ceil(MB)));
    };
    let max_sources = max_sources.unwrap_or(limiter_common::schema::DEFAULT_MAX_SOURCES);
    judge(needed, &available, max_sources)
}

fn judge(needed: u64, available: &Available, max_sources: u32) -> Seen {
    let found = format!(
        "the maps take {} MB with xdp.max_sources = {max_sources}; {} MB are available {}",
        needed.div_ceil(MB),
        available.bytes / MB,
        available.of
    );
    let remedy = || {
        let fitting = u64::from(max_sources) * (available.bytes / 4) / needed.max(1);
        format!("set xdp.max_sources = {}, or give the host more memory", fitting.max(1024))
    };
    if needed > available.bytes {
        Seen::error(Exit::Unavailable, found, remedy())
    } else if needed > available.bytes / 2 {
        Seen::warning(found, remedy())
    } else {
        Seen::ok(found)
    }
}

/// Memory of a map, as the kernel makes it: within a few percent.
fn bytes(map: &MapSpec, max_sources: Option<u32>, policy: Option<&Policy>, cpus: u32) -> u64 {
    /// Of `struct htab_elem`, and of a bucket.
    const HASH_ENTRY: u64 = 48;
    const HASH_BUCKET: u64 = 16;
    /// Of `struct lpm_trie_node`, before it is rounded up to what the allocator has.
    const TRIE_NODE: u64 = 40;
    let aligned = |size: u32| u64::from(size.next_multiple_of(8));
    let entries = match map.name {
        "BUCKETS_V4" | "BUCKETS_V6" => max_sources.unwrap_or(map.capacity),
        "RULES" => policy.map_or(0, |policy| saturating(policy.packet_rules.len())).max(1),
        // A stand-in of one entry.
        "MORE_STATS" if policy.is_none_or(|policy| policy.packet_rules.len() < PER_CPU_SLOTS as usize) => 1,
        _ => map.capacity,
    };
    let capacity = u64::from(entries);
    match map.kind {
        MapKind::Array => capacity * aligned(map.value_size),
        MapKind::PerCpuArray => capacity * (8 + aligned(map.value_size) * u64::from(cpus)),
        MapKind::Hash | MapKind::LruHash => {
            capacity * (HASH_ENTRY + aligned(map.key_size) + aligned(map.value_size))
                + u64::from(entries.next_power_of_two()) * HASH_BUCKET
        }
        // Nodes are made as prefixes are added, and between two of them there may be a third.
        MapKind::LpmTrie => {
            let prefixes = policy.map_or(0, |policy| prefixes(map.name, policy));
            prefixes * 2 * (TRIE_NODE + aligned(map.key_size) + aligned(map.value_size))
        }
    }
}

fn prefixes(map: &str, policy: &Policy) -> u64 {
    let is_ipv4 = map.ends_with("_V4");
    let count = |prefixes: &[ipnet::IpNet]| prefixes.iter().filter(|prefix| prefix.addr().is_ipv4() == is_ipv4).count();
    let count = match map.trim_end_matches("_V4").trim_end_matches("_V6") {
        "ALLOW" => count(&policy.allow),
        "DENY" => count(&policy.deny),
        _ => policy.packet_rules.iter().map(|rule| count(&rule.cidrs)).sum(),
    };
    u64::from(saturating(count))
}

fn saturating(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// What a per-CPU map has values for: also CPUs that are not there yet.
pub(super) fn possible_cpus() -> Option<u32> {
    parse_cpus(&fs::read_to_string("/sys/devices/system/cpu/possible").ok()?)
}

/// Counts a list such as `0-3,8-11`.
fn parse_cpus(list: &str) -> Option<u32> {
    let mut count = 0;
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        count += last.checked_sub(first)? + 1;
    }
    Some(count)
}

struct Available {
    bytes: u64,
    of: String,
}

/// The least of what the host and the control groups of this process have.
fn available() -> Option<Available> {
    let host =
        Available { bytes: mem_available(&fs::read_to_string("/proc/meminfo").ok()?)?, of: "on this host".into() };
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let groups = memory_groups(&groups).into_iter().filter_map(|group| left_in(&group));
    Some(groups.fold(host, |least, group| if group.bytes < least.bytes { group } else { least }))
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Folders that may limit the memory of this process, of both versions of control groups.
fn memory_groups(cgroup: &str) -> Vec<PathBuf> {
    let mut groups = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let root = match controllers {
            "" => Path::new("/sys/fs/cgroup"),
            _ if controllers.split(',').any(|controller| controller == "memory") => Path::new("/sys/fs/cgroup/memory"),
            _ => continue,
        };
        let group = root.join(path.trim_start_matches('/'));
        groups.extend(group.ancestors().take_while(|folder| folder.starts_with(root)).map(Path::to_owned));
    }
    groups
}

/// `None` when the group has no limit, or is not to be seen.
fn left_in(group: &Path) -> Option<Available> {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = read("memory.max")
        .zip(read("memory.current"))
        .or_else(|| read("memory.limit_in_bytes").zip(read("memory.usage_in_bytes")))?;
    Some(Available { bytes: limit.saturating_sub(used), of: format!("in the control group {}", group.display()) })
}

/// Of shared maps alone, for tests that hold it against what the kernel says.
#[doc(hidden)]
pub fn shared_map_bytes(max_sources: u32) -> Option<Vec<(&'static str, u64)>> {
    let cpus = possible_cpus()?;
    let shared = MAPS.iter().filter(|map| map.lifetime == Lifetime::Shared);
    Some(shared.map(|map| (map.name, bytes(map, Some(max_sources), None, cpus))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn cpus_are_counted() {
        for (list, count) in [("0\n", Some(1)), ("0-1", Some(2)), ("0-3,8-11,16", Some(9)), ("", None), ("3-1", None)] {
            assert_eq!(parse_cpus(list), count, "{list}");
        }
    }

    #[test]
    fn groups_of_both_versions_are_found() {
        let found = memory_groups("5:cpu,memory:/a\n3:pids:/b\n0::/system.slice/limiter.service\n");
        let expected = [
            "/sys/fs/cgroup/memory/a",
            "/sys/fs/cgroup/memory",
            "/sys/fs/cgroup/system.slice/limiter.service",
            "/sys/fs/cgroup/system.slice",
            "/sys/fs/cgroup",
        ];
        assert_eq!(found, expected.map(PathBuf::from));
    }

    #[test]
    fn more_than_there_is_is_an_error_and_half_of_it_a_warning() {
        let available = Available { bytes: 100 * MB, of: "here".into() };
        let status = |needed| judge(needed, &available, 1 << 20).status;
        assert_eq!(status(10 * MB), Status::Ok);
        assert_eq!(status(60 * MB), Status::Warning);
        assert_eq!(status(101 * MB), Status::Error(Exit::Unavailable));
        let remedy = judge(200 * MB, &available, 1_000_000).remedy.unwrap();
        assert!(remedy.starts_with("set xdp.max_sources = 125000,"), "{remedy}");
        assert_eq!(mem_available("MemTotal: 5 kB\nMemAvailable:   24 kB\n"), Some(24 * 1024));
    }
}

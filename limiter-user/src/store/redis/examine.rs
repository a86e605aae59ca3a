//! A look at a server before it is used: who it is, what it does when memory ends, and whether this user may do what
//! the scripts do.

use std::time::Duration;

use redis::{Cmd, from_redis_value};

use super::{RedisConfig, RedisStore};
use crate::{clock::Stopwatch, store::StoreError};

/// Asked to find the quickest of them.
const ROUND_TRIPS: usize = 5;

/// Does what the scripts of counters do, with a key that is not there, and what those of the key store do, as far as that
/// changes nothing: `HDEL` and `ZREM` stand for the commands that write hashes and sorted sets.
const REHEARSAL: &str = "\
local calls = {
  {'TIME'}, {'GET', KEYS[1]}, {'SET', KEYS[1], '', 'XX', 'PX', '1'}, {'PTTL', KEYS[1]}, {'PEXPIRE', KEYS[1], '1'},
  {'DEL', KEYS[1]}, {'SCAN', '0', 'MATCH', KEYS[1], 'COUNT', '1'},
}
if ARGV[1] == 'keys' then
  calls = {
    {'HGET', KEYS[1], 'a'}, {'HMGET', KEYS[1], 'a'}, {'HLEN', KEYS[1]}, {'HSCAN', KEYS[1], '0'}, {'HDEL', KEYS[1], 'a'},
    {'ZCARD', KEYS[1]}, {'ZSCORE', KEYS[1], 'a'}, {'ZRANGEBYSCORE', KEYS[1], '0', '0'},
    {'ZREVRANGE', KEYS[1], '0', '0'}, {'ZREM', KEYS[1], 'a'},
  }
end
local refused = {}
for _, call in ipairs(calls) do
  local reply = redis.pcall(unpack(call))
  if type(reply) == 'table' and reply.err then
    refused[#refused + 1] = call[1] .. ': ' .. reply.err
  end
end
return refused
";
/// Begins as the names of counters do, so that a user who may touch those may touch this.
const REHEARSAL_KEY: &str = "rl:{doctor}:none";

/// What a server is.
#[derive(Debug)]
#[non_exhaustive]
pub struct Examination {
    /// Address without credentials.
    pub name: String,
    /// Of the quickest call; or why there is none.
    pub round_trip: Result<Duration, StoreError>,
    /// `None` when `INFO` is not allowed.
    pub facts: Option<ServerFacts>,
    /// Commands of the scripts that fail, each with the server's reason.
    pub refused: Vec<String>,
    /// The same, of what the key store does beyond that.
    pub key_store_refused: Vec<String>,
    /// How far the server's clock is ahead of this host's, in microseconds.
    pub clock_offset_us: Option<i64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerFacts {
    pub version: String,
    /// `None` of servers that do not tell.
    pub maxmemory_policy: Option<String>,
    /// 0: no limit.
    pub maxmemory: u64,
    pub is_cluster: bool,
}

impl RedisStore {
    /// Asks everything, each within `deadline`. Changes nothing in the server.
    pub async fn examine(&self, deadline: Duration, now_us: impl Fn() -> u64) -> Examination {
        let mut examination = Examination {
            name: self.name().to_owned(),
            round_trip: self.round_trip(deadline).await,
            facts: None,
            refused: Vec::new(),
            key_store_refused: Vec::new(),
            clock_offset_us: None,
        };
        if examination.round_trip.is_err() {
            return examination;
        }
        examination.facts = self.facts(deadline).await;
        examination.refused = self.rehearse("counters", deadline).await;
        if examination.refused.is_empty() {
            examination.key_store_refused = self.rehearse("keys", deadline).await;
        }
        if let Ok(theirs) = self.time_us(deadline).await {
            examination.clock_offset_us = i64::try_from(i128::from(theirs) - i128::from(now_us())).ok();
        }
        examination
    }

    async fn round_trip(&self, deadline: Duration) -> Result<Duration, StoreError> {
        // The first one connects.
        self.single("connect", redis::cmd("PING"), deadline).await?;
        let mut quickest = Duration::MAX;
        for _ in 0..ROUND_TRIPS {
            let watch = Stopwatch::start();
            self.single("measure", redis::cmd("PING"), deadline).await?;
            quickest = quickest.min(watch.elapsed());
        }
        Ok(quickest)
    }

    async fn facts(&self, deadline: Duration) -> Option<ServerFacts> {
        let reply = self.single("ask who it is", redis::cmd("INFO"), deadline).await.ok()?;
        Some(facts(&from_redis_value::<String>(reply).ok()?))
    }

    async fn rehearse(&self, part: &str, deadline: Duration) -> Vec<String> {
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(REHEARSAL);
        if let Err(error) = self.single("load a script", load, deadline).await {
            return vec![format!("SCRIPT LOAD: {}", reason(&error))];
        }
        match self.single("call a script", rehearsal(part), deadline).await {
            Ok(reply) => from_redis_value(reply).unwrap_or_else(|error| vec![error.to_string()]),
            Err(error) => vec![format!("EVALSHA: {}", reason(&error))],
        }
    }
}

fn rehearsal(part: &str) -> Cmd {
    let mut call = redis::cmd("EVALSHA");
    call.arg(redis::Script::new(REHEARSAL).get_hash()).arg(1).arg(REHEARSAL_KEY).arg(part);
    call
}

fn reason(error: &StoreError) -> &str {
    match error {
        StoreError::Unavailable { reason, .. } | StoreError::BadReply { reason, .. } => reason,
        StoreError::Timeout { .. } => "no answer in time",
    }
}

/// Of an answer to `INFO`.
pub(super) fn field(info: &str, name: &str) -> Option<String> {
    let of = |line: &str| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned());
    info.lines().find_map(of)
}

fn facts(info: &str) -> ServerFacts {
    let field = |name| field(info, name);
    ServerFacts {
        version: field("redis_version").unwrap_or_else(|| "unknown".to_owned()),
        maxmemory_policy: field("maxmemory_policy"),
        maxmemory: field("maxmemory").and_then(|bytes| bytes.parse().ok()).unwrap_or_default(),
        is_cluster: field("cluster_enabled").as_deref() == Some("1"),
    }
}

/// Asks a server once, in a runtime of its own.
pub fn examine_now(config: &RedisConfig, deadline: Duration, now_us: impl Fn() -> u64) -> std::io::Result<Examination> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let store = RedisStore::connect(config).map_err(std::io::Error::other)?;
    Ok(runtime.block_on(store.examine(deadline, now_us)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_found_in_the_information() {
        let info = "# Server\r\nredis_version:7.0.15\r\n# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n\
                    # Cluster\r\ncluster_enabled:0\r\n";
        let expected = ServerFacts {
            version: "7.0.15".to_owned(),
            maxmemory_policy: Some("noeviction".to_owned()),
            maxmemory: 0,
            is_cluster: false,
        };
        assert_eq!(facts(info), expected);
        assert_eq!(facts("").maxmemory_policy, None);
    }
}

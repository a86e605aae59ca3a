//! What a Redis says about itself: its memory, and what it was asked.

use std::time::Duration;

use redis::Value;

use crate::{eventually::eventually, redis_server::RedisServer};

const WAIT: Duration = Duration::from_secs(60);

/// What `INFO commandstats` says of one command, those within scripts as well.
#[derive(Clone, Copy, Debug, Default)]
pub struct CommandStats {
    pub calls: u64,
    pub usec: u64,
}

impl RedisServer {
    /// `used_memory`, once no table is being rebuilt for more keys.
    pub async fn settled_memory(&self) -> u64 {
        // Looks at every place of the tables.
        let mut connection = self.connection().await;
        connection.set_response_timeout(WAIT);
        eventually(WAIT, async || {
            let tables: String = redis::cmd("DEBUG").arg("HTSTATS").arg(0).query_async(&mut connection).await?;
            let is_settled = !tables.contains("rehashing target");
            if is_settled { Ok(()) } else { Err(redis::RedisError::from(std::io::Error::other(tables))) }
        })
        .await;
        self.number("memory", "used_memory").await
    }

    /// Times that the server has read from connections: more than one for a batch that is large.
    pub async fn reads(&self) -> u64 {
        self.number("stats", "total_reads_processed").await
    }

    /// Scripts that were called, by whomever.
    pub async fn script_calls(&self) -> u64 {
        self.commands("evalsha").await.calls
    }

    /// Waits until the server says something in a section of `INFO`, e.g. `role:master` in `replication`.
    pub async fn until_info(&self, section: &str, line: &str) {
        eventually(WAIT, async || {
            let info: String = self.try_run(&["INFO", section]).await?;
            if info.lines().any(|is| is == line) { Ok(()) } else { Err(anyhow::anyhow!("no {line} in {info}")) }
        })
        .await;
    }

    /// A number of a section of `INFO`.
    ///
    /// # Panics
    ///
    /// When there is none of this name.
    pub async fn number(&self, section: &str, name: &str) -> u64 {
        let info: String = self.run(&["INFO", section]).await;
        let number = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.parse().ok());
        number.unwrap_or_else(|| panic!("no {name} in {info}"))
    }

    pub async fn commands(&self, name: &str) -> CommandStats {
        let info: String = self.run(&["INFO", "commandstats"]).await;
        let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_")?.strip_prefix(name)?.strip_prefix(':'));
        let field = |name: &str| -> Option<u64> {
            line?.split(',').find_map(|field| field.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        };
        CommandStats { calls: field("calls").unwrap_or(0), usec: field("usec").unwrap_or(0) }
    }

    pub async fn reset_commands(&self) {
        let () = self.run(&["CONFIG", "RESETSTAT"]).await;
    }

    /// Keeps a record of every call from here on, for [`Self::script_calls_about`].
    pub async fn record_calls(&self) {
        let () = self.run(&["CONFIG", "SET", "slowlog-max-len", "10000000", "slowlog-log-slower-than", "0"]).await;
        let () = self.run(&["SLOWLOG", "RESET"]).await;
    }

    /// How many scripts were called with this key, as the first, since records are kept.
    ///
    /// # Panics
    ///
    /// When the records are not what Redis 7 writes.
    pub async fn script_calls_about(&self, key: &str) -> usize {
        let records: Vec<Vec<Value>> = self.run(&["SLOWLOG", "GET", "-1"]).await;
        let is_about_it = |record: &Vec<Value>| {
            let Some(Value::Array(words)) = record.get(3) else { panic!("no call in {record:?}") };
            let is = |place: usize, word: &[u8]| matches!(words.get(place), Some(Value::BulkString(is)) if is == word);
            (is(0, b"EVALSHA") || is(0, b"evalsha")) && is(3, key.as_bytes())
        };
        records.iter().filter(|record| is_about_it(record)).count()
    }
}

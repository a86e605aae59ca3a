//! A primary, its replica, and three sentinels that watch over them.

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::Duration,
};

use tempfile::TempDir;

use crate::{
    eventually::eventually,
    redis_server::{RedisServer, free_port, program},
};

/// What the sentinels call the primary.
pub const SERVICE: &str = "limiter-counters";

#[derive(Debug)]
pub struct RedisSentinels {
    pub primary: RedisServer,
    pub replica: RedisServer,
    sentinels: Vec<Sentinel>,
}

#[derive(Debug)]
struct Sentinel {
    _folder: TempDir,
    port: u16,
    child: Child,
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl RedisSentinels {
    pub async fn start() -> Self {
        let primary = RedisServer::start().await;
        let port = primary.port().to_string();
        let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &port]).await;
        replica.until_info("replication", "master_link_status:up").await;
        let sentinels: Vec<Sentinel> = (0..3).map(|_| sentinel(primary.port())).collect();
        for sentinel in &sentinels {
            eventually(Duration::from_secs(30), async || {
                let known: Vec<String> = ask(sentinel.port, &["SENTINEL", "MASTER", SERVICE]).await?;
                let number = |field: &str| known.chunks(2).find(|pair| pair[0] == field).map(|pair| pair[1].clone());
                let seen = (number("num-slaves"), number("num-other-sentinels"));
                if seen == (Some("1".to_owned()), Some("2".to_owned())) {
                    Ok(())
                } else {
                    Err(anyhow::anyhow!("{seen:?}"))
                }
            })
            .await;
        }
        Self { primary, replica, sentinels }
    }

    pub fn urls(&self) -> Vec<String> {
        self.sentinels.iter().map(|sentinel| format!("redis://127.0.0.1:{}", sentinel.port)).collect()
    }

    /// As the table `[store.redis]` names them.
    pub fn access(&self) -> String {
        format!("urls = {:?}\nmode = \"sentinel\"\nservice = \"{SERVICE}\"\n", self.urls())
    }

    /// After so many milliseconds without an answer a server counts as gone.
    pub async fn take_down_after(&self, ms: u64) {
        for sentinel in &self.sentinels {
            let words = ["SENTINEL", "SET", SERVICE, "down-after-milliseconds", &ms.to_string()];
            let client = redis::Client::open(format!("redis://127.0.0.1:{}", sentinel.port)).expect("a valid address");
            let mut connection = client.get_multiplexed_async_connection().await.expect("a sentinel");
            let () = command(&words).query_async(&mut connection).await.expect("a setting of sentinels");
        }
    }

    /// Asks a sentinel to make the replica the primary while both are well, and waits until it is.
    pub async fn hand_over(&self) {
        eventually(Duration::from_secs(60), async || {
            // One that takes too long, on a machine that is busy, is given up, and everything is as it was.
            if role(&self.primary).await? == "master" && role(&self.replica).await? == "slave" {
                let begun = ask_for_ok(self.sentinels[1].port, &["SENTINEL", "FAILOVER", SERVICE]).await;
                // Nobody begins while another one is under way.
                begun.or_else(|error| if error.to_string().contains("INPROG") { Ok(()) } else { Err(error) })?;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            let roles = (role(&self.primary).await?, role(&self.replica).await?);
            if roles == ("slave".to_owned(), "master".to_owned()) { Ok(()) } else { Err(anyhow::anyhow!("{roles:?}")) }
        })
        .await;
    }

    /// Kills the primary and waits until its replica has taken its place.
    pub async fn fail_over(&mut self) {
        self.primary.kill();
        self.replica.until_info("replication", "role:master").await;
    }

    /// Kills one of the sentinels.
    pub fn lose_a_sentinel(&mut self) {
        self.sentinels[0].child.kill().expect("kill a sentinel");
    }
}

async fn role(server: &RedisServer) -> anyhow::Result<String> {
    let info: String = server.try_run(&["INFO", "replication"]).await?;
    let role = info.lines().find_map(|line| line.strip_prefix("role:")).unwrap_or_default();
    Ok(role.to_owned())
}

async fn ask_for_ok(port: u16, words: &[&str]) -> anyhow::Result<()> {
    ask::<redis::Value>(port, words).await.map(drop)
}

async fn ask<T: redis::FromRedisValue>(port: u16, words: &[&str]) -> anyhow::Result<T> {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}"))?;
    let mut connection = client.get_multiplexed_async_connection().await?;
    Ok(command(words).query_async(&mut connection).await?)
}

fn command(words: &[&str]) -> redis::Cmd {
    let mut command = redis::cmd(words[0]);
    for word in &words[1..] {
        command.arg(*word);
    }
    command
}

fn sentinel(primary: u16) -> Sentinel {
    let folder = TempDir::new().expect("a temporary folder");
    let port = free_port();
    let file = folder.path().join("sentinel.conf");
    let text = format!(
        "port {port}\nbind 127.0.0.1\ndir {folder}\nlogfile sentinel.log\n\
         sentinel monitor {SERVICE} 127.0.0.1 {primary} 2\n\
         sentinel down-after-milliseconds {SERVICE} 500\n\
         sentinel failover-timeout {SERVICE} 2000\n",
        folder = folder.path().display(),
    );
    fs::write(&file, text).expect("write the configuration of a sentinel");
    let child = Command::new(program())
        .arg(&file)
        .arg("--sentinel")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("the server is installed");
    Sentinel { _folder: folder, port, child }
}

//! A real `redis-server` on a free port, with its files in a temporary folder; killed when dropped.

use std::{
    env,
    ffi::OsString,
    net::{Ipv4Addr, TcpListener},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use redis::{FromRedisValue, aio::MultiplexedConnection};
use tempfile::TempDir;

use crate::eventually::eventually;

/// Where another server that speaks the same is named, to run the tests with that instead.
const PROGRAM: &str = "LIMITER_REDIS_SERVER";
/// What a server needs so that a `kill -9` costs it nothing.
pub const KEEPS_DATA: &[&str] = &["--appendonly", "yes", "--appendfsync", "everysec"];

/// As a pattern: no other tag has a colon.
pub const COUNTERS: &str = "rl:{*:*}:*";

#[derive(Debug)]
pub struct RedisServer {
    folder: TempDir,
    port: u16,
    arguments: Vec<String>,
    child: Child,
}

impl RedisServer {
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// With more arguments for `redis-server`, e.g. `["--requirepass", "hunter2"]`.
    pub async fn start_with(arguments: &[&str]) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let port = free_port();
        let child = spawn(&folder, port, &arguments).expect("redis-server");
        let server = Self { folder, port, arguments, child };
        server.until_it_answers().await;
        server
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// As the table `[store.redis]` names it.
    pub fn access(&self) -> String {
        format!("urls = [\"{}\"]\n", self.url())
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// `kill -9`, and nothing is kept.
    pub fn kill(&mut self) {
        self.child.kill().expect("kill redis-server");
        self.child.wait().expect("redis-server to end");
    }

    /// Ended, so that it can say goodbye.
    pub fn stop(&mut self) {
        self.signal(Signal::SIGTERM);
        self.child.wait().expect("redis-server to end");
    }

    /// Starts again at the same address: empty, unless it was started with [`KEEPS_DATA`].
    pub async fn restart(&mut self) {
        self.kill();
        self.spawn_again().await;
    }

    /// Starts again at the same address, and knows nothing any more.
    pub async fn restart_empty(&mut self) {
        self.kill();
        let kept = self.folder.path().join("appendonlydir");
        if kept.exists() {
            std::fs::remove_dir_all(&kept).expect("remove what the server has kept");
        }
        self.spawn_again().await;
    }

    async fn spawn_again(&mut self) {
        self.child = spawn(&self.folder, self.port, &self.arguments).expect("redis-server");
        self.until_it_answers().await;
    }

    /// The process stands still: connections stay, answers do not come.
    pub fn freeze(&self) {
        self.signal(Signal::SIGSTOP);
    }

    pub fn thaw(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a process id");
        kill(Pid::from_raw(pid), signal).expect("signal redis-server");
    }

    /// A connection of the test's own, to look from outside.
    pub async fn connection(&self) -> MultiplexedConnection {
        self.client().get_multiplexed_async_connection().await.expect("a connection")
    }

    fn client(&self) -> redis::Client {
        redis::Client::open(self.url()).expect("a valid address")
    }

    /// Runs one command, given as words.
    pub async fn run<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_run(words).await.unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    /// The same, with the password of the default user.
    pub async fn run_as(&self, password: &str, words: &[&str]) {
        let url = format!("redis://:{password}@127.0.0.1:{}", self.port);
        let client = redis::Client::open(url).expect("a valid address");
        let mut connection = client.get_multiplexed_async_connection().await.expect("a connection");
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        let () = command.query_async(&mut connection).await.unwrap_or_else(|error| panic!("{words:?}: {error}"));
    }

    pub async fn try_run<T: FromRedisValue>(&self, words: &[&str]) -> Result<T> {
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        let mut connection = self.client().get_multiplexed_async_connection().await?;
        Ok(command.query_async(&mut connection).await?)
    }

    /// Makes a user with this password and these rights, or gives them to one that is there; see [`ACL_RULES`].
    pub async fn set_user(&self, name: &str, password: &str, rights: &str) {
        let password = format!(">{password}");
        let mut words = vec!["ACL", "SETUSER", name, "reset", "on", &password];
        words.extend(rights.split(' '));
        self.run::<()>(&words).await;
    }

    /// Names of all counters, and of nothing else that agents have in Redis.
    pub async fn counters(&self) -> Vec<String> {
        self.run(&["KEYS", COUNTERS]).await
    }

    async fn until_it_answers(&self) {
        eventually(Duration::from_secs(30), async || {
            let stream = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).await?;
            // Any answer will do; with a password it is NOAUTH.
            stream.writable().await?;
            stream.try_write(b"PING\r\n")?;
            stream.readable().await?;
            let mut answer = [0; 7];
            match stream.try_read(&mut answer)? {
                0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
                _ => Ok::<(), std::io::Error>(()),
            }
        })
        .await;
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Nobody listens there at this moment.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.local_addr().expect("its address").port()
}

/// The server that tests run with.
pub fn program() -> OsString {
    env::var_os(PROGRAM).unwrap_or_else(|| "redis-server".into())
}

fn spawn(folder: &TempDir, port: u16, arguments: &[String]) -> Result<Child> {
    Command::new(program())
        .args(["--bind", "127.0.0.1", "--port", &port.to_string()])
        .args(["--save", "", "--appendonly", "no", "--enable-debug-command", "yes"])
        // A replica that comes waits for no others.
        .args(["--repl-diskless-sync-delay", "0"])
        .arg("--dir")
        .arg(folder.path())
        .args(["--logfile", "redis.log"])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .with_context(|| format!("start {}: is it installed?", program().display()))
}

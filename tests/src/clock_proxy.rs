//! A way to a server whose clock is wrong: scripts that ask it for the time are told another one.
//!
//! Each script is there twice, as it is and with another clock, and calls of the one become calls of the other on the way.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    task::JoinHandle,
};

use crate::redis_server::RedisServer;

/// Where the clock's error is, in milliseconds.
const ERROR: &str = "test:clock";
const ASKS: &str = "redis.call('TIME')";
const ASKS_OTHERWISE: &str = "(function() local time = redis.call('TIME') \
     local us = time[1] * 1000000 + time[2] + (redis.call('GET', 'test:clock') or 0) * 1000 \
     return { math.floor(us / 1000000), us % 1000000 } end)()";

/// Scripts whose text has the library in front of it, and one that stands alone.
const LIBRARY: &str = include_str!("../../lua/lib/counter.lua");
const WITH_LIBRARY: [&str; 3] =
    [include_str!("../../lua/decide.lua"), include_str!("../../lua/lease.lua"), include_str!("../../lua/sync.lua")];
const ALONE: &str = include_str!("../../lua/heartbeat.lua");

/// Hash of a script, and of the same with the other clock.
type Hashes = Arc<Vec<(String, String)>>;

#[derive(Debug)]
pub struct ClockProxy {
    port: u16,
    accepting: JoinHandle<()>,
}

impl ClockProxy {
    /// # Panics
    ///
    /// When a script does not ask for the time.
    pub async fn start(server: &RedisServer) -> Self {
        let mut hashes = Vec::new();
        let texts = WITH_LIBRARY.iter().map(|text| format!("{LIBRARY}\n{text}")).chain([ALONE.to_owned()]);
        for text in texts {
            assert!(text.contains(ASKS), "a script that asks for the time otherwise: {text}");
            let is: String = server.run(&["SCRIPT", "LOAD", &text]).await;
            let becomes: String = server.run(&["SCRIPT", "LOAD", &text.replace(ASKS, ASKS_OTHERWISE)]).await;
            hashes.push((is, becomes));
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let accepting = tokio::spawn(accept(listener, server.port(), Arc::new(hashes)));
        Self { port, accepting }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The server's clock is wrong by this from now on.
    pub async fn step_back(&self, server: &RedisServer, by: Duration) {
        let () = server.run(&["SET", ERROR, &format!("-{}", by.as_millis())]).await;
    }
}

impl Drop for ClockProxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, server: u16, hashes: Hashes) {
    while let Ok((client, _)) = listener.accept().await {
        let Ok(server) = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, server))).await else { continue };
        drop((client.set_nodelay(true), server.set_nodelay(true)));
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        tokio::spawn(pass_on(from_client, to_server, Arc::clone(&hashes)));
        tokio::spawn(async move {
            let (mut from, mut to) = (from_server, to_client);
            drop(copy(&mut from, &mut to).await);
        });
    }
}

async fn pass_on(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, hashes: Hashes) {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(len @ 1..) = from.read(&mut buffer).await {
        bytes.extend_from_slice(&buffer[..len]);
        let kept = exchange(&mut bytes, &hashes);
        if to.write_all(&bytes[..bytes.len() - kept]).await.is_err() {
            break;
        }
        bytes.drain(..bytes.len() - kept);
    }
}

/// Exchanges hashes, and says how many bytes at the end may be the beginning of one.
fn exchange(bytes: &mut [u8], hashes: &[(String, String)]) -> usize {
    for (is, becomes) in hashes {
        let (is, becomes) = (is.as_bytes(), becomes.as_bytes());
        for at in 0..bytes.len() {
            if bytes[at..].starts_with(is) {
                bytes[at..at + is.len()].copy_from_slice(becomes);
            }
        }
    }
    let begins = |kept: &usize| hashes.iter().any(|(is, _)| bytes.ends_with(&is.as_bytes()[..*kept]));
    (1..40).rev().find(begins).unwrap_or(0)
}

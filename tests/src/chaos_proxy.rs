//! A way to a server on which bytes are late, and connections end in the middle of what they carry.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinHandle,
};

use crate::random::Random;

/// What happens to what was read at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Arrives,
    IsLate,
    /// A part arrives, and nothing after it.
    IsCut,
    /// Nothing arrives, and the connection ends.
    IsLost,
}

/// What may happen.
const CHAOS: u8 = 0;
/// Everything arrives.
const CALM: u8 = 1;
/// Of each reply a part arrives.
const CUT_REPLIES: u8 = 2;

#[derive(Debug)]
pub struct ChaosProxy {
    port: u16,
    mode: Arc<AtomicU8>,
    /// How often something else happened than it should.
    faults: Arc<AtomicU64>,
    accepting: JoinHandle<()>,
}

impl ChaosProxy {
    /// In front of a server of this host.
    pub async fn start(server: u16, seed: u64) -> Self {
        Self::start_in(CHAOS, server, seed).await
    }

    /// The same, on which everything arrives until it is told otherwise.
    pub async fn start_calm(server: u16) -> Self {
        Self::start_in(CALM, server, 0).await
    }

    async fn start_in(mode: u8, server: u16, seed: u64) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let mode = Arc::new(AtomicU8::new(mode));
        let faults = Arc::new(AtomicU64::new(0));
        let accepting = tokio::spawn(accept(listener, server, seed, Arc::clone(&mode), Arc::clone(&faults)));
        Self { port, mode, faults, accepting }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// From now on everything arrives.
    pub fn calm_down(&self) {
        self.mode.store(CALM, Ordering::Relaxed);
    }

    /// From now on a part of each reply arrives, and then its connection ends.
    pub fn cut_replies(&self) {
        self.mode.store(CUT_REPLIES, Ordering::Relaxed);
    }

    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }
}

impl Drop for ChaosProxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, server: u16, seed: u64, mode: Arc<AtomicU8>, faults: Arc<AtomicU64>) {
    let mut number = 0;
    while let Ok((client, _)) = listener.accept().await {
        let Ok(server) = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, server))).await else { continue };
        number += 2;
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        // When one direction ends, the other does.
        let end = watch::Sender::new(false);
        for (direction, from, to) in [(0, from_client, to_server), (1, from_server, to_client)] {
            let pipe = Pipe {
                random: Random::new(seed.wrapping_add(number + direction)),
                mode: Arc::clone(&mode),
                are_replies: direction == 1,
                faults: Arc::clone(&faults),
                end: end.clone(),
            };
            tokio::spawn(pipe.run(from, to));
        }
    }
}

struct Pipe {
    random: Random,
    mode: Arc<AtomicU8>,
    are_replies: bool,
    faults: Arc<AtomicU64>,
    end: watch::Sender<bool>,
}

impl Pipe {
    async fn run(mut self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let mut ended = self.end.subscribe();
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let read = tokio::select! {
                read = from.read(&mut buffer) => read,
                _ = ended.changed() => break,
            };
            let Ok(len @ 1..) = read else { break };
            let fate = self.fate();
            if fate != Fate::Arrives {
                self.faults.fetch_add(1, Ordering::Relaxed);
            }
            let part = match fate {
                Fate::Arrives => len,
                Fate::IsLate => {
                    tokio::time::sleep(Duration::from_millis(self.random.below(300))).await;
                    len
                }
                Fate::IsCut if self.mode.load(Ordering::Relaxed) == CUT_REPLIES => len / 2,
                Fate::IsCut => self.random.below(len),
                Fate::IsLost => 0,
            };
            if to.write_all(&buffer[..part]).await.is_err() || part < len {
                break;
            }
        }
        self.end.send_replace(true);
    }

    fn fate(&mut self) -> Fate {
        match self.mode.load(Ordering::Relaxed) {
            CALM => return Fate::Arrives,
            CUT_REPLIES => return if self.are_replies { Fate::IsCut } else { Fate::Arrives },
            _ => {}
        }
        match self.random.below(20u32) {
            0 => Fate::IsLost,
            1 => Fate::IsCut,
            2..=4 => Fate::IsLate,
            _ => Fate::Arrives,
        }
    }
}

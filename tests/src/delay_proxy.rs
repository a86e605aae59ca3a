//! A way to a server that is far away: every byte is late by the same time, in both directions, and none is lost.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
    task::JoinHandle,
    time::Instant,
};

#[derive(Debug)]
pub struct DelayProxy {
    port: u16,
    accepting: JoinHandle<()>,
}

impl DelayProxy {
    /// In front of a server of this host, half of `round_trip` in each direction.
    pub async fn start(server: u16, round_trip: Duration) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let address = SocketAddr::from((Ipv4Addr::LOCALHOST, server));
                let Ok(server) = TcpStream::connect(address).await else { continue };
                drop((client.set_nodelay(true), server.set_nodelay(true)));
                let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
                tokio::spawn(pipe(from_client, to_server, round_trip / 2));
                tokio::spawn(pipe(from_server, to_client, round_trip / 2));
            }
        });
        Self { port, accepting }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

impl Drop for DelayProxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn pipe(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: Duration) {
    let (sender, mut late) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let writing = tokio::spawn(async move {
        while let Some((due, bytes)) = late.recv().await {
            tokio::time::sleep_until(due).await;
            if to.write_all(&bytes).await.is_err() {
                break;
            }
        }
    });
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(len @ 1..) = from.read(&mut buffer).await {
        if sender.send((Instant::now() + delay, buffer[..len].to_vec())).is_err() {
            break;
        }
    }
    drop(sender);
    drop(writing.await);
}

//! Serves HTTP/1.1 on TCP and on Unix sockets, with bounds on what a peer can make the agent hold.

use std::{
    convert::Infallible,
    fs, io,
    net::IpAddr,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{StatusCode, header},
    response::IntoResponse,
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener, UnixStream},
    sync::Semaphore,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

use super::hold;
use crate::config::Listen;

/// Connections at one time, each of them a few KiB; more wait in the listen queue.
const MAX_CONNECTIONS: usize = 16_384;
/// How long a peer may take to send the head of a request, and so how long a silent connection is kept.
const HEADER_TIMEOUT: Duration = Duration::from_secs(75);
/// How long a request may take from its head to its answer, the body that a peer may send slowly included. An answer that
/// is held for its turn is ready by then.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Bound of the buffer for a request head.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// How long open requests may take to end after a shutdown begins.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Address of the transport peer, `None` on a Unix socket: kept in a request's extensions.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub Option<IpAddr>);

/// A bound socket.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    address: Listen,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A socket that cannot be bound.
#[derive(Debug, thiserror::Error)]
#[error("binding {key} = \"{address}\"{remedy}")]
pub struct BindError {
    key: &'static str,
    address: Listen,
    #[source]
    pub source: io::Error,
    remedy: &'static str,
}

const REMEDIES: [(io::ErrorKind, &str); 5] = [
    (io::ErrorKind::AlreadyExists, ": what is there is no socket, and stays; choose another path, or remove it"),
    (io::ErrorKind::AddrInUse, ": another program (or another agent) has it; stop that or choose another address"),
    (io::ErrorKind::PermissionDenied, ": choose a port above 1023, another path, or run as root"),
    (io::ErrorKind::AddrNotAvailable, ": no interface of this host has this address"),
    (io::ErrorKind::NotFound, ": create the folder first"),
];

impl Listener {
    /// Binds `address`, which the configuration names `key`. `mode` is the permission of a Unix socket.
    pub async fn bind(key: &'static str, address: &Listen, mode: u32) -> Result<Self, BindError> {
        let bound = match address {
            Listen::Tcp(socket) => TcpListener::bind(socket).await.map(Socket::Tcp),
            Listen::Unix(path) => bind_unix(path, mode).await.map(Socket::Unix),
        };
        let socket = bound.map_err(|source| {
            let remedy = REMEDIES.iter().find(|(kind, _)| *kind == source.kind()).map_or("", |(_, remedy)| remedy);
            BindError { key, address: address.clone(), source, remedy }
        })?;
        let address = match &socket {
            Socket::Tcp(listener) => listener.local_addr().map(Listen::Tcp).unwrap_or_else(|_| address.clone()),
            Socket::Unix(_) => address.clone(),
        };
        Ok(Self { socket, address })
    }

    /// Where it listens: with the port that the system chose, when port 0 was asked for.
    pub fn address(&self) -> &Listen {
        &self.address
    }

    /// Serves `router` until `shutdown`, then lets open requests end.
    pub async fn serve(self, router: Router, shutdown: CancellationToken) {
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let connections = TaskTracker::new();
        loop {
            let accept = async {
                let permit = Arc::clone(&permits).acquire_owned().await.map_err(io::Error::other)?;
                Ok((self.accept().await?, permit))
            };
            let accepted: io::Result<_> = tokio::select! {
                accepted = accept => accepted,
                () = shutdown.cancelled() => break,
            };
            match accepted {
                Ok(((stream, peer), permit)) => {
                    let (router, shutdown) = (router.clone(), shutdown.clone());
                    connections.spawn(async move {
                        serve_connection(stream, peer, router, shutdown).await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    // Out of file descriptors, most likely: without a pause this loop would spin.
                    tracing::warn!(target: "limiter::api", address = %self.address, %error, "accepting a connection failed");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        connections.close();
        if tokio::time::timeout(DRAIN_TIMEOUT, connections.wait()).await.is_err() {
            tracing::debug!(target: "limiter::api", address = %self.address, "closing connections that are still open");
        }
    }

    async fn accept(&self) -> io::Result<(Box<dyn Stream>, Peer)> {
        match &self.socket {
            Socket::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok((Box::new(stream), Peer(Some(peer.ip().to_canonical()))))
            }
            Socket::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                Ok((Box::new(stream), Peer(None)))
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listen::Unix(path) = &self.address
            && let Err(error) = fs::remove_file(path)
        {
            tracing::debug!(target: "limiter::api", path = %path.display(), %error, "removing the socket failed");
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

async fn serve_connection(stream: Box<dyn Stream>, peer: Peer, router: Router, shutdown: CancellationToken) {
    let stopping = shutdown.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        let (router, stopping) = (router.clone(), stopping.clone());
        async move {
            let answer = tokio::time::timeout(REQUEST_TIMEOUT, router.oneshot(request.map(Body::new))).await;
            let mut answer = match answer {
                Ok(answer) => answer.unwrap_or_else(|never| match never {}),
                Err(_elapsed) => (StatusCode::REQUEST_TIMEOUT, [(header::CONNECTION, "close")]).into_response(),
            };
            if let Some(hold) = hold::take(&mut answer) {
                tokio::select! {
                    () = hold.wait() => {}
                    // Nobody shapes any more, and a gateway without an answer answers with an error.
                    () = stopping.cancelled() => {}
                }
            }
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::trace!(target: "limiter::api", %error, "a connection ended badly");
    }
}

/// Whether something is there that is not a socket, and so not an earlier agent's.
pub(crate) fn is_taken_by_no_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.file_type().is_socket())
}

/// Binds a Unix socket. A socket that nobody listens on, left by an agent that was killed, is replaced.
async fn bind_unix(path: &Path, mode: u32) -> io::Result<UnixListener> {
    if is_taken_by_no_socket(path) {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    if fs::symlink_metadata(path).is_ok() {
        match UnixStream::connect(path).await {
            Ok(_) => return Err(io::ErrorKind::AddrInUse.into()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)?,
            Err(error) => return Err(error),
        }
    }
    // Bound under another name and renamed, so that nobody can connect before the permission is set.
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{}", std::process::id()));
    let draft = PathBuf::from(draft);
    let listener = UnixListener::bind(&draft)?;
    let published =
        fs::set_permissions(&draft, fs::Permissions::from_mode(mode)).and_then(|()| fs::rename(&draft, path));
    if let Err(error) = published {
        // The first error is the one to report.
        drop(fs::remove_file(&draft));
        return Err(error);
    }
    Ok(listener)
}

//! Asks the running agent, over the addresses that the configuration names.

use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use axum::{
    body::Bytes,
    http::{Method, Request, StatusCode, header},
};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};

use crate::{
    config::Listen,
    exit::{Refused, Unavailable},
};

const TIMEOUT: Duration = Duration::from_secs(5);

/// One call that has to succeed; `body` is JSON. A refusal becomes an error with the agent's own words.
pub(super) async fn ask(address: &Listen, method: Method, path: &str, body: Option<String>) -> Result<Bytes> {
    let (status, answer) = call(address, method, path, body).await?;
    if status == StatusCode::OK {
        return Ok(answer);
    }
    let message = serde_json::from_slice::<serde_json::Value>(&answer).ok();
    let message = message.as_ref().and_then(|answer| answer["message"].as_str());
    let message = message.unwrap_or("the agent refused without saying why").to_owned();
    // It would, and cannot yet.
    if status == StatusCode::SERVICE_UNAVAILABLE {
        return Err(Unavailable(message).into());
    }
    Err(Refused(message).into())
}

async fn call(address: &Listen, method: Method, path: &str, body: Option<String>) -> Result<(StatusCode, Bytes)> {
    let exchange = async {
        match address {
            Listen::Tcp(socket) => {
                let stream = TcpStream::connect(socket).await.map_err(|error| not_running(address, error))?;
                exchange(stream, method, path, body).await
            }
            Listen::Unix(socket) => {
                let stream = UnixStream::connect(socket).await.map_err(|error| not_running(address, error))?;
                exchange(stream, method, path, body).await
            }
        }
    };
    let late = || not_running(address, format!("no answer within {} s", TIMEOUT.as_secs()));
    tokio::time::timeout(TIMEOUT, exchange).await.map_err(|_elapsed| late())?
}

fn not_running(address: &Listen, reason: impl std::fmt::Display) -> anyhow::Error {
    anyhow!(Unavailable(format!("asking the agent at {address}: {reason}: is it running? \"limiter run\" starts it")))
}

async fn exchange<S>(stream: S, method: Method, path: &str, body: Option<String>) -> Result<(StatusCode, Bytes)>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.context("talking HTTP to the agent")?;
    let driver = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "limiter")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body.unwrap_or_default())))?;
    let response = sender.send_request(request).await.context("asking the agent")?;
    let status = response.status();
    let body = response.into_body().collect().await.context("reading the agent's answer")?.to_bytes();
    drop(sender);
    // Nothing is expected of the connection any more.
    driver.abort();
    Ok((status, body))
}

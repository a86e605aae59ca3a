//! A small HTTP gateway: asks the agent before it answers, as nginx, Envoy, HAProxy or Caddy would.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result};
use socket2::SockRef;

use crate::http::{Address, Connection};

/// Longest time that an idle connection is kept.
const IDLE: Duration = Duration::from_secs(30);

/// Serves until dropped. Each connection has a thread, so it is for hundreds of clients, not thousands.
#[derive(Debug)]
pub struct Gateway {
    address: SocketAddr,
    listener: TcpListener,
    accepting: Option<JoinHandle<()>>,
}

impl Gateway {
    /// Listens on `address` in the network namespace of the calling thread.
    pub fn start(address: SocketAddr, agent: Address) -> Result<Self> {
        let listener = TcpListener::bind(address).with_context(|| format!("binding the gateway to {address}"))?;
        let address = listener.local_addr()?;
        let accepting = {
            let listener = listener.try_clone()?;
            thread::spawn(move || {
                // Ends with the error that shutting the listener down brings.
                while let Ok((stream, _)) = listener.accept() {
                    let agent = agent.clone();
                    // A client that goes away ends its thread with an error that nobody waits for.
                    thread::spawn(move || serve(stream, &agent));
                }
            })
        };
        Ok(Self { address, listener, accepting: Some(accepting) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        // A listener that is shut down wakes who waits in accept.
        if SockRef::from(&self.listener).shutdown(Shutdown::Both).is_ok()
            && let Some(accepting) = self.accepting.take()
        {
            drop(accepting.join());
        }
    }
}

fn serve(stream: TcpStream, agent: &Address) -> Result<()> {
    stream.set_read_timeout(Some(IDLE))?;
    stream.set_nodelay(true)?;
    let client: IpAddr = stream.peer_addr()?.ip();
    let mut agent = Connection::open(agent)?;
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let mut parts = line.split(' ');
        let (method, path) = (parts.next().unwrap_or("GET").to_owned(), parts.next().unwrap_or("/").to_owned());
        let (api_key, body_len) = read_headers(&mut stream)?;
        stream.by_ref().take(body_len).read_to_end(&mut Vec::new())?;

        let client = client.to_string();
        let mut headers =
            vec![("X-Forwarded-For", &*client), ("X-Forwarded-Method", &*method), ("X-Forwarded-Uri", &*path)];
        if let Some(api_key) = &api_key {
            headers.push(("X-API-Key", api_key));
        }
        let answer = agent.request("GET", "/v1/check", &headers, "")?;
        let retry_after =
            answer.header("retry-after").map(|wait| format!("Retry-After: {wait}\r\n")).unwrap_or_default();
        let body = if answer.status == 200 { "hello\n" } else { &*answer.body };
        let head = format!("HTTP/1.1 {} X\r\nContent-Length: {}\r\n{retry_after}\r\n", answer.status, body.len());
        stream.get_mut().write_all(format!("{head}{body}").as_bytes())?;
    }
}

/// The API key, if there is one, and the length of the body.
fn read_headers(stream: &mut impl BufRead) -> Result<(Option<String>, u64)> {
    let (mut api_key, mut body_len) = (None, 0);
    loop {
        let mut line = String::new();
        stream.read_line(&mut line)?;
        let line = line.trim_end();
        if line.is_empty() {
            return Ok((api_key, body_len));
        }
        match line.split_once(':') {
            Some((name, value)) if name.eq_ignore_ascii_case("x-api-key") => api_key = Some(value.trim().to_owned()),
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => body_len = value.trim().parse()?,
            Some(_) | None => {}
        }
    }
}

//! A small HTTP/1.1 client over TCP and Unix sockets: what a gateway's check call looks like on the wire.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use socket2::{Domain, Socket, Type};

/// Where a server listens.
#[derive(Clone, Debug)]
pub enum Address {
    Tcp(SocketAddr),
    /// From one of several addresses of this host.
    TcpFrom(IpAddr, SocketAddr),
    Unix(PathBuf),
}

#[derive(Clone, Debug)]
pub struct Response {
    pub status: u16,
    /// Names in lower case.
    pub headers: HashMap<String, String>,
    pub body: String,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {:?}", self.body))
    }
}

/// No answer within this time is an error.
pub const TIMEOUT: Duration = Duration::from_secs(5);

trait Wire: Read + Write {}
impl<S: Read + Write> Wire for S {}

/// A connection that stays open between requests.
pub struct Connection(BufReader<Box<dyn Wire + Send>>);

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connection")
    }
}

impl Connection {
    pub fn open(address: &Address) -> Result<Self> {
        Self::open_within(address, TIMEOUT)
    }

    pub fn open_within(address: &Address, timeout: Duration) -> Result<Self> {
        let stream: Box<dyn Wire + Send> = match address {
            Address::Tcp(to) => Box::new(tcp(None, *to, timeout)?),
            Address::TcpFrom(from, to) => Box::new(tcp(Some(*from), *to, timeout)?),
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).with_context(|| format!("connecting to {}", path.display()))?;
                stream.set_read_timeout(Some(timeout))?;
                Box::new(stream)
            }
        };
        Ok(Self(BufReader::new(stream)))
    }

    pub fn request(&mut self, method: &str, target: &str, headers: &[(&str, &str)], body: &str) -> Result<Response> {
        let mut head = format!("{method} {target} HTTP/1.1\r\nHost: test\r\nContent-Length: {}\r\n", body.len());
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        head.push_str(body);
        self.0.get_mut().write_all(head.as_bytes())?;
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        let status = line.split(' ').nth(1).with_context(|| format!("status line {line:?}"))?.parse()?;
        let mut headers = HashMap::new();
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line)?;
            let line = line.trim_end();
            if line.is_empty() {
                break;
            }
            let Some((name, value)) = line.split_once(':') else { bail!("header line {line:?}") };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let len = match headers.get("content-length") {
            Some(len) if method != "HEAD" => len.parse()?,
            Some(_) | None => 0,
        };
        let mut body = vec![0; len];
        self.0.read_exact(&mut body)?;
        Ok(Response { status, headers, body: String::from_utf8(body)? })
    }
}

fn tcp(from: Option<IpAddr>, to: SocketAddr, timeout: Duration) -> Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    if let Some(from) = from {
        socket.bind(&SocketAddr::new(from, 0).into()).with_context(|| format!("sending from {from}"))?;
    }
    socket.connect_timeout(&to.into(), timeout).with_context(|| format!("connecting to {to}"))?;
    socket.set_read_timeout(Some(timeout))?;
    socket.set_tcp_nodelay(true)?;
    Ok(socket.into())
}

/// One request on a connection of its own.
pub fn request(
    address: &Address,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Result<Response> {
    Connection::open(address)?.request(method, target, headers, body)
}

pub fn get(address: &Address, target: &str, headers: &[(&str, &str)]) -> Result<Response> {
    request(address, "GET", target, headers, "")
}

pub fn post(address: &Address, target: &str, body: &serde_json::Value) -> Result<Response> {
    request(address, "POST", target, &[("Content-Type", "application/json")], &body.to_string())
}

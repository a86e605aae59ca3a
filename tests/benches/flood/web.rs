//! The server behind the interface, and the good client.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    time::Duration,
};

use limiter_tests::{
    eventually::until,
    netns::{GATEWAY_V4, TestNet},
};
use tempfile::TempDir;

/// nginx, which answers everything with a few bytes.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    _folder: TempDir,
}

impl Server {
    pub(crate) fn start(net: &TestNet) -> Self {
        let folder = TempDir::new().expect("a folder");
        let path = folder.path().display();
        let configuration = format!(
            "daemon off; master_process off; pid {path}/pid; error_log {path}/error.log;
            events {{ worker_connections 1024; }}
            http {{
                access_log off; keepalive_requests 1000000000; client_body_temp_path {path}; proxy_temp_path {path};
                fastcgi_temp_path {path}; uwsgi_temp_path {path}; scgi_temp_path {path};
                server {{ listen {GATEWAY_V4}:80; location / {{ return 200 \"served\\n\"; }} }}
            }}\n"
        );
        let file = folder.path().join("nginx.conf");
        fs::write(&file, configuration).expect("write the configuration of nginx");
        let child = net.gateway(|| {
            let mut command = Command::new("nginx");
            command.arg("-e").arg(folder.path().join("error.log")).arg("-c").arg(&file);
            command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("start nginx")
        });
        until("nginx listens", Duration::from_secs(10), || {
            net.client(|| TcpStream::connect_timeout(&SocketAddr::new(GATEWAY_V4, 80), Duration::from_secs(1))).ok()
        });
        Self { child, _folder: folder }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Requests that wrk had answered in a second, over 16 connections.
pub(crate) fn requests_per_second(net: &TestNet, seconds: u32) -> f64 {
    let output = net.client(|| {
        let mut wrk = Command::new("wrk");
        wrk.args(["-t1", "-c16", &format!("-d{seconds}s"), &format!("http://{GATEWAY_V4}/")]);
        wrk.output().expect("start wrk")
    });
    let text = String::from_utf8_lossy(&output.stdout);
    let rate = text.lines().find_map(|line| line.trim().strip_prefix("Requests/sec:")?.trim().parse().ok());
    rate.unwrap_or_else(|| panic!("wrk: {text}{}", String::from_utf8_lossy(&output.stderr)))
}

//! Logs go to standard error, as text, or as JSON with `LIMITER_LOG_FORMAT=json`.
//!
//! `LIMITER_LOG` chooses levels, as `tracing_subscriber`'s `EnvFilter` reads them: `info` unless it is set. ERROR: the
//! agent cannot do its work. WARN: an operator should look. INFO: transitions. Addresses of clients appear at DEBUG,
//! but for the sources that events of the XDP program name.

use std::io;

use tracing_subscriber::EnvFilter;

pub fn init() {
    let filter = EnvFilter::builder().with_env_var("LIMITER_LOG").try_from_env();
    let filter = filter.unwrap_or_else(|_absent_or_wrong| EnvFilter::new("info"));
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(false);
    if std::env::var_os("LIMITER_LOG_FORMAT").is_some_and(|format| format == "json") {
        subscriber.json().init();
    } else {
        subscriber.init();
    }
}

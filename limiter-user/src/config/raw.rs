//! Which tables and fields a configuration file has, before any of them means anything.

use super::document::raw_table;

raw_table!(RawConfig {
    ;tables node: RawNode, xdp: RawXdp, api: RawApi, store: RawStore, identity: RawIdentity, policy: RawPolicySource, push: RawPush
});

/// Tables that variables `LIMITER_<TABLE>_…` can name.
pub(super) const TABLES: &[&str] = &["node", "xdp", "api", "store", "identity", "policy", "push"];

raw_table!(RawNode in place { id, region });

raw_table!(RawXdp { interfaces, mode, protect, on_exit, pin_dir, max_sources, drop_malformed, diagnosis });

raw_table!(RawApi in place { http, admin; tables headers: RawHeaders, pressure: RawPressure; later grpc, spop, admin_token_file });

raw_table!(RawHeaders { x_ratelimit, draft_10, draft_03 });

raw_table!(RawPressure in place { header, interval, expires });

raw_table!(RawStore { kind, max_counters; tables redis: RawRedis, breaker: RawBreaker });

raw_table!(RawBreaker { failures, within, probe });

raw_table!(RawRedis in place { urls, mode, service, username, password_file, timeout, sync_interval, heartbeat, recover; tables tls: RawTls });

raw_table!(RawTls in place { ca_file, cert_file, key_file });

raw_table!(RawIdentity {
    order, api_key_header, api_key_query, session_cookie, client_address_header, key_store, key_file, key_secret_file, key_copy_file, trusted_proxies, ipv4_prefix, ipv6_prefix; tables jwt: RawJwt
});

raw_table!(RawJwt { public_key_file, jwks_file, secret_file, algorithms, audience, issuer, leeway, plan_claim });

raw_table!(RawPolicySource { file; later redis });

raw_table!(RawPush { enabled, max_block, after_denials });

//! What of a configuration that was read again cannot take effect while the agent runs.

use super::{ApiConfig, Config, IdentityConfig, NodeConfig, PolicyConfig, PushConfig, StoreConfig, XdpConfig};

/// Names of the settings that differ and need a restart. A new field does not compile until it is decided here which
/// ones it belongs to.
pub(crate) fn needs_restart(running: &Config, read: &Config) -> Vec<&'static str> {
    let mut names = Vec::new();
    macro_rules! compare {
        ($table:literal, $ty:ident in $of:ident { restart $($field:ident),*; live $($live:ident),* }) => {
            let $ty { $($field,)* $($live: _,)* } = &running.$of;
            $(if *$field != read.$of.$field {
                names.push(concat!($table, ".", stringify!($field)));
            })*
        };
    }
    let Config { path: _, node: _, xdp: _, api: _, store: _, identity: _, policy: _, push: _ } = running;
    compare!("node", NodeConfig in node { restart id, region; live });
    compare!("xdp", XdpConfig in xdp {
        restart mode, pin_dir, max_sources, diagnosis; live interfaces, protect, on_exit, drop_malformed
    });
    compare!("api", ApiConfig in api { restart http, admin, headers, pressure; live });
    compare!("store", StoreConfig in store { restart max_counters, kind, breaker; live });
    compare!("identity", IdentityConfig in identity {
        restart order, api_key_header, api_key_query, session_cookie, client_address_header, jwt, key_store, key_file, key_secret_file, key_copy_file, trusted_proxies, prefixes; live
    });
    compare!("policy", PolicyConfig in policy { restart file; live });
    compare!("push", PushConfig in push { restart enabled, max_block, after_denials; live });
    for name in &mut names {
        // As they are called in the file.
        *name = match *name {
            "xdp.max_sources" => "xdp.max_sources (after \"limiter unpin\")",
            "store.kind" => "store.kind or store.redis",
            "store.breaker" => "[store.breaker]",
            "identity.key_store" => "identity.key_store or store.redis",
            "identity.jwt" => "[identity.jwt]",
            "identity.prefixes" => "identity.ipv4_prefix or identity.ipv6_prefix",
            name => name,
        };
    }
    names
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Environment;

    #[test]
    fn names_what_needs_a_restart_and_nothing_else() {
        let read = |text: &str| Config::parse(Path::new("/limiter.toml"), text, Environment::default()).unwrap();
        let redis = "[store]\nkind = \"redis\"\n[store.redis]\nurls = [\"redis://127.0.0.1\"]\n";
        let keys_in_redis = format!("[identity]\nkey_store = \"redis\"\n{redis}");
        let other_redis = redis.replace("127.0.0.1", "127.0.0.2");
        for (running, changed, expected) in [
            ("", "", &[][..]),
            (
                "",
                "[xdp]\ninterfaces = [\"eth0\"]\nprotect = \"all\"\non_exit = \"detach\"\ndrop_malformed = false\n",
                &[],
            ),
            ("", "[xdp]\nmode = \"generic\"\n", &["xdp.mode"]),
            // The default, written down.
            ("", "[xdp]\nmode = \"auto\"\n[api]\nhttp = \"127.0.0.1:7070\"\n", &[]),
            (
                "[xdp]\npin_dir = \"/a\"\nmax_sources = 2048\n",
                "",
                &["xdp.pin_dir", "xdp.max_sources (after \"limiter unpin\")"],
            ),
            ("[api]\nhttp = \"127.0.0.1:1\"\nadmin = \"127.0.0.1:2\"\n", "", &["api.http", "api.admin"]),
            ("[api.headers]\ndraft_10 = false\n[api.pressure]\nheader = true", "", &["api.headers", "api.pressure"]),
            ("[node]\nid = \"a\"\n", "[node]\nid = \"a\"\nregion = \"r\"\n", &["node.region"]),
            ("", redis, &["store.kind or store.redis"]),
            (redis, &other_redis, &["store.kind or store.redis"]),
            (&keys_in_redis, "", &["store.kind or store.redis", "identity.key_store or store.redis"]),
            (
                "[identity]\ntrusted_proxies = [\"10.0.0.0/8\"]\nipv4_prefix = 24\n",
                "",
                &["identity.trusted_proxies", "identity.ipv4_prefix or identity.ipv6_prefix"],
            ),
            ("[push]\nmax_block = \"1m\"\n[policy]\nfile = \"p\"\n", "", &["policy.file", "push.max_block"]),
        ] {
            assert_eq!(needs_restart(&read(running), &read(changed)), expected, "{running} {changed}");
        }
    }
}

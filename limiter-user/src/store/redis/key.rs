//! Names in Redis: of counters, `rl:{<scope>:<identity>}:<rule>`, and of the key store.
//!
//! The braces are a Redis Cluster hash tag: all counters of one identity are in one slot. Names are injective: no two
//! counters share one, whatever a client sends. An identity cannot contain `}`, so the first one ends it; a scope
//! cannot contain `:`, so the first one ends that.
//!
//! The names are a format that other nodes and operators rely on. The golden test fails when they change.

use std::{fmt::Write as _, net::IpAddr};

use crate::store::{ApiKeyId, CounterKey, Identity, IdentityRef, SessionId};

/// Names of the key store: its entries, the order of their changes, and what is known of the whole. The tag has no colon, so
/// no counter shares it. They have no time to live: a key is valid until somebody ends it.
pub(super) const KEY_STORE: [&str; 3] = ["rl:{keys}:entries", "rl:{keys}:order", "rl:{keys}:meta"];

/// Where all nodes of a fleet say that they are alive. Its tag has no colon either.
pub(super) const LIVE_NODES: &str = "rl:{nodes}:live";

/// Name of a counter.
pub fn redis_key(key: &CounterKey) -> String {
    let mut name = String::with_capacity(64);
    name.push_str("rl:{");
    push_tag(&mut name, &key.identity.borrowed());
    name.push_str("}:");
    push_encoded(&mut name, &key.rule);
    name
}

/// What is between the braces: it says which slot the counters of an identity are in.
pub(super) fn push_tag(name: &mut String, identity: &IdentityRef<'_>) {
    name.push_str(identity.scope_name());
    name.push(':');
    match identity {
        IdentityRef::User(user) => push_encoded(name, user),
        IdentityRef::Key(ApiKeyId(hash)) | IdentityRef::Session(SessionId(hash)) => {
            for byte in hash {
                push_hex(name, *byte);
            }
        }
        // Text form; the colons of IPv6 are inside the braces and end nothing.
        IdentityRef::Ip(ip) => push_ip(name, ip),
        IdentityRef::Global => name.push_str("all"),
        // The name of an attribute needs no encoding, and its value has no colon once it is encoded.
        IdentityRef::Attribute(attribute) => {
            let (attribute, value) = attribute.split_once(':').unwrap_or((attribute, ""));
            push_encoded(name, attribute);
            name.push(':');
            push_encoded(name, value);
        }
    }
}

/// The counter that has this name; `None` of what is no counter's name.
pub(super) fn counter_of(name: &[u8]) -> Option<CounterKey> {
    let text = std::str::from_utf8(name).ok()?;
    let (tag, rule) = text.strip_prefix("rl:{")?.split_once("}:")?;
    let (scope, identity) = tag.split_once(':')?;
    let hash = || {
        let bytes = (identity.len() == 32).then(|| decode_hex(identity))??;
        <[u8; 16]>::try_from(bytes).ok()
    };
    let identity = match scope {
        "user" => Identity::User(decode(identity)?.into()),
        "key" => Identity::Key(ApiKeyId(hash()?)),
        "session" => Identity::Session(SessionId(hash()?)),
        "ip" => Identity::Ip(identity.parse().ok()?),
        "global" => Identity::Global,
        "attribute" => {
            let (attribute, value) = identity.split_once(':')?;
            Identity::Attribute(format!("{}:{}", decode(attribute)?, decode(value)?).into())
        }
        _ => return None,
    };
    let key = CounterKey { identity, rule: decode(rule)?.into() };
    // Names are canonical: another way to write one would be another key.
    (redis_key(&key) == text).then_some(key)
}

/// What [`push_encoded`] has written.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut parts = text.split('%');
    bytes.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        bytes.extend(decode_hex(digits)?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

fn decode_hex(digits: &str) -> Option<Vec<u8>> {
    let (pairs, []) = digits.as_bytes().as_chunks::<2>() else { return None };
    let digit = |digit: u8| u8::try_from(char::from(digit).to_digit(16)?).ok();
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect()
}

/// Percent-encodes every byte but `A-Z a-z 0-9 _ . - @ + = ~`.
fn push_encoded(name: &mut String, text: &str) {
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'@' | b'+' | b'=' | b'~' => {
                name.push(char::from(byte));
            }
            _ => {
                name.push('%');
                push_hex(name, byte);
            }
        }
    }
}

fn push_hex(name: &mut String, byte: u8) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for digit in [byte >> 4, byte & 0xf] {
        name.push(char::from(DIGITS[usize::from(digit)]));
    }
}

fn push_ip(name: &mut String, ip: &IpAddr) {
    // Writing to a string cannot fail.
    let written = write!(name, "{ip}");
    debug_assert!(written.is_ok());
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn name(identity: Identity, rule: &str) -> String {
        redis_key(&CounterKey { identity, rule: rule.into() })
    }

    #[test]
    fn names_are_these_bytes() {
        let user = |user: &str| Identity::User(user.into());
        let key: [u8; 16] = std::array::from_fn(|byte| u8::try_from(byte * 17).unwrap());
        for (identity, rule, expected) in [
            (user("u_1"), "login", "rl:{user:u_1}:login"),
            (user("anna@example.org"), "search-v2", "rl:{user:anna@example.org}:search-v2"),
            (user("a:b}{%c\0\n"), "login", "rl:{user:a%3ab%7d%7b%25c%00%0a}:login"),
            (user("жук"), "login", "rl:{user:%d0%b6%d1%83%d0%ba}:login"),
            (user(""), "login", "rl:{user:}:login"),
            (Identity::Key(ApiKeyId(key)), "login", "rl:{key:00112233445566778899aabbccddeeff}:login"),
            (Identity::Session(SessionId(key)), "login", "rl:{session:00112233445566778899aabbccddeeff}:login"),
            (Identity::Ip("203.0.113.7".parse().unwrap()), "login", "rl:{ip:203.0.113.7}:login"),
            (Identity::Ip("2001:db8:0:1::".parse().unwrap()), "login", "rl:{ip:2001:db8:0:1::}:login"),
            (Identity::Attribute("tenant:x".into()), "login", "rl:{attribute:tenant:x}:login"),
            (Identity::Attribute("tenant:a:b}c".into()), "login", "rl:{attribute:tenant:a%3ab%7dc}:login"),
            (Identity::Global, "login", "rl:{global:all}:login"),
            (Identity::Global, "a:b c", "rl:{global:all}:a%3ab%20c"),
        ] {
            assert_eq!(name(identity, rule), expected);
        }
    }

    fn identities() -> impl Strategy<Value = Identity> {
        prop_oneof![
            "[a:{}%0-9\\PC\0]{0,6}".prop_map(|user| Identity::User(user.into())),
            any::<[u8; 16]>().prop_map(|id| Identity::Key(ApiKeyId(id))),
            any::<[u8; 16]>().prop_map(|id| Identity::Session(SessionId(id))),
            any::<IpAddr>().prop_map(Identity::Ip),
            ("[ab.]{1,2}", "[a:{}%0-9\\PC\0]{0,6}")
                .prop_map(|(name, value)| { Identity::Attribute(format!("{name}:{value}").into()) }),
            Just(Identity::Global),
        ]
    }

    proptest! {
        #[test]
        fn what_is_read_as_a_name_is_one(
            text in prop_oneof!["rl:\\{(user|key|ip|global|attribute|x):[a:%0-9A-F}]{0,8}\\}:[a%0-9A-F]{0,5}", "\\PC{0,20}"],
        ) {
            if let Some(key) = counter_of(text.as_bytes()) {
                prop_assert_eq!(redis_key(&key), text);
            }
        }

        #[test]
        fn no_two_counters_share_a_name(
            keys in prop::collection::vec((identities(), "[a:{}%7d]{0,4}"), 2..64),
        ) {
            let mut seen = HashMap::new();
            for (identity, rule) in keys {
                let key = CounterKey { identity, rule: rule.as_str().into() };
                let name = redis_key(&key);
                prop_assert!(name.bytes().all(|byte| byte.is_ascii_graphic()), "{name}");
                // The hash tag is what is between the first `{` and the first `}` after it.
                let tag = name.split_once('{').unwrap().1.split_once('}').unwrap().0;
                prop_assert!(tag.starts_with(key.identity.scope_name()), "{name}");
                let others = KEY_STORE.iter().chain([&LIVE_NODES]);
                prop_assert!(others.into_iter().all(|other| !other.contains(&format!("{{{tag}}}"))), "{name}");
                prop_assert_eq!(counter_of(name.as_bytes()), Some(key.clone()), "{}", name);
                if let Some(other) = seen.insert(name.clone(), key.clone()) {
                    prop_assert_eq!(other, key, "{}", name);
                }
            }
        }
    }
}

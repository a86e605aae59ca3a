//! Which of a cluster's 16,384 slots a key is in (Redis Cluster specification, "Key distribution model").

use crc::{CRC_16_XMODEM, Crc};

pub(super) const SLOTS: u16 = 16384;

const CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// By what is between the first `{` and the first `}` after it, or by the whole key when that is nothing.
pub(super) fn slot(key: &[u8]) -> u16 {
    CRC.checksum(tag(key)) % SLOTS
}

fn tag(key: &[u8]) -> &[u8] {
    let Some(open) = key.iter().position(|&byte| byte == b'{') else { return key };
    let rest = &key[open + 1..];
    match rest.iter().position(|&byte| byte == b'}') {
        None | Some(0) => key,
        Some(close) => &rest[..close],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `CLUSTER KEYSLOT` says.
    #[test]
    fn slots_are_those_of_redis() {
        for (key, expected) in [
            ("123456789", 0x31c3),
            ("foo", 12182),
            ("rl:{user:u_1}:login", slot(b"user:u_1")),
            ("rl:{user:u_1}:search", slot(b"user:u_1")),
            ("{}foo", slot(b"{}foo")),
            ("foo{bar", slot(b"foo{bar")),
            ("{foo}{bar}", 12182),
        ] {
            assert_eq!(slot(key.as_bytes()), expected, "{key}");
        }
    }
}

//! What holds of source keys, whatever the addresses and the prefix lengths.

use limiter_common::{
    addr::{SrcKeyV4, SrcKeyV6, SrcMaskV4, SrcMaskV6},
    aggregate::index,
    schema::{AGGREGATE_ROW, AGGREGATES},
    stats::RULE_SLOTS,
};

/// # Panics
///
/// When a property does not hold.
pub(crate) fn check(input: &[u8]) {
    let Some((bytes, _)) = input.split_first_chunk::<41>() else { return };
    let one: [u8; 16] = bytes[..16].try_into().expect("sixteen bytes");
    let mut other: [u8; 16] = bytes[16..32].try_into().expect("sixteen bytes");
    let seed = u64::from_be_bytes(bytes[32..40].try_into().expect("eight bytes"));
    let len = bytes[40];
    // Addresses that have nothing in common show little.
    let shared = usize::from(seed.to_be_bytes()[0] % 17);
    other[..shared].copy_from_slice(&one[..shared]);
    ipv6(one, other, len, seed);
    let four = |address: [u8; 16]| [address[0], address[1], address[2], address[3]];
    ipv4(four(one), four(other), len, seed);
}

fn ipv4(one: [u8; 4], other: [u8; 4], len: u8, seed: u64) {
    let slot = of_rule(seed);
    let mask = SrcMaskV4::new(len);
    let len = u32::from(len.min(32));
    let prefix = |address| u64::from(u32::from_be_bytes(address)) >> (32 - len);
    let (key, other_key) = (SrcKeyV4::new(one, mask), SrcKeyV4::new(other, mask));
    assert_eq!(key == other_key, prefix(one) == prefix(other), "{one:?} and {other:?} by /{len}");
    assert_eq!(prefix(key.octets()), prefix(one));
    assert_eq!(SrcKeyV4::new(key.octets(), mask), key);
    one_in_each_row(index::v4(one, slot, seed));
    if one[..3] == other[..3] {
        assert_eq!(index::v4(one, slot, seed), index::v4(other, slot, seed));
    }
}

fn ipv6(one: [u8; 16], other: [u8; 16], len: u8, seed: u64) {
    let slot = of_rule(seed);
    let mask = SrcMaskV6::new(len);
    let [first, last] = mask.halves();
    assert_eq!(SrcMaskV6::from_halves(first, last), mask);
    let len = u32::from(len.min(128));
    let prefix = |address| u128::from_be_bytes(address).checked_shr(128 - len).unwrap_or(0);
    let (key, other_key) = (SrcKeyV6::new(one, mask), SrcKeyV6::new(other, mask));
    assert_eq!(key == other_key, prefix(one) == prefix(other), "{one:?} and {other:?} by /{len}");
    assert_eq!(prefix(key.octets()), prefix(one));
    assert_eq!(SrcKeyV6::new(key.octets(), mask), key);
    one_in_each_row(index::v6(one, slot, seed));
    if one[..6] == other[..6] {
        assert_eq!(index::v6(one, slot, seed), index::v6(other, slot, seed));
    }
}

fn of_rule(seed: u64) -> u32 {
    u32::try_from(seed % u64::from(RULE_SLOTS)).expect("the slot of a rule")
}

fn one_in_each_row([first, second]: [u32; 2]) {
    assert!(first < AGGREGATE_ROW && (AGGREGATE_ROW..AGGREGATES).contains(&second), "{first} and {second}");
}

//! What is stored under a counter's name: one flat array of numbers in MessagePack, or the short form of a counter of windows.
//! `lua/README.md` says what they mean.

use crate::store::counter::{LoggedAdmission, SharedCounts};
use limiter_common::sliding_window::Counts;

/// A counter as it is in Redis, as everybody has used it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredCounter {
    pub window_us: u64,
    /// As if no part of them were this node's own.
    pub counts: SharedCounts,
}

/// First bytes of the short form: they begin neither an array in MessagePack nor a text.
const SHORT: std::ops::RangeInclusive<u8> = 0xa0..=0xbf;

/// `None` of what is no counter.
pub(super) fn decode(value: &[u8]) -> Option<StoredCounter> {
    match value.split_first() {
        Some((head, rest)) if SHORT.contains(head) => short(head - SHORT.start(), rest),
        _ => long(value),
    }
}

fn short(head: u8, mut rest: &[u8]) -> Option<StoredCounter> {
    const UNITS_US: [u64; 4] = [1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000];
    let number_bytes = if head & 1 == 0 { 3 } else { 4 };
    let index_bytes = if head & 2 == 0 { 3 } else { 4 };
    // Of two counts in one number, the first is in its higher half.
    let pair_bytes = usize::from(head >> 2 & 3) + 2;
    let pair = |both: u64| (both >> (4 * pair_bytes), both & ((1 << (4 * pair_bytes)) - 1));
    let window = unsigned(&mut rest, 2)?;
    let window_us = (window >> 2) * UNITS_US[usize::try_from(window & 3).ok()?];
    let index = unsigned(&mut rest, index_bytes)?;
    let (mut previous, mut current) = if head & 16 == 0 { (0, 0) } else { pair(unsigned(&mut rest, pair_bytes)?) };
    if window_us == 0 || !rest.len().is_multiple_of(4 + number_bytes + pair_bytes) {
        return None;
    }
    for node in rest.chunks_exact(4 + number_bytes + pair_bytes) {
        let (own_previous, own_current) = pair(unsigned(&mut &node[4 + number_bytes..], pair_bytes)?);
        (previous, current) = (previous + own_previous, current + own_current);
    }
    let counts = SharedCounts::Windows { counts: Counts { index, previous, current }, own_previous: 0, own_current: 0 };
    Some(StoredCounter { window_us, counts })
}

fn long(value: &[u8]) -> Option<StoredCounter> {
    let fields = numbers(value)?;
    let (&[kind, window_us, first, second, third], records) = fields.split_first_chunk()?;
    if window_us == 0 || records.len() % 4 != 0 {
        return None;
    }
    let counts = match kind {
        1 => {
            let counts = Counts { index: first, previous: second, current: third };
            SharedCounts::Windows { counts, own_previous: 0, own_current: 0 }
        }
        // Above the nanoseconds is what the bucket owes.
        2 => SharedCounts::Bucket { tat_ns: first.checked_mul(1000)?.checked_add(second % 1000)?, own_total: 0 },
        3 => {
            let (records, _) = records.as_chunks::<4>();
            let admission = |&[tag, number, at_us, cost]: &[u64; 4]| {
                let (tag, number) = (u32::try_from(tag).ok()?, u32::try_from(number).ok()?);
                Some(LoggedAdmission { tag, number, at_us, cost })
            };
            SharedCounts::Log { admissions: records.iter().map(admission).collect::<Option<_>>()? }
        }
        _ => return None,
    };
    Some(StoredCounter { window_us, counts })
}

/// An array of unsigned integers, and nothing behind it.
fn numbers(value: &[u8]) -> Option<Vec<u64>> {
    let (&head, mut rest) = value.split_first()?;
    let len = match head {
        0x90..=0x9f => u64::from(head & 0x0f),
        0xdc => unsigned(&mut rest, 2)?,
        0xdd => unsigned(&mut rest, 4)?,
        _ => return None,
    };
    // Each number takes a byte at least, so nobody can ask for more memory than was sent.
    let len = usize::try_from(len).ok().filter(|len| *len <= rest.len())?;
    let mut numbers = Vec::with_capacity(len);
    for _ in 0..len {
        let (&head, after) = rest.split_first()?;
        rest = after;
        numbers.push(match head {
            0x00..=0x7f => u64::from(head),
            0xcc => unsigned(&mut rest, 1)?,
            0xcd => unsigned(&mut rest, 2)?,
            0xce => unsigned(&mut rest, 4)?,
            0xcf => unsigned(&mut rest, 8)?,
            _ => return None,
        });
    }
    rest.is_empty().then_some(numbers)
}

/// The next bytes, as a number with the highest byte first.
fn unsigned(rest: &mut &[u8], bytes: usize) -> Option<u64> {
    let (number, after) = rest.split_at_checked(bytes)?;
    *rest = after;
    Some(number.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As Redis packs them.
    fn pack(numbers: &[u64]) -> Vec<u8> {
        let len = u32::try_from(numbers.len()).unwrap();
        let mut packed = match len {
            0..16 => vec![0x90 | u8::try_from(len).unwrap()],
            16..0x1_0000 => [&[0xdc], &len.to_be_bytes()[2..]].concat(),
            _ => [&[0xdd], &len.to_be_bytes()[..]].concat(),
        };
        for number in numbers {
            let bytes = number.to_be_bytes();
            match number {
                0..0x80 => packed.push(bytes[7]),
                0x80..0x100 => packed.extend([0xcc, bytes[7]]),
                0x100..0x1_0000 => packed.extend([&[0xcd], &bytes[6..]].concat()),
                0x1_0000..0x1_0000_0000 => packed.extend([&[0xce], &bytes[4..]].concat()),
                _ => packed.extend([&[0xcf], &bytes[..]].concat()),
            }
        }
        packed
    }

    #[test]
    fn each_kind_is_read_without_the_records_of_nodes() {
        let windows = SharedCounts::Windows {
            counts: Counts { index: 30, previous: 2, current: 300 },
            own_previous: 0,
            own_current: 0,
        };
        let admission = LoggedAdmission { tag: 7, number: 1, at_us: 1 << 50, cost: 2 };
        for (numbers, counts) in [
            (&[1, 60_000_000, 30, 2, 300, 7, 1, 2, 300][..], windows),
            (&[2, 1, 1 << 50, 999, 5, 7, 1, 0, 9], SharedCounts::Bucket { tat_ns: (1000 << 50) + 999, own_total: 0 }),
            (&[2, 1, 1 << 50, 70_999, 5], SharedCounts::Bucket { tat_ns: (1000 << 50) + 999, own_total: 0 }),
            (&[3, 1, 0, 0, 0, 7, 1, 1 << 50, 2], SharedCounts::Log { admissions: vec![admission] }),
        ] {
            assert_eq!(decode(&pack(numbers)), Some(StoredCounter { window_us: numbers[1], counts }), "{numbers:?}");
        }
        for other in
            [&[4, 1, 1, 1, 1][..], &[1, 0, 1, 1, 1], &[1, 1, 1, 1], &[1, 1, 1, 1, 1, 1], &[2, 1, u64::MAX, 0, 1]]
        {
            assert_eq!(decode(&pack(other)), None, "{other:?}");
        }
    }

    /// Redis is asked to write the same ones in the suite.
    #[test]
    fn the_short_form_is_read() {
        let golden = include_str!("../../../../tests/golden/counter_values.txt");
        let lines: Vec<&str> = golden.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(lines.len() > 5);
        for line in lines {
            let (numbers, value) = line.split_once(" = ").unwrap();
            let numbers: Vec<u64> = numbers.split(' ').map(|number| number.parse().unwrap()).collect();
            let counts = Counts { index: numbers[2], previous: numbers[3], current: numbers[4] };
            let counts = SharedCounts::Windows { counts, own_previous: 0, own_current: 0 };
            let expected = Some(StoredCounter { window_us: numbers[1], counts });
            let value = bytes(value);
            assert_eq!(decode(&value), expected, "{line}");
            assert_eq!(decode(&pack(&numbers)), expected, "{line}");
            for cut in 1..4 {
                assert_eq!(decode(&value[..value.len() - cut]), None, "{line}");
            }
        }
        assert_eq!(decode(&bytes("a0 0003 077f28")), None, "a window of no length");
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.chars().filter_map(|digit| digit.to_digit(16)?.try_into().ok()).collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    }

    proptest! {
        #[test]
        fn numbers_are_what_was_packed(packed in prop::collection::vec(prop_oneof![0u64..300, any::<u64>()], 0..40)) {
            prop_assert_eq!(numbers(&pack(&packed)), Some(packed));
        }

        #[test]
        fn whatever_is_there_is_read_or_not(bytes in prop::collection::vec(any::<u8>(), 0..64), head in 0xa0u8..0xc0) {
            // What was read says the same again.
            if let Some(read) = numbers(&bytes) {
                prop_assert_eq!(numbers(&pack(&read)), Some(read));
            }
            let _ = decode(&bytes);
            let _ = decode(&[&[head], &bytes[..]].concat());
        }
    }
}

//! What is stored under a counter's name: one flat array of numbers in MessagePack. `lua/README.md` says what they mean.

use crate::store::counter::{LoggedAdmission, SharedCounts};
use limiter_common::sliding_window::Counts;

/// A counter as it is in Redis, as everybody has used it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredCounter {
    pub window_us: u64,
    /// As if no part of them were this node's own.
    pub counts: SharedCounts,
}

/// `None` of what is no counter.
pub(super) fn decode(value: &[u8]) -> Option<StoredCounter> {
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

    proptest! {
        #[test]
        fn numbers_are_what_was_packed(packed in prop::collection::vec(prop_oneof![0u64..300, any::<u64>()], 0..40)) {
            prop_assert_eq!(numbers(&pack(&packed)), Some(packed));
        }

        #[test]
        fn whatever_is_there_is_read_or_not(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            // What was read says the same again.
            if let Some(read) = numbers(&bytes) {
                prop_assert_eq!(numbers(&pack(&read)), Some(read));
            }
            let _ = decode(&bytes);
        }
    }
}

//! Durations, sizes and rates as people write them: `"50ms"`, `"10MB"`, `"100/s"`, `"1.5MB/s"`.
//!
//! Everything is exact: a number that its unit cannot express as a whole is refused, never rounded.

use std::time::Duration;

use limiter_common::quota::{QuotaError, Rate};

/// The word for no limit. 0 is never one.
pub const UNLIMITED: &str = "unlimited";

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    #[error("\"{text}\" is not {expected}")]
    Malformed { text: String, expected: &'static str },
    #[error("\"{text}\" has no unit: write {expected}")]
    NoUnit { text: String, expected: &'static str },
    #[error("\"{text}\" is 0: use a longer time or remove the entry")]
    ZeroDuration { text: String },
    #[error("\"{text}\" is 0: use \"unlimited\" or remove the entry")]
    ZeroSize { text: String },
    #[error("{}", QuotaError::ZeroRate)]
    ZeroRate,
    #[error("\"{text}\" is too large")]
    TooLarge { text: String },
    #[error("\"{text}\" is not a whole number of {unit}")]
    NotWhole { text: String, unit: &'static str },
}

const DURATION: &str = "a duration such as \"50ms\" (us, ms, s, m, h, d)";
const SIZE: &str = "a size such as \"10MB\" (B, kB, MB, GB, KiB, MiB, GiB)";
const RATE: &str = "a rate such as \"100/s\" (/s, /m, /h, /d)";
const BYTE_RATE: &str = "a rate of bytes such as \"10MB/s\" (/s, /m, /h, /d)";

const DURATION_UNITS: &[(&str, u64)] = &[
    ("us", 1_000),
    ("µs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
    ("d", 86_400_000_000_000),
];

/// Decimal units are powers of 1000, binary ones (`i`) of 1024. `K` is taken for `k`, since nothing else could be meant.
const SIZE_UNITS: &[(&str, u64)] = &[
    ("B", 1),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

const PER_UNITS: &[(&str, u64)] =
    &[("s", 1_000_000_000), ("m", 60_000_000_000), ("h", 3_600_000_000_000), ("d", 86_400_000_000_000)];

/// What the number of a rate counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Packets, connections: a bare number.
    Events,
    /// A size with its unit.
    Bytes,
}

/// A rate, or the word for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateSetting {
    Unlimited,
    Rate(Rate),
}

/// `"500us"`, `"50ms"`, `"1.5s"`, `"10m"`, `"1h"`, `"30d"`: more than 0 and at most 584 years.
pub fn duration(text: &str) -> Result<Duration, UnitError> {
    let nanos = with_unit(text, DURATION_UNITS, DURATION, "nanoseconds")?;
    if nanos == 0 {
        return Err(UnitError::ZeroDuration { text: text.into() });
    }
    Ok(Duration::from_nanos(nanos))
}

/// `"1514B"`, `"10MB"` (decimal), `"10MiB"` (binary): more than 0.
pub fn size(text: &str) -> Result<u64, UnitError> {
    match with_unit(text, SIZE_UNITS, SIZE, "bytes")? {
        0 => Err(UnitError::ZeroSize { text: text.into() }),
        bytes => Ok(bytes),
    }
}

/// `"100/s"`, `"6000/m"`, `"10MB/s"`, `"unlimited"`.
pub fn rate(text: &str, counted: Counted) -> Result<RateSetting, UnitError> {
    if text == UNLIMITED {
        return Ok(RateSetting::Unlimited);
    }
    let expected = match counted {
        Counted::Events => RATE,
        Counted::Bytes => BYTE_RATE,
    };
    let Some((amount, per)) = text.split_once('/') else {
        return Err(UnitError::NoUnit { text: text.into(), expected });
    };
    let per_ns = PER_UNITS.iter().find(|(unit, _)| *unit == per).map(|(_, ns)| *ns);
    let per_ns = per_ns.ok_or_else(|| UnitError::Malformed { text: text.into(), expected })?;
    let count = match counted {
        Counted::Events if amount.is_empty() || !amount.bytes().all(|byte| byte.is_ascii_digit()) => {
            return Err(UnitError::Malformed { text: text.into(), expected });
        }
        Counted::Events => amount.parse().ok().ok_or_else(|| UnitError::TooLarge { text: text.into() })?,
        Counted::Bytes if amount == "0" => 0,
        Counted::Bytes => with_unit(amount, SIZE_UNITS, expected, "bytes")?,
    };
    if count == 0 { Err(UnitError::ZeroRate) } else { Ok(RateSetting::Rate(Rate { count, per_ns })) }
}

/// A decimal number, exactly.
#[derive(Clone, Copy)]
struct Decimal {
    /// The number times 10^`places`.
    digits: u128,
    places: u32,
}

impl Decimal {
    /// Digits, at most one point between them, at most nine after it. No sign, no exponent.
    fn parse(text: &str) -> Option<Self> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number(whole) || !is_number(fraction) || whole.len() > 25 || fraction.len() > 9 {
            return None;
        }
        let places = u32::try_from(fraction.len()).ok()?;
        let digits = whole.parse::<u128>().ok()? * 10u128.pow(places) + fraction.parse::<u128>().ok()?;
        Some(Self { digits, places })
    }

    /// The number times `unit`, if that is whole.
    fn times(self, unit: u64) -> Option<u128> {
        let product = self.digits * u128::from(unit);
        let divisor = 10u128.pow(self.places);
        product.is_multiple_of(divisor).then_some(product / divisor)
    }
}

/// A decimal of at most three places, as thousandths: `"1.001"` is exactly 1001. `None` when it is not one.
pub fn thousandths(text: &str) -> Option<u64> {
    Decimal::parse(text)?.times(1000).and_then(|thousandths| u64::try_from(thousandths).ok())
}

/// A decimal in units of the `places`-th place; what is beyond is cut off. `None` when it is none or too large.
pub fn decimal(text: &str, places: usize) -> Option<u64> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    if whole.is_empty() || !whole.bytes().chain(decimals.bytes()).all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let mut value: u64 = whole.parse().ok()?;
    for place in 0..places {
        let digit = decimals.as_bytes().get(place).map_or(0, |byte| u64::from(byte - b'0'));
        value = value.checked_mul(10)?.checked_add(digit)?;
    }
    Some(value)
}

fn with_unit(
    text: &str,
    units: &[(&str, u64)],
    expected: &'static str,
    smallest: &'static str,
) -> Result<u64, UnitError> {
    let malformed = || UnitError::Malformed { text: text.into(), expected };
    let digits = text.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(malformed());
    }
    if unit.is_empty() {
        return Err(UnitError::NoUnit { text: text.into(), expected });
    }
    let (_, scale) = units.iter().find(|(name, _)| *name == unit).ok_or_else(malformed)?;
    let value = Decimal::parse(number).ok_or_else(malformed)?;
    let product = value.times(*scale).ok_or_else(|| UnitError::NotWhole { text: text.into(), unit: smallest })?;
    u64::try_from(product).ok().ok_or_else(|| UnitError::TooLarge { text: text.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, nanos) in [
            ("500us", 500_000),
            ("500µs", 500_000),
            ("50ms", 50_000_000),
            ("1s", 1_000_000_000),
            ("1.5s", 1_500_000_000),
            ("0.000000001s", 1),
            ("1m", 60_000_000_000),
            ("1h", 3_600_000_000_000),
            ("1d", 86_400_000_000_000),
            ("0.5d", 43_200_000_000_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
        for (text, message) in [
            ("", "\"\" is not a duration such as"),
            ("5", "\"5\" has no unit: write a duration such as \"50ms\""),
            ("ms", "\"ms\" is not a duration"),
            ("5 ms", "\"5 ms\" is not a duration"),
            ("-5ms", "\"-5ms\" is not a duration"),
            ("5w", "\"5w\" is not a duration"),
            ("5MS", "\"5MS\" is not a duration"),
            ("1.2.3s", "\"1.2.3s\" is not a duration"),
            ("1.s", "\"1.s\" is not a duration"),
            ("1e3s", "\"1e3s\" is not a duration"),
            ("0s", "\"0s\" is 0"),
            ("0.0ms", "\"0.0ms\" is 0"),
            ("0.0000001us", "\"0.0000001us\" is not a whole number of nanoseconds"),
            ("300000d", "\"300000d\" is too large"),
            ("99999999999999999999999999999999999999999d", "is not a duration"),
            ("unlimited", "\"unlimited\" is not a duration"),
        ] {
            let error = duration(text).expect_err(text).to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("1514B", 1514),
            ("1kB", 1000),
            ("1KB", 1000),
            ("1KiB", 1024),
            ("10MB", 10_000_000),
            ("10MiB", 10_485_760),
            ("1.5MB", 1_500_000),
            ("1.5KiB", 1536),
            ("2GB", 2_000_000_000),
            ("2GiB", 2_147_483_648),
            ("18446744073709551615B", u64::MAX),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for (text, message) in [
            ("10", "\"10\" has no unit: write a size such as"),
            ("10mb", "\"10mb\" is not a size"),
            ("10Mbit", "\"10Mbit\" is not a size"),
            ("1.5B", "\"1.5B\" is not a whole number of bytes"),
            ("0MB", "\"0MB\" is 0: use \"unlimited\" or remove the entry"),
            ("18446744073709551616B", "is too large"),
            ("18446744073709551615TB", "is too large"),
        ] {
            let error = size(text).expect_err(text).to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn rates() {
        const SECOND: u64 = 1_000_000_000;
        for (text, counted, count, per_ns) in [
            ("100/s", Counted::Events, 100, SECOND),
            ("6000/m", Counted::Events, 6000, 60 * SECOND),
            ("5/h", Counted::Events, 5, 3600 * SECOND),
            ("5/d", Counted::Events, 5, 86_400 * SECOND),
            ("10MB/s", Counted::Bytes, 10_000_000, SECOND),
            ("1.5MB/s", Counted::Bytes, 1_500_000, SECOND),
            ("1MiB/m", Counted::Bytes, 1_048_576, 60 * SECOND),
        ] {
            assert_eq!(rate(text, counted), Ok(RateSetting::Rate(Rate { count, per_ns })), "{text}");
        }
        assert_eq!(rate("unlimited", Counted::Bytes), Ok(RateSetting::Unlimited));
        for (text, counted, message) in [
            ("0/s", Counted::Events, "rate is 0: use \"unlimited\" or remove the entry"),
            ("0/s", Counted::Bytes, "rate is 0: use \"unlimited\" or remove the entry"),
            ("0MB/s", Counted::Bytes, "rate is 0: use \"unlimited\" or remove the entry"),
            ("100", Counted::Events, "\"100\" has no unit: write a rate such as \"100/s\""),
            ("100/", Counted::Events, "is not a rate such as"),
            ("100/ms", Counted::Events, "is not a rate such as"),
            ("/s", Counted::Events, "is not a rate such as"),
            ("1.5/s", Counted::Events, "is not a rate such as"),
            ("-1/s", Counted::Events, "is not a rate such as"),
            ("+1/s", Counted::Events, "is not a rate such as"),
            ("10MB/s", Counted::Events, "is not a rate such as"),
            ("10/s", Counted::Bytes, "\"10\" has no unit: write a rate of bytes such as \"10MB/s\""),
            ("18446744073709551616/s", Counted::Events, "is too large"),
            ("Unlimited", Counted::Events, "has no unit"),
        ] {
            let error = rate(text, counted).expect_err(text).to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn thousandths_are_exact() {
        for (text, value) in [
            ("1.001", Some(1001)),
            ("1", Some(1000)),
            ("1.0", Some(1000)),
            ("1.5", Some(1500)),
            ("1.2500", Some(1250)),
            ("1.0005", None),
            ("1e1", None),
            ("-1", None),
            ("nan", None),
            ("", None),
        ] {
            assert_eq!(thousandths(text), value, "{text}");
        }
    }
}

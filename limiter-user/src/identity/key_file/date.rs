//! Dates as key files have them.

use limiter_common::time::UnixMicros;

const DAY_S: u64 = 86_400;

/// As in `2026-01-31T12:00:00Z`.
pub(super) fn rfc_3339(at: UnixMicros) -> String {
    let seconds = at.get() / 1_000_000;
    let (days, second) = (seconds / DAY_S, seconds % DAY_S);
    // Howard Hinnant's civil_from_days, for days since 1970: eras of 400 years that begin in March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Of a date in exactly that form.
pub(super) fn instant(text: &str) -> Option<UnixMicros> {
    let number = |from: usize, to: usize| text.get(from..to)?.parse::<u64>().ok();
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    if !(1970..=9999).contains(&year) || !(1..=12).contains(&month) {
        return None;
    }
    // days_from_civil, for years of eras that begin in March.
    let (year, shifted_month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, year_of_era) = (year / 400, year % 400);
    let day_of_year = (153 * shifted_month + 2) / 5 + day.checked_sub(1)?;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let days = (era * 146_097 + day_of_era).checked_sub(719_468)?;
    let instant = UnixMicros::new((days * DAY_S + hour * 3600 + minute * 60 + second) * 1_000_000);
    (rfc_3339(instant) == text).then_some(instant)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_164_800, "2024-02-29T00:00:00Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            let at = UnixMicros::new(seconds * 1_000_000);
            assert_eq!((rfc_3339(at).as_str(), instant(date)), (date, Some(at)));
        }
        for text in [
            "",
            "2026-02-30T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-01-01",
            "1969-12-31T23:59:59Z",
            "2026-01-01T24:00:00Z",
        ] {
            assert_eq!(instant(text), None, "{text}");
        }
    }
}

//! What holds of a bucket, whatever its parameters and whatever arrives.

use limiter_common::gcra::{self, GcraParams, Outcome};

/// # Panics
///
/// When a property does not hold.
pub(crate) fn check(input: &[u8]) {
    let Some((header, arrivals)) = input.split_first_chunk::<21>() else { return };
    let number = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().expect("eight bytes"));
    // Shifted by a part of the input, so that small and large numbers are as likely.
    let interval = number(0) >> (header[16] & 63);
    let burst = number(8) >> (header[17] & 63);
    let frac_bits = u32::from(header[18] % 40);
    let start = u64::from_be_bytes([header[19], header[20], 0, 0, 0, 0, 0, header[16]]);
    let Some(params) = GcraParams::with_fraction(interval, frac_bits, burst) else {
        let product = u128::from(interval) * u128::from(burst);
        assert!(product == 0 || frac_bits > 32 || product >> 62 != 0, "{interval} {frac_bits} {burst} are refused");
        return;
    };
    let mut now = start;
    let mut tat = gcra::full(start);
    let mut admitted = 0u128;
    assert_eq!(params.remaining(tat, now), burst);
    for arrival in arrivals.chunks_exact(4) {
        let pause = u64::from(arrival[0]) << (arrival[1] & 31);
        now = now.wrapping_add(pause);
        let cost = u64::from(arrival[2]) << (arrival[3] & 31);
        let before = params.remaining(tat, now);
        assert!(before <= burst);
        let step = gcra::check(tat, &params, now, cost);
        match step.outcome {
            Outcome::Conforming if cost == 0 => assert_eq!(step.tat, tat, "a peek changes nothing"),
            Outcome::Conforming => {
                assert!(cost <= burst);
                assert!(params.remaining(step.tat, now) <= before);
                admitted += u128::from(cost);
            }
            Outcome::NonConforming { retry_after } => {
                assert!(retry_after > 0 && cost <= burst);
                let at = |wait: u64| gcra::check(step.tat, &params, now.wrapping_add(wait), cost).outcome;
                assert_ne!(at(retry_after - 1), Outcome::Conforming, "a tick before the answer's time");
                assert_eq!(at(retry_after), Outcome::Conforming, "at the answer's time");
                assert_eq!(params.remaining(step.tat, now), before, "a denial costs nothing");
            }
            Outcome::NeverConforming => {
                assert!(cost > burst);
                assert_eq!(step.tat, tat);
            }
        }
        tat = step.tat;
    }
    // Each check may be one tick too generous, and no more.
    let checks = (arrivals.len() / 4) as u128;
    let elapsed = u128::from(now.wrapping_sub(start));
    let granted = ((u128::from(burst) * u128::from(interval)) >> frac_bits) + 1 + elapsed + checks;
    assert!((admitted * u128::from(interval)) >> frac_bits <= granted, "{admitted} units in {elapsed} ticks");
}

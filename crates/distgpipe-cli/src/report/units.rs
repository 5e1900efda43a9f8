//! Numbers with units, formatted for people.

/// `1,234,567`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 thread`, `2 threads`, `1,797 rows`.
pub fn plural(number: impl TryInto<u64>, noun: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    format!("{} {noun}{}", count(number), if number == 1 { "" } else { "s" })
}

/// `12.3 MB`, in powers of 1000.
pub fn bytes(bytes: f64) -> String {
    scaled(bytes, &[(1e9, "GB"), (1e6, "MB"), (1e3, "kB")], "B")
}

/// `12.3 ms`.
pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{} s", count(s.round() as u64)),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}

/// `45 s`, `3 min 12 s` or `2 h 5 min`.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, min, s) => format!("{min} min {s} s"),
        (h, min, _) => format!("{h} h {min} min"),
    }
}

/// A number with at most four significant digits.
pub fn significant(number: f64) -> String {
    format!("{number:.3e}").parse::<f64>().unwrap_or(number).to_string()
}

/// `97.2 %`.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// `812` or `18.5`.
pub fn rate(rate: f64) -> String {
    if rate >= 100.0 {
        count(rate.round() as u64)
    } else {
        format!("{rate:.1}")
    }
}

fn scaled(number: f64, units: &[(f64, &str)], smallest: &str) -> String {
    match units.iter().find(|(size, _)| number >= *size) {
        Some((size, unit)) => format!("{:.1} {unit}", number / size),
        None => format!("{number:.0} {smallest}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_with_separators_and_units() {
        assert_eq!((count(7), count(1234), count(1_234_567)), ("7".into(), "1,234".into(), "1,234,567".into()));
        assert_eq!((plural(1_u64, "step"), plural(1234_usize, "step")), ("1 step".into(), "1,234 steps".into()));
        assert_eq!((bytes(999.0), bytes(56_900_000.0)), ("999 B".into(), "56.9 MB".into()));
        assert_eq!(
            (seconds(0.0123), seconds(3.0), seconds(2e-6)),
            ("12.30 ms".into(), "3.00 s".into(), "2.0 µs".into())
        );
        assert_eq!(
            (duration(59.4), duration(192.0), duration(7510.0)),
            ("59 s".into(), "3 min 12 s".into(), "2 h 5 min".into())
        );
        assert_eq!((significant(0.05), significant(0.012_345_6)), ("0.05".into(), "0.01235".into()));
        assert_eq!((rate(18.46), rate(1812.3)), ("18.5".into(), "1,812".into()));
    }
}

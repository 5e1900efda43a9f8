//! The options of the search for the best cut: objective, links and memory limit.

use crate::exit::usage;
use crate::report::units;
use distgpipe_core::balance::{BalanceError, Link, Objective};

/// What `--balance-by`, `--memory-limit`, `--link-rate` and `--link-latency` ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BalanceOptions {
    /// What the search minimizes.
    pub by: Objective,
    /// How much memory a worker may use.
    pub memory_limit_bytes: Option<u64>,
    /// The link between two workers; none counts as free.
    pub link: Option<Link>,
}

/// The same flags as the user wrote them.
#[derive(Clone, Copy, Debug, Default)]
pub struct BalanceFlags<'a> {
    pub by: Option<Objective>,
    pub memory_limit: Option<&'a str>,
    pub link_rate: Option<&'a str>,
    pub link_latency: Option<f64>,
}

impl BalanceFlags<'_> {
    /// The name of the first flag that was given.
    pub fn first_given(&self) -> Option<&'static str> {
        let given = [
            ("--balance-by", self.by.is_some()),
            ("--memory-limit", self.memory_limit.is_some()),
            ("--link-rate", self.link_rate.is_some()),
            ("--link-latency", self.link_latency.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }

    pub fn read(&self) -> anyhow::Result<BalanceOptions> {
        let memory_limit_bytes = self.memory_limit.map(|text| {
            size(text)
                .ok_or_else(|| usage(format!("--memory-limit {text}: expected a size such as 2GiB, 800MB or 4e9")))
        });
        let bytes_per_s = self.link_rate.map(|text| {
            rate(text).ok_or_else(|| {
                usage(format!(
                    "--link-rate {text}: expected bits per second such as 100mbit or 1gbit, or bytes such as 12.5MB/s"
                ))
            })
        });
        let latency_ms = self.link_latency.unwrap_or(0.0);
        if !(latency_ms.is_finite() && latency_ms >= 0.0) {
            return Err(usage(format!("--link-latency {latency_ms}: expected milliseconds, 0 or more")));
        }
        let link = match bytes_per_s.transpose()? {
            Some(bytes_per_s) => Some(Link { bytes_per_s, latency_s: latency_ms / 1e3 }),
            None if self.link_latency.is_some() => {
                return Err(usage("--link-latency: add --link-rate, the bandwidth of the links"));
            }
            None => None,
        };
        Ok(BalanceOptions {
            by: self.by.unwrap_or_default(),
            memory_limit_bytes: memory_limit_bytes.transpose()?,
            link,
        })
    }
}

/// A number of bytes, such as `2GiB`, `800MB` or `4e9`.
pub fn size(text: &str) -> Option<u64> {
    let (number, unit) = number_and_unit(text)?;
    let factor = byte_factor(&unit.to_ascii_lowercase())?;
    let bytes = number * factor;
    (bytes >= 1.0 && bytes < u64::MAX as f64).then_some(bytes as u64)
}

/// Bytes per second, from `100mbit`, `1gbit/s` or `12.5MB/s`. Bytes need a capital B, because `b` could mean bits or bytes.
fn rate(text: &str) -> Option<f64> {
    let (number, unit) = number_and_unit(text)?;
    let unit = unit.strip_suffix("/s").unwrap_or(unit);
    let factor = match unit.to_ascii_lowercase().as_str() {
        "bit" => 1.0 / 8.0,
        "kbit" => 1e3 / 8.0,
        "mbit" => 1e6 / 8.0,
        "gbit" => 1e9 / 8.0,
        lower if unit.ends_with('B') => byte_factor(lower)?,
        _ => return None,
    };
    let bytes_per_s = number * factor;
    (bytes_per_s.is_finite() && bytes_per_s > 0.0).then_some(bytes_per_s)
}

fn byte_factor(unit: &str) -> Option<f64> {
    Some(match unit {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" => f64::from(1u32 << 10),
        "mib" => f64::from(1u32 << 20),
        "gib" => f64::from(1u32 << 30),
        "tib" => (1u64 << 40) as f64,
        _ => return None,
    })
}

fn number_and_unit(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    // An `e` belongs to the number's exponent: no unit starts with one.
    let end = text.find(|c: char| !(c.is_ascii_digit() || ".e".contains(c))).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    Some((number.parse().ok()?, unit.trim()))
}

/// The error of a search that found no cut, in terms of flags.
pub fn no_cut(flag: &str, error: BalanceError) -> anyhow::Error {
    match error {
        BalanceError::OverLimit { limit_bytes, needs_bytes, worker, balance, tried } => usage(format!(
            "--memory-limit: no cut keeps every worker within {}: the best of {} ({balance}) needs {} on worker {worker}. Raise the \
             limit, or use more workers, more --chunks, or --recompute always",
            units::bytes(limit_bytes as f64),
            units::count(tried as u64),
            units::bytes(needs_bytes as f64),
        )),
        BalanceError::Apart { .. } => usage(
            "--place: no cut keeps layers that share a tensor on one worker: `distgpipe models` names them; place their partitions on \
             one worker, as in --place client,server,client, or train independent copies with --untie",
        ),
        other => usage(format!("{flag}: {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_spellings_of_sizes_and_rates_are_parsed() {
        assert_eq!(size("2GiB"), Some(2 << 30));
        assert_eq!((size("800 MB"), size("4e9"), size("1.5kb")), (Some(800_000_000), Some(4_000_000_000), Some(1500)));
        assert_eq!((rate("100mbit"), rate("1Gbit/s"), rate("12.5MB/s")), (Some(12.5e6), Some(125e6), Some(12.5e6)));
        assert_eq!(rate("2MiB"), Some(f64::from(2 << 20)));
        for wrong in ["", "GiB", "-1GB", "0", "1XB", "nan", "1e99GB", "1 2", "é"] {
            assert_eq!(size(wrong), None, "{wrong}");
        }
        for wrong in ["", "100", "100mb", "0mbit", "-1mbit", "mbit", "1e400mbit", "1/s"] {
            assert_eq!(rate(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_latency_needs_a_rate() {
        let flags = BalanceFlags { link_latency: Some(1.0), ..BalanceFlags::default() };
        assert!(flags.read().unwrap_err().to_string().contains("add --link-rate"));
        let both = BalanceFlags { link_rate: Some("1gbit"), ..flags };
        assert_eq!(both.read().unwrap().link, Some(Link { bytes_per_s: 125e6, latency_s: 1e-3 }));
        assert_eq!((both.first_given(), BalanceFlags::default().first_given()), (Some("--link-rate"), None));
    }
}

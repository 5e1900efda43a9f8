//! How often an address may begin a handshake, and how often its failures are told.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// Handshakes that an address may begin at once, before [`PER_SECOND`] limits it.
const BURST: f64 = 200.0;

/// Handshakes per second that an address may begin in the long run. One takes about 0.3 ms, so that this leaves most of a core
/// to others. Honest clients may share their address with strangers, behind a proxy for instance, so it is not lower.
const PER_SECOND: f64 = 1000.0;

/// Failures of an address that are reported in each [`FAILURES_PERIOD`].
const FAILURES_MAX: u32 = 5;

/// Failures of all addresses together that are reported in each [`FAILURES_PERIOD`].
const FAILURES_OF_ALL_MAX: u32 = 60;

/// How long failures are counted. Those that were not reported are then reported as one number.
pub(super) const FAILURES_PERIOD: Duration = Duration::from_secs(60);

/// The most addresses that are remembered.
const ADDRESSES_MAX: usize = 4096;

/// The addresses that count as one: a network of 48 bits in IPv6, because one customer usually has a whole one.
pub(super) fn group(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) => match v6.to_ipv4_mapped() {
            Some(v4) => v4.into(),
            None => (v6.to_bits() >> 80 << 80).to_be_bytes().into(),
        },
        v4 => v4,
    }
}

#[derive(Debug)]
struct Usage {
    /// Handshakes that may begin now.
    left: f64,
    at: Instant,
    failures: u32,
    failures_since: Instant,
}

impl Usage {
    fn left_at(&self, now: Instant) -> f64 {
        (self.left + now.saturating_duration_since(self.at).as_secs_f64() * PER_SECOND).min(BURST)
    }
}

/// What each address has used lately.
#[derive(Debug, Default)]
pub(super) struct Rates {
    used: RefCell<HashMap<IpAddr, Usage>>,
    failures: RefCell<Option<Failures>>,
}

/// The failures of all addresses since `since`.
#[derive(Debug)]
struct Failures {
    since: Instant,
    reported: u32,
    /// How many were not reported, and where the last of them came from.
    unreported: u64,
    last: SocketAddr,
}

impl Rates {
    fn with<T>(&self, address: IpAddr, now: Instant, use_it: impl FnOnce(&mut Usage) -> T) -> T {
        let mut used = self.used.borrow_mut();
        if used.len() >= ADDRESSES_MAX {
            used.retain(|_, usage| now.saturating_duration_since(usage.at) < FAILURES_PERIOD);
            if used.len() >= ADDRESSES_MAX {
                used.clear();
            }
        }
        let fresh = || Usage { left: BURST, at: now, failures: 0, failures_since: now };
        use_it(used.entry(group(address)).or_insert_with(fresh))
    }

    /// Whether an address may begin a handshake now.
    pub fn may_begin(&self, address: IpAddr, now: Instant) -> bool {
        !self.waits(address, now)
    }

    /// Whether an address has to wait for its next handshake.
    pub fn waits(&self, address: IpAddr, now: Instant) -> bool {
        let used = self.used.borrow();
        used.get(&group(address)).is_some_and(|usage| usage.left_at(now) < 1.0)
    }

    /// Counts a handshake that begins.
    pub fn begin(&self, address: IpAddr, now: Instant) {
        self.with(address, now, |usage| {
            usage.left = usage.left_at(now) - 1.0;
            usage.at = now;
        });
    }

    /// Counts a handshake that failed. Returns whether to report it.
    pub fn count_failure(&self, from: SocketAddr, now: Instant) -> bool {
        let few = self.with(from.ip(), now, |usage| {
            if now.saturating_duration_since(usage.failures_since) >= FAILURES_PERIOD {
                (usage.failures, usage.failures_since) = (0, now);
            }
            usage.failures = usage.failures.saturating_add(1);
            usage.failures <= FAILURES_MAX
        });
        let mut failures = self.failures.borrow_mut();
        let all = failures.get_or_insert(Failures { since: now, reported: 0, unreported: 0, last: from });
        let report = few && all.reported < FAILURES_OF_ALL_MAX;
        match report {
            true => all.reported += 1,
            false => (all.unreported, all.last) = (all.unreported + 1, from),
        }
        report
    }

    /// How many failures were not reported in the period that has ended, and where the last of them came from.
    pub fn unreported(&self, now: Instant) -> Option<(u64, SocketAddr)> {
        let mut failures = self.failures.borrow_mut();
        let ended = failures.take_if(|all| now.saturating_duration_since(all.since) >= FAILURES_PERIOD)?;
        (ended.unreported > 0).then_some((ended.unreported, ended.last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        SocketAddr::new(text.parse().unwrap(), 7)
    }

    #[test]
    fn a_network_of_48_bits_is_one_address() {
        let of = |text: &str| group(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2::3"), of("2001:db8:1:ffff::9"));
        assert_ne!(of("2001:db8:1:2::3"), of("2001:db8:2:2::3"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }

    #[test]
    fn an_address_begins_200_handshakes_at_once_and_then_1000_per_second() {
        let (rates, start) = (Rates::default(), Instant::now());
        let [stranger, other] = ["192.0.2.1", "192.0.2.2"].map(|text| address(text).ip());
        // As many as it may begin at this time, up to a number that no limit allows.
        let begun = |address: IpAddr, now: Instant| {
            (0..100_000).take_while(|_| rates.may_begin(address, now)).map(|_| rates.begin(address, now)).count()
        };
        assert_eq!(begun(stranger, start), 200);
        assert!(rates.waits(stranger, start) && !rates.waits(other, start));
        // Half a second later it could have begun 500, but it has not saved up more than 200.
        assert_eq!(begun(stranger, start + Duration::from_millis(100)), 100);
        assert_eq!(begun(stranger, start + Duration::from_millis(600)), 200);
        assert_eq!(begun(stranger, start + Duration::from_millis(601)), 1);
        assert_eq!(begun(other, start), 200, "each has its own");
        let [network, same] = ["2001:db8:1::1", "2001:db8:1:ffff::2"].map(|text| address(text).ip());
        assert_eq!((begun(network, start), begun(same, start)), (200, 0));
    }

    #[test]
    fn failures_are_reported_a_few_times_and_then_as_one_number_per_period() {
        let (rates, start) = (Rates::default(), Instant::now());
        let (stranger, other) = (address("192.0.2.1"), address("192.0.2.2"));
        let reported = (0..1000).filter(|_| rates.count_failure(stranger, start)).count();
        assert_eq!(reported, 5);
        assert!(rates.count_failure(other, start), "another address is told too");
        assert_eq!(rates.unreported(start), None, "the period has not ended");
        assert_eq!(rates.unreported(start + FAILURES_PERIOD), Some((995, stranger)));
        assert_eq!(rates.unreported(start + 2 * FAILURES_PERIOD), None, "once");
        assert!(rates.count_failure(stranger, start + FAILURES_PERIOD));
    }

    /// Many addresses must not fill a log either.
    #[test]
    fn the_failures_of_all_addresses_together_are_reported_a_limited_number_of_times() {
        let (rates, start) = (Rates::default(), Instant::now());
        let strangers = (0..=u16::MAX).map(|n| address(&format!("2001:db8:{n:x}::1")));
        let reported = strangers.filter(|&stranger| rates.count_failure(stranger, start)).count();
        assert_eq!(reported, 60);
        assert!(rates.used.borrow().len() <= ADDRESSES_MAX);
        assert_eq!(rates.unreported(start + FAILURES_PERIOD).map(|(count, _)| count), Some(65_536 - 60));
    }
}

//! Clocks: one that does not stop while the machine sleeps, and the time of day for people.

use std::time::Duration;
use time::OffsetDateTime;

/// The time since the machine was started, including the time it slept (`CLOCK_BOOTTIME`). `Instant` stops meanwhile.
pub fn boot_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one `timespec`, which lives until the call returns. On an error it stays 0.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The time of day, such as `2026-11-16 09:14:02 UTC`. Workers on several machines log in the same time zone.
pub fn utc_now() -> String {
    let now = OffsetDateTime::now_utc();
    let (year, month, day) = now.to_calendar_date();
    let (hour, minute, second) = now.to_hms();
    format!("{year:04}-{:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC", u8::from(month))
}

//! Clocks: one that does not stop while the machine sleeps, the processor time of threads, and the time of day for people.

use std::os::unix::thread::JoinHandleExt;
use std::thread::JoinHandle;
use std::time::Duration;
use time::OffsetDateTime;

/// The time since the machine was started, including the time it slept (`CLOCK_BOOTTIME`). `Instant` stops meanwhile.
pub fn boot_time() -> Duration {
    time_of(libc::CLOCK_BOOTTIME)
}

fn time_of(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one `timespec`, which lives until the call returns. On an error it stays 0.
    unsafe { libc::clock_gettime(clock, &mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The processor time that the calling thread has used.
pub(crate) fn thread_cpu_time() -> Duration {
    time_of(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The processor time that a thread has used; that of the calling thread, or 0, if it has ended.
pub(crate) fn cpu_time_of<T>(thread: &JoinHandle<T>) -> Duration {
    let mut clock = 0;
    // SAFETY: writes one clock id, which lives until the call returns. The handle has not been joined, so the thread's
    // descriptor exists, whether the thread runs or has ended.
    match unsafe { libc::pthread_getcpuclockid(thread.as_pthread_t(), &mut clock) } {
        0 => time_of(clock),
        _ => Duration::ZERO,
    }
}

/// The time of day, such as `2026-11-16 09:14:02 UTC`. Workers on several machines log in the same time zone.
pub fn utc_now() -> String {
    let now = OffsetDateTime::now_utc();
    let (year, month, day) = now.to_calendar_date();
    let (hour, minute, second) = now.to_hms();
    format!("{year:04}-{:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC", u8::from(month))
}

//! Waiting for several sockets at once.

use std::os::fd::RawFd;
use std::time::Duration;

/// Waits until one of these sockets can be read or has ended, or until the time is over. A signal may end it early.
pub(crate) fn wait_readable(sockets: &[RawFd], limit: Duration) {
    let mut polled: Vec<libc::pollfd> =
        sockets.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    let milliseconds = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: `polled` is an array of that many valid structures, which the call writes `revents` of; it outlives the call. A
    // number that is not an open descriptor is reported in `revents`, not dereferenced.
    unsafe {
        libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds);
    }
}

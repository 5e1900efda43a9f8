//! What the standard library has no function for: waiting for several sockets at once, and the buffer of one.

use std::os::fd::RawFd;
use std::time::Duration;

/// Waits until one of these sockets can be read or has ended, or until the time is over. A signal may end it early. Returns whether
/// one of them can be read or has ended.
pub(crate) fn wait_readable(sockets: &[RawFd], limit: Duration) -> bool {
    let mut polled: Vec<libc::pollfd> =
        sockets.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    let milliseconds = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: `polled` is an array of that many valid structures, which the call writes `revents` of; it outlives the call. A
    // number that is not an open descriptor is reported in `revents`, not dereferenced.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds) > 0 }
}

/// Has the system keep up to so many bytes that were written to a socket and not read yet. A limit of the system may be lower.
pub(crate) fn set_send_buffer(socket: RawFd, bytes: i32) -> std::io::Result<()> {
    // SAFETY: the option's value is an `int` that outlives the call, and its length is given. A number that is not an open
    // descriptor is an error.
    let set = unsafe {
        libc::setsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            std::ptr::from_ref(&bytes).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if set == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

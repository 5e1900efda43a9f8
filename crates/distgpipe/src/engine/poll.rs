//! What the standard library has no function for: waiting for several sockets at once, the buffer of one, and connecting to a local one
//! within a time.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Connects to a socket in Linux's abstract namespace. It waits while the listener's queue is full, for so long at most.
pub(crate) fn connect_abstract(name: &[u8], limit: Duration) -> io::Result<UnixStream> {
    let mut address = libc::sockaddr_un { sun_family: libc::AF_UNIX as libc::sa_family_t, sun_path: [0; 108] };
    if name.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // An abstract name begins with a zero.
    address.sun_path[1..].iter_mut().zip(name).for_each(|(to, &from)| *to = from as libc::c_char);
    let length = size_of::<libc::sa_family_t>() + 1 + name.len();
    // SAFETY: takes numbers and returns a new descriptor or -1.
    let socket = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, and nobody else has it.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(socket) });
    // Linux applies the time-out for writing to connecting, too.
    stream.set_write_timeout(Some(limit))?;
    // SAFETY: the address outlives the call, and `length` is within it.
    let connected =
        unsafe { libc::connect(stream.as_raw_fd(), std::ptr::from_ref(&address).cast(), length as libc::socklen_t) };
    if connected != 0 {
        return Err(io::Error::last_os_error());
    }
    stream.set_write_timeout(None)?;
    Ok(stream)
}

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
pub(crate) fn set_send_buffer(socket: RawFd, bytes: i32) -> io::Result<()> {
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
        Err(io::Error::last_os_error())
    }
}

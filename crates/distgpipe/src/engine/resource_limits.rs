//! Limits that a process sets on itself. It cannot raise them again.

use std::io;

/// The limits of a process that runs a stranger's job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResourceLimits {
    /// Bytes of memory that it may allocate, without its program and libraries. `None`: no limit of its own.
    pub memory_bytes: Option<u64>,
    /// Files and sockets that it may have open.
    pub files: u64,
}

/// Sets the limits. From here on the process also writes no core file, and no regular file at all: a write to one is an error.
pub fn limit_resources(limits: &ResourceLimits) -> io::Result<()> {
    // SAFETY: `signal` with SIG_IGN installs no handler. Without it, a write to a file would end the process.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    set(libc::RLIMIT_CORE, 0)?;
    set(libc::RLIMIT_FSIZE, 0)?;
    set(libc::RLIMIT_NOFILE, limits.files)?;
    // Private writable memory. The address space would be the wrong measure: CUDA reserves much more than it uses.
    limits.memory_bytes.map_or(Ok(()), |bytes| set(libc::RLIMIT_DATA, bytes))
}

/// How many files and sockets this process may have open.
pub(crate) fn open_files_max() -> u64 {
    current(libc::RLIMIT_NOFILE)
}

/// How much private memory this process may have; `u64::MAX` without a limit.
pub(crate) fn memory_limit_bytes() -> u64 {
    current(libc::RLIMIT_DATA)
}

/// Lets this process have as many files and sockets open as the system allows. Programs start with fewer, for the sake of old
/// ones.
pub fn raise_open_files_limit() -> io::Result<()> {
    let most = current_max(libc::RLIMIT_NOFILE);
    set_both(libc::RLIMIT_NOFILE, libc::rlimit { rlim_cur: most, rlim_max: most })
}

fn current(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes into the structure that the pointer leads to, which outlives the call.
    match unsafe { libc::getrlimit(resource, &mut limit) } {
        0 => limit.rlim_cur,
        _ => u64::MAX,
    }
}

fn set(resource: libc::__rlimit_resource_t, value: u64) -> io::Result<()> {
    let value = value.min(current_max(resource));
    set_both(resource, libc::rlimit { rlim_cur: value, rlim_max: value })
}

fn set_both(resource: libc::__rlimit_resource_t, limit: libc::rlimit) -> io::Result<()> {
    // SAFETY: reads the structure that the pointer leads to, which outlives the call.
    match unsafe { libc::setrlimit(resource, &limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn current_max(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: as in `current`.
    match unsafe { libc::getrlimit(resource, &mut limit) } {
        0 => limit.rlim_max,
        _ => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_open_files_is_raised_to_what_the_system_allows() {
        let most = current_max(libc::RLIMIT_NOFILE);
        // One less disturbs no other test.
        set_both(libc::RLIMIT_NOFILE, libc::rlimit { rlim_cur: most - 1, rlim_max: most }).unwrap();
        raise_open_files_limit().unwrap();
        assert_eq!((open_files_max(), current_max(libc::RLIMIT_NOFILE)), (most, most));
    }
}

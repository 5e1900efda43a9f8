//! How many libtorch threads a worker computes with, and starting threads of our own.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// More threads than any machine has cores. libtorch's thread pool ends the process at absurd numbers.
pub const THREADS_MAX: usize = 1024;

/// A number of threads per worker that is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected 1 to {THREADS_MAX} threads per worker, got {got}")]
pub struct ThreadCountError {
    /// The number asked for.
    pub got: usize,
}

/// Checks a number of threads per worker: from 1 to [`THREADS_MAX`]. The builder, remote workers and the CLI all ask
/// this function.
pub fn check_threads(threads: usize) -> Result<usize, ThreadCountError> {
    if (1..=THREADS_MAX).contains(&threads) {
        Ok(threads)
    } else {
        Err(ThreadCountError { got: threads })
    }
}

/// The default number of threads per worker: the cores that this process may use, divided by the workers on the host.
pub fn default_threads(workers_on_host: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / workers_on_host.max(1)).clamp(1, THREADS_MAX)
}

/// The system did not start a thread. `std::thread::spawn` would panic instead.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the thread `{name}`: {source}: the system limits processes and threads (`ulimit -u`, or the limit of a container): raise the limit, or use fewer workers and threads")]
pub struct ThreadError {
    /// The name of the thread.
    name: String,
    /// The system's error.
    source: io::Error,
}

/// Starts a thread. All threads of the crate are started here or by [`spawn_scoped`].
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>, ThreadError> {
    let name = name.into();
    started(&name, |builder| builder.spawn(body))
}

/// A thread that waits for something to happen. It is told to end, and joined, when this is dropped.
#[derive(Debug)]
pub struct Watch {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Starts the thread. It must return when its receiver is disconnected; nothing is ever sent.
    pub fn start(name: &str, body: impl FnOnce(Receiver<()>) + Send + 'static) -> Result<Self, ThreadError> {
        let (end, ended) = mpsc::channel();
        Ok(Watch { end: Some(end), thread: Some(spawn(name, move || body(ended))?) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end = None;
        self.thread.take().map(JoinHandle::join);
    }
}

/// Starts a thread that ends before `scope` does.
pub fn spawn_scoped<'scope, 'env, T: Send + 'scope>(
    scope: &'scope Scope<'scope, 'env>,
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, ThreadError> {
    let name = name.into();
    started(&name, |builder| builder.spawn_scoped(scope, body))
}

fn started<T>(name: &str, start: impl FnOnce(Builder) -> io::Result<T>) -> Result<T, ThreadError> {
    #[cfg(test)]
    if refusal::refuses(name) {
        let source = io::Error::from_raw_os_error(libc::EAGAIN);
        return Err(ThreadError { name: name.to_owned(), source });
    }
    // A name may contain a worker's, which comes from another process.
    start(Builder::new().name(name.replace('\0', ""))).map_err(|source| ThreadError { name: name.to_owned(), source })
}

/// Has the system refuse threads, as it does at its limit.
#[cfg(test)]
pub(crate) mod refusal {
    use std::cell::RefCell;

    thread_local! {
        static REFUSED: RefCell<Option<String>> = const { RefCell::new(None) };
    }

    /// While `body` runs, the calling thread cannot start threads whose names begin with `prefix`.
    pub fn with_refused<T>(prefix: &str, body: impl FnOnce() -> T) -> T {
        REFUSED.set(Some(prefix.to_owned()));
        let result = body();
        REFUSED.set(None);
        result
    }

    pub(super) fn refuses(name: &str) -> bool {
        REFUSED.with_borrow(|refused| refused.as_ref().is_some_and(|prefix| name.starts_with(prefix.as_str())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid_for_any_number_of_workers() {
        for workers in [0, 1, 2, 3, 1000, usize::MAX] {
            assert!(check_threads(default_threads(workers)).is_ok(), "{workers}");
        }
        assert_eq!(default_threads(usize::MAX), 1);
        for got in [0, THREADS_MAX + 1] {
            assert_eq!(check_threads(got), Err(ThreadCountError { got }));
        }
        assert_eq!(check_threads(THREADS_MAX), Ok(THREADS_MAX));
    }
}

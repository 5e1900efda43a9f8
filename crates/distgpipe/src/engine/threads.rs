//! How many libtorch threads a worker computes with.

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

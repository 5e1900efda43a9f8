//! Says that a disk does not answer while a checkpoint is written to it.

use crate::comm::notice::{Notice, Notify};
use crate::engine;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long one operation on the disk may take before the user is told.
const STALLED: Duration = Duration::from_secs(5);
/// How often the user is told after that.
const AGAIN: Duration = Duration::from_secs(30);

/// While it exists, a thread watches for how long the disk has been busy with one operation. The thread that writes cannot: it
/// waits in a system call.
pub(super) struct DiskWatch {
    busy_since: Arc<Mutex<Option<Instant>>>,
    _thread: Option<engine::Watch>,
}

fn lock(busy_since: &Mutex<Option<Instant>>) -> MutexGuard<'_, Option<Instant>> {
    busy_since.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DiskWatch {
    /// Tells `notify` when the disk with this directory stalls. Without a thread for it, nobody is told.
    pub fn start(directory: &Path, notify: &Notify) -> Self {
        let busy_since = Arc::default();
        let (watched, directory, notify) = (Arc::clone(&busy_since), directory.to_owned(), notify.clone());
        let body = move |ended: Receiver<()>| {
            let mut due = STALLED;
            while ended.recv_timeout(STALLED / 10) == Err(RecvTimeoutError::Timeout) {
                let waited = lock(&watched).map_or(Duration::ZERO, |since| since.elapsed());
                due = tell_of_stall(&directory, waited, due, &notify);
            }
        };
        DiskWatch { busy_since, _thread: engine::Watch::start("disk watch", body).ok() }
    }

    /// Performs an operation on the disk.
    pub fn disk<T>(&self, operation: impl FnOnce() -> T) -> T {
        *lock(&self.busy_since) = Some(Instant::now());
        let done = operation();
        *lock(&self.busy_since) = None;
        done
    }
}

/// Tells of an operation that has taken `waited`, if that is at least `due`. Returns when to tell next.
fn tell_of_stall(directory: &Path, waited: Duration, due: Duration, notify: &Notify) -> Duration {
    if waited < STALLED {
        return STALLED;
    }
    if waited < due {
        return due;
    }
    notify.send(&Notice::DiskStalled { directory: PathBuf::from(directory), waited_s: waited.as_secs_f64() });
    waited + AGAIN
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often the user is told while one operation goes on, seen every half second, and then while a short one does.
    #[test]
    fn a_stalled_disk_is_reported_after_5_s_and_every_30_s_after_that() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&told);
        let notify = Notify::new(move |notice| {
            let Notice::DiskStalled { waited_s, .. } = notice else { panic!("{notice}") };
            record.lock().unwrap().push(*waited_s);
        });
        let mut due = STALLED;
        let mut see = |half_seconds: u64| {
            due = tell_of_stall(Path::new("saved"), Duration::from_millis(500 * half_seconds), due, &notify);
        };
        (0..=150).for_each(&mut see);
        (0..=9).for_each(&mut see);
        (0..=10).for_each(&mut see);
        assert_eq!(*told.lock().unwrap(), [5.0, 35.0, 65.0, 5.0]);
    }
}

//! The thread that writes checkpoints. The training thread waits for it, tells the user when the disk does not answer, and gives the
//! operation up after a limit: a thread that waits for a disk in a system call cannot do so itself.

use super::{on_disk, CheckpointError};
use crate::comm::abort::POLL;
use crate::comm::notice::{Notice, Notify};
use crate::comm::suspension::IdleTimer;
use crate::engine;
use crate::sync::lock;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the disk may not answer before the user is told.
const STALLED: Duration = Duration::from_secs(5);
/// How long the disk may not answer before an operation is given up.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// Performs operations on the disk of a folder, one at a time, on a thread of its own.
#[derive(Debug)]
pub(super) struct Disk {
    directory: PathBuf,
    pub limit: Duration,
    notify: Mutex<Notify>,
    /// The thread, once there has been an operation. It ends when this is dropped and it has nothing to do.
    thread: Mutex<Option<(Sender<Operation>, JoinHandle<()>)>>,
    /// Parts of operations that are done.
    pub answers: Answers,
    /// Since when the disk has not answered, while the thread is in an operation that was given up.
    stuck_since: Arc<Mutex<Option<Instant>>>,
    /// The lock of the folder. A thread that still writes there keeps it.
    lock: Arc<File>,
    #[cfg(test)]
    pub gate: Arc<Gate>,
}

/// Stops the disk for a test.
#[cfg(test)]
#[derive(Debug, Default)]
pub(super) struct Gate {
    closed: Mutex<()>,
    /// How many operations it lets through even if it is closed.
    pub skip: std::sync::atomic::AtomicUsize,
}

#[cfg(test)]
impl Gate {
    /// Closed until the value is dropped.
    pub fn lock(&self) -> std::sync::MutexGuard<'_, ()> {
        lock(&self.closed)
    }

    fn pass(&self) {
        if self.skip.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_err() {
            drop(self.lock());
        }
    }
}

type Operation = Box<dyn FnOnce() + Send>;

/// Counts the parts of operations that are done, so that a long operation is not taken for a disk that does not answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Answers(Arc<AtomicU64>);

impl Answers {
    /// A part is done.
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Disk {
    pub fn new(directory: &Path, lock: File) -> Self {
        Disk {
            directory: directory.to_owned(),
            limit: LIMIT,
            notify: Mutex::default(),
            thread: Mutex::default(),
            answers: Answers::default(),
            stuck_since: Arc::default(),
            lock: Arc::new(lock),
            #[cfg(test)]
            gate: Arc::default(),
        }
    }

    /// Whom to tell when the disk does not answer.
    pub fn set_notify(&self, notify: &Notify) {
        *lock(&self.notify) = notify.clone();
    }

    /// Whether the thread is in an operation that was given up.
    pub fn is_stuck(&self) -> bool {
        lock(&self.stuck_since).is_some()
    }

    /// Fails while the thread is in an operation that was given up.
    pub fn check(&self) -> Result<(), CheckpointError> {
        match *lock(&self.stuck_since) {
            Some(since) => Err(self.stalled(since.elapsed(), true)),
            None => Ok(()),
        }
    }

    /// Waits for the operation that was given up, for up to the limit.
    pub fn wait(&self) {
        let start = Instant::now();
        while self.is_stuck() && start.elapsed() < self.limit {
            std::thread::sleep(POLL);
        }
    }

    fn stalled(&self, waited: Duration, earlier: bool) -> CheckpointError {
        CheckpointError::DiskStalled { directory: self.directory.clone(), waited, earlier }
    }

    /// Performs an operation and waits for it, but not for longer than the limit after the last [answer](Answers). An operation that
    /// was given up removes the folder `partial` when the disk answers again. Until then every other fails at once.
    pub fn perform<T: Send + 'static>(
        &self,
        partial: Option<&Path>,
        operation: impl FnOnce() -> Result<T, CheckpointError> + Send + 'static,
    ) -> Result<T, CheckpointError> {
        self.check()?;
        // Without room for a value, sending one fails if and only if the operation was given up.
        let (sender, done) = mpsc::sync_channel(0);
        let (free, partial) = (Free(self.stuck_since.clone()), partial.map(Path::to_owned));
        #[cfg(test)]
        let gate = self.gate.clone();
        self.start(Box::new(move || {
            #[cfg(test)]
            gate.pass();
            if let Err(given_up) = sender.send(operation()) {
                drop(given_up);
                partial.map(fs::remove_dir_all);
            }
            drop(free);
        }))?;
        let (mut idle, mut seen, mut told) = (IdleTimer::new(), self.answers.count(), false);
        loop {
            match done.recv_timeout(POLL) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    *lock(&self.thread) = None;
                    let panicked = io::Error::other("the thread panicked; its message is on standard error");
                    return Err(on_disk("writing to", &self.directory)(panicked));
                }
            }
            let answered = self.answers.count();
            if answered != seen {
                seen = answered;
                idle.progress();
            }
            let waited = idle.elapsed();
            if waited >= self.limit {
                // Set before `done` is dropped: the thread clears it after that.
                *lock(&self.stuck_since) = Instant::now().checked_sub(waited).or_else(|| Some(Instant::now()));
                return Err(self.stalled(waited, false));
            }
            if waited >= STALLED && !told {
                let (directory, limit_s) = (self.directory.clone(), self.limit.as_secs_f64());
                lock(&self.notify).send(&Notice::DiskStalled { directory, waited_s: waited.as_secs_f64(), limit_s });
            }
            told = waited >= STALLED;
        }
    }

    /// Passes an operation to the thread, which is started if there is none.
    fn start(&self, operation: Operation) -> Result<(), CheckpointError> {
        let mut thread = lock(&self.thread);
        let (operations, _) = match thread.take() {
            Some(running) => thread.insert(running),
            None => {
                let (sender, operations) = mpsc::channel::<Operation>();
                let lock = self.lock.clone();
                let body = move || {
                    operations.iter().for_each(|operation| operation());
                    drop(lock);
                };
                let failed =
                    |error| on_disk("starting the thread that writes to", &self.directory)(io::Error::other(error));
                thread.insert((sender, engine::spawn("checkpoints", body).map_err(failed)?))
            }
        };
        // It fails if the thread has panicked: its result does not arrive then.
        let _ = operations.send(operation);
        Ok(())
    }
}

/// Says, when it is dropped, that the operation is over, also if it has panicked.
struct Free(Arc<Mutex<Option<Instant>>>);

impl Drop for Free {
    fn drop(&mut self) {
        *lock(&self.0) = None;
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let stuck = self.is_stuck();
        let Some((operations, thread)) = lock(&self.thread).take() else { return };
        drop(operations);
        if !stuck {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// A disk in a new folder, whose operations are given up after 0.3 s.
    fn disk(name: &str) -> (Disk, PathBuf) {
        let root = std::env::temp_dir().join(format!("distgpipe-{}-disk-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).unwrap();
        let lock = File::create(root.join("lock")).unwrap();
        lock.try_lock().unwrap();
        let mut disk = Disk::new(&root, lock);
        disk.limit = Duration::from_millis(300);
        (disk, root)
    }

    /// Training once waited for ever.
    #[test]
    fn an_operation_without_an_answer_is_given_up_and_the_next_ones_fail_until_the_disk_answers() {
        let (disk, root) = disk("stuck");
        let partial = root.join("partial");
        fs::create_dir(&partial).unwrap();
        let ran = Arc::new(AtomicBool::new(false));
        let gate = disk.gate.clone();
        let frozen = gate.lock();
        let late = ran.clone();
        let given_up = disk.perform(Some(&partial), move || {
            late.store(true, Ordering::SeqCst);
            Ok(())
        });
        assert!(matches!(given_up, Err(CheckpointError::DiskStalled { earlier: false, .. })), "{given_up:?}");
        let start = Instant::now();
        let next = disk.perform(None, || Ok(()));
        assert!(matches!(next, Err(CheckpointError::DiskStalled { earlier: true, .. })), "{next:?}");
        assert!(start.elapsed() < disk.limit, "it fails at once");
        assert!(disk.is_stuck() && partial.exists() && !ran.load(Ordering::SeqCst));
        drop(frozen);
        while disk.is_stuck() {
            std::thread::sleep(POLL);
        }
        assert!(ran.load(Ordering::SeqCst) && !partial.exists());
        assert_eq!(disk.perform(Some(&root), || Ok(7)).unwrap(), 7);
        assert!(root.exists(), "only what was given up is removed");
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_slow_operation_is_not_given_up_while_the_disk_answers() {
        let (mut disk, root) = disk("slow");
        disk.limit = Duration::from_secs(2);
        let start = Instant::now();
        let answers = disk.answers.clone();
        let slow = disk.perform(None, move || {
            while start.elapsed() < Duration::from_secs(4) {
                std::thread::sleep(POLL);
                answers.add();
            }
            Ok(())
        });
        slow.unwrap();
        fs::remove_dir_all(root).unwrap();
    }

    /// Another run would take the folder, and the thread could still rename and remove what is in it.
    #[test]
    fn a_thread_that_is_stuck_keeps_the_folder_locked() {
        let (disk, root) = disk("locked");
        let free = || File::open(root.join("lock")).unwrap().try_lock().is_ok();
        let gate = disk.gate.clone();
        let frozen = gate.lock();
        disk.perform(None, || Ok(())).unwrap_err();
        drop(disk);
        assert!(!free());
        drop(frozen);
        while !free() {
            std::thread::sleep(POLL);
        }
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_user_hears_after_5_s_that_the_disk_does_not_answer() {
        let (mut disk, root) = disk("told");
        disk.limit = STALLED + Duration::from_secs(1);
        let told = Arc::new(Mutex::new(Vec::new()));
        let record = told.clone();
        disk.set_notify(&Notify::new(move |notice| lock(&record).push(notice.to_string())));
        let gate = disk.gate.clone();
        let frozen = gate.lock();
        disk.perform(None, || Ok(())).unwrap_err();
        drop(frozen);
        let told = lock(&told).clone();
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].contains("the disk has not answered for "), "{told:?}");
        assert!(told[0].ends_with(" s; training waits for up to 6 s"), "{told:?}");
        fs::remove_dir_all(root).unwrap();
    }
}

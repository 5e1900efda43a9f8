//! What each worker is doing right now: the facts from which the [watchdog](crate::comm::watchdog) finds the worker that
//! has stopped among those that wait for it. Remote workers send theirs with each heartbeat.

use distgpipe_core::schedule::Action;
use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;

/// What a worker is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activity {
    /// Waiting for a command.
    #[default]
    Idle,
    /// Building its partitions, updating its parameters, or transferring state.
    Busy,
    /// Running an action of the plan.
    Running(Action),
    /// Waiting for the message that this action receives.
    Waiting(Action),
    /// Waiting for gradients from the previous replica in the ring.
    AllReduce,
}

/// A snapshot of a worker: what it is doing, and how far it has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerStatus {
    /// Counts the changes of activity since the run began. The run has stalled when no worker's count changes.
    pub progress: u64,
    /// The number of finished actions of the current step; during [`Activity::AllReduce`], of received segments.
    pub done: usize,
    /// What the worker is doing.
    pub activity: Activity,
}

/// The current status of a worker, written by the worker (or for it, by the connection to its process) and read by the
/// watchdog.
#[derive(Debug, Default)]
pub struct SharedStatus(Mutex<WorkerStatus>);

impl SharedStatus {
    /// Records that the worker starts an activity, with `done` actions or segments behind it.
    pub fn begin(&self, activity: Activity, done: usize) {
        let mut status = self.0.lock().unwrap_or_else(|e| e.into_inner());
        *status = WorkerStatus { progress: status.progress + 1, done, activity };
    }

    /// Records that the worker waits for a broken connection, which has a limit of its own: that is no stall.
    pub fn touch(&self) {
        let mut status = self.0.lock().unwrap_or_else(|e| e.into_inner());
        status.progress = status.progress.wrapping_add(1);
    }

    /// A snapshot of the current status.
    pub fn read(&self) -> WorkerStatus {
        *self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Replaces the status with one that a remote worker has sent.
    pub fn set(&self, status: WorkerStatus) {
        *self.0.lock().unwrap_or_else(|e| e.into_inner()) = status;
    }
}

/// The form in which a heartbeat carries the status.
impl fmt::Display for WorkerStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ", self.progress, self.done)?;
        match self.activity {
            Activity::Idle => f.write_str("idle"),
            Activity::Busy => f.write_str("busy"),
            Activity::Running(action) => write!(f, "run {action}"),
            Activity::Waiting(action) => write!(f, "wait {action}"),
            Activity::AllReduce => f.write_str("share"),
        }
    }
}

impl FromStr for WorkerStatus {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut words = text.split_ascii_whitespace();
        let progress = words.next().and_then(|w| w.parse().ok()).ok_or(())?;
        let done = words.next().and_then(|w| w.parse().ok()).ok_or(())?;
        let kind = words.next().ok_or(())?;
        let mut action = || words.next().and_then(|w| w.parse().ok()).ok_or(());
        let activity = match kind {
            "idle" => Activity::Idle,
            "busy" => Activity::Busy,
            "run" => Activity::Running(action()?),
            "wait" => Activity::Waiting(action()?),
            "share" => Activity::AllReduce,
            _ => return Err(()),
        };
        Ok(WorkerStatus { progress, done, activity })
    }
}

//! What each worker is doing right now: the facts from which the [watchdog](crate::comm::watchdog) finds the worker that
//! has stopped among those that wait for it. Remote workers send theirs with each heartbeat.

use crate::sync::lock;
use distgpipe_core::schedule::Action;
use distgpipe_core::WorkerId;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard};

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
    /// A peer of the worker, if the link to it is broken and the worker waits for another connection.
    pub reconnecting: Option<WorkerId>,
}

/// The current status of a worker, written by the worker (or for it, by the connection to its process) and read by the
/// watchdog.
#[derive(Debug, Default)]
pub struct SharedStatus(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    status: WorkerStatus,
    /// The peers to which this process has no connection at the moment.
    reconnecting: BTreeSet<WorkerId>,
}

impl SharedStatus {
    /// Records that the worker starts an activity, with `done` actions or segments behind it.
    pub fn begin(&self, activity: Activity, done: usize) {
        let status = &mut self.lock().status;
        *status = WorkerStatus { progress: status.progress + 1, done, activity, reconnecting: None };
    }

    /// Records that the link to a peer is broken, or that it has another connection or is given up.
    pub fn set_reconnecting(&self, peer: WorkerId, reconnecting: bool) {
        let peers = &mut self.lock().reconnecting;
        match reconnecting {
            true => peers.insert(peer),
            false => peers.remove(&peer),
        };
    }

    /// A snapshot of the current status.
    pub fn read(&self) -> WorkerStatus {
        let state = self.lock();
        WorkerStatus { reconnecting: state.reconnecting.first().copied().or(state.status.reconnecting), ..state.status }
    }

    /// Replaces the status with one that a remote worker has sent.
    pub fn set(&self, status: WorkerStatus) {
        self.lock().status = status;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

/// The form in which a heartbeat carries the status.
impl fmt::Display for WorkerStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ", self.progress, self.done)?;
        match self.activity {
            Activity::Idle => f.write_str("idle")?,
            Activity::Busy => f.write_str("busy")?,
            Activity::Running(action) => write!(f, "run {action}")?,
            Activity::Waiting(action) => write!(f, "wait {action}")?,
            Activity::AllReduce => f.write_str("share")?,
        }
        match self.reconnecting {
            Some(peer) => write!(f, " reconnecting {}", peer.index()),
            None => Ok(()),
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
        let reconnecting = match words.next() {
            Some("reconnecting") => Some(WorkerId(words.next().and_then(|w| w.parse().ok()).ok_or(())?)),
            _ => None,
        };
        Ok(WorkerStatus { progress, done, activity, reconnecting })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heartbeat_says_to_which_peer_the_worker_reconnects() {
        let status = SharedStatus::default();
        status.begin(Activity::Busy, 3);
        assert_eq!(status.read().to_string(), "1 3 busy");
        status.set_reconnecting(WorkerId(2), true);
        status.set_reconnecting(WorkerId(1), true);
        assert_eq!(status.read().to_string(), "1 3 busy reconnecting 1");
        assert_eq!("1 3 busy reconnecting 1".parse(), Ok(status.read()));
        status.set_reconnecting(WorkerId(1), false);
        status.begin(Activity::Waiting("0B0<1".parse().unwrap()), 4);
        assert_eq!(status.read().to_string(), "2 4 wait 0B0<1 reconnecting 2");
        assert_eq!("2 4 wait 0B0<1 reconnecting 2".parse(), Ok(status.read()));
        status.set_reconnecting(WorkerId(2), false);
        assert_eq!(status.read().to_string(), "2 4 wait 0B0<1");
        assert_eq!("1 3 busy reconnecting me".parse::<WorkerStatus>(), Err(()));
    }
}

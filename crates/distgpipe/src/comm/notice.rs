//! What the user of a run should know while it goes on, before anything has failed.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// A notice about a run that goes on. Its text names options of the library, as errors do.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Notice {
    /// Nothing has arrived from a worker for a while, not even a heartbeat.
    Silent {
        /// The name of the worker.
        worker: String,
        /// How long it has been silent, in seconds.
        silent_s: f64,
        /// The connection counts as broken when the silence has lasted this long, in seconds.
        limit_s: f64,
    },
    /// A worker has not answered yet that it joins the run.
    NotJoined {
        /// The name of the worker.
        worker: String,
        /// How long it has been asked, in seconds.
        waited_s: f64,
        /// The run fails when it has not answered for this long, in seconds.
        limit_s: f64,
    },
    /// A silent worker sends again.
    Back {
        /// The name of the worker.
        worker: String,
        /// How long it was silent, in seconds.
        silent_s: f64,
    },
    /// The connection to a worker is broken, and this process waits for another one. Sent about every second.
    Reconnecting {
        /// The name of the worker.
        worker: String,
        /// How long the connection has been broken, in seconds.
        seconds: f64,
        /// The run fails when that has lasted this long, in seconds.
        limit_s: f64,
    },
    /// A broken connection has been restored. Nothing was lost.
    Reconnected {
        /// The name of the worker.
        worker: String,
        /// How long the connection was broken, in seconds.
        seconds: f64,
    },
    /// The disk does not answer while a checkpoint is written. Training waits, and gives the checkpoint up after a limit.
    DiskStalled {
        /// The directory of the checkpoints.
        directory: PathBuf,
        /// How long it has not answered, in seconds.
        waited_s: f64,
        /// The checkpoint is given up when that has lasted this long, in seconds.
        limit_s: f64,
    },
    /// This process did not run for a while. Other processes may have given it up meanwhile.
    Suspended {
        /// How long it did not run, in seconds.
        seconds: f64,
    },
}

impl Notice {
    /// The name of the worker that it is about.
    pub fn worker_mut(&mut self) -> Option<&mut String> {
        match self {
            Notice::Silent { worker, .. }
            | Notice::NotJoined { worker, .. }
            | Notice::Back { worker, .. }
            | Notice::Reconnecting { worker, .. }
            | Notice::Reconnected { worker, .. } => Some(worker),
            Notice::DiskStalled { .. } | Notice::Suspended { .. } => None,
        }
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::Silent { worker, silent_s, limit_s } => write!(
                f,
                "nothing has arrived from {worker} for {silent_s:.1} s, not even a heartbeat; the connection counts as broken \
                 after {limit_s:.1} s (`Timeouts::silence_s`)"
            ),
            Notice::NotJoined { worker, waited_s, limit_s } => write!(
                f,
                "{worker} was asked to join the run {waited_s:.1} s ago and has not answered; the run fails after {limit_s:.1} s \
                 (`Timeouts::connect_s`)"
            ),
            Notice::Back { worker, silent_s } => write!(f, "{worker} is back after {silent_s:.1} s"),
            Notice::Reconnecting { worker, seconds, limit_s } => write!(
                f,
                "reconnecting to {worker}, {seconds:.0} s; the run fails after {limit_s:.0} s (`Timeouts::reconnect_s`)"
            ),
            Notice::Reconnected { worker, seconds } => write!(f, "reconnected to {worker} after {seconds:.1} s"),
            Notice::DiskStalled { directory, waited_s, limit_s } => write!(
                f,
                "saving a checkpoint to {}: the disk has not answered for {waited_s:.0} s; training waits for up to {limit_s:.0} s",
                directory.display()
            ),
            Notice::Suspended { seconds } => {
                write!(f, "this process did not run for {seconds:.1} s: it was suspended, or its machine slept or was overloaded")
            }
        }
    }
}

/// Receives the notices of a run, on the thread that makes them: it must not block.
#[derive(Clone)]
pub struct Notify(Arc<dyn Fn(&Notice) + Send + Sync>);

impl Notify {
    /// Calls `handler` with each notice.
    pub fn new(handler: impl Fn(&Notice) + Send + Sync + 'static) -> Self {
        Notify(Arc::new(handler))
    }

    /// Passes a notice on.
    pub fn send(&self, notice: &Notice) {
        (self.0)(notice);
    }
}

/// Drops every notice.
impl Default for Notify {
    fn default() -> Self {
        Notify::new(|_| {})
    }
}

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notify(…)")
    }
}

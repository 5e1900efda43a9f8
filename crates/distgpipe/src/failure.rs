//! What can go wrong, and how everybody learns of it.
//!
//! A [`Fault`] is an error at one place. A [`Failure`] says who had it, doing what; it is what the user reads. The
//! [`Fate`] of a run is the first failure of any of its threads in this process: whoever fails decides it, and every
//! wait in the crate looks at it at least every [`POLL`], so that nobody waits for somebody who is gone.

use distgpipe_core::wire::{AbortNotice, WireError};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How often a waiting thread looks whether the run has failed.
pub const POLL: Duration = Duration::from_millis(50);

/// An error at one place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// libtorch refused.
    #[error("libtorch: {0}")]
    Engine(String),
    /// A layer could not do its work.
    #[error("layer `{layer}`: {why}")]
    Layer {
        /// The layer's name.
        layer: String,
        /// What it said.
        why: String,
    },
    /// Code panicked.
    #[error("panicked: {0}")]
    Panic(String),
    /// No worker has finished anything for too long, and this one is the cause.
    #[error("it made no headway for {limit_s:.1} s; if the work is just slow, raise the time-out (--timeout)")]
    Stalled {
        /// The time-out.
        limit_s: f64,
    },
    /// A peer did not answer in time.
    #[error("{what} took longer than {limit_s:.1} s: it is suspended, overloaded, or the network is down")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// The time-out.
        limit_s: f64,
    },
    /// A worker did not take up a run in time.
    #[error("it did not answer within {limit_s:.1} s: it may be in another run (wait for that, or start another worker), it is suspended, or the network is down")]
    NoAnswer {
        /// The time-out.
        limit_s: f64,
    },
    /// A peer sent what cannot be a frame.
    #[error("what came over the link is not valid: {0}")]
    Wire(#[from] WireError),
    /// A peer sent a valid frame that has no place here.
    #[error("expected {expected}, got {got}")]
    Protocol {
        /// What the plan calls for.
        expected: String,
        /// What came.
        got: String,
    },
    /// The connection ended.
    #[error("the connection to it closed without a goodbye: the process ended, was killed, or the network is down")]
    Lost,
    /// The operating system refused.
    #[error("{doing}: {source}")]
    Io {
        /// What was attempted.
        doing: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The run has failed elsewhere.
    #[error("{0}")]
    Elsewhere(Failure),
    /// A fault that a test asked for.
    #[error("injected fault: {0}")]
    Injected(String),
}

impl Fault {
    /// An I/O error with what was being done.
    pub fn io(doing: impl Into<String>, source: std::io::Error) -> Self {
        Fault::Io { doing: doing.into(), source }
    }

    /// A frame or message that does not belong here.
    pub fn protocol(expected: impl Into<String>, got: impl Into<String>) -> Self {
        Fault::Protocol { expected: expected.into(), got: got.into() }
    }
}

impl From<tch::TchError> for Fault {
    fn from(error: tch::TchError) -> Self {
        let text = error.to_string();
        Fault::Engine(text.lines().next().unwrap_or_default().to_owned())
    }
}

/// The first fault of a run: whose it was, and what that worker was doing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Failure {
    /// The worker (or link) at fault.
    pub worker: String,
    /// What it was doing: an action such as `1F3`, or a phase in words.
    pub phase: String,
    /// What went wrong and what to do.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed in {}: {}", self.worker, self.phase, self.message)
    }
}

impl Failure {
    /// The failure of somebody in some phase. A fault that only passes on a failure of elsewhere keeps that one.
    pub fn new(worker: impl Into<String>, phase: impl Into<String>, fault: Fault) -> Self {
        match fault {
            Fault::Elsewhere(first) => first,
            fault => Failure { worker: worker.into(), phase: phase.into(), message: fault.to_string() },
        }
    }

    /// As it goes over a link.
    pub fn notice(&self) -> AbortNotice {
        AbortNotice { worker: self.worker.clone(), phase: self.phase.clone(), message: self.message.clone() }
    }
}

impl From<AbortNotice> for Failure {
    fn from(notice: AbortNotice) -> Self {
        Failure { worker: notice.worker, phase: notice.phase, message: notice.message }
    }
}

/// Shared by all threads of a run in one process: undecided, or failed with a first cause.
#[derive(Clone, Debug, Default)]
pub struct Fate(Arc<FateInner>);

#[derive(Debug, Default)]
struct FateInner {
    failed: AtomicBool,
    first: Mutex<Option<Failure>>,
}

impl Fate {
    /// Records a failure; returns the first one, which may be another.
    pub fn fail(&self, failure: Failure) -> Failure {
        let mut first = self.0.first.lock().unwrap_or_else(|e| e.into_inner());
        let first = first.get_or_insert(failure).clone();
        self.0.failed.store(true, Ordering::Release);
        first
    }

    /// An error if the run has failed.
    pub fn check(&self) -> Result<(), Fault> {
        if self.0.failed.load(Ordering::Acquire) {
            if let Some(first) = self.failure() {
                return Err(Fault::Elsewhere(first));
            }
        }
        Ok(())
    }

    /// The first failure, if the run has failed.
    pub fn failure(&self) -> Option<Failure> {
        self.0.first.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }
}

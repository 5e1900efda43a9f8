//! Ends all threads of a run in this process once one of them fails.
//!
//! The [`AbortFlag`] of a run holds the first failure of any thread in this process. Every wait in the crate checks the
//! flag at least every [`POLL`], so no thread waits for one that is gone.

use crate::failure::{Failure, Fault};
use crate::sync::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How often a waiting thread checks whether the run has failed.
pub const POLL: Duration = Duration::from_millis(50);

/// Holds the first failure of a run. Clones share it; every thread of the run in this process has one.
#[derive(Clone, Debug, Default)]
pub struct AbortFlag(Arc<AbortState>);

#[derive(Debug, Default)]
struct AbortState {
    failed: AtomicBool,
    first: Mutex<Option<Failure>>,
}

impl AbortFlag {
    /// Sets the flag, unless it is set already. Returns the first failure, which is not the given one in that case.
    pub fn fail(&self, failure: Failure) -> Failure {
        let mut first = lock(&self.0.first);
        let first = first.get_or_insert(failure).clone();
        self.0.failed.store(true, Ordering::Release);
        first
    }

    /// Returns [`Fault::Reported`] with the first failure if the run has failed.
    pub fn check(&self) -> Result<(), Fault> {
        if self.0.failed.load(Ordering::Acquire) {
            if let Some(first) = self.failure() {
                return Err(Fault::Reported(first));
            }
        }
        Ok(())
    }

    /// The first failure, if the run has failed.
    pub fn failure(&self) -> Option<Failure> {
        lock(&self.0.first).clone()
    }
}

//! How long a read from or a write to a socket may take.

use crate::comm::abort::AbortFlag;
use crate::failure::Fault;
use std::cell::Cell;
use std::time::{Duration, Instant};

/// What a thread waits for at a socket.
#[derive(Clone, Copy, Debug)]
pub(super) enum Waiting {
    /// For the peer to send.
    ForData,
    /// For the peer to read what was sent.
    ToSend,
}

/// Ends a read or write that makes no progress, takes too long altogether, or belongs to a run that has failed.
pub struct Deadline<'a> {
    abort: &'a AbortFlag,
    /// The longest time without progress.
    idle_limit: Duration,
    /// The time that a frame in progress may still take once the run has failed.
    grace: Duration,
    failed_at: Cell<Option<Instant>>,
    /// During the handshake, when the peer may not have shown its token yet: the end of the whole operation, progress or not.
    total: Option<Instant>,
}

impl<'a> Deadline<'a> {
    /// Gives up when the run fails, or when no byte moves for `idle_limit`.
    pub fn new(abort: &'a AbortFlag, idle_limit: Duration) -> Self {
        Deadline { abort, idle_limit, grace: Duration::ZERO, failed_at: Cell::new(None), total: None }
    }

    /// Lets a frame in progress finish for up to `grace` after the run has failed. The peer could neither use half a frame
    /// nor recognize the abort notice after it.
    pub fn with_grace(self, grace: Duration) -> Self {
        Deadline { grace, ..self }
    }

    /// For the handshake: gives up after `limit` even if bytes move.
    pub fn with_total(self, limit: Duration) -> Self {
        Deadline { total: Some(Instant::now() + limit), ..self }
    }

    /// Checks when bytes have moved: only [`Deadline::with_total`] can end the operation then.
    pub(super) fn check_after_progress(&self) -> Result<(), Fault> {
        match self.total {
            Some(_) => self.check(Duration::ZERO, Waiting::ForData),
            None => Ok(()),
        }
    }

    /// Checks when nothing has moved for this long.
    pub(super) fn check(&self, idle: Duration, waiting: Waiting) -> Result<(), Fault> {
        if let Err(fault) = self.abort.check() {
            let failed_at = self.failed_at.get().unwrap_or_else(Instant::now);
            self.failed_at.set(Some(failed_at));
            if failed_at.elapsed() >= self.grace {
                return Err(fault);
            }
        }
        let limit_s = self.idle_limit.as_secs_f64();
        match self.total {
            Some(end) if Instant::now() >= end || idle >= self.idle_limit => {
                Err(Fault::TimedOut { what: "the handshake".to_owned(), limit_s })
            }
            None if idle >= self.idle_limit => Err(match waiting {
                Waiting::ForData => Fault::Silent { limit_s },
                Waiting::ToSend => Fault::NotReading { limit_s },
            }),
            _ => Ok(()),
        }
    }
}

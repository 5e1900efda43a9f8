//! The time-outs of a run.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How long a run waits before it counts silence as failure, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timeouts {
    /// The run fails when no worker finishes an action for this long, or when for ten times as long only workers of other processes
    /// say that they do. Raise it if single actions take longer.
    pub stall_s: f64,
    /// A connection counts as broken when nothing arrives for this long, not even a heartbeat. A
    /// [notice](crate::Builder::on_notice) comes after 5 s, or after a quarter of this if that is less, but not before 0.5 s.
    pub silence_s: f64,
    /// The limit for connecting to a worker, and for its answers until it has joined the run.
    pub connect_s: f64,
    /// How long a broken connection may take to be restored before the run fails. Both ends keep what has not arrived and
    /// resume there, so the results do not change. 0 ends the run with the first broken connection. A worker that is gone for
    /// certain, because nobody listens at its address any more, ends the run at once. Workers wait for at most [`JOIN_S_MAX`].
    pub reconnect_s: f64,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts { stall_s: 300.0, silence_s: 20.0, connect_s: 20.0, reconnect_s: 120.0 }
    }
}

/// The most seconds of [`Timeouts::connect_s`] and [`Timeouts::reconnect_s`] that a worker grants a job, because it serves nobody else
/// meanwhile.
pub const JOIN_S_MAX: f64 = 600.0;

/// The most seconds of [`Timeouts::silence_s`] that a worker grants a job: a driver that is gone without a word holds it for so long.
pub const SILENCE_S_MAX: f64 = 600.0;

/// The most seconds of [`Timeouts::stall_s`] that a worker grants a job.
pub const STALL_S_MAX: f64 = 86_400.0;

impl Timeouts {
    /// These time-outs as far as a worker grants them.
    pub(crate) fn granted(self) -> Self {
        Timeouts {
            stall_s: self.stall_s.min(STALL_S_MAX),
            silence_s: self.silence_s.min(SILENCE_S_MAX),
            connect_s: self.connect_s.min(JOIN_S_MAX),
            reconnect_s: self.reconnect_s.min(JOIN_S_MAX),
        }
    }

    /// [`Self::stall_s`] as a duration.
    pub fn stall(&self) -> Duration {
        seconds(self.stall_s)
    }
    /// [`Self::silence_s`] as a duration.
    pub fn silence(&self) -> Duration {
        seconds(self.silence_s)
    }
    /// [`Self::connect_s`] as a duration.
    pub fn connect(&self) -> Duration {
        seconds(self.connect_s)
    }
    /// [`Self::reconnect_s`] as a duration; zero if connections are not restored.
    pub fn reconnect(&self) -> Duration {
        if self.reconnect_s > 0.0 {
            seconds(self.reconnect_s)
        } else {
            Duration::ZERO
        }
    }
}

/// Clamps a time-out, which may come from a peer, to a range that can be added to an `Instant`.
fn seconds(s: f64) -> Duration {
    Duration::try_from_secs_f64(s.clamp(0.05, 1e7)).unwrap_or(Duration::from_secs(300))
}

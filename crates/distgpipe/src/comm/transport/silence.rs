//! Whether a peer in another process is heard: what the user is told of a silence, and that it has lasted too long.

use super::HEARTBEAT;
use crate::comm::notice::{Notice, Notify};
use crate::comm::suspension::{self, IdleTimer};
use std::time::{Duration, Instant};

/// How long a peer may be silent before it is reported, if it counts as dead after `limit`: five seconds or a quarter of the
/// limit, but longer than a peer with nothing to send pauses between two heartbeats.
fn silence_reported(limit: Duration) -> Duration {
    Duration::from_secs(5).min(limit / 4).max(2 * HEARTBEAT)
}

/// Listens to one peer. Call [`heard`](Self::heard) or [`nothing_heard`](Self::nothing_heard) at least every
/// [`POLL`](crate::comm::abort::POLL).
pub(super) struct SilenceWatch {
    peer: String,
    /// A peer that is silent for so long counts as dead.
    limit: Duration,
    notify: Notify,
    idle: IdleTimer,
    /// When a silence began that has been reported.
    silent: Option<Instant>,
}

impl SilenceWatch {
    pub fn new(peer: String, limit: Duration, notify: Notify) -> Self {
        SilenceWatch { peer, limit, notify, idle: IdleTimer::new(), silent: None }
    }

    /// Starts again, after a time in which nobody listened.
    pub fn restart(&mut self) {
        self.idle.restart();
    }

    /// Something has arrived.
    pub fn heard(&mut self) {
        self.idle.progress();
        if let Some(since) = self.silent.take() {
            self.notify.send(&Notice::Back { worker: self.peer.clone(), silent_s: since.elapsed().as_secs_f64() });
        }
        self.report_suspension();
    }

    /// Nothing has arrived. Returns how long that has been so.
    pub fn nothing_heard(&mut self) -> Duration {
        let silence = self.idle.elapsed();
        self.report_suspension();
        if self.silent.is_none() && silence >= silence_reported(self.limit) {
            self.silent = Instant::now().checked_sub(silence);
            let (silent_s, limit_s) = (silence.as_secs_f64(), self.limit.as_secs_f64());
            self.notify.send(&Notice::Silent { worker: self.peer.clone(), silent_s, limit_s });
        }
        silence
    }

    /// The connection has ended, perhaps because this process did not run.
    pub fn ended(&mut self) {
        self.idle.elapsed();
        self.report_suspension();
    }

    fn report_suspension(&self) {
        if let Some(missed) = suspension::news() {
            self.notify.send(&Notice::Suspended { seconds: missed.duration.as_secs_f64() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With `--peer-timeout 1`, every pause between two heartbeats was once reported as a silence, and its end as a return.
    #[test]
    fn a_pause_between_two_heartbeats_is_no_silence() {
        for (limit_s, reported_s) in [(0.05, 0.5), (0.9, 0.5), (2.0, 0.5), (4.0, 1.0), (20.0, 5.0), (1e7, 5.0)] {
            assert_eq!(silence_reported(Duration::from_secs_f64(limit_s)).as_secs_f64(), reported_s, "{limit_s}");
        }
    }
}

//! Answers those who connect to a server that is in a run.

use super::{JobInfo, PendingConnections, Report, ServeEvent, Server};
use crate::comm::handshake::{self, Terms};
use crate::failure::{Failure, Fault};
use std::time::Duration;

/// Answers those who connect while a job is in progress.
pub(super) struct BusyListener<'a> {
    server: &'a Server,
    /// What they are told.
    pub text: String,
    pub pending: PendingConnections,
}

/// How long somebody who connects during a job may take for the handshake. Nobody else is answered meanwhile, and the end of the
/// job is not noticed.
const BUSY_LIMIT: Duration = Duration::from_millis(500);

impl<'a> BusyListener<'a> {
    /// For a server that is in this job.
    pub fn new(server: &'a Server, job: &JobInfo) -> Self {
        BusyListener { server, text: job.busy(), pending: PendingConnections::default() }
    }

    /// Refuses one connection, if there is one.
    pub fn refuse_next(&mut self, report: &Report<'_>) {
        let Some((mut stream, from)) = self.pending.next(&self.server.listener, || true) else { return };
        let terms = Terms { token: &self.server.options.token, run: None, busy: Some(&self.text) };
        match handshake::answer(&mut stream, &terms, BUSY_LIMIT) {
            Ok(_) => {}
            Err(Fault::Busy { .. }) => report(&ServeEvent::RefusedBusy(from)),
            Err(fault) => report(&ServeEvent::Rejected(&Failure::new(from.to_string(), "connecting", fault))),
        }
    }
}

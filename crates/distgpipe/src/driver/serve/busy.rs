//! Answers those who connect to a server that is in a run.

use super::events::run_name;
use super::{has_input, PendingConnections, Report, ServeEvent, Server, HANDSHAKE_LIMIT};
use crate::comm::handshake::{self, Terms};
use crate::engine;
use crate::failure::{Failure, Fault};
use distgpipe_core::wire::Role;
use distgpipe_core::WorkerId;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Answers those who connect between the handshake of a driver and the end of its job.
pub(super) struct BusyListener<'a> {
    server: &'a Server,
    pending: &'a mut PendingConnections,
    /// The driver's run.
    pub run: [u8; 16],
    /// What other drivers are told.
    text: String,
    /// Workers of the run that had their job before this one, and have connected.
    pub early: Vec<(WorkerId, TcpStream)>,
}

/// How long somebody who connects during a job may take for the handshake. Nobody else is answered meanwhile, and the end of the
/// job is not noticed.
const BUSY_LIMIT: Duration = Duration::from_millis(500);

impl<'a> BusyListener<'a> {
    /// For a server that is in this run of this driver, from now on.
    pub fn new(server: &'a Server, pending: &'a mut PendingConnections, driver: SocketAddr, run: [u8; 16]) -> Self {
        let text = format!("another run since {} (run {}, from {driver})", engine::utc_now(), run_name(run));
        BusyListener { server, pending, run, text, early: Vec::new() }
    }

    /// Waits until the driver has sent something. Admits workers of the run meanwhile, and refuses everybody else.
    pub fn wait_for(&mut self, driver: &TcpStream, limit: Duration, report: &Report<'_>) -> Result<(), Fault> {
        let start = Instant::now();
        // The handshake has given the stream a short time-out, which is the pause between two looks.
        while !has_input(driver) {
            if start.elapsed() >= limit {
                return Err(Fault::TimedOut { what: "the handshake".to_owned(), limit_s: limit.as_secs_f64() });
            }
            let Some((mut stream, from)) = self.pending.next(&self.server.listener, || true) else { continue };
            if has_input(driver) {
                // The driver may be gone, and this one the next.
                self.pending.put_back(stream, from);
                break;
            }
            if let Some(Role::Worker(worker)) = self.answer(&mut stream, from, Some(self.run), HANDSHAKE_LIMIT, report)
            {
                self.early.push((worker, stream));
            }
        }
        Ok(())
    }

    /// The next worker of the run that connects, or `None` once `stop` returns true. Everybody else (a stranger, a second
    /// driver) is refused. `limit` bounds each handshake.
    pub fn admit_next(
        &mut self,
        limit: Duration,
        stop: impl Fn() -> bool,
        report: &Report<'_>,
    ) -> Option<(WorkerId, TcpStream)> {
        while let Some((mut stream, from)) = self.pending.next(&self.server.listener, &stop) {
            if let Some(Role::Worker(worker)) = self.answer(&mut stream, from, Some(self.run), limit, report) {
                return Some((worker, stream));
            }
        }
        None
    }

    /// Refuses one connection, if there is one. It waits for its turn instead if the job is `over`: its driver may have waited
    /// for the end of this one.
    pub fn refuse_next(&mut self, over: impl Fn() -> bool, report: &Report<'_>) {
        let Some((mut stream, from)) = self.pending.next(&self.server.listener, || true) else { return };
        if over() {
            return self.pending.put_back(stream, from);
        }
        self.answer(&mut stream, from, None, BUSY_LIMIT, report);
    }

    /// Accepts a peer of this run, or nobody. Returns the role of one that was accepted.
    fn answer(
        &self,
        stream: &mut TcpStream,
        from: SocketAddr,
        run: Option<[u8; 16]>,
        limit: Duration,
        report: &Report<'_>,
    ) -> Option<Role> {
        let terms = Terms { token: &self.server.options.token, run, busy: Some(&self.text) };
        match handshake::answer(stream, &terms, limit) {
            Ok(hello) => return Some(hello.role),
            Err(Fault::Busy { .. }) => report(&ServeEvent::RefusedBusy(from)),
            Err(fault) => report(&ServeEvent::Rejected(&Failure::new(from.to_string(), "connecting", fault))),
        }
        None
    }
}

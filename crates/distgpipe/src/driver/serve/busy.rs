//! Answers those who connect to a server that is in a run.

use super::events::run_name;
use super::{has_input, Arrivals, Report, ServeEvent, Server};
use crate::comm::acceptor::{Arrival, ArrivedPeer};
use crate::comm::handshake::{self, Terms};
use crate::comm::transport::byte_stream::ByteStream;
use crate::engine;
use crate::failure::{Failure, Fault};
use distgpipe_core::wire::{Hello, Role};
use distgpipe_core::WorkerId;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How long an answer may take to be sent. It is much smaller than the socket's buffer.
const BUSY_LIMIT: Duration = Duration::from_millis(500);

/// The most workers that may connect before the driver has sent the job, which says how many there are.
const EARLY_MAX: usize = 64;

/// Answers those who connect between the handshake of a driver and the end of its job.
pub(super) struct BusyListener<'a> {
    server: &'a Server,
    arrivals: &'a mut Arrivals,
    /// The driver's run.
    pub run: [u8; 16],
    /// What other drivers are told.
    text: String,
    /// Workers of the run that had their job before this one, and have connected.
    pub early: Vec<(WorkerId, ByteStream)>,
}

impl<'a> BusyListener<'a> {
    /// For a server that is in this run of this driver, from now on.
    pub fn new(server: &'a Server, arrivals: &'a mut Arrivals, driver: SocketAddr, run: [u8; 16]) -> Self {
        let text = format!("another run since {} (run {}, from {driver})", engine::utc_now(), run_name(run));
        BusyListener { server, arrivals, run, text, early: Vec::new() }
    }

    /// How long the worker's thread may take to end.
    pub fn stuck_after(&self) -> Duration {
        self.server.options.stuck_after
    }

    /// Waits until the driver has sent something. Admits workers of the run meanwhile, and refuses everybody else.
    pub fn wait_for(&mut self, driver: &ByteStream, limit: Duration, report: &Report<'_>) -> Result<(), Fault> {
        let start = Instant::now();
        // Each look waits for a moment.
        while !has_input(driver) {
            if start.elapsed() >= limit {
                return Err(Fault::TimedOut { what: "the handshake".to_owned(), limit_s: limit.as_secs_f64() });
            }
            let Some(peer) = self.next(Duration::ZERO, report) else { continue };
            if has_input(driver) {
                // The driver may be gone, and this one the next.
                self.arrivals.acceptor.put_back(peer);
                break;
            }
            let Some((hello, mut stream)) = self.answer(*peer, report) else { continue };
            if let Role::Worker(worker) = hello.role {
                // One that connects again has lost a connection on which nothing had been sent.
                if hello.epoch == 0 || handshake::welcome(&mut stream, 1, BUSY_LIMIT).is_ok() {
                    self.early.retain(|(earlier, _)| *earlier != worker);
                    if self.early.len() < EARLY_MAX {
                        self.early.push((worker, stream));
                    }
                }
            }
        }
        Ok(())
    }

    /// Answers one peer, if there is one within about `wait`. Returns a member of the run that connects again, and refuses others.
    /// It waits for its turn instead if the job is `over`: its driver may have waited for the end of this one. If the run's own
    /// driver is `gone`, another one is welcomed and [succeeds](Self::has_successor) it.
    pub fn answer_next(
        &mut self,
        wait: Duration,
        over: impl Fn() -> bool,
        gone: bool,
        report: &Report<'_>,
    ) -> Option<(Hello, ByteStream)> {
        let mut peer = self.next(wait, report)?;
        if over() {
            self.arrivals.acceptor.put_back(peer);
            return None;
        }
        let successor = peer.hello.role == Role::Driver && peer.hello.epoch == 0 && peer.hello.run != self.run;
        if !(successor && gone) {
            return self.answer(*peer, report);
        }
        let terms = Terms { token: &self.server.options.token, run: None, busy: None };
        match handshake::reply(&mut peer.stream, &peer.hello, &terms, BUSY_LIMIT) {
            Ok(()) => self.arrivals.successor = Some(*peer),
            Err(fault) => rejected(report, peer.from, fault),
        }
        None
    }

    /// Whether another driver has taken the place of this one.
    pub fn has_successor(&self) -> bool {
        self.arrivals.successor.is_some()
    }

    /// The next peer that has introduced itself.
    fn next(&mut self, wait: Duration, report: &Report<'_>) -> Option<Box<ArrivedPeer>> {
        match self.arrivals.acceptor.next(wait, &|_| None)? {
            Arrival::Peer(peer) => Some(peer),
            Arrival::Rejected { from, fault } => {
                rejected(report, from, fault);
                None
            }
        }
    }

    /// Accepts a peer of this run.
    fn answer(&self, peer: ArrivedPeer, report: &Report<'_>) -> Option<(Hello, ByteStream)> {
        let ArrivedPeer { mut stream, from, hello, .. } = peer;
        let terms = Terms { token: &self.server.options.token, run: Some(self.run), busy: Some(&self.text) };
        match handshake::reply(&mut stream, &hello, &terms, BUSY_LIMIT) {
            Ok(()) => return Some((hello, stream)),
            Err(Fault::Busy { .. }) => report(&ServeEvent::RefusedBusy(from)),
            Err(fault) => rejected(report, from, fault),
        }
        None
    }
}

pub(super) fn rejected(report: &Report<'_>, from: SocketAddr, fault: Fault) {
    report(&ServeEvent::Rejected(&Failure::new(from.to_string(), "connecting", fault)));
}

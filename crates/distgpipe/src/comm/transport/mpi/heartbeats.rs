//! The thread that keeps the links of a process alive: it sends and hears heartbeats and abort notices, whatever the other
//! threads encode, decode or wait for.

use super::{control_frame, Link, Tags};
use crate::comm::abort::AbortFlag;
use crate::comm::notice::Notify;
use crate::comm::traffic::MessageSize;
use crate::comm::transport::silence::SilenceWatch;
use crate::comm::transport::{limits, OnHeartbeat, HEARTBEAT};
use crate::engine::mpi::{Mpi, MpiMessage};
use crate::failure::{Failure, Fault};
use distgpipe_core::wire::{AbortNotice, Header, Kind, HEADER_BYTES};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause between two looks at what has arrived.
const PAUSE: Duration = Duration::from_millis(10);

pub(super) struct Heartbeats {
    pub mpi: &'static Mpi,
    pub tags: Tags,
    pub abort: AbortFlag,
    pub pulses: Vec<Pulse>,
    pub abandoned: Arc<AtomicBool>,
}

/// The heartbeats of one link.
pub(super) struct Pulse {
    link: Arc<Link>,
    heartbeat: Box<dyn Fn() -> String + Send>,
    on_heartbeat: OnHeartbeat,
    watch: SilenceWatch,
    heard: bool,
    sent: Option<Instant>,
}

impl Pulse {
    pub fn new(
        link: Arc<Link>,
        heartbeat: Box<dyn Fn() -> String + Send>,
        on_heartbeat: OnHeartbeat,
        notify: Notify,
    ) -> Self {
        let watch = SilenceWatch::new(link.peer.clone(), link.timeouts.silence(), notify);
        Pulse { link, heartbeat, on_heartbeat, watch, heard: false, sent: None }
    }

    /// Sends a heartbeat if it is time.
    fn send(&mut self) -> Result<(), Fault> {
        let Link { mpi, rank, tags, .. } = *self.link;
        if self.link.is_cut() || self.sent.is_some_and(|sent| sent.elapsed() < HEARTBEAT) {
            return Ok(());
        }
        self.sent = Some(Instant::now());
        let frame = control_frame(Kind::Ping, (self.heartbeat)().as_bytes());
        let wire_bytes = frame.len() as u64;
        mpi.post(rank, tags.control, frame)?;
        self.link.counters.count_message(MessageSize { payload_bytes: None, wire_bytes, trains: false });
        Ok(())
    }

    /// Takes a message of the peer.
    fn take(&mut self, message: MpiMessage<'_>) -> Result<(), Fault> {
        self.watch.heard();
        self.heard = true;
        let bytes = message.take()?;
        let Some((head, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Err(Fault::Lost) };
        let header = Header::decode(head, &limits())?;
        header.verify(body)?;
        match header.kind {
            Kind::Ping => {
                let text = std::str::from_utf8(body).map_err(|e| Fault::malformed("a heartbeat", e))?;
                (self.on_heartbeat)(text);
                Ok(())
            }
            Kind::Abort => {
                let notice = AbortNotice::decode(body).map_err(|e| Fault::malformed("an abort notice", e))?;
                Err(Fault::Reported(Failure::from(notice)))
            }
            kind => Err(Fault::protocol("a heartbeat or an abort notice", kind.to_string())),
        }
    }

    /// Fails if the peer has been silent for too long.
    fn check_silence(&mut self) -> Result<(), Fault> {
        let timeouts = &self.link.timeouts;
        // Before its first heartbeat it may be ending its last run.
        let limit = if self.heard { timeouts.silence() } else { timeouts.silence().max(timeouts.connect()) };
        if self.watch.nothing_heard() < limit {
            return Ok(());
        }
        self.link.silent.store(true, Ordering::Release);
        let limit_s = limit.as_secs_f64();
        Err(if self.heard { Fault::Silent { limit_s } } else { Fault::NoAnswer { limit_s } })
    }
}

impl Heartbeats {
    pub fn run(mut self) {
        while !self.abandoned.load(Ordering::Acquire) && self.abort.failure().is_none() {
            self.beat();
            std::thread::sleep(PAUSE);
        }
        if let Some(first) = self.abort.failure() {
            let notice = control_frame(Kind::Abort, &first.notice().encode());
            for pulse in self.pulses.iter().filter(|pulse| !pulse.link.is_cut() && !pulse.link.has_ended()) {
                let _ = self.mpi.post(pulse.link.rank, self.tags.control, notice.clone());
            }
        }
    }

    fn beat(&mut self) {
        loop {
            match self.mpi.next(None, self.tags.control) {
                Ok(Some(message)) => match self.pulses.iter_mut().find(|pulse| pulse.link.rank == message.from) {
                    Some(pulse) => {
                        if let Err(fault) = pulse.take(message) {
                            pulse.link.fail(fault);
                        }
                    }
                    None => drop(message.take()),
                },
                Ok(None) => break,
                Err(fault) => return drop(self.abort.fail(Failure::new("this rank", "listening", fault))),
            }
        }
        for pulse in self.pulses.iter_mut().filter(|pulse| !pulse.link.has_ended()) {
            if let Err(fault) = pulse.send().and_then(|()| pulse.check_silence()) {
                pulse.link.fail(fault);
            }
        }
    }
}

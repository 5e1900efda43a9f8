//! The reading thread of a connection. It also finds the next connection when one breaks, so that no frame of the old one can
//! arrive after the first of the new one.

use super::frames::{discard_body, read_body, read_header, timed_out, Assembler, Frame};
use super::incoming::Incoming;
use super::outbox::{Outbox, Socket};
use super::reconnect::{proves_gone, Offers, Reconnect, Resume};
use super::{connection_failure, is_cut, Deadline};
use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::handshake;
use crate::comm::link_codecs::Decoder;
use crate::comm::notice::{Notice, Notify};
use crate::comm::timeouts::Timeouts;
use crate::comm::traffic::Counters;
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::{limits, Admit, Deliver, OnHeartbeat, FINISH_FRAME};
use crate::failure::{Failure, Fault};
use distgpipe_core::wire::{AbortNotice, Header, Kind, ReceiveWindow, Received, HEADER_BYTES};
use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long one attempt to connect again may take.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(5);

/// How long the last attempt may take, when the run has failed and the peer does not know yet.
const LAST_ATTEMPT_LIMIT: Duration = Duration::from_secs(1);

/// The pause between two attempts, at first and at most.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// How often the user hears that a link is being reconnected.
const NOTICE_EVERY: Duration = Duration::from_secs(1);

pub(super) struct Reader {
    pub stream: Incoming,
    pub local: String,
    pub peer: String,
    pub abort: AbortFlag,
    pub timeouts: Timeouts,
    /// Set once this end closes the connection.
    pub closing: Arc<AtomicBool>,
    pub decoder: Decoder,
    pub admit: Admit,
    pub deliver: Deliver,
    pub on_heartbeat: OnHeartbeat,
    pub on_reconnecting: Box<dyn Fn(bool) + Send>,
    pub notify: Notify,
    pub counters: Counters,
    pub outbox: Arc<Outbox>,
    pub reconnect: Reconnect,
    pub offers: Offers,
    /// The last epoch that this end has dialled with.
    pub epoch: u64,
    pub received: ReceiveWindow,
    pub assembler: Assembler,
}

/// How a link goes on after a connection has ended.
enum Next {
    Resumed,
    /// The link is closed.
    Ended,
}

impl Reader {
    pub fn run(mut self) {
        loop {
            let failure = match self.pump() {
                Ok(()) => return self.outbox.peer_ended(),
                Err(fault) if is_cut(&fault) && self.abort.failure().is_none() => match self.connect_again(fault) {
                    Ok(Next::Resumed) => continue,
                    Ok(Next::Ended) => return self.outbox.abandon(),
                    Err(failure) => failure,
                },
                Err(fault) => self.lost(fault),
            };
            self.abort.fail(failure);
            return self.drain();
        }
    }

    /// Delivers what arrives, until the peer says goodbye.
    fn pump(&mut self) -> Result<(), Fault> {
        let limits = limits();
        loop {
            let deadline = Deadline::new(&self.abort, self.timeouts.silence());
            self.stream.begin_frame();
            let header = read_header(&mut self.stream, &limits, &deadline)?;
            (self.admit)(&header)?;
            if self.is_duplicate(&header)? {
                discard_body(&mut self.stream, &header, &deadline)?;
                continue;
            }
            if header.sequence > 0 && header.kind != Kind::Goodbye {
                self.outbox.check_window()?;
            }
            let frame = read_body(&mut self.stream, header, &deadline, &mut self.decoder)?;
            self.outbox.acknowledge(header.acknowledged).map_err(faulty_numbers)?;
            if header.sequence > 0 {
                self.received.complete();
            }
            if header.kind == Kind::Goodbye {
                return Ok(());
            }
            self.take(frame)?;
            if header.sequence > 0 {
                self.outbox.received(header.sequence, HEADER_BYTES as u64 + header.body_bytes);
            }
        }
    }

    /// Whether a frame has arrived before. Frames without a sequence number are those that are never sent again.
    fn is_duplicate(&self, header: &Header) -> Result<bool, Fault> {
        match (header.kind, header.sequence) {
            (Kind::Ping | Kind::Abort, 0) => Ok(false),
            (Kind::Ping | Kind::Abort, _) | (_, 0) => {
                let expected = "a sequence number on every frame but heartbeats and abort notices";
                Err(Fault::protocol(expected, format!("{} with sequence number {}", header.kind, header.sequence)))
            }
            (_, number) => Ok(self.received.check(number).map_err(faulty_numbers)? == Received::Duplicate),
        }
    }

    fn take(&mut self, frame: Frame) -> Result<(), Fault> {
        match frame.header.kind {
            Kind::Ping => (self.on_heartbeat)(frame.text()?),
            Kind::Abort => {
                let notice = AbortNotice::decode(&frame.body).map_err(|e| Fault::malformed("an abort notice", e))?;
                return Err(Fault::Reported(notice.into()));
            }
            _ => {
                if let Some(message) = self.assembler.add(frame)? {
                    (self.deliver)(message)?;
                }
            }
        }
        Ok(())
    }

    /// Finds another connection to the peer and resumes the link on it.
    fn connect_again(&mut self, fault: Fault) -> Result<Next, Failure> {
        // The writer knows more than that the connection has ended.
        let fault = self.outbox.broken().unwrap_or(fault);
        let closing = self.closing.clone();
        let closing = || closing.load(Ordering::Acquire);
        let limit = self.timeouts.reconnect();
        // A peer that has received this end's goodbye may close without one of its own.
        if self.outbox.is_over() || (limit.is_zero() && closing()) {
            return Ok(Next::Ended);
        }
        if limit.is_zero() {
            return Err(self.lost(fault));
        }
        (self.on_reconnecting)(true);
        let next = self.await_connection(fault, limit, closing);
        (self.on_reconnecting)(false);
        next
    }

    /// Tries to find another connection for up to `limit`.
    fn await_connection(&mut self, fault: Fault, limit: Duration, closing: impl Fn() -> bool) -> Result<Next, Failure> {
        let (start, mut noticed, mut pause) = (Instant::now(), Instant::now(), PAUSE_MIN);
        loop {
            let left = limit.saturating_sub(start.elapsed()).max(PAUSE_MIN);
            match self.attempt(ATTEMPT_LIMIT.min(left), self.abort.clone()) {
                Ok(true) => {
                    let seconds = start.elapsed().as_secs_f64();
                    self.notify.send(&Notice::Reconnected { worker: self.peer.clone(), seconds });
                    return Ok(Next::Resumed);
                }
                Ok(false) => {}
                Err(_) if closing() => return Ok(Next::Ended),
                Err(Fault::Io { .. }) => return Err(self.lost(fault)),
                Err(refused) => return Err(self.lost(refused)),
            }
            if let Some(first) = self.abort.failure() {
                self.last_attempt(&first);
                return Err(first);
            }
            if self.outbox.is_over() {
                return Ok(Next::Ended);
            }
            if start.elapsed() >= limit {
                return match closing() {
                    true => Ok(Next::Ended),
                    false => Err(Failure::not_back(&self.peer, &fault, limit)),
                };
            }
            if noticed.elapsed() >= NOTICE_EVERY {
                noticed = Instant::now();
                let (seconds, limit_s) = (start.elapsed().as_secs_f64(), limit.as_secs_f64());
                self.notify.send(&Notice::Reconnecting { worker: self.peer.clone(), seconds, limit_s });
            }
            match self.reconnect {
                Reconnect::Dial(_) => std::thread::sleep(pause),
                Reconnect::Await => std::thread::sleep(PAUSE_MIN),
            }
            pause = (2 * pause).min(PAUSE_MAX).min(POLL.max(start.elapsed() / 4));
        }
    }

    /// Tries to resume the link on another connection. False if there is none yet; an error if there will be none.
    fn attempt(&mut self, limit: Duration, abort: AbortFlag) -> Result<bool, Fault> {
        let next = self.received.next();
        let (socket, peer_next) = match &self.reconnect {
            Reconnect::Dial(dial) => {
                self.epoch += 1;
                match dial(Resume { epoch: self.epoch, next, limit, abort }) {
                    Ok((stream, peer_next)) => (Socket { epoch: self.epoch, stream }, peer_next),
                    Err(fault) if proves_gone(&fault) => return Err(fault),
                    Err(_) => return Ok(false),
                }
            }
            Reconnect::Await => {
                let Some(mut offer) = self.offers.take() else { return Ok(false) };
                if handshake::welcome(&mut offer.stream, next, limit).is_err() {
                    return Ok(false);
                }
                (Socket { epoch: offer.epoch, stream: offer.stream }, offer.next)
            }
        };
        let Ok(stream) = socket.stream.try_clone() else { return Ok(false) };
        self.outbox.resume(socket, peer_next).map_err(faulty_numbers)?;
        self.stream = self.incoming(stream);
        Ok(true)
    }

    /// Tells the peer, which waits for this end to connect again, that the run has failed.
    fn last_attempt(&mut self, first: &Failure) {
        if !matches!(self.reconnect, Reconnect::Dial(_)) {
            return;
        }
        // The run has failed: its flag would end the attempt.
        if !matches!(self.attempt(LAST_ATTEMPT_LIMIT, AbortFlag::default()), Ok(true)) {
            return;
        }
        if let Some(mut stream) = self.outbox.stream() {
            let _ = handshake::send_text(&mut stream, Kind::Abort, &first.notice().encode(), LAST_ATTEMPT_LIMIT);
        }
    }

    fn lost(&self, fault: Fault) -> Failure {
        connection_failure(&self.local, &self.peer, fault, &self.timeouts)
    }

    fn incoming(&self, stream: ByteStream) -> Incoming {
        let silence = self.timeouts.silence();
        Incoming::new(stream, self.counters.clone(), self.peer.clone(), silence, self.notify.clone())
    }

    /// Reads and discards until the peer has closed. Closing a socket with unread input would discard the abort notice that
    /// the writer is sending.
    fn drain(&mut self) {
        // Without this, the time since the last frame, which may be that of attempts to connect again, would be taken for one in which
        // this process did not run.
        self.stream.begin_frame();
        let deadline = Instant::now() + FINISH_FRAME;
        let mut rest = [0; 1 << 16];
        while Instant::now() < deadline {
            match self.stream.read(&mut rest) {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) if timed_out(&e) => {}
                Err(_) => return,
            }
        }
    }
}

fn faulty_numbers(error: distgpipe_core::wire::SequenceError) -> Fault {
    Fault::malformed("the numbers of a frame", error)
}

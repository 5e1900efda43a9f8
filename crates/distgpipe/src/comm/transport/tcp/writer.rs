//! The writing thread of a connection.

use super::frames::{self, write_frame, Framer};
use super::{connection_failure, Deadline, FINISH_FRAME, HEARTBEAT};
use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::message::Message;
use crate::comm::traffic::{Counters, MessageSize};
use crate::comm::transport::Outgoing;
use crate::failure::{Failure, Fault};
use distgpipe_core::wire::{Header, Kind};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The sending end of the socket itself, used by the writer thread alone.
pub(super) struct Socket {
    pub stream: TcpStream,
    pub framer: Framer,
    pub counters: Counters,
    pub abort: AbortFlag,
    pub silence: Duration,
    /// Set while a frame is incomplete: the peer would take whatever is written then for its rest.
    pub mid_frame: Arc<AtomicBool>,
}

impl Outgoing for Socket {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        let deadline = Deadline::new(&self.abort, self.silence).with_grace(FINISH_FRAME);
        self.mid_frame.store(true, Ordering::Release);
        let wire_bytes = self.framer.write(&mut self.stream, &message, &deadline);
        // When the run has failed, the error comes from between two frames unless the grace is over.
        self.mid_frame.store(wire_bytes.is_err() && !self.framer.at_boundary(), Ordering::Release);
        let (payload_bytes, trains) = (message.payload_bytes(), message.trains());
        self.counters.count_message(MessageSize { payload_bytes, wire_bytes: wire_bytes?, trains });
        Ok(())
    }
}

pub(super) struct Writer {
    pub local: String,
    pub peer: String,
    pub abort: AbortFlag,
    pub heartbeat: Box<dyn Fn() -> String + Send>,
    pub link: Box<dyn Outgoing>,
    pub counters: Counters,
    pub mid_frame: Arc<AtomicBool>,
    /// The bare socket, for the last frame.
    pub stream: TcpStream,
    pub silence: Duration,
}

impl Writer {
    pub fn run(mut self, queued: Receiver<Message>) {
        match self.pump(&queued) {
            Ok(()) => self.close(Kind::Goodbye, &[]),
            Err(fault) => {
                let first = self.abort.fail(self.failure(fault));
                self.close(Kind::Abort, &first.notice().encode());
            }
        }
    }

    /// Sends what is queued, and heartbeats, until all sending ends are dropped.
    fn pump(&mut self, queued: &Receiver<Message>) -> Result<(), Fault> {
        let mut last = Instant::now();
        loop {
            self.abort.check()?;
            match queued.recv_timeout(POLL) {
                Ok(message) => {
                    self.link.send(message)?;
                    self.counters.dequeued();
                    last = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) if last.elapsed() >= HEARTBEAT => {
                    let ping = frames::control(Kind::Ping, (self.heartbeat)().into_bytes());
                    self.link.send(ping)?;
                    last = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.abort.check(),
            }
        }
    }

    /// The failure for a fault in sending. A peer that has closed the connection may have sent the reason: this waits a
    /// moment for the reader to find its abort notice, which is the first failure then.
    fn failure(&self, fault: Fault) -> Failure {
        if !matches!(fault, Fault::Lost | Fault::NotReading { .. }) {
            return Failure::new(&self.local, "sending", fault);
        }
        let deadline = Instant::now() + 4 * POLL;
        while self.abort.failure().is_none() && Instant::now() < deadline {
            std::thread::sleep(POLL / 10);
        }
        connection_failure(&self.local, &self.peer, fault, self.silence)
    }

    /// Sends the last frame, if the peer is still there, and closes this direction.
    fn close(&mut self, kind: Kind, body: &[u8]) {
        // The run's own flag may be set already, and must not end this write.
        let no_abort = AbortFlag::default();
        let deadline = Deadline::new(&no_abort, Duration::from_millis(500));
        let mut header = Header::new(kind);
        header.seal(body);
        if !self.mid_frame.load(Ordering::Acquire) {
            let _ = write_frame(&mut self.stream, &header, body, &deadline);
        }
        // This direction alone: closing a socket with unread input discards what it has not sent yet.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

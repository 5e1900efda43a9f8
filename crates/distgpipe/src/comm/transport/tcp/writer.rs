//! The writing thread of a connection.

use super::frames::{write_all, write_frame};
use super::outbox::{KeptFrame, Outbox, Socket, Task};
use super::{is_cut, Deadline};
use crate::comm::abort::AbortFlag;
use crate::comm::traffic::{Counters, MessageSize};
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::{FINISH_FRAME, HEARTBEAT};
use crate::failure::{Failure, Fault};
use distgpipe_core::wire::{Header, Kind};
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct Writer {
    pub local: String,
    pub abort: AbortFlag,
    pub heartbeat: Box<dyn Fn() -> String + Send>,
    pub outbox: Arc<Outbox>,
    pub counters: Counters,
    pub silence: Duration,
    /// The writer's handle on the connection with this epoch.
    pub stream: Option<(u64, ByteStream)>,
    /// Whether a frame was begun and not finished: the peer would take whatever follows for its rest.
    pub mid_frame: bool,
}

impl Writer {
    pub fn run(mut self) {
        match self.pump() {
            Ok(()) => self.end_direction(),
            Err(fault) => {
                let first = self.abort.fail(Failure::new(&self.local, "sending", fault));
                self.send_cause(&first);
            }
        }
    }

    /// Sends frames, heartbeats and acknowledgements, until the link is closed.
    fn pump(&mut self) -> Result<(), Fault> {
        let mut last_sent = Instant::now();
        loop {
            let (socket, written) = match self.outbox.next_task(last_sent, HEARTBEAT)? {
                Task::End => return Ok(()),
                Task::Send(task) => {
                    let written = self.write(&task.socket, &task.frame.bytes.parts());
                    if written.is_ok() {
                        self.count(&task.frame);
                    }
                    (task.socket, written)
                }
                Task::Ping(socket, acknowledged) => {
                    let written = self.ping(&socket, acknowledged);
                    (socket, written)
                }
            };
            match written {
                Ok(()) => last_sent = Instant::now(),
                Err(fault) if is_cut(&fault) => {
                    self.mid_frame = false;
                    self.outbox.break_socket(&socket, fault);
                }
                Err(fault) => return Err(fault),
            }
        }
    }

    /// Counts a frame that was written. The last frame of a message counts for all of them, the first time.
    fn count(&self, frame: &KeptFrame) {
        match (frame.written.swap(true, Ordering::Relaxed), frame.message) {
            (false, Some(size)) => {
                self.counters.count_message(size);
                self.counters.dequeued();
            }
            (false, None) => {}
            (true, _) => self.count_bytes(frame.bytes.len()),
        }
    }

    /// Counts bytes on the wire that are no message of their own.
    fn count_bytes(&self, bytes: usize) {
        let wire_bytes = bytes as u64;
        self.counters.count_message(MessageSize { payload_bytes: None, wire_bytes, trains: false });
    }

    fn ping(&mut self, socket: &Socket, acknowledged: u64) -> Result<(), Fault> {
        let body = (self.heartbeat)().into_bytes();
        let mut header = Header { acknowledged, ..Header::new(Kind::Ping) };
        header.seal(&body);
        let bytes = [&header.encode()[..], &body].concat();
        self.write(socket, &[&bytes])?;
        self.count_bytes(bytes.len());
        Ok(())
    }

    fn write(&mut self, socket: &Socket, parts: &[&[u8]]) -> Result<(), Fault> {
        let deadline = Deadline::new(&self.abort, self.silence).with_grace(FINISH_FRAME);
        if self.stream.as_ref().is_none_or(|(epoch, _)| *epoch != socket.epoch) {
            let stream = socket.stream.try_clone().map_err(|e| Fault::io("duplicating a socket", e))?;
            self.stream = Some((socket.epoch, stream));
        }
        let Some((_, stream)) = &mut self.stream else { return Err(Fault::Lost) };
        self.mid_frame = true;
        for part in parts {
            write_all(stream, part, &deadline)?;
        }
        self.mid_frame = false;
        Ok(())
    }

    /// Tells the peer why the run has failed, if it is there, and ends this direction.
    fn send_cause(&mut self, first: &Failure) {
        // The run's own flag is set, and must not end this write.
        let no_abort = AbortFlag::default();
        let deadline = Deadline::new(&no_abort, Duration::from_millis(500));
        let (mut header, body) = (Header::new(Kind::Abort), first.notice().encode());
        header.seal(&body);
        if let Some(mut stream) = self.outbox.stream().filter(|_| !self.mid_frame) {
            let _ = write_frame(&mut stream, &header, &body, &deadline);
        }
        self.end_direction();
    }

    /// This direction alone: closing a socket with unread input discards what it has not sent yet.
    fn end_direction(&self) {
        if let Some(stream) = self.outbox.stream() {
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
}

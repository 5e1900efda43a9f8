//! The reading thread of a connection.

use super::frames::{read_frame, timed_out, Assembler};
use super::incoming::Incoming;
use super::{connection_failure, limits, Admit, Deadline, Deliver, OnHeartbeat, FINISH_FRAME};
use crate::comm::abort::AbortFlag;
use crate::comm::link_codecs::Decoder;
use crate::failure::Fault;
use distgpipe_core::wire::{AbortNotice, Kind};
use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct Reader {
    pub stream: Incoming,
    pub local: String,
    pub peer: String,
    pub abort: AbortFlag,
    pub silence: Duration,
    /// Set once this end closes the connection.
    pub closing: Arc<AtomicBool>,
    pub decoder: Decoder,
    pub admit: Admit,
    pub deliver: Deliver,
    pub on_heartbeat: OnHeartbeat,
}

impl Reader {
    pub fn run(mut self) {
        if let Err(fault) = self.pump() {
            // A peer that has received this end's goodbye may close without one of its own.
            if self.closing.load(Ordering::Acquire) && matches!(fault, Fault::Lost) {
                return;
            }
            self.abort.fail(connection_failure(&self.local, &self.peer, fault, self.silence));
            self.drain();
        }
    }

    /// Delivers what arrives, until the peer says goodbye.
    fn pump(&mut self) -> Result<(), Fault> {
        let limits = limits();
        let mut assembler = Assembler::default();
        loop {
            let deadline = Deadline::new(&self.abort, self.silence);
            self.stream.begin_frame();
            let frame = read_frame(&mut self.stream, &limits, &deadline, &mut self.decoder, &self.admit)?;
            match frame.header.kind {
                Kind::Goodbye => return Ok(()),
                Kind::Ping => (self.on_heartbeat)(frame.text()?),
                Kind::Abort => {
                    let notice =
                        AbortNotice::decode(&frame.body).map_err(|e| Fault::malformed("an abort notice", e))?;
                    return Err(Fault::Reported(notice.into()));
                }
                _ => {
                    if let Some(message) = assembler.add(frame)? {
                        (self.deliver)(message)?;
                    }
                }
            }
        }
    }

    /// Reads and discards until the peer has closed. Closing a socket with unread input would discard the abort notice that
    /// the writer is sending.
    fn drain(&mut self) {
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

//! The encoding thread of a connection. Encoding may take long, so heartbeats do not wait for it: the writer sends them.

use super::frames::{FrameBytes, Framer};
use super::outbox::{KeptFrame, Outbox};
use crate::comm::abort::AbortFlag;
use crate::comm::message::Message;
use crate::comm::traffic::MessageSize;
use crate::comm::transport::queue::pump;
use crate::comm::transport::Outgoing;
use crate::failure::{Failure, Fault};
use distgpipe_core::wire::{Header, Kind};
use std::sync::mpsc::Receiver;
use std::sync::Arc;

/// Encodes messages into the outbox, used by the encoding thread alone.
pub(super) struct EncodingEnd {
    pub framer: Framer,
    pub outbox: Arc<Outbox>,
}

impl Outgoing for EncodingEnd {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        let (payload_bytes, trains) = (message.payload_bytes(), message.trains());
        let (slots, mut wire_bytes) = (message.tensors.len().max(1), 0);
        for slot in 0..slots {
            let numbers = self.outbox.next_numbers();
            let bytes = self.framer.encode(&message, slot, numbers)?;
            wire_bytes += bytes.len() as u64;
            let whole = slot + 1 == slots;
            let message = whole.then_some(MessageSize { payload_bytes, wire_bytes, trains });
            self.outbox.push(KeptFrame::new(bytes, message))?;
        }
        Ok(())
    }
}

pub(super) struct EncoderThread {
    pub local: String,
    pub abort: AbortFlag,
    /// An [`EncodingEnd`], which tests may have wrapped.
    pub link: Box<dyn Outgoing>,
    pub outbox: Arc<Outbox>,
}

impl EncoderThread {
    pub fn run(mut self, queued: Receiver<Message>) {
        if let Err(fault) = self.pump(&queued) {
            self.abort.fail(Failure::new(&self.local, "sending", fault));
        }
    }

    /// Encodes what is queued, until all sending ends are dropped, and then the goodbye.
    fn pump(&mut self, queued: &Receiver<Message>) -> Result<(), Fault> {
        pump(queued, &self.abort, self.link.as_mut())?;
        let (sequence, acknowledged) = self.outbox.next_numbers();
        let mut goodbye = Header { sequence, acknowledged, ..Header::new(Kind::Goodbye) };
        goodbye.seal(&[]);
        self.outbox.push_last(KeptFrame::new(FrameBytes::header(&goodbye), None));
        Ok(())
    }
}

//! Between threads of one process: the message itself moves into the receiver's mailbox.

use super::Outgoing;
use crate::comm::mailbox::Mailbox;
use crate::comm::message::Message;
use crate::comm::traffic::{Counters, MessageSize};
use crate::failure::Fault;
use std::sync::Arc;

/// The sending end of a link into a mailbox of this process.
pub struct Memory {
    to: Arc<Mailbox>,
    counters: Counters,
}

impl Memory {
    /// A link into `to` that counts its messages on `counters`.
    pub fn new(to: Arc<Mailbox>, counters: Counters) -> Self {
        Memory { to, counters }
    }
}

impl Outgoing for Memory {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        let (payload, trains) = (message.payload_bytes(), message.trains());
        if let Some(edge) = message.tag.edge() {
            let tensors = message.tensors.iter().flatten().count() as u64;
            self.counters.count_unencoded(edge, tensors, payload.unwrap_or(0));
        }
        self.to.put(message)?;
        self.counters.count_message(MessageSize { payload_bytes: payload, wire_bytes: 0, trains });
        Ok(())
    }
}

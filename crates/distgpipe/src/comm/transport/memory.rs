//! Between threads of one process: the message itself moves into the receiver's mailbox.

use super::{Counters, Outgoing};
use crate::coding::cut_of;
use crate::failure::Fault;
use crate::mailbox::{Mailbox, Message};
use std::sync::Arc;
use std::time::Instant;

/// The sending end.
pub struct Memory {
    to: Option<Arc<Mailbox>>,
    counters: Counters,
}

impl Memory {
    /// A link into this mailbox.
    pub fn new(to: Arc<Mailbox>, counters: Counters) -> Self {
        Memory { to: Some(to), counters }
    }

    fn mailbox(&self) -> Result<&Mailbox, Fault> {
        self.to.as_deref().ok_or(Fault::Lost)
    }
}

impl Outgoing for Memory {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        let start = Instant::now();
        let (tensors, payload) = (message.carries_tensors(), message.payload_bytes());
        if let Some(cut) = cut_of(&message.tag) {
            self.counters.moved(cut, message.tensors.iter().flatten().count() as u64, payload);
        }
        self.mailbox()?.put(message)?;
        self.counters.count(tensors, payload, 0, start.elapsed());
        Ok(())
    }

    /// There are no bytes to damage, so the damage is found where a checksum would find it: at delivery.
    fn send_damaged(&mut self, message: Message, seed: u64) -> Result<(), Fault> {
        Err(Fault::protocol(format!("{} whole", message.tag), format!("it damaged (bit {})", seed % 64)))
    }

    fn cut(&mut self) {
        self.to = None;
    }
}

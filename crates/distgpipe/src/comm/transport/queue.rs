//! The way from a stage to the thread of a link, bounded by what the plan sends in a step.

use super::{Counters, Outgoing};
use crate::failure::{Fate, Fault};
use crate::mailbox::Message;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

/// Hands messages to the thread that sends them.
#[derive(Clone)]
pub struct Queue {
    queue: SyncSender<Message>,
    fate: Fate,
    counters: Counters,
}

impl Queue {
    /// Into this channel; what waits in it is counted.
    pub fn new(queue: SyncSender<Message>, fate: Fate, counters: Counters) -> Self {
        Queue { queue, fate, counters }
    }
}

impl Outgoing for Queue {
    fn send(&mut self, mut message: Message) -> Result<(), Fault> {
        self.counters.queued();
        loop {
            match self.queue.try_send(message) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Disconnected(_)) => {
                    self.fate.check()?;
                    return Err(Fault::Lost);
                }
                Err(TrySendError::Full(back)) => {
                    // Cannot happen within a step, whose messages all fit; state transfers wait here.
                    self.fate.check()?;
                    message = back;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }

    fn send_damaged(&mut self, message: Message, _: u64) -> Result<(), Fault> {
        self.send(message)
    }

    fn cut(&mut self) {}
}

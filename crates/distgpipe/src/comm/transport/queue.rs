//! The queue from a stage to the thread of a link. The plan bounds its length.

use super::Outgoing;
use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::message::Message;
use crate::comm::traffic::Counters;
use crate::failure::Fault;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::time::Duration;

/// Queues messages for the thread that sends them.
#[derive(Clone)]
pub struct Queue {
    queue: SyncSender<Message>,
    abort: AbortFlag,
    counters: Counters,
}

impl Queue {
    /// Queues messages in this channel, and counts those that wait in it.
    pub fn new(queue: SyncSender<Message>, abort: AbortFlag, counters: Counters) -> Self {
        Queue { queue, abort, counters }
    }
}

impl Outgoing for Queue {
    fn send(&mut self, mut message: Message) -> Result<(), Fault> {
        message.hand_over()?;
        self.counters.enqueued();
        loop {
            match self.queue.try_send(message) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Disconnected(_)) => {
                    self.abort.check()?;
                    return Err(Fault::Lost);
                }
                Err(TrySendError::Full(back)) => {
                    // The messages of a step all fit, so only state transfers wait here.
                    self.abort.check()?;
                    message = back;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }
}

/// Sends what is queued over a link, until all sending ends of the queue are dropped or the run fails.
pub(super) fn pump(queued: &Receiver<Message>, abort: &AbortFlag, link: &mut dyn Outgoing) -> Result<(), Fault> {
    loop {
        abort.check()?;
        match queued.recv_timeout(POLL) {
            Ok(mut message) => {
                message.take_over()?;
                link.send(message)?;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

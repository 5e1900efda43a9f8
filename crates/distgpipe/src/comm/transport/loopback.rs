//! Between threads of one process, through the link's codec: the receiver gets what it would get over a network.
//!
//! ```text
//!  stage ──queue──► link thread: encode, decode ──► mailbox of the receiving stage
//! ```
//!
//! Used to try a codec without a second machine, and for partitions that share one. The thread runs in the background of
//! the stages, as the threads of a connection do.

use super::queue::Queue;
use super::Outgoing;
use crate::comm::abort::AbortFlag;
use crate::comm::arrivals::Receiving;
use crate::comm::link_codecs::{Decoder, Encoder};
use crate::comm::mailbox::Mailbox;
use crate::comm::message::Message;
use crate::comm::traffic::{Counters, MessageSize};
use crate::engine::{self, Meter};
use crate::failure::{Failure, Fault};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::Arc;
use std::thread::JoinHandle;

/// What [`Loopback::start`] needs.
pub struct LoopbackOptions {
    /// The name of the sending worker, for failures.
    pub local: String,
    /// The mailbox of the receiving worker.
    pub to: Arc<Mailbox>,
    /// The most messages that may wait to be encoded.
    pub queue: usize,
    /// The memory meter of the receiving worker, which the decoded tensors count on.
    pub meter: Meter,
    /// The encoder of the sending worker.
    pub encoder: Encoder,
    /// The decoder of the receiving worker.
    pub decoder: Decoder,
    /// The counters of the sending worker.
    pub counters: Counters,
    /// The counters of the receiving worker, for what it waits for.
    pub received: Counters,
    /// The abort flag of the run in this process.
    pub abort: AbortFlag,
}

/// The sending end of a loopback link.
pub struct Loopback {
    queue: Option<Queue>,
    thread: Option<JoinHandle<()>>,
    /// Set when the sending worker panics: the thread then discards what is queued.
    abandoned: Arc<AtomicBool>,
}

impl Loopback {
    /// Starts the thread of the link.
    pub fn start(options: LoopbackOptions) -> Result<Self, Fault> {
        let (queue, queued) = mpsc::sync_channel(options.queue.max(1));
        let (counters, abort) = (options.counters.clone(), options.abort.clone());
        let abandoned = Arc::new(AtomicBool::new(false));
        let thread_abandoned = abandoned.clone();
        let body = move || {
            engine::attach_thread(1, options.meter.number());
            let (local, abort) = (options.local.clone(), options.abort.clone());
            let result = std::panic::catch_unwind(AssertUnwindSafe(|| pump(options, &queued, &thread_abandoned)));
            let fault = match result {
                Ok(Ok(())) => return,
                Ok(Err(fault)) => fault,
                Err(_) => Fault::Panic("the panic message is on standard error".to_owned()),
            };
            abort.fail(Failure::new(local, "encoding what it sends", fault));
        };
        let thread = engine::spawn("codec", body)?;
        Ok(Loopback { queue: Some(Queue::new(queue, abort, counters)), thread: Some(thread), abandoned })
    }
}

/// Encodes, decodes and delivers until the sending end is dropped.
fn pump(mut options: LoopbackOptions, queued: &Receiver<Message>, abandoned: &AtomicBool) -> Result<(), Fault> {
    while let Ok(mut message) = queued.recv() {
        message.take_over()?;
        let (payload, trains) = (message.payload_bytes(), message.trains());
        options.received.arrivals().begin(Receiving::Decoding);
        for index in 0..message.tensors.len() {
            // A run that has failed does not wait for codecs.
            options.abort.check()?;
            if abandoned.load(Ordering::Acquire) {
                return Ok(());
            }
            let Some(tensor) = message.tensors[index].take() else { continue };
            let decoded = options.encoder.round_trip(&message, index, &tensor, &mut options.decoder)?;
            message.tensors[index] = Some(decoded);
        }
        options.received.arrivals().begin(Receiving::Nothing);
        options.to.put(message)?;
        options.counters.count_message(MessageSize { payload_bytes: payload, wire_bytes: 0, trains });
        options.counters.dequeued();
    }
    Ok(())
}

impl Outgoing for Loopback {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        self.queue.as_mut().ok_or(Fault::Lost)?.send(message)
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.queue = None;
        self.abandoned.store(std::thread::panicking(), Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // The thread ends after the last queued message, or at the next tensor if the run has failed or this worker is
            // panicking.
            let _ = thread.join();
        }
    }
}

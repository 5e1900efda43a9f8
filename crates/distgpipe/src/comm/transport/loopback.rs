//! Between threads of one process, through the link's codec: what arrives is what would arrive over a wire.
//!
//! ```text
//!  stage ──queue──► thread: encode, decode ──► mailbox of the stage it is for
//! ```
//!
//! For trying a codec without a second machine, and for partitions that share one. The thread works beside the stages, as
//! the threads of a connection do.

use super::queue::Queue;
use super::{Counters, Outgoing};
use crate::coding::{Decoder, Encoder};
use crate::failure::{Failure, Fate, Fault};
use crate::mailbox::{Mailbox, Message};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// What such a link is made of.
pub struct Options {
    /// The name of the sending worker, for faults.
    pub here: String,
    /// Where it leads.
    pub to: Arc<Mailbox>,
    /// How many messages may wait.
    pub queue: usize,
    /// The memory meter of the receiving worker.
    pub meter: usize,
    /// The sending worker's.
    pub encoder: Encoder,
    /// The receiving worker's.
    pub decoder: Decoder,
    /// Of the sending worker.
    pub counters: Counters,
    /// The run's.
    pub fate: Fate,
}

/// The sending end.
pub struct Recoded {
    queue: Option<Queue>,
    thread: Option<JoinHandle<()>>,
    /// Set when the sending worker panics: nobody waits for what is queued then.
    abandoned: Arc<AtomicBool>,
}

impl Recoded {
    /// Starts the link's thread.
    pub fn start(options: Options) -> Result<Self, Fault> {
        let (queue, waiting) = mpsc::sync_channel(options.queue.max(1));
        let (counters, fate) = (options.counters.clone(), options.fate.clone());
        let abandoned = Arc::new(AtomicBool::new(false));
        let given_up = abandoned.clone();
        let body = move || {
            crate::engine::attach_thread(1, options.meter);
            let (here, fate) = (options.here.clone(), options.fate.clone());
            let result = std::panic::catch_unwind(AssertUnwindSafe(|| pump(options, &waiting, &given_up)));
            let fault = match result {
                Ok(Ok(())) => return,
                Ok(Err(fault)) => fault,
                Err(_) => Fault::Panic("see above".to_owned()),
            };
            fate.fail(Failure::new(here, "encoding what it sends", fault));
        };
        let thread = std::thread::Builder::new().name("codec".to_owned()).spawn(body);
        let thread = thread.map_err(|e| Fault::io("starting a codec's thread", e))?;
        Ok(Recoded { queue: Some(Queue::new(queue, fate, counters)), thread: Some(thread), abandoned })
    }
}

fn pump(mut options: Options, waiting: &Receiver<Message>, abandoned: &AtomicBool) -> Result<(), Fault> {
    // Ends when the sending end is gone.
    while let Ok(mut message) = waiting.recv() {
        let start = Instant::now();
        let (tensors, payload) = (message.carries_tensors(), message.payload_bytes());
        for index in 0..message.tensors.len() {
            // A run that has failed waits for nobody's codec.
            options.fate.check()?;
            if abandoned.load(Ordering::Acquire) {
                return Ok(());
            }
            let Some(tensor) = message.tensors[index].take() else { continue };
            let (encoder, decoder) = (&mut options.encoder, &mut options.decoder);
            let arrived = encoder
                .with_encoded(&message, index, &tensor, |meta, body| decoder.decode(&message.tag, &meta, body))?;
            message.tensors[index] = Some(arrived);
        }
        options.to.put(message)?;
        options.counters.count(tensors, payload, 0, start.elapsed());
        options.counters.sent();
    }
    Ok(())
}

impl Outgoing for Recoded {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        self.queue.as_mut().ok_or(Fault::Lost)?.send(message)
    }

    /// Damage is found where a checksum would find it: at delivery.
    fn send_damaged(&mut self, message: Message, seed: u64) -> Result<(), Fault> {
        Err(Fault::protocol(format!("{} whole", message.tag), format!("it damaged (bit {})", seed % 64)))
    }

    fn cut(&mut self) {
        self.queue = None;
    }
}

impl Drop for Recoded {
    fn drop(&mut self) {
        self.queue = None;
        self.abandoned.store(std::thread::panicking(), Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // It ends with what was queued, or at the next tensor if the run has failed or this worker is panicking.
            let _ = thread.join();
        }
    }
}

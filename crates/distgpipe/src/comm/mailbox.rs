//! Where messages wait until the plan wants them.
//!
//! Every worker has one mailbox, and so has the driver. Messages come in any order and are taken by name, so a link
//! never decides what a stage does next: the plan does. A mailbox is bounded; whoever puts into a full one waits.

use crate::failure::{Fate, Fault, POLL};
use distgpipe_core::wire::{Header, Kind};
use distgpipe_core::{MicroBatchId, PartitionId, WorkerId};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use tch::Tensor;

/// The name of a message: unique within a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// What it carries.
    pub kind: Kind,
    /// The step (or, for commands, reports and state, the number of the command) it belongs to.
    pub step: u64,
    /// The micro-batch, the index of a state tensor, or the number of a share.
    pub micro_batch: u32,
    /// The sending partition, or the sending worker for what is not between partitions.
    pub from: u32,
    /// The receiving partition, or the receiving worker of a share.
    pub to: u32,
}

impl Tag {
    /// A message between two partitions.
    pub fn between(kind: Kind, step: u64, micro_batch: MicroBatchId, from: PartitionId, to: PartitionId) -> Self {
        Tag { kind, step, micro_batch: micro_batch.0, from: from.0, to: to.0 }
    }

    /// The name in a frame's header.
    pub fn of(header: &Header) -> Self {
        let Header { kind, step, micro_batch, from, to, .. } = *header;
        Tag { kind, step, micro_batch, from, to }
    }

    /// A message between the driver and a worker.
    pub fn control(kind: Kind, number: u64, worker: WorkerId) -> Self {
        Tag { kind, step: number, micro_batch: 0, from: worker.0, to: 0 }
    }

    /// One part of a message between the driver and a worker that comes in several.
    pub fn part(kind: Kind, number: u64, worker: WorkerId, index: usize) -> Self {
        Tag { micro_batch: MicroBatchId::new(index).0, ..Tag::control(kind, number, worker) }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tag { kind, step, micro_batch, from, to } = self;
        match kind {
            Kind::Activation => write!(f, "{to}F{micro_batch}<{from} of step {step}"),
            Kind::Gradient => write!(f, "{to}B{micro_batch}<{from} of step {step}"),
            Kind::Input => write!(f, "the input of micro-batch {micro_batch} of step {step}"),
            Kind::Target => write!(f, "the target of micro-batch {micro_batch} of step {step}"),
            Kind::Share => write!(f, "share {micro_batch} from worker {from} of step {step}"),
            _ => write!(f, "{kind:?} {step}"),
        }
    }
}

/// What a link carries: tensors (absent ones where there is no gradient) or text.
#[derive(Debug)]
pub struct Message {
    /// Its name.
    pub tag: Tag,
    /// Tensors, in the order both ends know from the model.
    pub tensors: Vec<Option<Tensor>>,
    /// Text of commands and reports.
    pub text: Vec<u8>,
    /// How a link treats the tensors.
    pub handling: Handling,
}

/// What a link is told about a message's tensors. It is for the sending end alone and does not travel.
#[derive(Clone, Debug, Default)]
pub struct Handling {
    /// Whether they may be encoded by the link's codec; they go raw otherwise.
    pub compress: bool,
    /// Whether the model learns from them.
    pub learning: bool,
    /// Of what is random about encoding them.
    pub seed: u64,
    /// The samples in their rows, if they are known.
    pub samples: Vec<u64>,
}

impl Message {
    /// A message of tensors.
    pub fn tensors(tag: Tag, tensors: Vec<Option<Tensor>>) -> Self {
        Message { tag, tensors, text: Vec::new(), handling: Handling::default() }
    }

    /// A message of text.
    pub fn text(tag: Tag, text: impl Into<Vec<u8>>) -> Self {
        Message { tag, tensors: Vec::new(), text: text.into(), handling: Handling::default() }
    }

    /// Whether it is one of the model's, and not one about the run.
    pub fn carries_tensors(&self) -> bool {
        self.tag.kind.carries_tensors()
    }

    /// The bytes of its tensors, as they lie in memory.
    pub fn payload_bytes(&self) -> u64 {
        let bytes: usize = self.tensors.iter().flatten().map(|t| t.numel() * t.kind().elt_size_in_bytes()).sum();
        bytes as u64
    }
}

/// The mailbox of a worker or of the driver.
#[derive(Debug)]
pub struct Mailbox {
    fate: Fate,
    capacity: usize,
    waiting: Mutex<HashMap<Tag, Message>>,
    changed: Condvar,
}

impl Mailbox {
    /// A mailbox for at most `capacity` messages at a time.
    pub fn new(fate: Fate, capacity: usize) -> Arc<Self> {
        Arc::new(Mailbox { fate, capacity: capacity.max(1), waiting: Mutex::default(), changed: Condvar::new() })
    }

    /// Puts a message in, after waiting for room if there is none.
    pub fn put(&self, message: Message) -> Result<(), Fault> {
        let mut waiting = self.lock();
        while waiting.len() >= self.capacity {
            self.fate.check()?;
            waiting = self.changed.wait_timeout(waiting, POLL).unwrap_or_else(|e| e.into_inner()).0;
        }
        let tag = message.tag;
        if waiting.insert(tag, message).is_some() {
            return Err(Fault::protocol("each message once", format!("{tag} twice")));
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Takes the message of this name, after waiting for it until it comes or the run fails. How long is too long is
    /// not for the one who waits to say: he does not know whether the others are making headway.
    pub fn take(&self, tag: &Tag) -> Result<Message, Fault> {
        self.take_while(tag, || Ok(()))
    }

    /// As [`take`](Self::take), calling `watch` about every [`POLL`] while waiting; its error ends the wait.
    pub fn take_while(&self, tag: &Tag, mut watch: impl FnMut() -> Result<(), Fault>) -> Result<Message, Fault> {
        let mut waiting = self.lock();
        loop {
            if let Some(message) = waiting.remove(tag) {
                self.changed.notify_all();
                return Ok(message);
            }
            self.fate.check()?;
            let (guard, wait) = self.changed.wait_timeout(waiting, POLL).unwrap_or_else(|e| e.into_inner());
            waiting = guard;
            if wait.timed_out() {
                drop(waiting);
                watch()?;
                waiting = self.lock();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Tag, Message>> {
        self.waiting.lock().unwrap_or_else(|e| e.into_inner())
    }
}

//! What a link carries: tensors or text, under a tag that is unique within a run.

use crate::comm::traffic::PartitionEdge;
use crate::engine::cuda::{self, Event};
use crate::failure::Fault;
use distgpipe_core::schedule::Pass;
use distgpipe_core::wire::{Header, Kind};
use distgpipe_core::{MicroBatchId, PartitionId, WorkerId};
use std::fmt;
use tch::Tensor;

/// Identifies a message within a run. Receivers take messages by tag, so the order of arrival does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// The kind of content.
    pub kind: Kind,
    /// The step the message belongs to. Commands, reports and state tensors have the number of the command here.
    pub step: u64,
    /// The micro-batch, the index of a state tensor, or the number of a segment in an all-reduce.
    pub micro_batch: u32,
    /// The sending partition; for messages that are not between partitions, the worker.
    pub from: u32,
    /// The receiving partition; for a segment of an all-reduce, the receiving worker.
    pub to: u32,
}

impl Tag {
    /// The tag of a message between two partitions.
    pub fn between(kind: Kind, step: u64, micro_batch: MicroBatchId, from: PartitionId, to: PartitionId) -> Self {
        Tag { kind, step, micro_batch: micro_batch.0, from: from.0, to: to.0 }
    }

    /// The tag in a frame's header.
    pub fn of(header: &Header) -> Self {
        let Header { kind, step, micro_batch, from, to, .. } = *header;
        Tag { kind, step, micro_batch, from, to }
    }

    /// The tag of a message between the driver and a worker, about command `number`.
    pub fn control(kind: Kind, number: u64, worker: WorkerId) -> Self {
        Tag { kind, step: number, micro_batch: 0, from: worker.0, to: 0 }
    }

    /// The tag of message `index` in a series between the driver and a worker, such as the tensors of a model's state.
    pub fn part(kind: Kind, number: u64, worker: WorkerId, index: usize) -> Self {
        Tag { micro_batch: MicroBatchId::new(index).0, ..Tag::control(kind, number, worker) }
    }

    /// The edge that the message crosses. `None` unless it carries activations or gradients between partitions.
    pub fn edge(&self) -> Option<PartitionEdge> {
        let pass = match self.kind {
            Kind::Activation => Pass::Forward,
            Kind::Gradient => Pass::Backward,
            _ => return None,
        };
        Some(PartitionEdge { pass, from: PartitionId(self.from), to: PartitionId(self.to) })
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tag { kind, step, micro_batch, from, to } = self;
        // The pipeline numbers all its batches, also those of tests, so this is not the number of a training step.
        let batch = step + 1;
        match kind {
            Kind::Activation => write!(f, "{to}F{micro_batch}<{from} of batch {batch}"),
            Kind::Gradient => write!(f, "{to}B{micro_batch}<{from} of batch {batch}"),
            Kind::Input => write!(f, "the input of micro-batch {micro_batch} of batch {batch}"),
            Kind::Target => write!(f, "the target of micro-batch {micro_batch} of batch {batch}"),
            Kind::Share => write!(f, "gradient segment {micro_batch} from worker {from} of batch {batch}"),
            _ => write!(f, "{kind:?} {step}"),
        }
    }
}

/// Tensors or text on their way over a link.
#[derive(Debug)]
pub struct Message {
    /// Identifies the message within the run.
    pub tag: Tag,
    /// The tensors, in an order that both ends derive from the model. `None` stands for an absent gradient.
    pub tensors: Vec<Option<Tensor>>,
    /// The text of a command or report, as JSON.
    pub text: Vec<u8>,
    /// How the sending end encodes the tensors.
    pub encoding: EncodeOptions,
    /// The size in memory of what the tensors encode, if they are the bytes of a codec already.
    encoded_from: Option<u64>,
    /// When the tensors have their values, if they are on a GPU.
    ready: Option<Event>,
}

/// How the sending end of a link encodes a message's tensors. The options themselves are not sent.
#[derive(Clone, Debug, Default)]
pub struct EncodeOptions {
    /// Whether the link's codec encodes the tensors; otherwise they are sent raw.
    pub compress: bool,
    /// Whether the model trains on the tensors. Codecs update their state only then.
    pub training: bool,
    /// Seeds stochastic rounding and other random choices of the codec.
    pub seed: u64,
    /// The data set's indices of the samples in the rows; empty if unknown.
    pub samples: Vec<u64>,
}

impl Message {
    /// A message of tensors, sent raw unless [`Message::encoding`] is set.
    pub fn tensors(tag: Tag, tensors: Vec<Option<Tensor>>) -> Self {
        Message { tag, tensors, text: Vec::new(), encoding: EncodeOptions::default(), encoded_from: None, ready: None }
    }

    /// The same message, whose tensors are the bytes of a codec already: of tensors that take this many bytes in memory.
    pub fn encoded_from(self, bytes: u64) -> Self {
        Message { encoded_from: Some(bytes), ..self }
    }

    /// The same message, encoded as these options say.
    pub fn encoded_with(self, encoding: EncodeOptions) -> Self {
        Message { encoding, ..self }
    }

    /// A message of text.
    pub fn text(tag: Tag, text: impl Into<Vec<u8>>) -> Self {
        Message { text: text.into(), ..Message::tensors(tag, Vec::new()) }
    }

    /// Must be called by the thread that hands the message to another: notes what its stream has still to do to tensors on a GPU.
    pub fn hand_over(&mut self) -> Result<(), Fault> {
        let device = self.tensors.iter().flatten().find_map(|tensor| cuda::index(tensor.device()));
        self.ready = device.map(Event::record).transpose()?;
        Ok(())
    }

    /// Must be called by the thread that takes the message over: its stream waits for that of the other thread.
    pub fn take_over(&mut self) -> Result<(), Fault> {
        let Some(ready) = self.ready.take() else { return Ok(()) };
        ready.wait()?;
        let mut on_gpu = self.tensors.iter().flatten().filter(|tensor| cuda::index(tensor.device()).is_some());
        on_gpu.try_for_each(cuda::keep_for_stream)
    }

    /// Whether the message belongs to a training step and carries tensors.
    pub fn trains(&self) -> bool {
        self.encoding.training && self.tag.kind.carries_tensors()
    }

    /// The size of the tensors in memory before any codec, in bytes. `None` for kinds of message that carry no tensors.
    pub fn payload_bytes(&self) -> Option<u64> {
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        let all = || self.encoded_from.unwrap_or_else(|| self.tensors.iter().flatten().map(bytes).sum());
        self.tag.kind.carries_tensors().then(all)
    }
}

//! Counts what the links of a worker carry, for reports and tables.

use crate::comm::arrivals::{Arrivals, Delivered, LinkWait};
use crate::sync::lock;
use distgpipe_core::codec::CodecError;
use distgpipe_core::schedule::Pass;
use distgpipe_core::PartitionId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// One direction between two partitions. Each edge has a codec and a count of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PartitionEdge {
    /// Forward for activations, backward for gradients.
    pub pass: Pass,
    /// The partition that sends.
    pub from: PartitionId,
    /// The partition that receives.
    pub to: PartitionId,
}

/// What a worker has sent over one edge, or to the next replica, since the run began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EdgeTraffic {
    /// The number of tensors.
    pub tensors: u64,
    /// The size of the tensors in memory, in bytes.
    pub raw_bytes: u64,
    /// The encoded size in bytes, frame headers included. Counted for encoded tensors even where no socket is involved.
    pub wire_bytes: u64,
    /// Time spent encoding the tensors, in nanoseconds.
    pub encode_ns: u64,
    /// Tensors that were sent raw although the edge has a codec: refused by it, sent during warm-up, or in an evaluation
    /// without codecs.
    pub sent_raw: u64,
    /// Why the codec refused tensors: for each kind of reason, the first occurrence.
    pub refusals: BTreeMap<String, String>,
}

/// The cost of one encoded tensor.
#[derive(Clone, Copy, Debug)]
pub struct EncodingCost {
    /// Its size in memory, in bytes.
    pub raw_bytes: u64,
    /// Its encoded size in bytes, with the frame's header.
    pub wire_bytes: u64,
    /// Time spent encoding it, in nanoseconds.
    pub encode_ns: u64,
}

/// The size of one message that has been sent.
#[derive(Clone, Copy, Debug)]
pub struct MessageSize {
    /// [`Message::payload_bytes`](crate::comm::message::Message::payload_bytes): `None` for text.
    pub payload_bytes: Option<u64>,
    /// Bytes written to the socket; 0 between threads.
    pub wire_bytes: u64,
    /// [`Message::trains`](crate::comm::message::Message::trains).
    pub trains: bool,
}

/// Counts what one direction of a link carries, and times what arrives in the other. Clones share the counts, so any thread may read them.
#[derive(Clone, Debug, Default)]
pub struct Counters(Arc<CounterCells>);

#[derive(Debug, Default)]
struct CounterCells {
    messages: AtomicU64,
    payload_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    training_bytes: AtomicU64,
    queued: AtomicU64,
    arrivals: Arrivals,
    shares: Mutex<EdgeTraffic>,
    shares_decoded_ns: AtomicU64,
    sent: Mutex<BTreeMap<PartitionEdge, EdgeTraffic>>,
    decoded_ns: Mutex<BTreeMap<PartitionEdge, u64>>,
}

/// A snapshot of [`Counters`], since the run began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// The number of messages that carry tensors.
    pub messages: u64,
    /// The size of their tensors in memory, in bytes.
    pub payload_bytes: u64,
    /// Bytes written to the socket since the handshake: headers, commands, reports and heartbeats included. 0 between
    /// threads.
    pub wire_bytes: u64,
    /// Bytes of the tensors of training steps: on the wire with their headers, or in memory between threads. Tests,
    /// checkpoints, commands and reports are not part of them.
    #[serde(default)]
    pub training_bytes: u64,
    /// What was sent over each edge.
    pub sent: Vec<(PartitionEdge, EdgeTraffic)>,
    /// Time spent decoding what arrived over each edge in the other direction, in nanoseconds.
    pub decoded_ns: Vec<(PartitionEdge, u64)>,
    /// The gradients sent to the next replica, if they have a codec.
    #[serde(default)]
    pub shares: EdgeTraffic,
    /// Time spent decoding gradients from the replica at the other end, in nanoseconds.
    #[serde(default)]
    pub shares_decoded_ns: u64,
    /// What was timed as it arrived in the other direction. Nothing between threads.
    #[serde(default)]
    pub delivered: Delivered,
    /// What the worker waited for when it waited for messages in the other direction.
    #[serde(default)]
    pub waited: LinkWait,
}

impl Traffic {
    /// What was added since an earlier snapshot. Refusals are those of the whole run.
    pub fn since(&self, before: &Traffic) -> Traffic {
        fn earlier<'a, T>(list: &'a [(PartitionEdge, T)], edge: &PartitionEdge) -> Option<&'a T> {
            list.iter().find(|(other, _)| other == edge).map(|(_, earlier)| earlier)
        }
        let sent = self.sent.iter().map(|(edge, now)| {
            (*edge, earlier(&before.sent, edge).map_or_else(|| now.clone(), |before| now.since(before)))
        });
        let decoded_ns = self.decoded_ns.iter().map(|(edge, now)| {
            (*edge, now.saturating_sub(earlier(&before.decoded_ns, edge).copied().unwrap_or_default()))
        });
        Traffic {
            messages: self.messages.saturating_sub(before.messages),
            payload_bytes: self.payload_bytes.saturating_sub(before.payload_bytes),
            wire_bytes: self.wire_bytes.saturating_sub(before.wire_bytes),
            training_bytes: self.training_bytes.saturating_sub(before.training_bytes),
            sent: sent.collect(),
            decoded_ns: decoded_ns.collect(),
            shares: self.shares.since(&before.shares),
            shares_decoded_ns: self.shares_decoded_ns.saturating_sub(before.shares_decoded_ns),
            delivered: self.delivered.since(&before.delivered),
            waited: self.waited.since(&before.waited),
        }
    }
}

impl EdgeTraffic {
    /// Counts a tensor that has been encoded.
    pub fn count(&mut self, tensor: EncodingCost) {
        self.tensors += 1;
        self.raw_bytes += tensor.raw_bytes;
        self.wire_bytes += tensor.wire_bytes;
        self.encode_ns += tensor.encode_ns;
    }

    /// Records why a codec refused a tensor, unless a refusal of this kind has been recorded before.
    pub fn record_refusal(&mut self, error: &CodecError, why: impl FnOnce() -> String) {
        let kind = match error {
            CodecError::DType { .. } => "type",
            CodecError::NotFinite { .. } => "not finite",
            CodecError::Overflow { .. } => "too large",
            _ => "shape",
        };
        self.refusals.entry(kind.to_owned()).or_insert_with(why);
    }

    fn since(&self, before: &EdgeTraffic) -> EdgeTraffic {
        EdgeTraffic {
            tensors: self.tensors.saturating_sub(before.tensors),
            raw_bytes: self.raw_bytes.saturating_sub(before.raw_bytes),
            wire_bytes: self.wire_bytes.saturating_sub(before.wire_bytes),
            encode_ns: self.encode_ns.saturating_sub(before.encode_ns),
            sent_raw: self.sent_raw.saturating_sub(before.sent_raw),
            refusals: self.refusals.clone(),
        }
    }
}

impl Counters {
    /// Counts one message that has been sent.
    pub fn count_message(&self, sent: MessageSize) {
        if let Some(payload_bytes) = sent.payload_bytes {
            self.0.messages.fetch_add(1, Ordering::Relaxed);
            self.0.payload_bytes.fetch_add(payload_bytes, Ordering::Relaxed);
        }
        self.0.wire_bytes.fetch_add(sent.wire_bytes, Ordering::Relaxed);
        if sent.trains {
            let bytes = if sent.wire_bytes > 0 { sent.wire_bytes } else { sent.payload_bytes.unwrap_or(0) };
            self.0.training_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// The receiving end of the other direction.
    pub fn arrivals(&self) -> &Arrivals {
        &self.0.arrivals
    }

    /// Counts a tensor that has been encoded, by the edge's codec or raw.
    pub fn count_encoded(&self, edge: PartitionEdge, tensor: EncodingCost) {
        lock(&self.0.sent).entry(edge).or_default().count(tensor);
    }

    /// Counts tensors that were handed to another thread without being encoded.
    pub fn count_unencoded(&self, edge: PartitionEdge, tensors: u64, raw_bytes: u64) {
        let mut sent = lock(&self.0.sent);
        let traffic = sent.entry(edge).or_default();
        traffic.tensors += tensors;
        traffic.raw_bytes += raw_bytes;
    }

    /// Counts a tensor that is sent raw although its edge has a codec.
    pub fn count_sent_raw(&self, edge: PartitionEdge) {
        lock(&self.0.sent).entry(edge).or_default().sent_raw += 1;
    }

    /// Records why the edge's codec refused a tensor, unless a refusal of this kind has been recorded before.
    pub fn record_refusal(&self, edge: PartitionEdge, error: &CodecError, why: impl FnOnce() -> String) {
        lock(&self.0.sent).entry(edge).or_default().record_refusal(error, why);
    }

    /// Counts gradients that have been sent to the next replica, encoded or raw.
    pub fn count_share(&self, count: impl FnOnce(&mut EdgeTraffic)) {
        count(&mut lock(&self.0.shares));
    }

    /// Counts the time spent decoding gradients that arrived from the peer.
    pub fn count_share_decoded(&self, ns: u64) {
        self.0.shares_decoded_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Counts the time spent decoding a tensor that arrived from the peer.
    pub fn count_decoded(&self, edge: PartitionEdge, ns: u64) {
        *lock(&self.0.decoded_ns).entry(edge).or_default() += ns;
    }

    /// Counts a message into the link's queue.
    pub fn enqueued(&self) {
        self.0.queued.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts a message out of the link's queue, once it has been sent.
    pub fn dequeued(&self) {
        self.0.queued.fetch_sub(1, Ordering::AcqRel);
    }

    /// How many messages wait in the link's queue, or are being sent.
    pub fn queued(&self) -> usize {
        usize::try_from(self.0.queued.load(Ordering::Acquire)).unwrap_or(0)
    }

    /// Whether the queue is empty, so that the counts are complete.
    pub fn settled(&self) -> bool {
        self.queued() == 0
    }

    /// A snapshot of the counts.
    pub fn read(&self) -> Traffic {
        let (delivered, waited) = self.0.arrivals.read();
        Traffic {
            messages: self.0.messages.load(Ordering::Relaxed),
            payload_bytes: self.0.payload_bytes.load(Ordering::Relaxed),
            wire_bytes: self.0.wire_bytes.load(Ordering::Relaxed),
            training_bytes: self.0.training_bytes.load(Ordering::Relaxed),
            sent: lock(&self.0.sent).iter().map(|(edge, traffic)| (*edge, traffic.clone())).collect(),
            shares: lock(&self.0.shares).clone(),
            shares_decoded_ns: self.0.shares_decoded_ns.load(Ordering::Relaxed),
            decoded_ns: lock(&self.0.decoded_ns).iter().map(|(edge, ns)| (*edge, *ns)).collect(),
            delivered,
            waited,
        }
    }
}

//! How a message gets from one worker to another. Members of the family:
//!
//! - [`memory`]: to a thread of this process; tensors move, nothing is copied
//! - [`recoded`]: to a thread of this process, through the codec of the link, as a wire would
//! - [`tcp`]: to another process, on this host or another
//! - [`faulty`]: wraps any of them and breaks it on purpose, for tests
//!
//! Sending is [`Outgoing`]; what arrives is put into the receiver's [`Mailbox`](crate::mailbox::Mailbox).

#[path = "transport/faulty.rs"]
pub mod faulty;
#[path = "transport/memory.rs"]
pub mod memory;
#[path = "transport/queue.rs"]
mod queue;
#[path = "transport/loopback.rs"]
pub mod recoded;
#[path = "transport/tcp.rs"]
pub mod tcp;

use crate::failure::Fault;
use crate::mailbox::Message;
use distgpipe_core::schedule::Pass;
use distgpipe_core::PartitionId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// The sending end of a link.
pub trait Outgoing: Send {
    /// Sends a message, or hands it to the thread that will.
    fn send(&mut self, message: Message) -> Result<(), Fault>;

    /// Sends a message as a broken wire would deliver it: with one bit flipped, chosen by `seed`.
    fn send_damaged(&mut self, message: Message, seed: u64) -> Result<(), Fault>;

    /// Breaks the link off as a pulled cable would.
    fn cut(&mut self);
}

/// One way from partition to partition: what a codec is chosen for, and what is counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cut {
    /// Activations or gradients.
    pub pass: Pass,
    /// The sending partition.
    pub from: PartitionId,
    /// The receiving partition.
    pub to: PartitionId,
}

/// What a worker has sent over one cut.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CutTraffic {
    /// Tensors.
    pub tensors: u64,
    /// Their bytes as they lie in memory.
    pub raw_bytes: u64,
    /// Their bytes as encoded, the frames' headers included: what the socket carries of them, or would.
    pub wire_bytes: u64,
    /// Time spent encoding.
    pub encode_ns: u64,
    /// Tensors that went raw although the cut has a codec: refused, in the warm-up, or in a raw evaluation.
    pub sent_raw: u64,
    /// Why tensors were refused: the first of each kind of reason.
    pub refusals: BTreeMap<String, String>,
}

/// A tensor that was made ready to go.
#[derive(Clone, Copy, Debug)]
pub struct Encoded {
    /// Its bytes as it lies in memory.
    pub raw_bytes: u64,
    /// Its bytes as encoded, with the header.
    pub wire_bytes: u64,
    /// How long that took.
    pub encode_ns: u64,
}

/// What one direction of a link has carried. Shared between the thread that counts and those who read.
#[derive(Clone, Debug, Default)]
pub struct Counters(Arc<Cells>);

#[derive(Debug, Default)]
struct Cells {
    messages: AtomicU64,
    payload_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    busy_ns: AtomicU64,
    waiting: AtomicU64,
    sent: Mutex<BTreeMap<Cut, CutTraffic>>,
    decoded_ns: Mutex<BTreeMap<Cut, u64>>,
}

/// A reading of [`Counters`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Messages of tensors.
    pub messages: u64,
    /// Bytes of their tensors as they lie in memory.
    pub payload_bytes: u64,
    /// Bytes that the socket carried since the connection stood: headers, commands, reports and signs of life included.
    /// 0 between threads.
    pub wire_bytes: u64,
    /// Time spent encoding and writing; between threads, decoding too.
    pub busy_ns: u64,
    /// What was sent, cut by cut.
    pub sent: Vec<(Cut, CutTraffic)>,
    /// Time spent decoding what came the other way, cut by cut.
    pub decoded_ns: Vec<(Cut, u64)>,
}

impl Counters {
    /// Counts one message, of whatever kind, that took so many bytes on the wire.
    pub fn count(&self, tensors: bool, payload_bytes: u64, wire_bytes: u64, busy: Duration) {
        if tensors {
            self.0.messages.fetch_add(1, Ordering::Relaxed);
            self.0.payload_bytes.fetch_add(payload_bytes, Ordering::Relaxed);
        }
        self.0.wire_bytes.fetch_add(wire_bytes, Ordering::Relaxed);
        self.0.busy_ns.fetch_add(u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Counts a tensor that is ready to go.
    pub fn encoded(&self, cut: Cut, tensor: Encoded) {
        let mut sent = lock(&self.0.sent);
        let traffic = sent.entry(cut).or_default();
        traffic.tensors += 1;
        traffic.raw_bytes += tensor.raw_bytes;
        traffic.wire_bytes += tensor.wire_bytes;
        traffic.encode_ns += tensor.encode_ns;
    }

    /// Counts tensors that moved without being encoded.
    pub fn moved(&self, cut: Cut, tensors: u64, raw_bytes: u64) {
        let mut sent = lock(&self.0.sent);
        let traffic = sent.entry(cut).or_default();
        traffic.tensors += tensors;
        traffic.raw_bytes += raw_bytes;
    }

    /// Counts a tensor that goes raw although its cut has a codec.
    pub fn sent_raw(&self, cut: Cut) {
        lock(&self.0.sent).entry(cut).or_default().sent_raw += 1;
    }

    /// Remembers why a codec refused a tensor; `kind` is one of a few words.
    pub fn refused(&self, cut: Cut, kind: &str, why: impl FnOnce() -> String) {
        let mut sent = lock(&self.0.sent);
        sent.entry(cut).or_default().refusals.entry(kind.to_owned()).or_insert_with(why);
    }

    /// Counts the decoding of a tensor that came the other way.
    pub fn decoded(&self, cut: Cut, ns: u64) {
        *lock(&self.0.decoded_ns).entry(cut).or_default() += ns;
    }

    /// A message waits for the writer.
    pub fn queued(&self) {
        self.0.waiting.fetch_add(1, Ordering::AcqRel);
    }

    /// The writer has sent one that waited.
    pub fn sent(&self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether nothing waits to be sent, so that the counts are complete.
    pub fn settled(&self) -> bool {
        self.0.waiting.load(Ordering::Acquire) == 0
    }

    /// What has been counted so far.
    pub fn read(&self) -> Traffic {
        Traffic {
            messages: self.0.messages.load(Ordering::Relaxed),
            payload_bytes: self.0.payload_bytes.load(Ordering::Relaxed),
            wire_bytes: self.0.wire_bytes.load(Ordering::Relaxed),
            busy_ns: self.0.busy_ns.load(Ordering::Relaxed),
            sent: lock(&self.0.sent).iter().map(|(cut, traffic)| (*cut, traffic.clone())).collect(),
            decoded_ns: lock(&self.0.decoded_ns).iter().map(|(cut, ns)| (*cut, *ns)).collect(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// The times after which silence counts as failure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timeouts {
    /// No worker finishes an action for this long.
    pub stall_s: f64,
    /// A peer sends nothing, not even a sign of life, for this long.
    pub silence_s: f64,
    /// Connecting, and the answers to the first frames.
    pub connect_s: f64,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts { stall_s: 300.0, silence_s: 20.0, connect_s: 20.0 }
    }
}

impl Timeouts {
    /// [`Self::stall_s`] as a duration.
    pub fn stall(&self) -> Duration {
        seconds(self.stall_s)
    }
    /// [`Self::silence_s`] as a duration.
    pub fn silence(&self) -> Duration {
        seconds(self.silence_s)
    }
    /// [`Self::connect_s`] as a duration.
    pub fn connect(&self) -> Duration {
        seconds(self.connect_s)
    }
}

/// A time-out from outside, kept within what clocks can add.
fn seconds(s: f64) -> Duration {
    Duration::try_from_secs_f64(s.clamp(0.05, 1e7)).unwrap_or(Duration::from_secs(300))
}
